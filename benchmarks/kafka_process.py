"""Consume, transform, produce on Kafka beside the same loop by hand on the plain client, in batches of 10,000.

Each lap is a group that has never read: it joins, passes every message on once, and leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, TopicPartition

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, per_unit, run, speed
from benchmarks._kafka import broker, new_topic, plain_consumer, plain_producer, unique
from txnbridge import connect

MESSAGES = 200_000
BATCH = 10_000
SIZE = 100


def plain(url: str, source: str, target: str, count: int) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        producer = plain_producer(url)

        def lap() -> int:
            consumer = plain_consumer(url, unique("plain"))
            consumer.subscribe([source])
            found = 0
            while found < count:
                messages = consumer.consume(BATCH, 1)
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
                producer.send_offsets_to_transaction(_positions(consumer), consumer.consumer_group_metadata(), 30)
                producer.commit_transaction(30)
                found += len(messages)
            consumer.close()
            return found

        yield lap

    return contender


def _positions(consumer: Consumer) -> list[TopicPartition]:
    return consumer.position(consumer.assignment())


def ours(url: str, source: str, target: str) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with connect(url, writers=1) as bridge:

            def lap() -> int:
                processor = bridge.processor(
                    source,
                    group=unique("ours"),
                    batch=lambda batch, txn: txn.send_many(target, [message.value for message in batch]),
                    max_messages=BATCH,
                    max_wait=0.1,  # or a transaction would be what the reader hands out at once
                )
                processor.run(until_idle=True)
                return processor.stats.messages

            yield lap

    return contender


def measure(settings: Settings) -> None:
    count = BATCH if settings.quick else MESSAGES
    with broker() as url:
        source, target = new_topic(url), new_topic(url)
        with connect(url, writers=1) as bridge:
            for _ in range(0, count, BATCH):
                with bridge.transaction() as txn:
                    txn.send_many(source, [b"x" * SIZE] * BATCH)
        found = alternate(settings, {"plain": plain(url, source, target, count), "ours": ours(url, source, target)})
        report = Report(settings, f"Kafka: consume, transform, produce, {count:,} x {SIZE} B, {BATCH:,} a transaction")
        report.figure("processor / loop by hand", speed(found["ours"], found["plain"]), "", at_least(1.0))
        for name, rounds in found.items():
            report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
