"""The duration of a durable commit: a whole transaction, from its begin to the end of its block.

The yardsticks are writing 4 KiB to an existing file and synchronising it, which is the least that any durable commit
does, and the same rows in a transaction of a plain SQLite file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._files import KIB, bodies, fresh, fresh_bridge, insert, plain, rows
from benchmarks._harness import Contender, Lap, Report, Settings, alternate, lap_quantile, run, speed


def synchronising(settings: Settings) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with fresh(settings.folder) as folder:
            file = os.open(folder / "yardstick", os.O_RDWR | os.O_CREAT)
            try:

                def lap() -> int:
                    os.pwrite(file, bytes(4 * KIB), 0)
                    os.fdatasync(file)
                    return 1

                yield lap
            finally:
                os.close(file)

    return contender


def embedded(settings: Settings, count: int) -> Contender:
    values = bodies(count, KIB)

    @contextmanager
    def contender() -> Iterator[Lap]:
        with fresh_bridge(settings.folder) as bridge:

            def lap() -> int:
                with bridge.transaction() as txn:
                    txn.send_many("topic", values)
                return 1

            yield lap

    return contender


def plain_sqlite(settings: Settings, count: int) -> Contender:
    ready = rows(bodies(count, KIB))

    @contextmanager
    def contender() -> Iterator[Lap]:
        with fresh(settings.folder) as folder, plain(folder) as connection:

            def lap() -> int:
                insert(connection, ready)
                return 1

            yield lap

    return contender


def measure(settings: Settings) -> None:
    report = Report(settings, "Durable commits of 1 KiB messages (p50 and p99 of each round)")
    found = alternate(
        settings,
        {
            "write 4 KiB, fdatasync": synchronising(settings),
            "embedded, 1 message": embedded(settings, 1),
            "plain SQLite, 1 row": plain_sqlite(settings, 1),
            "embedded, 1,000 messages": embedded(settings, 1000),
            "plain SQLite, 1,000 rows": plain_sqlite(settings, 1000),
        },
    )
    for name, rounds in found.items():
        report.figure(f"{name}: p50", lap_quantile(rounds, 0.5, 1e3), "ms")
        report.figure(f"{name}: p99", lap_quantile(rounds, 0.99, 1e3), "ms")
    yardstick = found["write 4 KiB, fdatasync"]
    report.figure("commits a second of 1 message / fdatasyncs", speed(found["embedded, 1 message"], yardstick))
    report.figure(
        "commits a second of 1 message / of plain SQLite",
        speed(found["embedded, 1 message"], found["plain SQLite, 1 row"]),
    )


if __name__ == "__main__":
    run(measure)
