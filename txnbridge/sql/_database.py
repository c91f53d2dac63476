"""`Database`: runs database transactions with deadlines, and raises txnbridge's errors for the database's."""

from __future__ import annotations

import contextvars
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateIndex, CreateTable

from txnbridge import errors
from txnbridge._base.deadline import Wake
from txnbridge.spi import Deadline

_log = logging.getLogger("txnbridge")

ENDED_BY_STATEMENT = (
    "a statement has ended the database transaction: a ROLLBACK or COMMIT as text, ON CONFLICT ROLLBACK, a trigger, or"
    " a statement that commits by itself"
)
# The savepoint at the begin of a transaction whose statements are a program's.
_GUARD = "txnbridge_guard"
# The pause before a retry after a temporary error: another process holds a lock, or the database is starting.
RETRY_SECONDS = 0.05
# The interval at which a thread that waits for the database checks whether its deadline was shortened.
_TURN_SECONDS = 0.1
# The seconds for which the end of a failed transaction, or an interrupted thread, waits for the database.
_CLOSE_SECONDS = 5.0
_PERMISSION_DENIED = "42501"  # the SQLSTATE of a missing privilege
# MariaDB's numbers of the same: its SQLSTATE is that of a syntax error.
_DENIED_NUMBERS = (1044, 1142, 1143, 1227)
_LOCK_NOT_AVAILABLE = "55P03"  # the SQLSTATE of a statement that has waited for a lock longer than `lock_timeout`
_EXISTS = ("42P07", "42710")  # the SQLSTATEs of a table, and of a table's type, that exists already
_NO_SAVEPOINT = "3B001"  # the SQLSTATE of a savepoint that does not exist
# Classes of SQLSTATEs by which a database fails, whatever the message: a lost connection, a transaction that cannot go
# on, a deadlock, missing resources, a lock, an administrator, the disk.
_FAILURE_CLASSES = ("08", "25", "40", "53", "55", "57", "58")
_FAILURES = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
# Codes of a statement that is wrong itself: SQLite's, and MariaDB's, which some drivers tell without an SQLSTATE.
# MariaDB's: a wrong date, division by 0, a wrong value or character, SIGNAL, out of range, CHECK.
_REFUSALS = (1, 1292, 1365, 1366, 1367, 1411, 1644, 1690, 4025)

T = TypeVar("T")
# A table, a column of it for texts, and values for the others, for a row that is rolled back.
Trial = tuple[sa.Table, str, Mapping[str, object]]

# MariaDB's other collations take texts for equal that differ by case, accents or spaces at the end (hazard H120).
EXACT_TEXT: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_nopad_bin"))
}

place = sa.Table(
    "txnbridge_place",
    sa.MetaData(),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # always 1
    sa.Column("cluster", sa.String(36), nullable=False),
    **EXACT_TEXT,
)


