"""Requests that arrive late do nothing to the transactions that follow: seen on the plain client, gone through ours.

The plain client is the broken variant here: each anomaly is first shown on it, so that a test which could no longer
bring one about would fail.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from txnbridge_conformance import faults
from txnbridge_conformance.observing import seen, send, take, values
from txnbridge_conformance.plugin import Connect

import txnbridge
from tests.inside import broker_of
from tests.kafka.kit import flush, opened_ahead, plain_producer, producer_of, writer_of
from txnbridge import Bridge, Outcome
from txnbridge.spi import Deadline
from txnbridge.testing import recorded

# What the plain client and ours wait for an answer before they send a request again.
PATIENCE_MS = 1500
PATIENCE: dict[str, Any] = {"socket.timeout.ms": str(PATIENCE_MS)}


def commit_plainly(producer: Producer, topic: str, value: bytes) -> None:
    producer.begin_transaction()
    producer.produce(topic, value)
    until_ok(producer, producer.commit_transaction)


def until_ok(producer: Producer, end: Callable[[float], object]) -> None:
    while True:
        try:
            end(30)
            return
        except KafkaException as error:
            if not error.args[0].retriable():
                raise
            producer.poll(0.05)


@pytest.fixture
def through(proxy: faults.Proxy) -> Iterator[Bridge]:
    """A bridge with one writer, whose requests the proxy can hold."""
    with txnbridge.connect(proxy.url, writers=1, kafka=PATIENCE) as bridge:
        yield bridge


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


HOW = ["the answer is late", "the connection drops"]


def hold_a_commit(proxy: faults.Proxy, how: str, commit: Callable[[], object]) -> faults.Hold:
    """Let a commit succeed while its first request is still on its way to the broker."""
    hold = proxy.hold(requests="EndTxn")
    committing = in_thread(commit)
    hold.wait()
    if how == "the connection drops":
        proxy.cut()
    committing.join(60)
    assert not committing.is_alive()
    return hold


@pytest.mark.parametrize("how", HOW)
def test_a_late_commit_half_commits_the_next_transaction_of_the_plain_client(proxy, bridge, topic, owner, how):
    producer = plain_producer(proxy, owner, **PATIENCE)
    commit_plainly(producer, topic, b"0")
    hold = hold_a_commit(proxy, how, lambda: commit_plainly(producer, topic, b"1"))
    producer.begin_transaction()
    producer.produce(topic, b"never")
    assert producer.flush(30) == 0
    hold.release()
    hold.answered()
    with suppress(KafkaException):
        producer.abort_transaction(30)
    assert b"never" in values(seen(bridge, topic))


@pytest.mark.parametrize("how", HOW)
def test_a_late_commit_does_nothing_to_our_next_transaction(proxy, through, bridge, topic, how):
    send(through, topic, b"0")
    hold = hold_a_commit(proxy, how, lambda: send(through, topic, b"1"))
    with through.transaction() as txn:
        txn.send_many(topic, [b"never" * 2_000] * 200)
        flush(txn)  # so that the broker has it
        hold.release()
        hold.answered()
        assert values(bridge.read(topic, limit=10)) == [b"0", b"1"]
        txn.abort()
    assert values(seen(bridge, topic)) == [b"0", b"1"]


@pytest.mark.parametrize("settings", [{"log_level": 3}, {"log_level": 5}, {}, {"client.id": "Connect to us"}], ids=str)
def test_no_wish_about_logs_blinds_the_shield(proxy, bridge, topic, settings):
    with txnbridge.connect(proxy.url, writers=1, kafka=settings) as through:
        send(through, topic, b"0")
        hold = hold_a_commit(proxy, "the connection drops", lambda: send(through, topic, b"1"))
        with through.transaction() as txn:
            txn.send(topic, b"never")
            flush(txn)
            hold.release()
            hold.answered()
            txn.abort()
    assert values(seen(bridge, topic)) == [b"0", b"1"]


def test_a_late_message_replaces_one_of_the_next_transaction_of_the_plain_client(proxy, bridge, topic, owner):
    producer = plain_producer(proxy, owner, **PATIENCE)
    commit_plainly(producer, topic, b"0")
    producer.begin_transaction()
    hold = proxy.hold(requests="Produce")
    producer.produce(topic, b"late")
    producer.poll(0)
    hold.wait()
    with suppress(KafkaException):
        producer.flush(PATIENCE_MS / 1000)
    until_ok(producer, producer.abort_transaction)
    second = proxy.hold(requests="Produce")
    producer.begin_transaction()
    producer.produce(topic, b"2")
    producer.poll(0)
    second.wait()
    hold.release()
    hold.answered()
    second.release()
    until_ok(producer, producer.commit_transaction)
    found = values(seen(bridge, topic))
    assert b"late" in found
    assert b"2" not in found


def test_a_late_message_is_unseen_and_replaces_none(proxy: faults.Proxy, through: Bridge, bridge: Bridge, topic: str):
    send(through, topic, b"0")
    with through.transaction(timeout=10) as txn:
        hold = proxy.hold(requests="Produce")
        txn.send(topic, b"late")
        producer_of(txn).poll(0)
        hold.wait()
        txn.abort()
    assert txn.outcome is Outcome.ABORTED
    second = proxy.hold(requests="Produce")
    with through.transaction() as txn:
        txn.send(topic, b"2")
        producer_of(txn).poll(0)
        second.wait()
        hold.release()
        hold.answered()
        second.release()
    assert values(seen(bridge, topic)) == [b"0", b"2"]


def test_a_late_acknowledgement_does_not_move_a_group_of_ours(proxy, through, bridge, topic, group):
    send(bridge, topic, b"1", b"2", b"3")
    with through.consumer(topic, group) as consumer:
        (first,) = take(consumer, 1)
        hold = proxy.hold(requests="TxnOffsetCommit")

        def acknowledge() -> None:
            with through.transaction() as txn:
                txn.ack(first)

        committing = in_thread(acknowledge)
        hold.wait()
        proxy.cut()
        committing.join(60)
        with through.transaction() as txn:
            (second,) = take(consumer, 1)
            txn.ack(second)
            writer_of(txn)._send_acks(Deadline(txn.deadline))
            hold.release()
            hold.answered()
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 1)) == [b"3"]


def test_a_transaction_is_prepared_while_a_late_request_of_the_one_before_is_held(proxy, through, bridge, topic):
    send(through, topic, b"0")
    hold = hold_a_commit(proxy, "the connection drops", lambda: send(through, topic, b"1"))
    with through.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    hold.release()
    hold.answered()
    assert values(bridge.read(topic, limit=10)) == [b"0", b"1"]
    assert bridge.commit(str(txn.token)) is Outcome.COMMITTED
    assert values(seen(bridge, topic)) == [b"0", b"1", b"prepared"]


def test_a_token_commits_no_transaction_that_a_late_request_began_behind_its_abort(proxy, through, bridge, topic):
    hold = proxy.hold(requests="AddPartitionsToTxn")
    cutting = in_thread(lambda: (hold.wait(), proxy.cut()))
    with through.transaction(prepare=True) as txn:
        txn.send(topic, b"1")
    cutting.join()
    assert bridge.abort(str(txn.token)) is Outcome.ABORTED
    hold.release()
    hold.answered()
    assert bridge.commit(str(txn.token)) is Outcome.ABORTED


def test_a_connection_that_never_was_made_costs_no_new_opening(connect: Connect, bridge: Bridge, topic: str) -> None:
    """A second address at which nobody listens is logged as a failure too, again and again."""
    with recorded() as events, txnbridge.connect(f"{bridge.url},127.0.0.1:1", writers=1) as dead:
        for number in range(20):
            send(dead, topic, b"%d" % number)
    assert [(event.name, event.phase) for event in events].count(("step:open", "after")) == 1


@pytest.mark.parametrize("hold", [None, 600.0], ids=["", "opened again for another hold"])
def test_a_late_opening_of_its_id_aborts_nothing_that_was_prepared(proxy, through, bridge, topic, hold):
    if hold is not None:  # one is opened ahead, for another time
        with through.transaction(prepare=True) as txn:
            txn.send(topic, b"before")
        assert bridge.commit(str(txn.token)) is Outcome.COMMITTED
        for opening in opened_ahead(broker_of(through)._pool):
            opening.join(60)
    held = proxy.hold(requests="InitProducerId")
    tokens: list[str] = []

    def prepare() -> None:
        with through.transaction(prepare=True, hold=hold) as txn:
            txn.send(topic, b"prepared")
        tokens.append(str(txn.token))

    preparing = in_thread(prepare)
    held.wait()
    proxy.cut()
    preparing.join(60)
    held.release()
    held.answered()
    assert bridge.commit(tokens[0]) is Outcome.COMMITTED
    assert values(seen(bridge, topic))[-1] == b"prepared"
