"""Small transactions of many threads on one bridge of the embedded broker, with and without group commit.

Beside 16 threads stand 16 threads of plain SQLite, as durable (`durability=full`), each with a connection of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._files import fresh, fresh_bridge, insert, plain, rows
from benchmarks._harness import (
    Contender,
    Lap,
    Report,
    Round,
    Settings,
    a_second,
    at_least,
    at_most,
    by_threads,
    estimate,
    in_turn,
    quantile,
    run,
    speed,
)
from benchmarks._small import BODY, small


def embedded(settings: Settings, threads: int, group_commit: bool | None = None) -> Round:
    with fresh_bridge(settings.folder, group_commit=group_commit) as bridge:
        return by_threads([small(bridge, "topic")] * threads, settings.seconds)


def sqlite(settings: Settings, threads: int) -> Round:
    with fresh(settings.folder) as folder, plain(folder):  # made once: SQLite locks a file to change its journal
        return by_threads([inserting(folder)] * threads, settings.seconds)


def inserting(folder: Path) -> Contender:
    ready = rows([BODY])

    @contextmanager
    def contender() -> Iterator[Lap]:
        with plain(folder) as connection:

            def lap() -> int:
                insert(connection, ready)
                return 1

            yield lap

    return contender


def measure(settings: Settings) -> None:
    found = in_turn(
        {
            "16": lambda: embedded(settings, 16),
            "16 off": lambda: embedded(settings, 16, False),
            "16 sqlite": lambda: sqlite(settings, 16),
            "64": lambda: embedded(settings, 64),
            "1": lambda: embedded(settings, 1),
            "1 off": lambda: embedded(settings, 1, False),
        },
        settings.rounds,
    )
    report = Report(settings, "Embedded: transactions of one message of 100 B by the threads of one bridge")
    report.figure("16 threads / 16 threads of plain SQLite", speed(found["16"], found["16 sqlite"]), "", at_least(1.2))
    report.figure("16 threads / the same, group_commit=False", speed(found["16"], found["16 off"]))
    for name in ("16", "16 off", "64", "1"):
        report.figure(f"{name}: transactions a second", a_second(found[name]))
    report.figure("yardstick: 16 of plain SQLite", a_second(found["16 sqlite"]))
    ratios = [quantile(each.laps, 0.99) / quantile(each.laps, 0.5) for each in found["64"]]
    report.figure("64 threads: p99 / p50", estimate(ratios), "", at_most(5))
    report.figure("1 thread / the same, group_commit=False", speed(found["1"], found["1 off"]), "", at_least(0.95))


if __name__ == "__main__":
    run(measure)
