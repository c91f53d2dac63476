"""Acknowledgements: the offsets that a group has acknowledged, and the check whether a member may still acknowledge.

Every function runs inside a write transaction of its caller, so acknowledgements are stored together with messages.

Aborted transactions leave gaps in the offsets. An acknowledgement of a message includes the gap before the message. So
a group's acknowledged offsets become one range, whose end is `positions.next`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from txnbridge.errors import Conflict
from txnbridge.spi import Partition, Position
from txnbridge_embedded.client.readable_ranges import Range, merged, ranges_of
from txnbridge_embedded.client.schema import OFFSET_BITS

# The end of the lease of a message that a prepared transaction has reserved: the end of that transaction frees it.
NO_EXPIRY = 1 << 62


@dataclass(frozen=True)
class AckContext:
    """The group member to which messages were delivered, with the id and assignment epoch of each of its partitions."""

    group_id: int
    group: str
    sharing: str
    member: str
    held: Mapping[Partition, tuple[int, int]]


def apply_acks(
    connection: sqlite3.Connection,
    context: AckContext,
    positions: Mapping[Partition, Sequence[Position]],
    number: int | None = None,
) -> None:
    """Acknowledge messages; for a prepared transaction (its `number`) only reserve them until its end.

    Raise `Conflict` if the assignment or the lease under which a message was delivered has ended, or if another member
    or transaction has acknowledged or reserved the message.
    """
    for partition, acked in positions.items():
        _Acks(connection, context, partition).apply(ranges_of(offset for (offset,) in acked), number)


def commit_pending(connection: sqlite3.Connection, number: int) -> None:
    """Acknowledge the messages that a prepared transaction has reserved."""
    for group_id, partition_id, ranges in _pending(connection, number):
        _acknowledge(connection, group_id, partition_id, ranges)
    connection.execute("DELETE FROM pending_acks WHERE number = ?", (number,))


def abort_pending(connection: sqlite3.Connection, number: int) -> None:
    """Free the messages that an aborted prepared transaction has reserved, so that the group reads them again.

    The partition's reader has passed these messages already. So the ranges of the messages stay in `pending_acks` until
    they are acknowledged. `positions.rewinds` counts such aborts for a group and a partition. The ranges get the new
    count, negated, in the column `number`, and by this column the reader finds the ranges that it has to deliver again.
    (A later owner of the partition reads all unacknowledged messages anyway.)
    """
    for group_id, partition_id, ranges in _pending(connection, number):
        where = (group_id, partition_id)
        connection.execute("UPDATE positions SET rewinds = rewinds + 1 WHERE group_id = ? AND partition_id = ?", where)
        connection.execute(
            "UPDATE pending_acks SET number = -(SELECT rewinds FROM positions WHERE group_id = ? AND partition_id = ?)"
            " WHERE group_id = ? AND partition_id = ? AND number = ?",
            (*where, *where, number),
        )
        connection.executemany(
            "UPDATE leases SET until = 0 WHERE group_id = ? AND partition_id = ? AND offset BETWEEN ? AND ?",
            ((*where, *found) for found in ranges),
        )


def groups_of(connection: sqlite3.Connection, number: int) -> list[str]:
    """Return the names of the groups in which a prepared transaction has reserved messages."""
    rows = connection.execute(
        "SELECT DISTINCT name FROM pending_acks JOIN groups ON groups.id = group_id WHERE number = ? ORDER BY name",
        (number,),
    )
    return [name for (name,) in rows]


def forget_partitions(connection: sqlite3.Connection, partition_ids: Iterable[int]) -> None:
    """Delete the rows of all groups (assignments, positions, acknowledgements, leases) about deleted partitions."""
    ids = [(partition_id,) for partition_id in partition_ids]
    for table in ("assignments", "positions", "acks", "pending_acks", "leases"):
        connection.executemany(f"DELETE FROM {table} WHERE partition_id = ?", ids)


def taken(connection: sqlite3.Connection, group_id: int, partition_id: int) -> list[Range]:
    """Return the ranges of a partition beyond the group's position that are acknowledged or reserved."""
    rows = connection.execute(
        "SELECT first, last FROM acks WHERE group_id = :group AND partition_id = :partition UNION ALL"
        " SELECT first, last FROM pending_acks WHERE group_id = :group AND partition_id = :partition AND number > 0",
        {"group": group_id, "partition": partition_id},
    )
    return merged(rows)


