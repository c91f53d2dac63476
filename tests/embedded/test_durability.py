"""Acknowledged transactions stay, and none is half there: after kill -9 anywhere, and on a full disk."""

import os
import random
import resource
import signal
import sqlite3
import time

import pytest
from txnbridge_embedded.broker import EmbeddedBroker
from txnbridge_embedded.client.store import FileConnection, Store

from tests.embedded import kit
from txnbridge.errors import DeliveryFailed, EvidenceLost, TransactionAborted
from txnbridge.spi import Deadline, Decision, Half, HalfMessage, Outcome, TokenState
from txnbridge.testing import Child, tell

LARGE = [bytes(3000) + b"%d" % number for number in range(12)]  # more than `spill_bytes` below


def sound(broker: EmbeddedBroker) -> bool:
    return kit.rows(broker, "PRAGMA integrity_check") == [("ok",)]


def commit_until_killed(path, topic):
    """Transactions of all sizes, each number told once it is committed; every fifth is aborted instead."""
    broker = kit.open_broker(path, spill_bytes=20_000, create_topics=3)
    writer = kit.open_writer(broker, "billing")
    number = 0
    while True:
        number += 1
        kit.begin(writer)
        for count in range(1, number % 7 + 2):
            writer.send(topic, b"%d %d" % (number, count), b"%d" % count, None, None, None)
        writer.send_many(f"{topic}-copy", [b"%d" % number] * (100 if number % 3 == 0 else 2))
        if number % 4 == 0:
            writer.send_many(f"{topic}-copy", [bytes(2000)] * 15)
        if number % 5 == 0:
            writer.abort(Deadline(10))
        else:
            writer.commit(Deadline(10))
            tell(number)


def check_after_kill(broker, topic, acknowledged):
    """All that the killed process was told is there; of the transaction that it was in, all or nothing."""
    found: dict[int, list[int]] = {}
    for message in kit.read(broker, topic):
        number, count = message.value.split()
        found.setdefault(int(number), []).append(int(count))
    copies = {int(value) for value in kit.values(broker, f"{topic}-copy") if value != bytes(2000)}
    assert set(acknowledged) <= set(found)
    assert set(found) - set(acknowledged) <= {max(acknowledged, default=0) + 1, max(acknowledged, default=0) + 2}
    assert all(number % 5 for number in found)
    assert {number: sorted(counts) for number, counts in found.items()} == {
        number: list(range(1, number % 7 + 2)) for number in found
    }
    assert copies == set(found)


def kill_at_random(path, rounds):
    chance = random.Random()
    watcher = None
    seen = {}
    try:
        for number in range(rounds):
            if number % 2:  # every other time nobody else has the file open, so that it is recovered
                watcher = kit.open_broker(path)
            topic = f"round-{number}"
            with Child(commit_until_killed, path, topic) as child:
                first = child.told()
                time.sleep(chance.uniform(0, 0.03))
                child.kill()
                acknowledged = [first, *left_over(child)]
            broker = watcher or kit.open_broker(path)
            kit.open_writer(broker, "billing").close()  # the next owner ends what was left open
            check_after_kill(broker, topic, acknowledged)
            seen[topic] = kit.rows(broker, "SELECT count(*) FROM messages")[0][0]
            assert kit.rows(broker, "SELECT * FROM undecided") == kit.rows(broker, "SELECT * FROM transactions") == []
            broker.close(Deadline(10))
            watcher = None
        broker = kit.open_broker(path)
        assert sound(broker)
        assert list(seen.values()) == sorted(seen.values())
        assert kit.rows(broker, "SELECT count(*) FROM messages")[0][0] == max(seen.values())
        broker.close(Deadline(10))
    finally:
        if watcher is not None:
            watcher.close(Deadline(10))


def left_over(child):
    """Yield the messages that the child sent before it died and that the test has not read yet."""
    while True:
        try:
            yield child.told(timeout=5)
        except AssertionError:  # the end of the line
            return


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [20, pytest.param(3000, marks=pytest.mark.full)])
def test_no_confirmed_transaction_is_lost_and_none_is_half_there_after_kills(path, kills):
    kill_at_random(path, kills)


