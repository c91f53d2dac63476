"""Readers that use the brokers' own clients, to find what our readers may hide. `python -m … URL TOPIC…` is a reader.

A reader prints one line of JSON for each committed message: topic, partition, position (or null), value. Each reader is
a process of its own, so that a crash of a client in C does not end the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from txnbridge_conformance.run.bodies import value_of
from txnbridge_conformance.run.plan import PARTITIONS

Line = tuple[str, int, "list[int] | None", str]

# A reader of Pulsar waits so long for a message that its client has announced.
_HELD_BACK_MS = 30_000


def name_of(url: str) -> str | None:
    """Return the module name of the official client for the broker at a URL; None if no client is installed."""
    name = {"kafka": "confluent_kafka", "pulsar": "pulsar"}.get(urlsplit(url).scheme)
    return name if name and importlib.util.find_spec(name) else None


def read_kafka(url: str, topics: Sequence[str]) -> Iterator[Line]:
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    settings = {"bootstrap.servers": urlsplit(url).netloc, "group.id": "official", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True, "log_level": 0})
    left = {(topic, number) for topic in topics for number in range(PARTITIONS)}
    consumer.assign([TopicPartition(topic, number, 0) for topic, number in left])
    while left:
        for message in consumer.consume(10_000, 1):
            error = message.error()
            if error is None:
                value = value_of(str(message.topic()), message.value(), message.key())
                yield str(message.topic()), int(message.partition() or 0), [int(message.offset() or 0)], value
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard((message.topic(), message.partition()))
    consumer.close()


def read_pulsar(url: str, topics: Sequence[str]) -> Iterator[Line]:
    pulsar: Any = importlib.import_module("pulsar")

    parts = urlsplit(url)
    namespace = parts.path.strip("/") or "public/default"
    client: Any = pulsar.Client(f"pulsar://{parts.netloc}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    for topic in topics:
        for number in range(PARTITIONS):
            name = f"persistent://{namespace}/{topic}-partition-{number}"
            reader = client.create_reader(name, pulsar.MessageId.earliest)
            with suppress(pulsar.Timeout):  # an open transaction holds back the rest
                while reader.has_message_available():
                    message = reader.read_next(_HELD_BACK_MS)
                    yield topic, number, None, value_of(topic, message.data(), message.partition_key())
            reader.close()
    client.close()


def main(url: str, *topics: str) -> None:
    read = {"kafka": read_kafka, "pulsar": read_pulsar}[urlsplit(url).scheme]
    for line in read(url, topics):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
