"""`Database`: runs database transactions with deadlines, and raises txnbridge's errors for the database's."""

from __future__ import annotations

import contextvars
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateIndex, CreateTable

from txnbridge.errors import (
    AccessDenied,
    BackendMissing,
    BrokerUnavailable,
    DeadlineExceeded,
    InvalidOption,
    OutcomeUnknown,
    StorageFailed,
    TxnBridgeError,
)
from txnbridge.spi import Deadline

# The pause before a retry after a temporary error: another process holds a lock, or the database is starting.
RETRY_SECONDS = 0.05
# The interval at which a thread that waits for the database checks whether its deadline was shortened.
_TURN_SECONDS = 0.1
_PERMISSION_DENIED = "42501"  # the SQLSTATE of a missing privilege
_LOCK_NOT_AVAILABLE = "55P03"  # the SQLSTATE of a statement that has waited for a lock longer than `lock_timeout`

T = TypeVar("T")

place = sa.Table(
    "txnbridge_place",
    sa.MetaData(),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # always 1
    sa.Column("cluster", sa.String(36), nullable=False),
)


class Database:
    """A database by SQLAlchemy's URL, or by an `Engine`, which the caller closes. `what` names its use in error texts.

    Raise `InvalidOption` for a database that does not outlive this process, `BackendMissing` if its driver is not
    installed.
    """

    def __init__(self, database: str | sa.Engine, what: str) -> None:
        self._owned = isinstance(database, str)
        self.engine = _make_engine(database, what) if isinstance(database, str) else database
        if isinstance(self.engine.pool, StaticPool) or self.engine.url.database in (None, "", ":memory:"):
            raise InvalidOption(f"{what} needs a database that outlives this process: name one in the URL")

    def __repr__(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close the connections to the database, unless the caller has given the engine."""
        if self._owned:
            self.engine.dispose()

    def ask(self, what: str, question: Callable[[sa.Connection], T], deadline: Deadline) -> T:
        """Run `question` in a database transaction, and repeat it after temporary errors until the deadline.

        `question` may run more than once. `what` names the work for error texts.
        """
        while True:
            try:
                return self.change(what, question, deadline)
            except OutcomeUnknown as error:
                if deadline.left() <= RETRY_SECONDS:
                    raise DeadlineExceeded(str(error)) from error.__cause__
            except BrokerUnavailable as error:
                if type(error) is not BrokerUnavailable or deadline.left() <= RETRY_SECONDS:
                    raise
            threading.Event().wait(RETRY_SECONDS)

    def change(self, what: str, change: Callable[[sa.Connection], T], deadline: Deadline) -> T:
        """Run `change` once, in one database transaction; return its result. `what` names the work for error texts.

        Raise `OutcomeUnknown` if the commit may or may not have happened, `BrokerUnavailable` if it did not.
        """
        commit = Commit()

        def run() -> T:
            with self.engine.connect() as connection:
                try:
                    found = change(connection)
                    commit.run(connection)
                    return found
                finally:
                    if commit.given_up:
                        connection.invalidate()  # do not return it to the pool, which may be closed by now

        return self.run(what, run, deadline, commit)

    def run(self, what: str, work: Callable[[], T], deadline: Deadline, commit: Commit) -> T:
        """Run `work`, which asks `commit` before it commits, on another thread; return its result.

        The engine of an `AsyncSession` works only where it is called, so `work` is then called without a deadline.
        Raise the errors of `change`.
        """
        try:
            return work() if self.engine.dialect.is_async else within(deadline, work)
        except FutureTimeout:
            if commit.give_up():
                raise OutcomeUnknown(f"{what}: the database did not answer in {deadline.seconds:g} s") from None
            raise DeadlineExceeded(f"{what}: the database did not answer in {deadline.seconds:g} s") from None
        except exc.SQLAlchemyError as error:
            if commit.asked:
                raise OutcomeUnknown(f"{what}: the answer was lost") from own(error)
            raise in_our_words(error, what) from own(error)


class Commit:
    """Says whether a thread has asked the database to commit; the waiting caller can prevent a commit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = False
        self.given_up = False

    def ask(self) -> None:
        with self._lock:
            if self.given_up:
                raise _GivenUp
            self.asked = True

    def run(self, connection: sa.Connection) -> None:
        """Commit the transaction of a connection. If the commit fails, close the driver's connection.

        SQLite keeps the transaction open if it refuses the commit, and SQLAlchemy would not roll the transaction back
        but let the next user of the connection continue in it.
        """
        self.ask()
        try:
            connection.commit()
        except BaseException:
            connection.invalidate()
            raise

    def give_up(self) -> bool:
        """Prevent the commit, for a caller whose deadline has passed; return True if the database was asked already."""
        with self._lock:
            self.given_up = True
            return self.asked


class _GivenUp(Exception):
    """Raised to roll a change back, because the caller's deadline has passed."""


class _Worker:
    """A thread that runs one work after the other, for `within`; starting a thread costs as much as a small commit."""

    idle: ClassVar[deque[_Worker]] = deque()

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="txnbridge-sql").start()

    def _run(self) -> None:
        while True:
            self.work.get()()


os.register_at_fork(after_in_child=_Worker.idle.clear)  # their threads exist in the parent only


