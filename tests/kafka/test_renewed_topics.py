"""A topic that is deleted and recreated under its name is another topic: a position in the one says nothing there."""

from collections.abc import Callable
from contextlib import suppress

import confluent_kafka
import pytest
from txnbridge_conformance.observing import eventually, seen, send, take, values
from txnbridge_conformance.plugin import NewTopic
from txnbridge_kafka.read.start_positions import KafkaGroupStartPositions

from tests.renewed_topics import *  # noqa: F403
from tests.renewed_topics import (
    FEW,
    MORE,
    delete_at_first,
    delete_topic,
    made_anew_again_and_again,
    read_on_where_told,
)
from txnbridge import Batch, Bridge, Conflict, Consumer, Message, NotFound, Outcome, PositionLost, Transaction


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
    client = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False})
    (committed,) = client.committed([confluent_kafka.TopicPartition(topic, 0)], 30)
    assert committed.metadata
    other = committed.metadata[:-1] + ("0" if committed.metadata[-1] != "0" else "1")
    client.commit(offsets=[confluent_kafka.TopicPartition(topic, 0, committed.offset, other)], asynchronous=False)
    client.close()
    with bridge.consumer(topic, group) as consumer:
        with pytest.raises(PositionLost, match="created again"):
            take(consumer, 1)
        consumer.seek({(topic, 0): (2,)})
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 3))
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 5)) == FEW[5:]


def read_in_spite(consumer: Consumer, expected: list[bytes]) -> None:
    """Check that these messages come, perhaps again, although polls may raise that another topic is gone."""
    found: list[Message] = []

    def come() -> bool:
        with suppress(NotFound):
            found.extend(consumer.poll(100, 1))
        return values(found[-len(expected) :]) == expected

    eventually(come, "the messages come")


def test_a_transaction_that_acknowledges_in_a_deleted_topic_is_aborted_at_once_and_the_others_messages_come_again(
    bridge: Bridge, new_topic: NewTopic, group: str
) -> None:
    gone, kept = new_topic(), new_topic()
    send(bridge, gone, *FEW)
    send(bridge, kept, *MORE)
    with bridge.consumer([gone, kept], group) as consumer:
        old = take(consumer, len(FEW) + len(MORE))
        with pytest.raises(Conflict, match=gone), bridge.transaction(timeout=200) as txn:
            txn.ack(old)
            delete_topic(bridge, gone)
        assert txn.outcome is Outcome.ABORTED
        read_in_spite(consumer, MORE)


def test_a_topic_that_is_deleted_as_its_group_begins_keeps_no_other_one_from_being_read(
    bridge: Bridge, new_topic: NewTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = sorted((new_topic(), new_topic()))
    send(bridge, kept, *FEW)
    delete_at_first(monkeypatch, KafkaGroupStartPositions, "record", bridge, gone)
    with bridge.consumer([gone, kept], group) as consumer:
        read_in_spite(consumer, FEW)


def test_a_processor_of_a_pattern_goes_on_if_a_topic_is_deleted_whose_messages_it_processes(
    bridge: Bridge, new_topic: NewTopic, unique: Callable[[str], str], group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt comes at once, and not at the deadline of the transaction."""
    tag, target = unique("orders"), new_topic()
    bridge.ensure_topics(gone := f"{tag}-gone", kept := f"{tag}-kept")
    send(bridge, gone, *FEW)
    send(bridge, kept, *MORE)
    deleted: list[str] = []

    def copy(batch: Batch, txn: Transaction) -> None:
        if not deleted and gone in {message.topic for message in batch}:
            deleted.append(gone)
            delete_topic(bridge, gone)
        txn.send_many(target, [message.value for message in batch if message.topic == kept])

    with bridge.processor(f"{tag}-*", group=group, batch=copy, timeout=200) as processor:
        eventually(lambda: deleted and len(values(seen(bridge, target))) >= len(MORE), "the others are copied")
        assert processor.healthy and f"there is no topic {gone!r} any more" in caplog.text
    assert values(seen(bridge, target)) == MORE


@pytest.mark.full
@pytest.mark.timeout(900)
def test_whenever_a_topic_is_made_anew_nothing_of_the_new_one_is_skipped_or_doubled(
    bridge: Bridge, new_topic: NewTopic, group: str, txnbridge_url: str
) -> None:
    made_anew_again_and_again(bridge, new_topic(), new_topic(), group, txnbridge_url)
