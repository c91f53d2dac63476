"""A real broker for the Kafka benchmarks, and the plain client that ours stands beside."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from txnbridge_conformance import brokers

_numbers = itertools.count(1)
# What a broker that has just started lets its clients say would stand between the figures.
_SILENT = logging.getLogger("benchmarks.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


@contextmanager
def broker() -> Iterator[str]:
    """The URL of a fresh broker with one node, or of the one that TXNBRIDGE_URL names."""
    if url := os.environ.get("TXNBRIDGE_URL"):
        yield url
        return
    with brokers.kafka() as started:
        yield started.url


def bootstrap(url: str) -> str:
    return url.removeprefix("kafka://")


def unique(what: str) -> str:
    return f"{what}-{os.getpid()}-{next(_numbers)}"


def new_topic(url: str, partitions: int = 1) -> str:
    name = unique("bench")
    admin = AdminClient({"bootstrap.servers": bootstrap(url)}, logger=_SILENT)
    for created in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        created.result(30)
    return name


def plain_producer(url: str) -> Producer:
    """The client with the same settings as ours, as its own documentation has it."""
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


def plain_consumer(url: str, group: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap(url),
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        },
        logger=_SILENT,
    )
