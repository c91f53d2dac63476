"""What `txnbridge copy` does, from broker to broker, beside a loop of the official clients."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from txnbridge_conformance import brokers

from benchmarks import _kafka
from benchmarks._harness import Report, Settings, Turn, at_least, in_turn, timed, unique
from benchmarks._ours import fill, helper
from benchmarks._pulsar import service
from txnbridge import Batch, Transaction, connect

SIZE = 100
BATCH = 5000  # the default of `txnbridge copy`


def copy(settings: Settings, broker: str) -> None:
    """Measure the copy of a topic from Kafka to Pulsar, or from Pulsar to Kafka."""
    count = BATCH if settings.quick else 40 * BATCH
    source_kind, target_kind = helper(broker), helper("pulsar" if broker == "kafka" else "kafka")
    with source_kind.broker(settings) as source:
        topic = source_kind.new_topic(source)
        fill(source, topic, SIZE, count, BATCH)
        started = brokers.pulsar() if broker == "kafka" else brokers.kafka()
        with started as other:
            loop = kafka_to_pulsar if broker == "kafka" else pulsar_to_kafka
            target = f"{other.url}?admin_url={other.admin_url}" if isinstance(other, brokers.Pulsar) else other.url
            turns = {
                "copy": ours(source, target, topic, count),
                "loop": timed(lambda: loop(source, target, topic, count), count),
            }
            found = in_turn(turns, settings.rounds)
            report = Report(settings, f"{broker} to {target_kind.NAME}: {count:,} x {SIZE} B")
            report.ratio(
                "a copy, exactly once / the official clients, at least once",
                found["copy"],
                found["loop"],
                at_least(0.7),
            )
            report.rate("copy, messages a second", found["copy"])


def ours(source_url: str, target_url: str, topic: str, count: int) -> Turn:
    """Return a turn of the processor of `txnbridge copy`, with connecting and joining, in a new group each time."""

    def turn() -> None:
        group, target = unique("copy"), unique("copied")
        with connect(source_url, application=group) as source, connect(target_url, application=group) as other:
            other.ensure_topics(target)

            def move(messages: Batch, txn: Transaction) -> None:
                for message in messages:
                    txn.send(
                        target,
                        message.value,
                        key=message.key,
                        headers=message.headers.items_all() or None,
                        partition=message.partition,
                        timestamp=message.timestamp,
                    )

            with source.processor(topic, group=group, batch=move, to=other, max_messages=BATCH) as processor:
                while processor.stats.messages < count:
                    time.sleep(0.001)

    return timed(turn, count)


def kafka_to_pulsar(source: str, target: str, topic: str, count: int) -> None:
    """Copy by a loop that waits until Pulsar has stored a batch, and then commits its positions."""
    pulsar: Any = import_module("pulsar")
    consumer = _kafka.plain_consumer(source, unique("loop"), _kafka.FETCHING)
    consumer.subscribe([topic])
    client: Any = pulsar.Client(service(target), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    sending = {"batching_enabled": True, "max_pending_messages": 10_000, "block_if_queue_full": True}
    producer = client.create_producer(unique("copied"), **sending)
    failed: list[Any] = []

    def on_receipt(result: Any, _: Any) -> None:
        if result != pulsar.Result.Ok:
            failed.append(result)

    left = count
    while left:
        messages = consumer.consume(BATCH, 1)
        for message in messages:
            producer.send_async(
                message.value(),
                on_receipt,
                partition_key=(message.key() or b"").decode() or None,
                event_timestamp=message.timestamp()[1],
            )
        producer.flush()
        assert not failed
        if messages:
            consumer.commit(asynchronous=False)
        left -= len(messages)
    consumer.close()
    client.close()


def pulsar_to_kafka(source: str, target: str, topic: str, count: int) -> None:
    """Copy by a loop that waits until Kafka has stored a batch, and then acknowledges it."""
    pulsar: Any = import_module("pulsar")
    client: Any = pulsar.Client(service(source), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    start = pulsar.InitialPosition.Earliest
    consumer = client.subscribe(f"{topic}-partition-0", unique("loop"), initial_position=start)
    failed: list[Any] = []
    producer = _kafka.idempotent_producer(target, failed.append)
    copied = unique("copied")
    for number in range(1, count + 1):
        message = consumer.receive(30_000)
        key = message.partition_key().encode() or None
        while True:
            try:
                producer.produce(copied, message.data(), key, timestamp=message.event_timestamp())
                break
            except BufferError:
                producer.poll(0.05)
        if number % BATCH == 0 or number == count:
            assert producer.flush(30) == 0 and not failed
            consumer.acknowledge_cumulative(message)
    client.close()
