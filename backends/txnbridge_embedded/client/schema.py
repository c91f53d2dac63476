"""The creation of the tables in `tables.sql`, and the layout of message row ids."""

from __future__ import annotations

import sqlite3
import time
import uuid
from importlib.resources import files

APPLICATION_ID = 0x74786E62  # "txnb" in the file's header: a file of this broker
VERSION = 2  # the schema's version, in the file's header

OFFSET_BITS = 40  # a message's row id is partition << 40 | offset, so that a partition's messages are adjacent
MAX_OFFSET = (1 << OFFSET_BITS) - 1
MAX_PARTITION_ID = (1 << 22) - 1  # a row id has 63 bits: 40 are for the offset, 22 for the partition, and one is unused

# Seven rows of 1 KiB fit on this page; on SQLite's usual page of 4 KiB three would fit, and a quarter would be wasted.
# A commit of one message writes a page of each changed table, so much larger pages would make small commits slow.
PAGE_BYTES = 8192


def create(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty file, in the caller's write transaction."""
    for statement in (files("txnbridge_embedded.client") / "tables.sql").read_text("utf-8").split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute(
        "INSERT INTO meta VALUES ('cluster', ?), ('created_at', ?)", (str(uuid.uuid4()), time.time_ns() // 1_000_000)
    )
