"""The members of a group, and the assignment of partitions to members.

A member has a lease, which a background thread of its process renews. The first member that finds a change (a member
joined, left or let its lease expire, or a topic grew) assigns the partitions anew. If a partition should move, the row
of its assignment first names the next owner, in the column `wanted`. The present owner reads this at its next poll,
ends its transaction, and releases the partition. If the present owner does not release the partition within the time of
a lease, the next owner takes the partition. Each assignment raises the partition's epoch, so that acknowledgements
under an older epoch are refused.

The functions run inside a write transaction. Their `now` is the time before the wait for that transaction. So no member
is removed because it could not renew its lease while it waited for the same file.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sqlite3
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from txnbridge.errors import InvalidOption, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_embedded.client.readable_ranges import read_bounds
from txnbridge_embedded.client.store import FileConnection, Store, now_ms

_log = logging.getLogger("txnbridge.embedded")


@dataclass(frozen=True)
class PartitionOwner:
    """A row of the table `assignments`: a partition's owner, the assignment's epoch, and the next owner.

    `wanted` is the member that should get the partition from its owner; None if the partition stays.
    """

    member: str | None
    epoch: int
    wanted: str | None = None
    wanted_since: int | None = None

    def is_overdue(self, now: int, lease_ms: int) -> bool:
        """Return whether the owner should have released the partition, and has kept it for longer than a lease.

        Another member may then take the partition.
        """
        return self.wanted_since is not None and self.wanted_since + lease_ms <= now


def find_or_create_group(connection: sqlite3.Connection, name: str, sharing: str) -> int:
    """Return a group's id; create the group if it is missing. Raise `InvalidOption` if it has another `sharing`."""
    connection.execute("INSERT INTO groups(name, sharing) VALUES (?, ?) ON CONFLICT DO NOTHING", (name, sharing))
    group_id, made_with = connection.execute("SELECT id, sharing FROM groups WHERE name = ?", (name,)).fetchone()
    if made_with != sharing:
        text = f"group {name!r} was created with sharing={made_with!r}, which cannot change; use that, or another group"
        raise InvalidOption(text)
    return int(group_id)


