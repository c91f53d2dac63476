"""The files of the benchmarks: the embedded broker's, and plain SQLite files with the same columns and durability."""

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

KIB = 1024
# The sizes of a page, and of the log when it is copied: SQLite's defaults, and those of the embedded broker.
DEFAULT_PAGE_BYTES, DEFAULT_LOG_BYTES = 4 * KIB, 1000 * 4 * KIB
OUR_PAGE_BYTES, OUR_LOG_BYTES = PAGE_BYTES, CHECKPOINT_BYTES
Row = tuple[int | None, int, bytes | None, str | None, bytes]  # id, timestamp, key, headers, value


def bodies(count: int, size: int) -> list[bytes]:
    """Return values that are distinct objects, as those of messages are. Their bytes do not matter here."""
    return [number.to_bytes(8, "big") + bytes(size - 8) for number in range(count)]


def rows(values: Sequence[bytes]) -> list[Row]:
    return [(None, 1_700_000_000_000, None, None, value) for value in values]


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


def insert(connection: sqlite3.Connection, ready: Sequence[Row]) -> None:
    """Insert rows in one transaction, in SQLite's fastest way: the rows are tuples, and no Python runs between them."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", ready)
    connection.execute("COMMIT")


def bytes_in(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))
