"""One file and many who want to write it: turns, waiting, and the log that must not grow for ever."""

import fcntl
import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from txnbridge_embedded.client.store import CHECKPOINT_BYTES

from tests.core.test_fork import in_child, outlive_parent
from tests.embedded.kit import begin, commit, open_broker, open_writer, rows, values
from tests.in_time import takes
from txnbridge.errors import DeadlineExceeded, InvalidState, TransactionTimedOut
from txnbridge.spi import Deadline
from txnbridge.testing import Child, tell


def hold(path, seconds, *pragmas):
    """Sit on the file, as a program of somebody else's might."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN EXCLUSIVE")
    tell("holding")
    time.sleep(seconds)
    tell(time.monotonic())
    connection.execute("ROLLBACK")
    connection.close()


def test_a_file_that_another_process_sits_on_is_waited_for(broker, path):
    writer = open_writer(broker)
    begin(writer, "orders", b"1", timeout=60)
    with Child(hold, path, 1.5) as child:
        child.told()
        writer.commit(Deadline(60))
        assert child.told() <= time.monotonic()
        child.result()
    assert values(broker, "orders") == [b"1"]


def test_no_call_waits_beyond_its_deadline_for_a_file_that_another_process_sits_on(opened, broker, path):
    writer = open_writer(broker)
    begin(writer, "orders", b"1")
    with Child(hold, path, 100) as child:
        child.told()
        assert f"fuser {path}" in str(takes(0.2, TransactionTimedOut, writer.commit))
        takes(0.2, DeadlineExceeded, lambda deadline: broker.admin.create_topic("audit", 1, deadline))
        takes(0.2, DeadlineExceeded, lambda deadline: open_writer(broker, timeout=deadline.seconds))
        assert values(broker, "orders") == []  # readers are not held up
    commit(writer, "orders", b"marker")
    assert values(broker, "orders") == [b"marker"]


def test_opening_a_file_that_is_locked_against_readers_ends_at_its_deadline(opened, path):
    opened().close(Deadline(5))
    with Child(hold, path, 60, "locking_mode = EXCLUSIVE", "journal_mode = DELETE") as child:  # as a backup may do
        child.told()
        with pytest.raises(DeadlineExceeded, match=str(path)):
            opened(timeout=0.3)
    assert opened().cluster


def wait_until_somebody_waits(path):
    """Return when somebody holds the turn, which is the sign that it waits for the lock."""
    with open(f"{path}-turn") as turn, suppress(BlockingIOError):
        while True:
            fcntl.flock(turn, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(0.001)


def commit_when_told(path):
    broker = open_broker(path)
    writer = open_writer(broker)
    tell("ready")
    while not os.path.exists(f"{path}-go"):
        time.sleep(0.001)
    commit(writer, "orders", b"patient")
    writer.close()
    broker.close(Deadline(10))


def test_a_writer_that_goes_on_at_once_does_not_overtake_one_of_another_process_that_waits(broker, path):
    store = broker.store
    eager = store.connect()
    commit(open_writer(broker), "orders", b"first")  # so that the topic is there
    with Child(commit_when_told, path) as child:
        assert child.told() == "ready"
        with store.writing(eager, Deadline(60), "writing"):
            Path(f"{path}-go").touch()
            wait_until_somebody_waits(path)
        with store.writing(eager, Deadline(60), "writing again"):
            found = eager.execute("SELECT value FROM messages").fetchall()
        child.result()
    eager.close()
    assert found == [(b"first",), (b"patient",)]


def test_a_paused_process_that_holds_the_turn_holds_no_writer_up(broker, path):
    descriptor = os.open(f"{path}-turn", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as if by a process that was paused right here
    commit(open_writer(broker), "orders", b"1")  # it has a deadline
    os.close(descriptor)
    assert values(broker, "orders") == [b"1"]


def log_bytes(path: Path) -> int:
    return os.stat(f"{path}-wal").st_size


def grow(writer, checkpoints):
    """Commit as many bytes as make the log be copied so often."""
    for _ in range(checkpoints * (CHECKPOINT_BYTES >> 20)):
        commit(writer, "orders", bytes(1 << 20))


def test_the_log_is_copied_and_begins_anew(broker, path):
    grow(open_writer(broker), 6)
    assert log_bytes(path) < 2 * CHECKPOINT_BYTES
    assert path.stat().st_size > 4 * CHECKPOINT_BYTES


def test_a_symbolic_link_leads_to_the_same_file_log_and_turn(opened, broker, path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(path)
    through = opened(link)
    assert through.cluster == broker.cluster
    grow(open_writer(through), 3)
    assert log_bytes(path) < 2 * CHECKPOINT_BYTES
    assert list(link.parent.iterdir()) == [link]


def test_a_reader_that_keeps_an_old_state_lets_the_log_grow_and_loses_nothing(broker, path):
    writer = open_writer(broker)
    commit(writer, "orders", b"first")
    slow = broker.store.connect()
    with broker.store.reading(slow, Deadline(5)):
        grow(writer, 2)
        assert slow.execute("SELECT count(*) FROM messages").fetchone() == (1,)
        grown = log_bytes(path)
        assert grown > 2 * CHECKPOINT_BYTES
    slow.close()
    grow(writer, 2)
    assert log_bytes(path) == grown  # it began anew in the same space
    assert rows(broker, "SELECT count(*) FROM messages") == [(1 + 4 * (CHECKPOINT_BYTES >> 20),)]


def test_the_log_is_copied_while_the_lock_is_held(broker, monkeypatch):
    """A copy that others may write beside is what damages files with older versions of SQLite."""
    other = broker.store.connect()
    tried = []
    real = broker.store._copy_log

    def copy():
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        tried.append(real())

    monkeypatch.setattr(broker.store, "_copy_log", copy)
    grow(open_writer(broker), 2)
    assert tried
    assert other.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
    other.close()


def test_a_log_that_cannot_be_copied_keeps_everything(broker):
    interrupted = []

    def refuse():
        interrupted.append(True)
        return 1

    connection = broker.store._connection
    connection.set_progress_handler(refuse, 1)  # its copying fails, as it would on a full disk
    writer = open_writer(broker)
    for number in range(20):
        commit(writer, "orders", b"%02d" % number + bytes(1 << 20))
    connection.set_progress_handler(None, 1)
    assert interrupted
    assert [value[:2] for value in values(broker, "orders")] == [b"%02d" % number for number in range(20)]


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("survives-process-kill-only", 1)])
def test_durability_decides_whether_the_disk_is_waited_for(opened, durability, synchronous):
    broker = opened(durability=durability)
    connection = broker.store.connect()
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    connection.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # 3.12 warns of forks in threaded programs
def test_a_forked_child_keeps_its_commits_when_its_parent_closes_the_file(broker, opened, path):
    def child():
        writer = open_writer(opened())
        yield
        commit(writer, "orders", b"1")

    def open_refused():
        with pytest.raises(InvalidState, match="spawn"):
            opened()

    with closing(broker.store.connect()) as connection, broker.store.reading(connection, Deadline(10)):
        assert in_child(open_refused) == 0  # SQLite's locks and mutexes of a connection in use are beyond repair
    assert outlive_parent(child, lambda: broker.close(Deadline(10))) == 0
    assert values(opened(), "orders") == [b"1"]
