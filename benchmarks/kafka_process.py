"""Consume, transform, produce on Kafka beside the same loop by hand on the plain client, and beside Quix Streams.

In each turn a new group joins, sends every message to another topic once in transactions of 10,000, and leaves.
Quix Streams runs exactly-once in an environment of its own, which the first run makes in the cache folder.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

from benchmarks._harness import Report, Round, Settings, Turn, at_least, in_turn, per_unit, run, speed, unique
from benchmarks._kafka import FETCHING, bootstrap, broker, new_topic, plain_consumer, plain_producer
from benchmarks._ours import fill, passing_on
from benchmarks._peers import environment
from txnbridge import connect

MESSAGES = 1_000_000
BATCH = 10_000
SIZE = 100
QUIX = "quixstreams==3.28.1"
# A process of its own, with its own log; it measures itself, so that its start and imports do not count.
QUIX_PROGRAM = Path(__file__).with_name("_quix.py")


def by_hand(url: str, source: str, target: str, count: int, settings: Mapping[str, int] | None = None) -> Turn:
    """Return a turn of a loop on the plain client, by default with the client's own settings for fetching."""
    producer = plain_producer(url)

    def turn() -> Round:
        begin = time.perf_counter()
        consumer = plain_consumer(url, unique("plain"), settings)
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
        return Round([time.perf_counter() - begin], count)

    return turn


def tuned(url: str, source: str, target: str, count: int) -> Turn:
    """Return a turn of the same loop, with the settings with which our readers fetch."""
    return by_hand(url, source, target, count, FETCHING)


def _positions(consumer: Consumer) -> list[TopicPartition]:
    return consumer.position(consumer.assignment())


def ours(url: str, source: str, target: str, count: int) -> Turn:
    return passing_on(url, source, target, count, BATCH)


def quix(url: str, source: str, target: str, count: int) -> Turn:
    python = environment(QUIX)

    def turn() -> Round:
        command: list[str | Path] = [
            python,
            QUIX_PROGRAM,
            bootstrap(url),
            unique("quix"),
            source,
            target,
            str(count),
            str(BATCH),
        ]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode:
            raise RuntimeError(f"Quix Streams ended with {told.returncode}: {told.stderr[-2000:]}")
        return Round([float(told.stdout.splitlines()[-1])], count)

    return turn


def measure(settings: Settings) -> None:
    count = BATCH if settings.quick else MESSAGES
    with broker() as url:
        source, target = new_topic(url), new_topic(url)
        with connect(url, writers=1) as bridge:
            fill(bridge, source, SIZE, count, BATCH)
        turns = {name: make(url, source, target, count) for name, make in MAKERS.items()}
        found = in_turn(turns, settings.rounds)
        report = Report(settings, f"Kafka: consume, transform, produce, {count:,} x {SIZE} B, {BATCH:,} a transaction")
        name = "processor / loop by hand that fetches alike"
        report.figure(name, speed(found["ours"], found["tuned"]), "", at_least(1.0))
        report.figure("processor / loop by hand", speed(found["ours"], found["by hand"]), "", at_least(1.0))
        report.figure("processor / Quix Streams exactly-once", speed(found["ours"], found["quix"]), "", at_least(2.0))
        for name, rounds in found.items():
            report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")


MAKERS = {"by hand": by_hand, "tuned": tuned, "ours": ours, "quix": quix}


if __name__ == "__main__":
    run(measure)
