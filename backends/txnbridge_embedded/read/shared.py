"""The reader in a group with `sharing="message"`: its members read different messages of the same partitions.

A message that is handed out has a row in the table `leases`. Only the member in that row may acknowledge the message,
until the lease expires and another member gets the message. So every offset up to the highest one that was ever handed
out is acknowledged, reserved or leased, and higher offsets are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from txnbridge.errors import DeadlineExceeded, NotSupported, PositionLost
from txnbridge.spi import Deadline, Message, Partition, Position
from txnbridge_embedded.client import headers
from txnbridge_embedded.client.readable_ranges import Bounds, ranges_of, read_bounds
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.client.store import FileConnection, now_ms
from txnbridge_embedded.read import group_assignments
from txnbridge_embedded.read.base_reader import POLL_BYTES, SHORT_CALL_SECONDS
from txnbridge_embedded.read.membership import GroupReader
from txnbridge_embedded.read.partition import Cursor

Leased = dict[int, int]  # offsets with their delivery counts


class SharedReader(GroupReader):
    """A member of a group with `sharing="message"`: members lease single messages of the same partitions."""

    def _open(self, deadline: Deadline) -> None:
        self._leased: dict[Cursor, Leased] = {}  # messages that are leased to this member, and not read yet
        self._redeliver_ms = int(self._settings.redeliver_seconds * 1000)
        # Leases need not survive a power cut, after which there is no member.
        self._lease_connection = self._store.connect(durable=False)
        try:
            super()._open(deadline)
        except BaseException:
            self._lease_connection.close()
            raise

    def _assignment_epochs(self) -> Mapping[Partition, tuple[int, int]]:
        return {partition: (cursor.id, 0) for partition, cursor in self._cursors.items()}

    def _reassign(self, connection: FileConnection, now: int) -> None:
        group_assignments.remove_expired(connection, self._group_id, now)

    def _observe(self, deadline: Deadline) -> Mapping[Partition, Bounds]:
        now = now_ms()
        with self._reading(deadline) as connection:
            alive = self._is_member(connection)
            bounds = read_bounds(connection, self._subscription.topics, self._group_id)
            stale = bool(group_assignments.expired_members(connection, self._group_id, now))
        with suppress(DeadlineExceeded):
            if not alive:
                self._join_again(deadline)
            elif stale or any(found.position is None for found in bounds.values()):
                with self._writing("share", deadline) as connection:
                    self._reassign(connection, now)
        self._follow(bounds)
        return bounds

    def _read_messages(self, limit: int, deadline: Deadline) -> list[Message]:
        if self._leased:  # leases of a poll that failed, which may or may not be stored
            with self._reading(deadline) as connection:
                self._leased = {
                    cursor: self._still_leased(connection, cursor, leased) for cursor, leased in self._leased.items()
                }
        else:
            self._lease_more(limit, deadline)
        with self._connection.in_use():
            found = [message for cursor, leased in self._leased.items() for message in self._read(cursor, leased)]
        self._leased = {}
        return found

    def _still_leased(self, connection: FileConnection, cursor: Cursor, leased: Leased) -> Leased:
        mine = connection.execute(
            "SELECT offset, deliveries FROM leases"
            " WHERE group_id = ? AND partition_id = ? AND member = ? AND until > ?",
            (self._group_id, cursor.id, self._member, now_ms()),
        ).fetchall()
        return {offset: count for offset, count in mine if leased.get(offset) == count}

    def _lease_more(self, limit: int, deadline: Deadline) -> None:
        known = [c for c in self._rotated(self._cursors.values()) if not c.paused and c.bounds.position is not None]
        with self._reading(deadline) as connection:
            cursors = [cursor for cursor in known if self._has_messages(connection, cursor)]
        if not cursors:
            return
        leased: dict[Cursor, Leased] = {}
        lost: PositionLost | None = None  # raised by a poll that finds nothing in other partitions
        room = POLL_BYTES
        with self._writing("lease", deadline, self._lease_connection) as connection:
            for cursor in cursors:
                try:
                    leased[cursor], size = self._lease(connection, cursor, limit, room)
                except PositionLost as error:
                    lost = error
                    continue
                limit -= len(leased[cursor])
                room -= size
            if lost is not None and not any(leased.values()):
                raise lost
            self._leased = leased

    def _has_messages(self, connection: FileConnection, cursor: Cursor) -> bool:
        base = cursor.id << OFFSET_BITS
        first_new = self._first_new_offset(connection, cursor)
        found = connection.execute(
            "SELECT EXISTS (SELECT 1 FROM leases WHERE group_id = ? AND partition_id = ? AND until <= ?)"
            " OR EXISTS (SELECT 1 FROM messages WHERE id >= ? AND id < ?)",
            (self._group_id, cursor.id, now_ms(), base + first_new, base + cursor.bounds.end),
        ).fetchone()
        return bool(found[0]) or first_new < cursor.bounds.kept

    def _first_new_offset(self, connection: FileConnection, cursor: Cursor) -> int:
        """Return the first offset of a partition that was never handed out to the group."""
        row = connection.execute(
            "SELECT max(q.next,"
            " coalesce((SELECT last FROM acks a WHERE a.group_id = q.group_id"
            "  AND a.partition_id = q.partition_id ORDER BY first DESC LIMIT 1) + 1, 0),"
            " coalesce((SELECT last FROM pending_acks r WHERE r.group_id = q.group_id"
            "  AND r.partition_id = q.partition_id ORDER BY first DESC LIMIT 1) + 1, 0),"
            " coalesce((SELECT offset FROM leases l WHERE l.group_id = q.group_id"
            "  AND l.partition_id = q.partition_id ORDER BY offset DESC LIMIT 1) + 1, 0))"
            " FROM positions q WHERE q.group_id = ? AND q.partition_id = ?",
            (self._group_id, cursor.id),
        ).fetchone()
        return cursor.bounds.end if row is None else int(row[0])  # without a row: the topic has just been deleted

    def _lease(self, connection: FileConnection, cursor: Cursor, limit: int, room: int) -> tuple[Leased, int]:
        """Lease up to `limit` messages, those with expired leases first; return their delivery counts and size."""
        now = now_ms()
        due = connection.execute(
            "SELECT offset, deliveries FROM leases WHERE group_id = ? AND partition_id = ? AND until <= ?"
            " ORDER BY offset LIMIT ?",
            (self._group_id, cursor.id, now, limit),
        ).fetchall()
        first_new = self._first_new_offset(connection, cursor)
        cursor.check_kept(connection, min([first_new, *(offset for offset, _ in due)]))
        offered = {offset: deliveries + 1 for offset, deliveries in due}
        base = cursor.id << OFFSET_BITS
        new = connection.execute(
            "SELECT id FROM messages WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (base + first_new, base + cursor.bounds.end, limit - len(due)),
        )
        offered.update((id - base, 1) for (id,) in new)
        leased, size = self._fitting(connection, base, offered, room)
        connection.executemany(
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET member = excluded.member, until = excluded.until, deliveries = excluded.deliveries",
            (
                (self._group_id, cursor.id, offset, self._member, now + self._redeliver_ms, count)
                for offset, count in leased.items()
            ),
        )
        return leased, size

    @staticmethod
    def _fitting(connection: FileConnection, base: int, offered: Leased, room: int) -> tuple[Leased, int]:
        """Return the first of the messages `offered`, until they exceed `room` bytes, and their size in bytes."""
        leased: Leased = {}
        size = 0
        for offset, count in offered.items():
            if size >= room:
                break
            row = connection.execute("SELECT length(value) FROM messages WHERE id = ?", (base + offset,)).fetchone()
            size += (row and row[0]) or 0
            leased[offset] = count
        return leased, size

    def _read(self, cursor: Cursor, leased: Leased) -> list[Message]:
        topic, number = cursor.partition
        base = cursor.id << OFFSET_BITS
        return [
            Message(topic, number, (id - base,), key, value, headers.unpack(text), at, leased[id - base], cursor.source)
            for first, last in ranges_of(leased)
            for id, at, key, text, value in self._connection.execute(
                "SELECT id, timestamp, key, headers, value FROM messages WHERE id BETWEEN ? AND ? ORDER BY id",
                (base + first, base + last),
            ).fetchall()
        ]

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        with self._writing("nack", Deadline(SHORT_CALL_SECONDS), self._lease_connection) as connection:
            for partition, given in positions.items():
                if cursor := self._cursors.get(partition):
                    connection.executemany(
                        "UPDATE leases SET until = 0"
                        " WHERE group_id = ? AND partition_id = ? AND offset = ? AND member = ?",
                        ((self._group_id, cursor.id, offset, self._member) for (offset,) in given),
                    )

    def positions(self) -> dict[Partition, Position]:
        return {partition: (cursor.bounds.position or 0,) for partition, cursor in self._cursors.items()}

    def _seek(self, offsets: Mapping[Cursor, int], deadline: Deadline) -> None:
        if not all(cursor.lost for cursor in offsets):
            raise _no_seek()
        for cursor, offset in offsets.items():
            with self._reading(deadline):
                kept = self._check_kept(cursor, offset)
            self._accept_loss(cursor.id, kept, deadline)
            cursor.lost = False

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        raise _no_seek()

    def _leave(self, deadline: Deadline) -> None:
        self._lease_connection.close()
        super()._leave(deadline)


def _no_seek() -> NotSupported:
    return NotSupported(
        'members of a group with sharing="message" have no position to seek: give messages back by nack, or read with'
        ' another group and sharing="partition"'
    )
