"""Transactions of a processor in an SQL database, with what its handler writes and the positions of its input.

A table has the position of the last processed message of each partition. Each database transaction of the processor
moves these positions by compare-and-set, so it commits only if no other member of the group has processed the same
messages. The broker's acknowledgements follow after the commit, those of several commits together. Messages that are
delivered again, because their acknowledgement was lost or has not been sent yet, are recognised by their positions and
not processed again. So a processor may die at any time, and a member that was replaced while it was paused changes
nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import exc

from txnbridge._base.connection import Connection, random_name
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Message, Position
from txnbridge._base.token import Outcome, State
from txnbridge._process.handler import causes
from txnbridge._process.pass_transaction import CommitRefused, PassTransaction
from txnbridge.errors import Conflict, Fenced, InvalidOption, InvalidState, TransactionAborted, TxnBridgeError
from txnbridge.spi import Partition
from txnbridge.sql._database import (
    ENDED_BY_STATEMENT,
    EXACT_TEXT,
    Commit,
    Database,
    begin_guarded,
    in_our_words,
    is_failure,
    is_in_transaction,
    own,
    refuses_commit,
    require_not_ended,
)
from txnbridge.sql.outbox import Outbox

_log = logging.getLogger("txnbridge")

_WHAT = "the processor's database"
_LONGEST_NAME = 255

_positions = sa.Table(
    "txnbridge_positions",
    sa.MetaData(),
    sa.Column("cluster", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("group", sa.String(_LONGEST_NAME), primary_key=True),
    sa.Column("topic", sa.String(249), primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("topic_id", sa.String(_LONGEST_NAME), nullable=False),  # empty if the broker has no ids of topics
    sa.Column("processed", sa.String(_LONGEST_NAME), nullable=False),  # the last processed position, as JSON
    **EXACT_TEXT,
)
_p = _positions.c


class _Stored(NamedTuple):
    """The stored position of a partition, with the id of the topic in which it was read."""

    topic_id: str
    processed: str

    @property
    def position(self) -> Position:
        return tuple(json.loads(self.processed))


class DatabaseTransactions:
    """The database transactions of one processor, and the positions up to which its input is processed.

    `begin_ack` begins a transaction of the broker, for acknowledgements. `outbox` takes the messages that
    are set aside: dead letters, and messages for a retry topic.
    """

    def __init__(
        self,
        connection: Connection,
        begin_ack: Callable[..., PassTransaction],
        topics: Sequence[str],
        group: str,
        database: str | sa.Engine,
        outbox: Outbox | None,
    ) -> None:
        if not isinstance(database, str | sa.Engine):
            raise InvalidOption(f"db= is an Engine of SQLAlchemy, or a database's URL, not {type(database).__name__}")
        if outbox is not None and not isinstance(outbox, Outbox):
            raise InvalidOption(f"outbox= is an Outbox, not {type(outbox).__name__}")
        if len(group) > _LONGEST_NAME:
            raise InvalidOption(f"the name of a group with db= takes at most {_LONGEST_NAME} characters")
        self._connection = connection
        self._begin_ack = begin_ack
        self._topics = topics
        self._group = group
        self.outbox = outbox
        self.database: Database = Database(database, _WHAT)
        self._mine = (_p.cluster == connection.broker.cluster) & (_p.group == group)
        # Making this statement anew for each batch would take longer than most databases do.
        same = (_p[name] == sa.bindparam(f"old_{name}") for name in ("topic", "partition", *_Stored._fields))
        self._move = _positions.update().where(self._mine, *same)
        self._topic_ids: dict[str, str] = {}
        self._assignments: dict[Any, str | None] = {}  # by assignment, the id of its topic, if known
        self._stored: dict[Partition, _Stored] = {}
        self._reads = True  # whether the stored positions are read before the next batch
        self._processed: list[Message] = []  # messages that are processed and not acknowledged yet
        self._acknowledge_at = 0.0  # when they are due, by `time.monotonic`
        self._acknowledging: PassTransaction | None = None

    def open(self) -> None:
        """Create missing tables, and look up the topics' ids. Raise `InvalidOption` for an unsuitable database."""
        deadline = self._connection.deadline()
        row = {"cluster": "", "topic": "", "partition": 0, "topic_id": "", "processed": ""}
        tables = [_positions, *(self.outbox.tables if self.outbox else ())]
        self.database.open(tables, [(_positions, "group", row)], deadline)
        self._topic_ids = self._present_ids(deadline)

    def close(self) -> None:
        self.database.close()

    # --- what is processed --------------------------------------------------------------------------------------------

    def without_processed(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that are not processed yet. The others, delivered once more, are only acknowledged."""
        if not messages:
            self.acknowledge(self._connection.timeout)
            return []
        deadline = self._connection.deadline()
        assigned = {message.source: message.topic for message in messages}
        # Within an assignment this member alone changes positions. If another one does, the next commit fails.
        if self._reads or not assigned.keys() <= self._assignments.keys():
            with self._connection.events.step("database.read"):
                self._stored = self.database.ask(f"reading positions in {_WHAT}", self._read, deadline)
            self._reads = False
        processed = {partition: stored.position for partition, stored in self._stored.items()}
        self._check_topics(assigned, deadline)
        again = [
            message
            for message in messages
            if (at := processed.get((message.topic, message.partition)))
            and message.position <= at
            and self._is_same_topic(message)
        ]
        if not again:
            return list(messages)
        known = {message[:3] for message in again}
        self._processed = [message for message in self._processed if message[:3] not in known]
        self.acknowledge_later(again, self._connection.timeout)
        return [message for message in messages if message[:3] not in known]

    def _read(self, connection: sa.Connection) -> dict[Partition, _Stored]:
        columns = _p.topic, _p.partition, _p.topic_id, _p.processed
        rows = connection.execute(sa.select(*columns).where(self._mine & _p.topic.in_(self._topics)))
        return {(topic, partition): _Stored(*stored) for topic, partition, *stored in rows}

    def _present_ids(self, deadline: Deadline) -> dict[str, str]:
        return self._connection.broker.admin.topic_ids(self._topics, deadline)

    def _check_topics(self, assigned: Mapping[Any, str], deadline: Deadline) -> None:
        """Raise `TransactionAborted` if a topic was created again since the last look, or since an assignment began.

        This batch may then be from the old topic, or from an assignment that reads on in the new topic at a
        position of the old one. `assigned` has the topics of the batch's assignments.
        """
        if not self._connection.broker.notices_renewed_topics_late and assigned.keys() <= self._assignments.keys():
            return  # the broker ends the assignment before it delivers anything of a new topic
        before, self._topic_ids = self._topic_ids, self._topic_ids | self._present_ids(deadline)
        now = {source: self._topic_ids.get(topic) for source, topic in assigned.items()}
        changed = {topic for topic, id in before.items() if self._topic_ids[topic] != id}
        changed |= {assigned[source] for source, id in now.items() if (self._assignments.get(source) or id) != id}
        if changed:
            raise TransactionAborted(f"{', '.join(sorted(changed))} was deleted and recreated: another poll is needed")
        self._assignments = {source: id for source, id in self._assignments.items() if not source.ended} | now

    def _is_same_topic(self, message: Message) -> bool:
        """Return whether the stored position of a message's partition belongs to the present topic of this name."""
        stored, present = self._stored[message.topic, message.partition].topic_id, self._topic_ids.get(message.topic)
        return not stored or not present or stored == present

    def store(self, connection: sa.Connection, ends: Mapping[Partition, Position]) -> dict[Partition, _Stored]:
        """Store `ends`, the positions of the last processed messages; return them as they are stored.

        Raise `Conflict` if another member of the group has changed one of them.
        """
        stored = {
            partition: _Stored(self._topic_ids.get(partition[0], ""), json.dumps(end, separators=(",", ":")))
            for partition, end in ends.items()
        }
        for partition in sorted(stored):  # in one order everywhere, so that two members do not wait for each other
            if not self._replace(connection, partition, self._stored.get(partition), stored[partition]):
                topic, number = partition
                raise Conflict(f"{topic}[{number}] was processed by another member of group {self._group!r} meanwhile")
        return stored

    def _replace(self, connection: sa.Connection, partition: Partition, old: _Stored | None, new: _Stored) -> bool:
        place: dict[str, Any] = {"topic": partition[0], "partition": partition[1]}
        if old is None:
            row = {"cluster": self._connection.broker.cluster, "group": self._group, **place, **new._asdict()}
            try:
                connection.execute(_positions.insert(), row)
            except exc.IntegrityError:
                return False
            return True
        before = {f"old_{name}": value for name, value in (place | old._asdict()).items()}
        return connection.execute(self._move, before | new._asdict()).rowcount == 1

    # --- transactions -------------------------------------------------------------------------------------------------

    def lend(self, handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
        """Return a handler for a `DatabaseTransaction`, which calls `handler` with the transaction's connection."""

        def call(given: Any, txn: DatabaseTransaction) -> object:
            try:
                result = handler(given, txn.connection)
            except Exception as error:
                txn.note(error)
                raise
            txn.require_not_ended()
            return result

        return call

    def begin(self, timeout: float) -> DatabaseTransaction:
        deadline, commit = Deadline(timeout), Commit()

        def connect() -> sa.Connection:
            with ExitStack() as unused:
                connection = unused.enter_context(self.database.engine.connect())
                connection.begin()
                begin_guarded(connection)
                if not commit.given_up:
                    unused.pop_all()
                return connection

        connection = self.database.run(f"beginning a transaction in {_WHAT}", connect, deadline, commit)
        return DatabaseTransaction(self, connection, deadline)

    def commit(self, txn: DatabaseTransaction, commit: Commit, ends: Mapping[Partition, Position]) -> None:
        """Store the positions `ends` and commit. The thread that does so then closes the connection."""

        def work() -> dict[Partition, _Stored]:
            try:
                require_not_ended(txn.connection)
                stored = self.store(txn.connection, ends)
                try:
                    commit.run(txn.connection)
                except exc.DBAPIError as error:
                    if refuses_commit(error):
                        raise CommitRefused(error) from error
                    raise
                return stored
            finally:
                if commit.given_up:
                    txn.connection.invalidate()
                txn.connection.close()

        with self._connection.events.step("database.commit", txn.id, partitions=len(ends)):
            self._stored |= self.database.run(f"a commit in {_WHAT}", work, txn.time_limit, commit)

    # --- acknowledgements ---------------------------------------------------------------------------------------------

    def acknowledge_later(self, messages: Sequence[Message], timeout: float) -> None:
        """Note processed messages; if it is time, acknowledge all messages noted so far at the broker."""
        self._processed += messages
        if time.monotonic() >= self._acknowledge_at:
            self.acknowledge(timeout)

    def acknowledge(self, timeout: float) -> None:
        """Acknowledge processed messages at the broker. If that fails, a later call does, also if they come again."""
        # Messages of an assignment that has ended come to another member, which knows them by their positions.
        self._processed = here = [m for m in self._processed if not m.source.ended and m.position in m.source.out]
        if not here:
            return
        try:
            with self._begin_ack(timeout=timeout) as txn:
                self._acknowledging, self._processed = txn, []
                txn.ack(here)
        except Fenced:
            raise
        except TxnBridgeError as error:
            if isinstance(error, Conflict) and any(message.source.ended for message in here):
                self._processed = here
                self.acknowledge(timeout)  # without those of the assignment that has just ended
            else:
                _log.info("group %r acknowledges what it has processed with a later batch: %s", self._group, error)
        finally:
            self._acknowledging = None
            self._acknowledge_at = time.monotonic() + self._connection.timing.database_acks

    def take_back(self, timeout: float) -> None:
        """Acknowledge the processed messages, before all others are redelivered; forget the positions read."""
        self._reads = True  # a failed commit may have changed them, or failed because another member did
        self.acknowledge(timeout)

    def end_by(self, at: float) -> None:
        """Move the deadline of a running acknowledgement to `at`. Another thread may call this."""
        if (txn := self._acknowledging) is not None:
            txn._end_by(at)


class DatabaseTransaction:
    """The transaction in which a processor with a database handles messages. The handler gets its `connection`."""

    def __init__(self, owner: DatabaseTransactions, connection: sa.Connection, deadline: Deadline) -> None:
        self._owner = owner
        self.connection = connection
        self._root = connection.get_transaction()
        self.id: str = f"database/{random_name(8)}"
        self.time_limit = deadline
        self.state: State = State.OPEN
        self._cause: BaseException | None = None
        self._lent = False
        self._messages: Sequence[Message] = ()
        self._commit = Commit()
        self._can_ask = is_in_transaction(connection)
        self._open = True  # False once the thread that commits has the connection
        sa.event.listen(connection, "commit", self._refuse_handlers_commit)

    @property
    def outcome(self) -> Outcome | None:
        if self.state is State.OPEN and self._root is not None and not self._root.is_active:
            return Outcome.ABORTED  # the handler has rolled it back
        return {State.COMMITTED: Outcome.COMMITTED, State.ABORTED: Outcome.ABORTED}.get(self.state)

    def _store(self) -> None:
        """Do nothing: the database has taken or refused each message already."""

    @property
    def deadline(self) -> float:
        """The seconds until the transaction's deadline."""
        return self.time_limit.left()

    def _refuse_handlers_commit(self, connection: sa.Connection) -> None:
        if self._lent:
            self._cause = InvalidState(
                f"the handler does not commit {self.id}, its processor does, with the positions of the input"
            )
            self.state = State.FAILED
            raise self._cause

    def require_not_ended(self) -> None:
        """Raise `InvalidState` if the driver has no transaction open any more, so that the next message begins none."""
        if self._can_ask and self.outcome is None and not is_in_transaction(self.connection):
            self.state, self._cause = State.FAILED, InvalidState(ENDED_BY_STATEMENT)
            raise self._cause

    def note(self, error: Exception) -> None:
        """Note an error of the handler: the transaction fails if the database, not the message, caused it."""
        if self.state is State.OPEN and any(map(is_failure, causes(error))):
            self.state, self._cause = State.FAILED, error

    def send(
        self, topic: str, value: Any, *, key: Any, headers: Iterable[tuple[str, Any]], partition: int | None = None
    ) -> None:
        """Put a dead letter, or a message to be retried, into the outbox, in the open transaction of the database.

        Raise `BrokerUnavailable` if the database fails.
        """
        assert self._owner.outbox is not None
        try:
            self._owner.outbox.send(self.connection, topic, value, key=key, headers=headers, partition=partition)
        except exc.SQLAlchemyError as error:
            if not is_failure(error):
                raise
            raise in_our_words(error, f"sending to an outbox in {_WHAT}") from own(error)

    def ack(self, messages: Iterable[Message]) -> None:
        """Note the messages that are processed: the commit stores their positions and then acknowledges them."""
        self._messages = list(messages)

    def commit(self) -> None:
        """Commit, if no other member of the group has processed the messages; then acknowledge them.

        Raise `Conflict` if one has, `CommitRefused` if the database refuses what the handler has written, and
        `OutcomeUnknown` if the answer was lost: the stored positions tell the outcome when the messages are delivered
        again.
        """
        ends = {(message.topic, message.partition): message.position for message in self._messages}
        self.state, self._open = State.COMMITTING, False
        try:
            self._owner.commit(self, self._commit, ends)
        except CommitRefused:
            self.state = State.OPEN  # a failed transaction would blame the database
            raise
        self.state = State.COMMITTED
        self._owner.acknowledge_later(self._messages, self.time_limit.seconds)

    def abort(self) -> None:
        """Prevent the commit, unless the database has been asked for it. Another thread may call this."""
        if not self._commit.give_up():
            self.state = State.ABORTED

    def _end_by(self, at: float) -> None:
        self.time_limit.shorten(at)

    def __enter__(self) -> DatabaseTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Roll back, unless the transaction has been committed or a commit is running."""
        if self._open:
            self._open = False
            self.abort()

            def close(commit: Commit) -> None:
                # Perhaps a statement runs, or the transaction has ended for SQLAlchemy only, by a refused commit.
                ended = self._root is not None and not self._root.is_active
                if commit.given_up or ended or (error is not None and not isinstance(error, Exception)):
                    self.connection.invalidate()
                self.connection.close()

            self._owner.database.roll_back(self.id, close)
