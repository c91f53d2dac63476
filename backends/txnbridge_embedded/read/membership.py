"""The base class of group members: they join, renew their lease, leave, and join again if they were removed."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from txnbridge.spi import Deadline, Partition
from txnbridge_embedded.client.readable_ranges import Bounds, count_between, first_since, read_bounds
from txnbridge_embedded.client.store import CLOSING_SECONDS, FileConnection, now_ms
from txnbridge_embedded.read import group_assignments
from txnbridge_embedded.read.base_reader import PollingReader
from txnbridge_embedded.read.partition import Cursor
from txnbridge_embedded.write import acks
from txnbridge_embedded.write.acks import AckContext

_log = logging.getLogger("txnbridge.embedded")
_MOST_NAMED = 8  # a log line names no more partitions


class GroupReader(PollingReader):
    """The base class of a group's members: membership, lag, and the context that acknowledgements need."""

    def _open(self, deadline: Deadline) -> None:
        self._lease_ms = int(self._settings.lease_seconds * 1000)
        self._group = str(self._subscription.group)
        self._group_id = -1
        self._context: AckContext | None = None
        start = self._subscription.start
        self._join(start, self._search(start, deadline) if isinstance(start, int) else {}, deadline)
        self._heartbeat = group_assignments.Heartbeat(self, self._store, self._settings.lease_seconds, self._member)

    def _join(self, start: str | int, found: Mapping[int, int], deadline: Deadline) -> None:
        now, topics = now_ms(), self._subscription.topics
        with self._writing("join", deadline) as connection:
            self._group_id = group_assignments.find_or_create_group(connection, self._group, self._subscription.sharing)
            group_assignments.record_starts(connection, self._group_id, topics, start, found)
            self._member = group_assignments.add_member(connection, self._group_id, topics, self._lease_ms)
            self._reassign(connection, now)
        _log.info("group %r: joined", self._group)

    def _search(self, timestamp: int, deadline: Deadline) -> dict[int, int]:
        """Return, by partition id, the offset of the first message with a timestamp at or after a time."""
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics)
        return {b.id: first_since(self._store, self._connection, b, timestamp, deadline) for b in bounds.values()}

    def _join_again(self, deadline: Deadline) -> None:
        """Join as a new member, after this member was removed for its expired lease, and has lost its partitions."""
        self._lose(list(self._cursors))
        self._join("earliest", {}, deadline)  # the start is for partitions that were added after the group began
        self._heartbeat.member = self._member

    def _is_member(self, connection: FileConnection) -> bool:
        return connection.execute("SELECT 1 FROM members WHERE id = ?", (self._member,)).fetchone() is not None

    @abstractmethod
    def _reassign(self, connection: FileConnection, now: int) -> None:
        """Update the group's members and assignments, in the caller's write transaction."""

    @abstractmethod
    def _assignment_epochs(self) -> Mapping[Partition, tuple[int, int]]:
        """Return the id and the assignment's epoch of each partition that this member has, for `AckContext`.

        An acknowledgement is refused if the partition has a newer epoch by then.
        """

    def ack_context(self) -> AckContext:
        if self._context is None:
            sharing = self._subscription.sharing
            self._context = AckContext(self._group_id, self._group, sharing, self._member, self._assignment_epochs())
        return self._context

    def _add(self, cursors: Iterable[Cursor]) -> None:
        self._context = None
        came = list(cursors)
        super()._add(came)
        for cursor in came:
            topic, number = cursor.partition
            at = cursor.bounds.position or 0
            _log.info("group %r: %s[%d] is read here, from %d on", self._group, topic, number, at)

    def _lose(self, partitions: Sequence[Partition]) -> None:
        if partitions:
            text = "group %r: lost %s: this member did not release it, or did not renew its lease, in time"
            _log.info(text, self._group, as_text(partitions))
        super()._lose(partitions)

    def _forget(self, partitions: Iterable[Partition]) -> None:
        self._context = None
        super()._forget(partitions)

    def _reserving(self) -> Iterable[int]:
        rows = self._connection.execute(
            "SELECT DISTINCT number FROM pending_acks WHERE group_id = ? AND number > 0", (self._group_id,)
        )
        return [number for (number,) in rows]

    def _owner(self) -> str:
        return f"the position of group {self._group!r}"

    def _accept_loss(self, partition_id: int, kept: int, deadline: Deadline) -> None:
        """When the user seeks, move the position of a group, whose messages retention has removed, to `kept`.

        `kept` is the partition's first offset that retention has not removed.
        """
        with self._writing("seek", deadline) as connection:
            acks.skip_to(connection, self._group_id, partition_id, kept)

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics, self._group_id)
            return {p: self._lag(connection, bounds[p]) for p in self._cursors if p in bounds}

    def group_lag(self, deadline: Deadline) -> int:
        with self._reading(deadline) as connection:
            bounds = read_bounds(connection, self._subscription.topics, self._group_id)
            return sum(self._lag(connection, found) for found in bounds.values())

    def _lag(self, connection: FileConnection, bounds: Bounds) -> int:
        taken = acks.taken(connection, self._group_id, bounds.id)
        return count_between(connection, bounds, bounds.position or 0, taken)

    def _leave(self, deadline: Deadline) -> None:
        deadline = Deadline(min(deadline.left(), CLOSING_SECONDS))
        self._heartbeat.stop()
        try:
            now = now_ms()
            with self._writing("leave", deadline) as connection:
                group_assignments.remove_members(connection, self._group_id, [self._member])
                self._reassign(connection, now)
            _log.info("group %r: left", self._group)
        finally:
            self._heartbeat.join(deadline)


def as_text(partitions: Sequence[Partition]) -> str:
    more = f" and {len(partitions) - _MOST_NAMED} more" if len(partitions) > _MOST_NAMED else ""
    return ", ".join(f"{topic}[{number}]" for topic, number in partitions[:_MOST_NAMED]) + more