def record_starts(
    connection: sqlite3.Connection,
    group_id: int,
    topics: Iterable[str],
    start: str | int = "earliest",
    found: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Store a group's start offset in each partition in which the group has no position yet.

    `start` is for topics that the group has never read: "earliest", "latest" or a time. For a time `found` has the
    offset of each partition id. Partitions that were added to a topic later are read from their beginning.
    """
    bounds = read_bounds(connection, topics, group_id)
    known = {topic for (topic, _), b in bounds.items() if b.position is not None}
    for (topic, _), b in bounds.items():
        if b.position is not None:
            continue
        if topic in known:
            offset = 0
        elif start == "earliest":
            offset = b.kept
        else:
            offset = found.get(b.id, b.end)
        connection.execute(
            "INSERT INTO positions(group_id, partition_id, next) VALUES (?, ?, ?)", (group_id, b.id, offset)
        )


def add_member(connection: sqlite3.Connection, group_id: int, topics: Sequence[str], lease_ms: int) -> str:
    """Add a member to a group, and return its new id."""
    member, now = secrets.token_hex(8), now_ms()
    connection.execute(
        "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?)",
        (member, group_id, json.dumps(topics), f"{socket.gethostname()}:{os.getpid()}", now + lease_ms, now),
    )
    return member


def remove_members(connection: sqlite3.Connection, group_id: int, members: Iterable[str]) -> None:
    """Remove members of a group, and end their leases of messages; `reassign` then assigns their partitions."""
    for member in members:
        connection.execute("DELETE FROM members WHERE id = ?", (member,))
        connection.execute("UPDATE leases SET until = 0 WHERE group_id = ? AND member = ?", (group_id, member))


def expired_members(connection: sqlite3.Connection, group_id: int, now: int) -> list[str]:
    rows = connection.execute("SELECT id FROM members WHERE group_id = ? AND expires_at < ?", (group_id, now))
    return [member for (member,) in rows]


def release(connection: sqlite3.Connection, group_id: int, member: str, partition_ids: Iterable[int]) -> None:
    """Release partitions of a member, so that `reassign` can assign them to other members."""
    connection.executemany(
        "UPDATE assignments SET member = NULL WHERE group_id = ? AND member = ? AND partition_id = ?",
        ((group_id, member, partition_id) for partition_id in partition_ids),
    )


def remove_expired(connection: sqlite3.Connection, group_id: int, now: int) -> dict[str, list[str]]:
    """Remove members with expired leases, and store start offsets of new partitions; return each member's topics."""
    remove_members(connection, group_id, expired_members(connection, group_id, now))
    rows = connection.execute("SELECT id, topics FROM members WHERE group_id = ?", (group_id,))
    members: dict[str, list[str]] = {member: json.loads(topics) for member, topics in rows}
    record_starts(connection, group_id, set().union(*members.values()))
    return members


def reassign(connection: sqlite3.Connection, group_id: int, now: int, lease_ms: int) -> None:
    """Assign a group's partitions to its members as evenly as possible, after removing members with expired leases.

    A partition without a living owner gets its new owner at once. If a partition should move from a living owner, its
    row names the next owner in `wanted`, and the owner releases the partition at its next poll. If the owner does not
    release it within the time of a lease, the partition moves without a release.
    """
    members = remove_expired(connection, group_id, now)
    topics = set().union(*members.values())
    partitions = _partitions(connection, topics)
    names = {name: number for number, name in enumerate(sorted(topics))}
    held = read_assignments(connection, group_id)
    target = assign(
        {member: [names[topic] for topic in read] for member, read in members.items()},
        {id: names[topic] for id, topic in partitions.items()},
        {id: row.member for id, row in held.items() if row.member is not None},
    )
    for id in partitions:
        before = held.get(id, PartitionOwner(None, 0))
        after = _next_assignment(before, target[id], before.member in members, now, lease_ms)
        if after != before:
            connection.execute(
                "INSERT OR REPLACE INTO assignments VALUES (?, ?, ?, ?, ?, ?)",
                (group_id, id, after.member, after.epoch, after.wanted, after.wanted_since),
            )
    connection.execute("UPDATE groups SET generation = generation + 1 WHERE id = ?", (group_id,))


def _next_assignment(row: PartitionOwner, target: str, owner_lives: bool, now: int, lease_ms: int) -> PartitionOwner:
    if owner_lives and target == row.member:
        return PartitionOwner(row.member, row.epoch)
    if not owner_lives or row.is_overdue(now, lease_ms):
        return PartitionOwner(target, row.epoch + 1)
    # `wanted_since` is kept even if another member should get the partition now.
    return PartitionOwner(row.member, row.epoch, target, now if row.wanted_since is None else row.wanted_since)


def _partitions(connection: sqlite3.Connection, topics: Iterable[str]) -> dict[int, str]:
    names = tuple(topics)
    rows = connection.execute(
        "SELECT p.id, t.name FROM topics t JOIN partitions p ON p.topic_id = t.id"
        f" WHERE t.name IN ({', '.join('?' * len(names))})",
        names,
    )
    return dict(rows.fetchall())


def read_assignments(connection: sqlite3.Connection, group_id: int) -> dict[int, PartitionOwner]:
    rows = connection.execute(
        "SELECT partition_id, member, epoch, wanted, wanted_since FROM assignments WHERE group_id = ?", (group_id,)
    )
    return {id: PartitionOwner(*row) for id, *row in rows}


class Heartbeat:
    """Renews one member's lease on a background thread, so that a reader need not poll often.

    The thread has only a weak reference to the reader. So if a reader is garbage-collected without `close`, its lease
    expires: also if a signal handler's exception came while it was opened.
    """

    def __init__(self, reader: object, store: Store, lease_seconds: float, member: str) -> None:
        self.member = member
        self._reader = weakref.ref(reader)
        self._store = store
        self._lease = lease_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txnbridge-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing the lease, without waiting for the thread."""
        self._stopped.set()

    def join(self, deadline: Deadline) -> None:
        self._thread.join(deadline.left())

    def _run(self) -> None:
        connection = None
        # The lease is renewed three times in its duration, so that one renewal may fail, and the next may be late.
        while not self._stopped.wait(self._lease / 3) and self._reader() is not None:
            try:
                connection = connection or self._store.connect(durable=False)  # after a power cut there is no member
                self._renew(connection)
            except TxnBridgeError as error:
                _log.warning("the lease of a group member could not be renewed: %s", error)
        if connection is not None:
            connection.close()

    def _renew(self, connection: FileConnection) -> None:
        # If the row does not exist, the member was removed, and its reader joins again at its next poll.
        with self._store.writing(connection, Deadline(self._lease / 3), "renewing a lease"):
            connection.execute(
                "UPDATE members SET expires_at = ? WHERE id = ?", (now_ms() + int(self._lease * 1000), self.member)
            )


def assign(
    members: Mapping[str, Collection[int]], partitions: Mapping[int, int], owners: Mapping[int, str]
) -> dict[int, str]:
    """Assign each partition to a member that reads its topic, evenly: no move of one partition is more even.

    `members` has the topics of each member, `partitions` the topic of each partition, and `owners` the current owners.
    A partition stays with its owner unless its move makes the numbers more even. A partition is left out if no member
    reads its topic. The same arguments always give the same result, so any member may compute the assignment.
    """
    shares = _Shares(members, partitions)
    for partition, owner in sorted(owners.items()):
        if partition in partitions and owner in shares.readers(partitions[partition]):
            shares.give(partition, owner)
    for partition in sorted(partitions):
        if partition not in shares.owner:
            shares.give_to_least(partition)
    while shares.level():
        pass
    return shares.owner


class _Shares:
    """The partitions of each member during the computation of an assignment."""

    def __init__(self, members: Mapping[str, Collection[int]], partitions: Mapping[int, int]) -> None:
        self._partitions = partitions
        self._readers: dict[int, list[str]] = {topic: [] for topic in set(partitions.values())}
        for member in sorted(members):
            for topic in set(members[member]) & self._readers.keys():
                self._readers[topic].append(member)
        self._held: dict[str, dict[int, list[int]]] = {member: {} for member in members}  # by topic
        self._count = dict.fromkeys(sorted(members), 0)  # sorted, so that the result does not depend on the order
        self.owner: dict[int, str] = {}

    def readers(self, topic: int) -> list[str]:
        return self._readers[topic]

    def give(self, partition: int, member: str) -> None:
        self.owner[partition] = member
        self._held[member].setdefault(self._partitions[partition], []).append(partition)
        self._count[member] += 1

    def give_to_least(self, partition: int) -> None:
        readers = self._readers[self._partitions[partition]]
        if readers:
            self.give(partition, min(readers, key=self._count.__getitem__))

    def level(self) -> bool:
        """Move a partition to a member with at least two fewer than its owner; return False if no partition can be."""
        for giver in sorted(self._count, key=self._count.__getitem__, reverse=True):
            for topic, held in sorted(self._held[giver].items()):
                taker = min(self._readers[topic], key=self._count.__getitem__)
                if held and self._count[taker] <= self._count[giver] - 2:
                    # The last partition is moved: those that the giver owned before are first in the list.
                    self._count[giver] -= 1
                    self.give(held.pop(), taker)
                    return True
        return False
