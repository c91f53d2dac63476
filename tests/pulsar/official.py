"""The official client at work for tests, in a process of its own: `python official.py URL WHAT TOPIC`.

It says lines of JSON.
"""

import importlib
import json
import sys
from contextlib import suppress
from typing import Any

pulsar: Any = importlib.import_module("pulsar")
PATIENCE_MS = 30_000
HELD_BACK_MS = 5_000


def write(client: Any, topic: str) -> None:
    """Messages of every kind that it can write, each with its number in a property."""

    class Order(pulsar.schema.Record):  # type: ignore[misc]
        id = pulsar.schema.Integer()

    batched = client.create_producer(topic, compression_type=pulsar.CompressionType.ZLib)
    for number in range(20):
        batched.send_async(
            b"%d" % number, None, {"number": str(number)}, f"key {number}", event_timestamp=1000 + number
        )
    batched.flush()
    batched.close()
    chunked = client.create_producer(topic, batching_enabled=False, chunking_enabled=True)
    chunked.send(b"x" * 6_000_000)
    chunked.close()
    with_schema = client.create_producer(f"{topic}-schema", schema=pulsar.schema.JsonSchema(Order))
    with_schema.send(Order(id=7))
    with_schema.close()


def read(client: Any, topic: str) -> None:
    """Print the messages that a member of the group gets up to "end"; the member acknowledges none."""
    consumer = client.subscribe(topic, "group", pulsar.ConsumerType.Failover)
    while (message := consumer.receive(PATIENCE_MS)).data() != b"end":
        sys.stdout.write(json.dumps(message.data().decode()) + "\n")
    consumer.close()


def see(client: Any, topic: str) -> None:
    """Everything that it can read of a topic's partitions now, one after the other."""
    for partition in client.get_topic_partitions(topic):
        reader = client.create_reader(partition, pulsar.MessageId.earliest)
        while reader.has_message_available():
            sys.stdout.write(json.dumps(reader.read_next(PATIENCE_MS).data().decode(errors="replace")) + "\n")
        reader.close()


def see_committed(client: Any, topic: str) -> None:
    """The number of a partition and a value, of everything that comes; something open may hold back the rest."""
    for number, partition in enumerate(client.get_topic_partitions(topic)):
        reader = client.create_reader(partition, pulsar.MessageId.earliest)
        with suppress(pulsar.Timeout):
            while reader.has_message_available():
                sys.stdout.write(json.dumps([number, reader.read_next(HELD_BACK_MS).data().decode()]) + "\n")
        reader.close()


def main(url: str, what: str, topic: str) -> None:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    {"write": write, "read": read, "see": see, "see_committed": see_committed}[what](client, topic)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
