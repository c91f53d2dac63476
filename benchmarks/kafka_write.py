"""Writing to Kafka beside the plain client, in transactions of the same size, to the same broker.

The plain client's loop is the one of its documentation: produce, poll when the queue is full, commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks._harness import (
    PROCESSOR,
    Contender,
    Lap,
    Report,
    Settings,
    alternate,
    at_least,
    at_most,
    lap_quantile,
    per_unit,
    run,
    speed,
)
from benchmarks._kafka import broker, new_topic, plain_producer
from benchmarks._ours import writing

MESSAGES = 10_000  # a transaction
SIZES = (100, 1024)
# More rounds than elsewhere, because this ratio is close to its target.
ROUNDS = 30


def plain(url: str, topic: str, values: list[bytes]) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
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

    return contender


def measure(settings: Settings) -> None:
    if not settings.quick:
        settings = replace(settings, rounds=max(settings.rounds, ROUNDS))
    with broker() as url:
        for size in SIZES:
            values = [bytes([n % 251]) * size for n in range(MESSAGES)]
            contenders = {
                "plain": plain(url, new_topic(url), values),
                "send": writing(url, new_topic(url), values, many=False),
                "many": writing(url, new_topic(url), values, many=True),
            }
            report = Report(settings, f"Kafka: writing, {MESSAGES:,} x {size} B a transaction")
            wall = alternate(settings, contenders)
            report.figure("`send` / plain client", speed(wall["send"], wall["plain"]), "", at_least(0.9))
            report.figure("`send_many` / plain client", speed(wall["many"], wall["plain"]), "", at_least(1.0))
            for name, rounds in wall.items():
                report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")
                report.figure(f"{name}, a transaction, p50", lap_quantile(rounds, 0.5, 1e3), "ms")
            processor = alternate(settings, contenders, PROCESSOR)
            used = {name: speed(processor["plain"], processor[name]) for name in ("send", "many")}
            report.figure("processor time of `send` / plain client", used["send"], "", at_most(1.2))
            report.figure("processor time of `send_many` / plain client", used["many"], "", at_most(1.0))


if __name__ == "__main__":
    run(measure)
