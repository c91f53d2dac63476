"""What `txnbridge copy` does, from broker to broker, beside a loop of the official clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from txnbridge_conformance import brokers

from benchmarks import _kafka
from benchmarks._harness import Report, Round, Settings, Turn, at_least, in_turn, timed, unique
from benchmarks._ours import fill, helper
from benchmarks._pulsar import service
from txnbridge import Batch, Processor, Transaction, connect

SIZE = 100
BATCH, LARGE = 5000, 20_000  # the default of `txnbridge copy`, and a larger one

# Copies a topic from one broker to a topic of another: their URLs, the two topics, and the number of messages.
Work = Callable[[str, str, str, str, int], None]


def copy(settings: Settings, broker: str) -> None:
    """Measure the copy of a topic from Kafka to Pulsar, or from Pulsar to Kafka, with connecting and joining."""
    count = BATCH if settings.quick else 40 * BATCH
    source_kind, target_kind = helper(broker), helper("pulsar" if broker == "kafka" else "kafka")
    with source_kind.broker(settings) as source:
        topic = source_kind.new_topic(source)
        fill(source, topic, SIZE, count, BATCH)
        with brokers.pulsar() if broker == "kafka" else brokers.kafka() as other:
            target = f"{other.url}?admin_url={other.admin_url}" if isinstance(other, brokers.Pulsar) else other.url

            def turn(work: Work) -> Turn:
                def copy_once() -> Round:
                    copied = target_kind.new_topic(target)
                    return timed(lambda: work(source, target, topic, copied, count), count)()

                return copy_once

            loop = turn(kafka_to_pulsar if broker == "kafka" else pulsar_to_kafka)
            turns = {"copy": turn(partial(ours, BATCH)), "large": turn(partial(ours, LARGE)), "loop": loop}
            found = in_turn(turns, settings.rounds)
            report = Report(settings, f"{broker} to {target_kind.NAME}: {count:,} x {SIZE} B")
            name = "a copy, exactly once / the official clients, at least once"
            report.ratio(name, found["copy"], found["loop"], at_least(0.7))
            report.ratio(f"the same with --batch {LARGE}", found["large"], found["loop"])
            report.rates(found, "messages")


def ours(batch: int, source_url: str, target_url: str, topic: str, target: str, count: int) -> None:
    """Copy by the processor of `txnbridge copy`, in a new group."""
    group = unique("copy")
    with connect(source_url, application=group) as source, connect(target_url, application=group) as other:
        left = count

        def move(messages: Batch, txn: Transaction) -> None:
            nonlocal left
            for message in messages:
                txn.send(
                    target,
                    message.value,
                    key=message.key,
                    headers=message.headers.items_all() or None,
                    partition=message.partition,
                    timestamp=message.timestamp,
                )
            left -= len(messages)
            if left <= 0:
                processor.stop()

        processor: Processor = source.processor(topic, group=group, batch=move, to=other, max_messages=batch)
        processor.run()
        assert processor.stats.messages == count


def kafka_to_pulsar(source: str, target: str, topic: str, copied: str, count: int) -> None:
    """Copy by a loop that waits until Pulsar has stored a batch, and then commits its positions."""
    pulsar: Any = import_module("pulsar")
    consumer = _kafka.plain_consumer(source, unique("loop"), _kafka.FETCHING)
    consumer.subscribe([topic])
    client: Any = pulsar.Client(service(target), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    sending = {"batching_enabled": True, "max_pending_messages": 10_000, "block_if_queue_full": True}
    producer = client.create_producer(copied, **sending)
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


def pulsar_to_kafka(source: str, target: str, topic: str, copied: str, count: int) -> None:
    """Copy by a loop that waits until Kafka has stored a batch, and then acknowledges it."""
    pulsar: Any = import_module("pulsar")
    client: Any = pulsar.Client(service(source), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    start = pulsar.InitialPosition.Earliest
    consumer = client.subscribe(f"{topic}-partition-0", unique("loop"), initial_position=start)
    failed: list[Any] = []
    producer = _kafka.idempotent_producer(target, failed.append)
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
