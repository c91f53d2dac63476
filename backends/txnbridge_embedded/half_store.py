"""The half store: it keeps half messages in separate tables until they are published to their topics, or dropped."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from txnbridge.errors import DeadlineExceeded, NotFound
from txnbridge.spi import Deadline, Decision, Half, HalfMessage, HalfStore, Outcome
from txnbridge_embedded.client.headers import pack, unpack_raw
from txnbridge_embedded.client.shared_connection import SharedConnection
from txnbridge_embedded.client.store import FileConnection, StoredTopic, latest_time, now_ms
from txnbridge_embedded.write.staged_messages import StagedMessages, store

_COLUMNS = "id, group_name, transaction_id, check_at, deadline_at, checks"
# The interval at which a resolver looks for due check-backs, which are seconds apart.
_POLL_SECONDS = 0.2
# The pause between two check-backs doubles up to this multiple of `half_check_seconds`.
_LONGEST_PAUSE_FACTOR = 8
_OUTCOMES = {"committed": Outcome.COMMITTED, "aborted": Outcome.ABORTED}


class EmbeddedHalves(HalfStore):
    """Stores half messages in tables of the file, and publishes or drops them later, each in one write transaction."""

    def __init__(self, session: SharedConnection) -> None:
        self._session = session
        self._store = session.store
        self._interval = int(session.store.settings.half_check_seconds * 1000)

    def put(self, half: Half, deadline: Deadline) -> Half:
        with self._session(deadline) as connection:
            # The messages are encoded as for a send, to refuse a message that could not be published.
            self._stage(half.messages, lambda name: self._store.ensure_topic(connection, name, deadline))
            with self._writing(connection, deadline, half.transaction, "storing a half message"):
                added = connection.execute(
                    "INSERT INTO halves(group_name, transaction_id, state, check_at, deadline_at)"
                    " VALUES (?, ?, 'waiting', ?, ?) ON CONFLICT DO NOTHING RETURNING id",
                    (half.group, half.transaction, half.check_at, half.deadline_at),
                ).fetchall()
                for (half_id,) in added:
                    connection.executemany(
                        "INSERT INTO half_messages(half, number, topic, key, headers, value, partition, timestamp)"
                        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (
                            (half_id, number, m.topic, m.key, pack(m.headers), m.value, m.partition, m.timestamp)
                            for number, m in enumerate(half.messages)
                        ),
                    )
        return half

    def end(self, half: Half, decision: Decision, deadline: Deadline) -> Outcome:
        with (
            self._session(deadline) as connection,
            self._writing(connection, deadline, half.transaction, "ending a half message"),
        ):
            half_id, state, checks = self._find(connection, half)
            if state in _OUTCOMES:
                return _OUTCOMES[state]
            if decision is Decision.UNDECIDED:
                check_at = _now(connection) + self._pause(checks)
                connection.execute("UPDATE halves SET check_at = ? WHERE id = ?", (check_at, half_id))
                return Outcome.UNKNOWN
            if decision is Decision.COMMIT:
                outgoing = self._stage(_messages(connection, half_id), lambda name: self._store.topic(connection, name))
                now = now_ms()
                for rows in outgoing.pending():
                    store(connection, rows, now)
            outcome = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED
            connection.execute("DELETE FROM half_messages WHERE half = ?", (half_id,))
            connection.execute(
                "UPDATE halves SET state = ?, ended_at = ? WHERE id = ?", (outcome.value, now_ms(), half_id)
            )
            return outcome

    def _pause(self, checks: int) -> int:
        """Return the milliseconds until the next check-back, which grow with the number of earlier check-backs."""
        return self._interval * min(1 << max(0, checks - 1), _LONGEST_PAUSE_FACTOR)

    def checks(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        while True:
            try:
                if lent := self._due(group, limit, deadline):
                    return lent
            except DeadlineExceeded:
                if deadline.left() <= _POLL_SECONDS:  # other processes kept the file locked until now
                    raise
            time.sleep(pause := min(_POLL_SECONDS, deadline.left()))
            if pause < _POLL_SECONDS:
                return []

    def _due(self, group: str, limit: int, deadline: Deadline) -> list[Half]:
        query = (
            f"SELECT {_COLUMNS} FROM halves WHERE group_name = ? AND state = 'waiting' AND check_at <= ?"
            " ORDER BY check_at LIMIT ?"
        )
        with self._session(deadline) as connection:
            with self._store.reading(connection, deadline):
                due = (group, _now(connection), limit)
                if connection.execute(query, due).fetchone() is None:
                    return []  # mostly no check-back is due, so the write lock is not needed
            with self._store.writing(connection, deadline, "looking for due check-backs"):
                return [
                    half
                    for row in connection.execute(query, due).fetchall()
                    if (half := self._check_back(connection, row))
                ]

    def _check_back(self, connection: sqlite3.Connection, row: tuple[Any, ...]) -> Half | None:
        """Return a row's half message for its next check-back. After the last check-back park it, and return None."""
        half_id, group, transaction, *_, checks = row
        if checks >= self._store.settings.half_checks:
            with self._store.events.step("half.park", transaction, group=group, checks=checks):
                connection.execute("UPDATE halves SET state = 'parked' WHERE id = ?", (half_id,))
            return None
        check_at = _now(connection) + self._pause(checks + 1)
        connection.execute("UPDATE halves SET checks = checks + 1, check_at = ? WHERE id = ?", (check_at, half_id))
        return _half(connection, (*row[:-1], checks + 1))

    def parked(self, group: str, deadline: Deadline) -> list[Half]:
        with self._session(deadline) as connection, self._store.reading(connection, deadline):
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM halves WHERE group_name = ? AND state = 'parked' ORDER BY id", (group,)
            ).fetchall()
            return [_half(connection, row) for row in rows]

    def resume(self, half: Half, deadline: Deadline) -> None:
        with (
            self._session(deadline) as connection,
            self._store.writing(connection, deadline, "resuming a half message"),
        ):
            resumed = connection.execute(
                "UPDATE halves SET state = 'waiting', checks = 0, check_at = ?"
                " WHERE group_name = ? AND transaction_id = ? AND state = 'parked'",
                (now_ms(), half.group, half.transaction),
            )
            if not resumed.rowcount:
                raise NotFound(f"no half message of transaction {half.transaction!r} is parked in group {half.group!r}")

    # --- inside a write transaction --------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, connection: FileConnection, deadline: Deadline, transaction: str, what: str) -> Iterator[None]:
        with self._store.events.step("step:half", transaction), self._store.writing(connection, deadline, what):
            yield

    def _find(self, connection: sqlite3.Connection, half: Half) -> tuple[int, str, int]:
        row = connection.execute(
            "SELECT id, state, checks FROM halves WHERE group_name = ? AND transaction_id = ?",
            (half.group, half.transaction),
        ).fetchone()
        if row is None:
            raise NotFound(f"group {half.group!r} has no half message of transaction {half.transaction!r}")
        return row[0], row[1], row[2]

    def _stage(self, messages: Iterable[HalfMessage], find_topic: Callable[[str], StoredTopic]) -> StagedMessages:
        outgoing = StagedMessages(find_topic, lambda: None, self._store.settings)
        for message in messages:
            outgoing.add(*message)
        return outgoing


def _now(connection: sqlite3.Connection) -> int:
    """Return the later of the current time and the latest time in the file: a clock set back delays no check-back."""
    return max(now_ms(), latest_time(connection))


def _half(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Half:
    half_id, group, transaction, check_at, deadline_at, checks = row
    return Half(group, transaction, _messages(connection, half_id), check_at, deadline_at, checks)


def _messages(connection: sqlite3.Connection, half_id: int) -> list[HalfMessage]:
    rows = connection.execute(
        "SELECT topic, value, key, headers, partition, timestamp FROM half_messages WHERE half = ? ORDER BY number",
        (half_id,),
    )
    return [HalfMessage(topic, value, key, unpack_raw(headers), *place) for topic, value, key, headers, *place in rows]
