"""Topics, retention, and the doctor."""

import pytest
from txnbridge_embedded.client.schema import MAX_PARTITION_ID
from txnbridge_embedded.settings import Timing
from txnbridge_embedded.write import retention

from tests.embedded.kit import (
    NO_LEDGER,
    begin,
    busy,
    commit,
    execute,
    offsets,
    open_preparing,
    open_writer,
    prepare,
    rows,
    values,
)
from tests.embedded.test_writer import failing
from tests.failing import on_call
from txnbridge.errors import DeadlineExceeded, EvidenceLost, InvalidOption, NotFound, TransactionTimedOut
from txnbridge.spi import Begin, Deadline, Decision, Outcome, Writer


def create(broker, name="orders", partitions=1, **kept):
    return broker.admin.create_topic(name, partitions, Deadline(5), **kept)


@pytest.mark.parametrize(
    "asked", [{"partitions": 2}, {"partitions": 3, "retention_seconds": 1}, {"partitions": 3, "retention_bytes": 1}]
)
def test_a_topic_that_is_there_already_and_differs_is_refused(broker, asked):
    create(broker, partitions=3)
    with pytest.raises(InvalidOption, match="exists already, with 3 partitions"):
        create(broker, **asked)


@pytest.mark.parametrize("partitions", [0, 1 << 23])
def test_a_topic_that_cannot_be_is_refused(broker, partitions):
    with pytest.raises(InvalidOption):
        create(broker, partitions=partitions)
    assert broker.admin.topics(Deadline(5)) == []


def test_a_file_that_has_given_all_its_partition_ids_makes_no_more_topics(broker):
    create(broker)
    execute(broker, "UPDATE sqlite_sequence SET seq = ? WHERE name = 'partitions'", MAX_PARTITION_ID - 1)
    create(broker, "last")
    with pytest.raises(InvalidOption, match="at most"):
        create(broker, "one too many")
    assert [topic.name for topic in broker.admin.topics(Deadline(5))] == ["last", "orders"]


def test_a_transaction_that_is_not_there_cannot_be_ended(broker):
    with pytest.raises(NotFound, match="nobody"):
        broker.admin.end("nobody", Decision.ABORT, Deadline(5))


@pytest.mark.parametrize(("prepares", "late"), [(False, False), (True, False), (True, True)])
def test_a_transaction_that_leaves_its_open_state_before_its_abort_is_not_called_aborted(opened, clock, prepares, late):
    """A large transaction keeps the lock while it is stored, and an administrator's abort waits for that long."""
    ending: list[Writer] = []

    def end(event):
        if event.name == "step:decide" and event.phase == "before" and ending:
            clock.ahead = 0
            getattr(ending.pop(), "prepare" if prepares else "commit")(Deadline(5))

    broker = opened(spill_bytes=100, listener=end)
    writer = open_preparing(broker) if prepares else open_writer(broker)
    transaction = begin(writer, "orders", bytes(200), prepare=prepares)
    ending.append(writer)
    if late:  # its deadline passes while it is prepared, and moves
        clock.ahead = 3_600_000
        assert [each.state for each in broker.admin.transactions(Deadline(5))] == ["prepared"]
        return
    if prepares:
        assert broker.admin.end(transaction, Decision.ABORT, Deadline(5)) is Outcome.ABORTED
    else:
        with pytest.raises(EvidenceLost):
            broker.admin.end(transaction, Decision.ABORT, Deadline(5))
    assert not ending
    assert values(broker, "orders") == ([] if prepares else [bytes(200)])
    assert broker.admin.transactions(Deadline(5)) == []


def test_internal_topics_are_told_apart(broker):
    create(broker, "_txnbridge-half")
    create(broker)
    assert [(t.name, t.internal) for t in broker.admin.topics(Deadline(5))] == [
        ("_txnbridge-half", True),
        ("orders", False),
    ]


def test_the_bounds_of_a_topic_are_not_held_back_by_a_transaction_past_its_deadline(broker):
    prepare(broker, "orders", b"1", hold=600)
    prepare(broker, "orders", b"2", hold=600)
    commit(open_writer(broker), "orders", b"3")
    assert broker.admin.bounds(["orders"], Deadline(5)) == {("orders", 0): ((0,), (0,))}
    execute(broker, "UPDATE transactions SET deadline_at = 0 WHERE number = (SELECT min(number) FROM undecided)")
    assert broker.admin.bounds(["orders"], Deadline(5)) == {("orders", 0): ((0,), (1,))}


