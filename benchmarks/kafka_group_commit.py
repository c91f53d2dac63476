"""Small transactions of many threads on one bridge to Kafka, beside the same loop by hand on one plain producer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import (
    Lap,
    Report,
    Round,
    Settings,
    a_second,
    as_turn,
    at_least,
    at_most,
    by_threads,
    estimate,
    in_turn,
    quantile,
    run,
    speed,
)
from benchmarks._kafka import broker, new_topic, plain_producer
from benchmarks._small import BODY, small
from txnbridge import connect


@contextmanager
def by_hand(url: str, topic: str) -> Iterator[Lap]:
    producer = plain_producer(url)

    def lap() -> int:
        producer.begin_transaction()
        producer.produce(topic, BODY)
        producer.commit_transaction(30)
        return 1

    yield lap


def ours(settings: Settings, url: str, topic: str, threads: int, group_commit: bool | None = None) -> Round:
    with connect(url, group_commit=group_commit) as bridge:
        return by_threads([small(bridge, topic)] * threads, settings.seconds)


def measure(settings: Settings) -> None:
    with broker() as url:
        topic = new_topic(url, 6)
        found = in_turn(
            {
                "by hand": as_turn(lambda: by_hand(url, topic), settings),
                "64": lambda: ours(settings, url, topic, 64),
                "64 off": lambda: ours(settings, url, topic, 64, False),
                "1": lambda: ours(settings, url, topic, 1),
                "1 off": lambda: ours(settings, url, topic, 1, False),
            },
            settings.rounds,
        )
    report = Report(settings, "Kafka: transactions of one message of 100 B by the threads of one bridge")
    report.figure("64 threads / loop by hand", speed(found["64"], found["by hand"]), "", at_least(20))
    report.figure("64 threads / the same, group_commit=False", speed(found["64"], found["64 off"]))
    for name in ("64", "64 off", "1", "by hand"):
        report.figure(f"{name}: transactions a second", a_second(found[name]))
    ratios = [quantile(each.laps, 0.99) / quantile(each.laps, 0.5) for each in found["64"]]
    report.figure("64 threads: p99 / p50", estimate(ratios), "", at_most(5))
    report.figure("1 thread / the same, group_commit=False", speed(found["1"], found["1 off"]), "", at_least(0.95))


if __name__ == "__main__":
    run(measure)
