"""Kafka for the benchmarks: a real broker, the plain client (confluent-kafka), and programs of others."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import Artifact, fetch, java

from benchmarks._harness import Lap, Round, Settings, Turn, contender, unique
from benchmarks._peers import PROGRAM, environment

NAME = "Kafka"
# The settings with which our readers fetch. By its own defaults the client pauses a second when its queue is full.
FETCHING = {"fetch.wait.max.ms": 100, "fetch.queue.backoff.ms": 10}

# Log lines of clients whose broker has just started would be printed between the figures.
_SILENT = logging.getLogger("benchmarks.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


@contextmanager
def broker(settings: Settings) -> Iterator[str]:
    """Yield the URL of a new broker with one node, or that of the environment variable TXNBRIDGE_URL."""
    if url := os.environ.get("TXNBRIDGE_URL"):
        yield url
        return
    with brokers.kafka() as started:
        yield started.url


def bootstrap(url: str) -> str:
    return url.removeprefix("kafka://")


def new_topic(url: str, partitions: int = 1) -> str:
    name = unique("bench")
    admin = AdminClient({"bootstrap.servers": bootstrap(url)}, logger=_SILENT)
    for created in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        created.result(30)
    # The answer may come before the leader is ready. If the leader then refuses only the first batch of a plain
    # producer, the producer sends that batch again until its timeout, and the broker refuses it each time.
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    wanted = {TopicPartition(name, number): latest for number in range(partitions)}
    deadline = time.monotonic() + 30
    while not all(answer.exception() is None for answer in admin.list_offsets(wanted).values()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"topic {name} was created, but has no leader after 30 s")
        time.sleep(0.01)
    return name


def drop_topic(url: str, name: str) -> None:
    """Delete a topic; the broker removes its files a minute later."""
    # Kept in a variable, because the futures get no result once the client is gone.
    admin = AdminClient({"bootstrap.servers": bootstrap(url)}, logger=_SILENT)
    for deleted in admin.delete_topics([name]).values():
        deleted.result(30)


def plain_producer(url: str) -> Producer:
    """Return a transactional producer of the plain client, with the settings that our backend uses."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap(url),
            "transactional.id": unique("plain"),
            "partitioner": "murmur2_random",
        },
        logger=_SILENT,
    )
    producer.init_transactions(30)
    return producer


def idempotent_producer(url: str, failed: Callable[[object], object]) -> Producer:
    """Return a producer without transactions, which calls `failed` with the error of each lost message."""
    return Producer(
        {
            "bootstrap.servers": bootstrap(url),
            "enable.idempotence": True,
            "delivery.report.only.error": True,
            "on_delivery": lambda error, message: failed(error),
        },
        logger=_SILENT,
    )


def plain_consumer(url: str, group: str, settings: Mapping[str, int] | None = None) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap(url),
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            **(settings or {}),
        },
        logger=_SILENT,
    )


@contender
def writing(url: str, topic: str, values: Sequence[bytes]) -> Iterator[Lap]:
    """A lap is the transaction of the client's documentation: produce, poll when the queue is full, commit."""
    producer = plain_producer(url)

    def lap() -> int:
        producer.begin_transaction()
        for value in values:
            while True:
                try:
                    producer.produce(topic, value)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.commit_transaction(30)
        return len(values)

    yield lap


@contender
def spread(settings: Settings, url: str, topic: str, partitions: int, value: bytes) -> Iterator[Lap]:
    """A lap is a transaction with one message to each partition."""
    producer = plain_producer(url)

    def lap() -> int:
        producer.begin_transaction()
        for number in range(partitions):
            producer.produce(topic, value, partition=number)
        producer.commit_transaction(30)
        return partitions

    yield lap


def join(url: str, topic: str) -> Consumer:
    """Return a plain consumer in a new group, which has read one message."""
    consumer = plain_consumer(url, unique("plain"), FETCHING)
    consumer.subscribe([topic])
    while not consumer.consume(1, 1):
        pass
    return consumer


def store_positions(url: str, groups: Sequence[str], topic: str, partitions: int) -> None:
    """Store, for each group, that it has read one message of each partition. The broker needs no memory for members."""
    admin = AdminClient({"bootstrap.servers": bootstrap(url)}, logger=_SILENT)
    for group in groups:
        offsets = [TopicPartition(topic, number, 1) for number in range(partitions)]
        for stored in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, offsets)]).values():
            assert all(each.error is None for each in stored.result(30).topic_partitions)


