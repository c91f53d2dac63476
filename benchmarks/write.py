"""Writing to the embedded broker beside `executemany` on a plain SQLite file of the same columns and durability.

Each transaction has 1,000 messages of 1 KiB; each round begins with a fresh file. The peer's rows are tuples before
the clock starts. It runs twice: as SQLite is by default, and with the embedded broker's page size and log length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._files import (
    DEFAULT_LOG_BYTES,
    DEFAULT_PAGE_BYTES,
    KIB,
    OUR_LOG_BYTES,
    OUR_PAGE_BYTES,
    bodies,
    fresh,
    fresh_bridge,
    insert,
    plain,
    rows,
)
from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, per_unit, run, speed

MESSAGES = 1000  # a transaction


def embedded(settings: Settings, values: list[bytes], many: bool, key: str | None = None) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with fresh_bridge(settings.folder) as bridge:

            def lap() -> int:
                with bridge.transaction() as txn:
                    if many:
                        txn.send_many("topic", values)
                    else:
                        for value in values:
                            txn.send("topic", value, key=key)
                return len(values)

            yield lap

    return contender


def executemany(settings: Settings, values: list[bytes], page_bytes: int, log_bytes: int) -> Contender:
    ready = rows(values)

    @contextmanager
    def contender() -> Iterator[Lap]:
        with fresh(settings.folder) as folder, plain(folder, page_bytes, log_bytes) as connection:

            def lap() -> int:
                insert(connection, ready)
                return len(ready)

            yield lap

    return contender


def measure(settings: Settings) -> None:
    report = Report(settings, f"Writing, {MESSAGES:,} x 1 KiB a transaction, durable")
    values = bodies(MESSAGES, KIB)
    found = alternate(
        settings,
        {
            "send_many": embedded(settings, values, many=True),
            "executemany": executemany(settings, values, DEFAULT_PAGE_BYTES, DEFAULT_LOG_BYTES),
            "send": embedded(settings, values, many=False),
            "executemany, our pages": executemany(settings, values, OUR_PAGE_BYTES, OUR_LOG_BYTES),
            "send with a key": embedded(settings, values, many=False, key="42"),
        },
    )
    for ours in ("send_many", "send", "send with a key"):
        for peer in ("executemany", "executemany, our pages"):
            report.figure(f"`{ours}` / `{peer}`", speed(found[ours], found[peer]), "", at_least(0.7))
    for name, rounds in found.items():
        report.figure(f"`{name}`, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
