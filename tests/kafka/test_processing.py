"""Processors whose partitions come and go: every message is passed on once, whatever protocol the group has."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import eventually, seen, send, take, values
from txnbridge_conformance.plugin import NewTopic

import txnbridge
from tests.kafka.kit import configure, plain_admin
from txnbridge import Bridge, Conflict, Fenced, Message, Processor, Transaction
from txnbridge.testing import recorded

MESSAGES = 600
PARTITIONS = 4
PROTOCOLS = {
    "cooperative": {"assignment": "cooperative-sticky"},
    "eager": {"assignment": "range"},
    "by the broker": {"group_protocol": "consumer"},
}


@pytest.mark.parametrize("how", PROTOCOLS)
def test_every_message_is_passed_on_once_while_members_come_and_go(kafka_broker, bridge, new_topic, group, how):
    source, target = new_topic(PARTITIONS), new_topic()

    @contextmanager
    def member() -> Iterator[Processor]:
        with (
            txnbridge.connect(kafka_broker.url, writers=1, kafka=PROTOCOLS[how]) as own,
            own.processor(
                source, group=group, each=lambda m, txn: txn.send(target, m.value), max_messages=10, max_wait=0.05
            ) as processor,
        ):
            yield processor

    with member():
        for number in range(3):
            with bridge.transaction() as txn:
                for each in range(number * MESSAGES // 3, (number + 1) * MESSAGES // 3):
                    txn.send(source, b"%d" % each, partition=each % PARTITIONS)
            with member():
                time.sleep(1)  # long enough to join, and to have something in hand when it leaves
        expected = {b"%d" % number for number in range(MESSAGES)}
        eventually(lambda: {m.value for m in bridge.read(target, 10 * MESSAGES)} == expected, "all are passed on")
    assert sorted(m.value for m in seen(bridge, target)) == sorted(expected)


@pytest.fixture
def static(kafka_broker: brokers.Broker) -> Iterator[Callable[..., Bridge]]:
    """A bridge whose consumer is a member that keeps its name when it restarts, within the client's own 45 seconds."""
    with ExitStack() as stack:

        def connect(name: str, **options: str) -> Bridge:
            own = txnbridge.connect(kafka_broker.url, writers=1, kafka={"group.instance.id": name, **options})
            return stack.enter_context(own)

        yield connect


def test_a_static_member_that_restarts_has_its_partitions_again_and_the_others_notice_nothing(
    static: Callable[..., Bridge], bridge: Bridge, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(2)

    def send_to(partition: int, value: bytes) -> None:
        with bridge.transaction() as txn:
            txn.send(topic, value, partition=partition)

    def moves() -> list[str]:
        return [event.name for event in events if event.name in ("reader.assign", "reader.revoke", "reader.lost")]

    with recorded() as events:
        stays = static("stays").consumer(topic, group)
        first = static("restarts").consumer(topic, group)
        eventually(lambda: (stays.poll(1, 0), first.poll(1, 0), len(first.positions()) == 1)[-1], "they share it")
        (mine,), (theirs,) = first.positions(), stays.positions()
        first.close()
        before = len(moves())
        send_to(mine[1], b"1")
        with static("restarts").consumer(topic, group) as again:
            (message,) = take(again, 1)
            assert (message.partition, message.value) == (mine[1], b"1")
            assert list(again.positions()) == [mine]
            send_to(theirs[1], b"2")
            assert values(take(stays, 1)) == [b"2"]
        assert moves()[before : before + 1] == ["reader.assign"]  # to the one that came back
        assert "reader.assign" not in moves()[before + 1 :]
        stays.close()


def test_the_older_of_two_static_members_with_one_name_stops_and_no_message_is_lost_or_doubled(
    static: Callable[..., Bridge], bridge: Bridge, new_topic: NewTopic, group: str
) -> None:
    source, target = new_topic(), new_topic()
    send(bridge, source, b"1", b"2")
    older = static("one")
    with older.consumer(source, group) as shut_out:
        with pytest.raises(Conflict), older.transaction() as txn:
            txn.send(target, b"never")
            txn.ack(take(shut_out, 2))
            newer = static("one").processor(source, group=group, each=lambda m, txn: txn.send(target, m.value))
            newer.run(until_idle=True)
        for _ in range(2):
            with pytest.raises(Fenced, match=r"this group\.instance\.id, so this one must stop"):
                take(shut_out, 1)
    assert values(seen(bridge, target)) == [b"1", b"2"]


def test_where_the_broker_shares_partitions_a_name_that_is_in_use_is_refused(static, bridge, topic, group):
    send(bridge, topic, b"1", b"2")
    first = static("one", group_protocol="consumer")
    with first.consumer(topic, group) as consumer:
        messages = take(consumer, 1)
        with static("one", group_protocol="consumer").consumer(topic, group) as second:
            with pytest.raises(Fenced, match=r"this group\.instance\.id, so this one must stop"):
                take(second, 1)
        with first.transaction() as txn:
            txn.ack(messages)
        assert values(take(consumer, 1)) == [b"2"]


@pytest.mark.parametrize("how", ["each", "batch"])
def test_an_output_above_its_topics_limit_is_a_failure_of_its_message_alone(
    kafka_broker: brokers.Broker, bridge: Bridge, new_topic: NewTopic, group: str, how: str
) -> None:
    """Only the broker knows a topic's own limit, and says so after the client has taken the message."""
    source, target, dead = new_topic(1), new_topic(1), new_topic(1)
    configure(plain_admin(kafka_broker), target, "max.message.bytes", "1000")
    inputs = [b"1", b"2", bytes(5000), b"3", b"4"]
    send(bridge, source, *inputs)

    def batch(messages: Sequence[Message], txn: Transaction) -> None:
        for message in messages:
            txn.send(target, message.value)

    handler: dict[str, Any] = {"batch": batch} if how == "batch" else {"each": lambda m, txn: batch([m], txn)}
    processor = bridge.processor(source, group=group, max_attempts=2, dead_letter=dead, backoff=(0.1, 0.1), **handler)
    processor.run(until_idle=True)
    assert values(seen(bridge, target)) == [b"1", b"2", b"3", b"4"]
    assert values(seen(bridge, dead)) == [bytes(5000)]
