"""Reading from the embedded broker beside a bare SELECT of the same columns from a plain SQLite file.

Both read a file of messages from its beginning, in pieces of 1,000. There are two files of the peer: one with
SQLite's default page size, and one with the embedded broker's. "Acknowledged" is a group that acknowledges each piece
in a transaction; its peer stores a position in a transaction of the same durability.

The file is in the system's cache, so reading does not wait and is measured in processor time. Acknowledging waits for
the disk and is measured in wall time.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import txnbridge
from benchmarks._files import DEFAULT_PAGE_BYTES, KIB, OUR_PAGE_BYTES, bodies, fresh, insert, plain, rows, url
from benchmarks._harness import PROCESSOR, Contender, Lap, Report, Settings, alternate, at_least, per_unit, run, speed

PIECE = 1000
SIZES = {"1 KiB": KIB, "100 B": 100}
_names = itertools.count()


def fill(folder: Path, messages: int, size: int) -> None:
    """Write the same messages into a file of the embedded broker and into two plain SQLite files."""
    values = bodies(PIECE, size)
    ready = rows(values)
    with txnbridge.connect(url(folder)) as bridge:
        for _ in range(messages // PIECE):
            with bridge.transaction() as txn:
                txn.send_many("topic", values)
    for page_bytes in (DEFAULT_PAGE_BYTES, OUR_PAGE_BYTES):
        with plain(folder, page_bytes) as connection:
            for _ in range(messages // PIECE):
                insert(connection, ready)


def consume(consumer: txnbridge.Consumer, messages: int) -> None:
    while messages:
        for _ in (batch := consumer.poll(PIECE)):
            pass
        messages -= len(batch)


def reading(folder: Path, messages: int, in_group: bool) -> Contender:
    """Return a contender whose lap is a new consumer that reads everything, in a new group or without one."""

    @contextmanager
    def contender() -> Iterator[Lap]:
        with txnbridge.connect(url(folder)) as bridge:

            def lap() -> int:
                group = f"group-{next(_names)}" if in_group else None
                with bridge.consumer("topic", group=group) as consumer:
                    consume(consumer, messages)
                return messages

            yield lap

    return contender


def acknowledging(folder: Path, messages: int) -> Contender:
    """Return a contender whose lap reads and acknowledges one piece; after the last piece a new group begins."""

    @contextmanager
    def contender() -> Iterator[Lap]:
        with txnbridge.connect(url(folder)) as bridge:
            consumer = bridge.consumer("topic", group=f"group-{next(_names)}")
            left = messages

            def lap() -> int:
                nonlocal consumer, left
                if not left:
                    consumer.close()
                    consumer = bridge.consumer("topic", group=f"group-{next(_names)}")
                    left = messages
                with bridge.transaction() as txn:
                    batch = consumer.poll(PIECE)
                    txn.ack(batch)
                left -= len(batch)
                return len(batch)

            yield lap

    return contender


def select(connection: sqlite3.Connection, first: int, last: int) -> int:
    count = 0
    found = connection.execute(
        "SELECT id, timestamp, key, headers, value FROM messages WHERE id BETWEEN ? AND ? ORDER BY id", (first, last)
    )
    while piece := found.fetchmany(PIECE):
        for _ in piece:
            pass
        count += len(piece)
    return count


def selecting(folder: Path, messages: int, page_bytes: int) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with plain(folder, page_bytes) as connection:
            yield lambda: select(connection, 1, messages)

    return contender


def storing_a_position(folder: Path, messages: int) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with plain(folder, OUR_PAGE_BYTES) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS positions(id INTEGER PRIMARY KEY, next INTEGER)")
            at = 1

            def lap() -> int:
                nonlocal at
                connection.execute("BEGIN IMMEDIATE")
                count = select(connection, at, at + PIECE - 1)
                at = at + count if at + count <= messages else 1
                connection.execute("INSERT OR REPLACE INTO positions VALUES (1, ?)", (at,))
                connection.execute("COMMIT")
                return count

            yield lap

    return contender


def measure(settings: Settings) -> None:
    messages = PIECE if settings.quick else 200 * PIECE
    for name, size in SIZES.items():
        with fresh(settings.folder) as folder:
            fill(folder, messages, size)
            report = Report(settings, f"Reading, {name}")
            found = alternate(
                settings,
                {
                    "alone": reading(folder, messages, in_group=False),
                    "SELECT": selecting(folder, messages, DEFAULT_PAGE_BYTES),
                    "SELECT, our pages": selecting(folder, messages, OUR_PAGE_BYTES),
                    "in a group": reading(folder, messages, in_group=True),
                },
                PROCESSOR,
            )
            target = at_least(0.7) if size == KIB else None
            for ours in ("alone", "in a group"):
                for peer in ("SELECT", "SELECT, our pages"):
                    report.figure(f"{ours} / {peer}", speed(found[ours], found[peer]), "", target)
            acknowledged = {
                "acknowledged": acknowledging(folder, messages),
                "SELECT, our pages, and a position": storing_a_position(folder, messages),
            }
            found |= alternate(settings, acknowledged)
            report.figure(" / ".join(acknowledged), speed(*(found[name] for name in acknowledged)))
            for what, rounds in found.items():
                report.figure(f"{what}, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
