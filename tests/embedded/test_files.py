"""Files and places that are wrong: each is told apart, and none is harmed."""

import os
import pickle
import shutil
import sqlite3
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from txnbridge_embedded.client import files
from txnbridge_embedded.client.store import translate

from tests.embedded.kit import begin, commit, open_broker, open_writer, values
from txnbridge import errors
from txnbridge.spi import Deadline
from txnbridge.testing import Child


def test_a_file_is_made_and_found_again_and_another_one_is_another_cluster(opened, tmp_path):
    first = opened()
    cluster = first.cluster
    commit(open_writer(first), "orders", b"1")
    first.close(Deadline(5))
    second = opened(create=False)
    assert second.cluster == cluster
    assert values(second, "orders") == [b"1"]
    assert opened(tmp_path / "other.db").cluster != cluster


def make(path):
    broker = open_broker(path)
    broker.close(Deadline(10))
    return broker.cluster


def test_processes_that_make_a_file_at_the_same_time_make_one(path):
    with ExitStack() as stack:
        children = [stack.enter_context(Child(make, path)) for _ in range(6)]
        assert len({child.result() for child in children}) == 1


def test_a_file_that_must_not_be_made_is_not(opened, path):
    with pytest.raises(errors.NotFound, match="no broker's file"):
        opened(create=False)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "said"),
    [("", "is a folder"), ("missing/broker.db", "no folder .*/missing"), ("/dev/null", "not a plain file")],
)
def test_a_place_where_no_file_can_be_is_refused(opened, tmp_path, place, said):
    with pytest.raises(errors.InvalidOption, match=said):
        opened(tmp_path / place)


def test_a_file_of_something_else_is_refused_and_not_touched(opened, path):
    path.write_bytes(content := b"Dear diary, today nothing was committed. " * 100)
    with pytest.raises(errors.StorageFailed, match="not an SQLite database") as caught:
        opened()
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def alter(path: Path, *statements: str) -> bytes:
    """Let another program work on the file; return what the file is then."""
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("pragma", "said"),
    [
        ("application_id = 0", "another program"),
        ("application_id = 4711", "another program"),
        ("user_version = 1", "another program"),
        ("user_version = 3", "newer txnbridge"),
        ("user_version = 1", "no released txnbridge"),
    ],
)
def test_a_database_of_another_program_or_version_is_refused_and_not_touched(opened, path, pragma, said):
    if said == "another program":
        alter(path, "CREATE TABLE diary(day, text)")
    else:
        opened().close(Deadline(5))
    content, folder = alter(path, f"PRAGMA {pragma}"), set(path.parent.iterdir())
    with pytest.raises(errors.InvalidOption, match=said):
        opened()
    assert (path.read_bytes(), set(path.parent.iterdir())) == (content, folder)


@pytest.mark.parametrize("begun", [False, True])
def test_an_empty_file_becomes_a_brokers(opened, path, begun):
    path.touch()
    if begun:  # what remains of a process that dies after it set the journal mode and before it made the tables
        alter(path, "PRAGMA journal_mode = WAL")
    broker = opened()
    commit(open_writer(broker), "orders", b"1")
    assert values(broker, "orders") == [b"1"]


def test_a_file_whose_journal_mode_was_changed_is_set_right(opened, path):
    commit(open_writer(first := opened()), "orders", b"1")
    first.close(Deadline(5))
    alter(path, "PRAGMA journal_mode = DELETE")
    second = opened()
    commit(open_writer(second), "orders", b"2")
    assert values(second, "orders") == [b"1", b"2"]
    assert Path(f"{path}-wal").exists()


def damage(path: Path, first: int, length: int) -> None:
    with open(path, "r+b") as file:
        file.seek(first)
        file.write(os.urandom(length))


