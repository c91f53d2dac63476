"""Decision logs: rows in one table, numbered without gaps."""

from __future__ import annotations

from collections.abc import Iterator

from txnbridge.errors import OutcomeUnknown, PositionLost
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_embedded.client.shared_connection import SharedConnection
from txnbridge_embedded.client.store import CommitUnclear, FileConnection


class EmbeddedLog(DecisionLog):
    """One decision log in the file. A position is a record's number, from 0."""

    origin = (0,)
    numbered = True

    def __init__(self, session: SharedConnection, name: str, deadline: Deadline) -> None:
        self._session = session
        with session(deadline) as connection:
            with session.store.reading(connection, deadline):
                row = connection.execute("SELECT id FROM logs WHERE name = ?", (name,)).fetchone()
            if row is None:
                with session.store.writing(connection, deadline, "creating a decision log"):
                    connection.execute("INSERT INTO logs(name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
                    row = connection.execute("SELECT id FROM logs WHERE name = ?", (name,)).fetchone()
        self._id = int(row[0])
        self._base = self._id << OFFSET_BITS

    def begin(self, deadline: Deadline) -> Position | None:
        first, following = self._bounds(deadline)
        return (first,) if first < following else None

    def end(self, deadline: Deadline) -> Position | None:
        first, following = self._bounds(deadline)
        return (following - 1,) if first < following else None

    def _bounds(self, deadline: Deadline) -> tuple[int, int]:
        with self._session(deadline) as connection, self._session.store.reading(connection, deadline):
            first, following = connection.execute("SELECT first, next FROM logs WHERE id = ?", (self._id,)).fetchone()
        return first, following

    def append(self, record: bytes, deadline: Deadline) -> Position:
        try:
            with (
                self._session(deadline) as connection,
                self._session.store.events.step("step:append", bytes=len(record)),
                self._session.store.writing(connection, deadline, "appending a decision"),
            ):
                ((following,),) = connection.execute(
                    "UPDATE logs SET next = next + 1 WHERE id = ? RETURNING next", (self._id,)
                ).fetchall()
                position = following - 1
                connection.execute("INSERT INTO log_records VALUES (?, ?)", (self._base | position, record))
        except CommitUnclear as error:
            raise OutcomeUnknown(f"a decision may or may not be stored: {error}") from error.__cause__
        return (position,)

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records from `first` to `last`. Raise `PositionLost` if they are trimmed before they are read."""
        begin, following = self._bounds(deadline)
        at = begin if first is None else max(first[0], begin)
        stop = following - 1 if last is None else min(last[0], following - 1)
        while at <= stop:
            with self._session(deadline) as connection, self._session.store.reading(connection, deadline):
                rows = connection.execute(
                    "SELECT id, record FROM log_records WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
                    (self._base | at, self._base | stop, self._session.store.settings.timing.log_read_rows),
                ).fetchall()
            for row_id, record in rows:
                if row_id != self._base | at:
                    break
                yield (at,), record
                at += 1
            else:
                if rows:
                    continue
            raise PositionLost(f"the decision log was trimmed while it was read, at record {at}")

    def trim(self, before: Position, deadline: Deadline) -> None:
        with self._session(deadline) as connection:
            with self._session.store.writing(connection, deadline, "trimming a decision log"):
                connection.execute(
                    "UPDATE logs SET first = max(first, min(next, ?)) WHERE id = ?", (before[0], self._id)
                )
            while self._remove_batch(connection, deadline) and not deadline.expired:  # a later trim removes the rest
                pass

    def _remove_batch(self, connection: FileConnection, deadline: Deadline) -> bool:
        most = self._session.store.settings.timing.log_trim_rows
        with self._session.store.writing(connection, deadline, "trimming a decision log"):
            (first,) = connection.execute("SELECT first FROM logs WHERE id = ?", (self._id,)).fetchone()
            removed = connection.execute(
                "DELETE FROM log_records WHERE id IN (SELECT id FROM log_records WHERE id >= ? AND id < ? LIMIT ?)",
                (self._base, self._base + first, most),
            )
            return removed.rowcount == most
