"""Administration of groups: their members, offsets and lag, and the reset of their offsets."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime

from txnbridge.errors import InvalidState, NotFound
from txnbridge.spi import Deadline, GroupInfo, GroupMember, Partition, Position
from txnbridge_embedded.client.readable_ranges import Bounds, count_between, first_since, read_bounds
from txnbridge_embedded.client.store import FileConnection, Store, now_ms
from txnbridge_embedded.read import group_assignments
from txnbridge_embedded.write import acks


def describe(connection: sqlite3.Connection, name: str) -> GroupInfo:
    """Return a group's members, offsets and lag, in the caller's snapshot. Raise `NotFound` if it does not exist."""
    group_id = _id_of(connection, name)
    bounds = _read_bounds(connection, group_id)
    by_id = {found.id: partition for partition, found in bounds.items()}
    held = group_assignments.read_assignments(connection, group_id)
    return GroupInfo(
        name,
        tuple(
            GroupMember(member, host, tuple(by_id[id] for id, row in held.items() if row.member == member), until)
            for member, host, until in _live_members(connection, group_id)
        ),
        {partition: (found.position or 0,) for partition, found in bounds.items()},
        {
            partition: count_between(connection, found, found.position or 0, acks.taken(connection, group_id, found.id))
            for partition, found in bounds.items()
        },
    )


def reset(
    store: Store, connection: FileConnection, name: str, to: str | int, topics: Sequence[str] | None, deadline: Deadline
) -> dict[Partition, Position]:
    """Set a group's offsets to "earliest", "latest" or a time in milliseconds, and return the new offsets.

    Raise `NotFound` if the group does not exist or has not read a given topic, and `InvalidState` if it has members, or
    messages that a prepared transaction has acknowledged.
    """
    with store.reading(connection, deadline):
        bounds = _wanted(connection, name, topics)
    times = (
        {p: first_since(store, connection, found, to, deadline) for p, found in bounds.items()}
        if isinstance(to, int)
        else {}
    )
    with store.writing(connection, deadline, f"setting group {name!r}"):
        group_id = _id_of(connection, name)
        _check_free(connection, group_id, name)
        group_assignments.remove_members(
            connection, group_id, group_assignments.expired_members(connection, group_id, now_ms())
        )
        bounds = _wanted(connection, name, topics)
        reached = {p: times.get(p, found.kept if to == "earliest" else found.end) for p, found in bounds.items()}
        for partition, offset in reached.items():
            _set(connection, group_id, bounds[partition].id, offset)
    return {partition: (offset,) for partition, offset in reached.items()}


def held_by_others(
    connection: sqlite3.Connection, group_id: int, member: str
) -> dict[tuple[str, int], list[Partition]]:
    """Return the partitions of a group's members other than `member`, by each member's host and end of its lease."""
    found: dict[tuple[str, int], list[Partition]] = {}
    rows = connection.execute(
        "SELECT m.host, m.expires_at, t.name, p.number FROM assignments a JOIN members m ON m.id = a.member"
        " JOIN partitions p ON p.id = a.partition_id JOIN topics t ON t.id = p.topic_id"
        " WHERE a.group_id = ? AND a.member != ? ORDER BY m.joined_at, t.name, p.number",
        (group_id, member),
    )
    for host, until, topic, number in rows:
        found.setdefault((host, until), []).append((topic, number))
    return found


def lease_text(host: str, until: int) -> str:
    """Return a text with a member's host and the end of its lease."""
    return f"{host}, whose lease ends at {datetime.fromtimestamp(until / 1000):%H:%M:%S} unless it is renewed"


def _id_of(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT id FROM groups WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise NotFound(f"there is no group {name!r}; `txnbridge groups list` shows all groups")
    return int(row[0])


def _live_members(connection: sqlite3.Connection, group_id: int) -> list[tuple[str, str, int]]:
    return connection.execute(
        "SELECT id, host, expires_at FROM members WHERE group_id = ? AND expires_at >= ? ORDER BY joined_at, id",
        (group_id, now_ms()),
    ).fetchall()


def _read_bounds(connection: sqlite3.Connection, group_id: int) -> Mapping[Partition, Bounds]:
    """Return the readable ranges of the partitions that the group has begun to read."""
    rows = connection.execute(
        "SELECT DISTINCT t.name FROM positions q JOIN partitions p ON p.id = q.partition_id"
        " JOIN topics t ON t.id = p.topic_id WHERE q.group_id = ?",
        (group_id,),
    )
    bounds = read_bounds(connection, [topic for (topic,) in rows], group_id)
    return {partition: found for partition, found in bounds.items() if found.position is not None}


def _wanted(connection: sqlite3.Connection, name: str, topics: Sequence[str] | None) -> Mapping[Partition, Bounds]:
    bounds = _read_bounds(connection, _id_of(connection, name))
    for topic in topics or ():
        if topic not in {each for each, _ in bounds}:
            raise NotFound(f"group {name!r} has never read topic {topic!r}")
    return {p: found for p, found in bounds.items() if topics is None or p[0] in topics}


def _check_free(connection: sqlite3.Connection, group_id: int, name: str) -> None:
    for _, host, until in _live_members(connection, group_id):
        raise InvalidState(f"group {name!r} has a member at {lease_text(host, until)}: stop it first")
    row = connection.execute(
        "SELECT id FROM transactions JOIN pending_acks USING (number) WHERE group_id = ? LIMIT 1", (group_id,)
    ).fetchone()
    if row is not None:
        raise InvalidState(f"the prepared transaction {row[0]} has acknowledged messages for {name!r}: end it first")


def _set(connection: sqlite3.Connection, group_id: int, partition_id: int, offset: int) -> None:
    where = (group_id, partition_id)
    for table in ("acks", "pending_acks", "leases"):
        connection.execute(f"DELETE FROM {table} WHERE group_id = ? AND partition_id = ?", where)
    connection.execute("UPDATE positions SET next = ? WHERE group_id = ? AND partition_id = ?", (offset, *where))
    # The last member may only be suspended. With the new epoch it cannot acknowledge messages from before the reset.
    connection.execute(
        "UPDATE assignments SET member = NULL, epoch = epoch + 1 WHERE group_id = ? AND partition_id = ?", where
    )
