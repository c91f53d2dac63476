"""A topic that is deleted and recreated under its name is another topic: a position in the one says nothing there."""

from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition
from txnbridge_conformance.observing import seen, send, take, values
from txnbridge_conformance.plugin import NewTopic

from tests.renewed_topics import *  # noqa: F403
from tests.renewed_topics import FEW, MORE, made_anew_again_and_again, read_on_where_told
from txnbridge import Bridge, Outcome, PositionLost


@pytest.mark.parametrize("grouped", [True, False], ids=["in a group", "alone"])
def test_a_reader_does_not_read_on_in_a_topic_that_was_made_anew_until_it_is_told_where(
    bridge: Bridge, topic: str, group: str, renew: Callable[[str], None], grouped: bool
) -> None:
    read_on_where_told(bridge, topic, group if grouped else None, renew)


def test_messages_read_before_a_topic_was_recreated_are_not_acknowledged_in_the_new_one(bridge, topic, group, renew):
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer:
        old = take(consumer, 10)
        renew(topic)
        with pytest.raises(PositionLost, match="created again"), bridge.transaction() as txn:
            txn.ack(old)
        assert txn.outcome is Outcome.ABORTED
        with pytest.raises(PositionLost, match="created again"):
            take(consumer, 1)
        consumer.seek({(topic, 0): (0,)})
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 20))
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 40)) == MORE[20:]


def test_a_processor_that_slept_stops_instead_of_skipping(bridge, new_topic, group, renew):
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
