"""A topic that is deleted and made anew under its name is another topic: a position in the one says nothing there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition
from txnbridge_conformance.observing import eventually, seen, send, take, values
from txnbridge_conformance.plugin import NewTopic

from tests.renewed_topics import made_anew_again_and_again
from txnbridge import Bridge, Outcome, PositionLost

FEW = [b"old %d" % number for number in range(10)]
MORE = [b"new %d" % number for number in range(60)]


@pytest.fixture
def renew(bridge: Bridge) -> Callable[[str], None]:
    """Delete a topic and make it anew, with more messages than it had."""

    def renew(topic: str) -> None:
        bridge.admin.delete_topic(topic)
        eventually(lambda: topic not in [each.name for each in bridge.admin.topics()], "the topic is gone")
        bridge.admin.create_topic(topic)
        send(bridge, topic, *MORE)

    return renew


@pytest.mark.parametrize("grouped", [True, False], ids=["in a group", "alone"])
def test_a_reader_does_not_read_on_in_a_topic_that_was_made_anew_until_it_is_told_where(
    bridge: Bridge, topic: str, group: str, renew: Callable[[str], None], grouped: bool
) -> None:
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group if grouped else None) as consumer:
        old = take(consumer, 5)
        if grouped:
            with bridge.transaction() as txn:
                txn.ack(old)
        assert values(take(consumer, 5)) == FEW[5:]
        renew(topic)
        for _ in range(2):
            with pytest.raises(PositionLost, match="created again"):
                take(consumer, 1)
        consumer.seek({(topic, 0): (0,)})
        assert values(take(consumer, len(MORE))) == MORE


def test_messages_read_before_a_topic_was_recreated_are_not_acknowledged_in_the_new_one(
    bridge: Bridge, topic: str, group: str, renew: Callable[[str], None]
) -> None:
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer:
        old = take(consumer, 10)
        renew(topic)
        with pytest.raises(PositionLost, match="created again"):
            with bridge.transaction() as txn:
                txn.ack(old)
        assert txn.outcome is Outcome.ABORTED
        with pytest.raises(PositionLost, match="created again"):
            take(consumer, 1)
        consumer.seek({(topic, 0): (0,)})
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 20))
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 40)) == MORE[20:]


def test_a_processor_that_slept_stops_instead_of_skipping(
    bridge: Bridge, new_topic: NewTopic, group: str, renew: Callable[[str], None]
) -> None:
    source, target = new_topic(), new_topic()
    send(bridge, source, *FEW)

    def work(message, txn):
        if message.value == FEW[-1]:
            renew(source)
        txn.send(target, message.value)

    processor = bridge.processor(source, group=group, each=work, max_messages=5)
    with pytest.raises(PositionLost, match="created again"):
        processor.run(until_idle=True)
    assert values(seen(bridge, target)) == FEW[:5]


def test_a_position_acknowledged_in_a_deleted_topic_is_not_taken_for_one_in_the_new_topic(
    bridge: Bridge, topic: str, group: str, txnbridge_url: str
) -> None:
    """An acknowledgement may reach the broker just behind the renewal."""
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer, bridge.transaction() as txn:
        txn.ack(take(consumer, 5))
    servers = txnbridge_url.removeprefix("kafka://").partition("?")[0]
    client = Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False})
    (committed,) = client.committed([TopicPartition(topic, 0)], 30)
    assert committed.metadata
    other = committed.metadata[:-1] + ("0" if committed.metadata[-1] != "0" else "1")
    client.commit(offsets=[TopicPartition(topic, 0, committed.offset, other)], asynchronous=False)
    client.close()
    with bridge.consumer(topic, group) as consumer:
        with pytest.raises(PositionLost, match="created again"):
            take(consumer, 1)
        consumer.seek({(topic, 0): (2,)})
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 3))
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 5)) == FEW[5:]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_whenever_a_topic_is_made_anew_nothing_of_the_new_one_is_skipped_or_doubled(
    bridge: Bridge, new_topic: NewTopic, group: str, txnbridge_url: str
) -> None:
    made_anew_again_and_again(bridge, new_topic(), new_topic(), group, txnbridge_url)