def returned(connection: sqlite3.Connection, group_id: int, partition_id: int, rewinds: int) -> list[Range]:
    """Return the ranges of offsets that aborts gave back to a group since `positions.rewinds` was `rewinds`."""
    rows = connection.execute(
        "SELECT first, last FROM pending_acks WHERE group_id = ? AND partition_id = ? AND number < ?",
        (group_id, partition_id, -rewinds),
    )
    return merged(rows)


def skip_to(connection: sqlite3.Connection, group_id: int, partition_id: int, offset: int) -> None:
    """Move a group's position to an offset, because retention has removed the messages below it."""
    connection.execute(
        "DELETE FROM leases WHERE group_id = ? AND partition_id = ? AND offset < ? AND until < ?",
        (group_id, partition_id, offset, NO_EXPIRY),
    )
    (reached,) = connection.execute(
        "SELECT next FROM positions WHERE group_id = ? AND partition_id = ?", (group_id, partition_id)
    ).fetchone()
    if reached < offset:
        advance(connection, group_id, partition_id, offset)


class _Acks:
    """Acknowledges messages of one partition for one member, at once or at the end of a prepared transaction."""

    def __init__(self, connection: sqlite3.Connection, context: AckContext, partition: Partition) -> None:
        self._connection = connection
        self._context = context
        self._partition = partition
        if partition not in context.held:
            raise self._conflict("was not assigned to this reader when these messages were delivered")
        self._id, self._epoch = context.held[partition]
        self._where = (context.group_id, self._id)

    def apply(self, acked: Sequence[Range], number: int | None) -> None:
        if self._context.sharing == "message":
            self._check_leases(acked)
        else:
            self._check_assignment()
        row = self._connection.execute(
            "SELECT positions.next, partitions.first FROM positions JOIN partitions ON partitions.id = partition_id"
            " WHERE group_id = ? AND partition_id = ?",
            self._where,
        ).fetchone()
        if row is None:
            raise self._conflict("has been deleted")
        reached, kept = row
        for first, last in acked:
            self._check_free(first, last, reached)
        ranges = [(self._gap_before(first, max(reached, kept)), last) for first, last in acked]
        if number is None:
            _acknowledge(self._connection, *self._where, ranges)
        else:
            self._reserve(ranges, number)

    def _check_assignment(self) -> None:
        row = self._connection.execute(
            "SELECT member, epoch FROM assignments WHERE group_id = ? AND partition_id = ?", self._where
        ).fetchone()
        if row != (self._context.member, self._epoch):
            raise self._conflict("was revoked from this reader after these messages were delivered")

    def _check_leases(self, acked: Sequence[Range]) -> None:
        # An expired lease still counts until another member gets the message.
        for first, last in acked:
            (count,) = self._connection.execute(
                "SELECT count(*) FROM leases WHERE group_id = ? AND partition_id = ? AND offset BETWEEN ? AND ?"
                " AND member = ?",
                (*self._where, first, last, self._context.member),
            ).fetchone()
            if count != last - first + 1:
                raise self._conflict("has delivered one of these messages to another reader since")

    def _check_free(self, first: int, last: int, reached: int) -> None:
        if first < reached or self._overlaps("acks", "1", first, last):
            raise self._conflict("has one of these messages acknowledged already")
        if self._overlaps("pending_acks", "number > 0", first, last):
            raise self._conflict("has one of these messages reserved by a prepared transaction")

    def _overlaps(self, table: str, which: str, first: int, last: int) -> bool:
        # The ranges in the table do not overlap, so only the last one that begins at or before `last` can overlap.
        row = self._connection.execute(
            f"SELECT last FROM {table} WHERE group_id = ? AND partition_id = ? AND first <= ? AND {which}"
            " ORDER BY first DESC LIMIT 1",
            (*self._where, last),
        ).fetchone()
        return row is not None and row[0] >= first

    def _gap_before(self, first: int, lowest: int) -> int:
        """Return the first of the offsets without messages directly before the message at `first`, or `first` itself.

        Aborted transactions leave such gaps. Offsets below `lowest`, which retention has removed, are no gap.
        """
        base = self._id << OFFSET_BITS
        (before,) = self._connection.execute(
            "SELECT max(id) FROM messages WHERE id >= ? AND id < ?", (base + lowest, base + first)
        ).fetchone()
        return min(first, lowest) if before is None else before - base + 1

    def _reserve(self, ranges: Sequence[Range], number: int) -> None:
        # "OR REPLACE": a range that an aborted transaction gave back (number < 0) may begin at the same offset.
        self._connection.executemany(
            "INSERT OR REPLACE INTO pending_acks VALUES (?, ?, ?, ?, ?)",
            ((*self._where, first, last, number) for first, last in ranges),
        )
        self._connection.executemany(
            "UPDATE leases SET member = NULL, until = ?"
            " WHERE group_id = ? AND partition_id = ? AND offset BETWEEN ? AND ?",
            ((NO_EXPIRY, *self._where, first, last) for first, last in ranges),
        )

    def _conflict(self, what: str) -> Conflict:
        topic, number = self._partition
        return Conflict(
            f"cannot acknowledge for group {self._context.group!r}: partition {topic}[{number}] {what}; "
            f"poll again, and run the transaction with the messages of that poll"
        )


