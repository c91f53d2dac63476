"""`bridge.transaction(db=…)`: a database transaction and its messages, both or neither, on brokers with half messages.

The messages are stored at the broker as half messages. Then the row COMMIT, under the transaction's id, is the last
statement of the database transaction, so the row is there if and only if the database has committed. A resolver that is
asked about the transaction of a dead process first inserts the row ABORT under the same key. One of the two rows is
first, and its content decides for ever: after ABORT the late commit of a paused process fails, and after COMMIT the
messages are published (hazard H90).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import exc, orm

from txnbridge import errors
from txnbridge._base.connection import Connection, random_name
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.messages import Message
from txnbridge._base.token import Decision, Outcome
from txnbridge._half.common import RefusedHalf, check_group, half_store
from txnbridge._half.half_messages import END_SECONDS, HalfTransaction
from txnbridge._half.resolver import Resolver
from txnbridge.spi import Half
from txnbridge.sql._database import (
    RETRY_SECONDS,
    Commit,
    Database,
    begin_guarded,
    database_id,
    is_locked,
    lock_timeout,
    place,
    require_not_ended,
)

_log = logging.getLogger("txnbridge")

SessionOrEngine: TypeAlias = "sa.Engine | orm.Session | orm.sessionmaker[Any] | orm.scoped_session[Any]"

_WHAT = "the database of db="
_LONGEST_NAME = 255
# A transaction's id contains its group, the database, the process, the bridge and a number.
_LONGEST_GROUP = 180
# The time for which a resolver waits for a row that another database transaction has locked, and for each answer.
_LOCK_SECONDS, LOOK_SECONDS = 1.0, 5.0
# An ABORT row stays a day longer than its transaction's deadline, after which the database refuses a COMMIT row. A day
# is more than the clocks of two machines differ.
_ABORT_ROWS_MS = 86_400_000
_BEGUN = "db= takes a session that is in no transaction: commit it before, or pass a sessionmaker"
# The interval at which a resolver deletes old ABORT rows, and the number of rows that one statement deletes.
_SWEEP_SECONDS, _SWEEP_ROWS = 60.0, 500

# The time by the database's clock, in milliseconds since 1970, at the statement and not at the transaction's begin.
_CLOCKS = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}

_rows = sa.Table(
    "txnbridge_barrier",
    sa.MetaData(),
    sa.Column("group", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("transaction", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("decision", sa.String(6), nullable=False),
    # By the database's clock, in milliseconds since 1970: when the row was inserted, or a deadline later than that.
    sa.Column("ended_at", sa.BigInteger, nullable=False),
)
_r = _rows.c


class BarrierTable:
    """Reads and writes the barrier rows of one group: COMMIT or ABORT of a database transaction with messages.

    The group's half messages have the name of the group and the database's id, so that no resolver looks for their rows
    in another database, or asks a `check` about them.
    """

    def __init__(self, database: Database, place: str, group: str) -> None:
        if len(check_group(group)) > _LONGEST_GROUP:
            raise errors.InvalidOption(f"the name of a group with db= takes at most {_LONGEST_GROUP} characters")
        self.database = database
        self.half_group: str = f"{group}-db-{place[:8]}"
        self._group = group
        self.clock: sa.ColumnClause[int] = sa.literal_column(_CLOCKS[database.engine.dialect.name], sa.BigInteger)

    @classmethod
    def open(cls, database: str | sa.Engine, group: str, deadline: Deadline) -> BarrierTable:
        """Open the barrier rows of a group, and create the table if it does not exist."""
        opened = Database(database, _WHAT)
        return cls(opened, open_place(opened, deadline, to_write=False), group)

    def commit_row(self, transaction: str, deadline_at: int) -> sa.Insert:
        """Return the statement that inserts a COMMIT row, if it is not too late by the database's clock."""
        return self._insert(transaction, Decision.COMMIT, self.clock, self.clock < deadline_at)

    def insert_abort(self, transaction: str, deadline_at: int, deadline: Deadline) -> bool:
        """Insert an ABORT row; return False if there is another row, or a database transaction is inserting one."""
        ended_at = sa.case((self.clock > deadline_at, self.clock), else_=sa.literal(deadline_at, sa.BigInteger))
        row = self._insert(transaction, Decision.ABORT, ended_at)

        def insert(connection: sa.Connection) -> bool:
            with lock_timeout(connection, _LOCK_SECONDS):
                try:
                    connection.execute(row)
                except (exc.IntegrityError, exc.OperationalError) as error:
                    if isinstance(error, exc.OperationalError) and not is_locked(error):
                        raise
                    connection.rollback()
                    return False
                return True

        return self.database.ask(f"writing into {_WHAT}", insert, deadline)

    def _insert(
        self, transaction: str, decision: Decision, ended_at: sa.ColumnElement[int], *where: sa.ColumnElement[bool]
    ) -> sa.Insert:
        texts = (sa.literal(text, sa.String) for text in (self._group, transaction, decision.value))
        return sa.insert(_rows).from_select(list(_r), sa.select(*texts, ended_at).where(*where))

    def check(self, transaction: str, _: Sequence[Message]) -> Decision:
        """Return the decision of a transaction's barrier row, as a resolver's `check` does."""
        return self.decision(transaction, Deadline(LOOK_SECONDS))

    def decision(self, transaction: str, deadline: Deadline) -> Decision:
        """Return the decision of a transaction's row, read in a new database transaction; UNDECIDED without a row."""
        wanted = sa.select(_r.decision).where(_r.group == self._group, _r.transaction == transaction)
        found = self.database.ask(f"reading {_WHAT}", lambda c: c.scalar(wanted), deadline)
        return Decision.UNDECIDED if found is None else Decision(found)

    def settle(self, transaction: str, deadline_at: int, deadline: Deadline) -> Decision:
        """Insert an ABORT row or find another one; return its decision, or UNDECIDED if the row is locked for long.

        A sender that has lost the answer to its commit inserts no COMMIT row any more, so it calls this before the
        deadline. ABORT proves nothing if a resolver has published all and deleted the COMMIT row: the broker then says
        so.
        """
        while True:
            if self.insert_abort(transaction, deadline_at, deadline):
                return Decision.ABORT
            decision = self.decision(transaction, deadline)
            if decision is not Decision.UNDECIDED or deadline.left() <= RETRY_SECONDS:
                return decision
            time.sleep(RETRY_SECONDS)

    def delete_commits(self, transactions: Sequence[str], deadline: Deadline) -> None:
        """Delete the COMMIT rows of transactions whose half messages are published."""
        self._delete(deadline, _r.decision == Decision.COMMIT.value, _r.transaction.in_(transactions))

    def delete_old_aborts(self, deadline: Deadline) -> None:
        """Delete ABORT rows that are so old that no process needs them any more."""
        self._delete(deadline, _r.decision == Decision.ABORT.value, _r.ended_at < self.clock - _ABORT_ROWS_MS)

    def _delete(self, deadline: Deadline, *where: sa.ColumnElement[bool]) -> None:
        deleted = sa.delete(_rows).where(_r.group == self._group, *where)

        def delete(connection: sa.Connection) -> None:
            with lock_timeout(connection, _LOCK_SECONDS):
                connection.execute(deleted)

        self.database.change(f"deleting rows in {_WHAT}", delete, deadline)


