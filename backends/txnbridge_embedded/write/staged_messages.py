"""Staged messages: a transaction's messages in memory, by partition and in columns, until all are stored at once."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, repeat
from typing import Any

from txnbridge.errors import InvalidOption, NotFound, StorageFailed
from txnbridge.spi import Raw, RawHeaders, encode_item
from txnbridge_embedded.client.headers import pack
from txnbridge_embedded.client.schema import MAX_OFFSET, OFFSET_BITS
from txnbridge_embedded.client.store import StoredTopic
from txnbridge_embedded.settings import Settings

# A message's memory beyond its bytes: the header of the bytes object, and an entry in a list.
_OVERHEAD = 64
_MOST_AT_ONCE = 1000  # the most messages that `add_many` takes from its caller between two checks of the memory
MARK_EVERY_MS = 60_000  # the interval of the marks for retention by age: old messages are removed so much later
_MARKS_KEPT = 16  # the marks within a topic's retention size: a partition may exceed it by a sixteenth


@dataclass(slots=True, eq=False, repr=False)
class Rows:
    """The messages in memory for one partition, as a list for each column. A column that no message uses is None."""

    topic: StoredTopic
    partition: int  # its id
    size: int = 0
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] | None = None
    headers: list[str | None] | None = None
    timestamps: list[int | None] | None = None

    def add(self, value: bytes | None, key: bytes | None, headers: str | None, timestamp: int | None) -> None:
        count = len(self.values)
        self.values.append(value)
        self.keys = _appended(self.keys, count, key)
        self.headers = _appended(self.headers, count, headers)
        self.timestamps = _appended(self.timestamps, count, timestamp)

    def add_values(self, values: Sequence[bytes]) -> None:
        self.values += values
        for column in (self.keys, self.headers, self.timestamps):
            if column is not None:
                column.extend(repeat(None, len(values)))

    def columns(self, now: int) -> Iterator[Iterable[Any]]:
        """Return the columns timestamp, key, headers and value; a message without a timestamp gets `now`."""
        yield repeat(now) if self.timestamps is None else [now if at is None else at for at in self.timestamps]
        yield repeat(None) if self.keys is None else self.keys
        yield repeat(None) if self.headers is None else self.headers
        yield self.values


def _appended(column: list[Any] | None, count: int, entry: Any) -> list[Any] | None:
    if column is None:
        if entry is None:
            return None
        column = [None] * count
    column.append(entry)
    return column


class StagedMessages:
    """The messages that one transaction (or publisher) has in memory.

    `find_topic` looks a topic up or creates it. `overflow` is called beyond `spill_bytes`, and has to call `take`.
    """

    def __init__(
        self, find_topic: Callable[[str], StoredTopic], overflow: Callable[[], None], settings: Settings
    ) -> None:
        self._find_topic = find_topic
        self._overflow = overflow
        self._spill_bytes = settings.spill_bytes
        self._max_bytes = settings.max_message_bytes
        self._refuse = settings.refuse
        self._refuse_name = settings.refuse_name
        self._rotation: dict[str, int] = {}  # by topic: the counter for choosing a partition
        self._emptied = 0  # how often `overflow` was called
        self.count = 0  # messages added since `clear`, in memory or stored
        self.bytes = 0  # the size of the messages in memory
        self._topics: dict[str, StoredTopic] = {}
        self._rows: dict[int, Rows] = {}  # by partition id
        self._keyless: dict[str, Rows] = {}  # by topic: the partition for messages without a key in this transaction

    def clear(self) -> None:
        """Drop all messages, before a new transaction."""
        self.count = self.bytes = 0
        self._topics.clear()
        self._rows.clear()
        self._keyless.clear()

    def take(self) -> list[Rows]:
        """Return the messages in memory, by partition, and remove them from memory."""
        rows = [rows for rows in self._rows.values() if rows.values]
        self.bytes = 0
        self._rows.clear()
        self._keyless = {name: self._rows_of(old.topic, old.partition) for name, old in self._keyless.items()}
        return rows

    def pending(self) -> list[Rows]:
        """Return the messages in memory, by partition, and keep them in memory."""
        return [rows for rows in self._rows.values() if rows.values]

    def topics(self) -> list[StoredTopic]:
        """Return the topics to which messages were added since `clear`."""
        return list(self._topics.values())

    def add(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        """Add one message. Raise `NotFound` for a missing topic or partition, `InvalidOption` for a wrong message."""
        if key is None and partition is None:
            rows = self._keyless.get(topic) or self._choose(topic)
        else:
            rows = self._find(topic, key, partition)
        if self._refuse is not None:
            self._refuse(headers or (), self.count)
        if timestamp is not None and not 0 <= timestamp < 1 << 63:
            raise InvalidOption(f"a timestamp is milliseconds since 1970, not {timestamp}")
        packed = pack(headers) if headers else None
        size = (len(value) if value else 0) + (len(key) if key else 0) + (len(packed) if packed else 0)
        if size > self._max_bytes:
            text = f"a message for {topic} has {size} bytes with its key and headers; this broker accepts"
            raise InvalidOption(text + f" {self._max_bytes} (option max_message_bytes)")
        rows.add(value, key, packed, timestamp)
        rows.size += size
        self.count += 1
        self.bytes += size + _OVERHEAD
        if self.bytes >= self._spill_bytes:
            self._call_overflow()

    def add_many(self, topic: str, items: Iterable[Any]) -> None:
        """Add many messages for one topic. Those without a key go to one partition."""
        keyless = self._choose(topic)
        source = iter(items)
        most = 16
        while chunk := list(islice(source, most)):
            before, emptied = self.bytes, self._emptied
            plain = self._refuse is None and set(map(type, chunk)) == {bytes}
            if plain and max(map(len, chunk)) <= self._max_bytes:
                self._add_values(keyless, chunk)
            else:
                for item in chunk:
                    value, key, headers = encode_item(item)
                    self.add(topic, value, key, headers, None, None)
            # Of large messages only a few are taken at a time, so that a generator of them does not fill the memory.
            small = self._emptied == emptied and self.bytes - before < self._spill_bytes // 4
            most = min(most * 2, _MOST_AT_ONCE) if small else max(1, most // 2)
            keyless = self._keyless[topic]

    def _add_values(self, rows: Rows, values: Sequence[bytes]) -> None:
        size = sum(map(len, values))
        rows.add_values(values)
        rows.size += size
        self.count += len(values)
        self.bytes += size + _OVERHEAD * len(values)
        if self.bytes >= self._spill_bytes:
            self._call_overflow()

    def _call_overflow(self) -> None:
        self._emptied += 1
        self._overflow()

    def _topic(self, name: str) -> StoredTopic:
        topic = self._topics.get(name)
        if topic is None:
            if self._refuse_name is not None:
                self._refuse_name(name)
            topic = self._topics[name] = self._find_topic(name)
        return topic

    def _choose(self, name: str) -> Rows:
        """Choose the next partition of a topic, for a transaction's messages without a key; return its rows."""
        topic = self._topic(name)
        count = len(topic.partitions)
        # The first partition is random, so that programs with one message each do not all use the same partition.
        turn = self._rotation[name] = self._rotation.get(name, random.randrange(count)) + 1
        rows = self._keyless[name] = self._rows_of(topic, topic.partitions[turn % count])
        return rows

    def _find(self, name: str, key: bytes | None, number: int | None) -> Rows:
        topic = self._topic(name)
        count = len(topic.partitions)
        if number is None:
            assert key is not None
            number = partition_of(key, count) if count > 1 else 0
        elif not 0 <= number < count:
            raise NotFound(f"topic {name!r} has no partition {number}; it has {count}, numbered from 0")
        return self._rows_of(topic, topic.partitions[number])

    def _rows_of(self, topic: StoredTopic, partition: int) -> Rows:
        rows = self._rows.get(partition)
        if rows is None:
            rows = self._rows[partition] = Rows(topic, partition)
        return rows