def test_a_deleted_topic_is_gone_with_its_messages_and_a_new_one_starts_empty(broker):
    writer = open_writer(broker)
    commit(writer, "orders", b"1", b"2")
    commit(writer, "audit", b"3")
    broker.admin.delete_topic("orders", Deadline(5))
    assert [t.name for t in broker.admin.topics(Deadline(5))] == ["audit"]
    assert rows(broker, "SELECT count(*) FROM messages") == [(1,)]
    commit(writer, "orders", b"new")
    assert (values(broker, "orders"), offsets(broker, "orders")) == ([b"new"], [0])
    assert values(broker, "audit") == [b"3"]
    with pytest.raises(NotFound):
        broker.admin.delete_topic("nowhere", Deadline(5))


@pytest.mark.parametrize("late", [False, True])
def test_the_messages_of_a_deleted_topic_that_were_left_are_removed_by_the_doctor(opened, late):
    broker = opened(timing=Timing(removed_rows=1))
    commit(open_writer(broker), "orders", b"1", b"2")
    if not late:
        failing(broker.store, happens=False, number=2)  # behind the deletion, where the messages are removed
    broker.admin.delete_topic("orders", Deadline(0 if late else 5))
    commit(open_writer(broker), "orders", b"new")
    assert values(broker, "orders") == [b"new"]
    assert rows(broker, "SELECT count(*) FROM messages") == [(2,)]
    opened().admin.check(Deadline(5))
    assert rows(broker, "SELECT count(*) FROM messages") == [(1,)]
    assert rows(broker, "SELECT * FROM garbage") == []


def trim(broker, name="orders"):
    """Remove what is too much, and return in how many pieces."""
    connection = broker.store.connect()
    topic = broker.store.topic(connection, name)
    pieces = 1
    while not retention.trim(broker.store, connection, topic, Deadline(5)):
        pieces += 1
    connection.close()
    return pieces


def test_messages_older_than_the_retention_go_and_younger_ones_stay(broker, clock):
    create(broker, retention_seconds=3600)
    writer = open_writer(broker)
    for number in range(10):
        commit(writer, "orders", b"%d" % number)
        clock.ahead += 600_000
    trim(broker)
    assert values(broker, "orders") == [b"4", b"5", b"6", b"7", b"8", b"9"]
    assert offsets(broker, "orders")[0] == 4
    clock.ahead += 3_600_000 + 60_000
    trim(broker)
    assert values(broker, "orders") == []
    commit(writer, "orders", b"next")
    assert offsets(broker, "orders") == [10]


def test_messages_beyond_the_size_go_and_at_least_that_much_stays(broker):
    create(broker, retention_bytes=10_000)
    writer = open_writer(broker)
    for number in range(100):
        commit(writer, "orders", b"%03d" % number + bytes(497))
    broker.abort(prepare(broker, "orders", *[bytes(5000)] * 4), NO_LEDGER, Deadline(5))
    trim(broker)
    found = values(broker, "orders")
    assert [value[:3] for value in found] == [b"%03d" % number for number in range(100 - len(found), 100)]
    assert 20 <= len(found) <= 24  # the size, and up to a sixteenth more for each of two marks


def test_a_topic_without_retention_keeps_all_and_costs_no_marks(broker, clock):
    writer = open_writer(broker)
    commit(writer, "orders", b"1")
    clock.ahead += 10**12
    trim(broker)
    assert values(broker, "orders") == [b"1"]
    assert rows(broker, "SELECT * FROM marks") == []


def test_retention_stops_before_the_first_undecided_message(broker, clock):
    create(broker, retention_seconds=1)
    writer = open_writer(broker)
    commit(writer, "orders", b"old")
    token = prepare(broker, "orders", b"prepared")
    commit(writer, "orders", b"behind")
    clock.ahead += 10**8  # a day: it does not expire
    trim(broker)
    assert rows(broker, "SELECT count(*) FROM messages") == [(2,)]
    broker.commit(token, NO_LEDGER, Deadline(5))
    assert values(broker, "orders") == [b"prepared", b"behind"]
    trim(broker)
    assert values(broker, "orders") == []


@pytest.mark.parametrize("stopped", [False, True])
def test_a_group_that_has_read_every_message_lost_none_behind_an_aborted_transaction(broker, clock, join, stopped):
    """Retention goes beyond the offsets of the aborted transaction; no message of the group is there."""
    create(broker, retention_seconds=3600)
    commit(open_writer(broker), "orders", b"read")
    member = join("orders")
    member.ack(*member.take(1))
    broker.abort(prepare(broker, "orders", b"aborted", b"aborted"), NO_LEDGER, Deadline(5))
    if stopped:
        member.close()
    else:
        assert member.poll() == []
    clock.ahead += 2 * 3_600_000
    trim(broker)
    commit(open_writer(broker), "orders", b"new")
    if stopped:
        member = join("orders")
    (new,) = member.take(1)
    member.ack(new)
    member.close()
    commit(open_writer(broker), "orders", b"last")
    assert (new.value, [each.value for each in join("orders").take(1)]) == (b"new", [b"last"])