@contender
def reading(url: str, topic: str, count: int, at_once: int) -> Iterator[Lap]:
    """A lap takes the same seven fields of each message as `poll` does."""
    consumer = plain_consumer(url, unique("plain"), FETCHING)
    consumer.assign([TopicPartition(topic, 0, 0)])

    def lap() -> int:
        consumer.seek(TopicPartition(topic, 0, 0))
        found = 0
        while found < count:
            for message in consumer.consume(at_once, 1):
                (
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    message.key(),
                    message.value(),
                    message.headers(),
                    message.timestamp(),
                )
                found += 1
        return found

    yield lap
    consumer.close()


def passing_on(
    url: str, source: str, target: str, count: int, batch: int, settings: Mapping[str, int] | None = None
) -> Turn:
    """Return a turn of a loop in a new group, by default with the client's own settings for fetching."""
    producer = plain_producer(url)

    def turn() -> Round:
        begin = time.perf_counter()
        consumer = plain_consumer(url, unique("plain"), settings)
        consumer.subscribe([source])
        found = 0
        while found < count:
            messages = consumer.consume(batch, 1)
            if not messages:
                continue
            producer.begin_transaction()
            for message in messages:
                while True:
                    try:
                        producer.produce(target, message.value())
                        break
                    except BufferError:
                        producer.poll(0.05)
            _send_positions(producer, consumer)
            producer.commit_transaction(30)
            found += len(messages)
        consumer.close()
        return Round([time.perf_counter() - begin], count)

    return turn


@contender
def passing_on_one(url: str, source: str, target: str) -> Iterator[Lap]:
    """A lap reads one message and passes it on in a transaction, as a member of one group for the whole round."""
    producer, consumer = plain_producer(url), plain_consumer(url, unique("plain"), FETCHING)
    consumer.subscribe([source])

    def lap() -> int:
        while not (messages := consumer.consume(1, 1)):
            pass
        producer.begin_transaction()
        producer.produce(target, messages[0].value())
        _send_positions(producer, consumer)
        producer.commit_transaction(30)
        return 1

    yield lap
    consumer.close()


def _send_positions(producer: Producer, consumer: Consumer) -> None:
    positions = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)


QUIX = "quixstreams==3.28.1"
TOOLS = "4.3.1"
_LOGGING = Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4")


def quix(url: str, source: str, target: str, count: int, batch: int) -> Turn:
    """Return a turn of Quix Streams, exactly once, in an environment that the first call makes in the cache folder.

    The program measures itself, so that its start and imports do not count.
    """
    python = environment(QUIX)

    def turn() -> Round:
        # Isolated (-I): otherwise the program would import the files beside it instead of installed modules.
        arguments = [bootstrap(url), unique("quix"), source, target, str(count), str(batch)]
        told = subprocess.run([python, "-I", PROGRAM, "quix", *arguments], capture_output=True, text=True)
        if told.returncode:
            raise RuntimeError(f"Quix Streams ended with {told.returncode}: {told.stderr[-2000:]}")
        return Round([float(told.stdout.splitlines()[-1])], count)

    return turn


def producer_performance(url: str, topic: str, size: int, count: int, transaction_ms: int) -> float:
    """Write a tenth of `count` messages to warm up, then `count`; return the seconds that these took.

    Kafka's program runs in transactions of this duration, and otherwise with its defaults.
    """
    jars: Path = fetch(f"kafka-tools-{TOOLS}", [Artifact("org.apache.kafka", "kafka-tools", TOOLS), _LOGGING])
    options = {
        "--topic": topic,
        "--num-records": count + count // 10,
        "--warmup-records": count // 10,
        "--record-size": size,
        "--throughput": -1,
        "--bootstrap-server": bootstrap(url),
        "--transactional-id": unique("java"),
        "--transaction-duration-ms": transaction_ms,
    }
    command = [java(), "-cp", f"{jars}/*", "org.apache.kafka.tools.ProducerPerformance"]
    command += [str(each) for option in options.items() for each in option]
    told = subprocess.run(command, capture_output=True, text=True)
    rates = re.findall(r"([\d.]+) records/sec", told.stdout)
    if told.returncode or not rates:
        raise RuntimeError(f"ProducerPerformance ended with {told.returncode}: {told.stderr[-2000:]}")
    return count / float(rates[-1])
