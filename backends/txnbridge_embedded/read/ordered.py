"""The reader in a group in which each partition is assigned to one member, which reads it in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from txnbridge.errors import DeadlineExceeded
from txnbridge.spi import Deadline, Partition, Position
from txnbridge_embedded.admin import groups
from txnbridge_embedded.client.readable_ranges import Bounds, Range, first_since, ranges_of, read_bounds, without
from txnbridge_embedded.client.store import FileConnection, now_ms
from txnbridge_embedded.read import group_assignments
from txnbridge_embedded.read.group_assignments import PartitionOwner
from txnbridge_embedded.read.membership import GroupReader, as_text
from txnbridge_embedded.read.partition import Cursor
from txnbridge_embedded.write import acks

_log = logging.getLogger("txnbridge.embedded")


@dataclass
class GroupSnapshot:
    """The state of a group and its partitions in one snapshot of the file, for one member."""

    alive: bool  # whether this reader is still a member
    stale: bool  # whether the partitions have to be reassigned
    bounds: dict[Partition, Bounds]
    mine: dict[Partition, PartitionOwner] = field(default_factory=dict)
    taken: dict[Partition, list[Range]] = field(default_factory=dict)  # for cursors that need an update
    returned: dict[Partition, list[Range]] = field(default_factory=dict)

    def is_assigned(self, cursor: Cursor) -> bool:
        """Return whether a cursor's partition is still assigned to this member, by the same assignment."""
        held = self.mine.get(cursor.partition)
        # If the topic was deleted and created again, the partition has another id.
        return held is not None and (self.bounds[cursor.partition].id, held.epoch) == (cursor.id, cursor.epoch)


