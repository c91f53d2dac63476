"""Small transactions of many threads on one bridge to Kafka, beside the same loop by hand on one plain producer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import (
    Lap,
    Report,
    Settings,
    a_second,
    as_turn,
    at_least,
    in_turn,
    run,
    speed,
)
from benchmarks._kafka import broker, new_topic, plain_producer
from benchmarks._small import BODY, by_threads_of_one_bridge, report_spread


@contextmanager
def by_hand(url: str, topic: str) -> Iterator[Lap]:
    producer = plain_producer(url)

    def lap() -> int:
        producer.begin_transaction()
        producer.produce(topic, BODY)
        producer.commit_transaction(30)
        return 1

    yield lap


def measure(settings: Settings) -> None:
    with broker() as url:
        topic = new_topic(url, 6)
        found = in_turn(
            {
                "by hand": as_turn(lambda: by_hand(url, topic), settings),
                "64": lambda: by_threads_of_one_bridge(settings, url, topic, 64),
                "64 off": lambda: by_threads_of_one_bridge(settings, url, topic, 64, False),
                "1": lambda: by_threads_of_one_bridge(settings, url, topic, 1),
                "1 off": lambda: by_threads_of_one_bridge(settings, url, topic, 1, False),
            },
            settings.rounds,
        )
    report = Report(settings, "Kafka: transactions of one message of 100 B by the threads of one bridge")
    report.figure("64 threads / loop by hand", speed(found["64"], found["by hand"]), "", at_least(20))
    report.figure("64 threads / the same, group_commit=False", speed(found["64"], found["64 off"]))
    for name in ("64", "64 off", "1", "by hand"):
        report.figure(f"{name}: transactions a second", a_second(found[name]))
    report_spread(report, found["64"])
    report.figure("1 thread / the same, group_commit=False", speed(found["1"], found["1 off"]), "", at_least(0.95))


if __name__ == "__main__":
    run(measure)
