"""Decision logs in an SQL database: their records are rows of one table, numbered without gaps for each log.

An append takes its number under the lock of its log's row and keeps this lock until its commit, so records become
visible in the order of their numbers. The isolation level READ COMMITTED suffices.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateTable

from txnbridge.errors import (
    AccessDenied,
    BackendMissing,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidOption,
    OutcomeUnknown,
    PositionLost,
    StorageFailed,
    TxnBridgeError,
)
from txnbridge.spi import Deadline, DecisionLog, Position

_LONGEST_NAME = 255
# The number of records that are read into memory at once; a record may have nearly a megabyte.
_READ_ROWS = 100
# The number of records that one statement deletes: few, so that other processes wait only briefly for its locks.
_TRIM_ROWS = 10_000
# The pause before a retry after a temporary error: another process holds a lock, or the database is starting.
_RETRY_SECONDS = 0.05
# The interval at which a thread that waits for the database checks whether its deadline was shortened.
_TURN_SECONDS = 0.1
_PERMISSION_DENIED = "42501"  # the SQLSTATE of a missing privilege

_tables = sa.MetaData()
_logs = sa.Table(
    "txnbridge_logs",
    _tables,
    sa.Column("name", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("first", sa.BigInteger, nullable=False),  # the number of the first record that is not trimmed
    sa.Column("next", sa.BigInteger, nullable=False),  # the number that the next appended record gets
)
_records = sa.Table(
    "txnbridge_log_records",
    _tables,
    sa.Column("log", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("record", sa.LargeBinary(1 << 24), nullable=False),
)
_place = sa.Table(
    "txnbridge_place",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # always 1
    sa.Column("cluster", sa.String(36), nullable=False),
)

T = TypeVar("T")


class SqlLogs:
    """The store of all decision logs in one database, for `connect(decision_log=…)`.

    `database` is SQLAlchemy's URL, or an `Engine`, which the caller closes. The tables are created at first use; if the
    user may not create tables, the error contains the statements. Raise `InvalidOption` for a database that does not
    outlive this process, `BackendMissing` if the database's driver is not installed.
    """

    def __init__(self, database: str | sa.Engine) -> None:
        self._owned = isinstance(database, str)
        self._engine = _engine(database) if isinstance(database, str) else database
        if isinstance(self._engine.pool, StaticPool) or self._engine.url.database in (None, "", ":memory:"):
            raise InvalidOption("a decision log needs a database that outlives this process: name one in the URL")
        self._cluster: str | None = None

    def __repr__(self) -> str:
        return f"SqlLogs({self._engine.url.render_as_string(hide_password=True)})"

    def cluster(self, deadline: Deadline) -> str:
        """Return the id of this database for tokens; the database stores the id, which its first user makes."""
        if self._cluster is None:
            self._cluster = self._ask("opening the decision logs", self._open, deadline)
        return self._cluster

    def _open(self, connection: sa.Connection) -> str:
        _require_durable(connection)
        if not sa.inspect(connection).has_table(_records.name):
            _make_tables(connection)
        _insert_missing(connection, _place, number=1, cluster=str(uuid.uuid4()))
        return str(connection.scalar(sa.select(_place.c.cluster).where(_place.c.number == 1)))

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        """Return the decision log of this name, and create it if it does not exist."""
        if len(name) > _LONGEST_NAME:
            raise InvalidOption(f"the name of a decision log in SQL takes at most {_LONGEST_NAME} characters")
        self.cluster(deadline)

        def create(connection: sa.Connection) -> None:
            _insert_missing(connection, _logs, name=name, first=0, next=0)

        self._ask(f"opening the decision log {name!r}", create, deadline)
        return SqlLog(name, self._ask, self._change)

    def close(self) -> None:
        """Close the connections to the database, unless the caller has given the engine."""
        if self._owned:
            self._engine.dispose()

    # --- running database transactions ------------------------------------------------------------------------------

    def _ask(self, what: str, question: Callable[[sa.Connection], T], deadline: Deadline) -> T:
        """Run `question` in a database transaction, and repeat it after temporary errors until the deadline.

        `question` may run more than once. `what` names the work for error texts.
        """
        while True:
            try:
                return self._change(what, question, deadline)
            except OutcomeUnknown as error:
                if deadline.left() <= _RETRY_SECONDS:
                    raise DeadlineExceeded(str(error)) from error.__cause__
            except BrokerUnavailable as error:
                if type(error) is not BrokerUnavailable or deadline.left() <= _RETRY_SECONDS:
                    raise
            threading.Event().wait(_RETRY_SECONDS)

    def _change(self, what: str, change: Callable[[sa.Connection], T], deadline: Deadline) -> T:
        """Run `change` once, in one database transaction; return its result. `what` names the work for error texts.

        Raise `OutcomeUnknown` if the commit may or may not have happened, `BrokerUnavailable` if it did not.
        """
        asked = _Asked()

        def run() -> T:
            with self._engine.connect() as connection:
                try:
                    found = change(connection)
                    asked.commit()
                    connection.commit()
                    return found
                finally:
                    if asked.given_up:
                        connection.invalidate()  # do not return it to the pool, which may be closed by now

        try:
            return _within(deadline, run)
        except FutureTimeout:
            if asked.give_up():
                raise OutcomeUnknown(f"{what}: the database did not answer in {deadline.seconds:g} s") from None
            raise DeadlineExceeded(f"{what}: the database did not answer in {deadline.seconds:g} s") from None
        except exc.SQLAlchemyError as error:
            if asked.committing:
                raise OutcomeUnknown(f"{what}: the answer was lost") from _own(error)
            raise _in_our_words(error, what) from _own(error)


class _Asked:
    """Says whether a thread has asked the database to commit; the waiting caller can prevent a commit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.committing = False
        self.given_up = False

    def commit(self) -> None:
        with self._lock:
            if self.given_up:
                raise _GivenUp
            self.committing = True

    def give_up(self) -> bool:
        """Prevent the commit, for a caller whose deadline has passed; return True if the database was asked already."""
        with self._lock:
            self.given_up = True
            return self.committing


