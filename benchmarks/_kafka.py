"""A real broker for the Kafka benchmarks, and their yardstick, confluent-kafka used directly (the plain client)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from txnbridge_conformance import brokers

from benchmarks._harness import unique

# The settings with which our readers fetch. By its own defaults the client pauses a second when its queue is full.
FETCHING = {"fetch.wait.max.ms": 100, "fetch.queue.backoff.ms": 10}

# Log lines of clients whose broker has just started would be printed between the figures.
_SILENT = logging.getLogger("benchmarks.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


@contextmanager
def broker() -> Iterator[str]:
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
    wanted = {TopicPartition(name, number): OffsetSpec.latest() for number in range(partitions)}
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
