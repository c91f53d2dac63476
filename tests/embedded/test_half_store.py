"""Half messages that the broker keeps by itself."""

import sqlite3
from contextlib import closing

import pytest
from txnbridge_embedded.client.store import now_ms
from txnbridge_embedded.write.staged_messages import partition_of

from tests.embedded.kit import read, rows, values
from tests.embedded.test_writer import failing
from txnbridge.errors import DeadlineExceeded, InvalidOption, NotFound, StorageFailed
from txnbridge.spi import Deadline, Decision, Half, HalfMessage, Outcome

MESSAGES = (
    HalfMessage("orders", b"1", b"key", (("h", b"\xff"), ("h", b""))),
    HalfMessage("audit", None, None, (), timestamp=7),
    HalfMessage("orders", b"", None, (), 0),
)


def half_of(transaction="t", group="g", messages=MESSAGES, check_in_ms=0, deadline_in_ms=0):
    now = now_ms()
    return Half(group, transaction, messages, now + check_in_ms, now + deadline_in_ms)


def put(broker, **settings):
    store = broker.half_store()
    store.put(half_of(**settings), Deadline(5))
    return store


def test_a_half_is_invisible_until_it_is_committed_and_then_comes_whole(broker):
    broker.admin.create_topic("orders", 3, Deadline(5))
    halves = put(broker)
    assert values(broker, "orders") == []
    assert halves.end(half_of(), Decision.COMMIT, Deadline(5)) is Outcome.COMMITTED
    keyed, other = sorted(read(broker, "orders"), key=lambda m: m.key is None)
    assert (keyed.value, keyed.key, keyed.headers.raw) == (b"1", b"key", (("h", b"\xff"), ("h", b"")))
    assert keyed.partition == partition_of(b"key", 3)
    assert (other.value, other.partition) == (b"", 0)
    assert [(m.value, m.timestamp) for m in read(broker, "audit")] == [(None, 7)]
    assert rows(broker, "SELECT * FROM half_messages") == []


def test_storing_a_half_again_changes_nothing(broker):
    halves = put(broker)
    halves.put(half_of(messages=(HalfMessage("orders", b"other", None, ()),)), Deadline(5))
    halves.end(half_of(), Decision.COMMIT, Deadline(5))
    halves.put(half_of(), Deadline(5))
    assert len(values(broker, "orders")) == 2
    deadline = Deadline(0.1)
    assert (halves.checks("g", 10, deadline), deadline.expired) == ([], True)  # else a resolver asks without a pause


def test_the_same_transaction_may_have_a_half_in_each_group(broker):
    halves = put(broker, group="one")
    put(broker, group="other")
    halves.end(half_of(group="one"), Decision.ABORT, Deadline(5))
    assert halves.end(half_of(group="other"), Decision.COMMIT, Deadline(5)) is Outcome.COMMITTED


def test_a_half_that_could_not_be_published_is_refused_before_it_is_stored(opened):
    broker = opened(create_topics=0, max_message_bytes=10)
    with pytest.raises(NotFound):
        put(broker)
    broker.admin.create_topic("orders", 1, Deadline(5))
    with pytest.raises(InvalidOption):
        put(broker, messages=(HalfMessage("orders", b"1", None, ()), HalfMessage("orders", bytes(11), None, ())))
    assert rows(broker, "SELECT * FROM halves") == []


def test_a_half_is_asked_about_when_it_is_due_and_by_one_asker_at_a_time(opened):
    broker, other = opened(), opened()
    halves = put(broker, transaction="due")
    put(broker, transaction="later", check_in_ms=60_000)
    put(broker, transaction="elsewhere", group="another")
    [lent] = halves.checks("g", 10, Deadline(5))
    assert (lent.transaction, lent.checks, lent.group) == ("due", 1, "g")
    assert [m._replace(headers=tuple(m.headers)) for m in lent.messages] == list(MESSAGES)
    assert other.half_store().checks("g", 10, Deadline(0.1)) == []


def test_no_more_halves_are_lent_than_asked_for(broker):
    for number in range(5):
        halves = put(broker, transaction=f"t{number}", check_in_ms=number - 10)
    assert [half.transaction for half in halves.checks("g", 2, Deadline(5))] == ["t0", "t1"]
    assert [half.transaction for half in halves.checks("g", 9, Deadline(5))] == ["t2", "t3", "t4"]


def test_a_half_message_that_is_absent_or_not_parked_is_not_found(broker):
    halves = put(broker)
    with pytest.raises(NotFound):
        halves.end(half_of("other"), Decision.COMMIT, Deadline(5))
    with pytest.raises(NotFound):
        halves.resume(half_of(), Deadline(5))  # it waits, it is not parked


@pytest.mark.parametrize("happens", [True, False])
def test_a_step_that_failed_in_the_middle_may_be_repeated(broker, happens):
    broker.admin.create_topic("orders", 1, Deadline(5))
    broker.admin.create_topic("audit", 1, Deadline(5))
    failing(broker.store, happens=happens)
    with pytest.raises(StorageFailed):
        put(broker)
    halves = put(broker)
    failing(broker.store, happens=happens)
    with pytest.raises(StorageFailed):
        halves.end(half_of(), Decision.COMMIT, Deadline(5))
    assert halves.end(half_of(), Decision.COMMIT, Deadline(5)) is Outcome.COMMITTED
    assert len(values(broker, "orders")) == 2


def test_with_the_clock_set_back_a_half_is_asked_about_early_and_the_doctor_tells(broker, clock):
    halves = put(broker)
    clock.ahead = -3_600_000
    assert [half.transaction for half in halves.checks("g", 10, Deadline(5))] == ["t"]
    assert halves.checks("g", 10, Deadline(0.1)) == []
    [advice] = [advice for advice in broker.admin.check(Deadline(60)) if "which was set back" in advice.text]
    assert advice.level == "warning"


def test_asking_for_due_half_messages_ends_at_its_deadline_while_the_file_is_locked(broker, path):
    halves = put(broker)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DeadlineExceeded):
            halves.checks("g", 10, Deadline(0.3))
        other.execute("ROLLBACK")
    assert len(halves.checks("g", 10, Deadline(5))) == 1