def _pending(connection: sqlite3.Connection, number: int) -> list[tuple[int, int, list[Range]]]:
    rows = connection.execute(
        "SELECT group_id, partition_id, first, last FROM pending_acks WHERE number = ?"
        " ORDER BY group_id, partition_id, first",
        (number,),
    ).fetchall()
    return [(*where, [row[2:] for row in found]) for where, found in groupby(rows, itemgetter(0, 1))]


def _acknowledge(connection: sqlite3.Connection, group_id: int, partition_id: int, ranges: Iterable[Range]) -> None:
    where = (group_id, partition_id)
    (reached,) = connection.execute(
        "SELECT next FROM positions WHERE group_id = ? AND partition_id = ?", where
    ).fetchone()
    before = reached
    for first, last in ranges:
        if first <= reached:
            reached = max(reached, last + 1)
        else:
            _add_range(connection, group_id, partition_id, first, last)
        connection.execute(
            "DELETE FROM leases WHERE group_id = ? AND partition_id = ? AND offset BETWEEN ? AND ?",
            (*where, first, last),
        )
    if reached > before:
        advance(connection, group_id, partition_id, reached)


def advance(connection: sqlite3.Connection, group_id: int, partition_id: int, reached: int) -> None:
    """Set a group's position in a partition to `reached`, or to the end of acknowledged ranges that follow directly."""
    where = (group_id, partition_id)
    while row := connection.execute(
        "SELECT first, last FROM acks WHERE group_id = ? AND partition_id = ? ORDER BY first LIMIT 1", where
    ).fetchone():
        first, last = row
        if first > reached:
            break
        reached = max(reached, last + 1)
        connection.execute("DELETE FROM acks WHERE group_id = ? AND partition_id = ? AND first = ?", (*where, first))
    connection.execute("UPDATE positions SET next = ? WHERE group_id = ? AND partition_id = ?", (reached, *where))
    connection.execute(
        "DELETE FROM pending_acks WHERE group_id = ? AND partition_id = ? AND number < 0 AND last < ?",
        (*where, reached),
    )


def _add_range(connection: sqlite3.Connection, group_id: int, partition_id: int, first: int, last: int) -> None:
    """Insert the acknowledged range from `first` to `last`, merged with the ranges that it touches."""
    where = (group_id, partition_id)
    before = connection.execute(
        "SELECT first, last FROM acks WHERE group_id = ? AND partition_id = ? AND first < ?"
        " ORDER BY first DESC LIMIT 1",
        (*where, first),
    ).fetchone()
    if before is not None and before[1] >= first - 1:
        first = before[0]
    behind = (*where, last + 1)
    after = connection.execute(
        "SELECT last FROM acks WHERE group_id = ? AND partition_id = ? AND first = ?", behind
    ).fetchone()
    if after is not None:
        connection.execute("DELETE FROM acks WHERE group_id = ? AND partition_id = ? AND first = ?", behind)
        (last,) = after
    connection.execute("INSERT OR REPLACE INTO acks VALUES (?, ?, ?, ?)", (*where, first, last))