def test_a_damaged_header_is_told(opened, path):
    opened().close(Deadline(5))
    damage(path, 0, 64)
    with pytest.raises(errors.StorageFailed, match="not an SQLite database, or its header is damaged"):
        opened()


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_page_is_told_when_it_is_met_and_by_the_doctor_and_so_is_a_file_cut_short(opened, path, cut):
    first = opened()
    commit(open_writer(first), "orders", *[b"x" * 1000] * 200)
    first.close(Deadline(5))
    if cut:
        os.truncate(path, path.stat().st_size // 2)
    else:
        damage(path, path.stat().st_size - 8 * 16384, 8 * 16384)
    with pytest.raises(errors.StorageFailed, match=r"damaged: .*recover"):
        second = opened()  # cut short, it is refused here
        [problem] = [advice for advice in second.admin.check(Deadline(5)) if advice.level == "problem"]
        assert problem.subject == "file" and "restore a copy" in problem.remedy
        values(second, "orders")


@pytest.mark.parametrize("what", ["removed", "moved", "replaced"])
def test_a_transaction_into_a_file_that_was_removed_moved_or_replaced_is_aborted(opened, path, what):
    broker = opened()
    writer = open_writer(broker)
    commit(writer, "orders", b"1")
    begin(writer, "orders", b"2")
    if what == "removed":
        path.unlink()
    else:
        path.rename(path.with_name("elsewhere.db"))
    if what == "replaced":
        shutil.copy(path.with_name("elsewhere.db"), path)
    with pytest.raises(errors.TransactionAborted, match="removed, moved or replaced"):
        writer.commit(Deadline(5))


def open_as_nobody(path):
    """Open and commit as a user who owns nothing here (a superuser is refused nothing)."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setegid(65534)
        os.seteuid(65534)
    try:
        broker = open_broker(path)
    except errors.TxnBridgeError as error:
        return error
    broker.close(Deadline(5))
    return None


@pytest.fixture
def reachable(tmp_path_factory):
    """A folder that another user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="txnbridge-") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)
        os.chmod(folder, 0o777)


@pytest.mark.parametrize("of_folder", [0o777, 0o555, 0o000])
@pytest.mark.parametrize("of_file", [0o666, 0o444, 0o000])
def test_another_user_can_use_a_file_that_he_may_write_and_is_refused_any_other(reachable, of_file, of_folder):
    path = reachable / "broker.db"
    open_broker(path).close(Deadline(5))
    path.chmod(of_file)
    reachable.chmod(of_folder)
    with Child(open_as_nobody, path) as child:
        refused = child.result()
    assert (refused is None) == (of_file == 0o666 and of_folder == 0o777)
    if refused is not None:
        assert isinstance(refused, errors.AccessDenied), refused
        assert str(path) in str(refused) or str(reachable) in str(refused)


MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/share rw,relatime shared:2 master:3 - nfs4 server:/export rw,vers=4.2
31 22 0:41 / /mnt/share/local rw,relatime - xfs /dev/vdb rw
32 22 0:42 / /mnt/with\040space rw - cifs //server/share rw
33 22 0:43 / /mnt/hidden rw - nfs server:/old rw
34 22 0:44 / /mnt/hidden rw - ext4 /dev/vdc rw
35 22 0:45 / /mnt/sshfs rw - fuse.sshfs host:/ rw
""".strip()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x.db", "ext4"),
        ("/mnt/share/x.db", "nfs4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/shared/x.db", "ext4"),
        ("/mnt/share/local/deep/x.db", "xfs"),
        ("/mnt/with space/x.db", "cifs"),
        ("/mnt/hidden/x.db", "ext4"),
        ("/mnt/sshfs/x.db", "fuse.sshfs"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_the_newest(path, kind):
    assert files.mount_of(Path(path), MOUNTS)[0] == kind


def test_a_network_mount_is_refused_with_the_reason(opened, path, tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    with pytest.raises(errors.InvalidOption, match=r"network mount \(nfs4 at /mnt/share\)"):
        files.check_mount(Path("/mnt/share/x.db"), table)
    files.check_mount(Path("/mnt/share/local/x.db"), table)
    files.check_mount(Path("/mnt/share/x.db"), tmp_path / "not there")  # a system without such a table
    monkeypatch.setattr(files, "mount_of", lambda *_: ("nfs", "/mnt"))
    with pytest.raises(errors.InvalidOption, match="network mount"):
        opened()
    assert not path.exists()


def test_an_sqlite_that_is_too_old_is_refused():
    with pytest.raises(errors.BackendMissing, match=r"needs SQLite 3\.35.*has 3\.31\.1"):
        files.check_sqlite((3, 31, 1))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (errors.DeadlineExceeded, "BUSY PROTOCOL"),
        (errors.AccessDenied, "READONLY CANTOPEN_ISDIR"),
        (errors.StorageFailed, "IOERR_WRITE FULL CORRUPT NOTADB"),
        (errors.TxnBridgeError, "OK"),  # as without a code
    ],
)
def test_an_error_of_sqlite_is_known_by_its_code(names, kind):
    for name in names.split():
        failed = sqlite3.OperationalError("failed")
        failed.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}")
        error = translate(failed, "reading")
        assert isinstance(error, kind)
        assert type(pickle.loads(pickle.dumps(error))) is type(error)