class Database:
    """A database by SQLAlchemy's URL, or by an `Engine`, which the caller closes. `what` names its use in error texts.

    Raise `InvalidOption` for a database that does not outlive this process, and for an asynchronous driver unless all
    calls are made `in_greenlet`; `BackendMissing` if the driver is not installed.
    """

    def __init__(self, database: str | sa.Engine, what: str, *, in_greenlet: bool = False) -> None:
        self._owned = isinstance(database, str)
        self._what = what
        self._process = os.getpid()
        engine = _make_engine(database, what) if isinstance(database, str) else database
        self.engine: sa.Engine = engine
        if not isinstance(engine, sa.Engine) or (engine.dialect.is_async and not in_greenlet):
            raise errors.InvalidOption(
                f"{what} works on a thread of its own: give it the URL or an `Engine` of a synchronous driver, such as"
                " postgresql+psycopg:// or sqlite://, not of an asynchronous one"
            )
        in_memory = engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:")
        if isinstance(engine.pool, StaticPool) or (self._owned and in_memory):
            raise errors.InvalidOption(_not_outliving(what))
        if self._owned and engine.dialect.name == "sqlite":
            _close_parents(engine)

    def __repr__(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close the connections to the database, unless the caller has given the engine."""
        if self._owned:
            self.engine.dispose()

    def open(self, tables: Sequence[sa.Table], trials: Sequence[Trial], deadline: Deadline) -> None:
        """Create missing tables. Raise an error for a database that loses commits, or is refused by a trial."""

        def create(connection: sa.Connection) -> None:
            _require_durable(connection, self._what, deadline)
            _make_tables(connection, tables, self._what)

        self.ask(f"opening {self._what}", create, deadline)
        for table, name, row in trials:  # only a trial needs SQLite's write lock
            check = partial(_require_suitable, what=self._what, table=table, name=name, row=row)
            self.ask(f"opening {self._what}", check, deadline)

    def ask(self, what: str, question: Callable[[sa.Connection], T], deadline: Deadline, *, once: bool = False) -> T:
        """Run `question` in a database transaction, and repeat it after temporary errors until the deadline.

        Unless it may be committed only `once`, repeat it also if it may be committed. `what` names it for error texts.
        """
        while True:
            try:
                return self.change(what, question, deadline)
            except errors.OutcomeUnknown as error:
                if once:
                    raise
                if deadline.left() <= RETRY_SECONDS:
                    raise errors.DeadlineExceeded(str(error)) from error.__cause__
            except errors.BrokerUnavailable as error:
                if type(error) is not errors.BrokerUnavailable or deadline.left() <= RETRY_SECONDS:
                    raise
            time.sleep(RETRY_SECONDS)

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
        Raise the errors of `work`.
        """
        try:
            return work() if self.engine.dialect.is_async else within(deadline, work, commit.give_up)
        except errors.TxnBridgeError:  # some are an OSError, too
            raise
        except FutureTimeout:
            if commit.give_up():
                raise errors.OutcomeUnknown(f"{what}: the database did not answer in {deadline.seconds:g} s") from None
            raise errors.DeadlineExceeded(f"{what}: the database did not answer in {deadline.seconds:g} s") from None
        except (exc.SQLAlchemyError, OSError) as error:  # asyncpg raises the socket's own errors
            if commit.asked:
                raise errors.OutcomeUnknown(f"{what}: the answer was lost") from own(error)
            raise in_our_words(error, what) from own(error)

    def roll_back(self, transaction: str, leave: Callable[[Commit], None]) -> None:
        """Call `leave`, which rolls a transaction back, on another thread; wait for it for a short time."""
        if os.getpid() != self._process:  # a fork: this, and garbage collection, would roll the parent's work back
            _of_parents.append(leave)
            return
        commit = Commit()
        try:
            self.run(f"a rollback in {self._what}", lambda: leave(commit), Deadline(_CLOSE_SECONDS), commit)
        except errors.TxnBridgeError as error:
            _log.debug("transaction %s: %s", transaction, error)
            if not commit.given_up:  # there was no thread: close the connection, which asks the database nothing
                commit.give_up()
                leave(commit)


class Commit:
    """One commit by a worker thread. The caller that waits for it can prevent it until the database is asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: bool = False
        self.given_up: bool = False

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


class DatabaseThread:
    """A thread that runs functions, one after the other, for `within`: a new thread costs as much as a small commit."""

    idle: ClassVar[deque[DatabaseThread]] = deque()

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        try:
            threading.Thread(target=self._run, daemon=True, name="txnbridge-sql").start()
        except RuntimeError as error:
            raise errors.BrokerUnavailable(f"this machine starts no thread for the database now: {error}") from error

    def _run(self) -> None:
        while True:
            self.work.get()()


_engines: WeakSet[sa.Engine] = WeakSet()  # those for SQLite that this module has made
_engines_of_parents: list[sa.Engine] = []


def _close_parents(engine: sa.Engine) -> None:
    """Close connections of the parent process, beside which SQLite gives a child no locks of its own on the file."""
    for parents in [each for each in _engines_of_parents if each.url.database == engine.url.database]:
        if getattr(parents.pool, "checkedout", int)():
            text = "this process was forked during a call on an SQLite file, so SQLite cannot open the file here: fork"
            raise errors.InvalidState(text + " while no bridge uses the file, or spawn the process")
        parents.dispose()
    _engines.add(engine)


os.register_at_fork(after_in_child=lambda: _engines_of_parents.extend(_engines))
_of_parents: list[object] = []  # what refers to transactions of the parent process
os.register_at_fork(after_in_child=DatabaseThread.idle.clear)  # their threads exist in the parent only


def within(deadline: Deadline, work: Callable[[], T], give_up: Callable[[], object] = lambda: None) -> T:
    """Run `work` on another thread and return its result, because a driver may wait for a dead server without end.

    Raise `TimeoutError` of concurrent.futures at the deadline. A signal handler's exception calls `give_up`, and then
    waits for the end of `work` for a short time, because the program may go on with a session that `work` uses.
    """
    ended: list[Future[T]] = []
    wake = Wake()  # unlike a `Future`, it may be interrupted anywhere

    def run() -> None:
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        DatabaseThread.idle.append(worker)
        ended.append(future)
        wake.wake()

    def wait(until: Deadline) -> None:
        while not ended and not until.expired:
            wake.wait(min(until.left(), _TURN_SECONDS))

    try:
        worker = DatabaseThread.idle.pop()
    except IndexError:
        worker = DatabaseThread()
    try:
        # The program's listeners of a session find the context variables of the caller.
        worker.work.put(partial(contextvars.copy_context().run, run))
        wait(deadline)
    except BaseException:
        give_up()
        wait(Deadline(min(deadline.left(), _CLOSE_SECONDS)))
        raise
    if not ended:
        raise FutureTimeout
    return ended.pop().result()


def _not_outliving(what: str) -> str:
    return f"{what} needs a database that outlives this process: name one in the URL"


def _make_engine(url: str, what: str) -> sa.Engine:
    try:
        return sa.create_engine(url, pool_pre_ping=True, hide_parameters=True)
    except (ModuleNotFoundError, exc.NoSuchModuleError) as error:
        raise errors.BackendMissing(f"the database of {what} needs a driver: {error}") from error
    except exc.ArgumentError:
        raise errors.InvalidOption(f"{what} needs the URL of a database, such as sqlite:////path/to/file") from None


def _make_tables(connection: sa.Connection, tables: Sequence[sa.Table], what: str) -> None:
    """Create missing tables with their indexes. If the user may not create tables, the error tells the statements."""
    known = sa.inspect(connection)
    missing = [table for table in tables if not known.has_table(table.name, table.schema)]
    statements: list[sa.DDLElement] = [CreateTable(table, if_not_exists=True) for table in missing]
    statements += [CreateIndex(index, if_not_exists=True) for table in missing for index in table.indexes]
    try:
        for statement in statements:
            connection.execute(statement)
    except exc.DBAPIError as error:
        if not _is_denied(error):
            raise
        told = ";".join(str(each.compile(dialect=connection.dialect)).rstrip() for each in statements)
        text = f"{what} needs tables that this user may not make. Make them, and grant select, insert, update and"
        raise errors.AccessDenied(text + f" delete on them:{told}") from own(error)


def insert_missing(connection: sa.Connection, table: sa.Table, **row: object) -> None:
    """Insert a row, unless its primary key, one column, is there already.

    Raise `IntegrityError` if another process inserts it meanwhile: a transaction may not see that row, so `ask` begins
    a new one (hazard H121).
    """
    (key,) = table.primary_key.columns
    if connection.scalar(sa.select(key).where(key == row[key.name])) is None:
        connection.execute(sa.insert(table).values(**row))


def database_id(connection: sa.Connection) -> str:
    """Return the id of this database, which the database stores and its first user makes."""
    insert_missing(connection, place, number=1, cluster=str(uuid.uuid4()))
    return str(connection.scalar(sa.select(place.c.cluster).where(place.c.number == 1)))


def begin_guarded(connection: sa.Connection) -> None:
    """Begin the transaction now, with a savepoint by which `require_not_ended` recognises it later.

    Python's sqlite3 begins a transaction only at the first change, and a savepoint before that would commit.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")
    connection.exec_driver_sql(f"SAVEPOINT {_GUARD}")


def require_not_ended(connection: sa.Connection) -> None:
    """Raise `InvalidState` if the connection's transaction has ended without SQLAlchemy.

    A statement may roll back or commit (ROLLBACK as text, SQLite's ON CONFLICT ROLLBACK, a table's definition on
    MariaDB), and a driver then begins another transaction by itself. A savepoint ends with its transaction (hazard
    H122).
    """
    try:
        connection.exec_driver_sql(f"RELEASE SAVEPOINT {_GUARD}")
    except exc.DBAPIError as error:
        if state_of(error) == _NO_SAVEPOINT or _number_of(error) == 1305 or "no such savepoint" in str(error.orig):
            raise errors.InvalidState(ENDED_BY_STATEMENT) from own(error)
        raise


@contextmanager
def lock_timeout(connection: sa.Connection, seconds: float) -> Iterator[None]:
    """Let the block's statements wait at most `seconds` for a lock; the block must begin the transaction."""
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
    return state_of(error) == _LOCK_NOT_AVAILABLE or str(error.orig) == "database is locked"


def commits_each_statement(connection: sa.Connection) -> bool:
    """Return whether the driver has no transaction open and begins none (isolation level AUTOCOMMIT)."""
    pooled: Any = connection.connection
    with suppress(NotImplementedError):
        if connection.dialect.detect_autocommit_setting(pooled.dbapi_connection):
            return not is_in_transaction(connection)
    return False


def is_in_transaction(connection: sa.Connection) -> bool:
    """Return whether the driver says that it has a transaction open; False if it cannot say."""
    driver: Any = connection.connection.driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", 0)  # psycopg's; 0 is idle
    return bool(status or getattr(driver, "in_transaction", False))


def _require_suitable(
    connection: sa.Connection, what: str, table: sa.Table, name: str, row: Mapping[str, object]
) -> None:
    """Raise `InvalidOption` if the engine commits each statement (AUTOCOMMIT), or takes different names for equal.

    The trial is a row for `table`, with a random text in the column `name`, that is rolled back.
    """
    column, trial = table.c[name], f"{uuid.uuid4().hex}-a"
    connection.execute(table.insert().values({name: trial, **row}))
    confused = connection.scalar(sa.select(column).where(column.in_([trial.replace("-a", "-A"), f"{trial} "])))
    connection.rollback()
    if connection.scalar(sa.select(column).where(column == trial)) is not None:
        connection.execute(table.delete().where(column == trial))
        connection.commit()
        raise errors.InvalidOption(
            f"{what} needs transactions: this engine commits each statement by itself (AUTOCOMMIT)"
        )
    if confused is not None:
        raise errors.InvalidOption(
            f"{what} needs texts that are compared exactly, but to the table {table.name} 'a' is the same as 'A' or"
            f" 'a '. On MariaDB: ALTER TABLE {table.name} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
        )


def _require_durable(connection: sa.Connection, what: str, deadline: Deadline) -> None:
    """Raise an error for a database or driver that is not supported, forgets commits, or is a read-only replica."""
    dialect: Any = connection.dialect
    if dialect.name == "sqlite":
        if not connection.exec_driver_sql("PRAGMA database_list").all()[0][2]:  # the file of "main"
            raise errors.InvalidOption(_not_outliving(what))
        careless = connection.exec_driver_sql("PRAGMA read_uncommitted").scalar()  # by a cache that others share
        if careless or int(connection.exec_driver_sql("PRAGMA synchronous").scalar() or 0) < 2:
            raise errors.InvalidOption(f"{what} needs SQLite with PRAGMA synchronous=FULL, not READ UNCOMMITTED")
        try:
            if isinstance(driver := connection.connection.driver_connection, sqlite3.Connection):
                within(deadline, driver.cursor)
        except sqlite3.ProgrammingError:
            raise errors.InvalidOption(f"{what} needs connections for all threads: check_same_thread=False") from None
    elif dialect.name == "postgresql":
        if connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off":
            raise errors.InvalidOption(f"{what} needs PostgreSQL with synchronous_commit at least local, not off")
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar():
            raise errors.InvalidOption(f"{what} needs PostgreSQL's primary: this server is a replica")
    elif getattr(dialect, "is_mariadb", False):
        _require_durable_mariadb(connection, what)
    else:
        raise errors.NotSupported(f"{what} takes PostgreSQL, MariaDB and SQLite, not {dialect.name}")


def _require_durable_mariadb(connection: sa.Connection, what: str) -> None:
    settings = {str(name): str(value) for name, value in connection.exec_driver_sql("SHOW VARIABLES")}
    for wrong, needed in (
        (settings.get("innodb_flush_log_at_trx_commit") not in ("1", "3"), "innodb_flush_log_at_trx_commit=1"),
        # Without that a crash may lose the end of the binary log, and then InnoDB rolls its transactions back.
        (settings["log_bin"] == "ON" and settings["sync_binlog"] != "1", "sync_binlog=1, because it has a binary log"),
        ("STRICT" not in settings["sql_mode"], "a strict sql_mode, such as STRICT_TRANS_TABLES"),
        (settings.get("tx_isolation") == "READ-UNCOMMITTED", "tx_isolation=READ-COMMITTED, or a higher one"),
        (settings["read_only"] == "ON", "read_only=OFF: this server is a replica"),
        # A commit on one node is not seen on the others at once.
        (settings.get("wsrep_on") == "ON", "wsrep_on=OFF: a cluster of Galera is not supported"),
    ):
        if wrong:
            raise errors.InvalidOption(f"{what} needs MariaDB with {needed}")


def own(error: Exception) -> BaseException:
    """Return the driver's own error, because the text of SQLAlchemy's error contains the statement's values."""
    return getattr(error, "orig", None) or error


def is_failure(error: BaseException) -> bool:
    """Return whether an error says that the database itself fails, not that it refuses what was written."""
    state = state_of(error)
    if state and state != "HY000":  # MariaDB's for all other errors
        return state.startswith(_FAILURE_CLASSES)
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None) or _number_of(error)
    return isinstance(error, _FAILURES) and code not in _REFUSALS