def within(deadline: Deadline, work: Callable[[], T]) -> T:
    """Run `work` on another thread and return its result, because a driver may wait for a dead server without end.

    Raise `TimeoutError` of concurrent.futures at the deadline.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            _Worker.idle.append(worker)
            future.set_exception(error)
        else:
            _Worker.idle.append(worker)
            future.set_result(result)

    try:
        worker = _Worker.idle.pop()
    except IndexError:
        worker = _Worker()
    # The program's listeners of a session find the context variables of the caller.
    worker.work.put(partial(contextvars.copy_context().run, run))
    while not future.done() and not deadline.expired:
        wait([future], min(deadline.left(), _TURN_SECONDS))
    return future.result(0)


def _make_engine(url: str, what: str) -> sa.Engine:
    try:
        return sa.create_engine(url, pool_pre_ping=True, hide_parameters=True)
    except (ModuleNotFoundError, exc.NoSuchModuleError) as error:
        raise BackendMissing(f"the database of {what} needs a driver: {error}") from error
    except exc.ArgumentError:
        raise InvalidOption(f"{what} needs the URL of a database, such as sqlite:////path/to/file") from None


def make_tables(connection: sa.Connection, tables: Sequence[sa.Table], what: str) -> None:
    """Create missing tables with their indexes. If the user may not create tables, the error tells the statements."""
    statements: list[sa.DDLElement] = [CreateTable(table, if_not_exists=True) for table in tables]
    statements += [CreateIndex(index, if_not_exists=True) for table in tables for index in table.indexes]
    try:
        for statement in statements:
            connection.execute(statement)
    except exc.DBAPIError as error:
        if _state_of(error) != _PERMISSION_DENIED:
            raise
        told = ";".join(str(each.compile(dialect=connection.dialect)).rstrip() for each in statements)
        raise AccessDenied(
            f"{what} needs tables that this user may not make. Make them, and grant select, insert, update and"
            f" delete on them:{told}"
        ) from own(error)


def insert_missing(connection: sa.Connection, table: sa.Table, **row: object) -> None:
    """Insert a row, unless its primary key, one column, is there already."""
    (key,) = table.primary_key.columns
    if connection.scalar(sa.select(key).where(key == row[key.name])) is None:
        try:
            with connection.begin_nested():
                connection.execute(sa.insert(table).values(**row))
        except exc.IntegrityError:
            pass  # another process has inserted the row


def database_id(connection: sa.Connection) -> str:
    """Return the id of this database, which the database stores and its first user makes."""
    insert_missing(connection, place, number=1, cluster=str(uuid.uuid4()))
    return str(connection.scalar(sa.select(place.c.cluster).where(place.c.number == 1)))


def begin_explicitly(connection: sa.Connection) -> None:
    """Begin SQLite's transaction now, inside the begun transaction of SQLAlchemy.

    Python's sqlite3 begins a transaction only at the first change, and a savepoint before that would commit.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")


@contextmanager
def lock_timeout(connection: sa.Connection, seconds: float) -> Iterator[None]:
    """Let the block's statements, the first of a transaction, wait for locks only so long; see `is_locked`."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{int(seconds * 1000)}ms'")
        yield
        return
    before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")


def is_locked(error: exc.OperationalError) -> bool:
    """Return whether a statement failed because another transaction had a lock for too long."""
    return _state_of(error) == _LOCK_NOT_AVAILABLE or str(error.orig) == "database is locked"


def require_rollback(connection: sa.Connection, what: str, table: sa.Table, **trial: object) -> None:
    """Raise `InvalidOption` if the engine commits each statement (isolation level AUTOCOMMIT).

    `trial` is a row for `table` with a random value, so that it can be told from all other rows.
    """
    connection.execute(table.insert().values(**trial))
    connection.rollback()
    left = sa.and_(*(table.c[name] == value for name, value in trial.items()))
    if connection.scalar(sa.select(sa.func.count()).select_from(table).where(left)):
        connection.execute(table.delete().where(left))
        connection.commit()
        raise InvalidOption(f"db= commits each statement by itself (AUTOCOMMIT): {what} needs transactions")


def require_durable(connection: sa.Connection, what: str) -> None:
    """Raise an error for a database that confirms commits before they are durable, and for a read-only replica."""
    if connection.dialect.name == "sqlite":
        if int(connection.exec_driver_sql("PRAGMA synchronous").scalar() or 0) < 2:
            raise InvalidOption(f"{what} needs SQLite with PRAGMA synchronous=FULL")
    elif connection.dialect.name == "postgresql":
        if connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off":
            raise InvalidOption(f"{what} needs PostgreSQL with synchronous_commit at least local, not off")
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar():
            raise InvalidOption(f"{what} needs PostgreSQL's primary: this server is a replica")


def own(error: exc.SQLAlchemyError) -> BaseException:
    """Return the driver's own error, because the text of SQLAlchemy's error contains the statement's values."""
    return getattr(error, "orig", None) or error


def refuses_commit(error: exc.DBAPIError) -> bool:
    """Return whether a failed commit certainly did not happen, because of what was written.

    A constraint is violated that the database checks only at the commit, or a trigger has raised an error then.
    """
    return isinstance(error, exc.IntegrityError) or (isinstance(error, exc.ProgrammingError) and bool(_state_of(error)))


def _state_of(error: exc.DBAPIError) -> str:
    """Return the SQLSTATE of an error, or an empty text."""
    return str(getattr(error.orig, "sqlstate", "") or "")


def in_our_words(error: exc.SQLAlchemyError, what: str) -> TxnBridgeError:
    """Return the error of txnbridge that says the same as a database's; `what` names the work that failed."""
    text = f"{what}: {own(error)}".strip()
    if isinstance(error, exc.DBAPIError):
        if _state_of(error) == _PERMISSION_DENIED:
            return AccessDenied(text)
        # Two processes may create a table or row at the same time: the retry of the second one finds it.
        if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.IntegrityError):
            return BrokerUnavailable(text)
    if isinstance(error, exc.TimeoutError):
        return BrokerUnavailable(text)
    return StorageFailed(text)
