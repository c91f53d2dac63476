"""The position of a reader in one partition, and the reading of the partition's messages."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from txnbridge.errors import PositionLost, StorageFailed
from txnbridge.spi import NO_HEADERS, Message, MessageColumns, Partition
from txnbridge_embedded.client import headers
from txnbridge_embedded.client.readable_ranges import Bounds, Range, merged, without
from txnbridge_embedded.client.schema import MAX_OFFSET, OFFSET_BITS

# How many rows are fetched first. The sizes of these determine the later fetches, so that memory is not filled.
_FIRST_ROWS = 4
_SAMPLES = 16
_MOST_DELIVERY_COUNTS = 1000  # with more, the counts of acknowledged messages are dropped

Row = tuple[int, int, bytes | None, str | None, bytes | None]

# The type of the items that `poll`, or `poll_columns`, returns.
Found = TypeVar("Found", bound=Message | MessageColumns)


class Cursor:
    """A reader's position in a partition, with the offsets that it has to skip or to deliver again."""

    def __init__(self, bounds: Bounds, next: int, owner: str, epoch: int = 0) -> None:
        self.id = bounds.id
        self.partition = bounds.partition
        self.bounds = bounds
        self.epoch = epoch
        self.source: object = None
        self.paused = False
        self.lost = False  # True if retention has removed the next message, and `take` has raised `PositionLost`
        self.next = next  # the next offset to read
        self.taken: deque[Range] = deque()  # offsets from `next` on that are acknowledged or reserved
        self._owner = owner
        self.again: deque[Range] = deque()  # offsets below `next` that are to be delivered again
        self._handed_out_to = next  # lower offsets were handed out before
        self._delivery_counts: dict[int, int] = {}  # delivery counts above 1, by offset

    @property
    def position(self) -> int:
        """The lowest offset that may still be delivered."""
        return self.again[0][0] if self.again else self.next

    @property
    def ready(self) -> bool:
        """True if there are messages to read."""
        while self.taken and self.taken[0][0] <= self.next:
            self.next = max(self.next, self.taken.popleft()[1] + 1)
        return not self.paused and (bool(self.again) or self.next < self.bounds.end)

    def seek(self, offset: int) -> None:
        """Continue at an offset. Messages that were handed out before get higher delivery counts."""
        self.next = offset
        self.lost = False
        self.again = deque()

    def replay(self, offset: int) -> None:
        """Continue at an offset as if no message had been read yet: delivery counts start at 1."""
        self.seek(offset)
        self._handed_out_to = offset

    def repeat(self, ranges: Iterable[Range]) -> None:
        """Schedule offsets for redelivery, except those from the next unread offset on, which will be read anyway."""
        passed = without(merged(ranges), [(self.next, MAX_OFFSET)])
        self.again = deque(merged([*self.again, *passed]))

    def forget_below(self, offset: int) -> None:
        """Drop the delivery counts of acknowledged messages, those below `offset`, if there are many counts."""
        if len(self._delivery_counts) > _MOST_DELIVERY_COUNTS:
            self._delivery_counts = {key: count for key, count in self._delivery_counts.items() if key >= offset}

    def take(
        self,
        connection: sqlite3.Connection,
        limit: int,
        room: int,
        convert: Callable[[Cursor, list[Row]], list[Found]],
        into: list[Found],
    ) -> tuple[int, int]:
        """Append messages to the list `into`, those for redelivery first; return their number and their size in bytes.

        These are at most `limit` messages of about `room` bytes, perhaps none even if `ready` is true. `convert` is
        `Cursor.to_messages` or `Cursor.to_columns`. Raise `PositionLost` if retention has removed the next message.
        """
        repeating = bool(self.again)
        if repeating:
            first, last = self.again[0]
            stop = last + 1
        else:
            first, last = self.next, -1
            stop = min(self.taken[0][0], self.bounds.end) if self.taken else self.bounds.end
        rows, size, reached = self._read(connection, first, stop, limit, room)
        try:
            found = convert(self, rows)
        except StorageFailed:
            rows = self._before_damage(rows)
            found, reached = convert(self, rows), rows[-1][0] - (self.id << OFFSET_BITS) + 1
        into += found
        self._handed_out_to = max(self._handed_out_to, reached)
        if not repeating:
            self.next = reached
        elif reached <= last:
            self.again[0] = (reached, last)
        else:
            self.again.popleft()
        return len(rows), size

    def _read(
        self, connection: sqlite3.Connection, first: int, stop: int, limit: int, room: int
    ) -> tuple[list[Row], int, int]:
        """Return the rows of offsets from `first` to before `stop`, their size, and the offset to read next."""
        base = self.id << OFFSET_BITS
        rows, size, complete = read_rows(connection, base + first, base + stop, limit, room)
        if not rows or rows[0][0] != base + first:
            # The gap is from an aborted transaction, or from retention, which may have removed undelivered messages.
            self.check_kept(connection, first)
        return rows, size, stop if complete else rows[-1][0] - base + 1

    def check_kept(self, connection: sqlite3.Connection, first: int) -> None:
        """Raise `PositionLost` if retention has removed the message at `first`, which is to be delivered next."""
        row = connection.execute("SELECT first FROM partitions WHERE id = ?", (self.id,)).fetchone()
        if row is not None and first < row[0]:
            self.lost = True
            raise position_lost(self._owner, self.partition, first, row[0])

    def to_messages(self, rows: list[Row]) -> list[Message]:
        topic, number = self.partition
        base = self.id << OFFSET_BITS
        source, new, none, unpack = self.source, tuple.__new__, NO_HEADERS, headers.unpack
        if not rows or rows[0][0] - base >= self._handed_out_to:
            # This runs for nearly every message, so tuple.__new__ is used, which is much faster than Message(...).
            return [
                new(Message, (topic, number, (id - base,), key, value, none if h is None else unpack(h), at, 1, source))
                for id, at, key, h, value in rows
            ]
        return [
            Message(topic, number, (id - base,), key, value, unpack(h), at, self._count(id - base), source)
            for id, at, key, h, value in rows
        ]

    def to_columns(self, rows: list[Row]) -> list[MessageColumns]:
        if not rows:
            return []
        ids, times, keys, texts, values = zip(*rows, strict=True)
        base = self.id << OFFSET_BITS
        raw = [headers.unpack_raw(text) if text else None for text in texts]
        return [MessageColumns(*self.partition, ([id - base for id in ids],), keys, values, raw, times)]

    def _before_damage(self, rows: list[Row]) -> list[Row]:
        """Return the rows before the first one with damaged headers. Raise `StorageFailed` if that is the first row."""
        for count, (row_id, _, _, text, _) in enumerate(rows):
            try:
                headers.unpack(text)
            except StorageFailed as error:
                if count:
                    return rows[:count]
                topic, number = self.partition
                offset = row_id - (self.id << OFFSET_BITS)
                raise StorageFailed(
                    f"{topic}[{number}] at {offset}: {error}. To continue without this message:"
                    f" seek({{({topic!r}, {number}): ({offset + 1},)}})"
                ) from None
        return rows

    def _count(self, offset: int) -> int:
        if offset >= self._handed_out_to:
            return 1
        count = self._delivery_counts[offset] = self._delivery_counts.get(offset, 1) + 1
        return count