def open_place(database: Database, deadline: Deadline, *, to_write: bool) -> str:
    """Return the id of the database where tables are kept; create missing ones. Raise `InvalidOption` if unsuitable.

    Only `to_write` needs SQLite's write lock, which a resolver might wait for in vain.
    """
    name = database.engine.dialect.name
    if name not in _CLOCKS:
        raise errors.NotSupported(f"db= takes PostgreSQL and SQLite, not {name}")
    trial = _rows, "transaction", {"group": "", "decision": "abort", "ended_at": 0}
    database.open((place, _rows), [trial] if to_write else [], deadline)
    return database.ask(f"opening {_WHAT}", database_id, deadline)


class BarrierResolver(Resolver):
    """Decides the half messages of a barrier's group by its rows, and deletes rows that are not needed any more."""

    def __init__(self, connection: Connection, barrier: BarrierTable, **settings: Any) -> None:
        super().__init__(connection, barrier.half_group, barrier.check, **settings)
        self.barrier = barrier
        self._published: deque[str] = deque()  # transactions whose half messages are published, and whose rows stay
        self._sweeping = threading.Lock()
        self._sweep_at = 0.0  # when old ABORT rows are deleted next

    def forget(self, transaction: str) -> None:
        """Delete the row of a transaction whose half messages are published, soon and together with others."""
        self._published.append(transaction)
        if not self._runs:
            self._sweep()

    def _decide(self, half: Half) -> Decision:
        if time.time() * 1000 >= half.deadline_at and self.barrier.insert_abort(
            half.transaction, half.deadline_at, Deadline(LOOK_SECONDS)
        ):
            return Decision.ABORT
        return super()._decide(half)

    def _note_end(self, half: Half, outcome: Outcome) -> None:
        super()._note_end(half, outcome)
        if outcome is Outcome.COMMITTED:
            self.forget(half.transaction)

    def _due(self, limit: int) -> list[Half]:
        self._sweep()
        return super()._due(limit)

    def _loop(self) -> None:
        super()._loop()
        self._sweep()

    def _leave(self) -> None:
        super()._leave()
        self.barrier.database.close()

    def _sweep(self) -> None:
        try:
            with Deadline(0).holding(self._sweeping, "another thread deleted rows"):
                while published := list(self._published)[:_SWEEP_ROWS]:
                    self.barrier.delete_commits(published, Deadline(LOOK_SECONDS))
                    for _ in published:
                        self._published.popleft()
                if time.monotonic() >= self._sweep_at:
                    self._sweep_at = time.monotonic() + _SWEEP_SECONDS
                    self.barrier.delete_old_aborts(Deadline(LOOK_SECONDS))
        except errors.TxnBridgeError as error:
            _log.info("rows of group %r are deleted later: %s", self._group, error)