# --- storing, inside a write transaction -----------------------------------------------------------------------------


def store(connection: sqlite3.Connection, rows: Rows, now: int) -> tuple[int, int]:
    """Append staged messages to their partition in the file, in the caller's write transaction.

    Return the first and the last offset. Raise `NotFound` if the topic was deleted.
    """
    count = len(rows.values)
    found = connection.execute(
        "UPDATE partitions SET next = next + ?, bytes = bytes + ? WHERE id = ? RETURNING next, bytes",
        (count, rows.size, rows.partition),
    ).fetchall()
    if not found:
        raise NotFound(f"topic {rows.topic.name!r} was deleted meanwhile")
    ((following, size),) = found
    first = following - count
    if following > MAX_OFFSET:
        raise StorageFailed(f"a partition of {rows.topic.name!r} has used all its {MAX_OFFSET} offsets")
    row_id = rows.partition << OFFSET_BITS | first
    numbered = zip(range(row_id, row_id + count), *rows.columns(now), strict=False)  # some columns never end
    connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", numbered)
    if rows.topic.retention_ms is not None or rows.topic.retention_bytes is not None:
        _mark(connection, rows, first, now, size - rows.size)
    return first, following - 1


def _mark(connection: sqlite3.Connection, rows: Rows, offset: int, now: int, size: int) -> None:
    """Store a mark, by which retention finds old messages of the partition of `rows`.

    A mark is an offset, its time `now` (ms since 1970), and `size`, the bytes before it. No mark is stored if the last
    one is recent and few bytes were added since.
    """
    last = connection.execute(
        "SELECT at, bytes FROM marks WHERE partition_id = ? ORDER BY offset DESC LIMIT 1", (rows.partition,)
    ).fetchone()
    step = (rows.topic.retention_bytes or 1 << 62) // _MARKS_KEPT
    if last is None or now - last[0] >= MARK_EVERY_MS or size - last[1] >= step:
        connection.execute("INSERT INTO marks VALUES (?, ?, ?, ?)", (rows.partition, offset, now, size))


_MASK = 0xFFFF_FFFF
_FACTOR = 0x5BD1_E995


def murmur2(data: bytes) -> int:
    """Return MurmurHash 2 with Kafka's seed, as an unsigned number of 32 bits."""
    length = len(data)
    state = 0x9747_B28C ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        state = state * _FACTOR & _MASK ^ word
    if whole != length:
        state = (state ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    state = (state ^ state >> 13) * _FACTOR & _MASK
    return state ^ state >> 15


@lru_cache(maxsize=16384)  # hashing takes longer than all other work of a send, and keys repeat
def partition_of(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFF_FFFF) % partitions