def do_everything(path, last):
    """Use every part of the broker once, and die before statement number `last`. Each step is told when it is done."""
    statements = 0

    def count(_):
        nonlocal statements
        statements += 1
        if statements == last:
            os.kill(os.getpid(), signal.SIGKILL)

    connect = Store.connect

    def connect_and_count(store, **options) -> FileConnection:
        connection = connect(store, **options)
        connection.set_trace_callback(count)
        return connection

    pytest.MonkeyPatch().setattr(Store, "connect", connect_and_count)  # for the rest of this process
    broker = kit.open_broker(path, spill_bytes=10_000, create_topics=2)
    writer = kit.open_writer(broker, "billing")
    for name, values_sent, end in (
        ("small", [b"1", b"2"], writer.commit),
        ("large", LARGE, writer.commit),
        ("aborted", LARGE, writer.abort),
    ):
        kit.begin(writer)
        writer.send_many(name, values_sent)
        kit.send(writer, f"{name}-copy", *values_sent)
        end(Deadline(10))
        tell((name, None))
    for name, end_by_token in (("prepared", broker.commit), ("given-up", broker.abort)):
        preparing = kit.open_preparing(broker, "billing")
        transaction = kit.begin(preparing, prepare=True)
        preparing.send_many(name, LARGE)
        preparing.prepare(Deadline(10))
        token = kit.token_of(broker, preparing, transaction, prepared=True)
        preparing.close()
        tell((f"{name} token", token))
        end_by_token(token, kit.NO_LEDGER, Deadline(10))
        tell((name, None))
    publisher = broker.publisher("import", Deadline(10))
    for sequence in range(3):
        publisher.send("published", b"%d" % sequence, None, None, 0, None, sequence, Deadline(10))
        publisher.flush(Deadline(10))
        tell(("published", sequence))
    publisher.close(Deadline(10))
    log = broker.decision_log("default", Deadline(10))
    for number in range(3):
        log.append(b"%d" % number, Deadline(10))
        tell(("decided", number))
    halves = broker.half_store()
    assert halves is not None
    messages = [HalfMessage("half", b"1", None, ()), HalfMessage("half", b"2", None, ())]
    half = halves.put(Half("g", "t", messages, 0, 0), Deadline(10))
    tell(("half stored", None))
    halves.end(half, Decision.COMMIT, Deadline(10))
    tell(("half", None))
    broker.admin.delete_topic("large-copy", Deadline(10))
    tell(("deleted", None))
    broker.close(Deadline(10))
    tell(("statements", statements))


def check_everything(path, told):
    broker = kit.open_broker(path, spill_bytes=10_000, create_topics=2)
    try:
        kit.open_writer(broker, "billing")
        for name in ("prepared", "given-up"):
            end_as_told(broker, name, told)
        for found in broker.admin.transactions(Deadline(10)):  # prepared, and its process died before it told anybody
            assert found.state == "prepared"
            assert broker.admin.end(found.transaction, Decision.ABORT, Deadline(10)) is Outcome.ABORTED
        for name, whole in (("small", [b"1", b"2"]), ("large", LARGE), ("prepared", LARGE), ("half", [b"1", b"2"])):
            assert all_of(broker, name) in ([], sorted(whole))
            assert all_of(broker, name) == sorted(whole) or name not in told
        assert all_of(broker, "small-copy") == all_of(broker, "small")
        assert all_of(broker, "large-copy") in ([], all_of(broker, "large"))
        assert all_of(broker, "large-copy") == ([] if "deleted" in told else all_of(broker, "large-copy"))
        for name in ("aborted", "aborted-copy", "given-up"):
            assert all_of(broker, name) == []
        check_publisher(broker, told)
        check_log(broker, told)
        check_half(broker, told)
        broker.admin.check(Deadline(10))
        assert kit.rows(broker, "SELECT * FROM undecided") == kit.rows(broker, "SELECT * FROM garbage") == []
        assert kit.rows(broker, "SELECT * FROM transactions WHERE ended_at IS NULL") == []
        kit.commit(kit.open_writer(broker), "after", b"marker")
        assert all_of(broker, "after") == [b"marker"]
        assert sound(broker)
    finally:
        broker.close(Deadline(10))


def all_of(broker, topic):
    return sorted(kit.values(broker, topic))


def end_as_told(broker, name, told):
    """Check that any holder of the token can end the transaction, and finds the outcome that was told."""
    if f"{name} token" not in told:
        return
    token = told[f"{name} token"]
    wanted = Outcome.COMMITTED if name == "prepared" else Outcome.ABORTED
    state = broker.status(token, kit.NO_LEDGER, Deadline(10)).state
    assert state is (TokenState(wanted.value) if name in told else state)
    assert state in (TokenState.PREPARED, TokenState(wanted.value))
    assert (broker.commit if name == "prepared" else broker.abort)(token, kit.NO_LEDGER, Deadline(10)) is wanted
    told[name] = None


def check_publisher(broker, told):
    published = [int(value) for value in kit.values(broker, "published")]
    assert published == list(range(len(published)))
    assert len(published) > told.get("published", -1)
    last = broker.publisher("import", Deadline(10)).last_sequence("published", Deadline(10))
    assert last == (published[-1] if published else None)


def check_log(broker, told):
    records = [record for _, record in broker.decision_log("default", Deadline(10)).read(None, None, Deadline(10))]
    assert records == [b"%d" % number for number in range(len(records))]
    assert len(records) > told.get("decided", -1)


def check_half(broker, told):
    if "half stored" in told:
        halves = broker.half_store()
        assert halves.end(Half("g", "t", (), 0, 0), Decision.COMMIT, Deadline(10)) is Outcome.COMMITTED
        assert all_of(broker, "half") == [b"1", b"2"]


