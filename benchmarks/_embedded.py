"""The embedded broker's files for the benchmarks, and their yardstick, plain SQLite files as durable as these."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from txnbridge_embedded.client.schema import PAGE_BYTES
from txnbridge_embedded.client.store import CHECKPOINT_BYTES

import txnbridge
from benchmarks._harness import Contender, Lap, Settings, contender

NAME = "Embedded"
KIB = 1024
# The sizes of a page, and of the log when it is copied: SQLite's defaults, and those of the embedded broker.
DEFAULT_PAGE_BYTES, DEFAULT_LOG_BYTES = 4 * KIB, 1000 * 4 * KIB
OUR_PAGE_BYTES, OUR_LOG_BYTES = PAGE_BYTES, CHECKPOINT_BYTES
Row = tuple[int | None, int, bytes | None, str | None, bytes]  # id, timestamp, key, headers, value


def bodies(count: int, size: int) -> list[bytes]:
    """Return values that are distinct objects, as those of messages are. Their bytes do not matter here."""
    return [number.to_bytes(8, "big") + bytes(size - 8) for number in range(count)]


@contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, so that no round finds the file of an earlier round. Remove it at the end."""
    path = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def fresh_bridge(folder: Path, **settings: Any) -> Iterator[txnbridge.Bridge]:
    """Yield a bridge to an empty file of the embedded broker, with the broker's defaults: durability=full."""
    with fresh(folder) as path, txnbridge.connect(url(path), **settings) as bridge:
        yield bridge


def url(folder: Path) -> str:
    return f"embedded:{folder / 'broker.db'}"


@contextmanager
def broker(settings: Settings) -> Iterator[str]:
    """Yield the URL of an empty file."""
    with fresh(settings.folder) as folder:
        yield url(folder)


def new_topic(url: str, partitions: int = 1) -> str:
    """Return the name of a topic, which its first message creates."""
    return "topic"


@contender
def writing(settings: Settings, values: Sequence[bytes], many: bool = True, key: str | None = None) -> Iterator[Lap]:
    """A lap is a transaction with all of these values, in a file that is new in each round."""
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


@contextmanager
def plain(
    folder: Path, page_bytes: int = DEFAULT_PAGE_BYTES, log_bytes: int = DEFAULT_LOG_BYTES
) -> Iterator[sqlite3.Connection]:
    """Yield a plain SQLite file, as durable as the embedded broker's: its log (WAL) is synchronised at each commit."""
    path = folder / f"plain-{page_bytes}.db"
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {log_bytes // page_bytes}")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS messages("
            "id INTEGER PRIMARY KEY, timestamp INTEGER NOT NULL, key BLOB, headers TEXT, value BLOB)"
        )
        yield connection


def rows(values: Sequence[bytes]) -> list[Row]:
    return [(None, 1_700_000_000_000, None, None, value) for value in values]


def insert(connection: sqlite3.Connection, ready: Sequence[Row]) -> int:
    """Insert rows in one transaction, in SQLite's fastest way: the rows are tuples, and no Python runs between them."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", ready)
    connection.execute("COMMIT")
    return len(ready)


@contender
def inserting_into(folder: Path, ready: Sequence[Row]) -> Iterator[Lap]:
    with plain(folder) as connection:
        yield lambda: insert(connection, ready)


def inserting(
    settings: Settings,
    values: Sequence[bytes],
    page_bytes: int = DEFAULT_PAGE_BYTES,
    log_bytes: int = DEFAULT_LOG_BYTES,
) -> Contender:
    """Return a contender whose lap inserts a row for each value, into a file that is new in each round."""
    ready = rows(values)

    @contextmanager
    def contender() -> Iterator[Lap]:
        with fresh(settings.folder) as folder, plain(folder, page_bytes, log_bytes) as connection:
            yield lambda: insert(connection, ready)

    return contender


def spread(settings: Settings, url: str, topic: str, partitions: int, value: bytes) -> Contender:
    """Return a contender whose lap inserts as many rows as a topic has partitions."""
    return inserting(settings, [value] * partitions)


def select(connection: sqlite3.Connection, first: int, last: int, piece: int) -> int:
    """Select rows by their ids, `piece` rows at a time; return their number."""
    count = 0
    found = connection.execute(
        "SELECT id, timestamp, key, headers, value FROM messages WHERE id BETWEEN ? AND ? ORDER BY id", (first, last)
    )
    while fetched := found.fetchmany(piece):
        for _ in fetched:
            pass
        count += len(fetched)
    return count


@contender
def selecting(folder: Path, messages: int, page_bytes: int, piece: int) -> Iterator[Lap]:
    with plain(folder, page_bytes) as connection:
        yield lambda: select(connection, 1, messages, piece)


@contender
def synchronising(settings: Settings) -> Iterator[Lap]:
    """A lap writes 4 KiB to an existing file and synchronises it."""
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