def refuses_commit(error: exc.DBAPIError) -> bool:
    """Return whether a failed commit certainly did not happen, because of what was written.

    This happens if a constraint that the database checks only at the commit is violated, or if a trigger fails at
    the commit. PostgreSQL returns these errors before it commits.
    """
    if isinstance(error, exc.IntegrityError):
        return True
    severity = getattr(getattr(error.orig, "diag", None), "severity_nonlocalized", None)
    answered = bool(state_of(error)) and severity in (None, "ERROR") and not error.connection_invalidated
    return answered and _number_of(error) is None and not is_failure(error)


def state_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error, or an empty text."""
    driver = getattr(error, "orig", None)
    return str(getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None) or "")


def _number_of(error: BaseException) -> int | None:
    """Return MariaDB's number of an error, or None."""
    arguments = getattr(getattr(error, "orig", None), "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def _is_denied(error: exc.DBAPIError) -> bool:
    return state_of(error) == _PERMISSION_DENIED or _number_of(error) in _DENIED_NUMBERS


def in_our_words(error: Exception, what: str) -> errors.TxnBridgeError:
    """Return txnbridge's error for an error of a database; `what` names the work that failed."""
    text = f"{what}: {own(error)}".strip()
    if isinstance(error, exc.DBAPIError) and _is_denied(error):
        return errors.AccessDenied(text)
    # Two processes may create a table or row at the same time: the retry of the second one finds it.
    if state_of(error) in _EXISTS or isinstance(error, (*_FAILURES, exc.IntegrityError, OSError)):
        return errors.BrokerUnavailable(text)
    return errors.StorageFailed(text)
