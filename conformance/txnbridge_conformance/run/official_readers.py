"""Readers that use the brokers' own clients, to find what our readers may hide. `python -m … PLAN TOPIC…` is a reader.

A reader prints one line of JSON for each committed message: topic, partition, position (or null), value. Each reader is
a process of its own, so that a crash of a client in C does not end the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

import txnbridge
from txnbridge import Headers, Message
from txnbridge_conformance.run.bodies import text_of, value_of
from txnbridge_conformance.run.plan import Plan
from txnbridge_conformance.run.processes import end_with

Line = tuple[str, int, "list[int] | None", str]

# The time for which Kafka's client waits for an answer.
_ANSWER_SECONDS = 60.0
# The time for which a reader of Pulsar waits for a message that its client has announced.
_HELD_BACK_MS = 30_000
# The time for which RocketMQ's client waits for messages, that within which it gets no message again, and that without
# a new message after which a reader gives up.
_WAIT_SECONDS, _HIDDEN_SECONDS, _STANDSTILL_SECONDS = 5, 3600, 60.0


def name_of(plan: Plan) -> str | None:
    """Return the module name of the official client for the plan's broker; None if none is installed or can connect."""
    scheme, _, _, options, _ = urlsplit(plan.url)
    name = {"kafka": "confluent_kafka", "pulsar": "pulsar", "rocketmq": plan.grpc and "rocketmq"}.get(scheme)
    secured = re.search("sasl|ssl|tls|security|token|user|access_key|listener", options)  # unknown to the readers
    return name if name and not secured and importlib.util.find_spec(name) else None


def read_kafka(plan: Plan, topics: Sequence[str]) -> Iterator[Line]:
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    settings = {"bootstrap.servers": urlsplit(plan.url).netloc, "isolation.level": "read_committed", "log_level": 0}
    consumer = Consumer({**settings, "group.id": "official", "enable.auto.commit": False, "enable.partition.eof": True})
    partitions = {topic: consumer.list_topics(topic, _ANSWER_SECONDS).topics[topic].partitions for topic in topics}
    left = {(topic, number) for topic in topics for number in partitions[topic]}
    consumer.assign([TopicPartition(topic, number, 0) for topic, number in left])
    while left:
        for message in consumer.consume(10_000, 1):
            error = message.error()
            if error is None:
                place = str(message.topic()), int(message.partition() or 0), (int(message.offset() or 0),)
                key, pairs = message.key(), cast(Any, message.headers() or ())
                found = Message(*place, key, message.value(), Headers(pairs), message.timestamp()[1], 1, None)
                yield *place[:2], list(place[2]), text_of(found)
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard((message.topic(), message.partition()))
    consumer.close()


def read_pulsar(plan: Plan, topics: Sequence[str]) -> Iterator[Line]:
    pulsar: Any = importlib.import_module("pulsar")

    parts = urlsplit(plan.url)
    namespace = parts.path.strip("/") or "public/default"
    client: Any = pulsar.Client(f"pulsar://{parts.netloc}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    for topic in topics:
        for number, name in enumerate(client.get_topic_partitions(f"persistent://{namespace}/{topic}")):
            reader = client.create_reader(name, pulsar.MessageId.earliest)
            with suppress(pulsar.Timeout):  # an open transaction holds back the rest
                while reader.has_message_available():
                    message = reader.read_next(_HELD_BACK_MS)
                    value = _text_of(topic, message.data(), message.partition_key(), message.properties())
                    yield topic, number, None, value
            reader.close()
    client.close()


def read_rocketmq(plan: Plan, topics: Sequence[str]) -> Iterator[Line]:
    """Yield all messages, each queue in order. Raise `TimeoutError` if the client does not return all."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # the client writes a log there
        rocketmq: Any = importlib.import_module("rocketmq")
        errors: Any = importlib.import_module("rocketmq.v5.exception")

    group = f"official-{uuid.uuid4().hex}"
    with txnbridge.connect(plan.url) as bridge:
        bridge.consumer(list(topics), group).close()  # creates the group, without which the client reads nothing
        ends = {partition: end[0] for partition, (_, end) in bridge.admin.bounds(topics).items()}
    subscription = {topic: rocketmq.FilterExpression("*") for topic in topics}
    configuration = rocketmq.ClientConfiguration(plan.grpc, rocketmq.Credentials())
    consumer = rocketmq.SimpleConsumer(configuration, group, subscription, _WAIT_SECONDS)
    consumer.startup()
    found: dict[tuple[str, int, int], str] = {}
    until = time.monotonic() + _STANDSTILL_SECONDS
    while len(found) < sum(ends.values()):
        if time.monotonic() > until:
            raise TimeoutError(f"{len(found)} of {sum(ends.values())} messages came")
        with suppress(errors.ClientException):  # the proxy fails until it knows the consumer
            for message in consumer.receive(32, _HIDDEN_SECONDS):
                # Only the receipt handle tells the place: its seventh and eighth fields are queue and offset.
                queue, offset = message.receipt_handle.split(" ")[6:8]
                body = b"" if "txnbridge.value" in message.properties else message.body  # else a placeholder
                value = _text_of(message.topic, body, next(iter(message.keys), ""), message.properties)
                found[message.topic, int(queue), int(offset)] = value
                until = time.monotonic() + _STANDSTILL_SECONDS
    yield from ((topic, queue, [offset], value) for (topic, queue, offset), value in sorted(found.items()))
    sys.stdout.flush()
    os._exit(0)  # threads of the client would go on


def _text_of(topic: str, body: bytes, key: str, properties: Mapping[str, str]) -> str:
    """Return a message's value, as `text_of` does; of one with a key or headers the clients do not show all."""
    if key:
        return value_of(topic, body, key, properties)
    headers = Headers((name, value.encode()) for name, value in properties.items())
    return text_of(Message(topic, 0, (), None, body, headers, 0, 1, None))


def main(*topics: str) -> None:
    plan = Plan.from_json(sys.stdin.read())
    end_with(plan.run)
    read = {"kafka": read_kafka, "pulsar": read_pulsar, "rocketmq": read_rocketmq}[urlsplit(plan.url).scheme]
    for line in read(plan, topics):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