class _GivenUp(Exception):
    """Raised to roll a change back, because the caller's deadline has passed."""


class SqlLog(DecisionLog):
    """One decision log in a database. A record's position is `(number,)`, counted from 0."""

    origin = (0,)
    numbered = True

    def __init__(self, name: str, ask: Callable[..., Any], change: Callable[..., Any]) -> None:
        self._name = name
        self._what = f"the decision log {name!r}"
        self._ask = ask
        self._change = change

    def begin(self, deadline: Deadline) -> Position | None:
        first, following = self._ask(self._what, self._bounds, deadline)
        return (first,) if first < following else None

    def end(self, deadline: Deadline) -> Position | None:
        first, following = self._ask(self._what, self._bounds, deadline)
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

        while True:
            try:
                stored: Position = self._change(f"appending to {self._what}", store, deadline)
                return stored
            except BrokerUnavailable as error:
                if type(error) is not BrokerUnavailable or deadline.left() <= _RETRY_SECONDS:
                    raise
            threading.Event().wait(_RETRY_SECONDS)

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records of a range. Raise `PositionLost` if another process trims records not yet yielded."""
        begin, following = self._ask(self._what, self._bounds, deadline)
        at = begin if first is None else first[0]
        stop = following - 1 if last is None else min(last[0], following - 1)
        while at <= stop:
            rows = self._ask(
                f"reading {self._what}", lambda connection, at=at: self._page(connection, at, stop), deadline
            )
            for position, record in rows:
                if position != at:
                    break
                yield (at,), record
                at += 1
            else:
                if rows:
                    continue
            raise PositionLost(f"{self._what} has no record {at} any more: it was trimmed")

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
        first: int = self._ask(f"trimming {self._what}", begin_later, deadline)
        while self._ask(f"trimming {self._what}", remove_some, deadline):
            pass


def _within(deadline: Deadline, work: Callable[[], T]) -> T:
    """Run `work` on another thread and return its result, because a driver may wait for a dead server without end.

    Raise `TimeoutError` of concurrent.futures at the deadline.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="txnbridge-sql").start()
    while not future.done() and not deadline.expired:
        wait([future], min(deadline.left(), _TURN_SECONDS))
    return future.result(0)


def _engine(url: str) -> sa.Engine:
    try:
        return sa.create_engine(url, pool_pre_ping=True, hide_parameters=True)
    except (ModuleNotFoundError, exc.NoSuchModuleError) as error:
        raise BackendMissing(f"the database of the decision log needs a driver: {error}") from error
    except exc.ArgumentError:
        raise InvalidOption("decision_log is a broker's URL, or a database's such as sqlite:////path/to/file") from None


def _make_tables(connection: sa.Connection) -> None:
    statements = [CreateTable(table, if_not_exists=True) for table in (_logs, _place, _records)]
    try:
        for statement in statements:
            connection.execute(statement)
    except exc.DBAPIError as error:
        if _state_of(error) != _PERMISSION_DENIED:
            raise
        told = ";".join(str(each.compile(dialect=connection.dialect)).rstrip() for each in statements)
        raise AccessDenied(
            f"decision logs need tables that this user may not make. Make them, and grant select, insert, update and"
            f" delete on them:{told}"
        ) from _own(error)


def _insert_missing(connection: sa.Connection, table: sa.Table, **row: object) -> None:
    (key,) = table.primary_key.columns
    if connection.scalar(sa.select(key).where(key == row[key.name])) is None:
        try:
            with connection.begin_nested():
                connection.execute(sa.insert(table).values(**row))
        except exc.IntegrityError:
            pass  # another process has inserted the row


def _require_durable(connection: sa.Connection) -> None:
    """Raise an error for a database that confirms commits before they are durable, and for a read-only replica."""
    if connection.dialect.name == "sqlite":
        if int(connection.exec_driver_sql("PRAGMA synchronous").scalar() or 0) < 2:
            raise InvalidOption("a decision log needs SQLite with PRAGMA synchronous=FULL")
    elif connection.dialect.name == "postgresql":
        if connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off":
            raise InvalidOption("a decision log needs PostgreSQL with synchronous_commit at least local, not off")
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar():
            raise InvalidOption("a decision log needs PostgreSQL's primary: this server is a replica")


def _own(error: exc.SQLAlchemyError) -> BaseException:
    """Return the driver's own error, because the text of SQLAlchemy's error contains the statement's values."""
    return getattr(error, "orig", None) or error


def _state_of(error: exc.DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", "") or "")


def _in_our_words(error: exc.SQLAlchemyError, what: str) -> TxnBridgeError:
    text = f"{what}: {_own(error)}".strip()
    if isinstance(error, exc.DBAPIError):
        if _state_of(error) == _PERMISSION_DENIED:
            return AccessDenied(text)
        # Two processes may create a table or row at the same time: the retry of the second one finds it.
        if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.IntegrityError):
            return BrokerUnavailable(text)
    if isinstance(error, exc.TimeoutError):
        return BrokerUnavailable(text)
    return StorageFailed(text)
