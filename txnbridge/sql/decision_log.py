"""Decision logs in an SQL database: their records are rows of one table, numbered without gaps for each log.

An append takes its number under the lock of its log's row and keeps this lock until its commit, so records become
visible in the order of their numbers. The isolation level READ COMMITTED suffices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import sqlalchemy as sa

from txnbridge.errors import InvalidOption, PositionLost, StorageFailed
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge.sql._database import EXACT_TEXT, Database, Trial, database_id, insert_missing, place

_LONGEST_NAME = 255
# The number of records that are read into memory at once; a record may have nearly a megabyte.
_READ_ROWS = 100
# The number of records that one statement deletes: few, so that other processes wait only briefly for its locks.
_TRIM_ROWS = 10_000

_tables = sa.MetaData()
_logs = sa.Table(
    "txnbridge_logs",
    _tables,
    sa.Column("name", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("first", sa.BigInteger, nullable=False),  # the number of the first record that is not trimmed
    sa.Column("next", sa.BigInteger, nullable=False),  # the number that the next appended record gets
    **EXACT_TEXT,
)
_records = sa.Table(
    "txnbridge_log_records",
    _tables,
    sa.Column("log", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("record", sa.LargeBinary(1 << 24), nullable=False),
    **EXACT_TEXT,
)

_WHAT = "the decision log"


class SqlLogs:
    """The store of all decision logs in one database, for `connect(decision_log=…)`.

    `database` is SQLAlchemy's URL, or an `Engine`, which the caller closes, of PostgreSQL, MariaDB or SQLite. The
    tables are created at first use; if the user may not create tables, the error contains the statements. Raise
    `InvalidOption` for a database that does not outlive this process, `BackendMissing` if its driver is not installed.
    """

    def __init__(self, database: str | sa.Engine) -> None:
        self._database = Database(database, _WHAT)
        self._cluster: str | None = None

    def __repr__(self) -> str:
        return f"SqlLogs({self._database})"

    def cluster(self, deadline: Deadline) -> str:
        """Return the id of this database for tokens; the database stores the id, which its first user makes."""
        if self._cluster is None:
            trials: list[Trial] = [
                (_logs, "name", {"first": 0, "next": 0}),
                (_records, "log", {"position": 0, "record": b""}),
            ]
            self._database.open((_logs, place, _records), trials, deadline)
            self._cluster = self._database.ask(f"opening {_WHAT}", database_id, deadline)
        return self._cluster

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        """Return the decision log of this name, and create it if it does not exist."""
        if len(name) > _LONGEST_NAME:
            raise InvalidOption(f"the name of a decision log in SQL takes at most {_LONGEST_NAME} characters")
        self.cluster(deadline)
        create = functools.partial(insert_missing, table=_logs, name=name, first=0, next=0)
        self._database.ask(f"opening the decision log {name!r}", create, deadline)
        return SqlLog(name, self._database)

    def close(self) -> None:
        """Close the connections to the database, unless the caller has given the engine."""
        self._database.close()


class SqlLog(DecisionLog):
    """One decision log in a database. A record's position is `(number,)`, counted from 0."""

    origin: Position = (0,)
    numbered = True

    def __init__(self, name: str, database: Database) -> None:
        self._name = name
        self._what = f"the decision log {name!r}"
        self._database = database

    def begin(self, deadline: Deadline) -> Position | None:
        first, following = self._database.ask(self._what, self._bounds, deadline)
        return (first,) if first < following else None

    def end(self, deadline: Deadline) -> Position | None:
        first, following = self._database.ask(self._what, self._bounds, deadline)
        return (following - 1,) if first < following else None

    def _bounds(self, connection: sa.Connection) -> tuple[int, int]:
        found = connection.execute(sa.select(_logs.c.first, _logs.c.next).where(_logs.c.name == self._name)).first()
        if found is None:
            raise StorageFailed(f"{self._what} is gone from the database")
        return found[0], found[1]

    def append(self, record: bytes, deadline: Deadline) -> Position:
        def store(connection: sa.Connection) -> Position:
            mine = _logs.c.name == self._name
            connection.execute(sa.update(_logs).where(mine).values(next=_logs.c.next + 1))
            position = self._bounds(connection)[1] - 1
            connection.execute(sa.insert(_records).values(log=self._name, position=position, record=record))
            return (position,)

        return self._database.ask(f"appending to {self._what}", store, deadline, once=True)

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records `first` to `last`. Raise `PositionLost` if one is trimmed before it was yielded."""
        begin, following = self._database.ask(self._what, self._bounds, deadline)
        at = begin if first is None else first[0]
        stop = following - 1 if last is None else min(last[0], following - 1)
        while at <= stop:
            page = functools.partial(self._page, first=at, last=stop)
            rows = self._database.ask(f"reading {self._what}", page, deadline)
            for position, record in rows:
                if position != at:
                    break
                yield (at,), record
                at += 1
            else:
                if rows:
                    continue
            raise PositionLost(f"{self._what} no longer has record {at}: it was trimmed")

    def _page(self, connection: sa.Connection, first: int, last: int) -> list[tuple[int, bytes]]:
        wanted = sa.select(_records.c.position, _records.c.record).where(
            _records.c.log == self._name, _records.c.position.between(first, last)
        )
        found = connection.execute(wanted.order_by(_records.c.position).limit(_READ_ROWS))
        return [(position, bytes(record)) for position, record in found]

    def trim(self, before: Position, deadline: Deadline) -> None:
        def begin_later(connection: sa.Connection) -> int:
            first, following = self._bounds(connection)
            wanted = max(first, min(before[0], following))
            later = (_logs.c.name == self._name) & (_logs.c.first < wanted)
            connection.execute(sa.update(_logs).where(later).values(first=wanted))
            return wanted

        def remove_some(connection: sa.Connection) -> bool:
            mine = _records.c.log == self._name
            oldest = connection.scalar(sa.select(sa.func.min(_records.c.position)).where(mine))
            if oldest is None or oldest >= first:
                return False
            up_to = min(first, int(oldest) + _TRIM_ROWS)
            connection.execute(sa.delete(_records).where(mine, _records.c.position < up_to))
            return up_to < first

        # The log's first number is increased before its records are deleted: if the process dies between the two
        # steps, the next trim deletes the rows.
        first: int = self._database.ask(f"trimming {self._what}", begin_later, deadline)
        while self._database.ask(f"trimming {self._what}", remove_some, deadline):
            pass