def kill_before_statement(folder, number):
    """Returns what the child told; all of it if it was not killed."""
    path = folder / f"{number}.db"
    with Child(do_everything, path, number) as child:
        told = dict(left_over(child))
    check_everything(path, told)
    for leftover in folder.glob(f"{number}.db*"):
        leftover.unlink()
    return told


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.full)])  # with another beginning each time
def test_a_process_may_die_before_any_statement(tmp_path, step):
    count = kill_before_statement(tmp_path, 0)["statements"]
    assert count > 150
    for number in range(random.randrange(1, step + 1), count + 1, step):
        assert "statements" not in kill_before_statement(tmp_path, number)


def fill(writer, topic, size):
    """Commit until there is no more room; how many were committed, and the error."""
    committed = 0
    while True:
        try:
            kit.commit(writer, topic, *[bytes(size)] * 10)
        except TransactionAborted as error:
            return committed, error
        committed += 1


def test_a_bound_of_the_file_aborts_a_transaction_that_does_not_fit_and_spares_the_rest(opened):
    broker = opened(max_bytes=4 << 20)
    writer = kit.open_writer(broker)
    committed, error = fill(writer, "orders", 10_000)
    assert isinstance(error, DeliveryFailed)
    assert "no space" in str(error) and isinstance(error.__cause__, sqlite3.OperationalError)
    assert len(kit.values(broker, "orders")) == committed * 10 > 0
    assert sum(map(len, kit.values(broker, "orders"))) < 4 << 20
    broker.admin.delete_topic("orders", Deadline(10))
    assert fill(writer, "audit", 10_000)[0] > committed // 2  # the same writer, now that there is room
    assert sound(broker)


def test_a_large_transaction_that_does_not_fit_leaves_nothing(opened):
    broker = opened(max_bytes=4 << 20, spill_bytes=100_000)
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"first")
    kit.begin(writer)
    with pytest.raises(DeliveryFailed, match="no space"):
        writer.send_many("orders", (bytes(10_000) for _ in range(1000)))
    with pytest.raises(DeliveryFailed):
        writer.commit(Deadline(10))
    kit.commit(writer, "orders", b"last")
    assert kit.values(broker, "orders") == [b"first", b"last"]
    assert kit.rows(broker, "SELECT * FROM undecided") == kit.rows(broker, "SELECT * FROM transactions") == []


def test_a_prepared_transaction_that_does_not_fit_is_not_prepared(opened):
    broker = opened(max_bytes=4 << 20)
    writer = kit.open_preparing(broker)
    transaction = kit.begin(writer, prepare=True)
    writer.send_many("orders", [bytes(10_000)] * 500)
    with pytest.raises(DeliveryFailed, match="no space"):
        writer.prepare(Deadline(10))
    with pytest.raises(EvidenceLost):
        broker.commit(kit.token_of(broker, writer, transaction, prepared=True), kit.NO_LEDGER, Deadline(10))
    kit.commit(kit.open_writer(broker), "orders", b"marker")
    assert kit.values(broker, "orders") == [b"marker"]


def test_a_prepared_transaction_can_be_ended_on_a_full_disk(opened):
    broker = opened(max_bytes=4 << 20)
    tokens = []
    for name in ("kept", "dropped"):
        writer = kit.open_preparing(broker)
        transaction = kit.begin(writer, prepare=True)
        writer.send_many(name, [bytes(10_000)] * 10)
        writer.prepare(Deadline(10))
        tokens.append(kit.token_of(broker, writer, transaction, prepared=True))
    fill(kit.open_writer(broker), "orders", 1000)
    fill(kit.open_writer(broker), "orders", 1)
    assert broker.commit(tokens[0], kit.NO_LEDGER, Deadline(10)) is Outcome.COMMITTED
    assert broker.abort(tokens[1], kit.NO_LEDGER, Deadline(10)) is Outcome.ABORTED
    assert len(kit.values(broker, "kept")) == 10
    assert kit.values(broker, "dropped") == []


def commit_against_limits(path, step):
    """Commit while no file of this process may grow beyond a limit, which rises by `step`; what came of each."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    broker = kit.open_broker(path)
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"first")
    outcomes = []
    for number in range(40):
        size = os.stat(f"{path}-wal").st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + number * step, hard))
        kit.begin(writer, "orders", *[b"%d" % number + bytes(5_000)] * 20)
        try:
            writer.commit(Deadline(10))
            outcomes.append("committed")
        except TransactionAborted as error:
            outcomes.append(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        kit.commit(writer, "between", b"%d" % number)  # there is room again: the same writer goes on
    writer.close()
    broker.close(Deadline(10))
    return outcomes


@pytest.mark.parametrize("step", [4096, 4120, 7001, 16384, 16408])
def test_a_file_that_may_not_grow_aborts_a_transaction_that_does_not_fit_and_spares_the_rest(path, step):
    with Child(commit_against_limits, path, step) as child:
        outcomes = child.result()
    assert set(outcomes) == {"DeliveryFailed", "committed"}
    broker = kit.open_broker(path)
    found = [int(value.rstrip(b"\0")) for value in kit.values(broker, "orders")[1:]]
    assert found == [number for number, outcome in enumerate(outcomes) if outcome == "committed" for _ in range(20)]
    assert [int(value) for value in kit.values(broker, "between")] == list(range(40))
    assert sound(broker)
    broker.close(Deadline(10))
