"""The readable range of offsets of each partition: from the first kept message to the first undecided one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from txnbridge.spi import Deadline, Partition
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.client.store import FileConnection, Store

_SCAN_ROWS = 20_000  # a search by time reads so many offsets in one snapshot, in some 10 ms


Range = tuple[int, int]  # of offsets, including first and last


def ranges_of(offsets: Iterable[int]) -> list[Range]:
    """Return offsets as ranges (first, last), sorted, of which no two overlap or touch."""
    ordered = sorted(offsets)
    # Mostly the offsets are one range, which is checked first, because it is quicker.
    if ordered and ordered[-1] - ordered[0] + 1 == len(ordered):
        first, last = ordered[0], ordered[-1]
        if ordered == list(range(first, last + 1)):
            return [(first, last)]
    return merged((offset, offset) for offset in ordered)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges sorted, with ranges that overlap or touch merged into one."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(ranges: Iterable[Range], holes: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges without the offsets in `holes`. Both have to be sorted, and merged as by `merged`."""
    waiting = iter(holes)
    hole = next(waiting, None)
    for first, last in ranges:
        start = first
        while hole is not None and hole[0] <= last:
            if start < hole[0]:
                yield start, hole[0] - 1
            start = max(start, hole[1] + 1)
            if hole[1] > last:
                break  # this hole may also overlap the next range
            hole = next(waiting, None)
        if start <= last:
            yield start, last


@dataclass(frozen=True)
class Bounds:
    """The readable range of a partition: from `kept`, the first offset that retention has not removed, to `end`.

    `end` is the last stable offset: that of the first undecided message, or of the next message. `blocked_by` is the
    number of the undecided transaction at `end`. `position` (the group's next offset) and `rewinds` (how many aborts
    have given messages back to it) are from the group's row in `positions`.
    """

    id: int
    partition: Partition
    kept: int
    end: int
    blocked_by: int | None
    position: int | None
    rewinds: int | None


def read_bounds(
    connection: sqlite3.Connection, topics: Iterable[str], group_id: int | None = None
) -> dict[Partition, Bounds]:
    """Return the bounds of topics' partitions, in the caller's snapshot. A missing topic is left out."""
    names = tuple(topics)
    rows = connection.execute(
        "SELECT p.id, t.name, p.number, p.first, p.next, u.first, u.number, q.next, q.rewinds"
        " FROM topics t JOIN partitions p ON p.topic_id = t.id"
        " LEFT JOIN positions q ON q.group_id = ? AND q.partition_id = p.id"
        " LEFT JOIN undecided u ON u.partition_id = p.id"
        "  AND u.first = (SELECT min(first) FROM undecided WHERE partition_id = p.id)"
        f" WHERE t.name IN ({', '.join('?' * len(names))}) ORDER BY t.name, p.number",
        (group_id, *names),
    )
    return {
        (topic, number): Bounds(
            id, (topic, number), kept, next if held is None else held, blocked_by, position, rewinds
        )
        for id, topic, number, kept, next, held, blocked_by, position, rewinds in rows
    }


def first_since(store: Store, connection: FileConnection, bounds: Bounds, timestamp: int, deadline: Deadline) -> int:
    """Return the first readable offset with a timestamp at or after a time, else the end, by reading all messages."""
    base = bounds.id << OFFSET_BITS
    for start in range(bounds.kept, bounds.end, _SCAN_ROWS):
        deadline.check(f"the search for the time {timestamp} in {bounds.partition[0]}[{bounds.partition[1]}]")
        with store.reading(connection, deadline):
            row = connection.execute(
                "SELECT id FROM messages WHERE id >= ? AND id < ? AND timestamp >= ? ORDER BY id LIMIT 1",
                (base + start, base + min(start + _SCAN_ROWS, bounds.end), timestamp),
            ).fetchone()
        if row is not None:
            return int(row[0]) - base
    return bounds.end


def count_between(connection: sqlite3.Connection, bounds: Bounds, first: int, taken: Iterable[Range]) -> int:
    """Return the number of offsets from `first` to the last readable message, without the ranges `taken`: the lag.

    A gap that an aborted transaction left after the last message is not counted.
    """
    base = bounds.id << OFFSET_BITS
    first = max(first, bounds.kept)
    (last,) = connection.execute(
        "SELECT max(id) FROM messages WHERE id >= ? AND id < ?", (base + first, base + bounds.end)
    ).fetchone()
    if last is None:
        return 0
    return sum(stop - start + 1 for start, stop in without([(first, last - base)], taken))
