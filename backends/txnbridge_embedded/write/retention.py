"""Retention: removes the oldest messages of topics with a limit of age or size."""

from __future__ import annotations

import sqlite3

from txnbridge.spi import Deadline
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.client.store import FileConnection, Store, StoredTopic, now_ms
from txnbridge_embedded.outcome.ending import remove_messages
from txnbridge_embedded.write.staged_messages import MARK_EVERY_MS


def trim(store: Store, connection: FileConnection, topic: StoredTopic, deadline: Deadline) -> bool:
    """Remove a batch of each partition's messages beyond the topic's retention; return whether none is left."""
    if topic.retention_ms is None and topic.retention_bytes is None:
        return True
    done = True
    for partition in topic.partitions:
        with store.reading(connection, deadline):
            found = _removable(connection, topic, partition)
        if found is not None:
            with store.writing(connection, deadline, "removing messages past their retention"):
                done &= _trim_batch(store, connection, topic, partition)
    return done


def _trim_batch(store: Store, connection: sqlite3.Connection, topic: StoredTopic, partition: int) -> bool:
    found = _removable(connection, topic, partition)
    if found is None:
        return True
    first, end = found
    reached = remove_messages(store, connection, partition, first, end - 1) + 1
    connection.execute("UPDATE partitions SET first = ? WHERE id = ?", (reached, partition))
    # The last mark at or before the new beginning stays: it has the age and the byte position of the messages there.
    connection.execute(
        "DELETE FROM marks WHERE partition_id = ? AND offset <"
        " (SELECT max(offset) FROM marks WHERE partition_id = ? AND offset <= ?)",
        (partition, partition, reached),
    )
    return reached == end


def _removable(connection: sqlite3.Connection, topic: StoredTopic, partition: int) -> tuple[int, int] | None:
    """Return a partition's oldest offset, and the one behind the last message to be removed; None if there is none."""
    row = connection.execute("SELECT first, next, bytes FROM partitions WHERE id = ?", (partition,)).fetchone()
    if row is None:
        return None
    first, following, size = row
    end = max(
        _expired_before(connection, topic.retention_ms, partition, following),
        _oversize_before(connection, topic.retention_bytes, partition, size),
    )
    (undecided,) = connection.execute(
        "SELECT min(first) FROM undecided WHERE partition_id = ?", (partition,)
    ).fetchone()
    end, base = min(end, following if undecided is None else undecided), partition << OFFSET_BITS
    # An aborted transaction may follow that message: a group that has read all messages has its position between them.
    (last,) = connection.execute(
        "SELECT max(id) FROM messages WHERE id >= ? AND id < ?", (base + first, base + end)
    ).fetchone()
    return None if last is None else (first, last - base + 1)


def _expired_before(connection: sqlite3.Connection, kept_ms: int | None, partition: int, following: int) -> int:
    """Return the offset before which all messages are older than the topic's retention time `kept_ms`.

    `following` is the partition's next offset.
    """
    if kept_ms is None:
        return 0
    oldest_kept = now_ms() - kept_ms
    query = "SELECT max(CASE WHEN at <= ? THEN offset END), max(at) FROM marks WHERE partition_id = ?"
    offset, newest = connection.execute(query, (oldest_kept, partition)).fetchone()
    # A message gets a mark if the last mark is older than MARK_EVERY_MS. So no message is newer than this sum.
    return following if newest is not None and newest + MARK_EVERY_MS <= oldest_kept else offset or 0


def _oversize_before(connection: sqlite3.Connection, kept: int | None, partition: int, size: int) -> int:
    """Return the offset before which retention may remove messages by size: `kept` bytes remain (None: all).

    `size` is the number of bytes that were ever stored in the partition.
    """
    if kept is None:
        return 0
    (offset,) = connection.execute(
        "SELECT max(offset) FROM marks WHERE partition_id = ? AND bytes <= ?", (partition, size - kept)
    ).fetchone()
    return offset or 0