def position_lost(owner: str, partition: Partition, position: int, kept: int) -> PositionLost:
    """Return the error for a position of `owner` whose message retention has removed; `kept` is the first left."""
    topic, number = partition
    return PositionLost(
        f"{owner} is {position} in {topic}[{number}], but retention has removed everything before {kept}."
        f" Nothing was skipped. To continue without the removed messages: seek({{({topic!r}, {number}): ({kept},)}})"
    )


def read_rows(
    connection: sqlite3.Connection, first: int, stop: int, limit: int, room: int
) -> tuple[list[Row], int, bool]:
    """Return rows of `messages`, their estimated size, and whether no row is left before `stop`.

    There are at most `limit` rows, and fewer if they exceed `room` bytes.
    """
    cursor = connection.execute(
        "SELECT id, timestamp, key, headers, value FROM messages WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
        (first, stop, limit),
    )
    rows: list[Row] = []
    size, ask = 0, _FIRST_ROWS
    while more := cursor.fetchmany(ask):
        rows += more
        # A sample is enough: to look at each row would take a tenth of the time of reading.
        step = len(more) // _SAMPLES + 1
        size += step * sum([len(row[4] or b"") for row in more[::step]])
        if size >= room:
            cursor.close()
            return rows, size, False
        ask = min(8 * ask, 1 + (room - size) * len(rows) // (size or 1))
    return rows, size, len(rows) < limit
