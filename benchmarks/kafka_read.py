"""Reading from Kafka beside a plain loop that takes the same seven fields of each message.

Both ask for as many messages at a time as `poll` does by default, and both clients have the same settings for fetching:
by its own defaults the plain client pauses for a second whenever its queue is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import TopicPartition

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, per_unit, run, speed, unique
from benchmarks._kafka import FETCHING, broker, new_topic, plain_consumer
from benchmarks._ours import AT_ONCE, fill, reading
from txnbridge import connect

MESSAGES = 200_000
BATCH = 10_000  # written in one transaction
SIZES = (100, 1024)


def plain(url: str, topic: str, count: int) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        consumer = plain_consumer(url, unique("plain"), FETCHING)
        consumer.assign([TopicPartition(topic, 0, 0)])

        def lap() -> int:
            consumer.seek(TopicPartition(topic, 0, 0))
            found = 0
            while found < count:
                for message in consumer.consume(AT_ONCE, 1):
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

    return contender


def measure(settings: Settings) -> None:
    count = BATCH if settings.quick else MESSAGES
    with broker() as url, connect(url) as bridge:
        for size in SIZES:
            topic = new_topic(url)
            fill(bridge, topic, size, count, BATCH)
            report = Report(settings, f"Kafka: reading, {size} B")
            found = alternate(settings, {"plain": plain(url, topic, count), "ours": reading(url, topic, count)})
            report.figure("`poll` / plain loop", speed(found["ours"], found["plain"]), "", at_least(0.75))
            for name, rounds in found.items():
                report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