def test_much_is_removed_in_pieces(opened, clock):
    broker = opened(timing=Timing(removed_rows=3))
    create(broker, retention_seconds=1)
    commit(open_writer(broker), "orders", *[b"x"] * 10)
    clock.ahead += 10**9
    assert trim(broker) == 4
    assert rows(broker, "SELECT first, next FROM partitions") == [(10, 10)]
    assert rows(broker, "SELECT * FROM messages") == []


def test_the_doctor_stops_removing_messages_at_its_deadline(opened, clock, monkeypatch):
    broker, deadline = opened(timing=Timing(removed_rows=3)), Deadline(1000)
    create(broker, retention_seconds=1)
    commit(open_writer(broker), "orders", *[b"x"] * 10)
    clock.ahead += 10**9
    on_call(monkeypatch, retention, "_trim_batch", lambda *_: setattr(deadline, "at", 0))
    broker.admin.check(deadline)
    assert rows(broker, "SELECT first, next FROM partitions") == [(3, 10)]


def test_writers_remove_expired_messages_while_they_write(opened, clock):
    broker = opened(timing=Timing(trim_interval=0))
    create(broker, retention_seconds=3600)
    writer = open_writer(broker)
    for number in range(5):
        commit(writer, "orders", b"%d" % number)
        clock.ahead += 3_000_000
    assert len(values(broker, "orders")) <= 3


def test_a_deleted_partition_is_not_trimmed(broker, clock):
    create(broker, retention_seconds=1)
    commit(open_writer(broker), "orders", b"1")
    connection = broker.store.connect()
    topic = broker.store.topic(connection, "orders")
    broker.admin.delete_topic("orders", Deadline(5))
    assert retention.trim(broker.store, connection, topic, Deadline(5))
    connection.close()


def findings(broker, level):
    return {(advice.subject, advice.text) for advice in broker.admin.check(Deadline(30)) if advice.level == level}


def test_the_doctor_lists_transactions_that_hold_readers_back_and_how_to_end_them(broker):
    token = prepare(broker, "orders", b"1")
    [advice] = [a for a in broker.admin.check(Deadline(5)) if a.level == "warning"]
    assert token.transaction in advice.subject
    assert f"txnbridge transactions commit (or abort) {token.transaction} --yes --reason TEXT" in advice.remedy


def test_the_doctor_ends_a_transaction_past_its_deadline_and_says_so(broker):
    broker.admin.create_topic("orders", 1, Deadline(5))
    writer = open_writer(broker)
    begin(writer, "orders", b"1", timeout=0.001)
    broker.admin.create_topic("audit", 1, Deadline(5))
    execute(
        broker, "INSERT INTO transactions(id, host, state, begun_at, deadline_at) VALUES ('dead', 'h', 'open', 1, 2)"
    )
    assert findings(broker, "warning") == {("transactions", "1 past their deadline were aborted just now")}
    assert findings(broker, "warning") == set()


def test_the_doctor_names_what_weakens_a_promise(opened, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20})())
    broker = opened(durability="survives-process-kill-only", timing=Timing(long_wal_bytes=0))
    assert {subject for subject, _ in findings(broker, "warning")} == {"durability", "disk", "log"}


def test_the_doctor_tells_that_the_file_cannot_be_written(broker):
    prepare(broker, "orders", b"1")
    execute(broker, "UPDATE transactions SET deadline_at = 1")
    with busy(broker):
        found = [a for a in broker.admin.check(Deadline(0.2)) if a.level == "problem"]
    assert [advice.subject for advice in found] == ["writing"]


def test_the_doctor_stops_at_its_deadline_in_a_file_that_is_too_large_for_it(opened):
    broker = opened(timing=Timing(check_instructions=1))
    commit(open_writer(broker), "orders", b"1")
    deadline = Deadline(1000)
    deadline.at = 0
    with pytest.raises(DeadlineExceeded, match="looking through all of"):
        broker.admin.check(deadline)


@pytest.mark.parametrize("how", ["create", "grow", "send"])
def test_more_partitions_than_there_is_time_to_make_hold_nobody_up_beyond_the_deadline(opened, how):
    millions = 4_000_000
    broker = opened(create_topics=millions)
    if how == "grow":
        broker.admin.create_topic("orders", 1, Deadline(5))
    with pytest.raises((DeadlineExceeded, TransactionTimedOut)):
        if how == "create":
            broker.admin.create_topic("orders", millions, Deadline(0.05))
        elif how == "grow":
            broker.admin.grow_topic("orders", millions, Deadline(0.05))
        else:
            writer = open_writer(broker)
            writer.begin(Begin("t", Deadline(0.05), False, None))
            writer.send("orders", b"1", None, None, None, None)
    assert rows(broker, "SELECT count(*) <= 1 FROM partitions") == [(1,)]
