"""Sends without a transaction, on a live broker."""

import uuid
from contextlib import suppress
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.cimpl import NewPartitions, NewTopic
from txnbridge_conformance import faults
from txnbridge_kafka.write.publisher import KafkaPublisher

from tests.in_time import takes, wait_until
from tests.kafka.kit import bootstrap_of, silent, topics_of
from tests.kafka.test_decision_log import pausing, settings_for  # noqa: F401
from txnbridge.errors import DeadlineExceeded, DeliveryFailed, InvalidOption, NotFound
from txnbridge.spi import Deadline


@pytest.fixture
def make_topic(admin):
    def make(partitions=1, **config):
        name = f"publisher-{uuid.uuid4().hex[:12]}"
        admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result()
        return name

    return make


@pytest.fixture
def topic(make_topic):
    return make_topic()


@pytest.fixture
def open_publisher(kafka_broker):
    publishers = []

    def open_one(url=kafka_broker.url, create_topics=0, **producer):
        settings = replace(settings_for(url), create_topics=create_topics, producer=producer)
        publishers.append(KafkaPublisher(settings, topics_of(settings)))
        return publishers[-1]

    yield open_one
    for publisher in publishers:
        with suppress(DeliveryFailed):  # some tests make it fail
            publisher.close(Deadline(30))


@pytest.fixture
def publisher(open_publisher):
    return open_publisher()


def send(publisher, topic, value, key=None, headers=None, partition=None, timestamp=None, sequence=None, timeout=30):
    publisher.send(topic, value, key, headers, partition, timestamp, sequence, Deadline(timeout))


def stored(url, topic, partition=0):
    """Every message of a partition."""
    settings = {"bootstrap.servers": bootstrap_of(url), "group.id": "nobody", "enable.partition.eof": True}
    consumer = Consumer(settings, logger=silent)
    consumer.assign([TopicPartition(topic, partition, 0)])
    found = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        found.append(message)
    assert message is not None, "no end of the partition came"
    consumer.close()
    return found


def values(url, topic, partition=0):
    return [message.value() for message in stored(url, topic, partition)]


def test_a_message_arrives_as_it_was_sent(kafka_broker, publisher, topic):
    send(publisher, topic, b"value", b"key", [("kind", b"new"), ("kind", b"newer")], timestamp=1_700_000_000_123)
    send(publisher, topic, None, b"key")
    send(publisher, topic, b"")
    publisher.flush(Deadline(30))
    first, tombstone, empty = stored(kafka_broker.url, topic)
    assert (first.value(), first.key()) == (b"value", b"key")
    assert first.headers() == [("kind", b"new"), ("kind", b"newer")]
    assert first.timestamp()[1] == 1_700_000_000_123
    assert (tombstone.value(), tombstone.key()) == (None, b"key")
    assert (empty.value(), empty.key(), empty.headers()) == (b"", None, None)


def test_a_message_becomes_visible_without_a_flush(kafka_broker, publisher, topic):
    send(publisher, topic, b"1")
    wait_until(lambda: values(kafka_broker.url, topic))


def test_a_message_that_cannot_be_sent_is_refused_and_the_others_go_on(kafka_broker, publisher, topic):
    send(publisher, topic, b"1")
    with pytest.raises(NotFound, match=rf"txnbridge topics create {topic}-not --partitions N --url {kafka_broker.url}"):
        send(publisher, f"{topic}-not", b"never")
    for partition in (1, 7, -1):
        with pytest.raises(NotFound, match="partition"):
            send(publisher, topic, b"never", partition=partition)
    with pytest.raises(InvalidOption, match=r"message\.max\.bytes"):
        send(publisher, topic, b"x" * 2_000_000)
    for timestamp in (0, -1):
        with pytest.raises(InvalidOption, match="timestamp"):
            send(publisher, topic, b"never", timestamp=timestamp)
    send(publisher, topic, b"2")
    publisher.flush(Deadline(30))
    assert values(kafka_broker.url, topic) == [b"1", b"2"]


def test_a_missing_topic_is_made_where_that_is_wanted(kafka_broker, open_publisher, admin):
    publisher = open_publisher(create_topics=3)
    topic = f"publisher-{uuid.uuid4().hex[:12]}"
    send(publisher, topic, b"1", partition=2)
    publisher.flush(Deadline(30))
    assert values(kafka_broker.url, topic, 2) == [b"1"]
    assert len(admin.list_topics(topic).topics[topic].partitions) == 3


def test_partitions_that_are_added_are_found(kafka_broker, publisher, topic, admin):
    send(publisher, topic, b"1")
    publisher.flush(Deadline(30))
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result()
    send(publisher, topic, b"2", partition=2)
    publisher.flush(Deadline(30))
    assert values(kafka_broker.url, topic, 2) == [b"2"]


