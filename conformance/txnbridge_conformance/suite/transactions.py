"""Tests of transactions: a transaction is committed or aborted as a whole, and its true outcome is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from txnbridge import Abort, Bridge, Capability, DeadlineExceeded, InvalidState, NotFound, Outcome, TxnBridgeError
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import is_marker, patience, seen, send, take, values
from txnbridge_conformance.plugin import Connect, Much, NewTopic, RunChild, needs, proves


def test_a_committed_message_is_read(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"hello")
    assert txn.outcome is Outcome.COMMITTED
    assert values(seen(bridge, topic)) == [b"hello"]


def test_an_exception_in_the_block_aborts_and_is_not_hidden(bridge: Bridge, topic: str) -> None:
    with pytest.raises(ZeroDivisionError):
        with bridge.transaction() as txn:
            txn.send(topic, b"never")
            1 / 0  # noqa: B018
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


def test_raising_abort_leaves_the_block_quietly_and_aborts(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"never")
        raise Abort
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


def test_a_commit_inside_the_block_is_final(bridge: Bridge, topic: str) -> None:
    with pytest.raises(ZeroDivisionError):
        with bridge.transaction() as txn:
            txn.send(topic, b"hello")
            txn.commit()
            1 / 0  # noqa: B018
    assert txn.outcome is Outcome.COMMITTED
    assert values(seen(bridge, topic)) == [b"hello"]


def test_an_abort_inside_the_block_is_final(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"never")
        txn.abort()
        with pytest.raises(InvalidState, match="aborted"):
            txn.commit()
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


def test_an_ended_transaction_refuses_messages_and_says_why(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"hello")
    with pytest.raises(InvalidState, match="committed"):
        txn.send(topic, b"late")
    assert values(seen(bridge, topic)) == [b"hello"]


def test_a_transaction_tells_its_state_at_every_step(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as committed:
        committed.send(topic, b"hello")
        states = [(committed.state.name, committed.outcome)]
    with bridge.transaction() as aborted:
        aborted.abort()
    states += [(txn.state.name, txn.outcome) for txn in (committed, aborted)]
    assert states == [("OPEN", None), ("COMMITTED", Outcome.COMMITTED), ("ABORTED", Outcome.ABORTED)]


def test_an_empty_transaction_commits(bridge: Bridge) -> None:
    with bridge.transaction() as txn:
        pass
    assert txn.outcome is Outcome.COMMITTED


@proves(Capability.ATOMIC_TOPICS)
def test_all_topics_and_partitions_of_a_committed_transaction_are_seen(bridge: Bridge, new_topic: NewTopic) -> None:
    one, two = new_topic(), new_topic(partitions=3)
    with bridge.transaction() as txn:
        txn.send(one, b"0")
        for number in range(3):
            txn.send(two, b"%d" % number, partition=number)
    assert values(seen(bridge, one)) == [b"0"]
    assert sorted((m.partition, m.value) for m in seen(bridge, two)) == [(0, b"0"), (1, b"1"), (2, b"2")]


@needs(Capability.ATOMIC_TOPICS)
def test_no_topic_or_partition_of_an_aborted_transaction_is_seen(bridge: Bridge, new_topic: NewTopic) -> None:
    one, two = new_topic(), new_topic(partitions=3)
    with bridge.transaction() as txn:
        txn.send(one, b"never")
        for number in range(3):
            txn.send(two, b"never", partition=number)
        raise Abort
    assert values(seen(bridge, one) + seen(bridge, two)) == []


def test_transactions_of_one_bridge_at_the_same_time_are_apart(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as first, bridge.transaction() as second, bridge.transaction() as third:
        for number, txn in enumerate((first, second, third)):
            txn.send(topic, b"%d" % number)
        second.abort()
    assert [txn.outcome for txn in (first, second, third)] == [Outcome.COMMITTED, Outcome.ABORTED, Outcome.COMMITTED]
    assert sorted(m.value for m in seen(bridge, topic)) == [b"0", b"2"]


def test_threads_share_a_bridge_and_nothing_is_lost_or_doubled(connect: Connect, topic: str) -> None:
    bridge = connect(writers=3)

    def work(worker: int) -> None:
        for number in range(20):
            send(bridge, topic, b"%d/%d" % (worker, number))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    expected = sorted(b"%d/%d" % (worker, number) for worker in range(6) for number in range(20))
    assert sorted(m.value for m in seen(bridge, topic)) == expected


def test_a_message_that_cannot_be_sent_leaves_the_transaction_usable(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"before")
        with pytest.raises(NotFound):
            txn.send(topic, b"nowhere", partition=999)
        txn.send(topic, b"after")
    assert values(seen(bridge, topic)) == [b"before", b"after"]


def test_a_confirmed_commit_survives_the_death_of_its_process(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str
) -> None:
    run(programs.commit_one, txnbridge_url, topic, b"hello", kill="commit/after").stopped()
    assert values(seen(bridge, topic)) == [b"hello"]


@needs(Capability.DEADLINE)
def test_a_transaction_that_outlives_its_deadline_is_aborted(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as first:  # opens a writer, which may take longer than the next transaction's timeout
        first.abort()
    with pytest.raises(TxnBridgeError):
        with bridge.transaction(timeout=0.5) as txn:
            txn.send(topic, b"late")
            time.sleep(0.6)  # a little more than the transaction's timeout
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


def test_a_bridge_out_of_writers_makes_the_next_transaction_wait_no_longer_than_its_deadline(
    connect: Connect, topic: str
) -> None:
    bridge = connect(writers=1)
    with bridge.transaction(group_commit=False) as txn:
        txn.send(topic, b"hello")
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            bridge.transaction(timeout=0.2, group_commit=False)
        assert time.monotonic() - begun < patience()
    assert values(seen(bridge, topic)) == [b"hello"]


def test_a_transaction_left_unfinished_is_aborted_when_its_bridge_closes(
    connect: Connect, bridge: Bridge, topic: str
) -> None:
    closing = connect()
    txn = closing.transaction()
    txn.send(topic, b"never")
    with pytest.warns(ResourceWarning, match="left unfinished"):
        closing.close()
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


@proves(Capability.SURVIVES_BROKER_KILL)
def test_a_committed_message_survives_a_kill_of_the_broker(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, kill_broker: Callable[[], object]
) -> None:
    run(programs.commit_one, txnbridge_url, topic, b"hello", kill="commit/after").stopped()
    kill_broker()
    assert values(seen(bridge, topic)) == [b"hello"]


# --- isolation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_no_message_of_an_open_transaction_is_seen(bridge: Bridge, topic: str, much: Much, end: str) -> None:
    send(bridge, topic, b"before")
    assert values(seen(bridge, topic)) == [b"before"]
    many = much(b"open")
    with bridge.transaction() as txn:
        txn.send_many(topic, many)
        send(bridge, topic, b"behind")
        read = values(m for m in bridge.read(topic, limit=10_000) if not is_marker(m))
        assert {*read} <= {b"before", b"behind"}
        assert read[:1] == [b"before"]
        if end == "abort":
            txn.abort()
    delivered = values(seen(bridge, topic))
    assert {value: delivered.count(value) for value in delivered} == {
        b"before": 1,
        b"behind": 1,
        **({many[0]: len(many)} if end == "commit" else {}),
    }


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE)
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_reader_that_waits_before_an_undecided_transaction_skips_nothing(
    bridge: Bridge, topic: str, end: str
) -> None:
    send(bridge, topic, b"before")
    with bridge.consumer(topic) as consumer:
        with bridge.transaction(prepare=True) as txn:
            txn.send(topic, b"undecided")
        send(bridge, topic, b"behind")
        delivered = values(take(consumer, 1))
        delivered += values(consumer.poll(timeout=0))  # the open transaction may or may not block the reader
        assert b"undecided" not in delivered
        (bridge.commit if end == "commit" else bridge.abort)(str(txn.token))
        wanted = {b"before", b"behind", *([b"undecided"] if end == "commit" else [])}
        delivered += values(take(consumer, len(wanted) - len(delivered)))
    assert sorted(delivered) == sorted(wanted)  # type: ignore[type-var]


@proves(Capability.ISOLATION, chance=True)
def test_a_reader_sees_all_of_a_transaction_or_nothing(bridge: Bridge, topic: str) -> None:
    rounds, size = 12, 40

    def write() -> None:
        for number in range(rounds):
            send(bridge, topic, *[b"%d" % number] * size)

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        while not writing.done():
            read = values(bridge.read(topic, limit=10_000))
            assert {read.count(value) for value in read} <= {size}
        writing.result()
    assert len(seen(bridge, topic)) == rounds * size