class OrderedReader(GroupReader):
    """A member of a group with `sharing="partition"`: each partition has one member, which reads it in order."""

    def _open(self, deadline: Deadline) -> None:
        self._generation = -1
        self._assignments: dict[int, PartitionOwner] = {}
        self._logged: set[tuple[str, str]] = set()  # the other members' hosts and partitions that were logged last
        self._leaving: dict[Partition, Cursor] = {}  # revoked partitions that are not released in the file yet
        super()._open(deadline)

    def _assignment_epochs(self) -> Mapping[Partition, tuple[int, int]]:
        return {partition: (cursor.id, cursor.epoch) for partition, cursor in self._cursors.items()}

    def _observe(self, deadline: Deadline) -> Mapping[Partition, Bounds]:
        now = now_ms()
        view = self._view(now, deadline)
        if view.stale or not view.alive:
            # If the file stays locked until the deadline, the reader keeps its partitions.
            with suppress(DeadlineExceeded):
                if view.alive:
                    with self._writing("share", deadline) as connection:
                        self._reassign(connection, now)
                else:
                    self._join_again(deadline)
                view = self._view(now, deadline)
        self._apply(view, deadline)
        return view.bounds

    def _view(self, now: int, deadline: Deadline) -> GroupSnapshot:
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics, self._group_id)
            self._read_assignments(connection)
            alive = self._is_member(connection)
            view = GroupSnapshot(alive, self._is_stale(connection, bounds, now), bounds)
            for partition, found in bounds.items():
                held = self._assignments.get(found.id)
                if alive and held is not None and held.member == self._member:
                    view.mine[partition] = held
                    self._read_acknowledged(connection, view, partition)
            return view

    def _read_assignments(self, connection: FileConnection) -> None:
        (generation,) = connection.execute("SELECT generation FROM groups WHERE id = ?", (self._group_id,)).fetchone()
        if generation != self._generation:
            self._assignments = group_assignments.read_assignments(connection, self._group_id)
            self._generation = generation
            self._log_other_members(connection)

    def _log_other_members(self, connection: FileConnection) -> None:
        """Log which partitions other members own, if that has changed, and when the leases of these members end.

        The partitions of a dead member become free at the end of its lease.
        """
        if not _log.isEnabledFor(logging.INFO):
            return
        before, self._logged = self._logged, set()
        for (host, until), held in groups.held_by_others(connection, self._group_id, self._member).items():
            partitions = as_text(held)
            self._logged.add((host, partitions))
            if (host, partitions) not in before:
                _log.info("group %r: %s: assigned to %s", self._group, partitions, groups.lease_text(host, until))

    def _is_stale(self, connection: FileConnection, bounds: Mapping[Partition, Bounds], now: int) -> bool:
        held = [self._assignments.get(found.id) for found in bounds.values()]
        return any(row is None or row.is_overdue(now, self._lease_ms) for row in held) or bool(
            group_assignments.expired_members(connection, self._group_id, now)
        )

    def _read_acknowledged(self, connection: FileConnection, view: GroupSnapshot, partition: Partition) -> None:
        """Read into `view` which ranges of a partition are acknowledged or reserved, and which to deliver again.

        The ranges are read only if the partition is newly assigned, or if a prepared transaction was aborted since.
        """
        bounds = view.bounds[partition]
        cursor = self._cursors.get(partition)
        if cursor is None or not view.is_assigned(cursor):
            view.taken[partition] = acks.taken(connection, self._group_id, bounds.id)
        elif cursor.bounds.rewinds != bounds.rewinds:
            view.taken[partition] = acks.taken(connection, self._group_id, bounds.id)
            view.returned[partition] = acks.returned(connection, self._group_id, bounds.id, cursor.bounds.rewinds or 0)

    def _apply(self, view: GroupSnapshot, deadline: Deadline) -> None:
        self._lose([partition for partition, cursor in self._cursors.items() if not view.is_assigned(cursor)])
        self._leaving = {p: cursor for p, cursor in self._leaving.items() if view.is_assigned(cursor)}
        for partition, cursor in self._cursors.items():
            self._refresh(cursor, view.bounds[partition], view)
        came = [self._new_cursor(p, view) for p in view.mine if p not in self._cursors and p not in self._leaving]
        self._release([p for p in self._cursors if view.mine[p].wanted is not None], deadline)
        self._add(came)

    def _refresh(self, cursor: Cursor, bounds: Bounds, view: GroupSnapshot) -> None:
        cursor.bounds = bounds
        cursor.forget_below(bounds.position or 0)
        if cursor.partition in view.returned:
            cursor.taken = deque(view.taken[cursor.partition])
            cursor.repeat(without(view.returned[cursor.partition], cursor.taken))

    def _new_cursor(self, partition: Partition, view: GroupSnapshot) -> Cursor:
        bounds = view.bounds[partition]
        cursor = Cursor(bounds, bounds.position or 0, self._owner(), view.mine[partition].epoch)
        cursor.taken = deque(view.taken[partition])
        return cursor

    def _release(self, wanted: Sequence[Partition], deadline: Deadline) -> None:
        """Release the partitions `wanted`, which another member should get.

        First the listener ends the transactions that have messages of these partitions.
        """
        if wanted:
            _log.info("group %r: %s: moves to another member", self._group, as_text(wanted))
            # The partitions are added to `_leaving` first: they are released even if the listener raises an error.
            self._leaving.update({partition: self._cursors[partition] for partition in wanted})
            self._forget(wanted)
            self._listener.revoking(wanted)
        if self._leaving:
            with suppress(DeadlineExceeded):  # the next `_observe` tries again
                now = now_ms()
                with self._writing("release", deadline) as connection:
                    ids = [cursor.id for cursor in self._leaving.values()]
                    group_assignments.release(connection, self._group_id, self._member, ids)
                    self._reassign(connection, now)

    def _reassign(self, connection: FileConnection, now: int) -> None:
        group_assignments.reassign(connection, self._group_id, now, self._lease_ms)

    def _seek(self, offsets: Mapping[Cursor, int], deadline: Deadline) -> None:
        for cursor, offset in offsets.items():
            with self._reading(deadline) as connection:
                kept = self._check_kept(cursor, offset)
            if cursor.lost:
                self._accept_loss(cursor.id, kept, deadline)
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics, self._group_id)
            for cursor, offset in offsets.items():
                found = bounds.get(cursor.partition, cursor.bounds)
                cursor.taken = deque(acks.taken(connection, self._group_id, cursor.id))
                cursor.seek(max(offset, found.position or 0))
        # The messages may come from an aborted prepared transaction. Then the file, too, says that they come again. The
        # reader has to see that before it reads them, or they would come twice.
        self._refresh_at = 0.0

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        again = {partition: self._cursor(partition).again for partition in positions}
        self.seek(positions)
        for partition, ranges in again.items():  # those before the position come again, too
            self._cursors[partition].repeat(ranges)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        self._refresh_state(deadline)
        cursors = self._cursors.values()
        found = {c: first_since(self._store, self._connection, c.bounds, timestamp, deadline) for c in cursors}
        self._seek(found, deadline)

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for partition, given in positions.items():
            if cursor := self._cursors.get(partition):  # else the partition's new owner gets the messages again
                cursor.repeat(ranges_of(offset for (offset,) in sorted(given)))
        self._refresh_at = 0.0  # as in `_seek`