def test_no_message_is_stored_behind_one_that_the_broker_refuses(kafka_broker, open_publisher, make_topic):
    topic = make_topic(2, **{"max.message.bytes": "10000"})
    # Small batches, five of them on their way at once: so others are behind the refused one when the answer comes.
    publisher = open_publisher(**{"batch.num.messages": "10", "linger.ms": "0"})
    with pytest.raises(DeliveryFailed, match="Message size too large"):
        for number in range(400):
            send(publisher, topic, b"%d" % number + b"x" * (20_000 if number == 200 else 0), partition=number % 2)
        publisher.flush(Deadline(30))
    for call in (lambda: send(publisher, topic, b"more"), lambda: publisher.flush(Deadline(30))):
        with pytest.raises(DeliveryFailed, match="could not be stored"):
            call()
    publisher.close(Deadline(30))
    there = [int(value) for value in values(kafka_broker.url, topic, 0)]
    assert there == list(range(0, 2 * len(there), 2))
    assert len(there) <= 100
    # What was sent later to other partitions may be there, but without a gap as well.
    others = [int(value) for value in values(kafka_broker.url, topic, 1)]
    assert others == list(range(1, 2 * len(others) + 1, 2))


@pytest.fixture
def published(open_publisher, topic, admin, make_topic):
    """Return a publisher that has used two topics, the first of which was deleted, and the other topic."""

    def publish(propagation_ms):
        # By itself the client believes for half a minute that the topic is only late.
        publisher, other = open_publisher(**{"topic.metadata.propagation.max.ms": propagation_ms}), make_topic()
        send(publisher, topic, b"1")
        send(publisher, other, b"1")
        publisher.flush(Deadline(30))
        admin.delete_topics([topic])[topic].result()
        return publisher, other

    return publish


def test_a_topic_that_is_deleted_fails_the_publisher(kafka_broker, published, topic):
    publisher, other = published("1000")
    send(publisher, topic, b"2")
    with pytest.raises(DeliveryFailed):
        publisher.flush(Deadline(60))
    with pytest.raises(DeliveryFailed):
        send(publisher, other, b"2")
    assert values(kafka_broker.url, other) == [b"1"]


def test_a_topic_known_to_be_gone_is_not_found_and_others_go_on(kafka_broker, published, topic):
    publisher, other = published("1")
    wait_until(lambda: publisher._producer.list_topics(topic, timeout=10).topics[topic].error is not None)
    with pytest.raises(NotFound):
        send(publisher, topic, b"2")
    send(publisher, other, b"2")
    publisher.flush(Deadline(30))
    assert values(kafka_broker.url, other) == [b"1", b"2"]


def test_a_full_memory_makes_the_sender_wait_and_a_deadline_ends_that(kafka_broker, open_publisher, topic, pausing):  # noqa: F811
    publisher = open_publisher(**{"queue.buffering.max.messages": "10"})
    for number in range(1000):
        send(publisher, topic, b"%d" % number)
    publisher.flush(Deadline(30))
    with pausing():
        for _ in range(10):
            send(publisher, topic, b"waits")
        error = takes(0.5, DeadlineExceeded, lambda deadline: send(publisher, topic, b"never", timeout=0.5))
        assert "buffer space" in str(error)
        error = takes(0.5, DeadlineExceeded, publisher.flush)
        assert "10 messages" in str(error)
    publisher.flush(Deadline(30))
    assert values(kafka_broker.url, topic) == [b"%d" % number for number in range(1000)] + [b"waits"] * 10


def test_closing_a_publisher_ends_at_its_deadline_and_gives_up_the_messages_left(
    kafka_broker,
    open_publisher,
    topic,
    pausing,  # noqa: F811
):
    publisher = open_publisher()
    send(publisher, topic, b"1")
    publisher.flush(Deadline(30))
    with pausing():
        for _ in range(100):
            send(publisher, topic, b"may be there once")
        error = takes(0.5, DeadlineExceeded, publisher.close)
    again = open_publisher()
    send(again, topic, b"2")
    again.flush(Deadline(30))
    found = values(kafka_broker.url, topic)
    assert found[0] == b"1" and found[-1] == b"2"
    assert len(found) <= 102
    assert error.__traceback__ is not None  # and by it the client, which sends nothing more


def test_the_retries_of_a_publisher_make_no_duplicates(kafka_broker, open_publisher, topic):
    with faults.proxy(kafka_broker) as proxy:
        publisher = open_publisher(proxy.url)
        send(publisher, topic, b"0")
        publisher.flush(Deadline(30))
        for number in range(1, 4):
            hold = proxy.hold(answers="Produce")
            send(publisher, topic, b"%d" % number)
            hold.answered()
            hold.drop()
            proxy.cut()
            publisher.flush(Deadline(30))
    assert values(kafka_broker.url, topic) == [b"0", b"1", b"2", b"3"]


def test_messages_outlive_kill_9_of_the_broker(start_kafka):
    broker = start_kafka()
    settings = replace(settings_for(broker.url), create_topics=1)
    publisher = KafkaPublisher(settings, topics_of(settings))
    expected = [b"%d" % number for number in range(3000)]
    for number, value in enumerate(expected):
        send(publisher, "killed", value)
        if number == 1000:
            publisher.flush(Deadline(30))
        if number == 1500:
            broker.kill()
    takes(0.5, DeadlineExceeded, publisher.flush)
    broker.start()
    publisher.flush(Deadline(60))
    assert values(broker.url, "killed") == expected
    publisher.close(Deadline(30))