class Barriers:
    """Makes the transactions with `db=` of one bridge, and runs a resolver for each of their groups and databases."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._places: WeakKeyDictionary[sa.Engine, str] = WeakKeyDictionary()
        self._resolvers: dict[tuple[str, bool], BarrierResolver] = {}  # also by whether the engine is asynchronous
        self._name = random_name(8)
        self._numbers = count(1)
        self._new_transaction: Callable[..., BarrierTransaction] = BarrierTransaction
        self._new_resolver: Callable[..., BarrierResolver] = BarrierResolver

    def transaction(self, db: SessionOrEngine, group: str | None, timeout: float | None) -> BarrierTransaction:
        connection = self._connection
        timeout = connection.timeout if timeout is None else timeout
        check_seconds("timeout", timeout, above_0=True)
        store = half_store(connection)  # raises `NotSupported` before anything is done in the database
        engine, session, owned = _bound(db)
        group = connection.identity.application if group is None else group
        with connection.call():
            barrier = self._open(engine, group, connection.deadline())
            resolver = self._resolver(barrier)
            store.ready(barrier.half_group, connection.deadline())
        id = f"half-{barrier.half_group}-{self._name}/{connection.name[-8:]}/{next(self._numbers)}"
        return self._new_transaction(connection, barrier, resolver, id, session, owned, timeout)

    def _open(self, engine: sa.Engine, group: str, deadline: Deadline) -> BarrierTable:
        database = Database(engine, _WHAT, in_greenlet=True)
        with self._lock:
            place = self._places.get(engine)
        if place is None:
            place = open_place(database, deadline, to_write=True)
            with self._lock:
                self._places[engine] = place
        return BarrierTable(database, place, group)

    def _resolver(self, barrier: BarrierTable) -> BarrierResolver:
        """Return the resolver that answers check-backs from this table; start it at its first use."""
        engine = barrier.database.engine
        key = barrier.half_group, engine.dialect.is_async
        with self._lock:
            resolver = self._resolvers.get(key)
            if resolver is None or (engine.dialect.is_async and resolver.barrier.database.engine is not engine):
                resolver = self._new_resolver(self._connection, barrier)
                if not engine.dialect.is_async:  # an `AsyncSession`'s engine works in no other thread or event loop
                    resolver.start()
                self._resolvers[key] = resolver
            return resolver


def _bound(db: SessionOrEngine) -> tuple[sa.Engine, orm.Session | None, bool]:
    """Return the engine of `db`, its session if it is one, and whether the session is made for one transaction."""
    if isinstance(db, sa.Engine):
        return db, None, True
    session = db() if isinstance(db, orm.sessionmaker | orm.scoped_session) else db
    if not isinstance(session, orm.Session):
        text = "db= is an Engine, a Session, a sessionmaker or an AsyncSession's `sync_session` of SQLAlchemy, not"
        raise errors.InvalidOption(text + f" {type(db).__name__}")
    if session.in_transaction():  # which may hold a lock for which opening the table would wait
        raise errors.InvalidState(_BEGUN)
    try:
        engine = session.get_bind()
    except exc.UnboundExecutionError:
        raise errors.InvalidOption("db= is a session of one database, by Session(engine)") from None
    if not isinstance(engine, sa.Engine) or session.twophase:
        raise errors.InvalidOption("db= is a session on an Engine, not on a Connection, and without twophase")
    return engine, session, isinstance(db, orm.sessionmaker)


class BarrierTransaction(HalfTransaction):
    """A transaction of a database and of messages, for a `with` block: both are committed, or neither.

    `db` is the session or connection, inside a transaction that the block's end commits. An exception in the block
    rolls both back; `raise Abort` does so without an exception outside the block. Savepoints are fine if they are
    closed before the end. A block that commits or rolls back `db` fails. Only one thread at a time may use the object.
    """

    def __init__(
        self,
        connection: Connection,
        barrier: BarrierTable,
        resolver: BarrierResolver,
        id: str,
        session: orm.Session | None,
        owned: bool,
        timeout: float,
    ) -> None:
        store, group = half_store(connection), barrier.half_group
        super().__init__(connection, store, group, id, lambda *_: Decision.UNDECIDED, None, timeout)
        self._barrier = barrier
        self._resolver = resolver
        self._session = session
        self._owned = owned
        self._db: orm.Session | sa.Connection | None = None
        self._sql: Any = None  # the connection of `_db`
        self._pooled: Any = None  # the driver's connection, as the pool has lent it
        self._root: Any = None  # the transaction of `_db` that the end of the block commits
        self._deadline_at = 0  # by the database's clock, in milliseconds since 1970
        self._lent = False  # whether the block has `_db`, in which a commit is refused
        self._settled = False  # whether the answer to the commit was lost, and the row was looked up
        self._error: errors.TxnBridgeError | None = None

    @property
    def db(self) -> Any:
        """The `Session` of this transaction, or with an `Engine` its `Connection`."""
        if self._db is None:
            raise errors.InvalidState(f"the database transaction of {self._id} is open only inside the block")
        return self._db

    def ack(self, *_: object) -> None:
        """Raise `NotSupported`: use a processor with `db=` to acknowledge messages and write to a database."""
        raise errors.NotSupported("a transaction with db= takes no acknowledgements; use bridge.processor(…, db=…)")

    ack_up_to = ack

    # --- begin ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> BarrierTransaction:
        super().__enter__()
        if self._db is not None:
            raise errors.InvalidState(f"the block of transaction {self._id} has begun already")
        if self._session is not None and self._session.in_transaction():
            raise errors.InvalidState(_BEGUN)
        database, commit = self._barrier.database, Commit()
        try:
            database.run(f"beginning a transaction in {_WHAT}", lambda: self._begin(commit), self._deadline, commit)
        except BaseException:
            self._open, self._outcome = False, Outcome.ABORTED
            self._roll_back(sound=False)
            raise
        self._lent = True
        return self

    def _begin(self, commit: Commit) -> None:
        """Begin the database transaction, unless the caller has given up meanwhile."""
        db: Any = self._session if self._session is not None else self._barrier.database.engine.connect()
        self._root = db.begin()
        try:
            self._sql = sql = db if self._session is None else db.connection()
            self._pooled = sql.connection
            begin_guarded(sql)
            now = int(sql.scalar(sa.select(self._barrier.clock)))
            self._deadline_at = now + int(self._deadline.left() * 1000)
            sa.event.listen(sql, "commit", self._refuse_commit)
            if self._session is not None:
                sa.event.listen(self._session, "after_begin", self._refuse_second)
            commit.ask()
        except BaseException:
            self._leave(db, commit, sound=False)
            raise
        self._db = db

    def _refuse_commit(self, _: sa.Connection) -> None:
        if self._lent:
            raise self._misused("the end of the block commits, together with the messages; the block must not")

    def _refuse_second(self, _: orm.Session, __: orm.SessionTransaction, connection: sa.Connection) -> None:
        if self._lent and self._db is not None and connection is not self._sql:
            raise self._misused("the session begins a second transaction before the block's end; use another session")

    def _misused(self, text: str) -> errors.InvalidState:
        self._error = errors.InvalidState(f"transaction {self._id} is rolled back: {text}")
        return self._error

    # --- end --------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return super().__exit__(kind, error, trace)
        finally:
            if self._db is not None:
                self._roll_back(sound=self._error is None and (error is None or isinstance(error, Exception)))

    def _finish(self) -> None:
        self._check_unended()
        if isinstance(self._db, orm.Session):
            self._db.flush()
            self._check_unended()
        half = self._stored()
        try:
            decision = self._commit_database()
            self._outcome = self._end(half, decision)
        except BaseException:
            self._outcome = Outcome.UNKNOWN  # a resolver decides by the row
            raise
        if self._outcome is Outcome.ABORTED and self._error is not None:
            raise self._error

    def _check_unended(self) -> None:
        """Raise `InvalidState` if the block has ended the database transaction, or left a savepoint open."""
        if self._error is not None:
            raise self._error
        if self.db.get_transaction() is not self._root or not self._root.is_active:
            raise self._misused("the block has ended its database transaction")
        if self._db.in_nested_transaction():  # type: ignore[union-attr]
            raise self._misused("the block has left a savepoint open")

    def _commit_database(self) -> Decision:
        """Insert the COMMIT row, and commit the database transaction; return the decision that then stands.

        The thread that does so also ends the use of the session or connection. If the program, after the deadline or an
        interrupt, closes its session before that, the COMMIT row may still come into the connection, so the pool gives
        this connection to no other transaction. Raise `OutcomeUnknown` if the answer was lost and the decision cannot
        be found now.
        """
        commit = Commit()
        row = self._barrier.commit_row(self._id, self._deadline_at)

        def work() -> bool:
            sound, db, self._db = False, self.db, None  # the end of the block rolls back what is not taken here
            try:
                require_not_ended(self._sql)
                with self._connection.events.step("database.barrier", self._id) as found:
                    found["inserted"] = inserted = self._insert(row)
                if inserted:
                    with self._connection.events.step("database.commit", self._id):
                        commit.ask()
                        self._lent = False
                        db.commit()
                sound = True
                return inserted
            finally:
                self._leave(db, commit, sound)

        try:
            if self._barrier.database.run(f"the commit of transaction {self._id}", work, self._deadline, commit):
                return Decision.COMMIT
            self._error = errors.TransactionTimedOut(
                f"transaction {self._id} was rolled back: its deadline had passed, and a resolver may have aborted it"
            )
        except Exception as error:
            decision = self._settle(error) if commit.asked else Decision.ABORT
            if decision is Decision.COMMIT:  # the answer was lost, or a hook of the session has failed
                _log.warning("transaction %s is committed, in spite of %s", self._id, _told(error))
                return decision
            kind = errors.InvalidState if isinstance(error, errors.InvalidState) else errors.TransactionAborted
            self._error = kind(f"transaction {self._id} was rolled back: {_told(error)}")
            self._error.__cause__ = error
        finally:
            if commit.given_up and self._pooled.is_valid:
                self._pooled.invalidate(soft=True)
        return Decision.ABORT

    def _insert(self, row: sa.Insert) -> bool:
        try:
            return bool(self._sql.execute(row, execution_options={"preserve_rowcount": True}).rowcount == 1)
        except exc.IntegrityError:
            return False  # a resolver has inserted ABORT

    def _settle(self, error: Exception) -> Decision:
        """Find the decision after the answer to the commit was lost. Raise `OutcomeUnknown` if that is not possible."""
        self._settled = True
        deadline = self._deadline if self._deadline.left() > END_SECONDS else Deadline(END_SECONDS)
        decision = Decision.UNDECIDED
        with suppress(errors.TxnBridgeError), self._connection.events.step("resolve", self._id) as found:
            decision = self._barrier.settle(self._id, self._deadline_at, deadline)
            found["decision"] = decision.value
        if decision is Decision.UNDECIDED:
            raise errors.OutcomeUnknown(
                f"the answer to the commit of transaction {self._id} was lost; a resolver of {self._group!r} ends the"
                f" transaction when the database answers ({_told(error)})"
            ) from error
        return decision

    def _end(self, half: Half | None, decision: Decision) -> Outcome:
        """Publish or drop the half messages, and return the outcome.

        If the broker does not answer, a resolver publishes or drops them later, by the barrier row.
        """
        wanted = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED
        try:
            outcome = super()._end(half, decision)
        except (errors.EvidenceLost, RefusedHalf):
            raise
        except errors.OutcomeUnknown as error:
            if self._settled and wanted is Outcome.ABORTED:  # the row may have been deleted after a COMMIT (hazard H92)
                raise
            _log.warning("%s", error)
            return wanted
        if outcome is not wanted and not (self._settled and wanted is Outcome.ABORTED):
            text = f"the database has {wanted.value} transaction {self._id}; its messages were ended by hand"
            raise errors.InvalidState(text)
        if outcome is Outcome.COMMITTED:
            self._resolver.forget(self._id)
        return outcome

    def _roll_back(self, sound: bool) -> None:
        """Roll the database transaction back, within a limited time. Unless `sound`, also close the connection."""
        db, self._db, self._lent = self._db, None, False
        if db is not None:
            self._barrier.database.roll_back(self._id, lambda commit: self._leave(db, commit, sound))

    def _leave(self, db: orm.Session | sa.Connection, commit: Commit, sound: bool) -> None:
        """End the use of the session or connection, which rolls back what is not committed.

        If the connection is not `sound`, close it, so that nothing is left that could commit. If the caller has given
        up, the session may be in another transaction by now.
        """
        with suppress(exc.SQLAlchemyError):
            if (commit.given_up or not sound) and self._sql is not None and not self._sql.closed:
                self._sql.invalidate()
        if isinstance(db, orm.Session) and sa.event.contains(db, "after_begin", self._refuse_second):
            sa.event.remove(db, "after_begin", self._refuse_second)
        with suppress(exc.SQLAlchemyError):
            (self._root if commit.given_up else db).rollback()
        if self._owned or db.get_transaction() is self._root:  # a hook has failed after the commit
            with suppress(exc.SQLAlchemyError):
                db.close()


def _told(error: Exception) -> str:
    """Return an error of txnbridge as its text, any other as its class, because its text may contain data."""
    return str(error) if isinstance(error, errors.TxnBridgeError) else type(error).__name__
