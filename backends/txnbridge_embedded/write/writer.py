"""Writers: a transaction's messages wait in memory until they are stored at its end, in one write transaction.

If a transaction exceeds `spill_bytes`, parts of it are stored undecided before its end: readers stop before them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from txnbridge import errors
from txnbridge.spi import Begin, Deadline, Decision, Evidence, Outcome, Partition, Position, Raw, RawHeaders, Writer
from txnbridge_embedded.client.store import CLOSING_SECONDS, CommitUnclear, Store, now_ms
from txnbridge_embedded.outcome import ending
from txnbridge_embedded.write import acks, retention
from txnbridge_embedded.write.owner import Owner, WriterRow
from txnbridge_embedded.write.staged_messages import Rows, StagedMessages, store

_log = logging.getLogger("txnbridge.embedded")

Acks = tuple[acks.AckContext, Mapping[Partition, Sequence[Position]]]


class EmbeddedWriter(Writer):
    """The base class of plain and preparing writers: it collects messages, and stores those beyond `spill_bytes`."""

    instance: WriterRow | None = None  # of a plain writer: the row that proves its commits

    def __init__(self, store: Store, owner: Owner, closed: Callable[[EmbeddedWriter, WriterRow | None], None]) -> None:
        self._store = store
        self._closed = closed
        self._owner = owner
        self._connection = store.connect()
        self._outgoing = StagedMessages(
            lambda name: store.ensure_topic(self._connection, name, self._begin.deadline),
            lambda: self._store_part(self._begin.deadline),
            store.settings,
        )
        self._begun: Begin | None = None
        self._begun_at = 0
        self._expires_at = 0
        self._acks: list[Acks] = []
        self._stored = False  # True if parts of the transaction may be in the file
        self._failed = False  # True if a part could not be stored, so that the transaction must not be committed

    # --- one transaction -------------------------------------------------------------------------------------------

    def begin(self, begin: Begin) -> None:
        self._begun = begin
        self._begun_at = now_ms()
        self._expires_at = self._begun_at + int(begin.deadline.left() * 1000)
        self._outgoing.clear()
        self._acks.clear()
        self._stored = self._failed = False

    def send(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        self._outgoing.add(topic, value, key, headers, partition, timestamp)

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        self._outgoing.add_many(topic, items)

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert isinstance(context, acks.AckContext)
        self._acks.append((context, positions))

    @property
    def messages(self) -> int:  # type: ignore[override]  # a writer without `quick` counts its messages itself
        return self._outgoing.count

    def flush(self, deadline: Deadline) -> None:
        """Store the messages in memory in the file, where no reader sees them before the transaction is committed."""
        if self._outgoing.bytes:
            self._store_part(deadline)

    @property
    def in_use(self) -> bool:
        """True if the writer has a transaction that has not ended."""
        return self._begun is not None

    @property
    def _begin(self) -> Begin:
        if self._begun is None:
            raise errors.InvalidState("this writer has no transaction")
        return self._begun

    def _store_part(self, deadline: Deadline) -> None:
        """Move the messages from memory into the file, undecided: no reader sees them before the commit."""
        rows = self._outgoing.take()
        try:
            with (
                self._store.events.step(
                    "step:spill", self._begin.transaction, messages=sum(len(r.values) for r in rows)
                ),
                self._store.writing(self._connection, deadline, "storing messages"),
            ):
                self._check_storable()
                number = self._set_state("open", self._expires_at)
                self._stored = True  # set before the commit, whose answer may be lost
                self._store_undecided(rows, number)
        except BaseException as error:
            self._failed = True
            if isinstance(error, errors.TxnBridgeError):
                raise self._aborted(error) from (error.__cause__ or error)
            raise

    # --- inside a write transaction --------------------------------------------------------------------------------

    def _check_storable(self) -> None:
        """Raise an error if the transaction must not be stored: it has failed or is late, or the id has a new owner."""
        if self._failed:
            raise errors.DeliveryFailed(f"part of transaction {self._begin.transaction} could not be stored")
        self._owner.check(self._connection)
        if self._begin.deadline.expired or now_ms() > self._expires_at:
            raise errors.TransactionTimedOut(f"transaction {self._begin.transaction} was not ended by its deadline")

    def _set_state(self, state: str, deadline_at: int) -> int:
        """Create this transaction's row with a state, or update it if a part is stored; return the row's number.

        If another process has aborted the transaction, the row may be gone, and with it the stored parts. Raise then
        `TransactionAborted`: a new row would let the rest be committed without them.
        """
        begin, count = self._begin, self._outgoing.count
        if self._stored:
            found = self._connection.execute(
                "UPDATE transactions SET state = ?, prepared = ?, deadline_at = ?, messages = ?"
                " WHERE id = ? AND state = 'open' RETURNING number",
                (state, state == "prepared", deadline_at, count, begin.transaction),
            ).fetchall()
            if not found:
                raise self._ended_by_others()
        else:
            found = self._connection.execute(
                "INSERT INTO transactions(id, identity, host, state, prepared, begun_at, deadline_at, messages)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING number",
                (
                    *(begin.transaction, self._owner.name, self._owner.host, state, state == "prepared"),
                    *(self._begun_at, deadline_at, count),
                ),
            ).fetchall()
        return int(found[0][0])

    def _ended_by_others(self) -> errors.TransactionAborted:
        self._owner.check(self._connection)
        return errors.TransactionTimedOut(
            f"transaction {self._begin.transaction} was ended by another process: its deadline passed, or an "
            "administrator aborted it"
        )

    def _store_undecided(self, rows: list[Rows], number: int) -> None:
        now = now_ms()
        for part in rows:
            first, last = store(self._connection, part, now)
            # Mostly a part directly follows the one before, without other writers' messages in between.
            grown = self._connection.execute(
                "UPDATE undecided SET last = ? WHERE number = ? AND partition_id = ? AND last = ?",
                (last, number, part.partition, first - 1),
            )
            if not grown.rowcount:
                self._connection.execute(
                    "INSERT INTO undecided VALUES (?, ?, ?, ?)", (part.partition, first, last, number)
                )

    # --- ending ----------------------------------------------------------------------------------------------------

    def _aborted(self, error: errors.TxnBridgeError) -> errors.TxnBridgeError:
        """Return the error for a transaction that is aborted because of an error."""
        if isinstance(error, errors.TransactionAborted | errors.Fenced):
            return error
        if isinstance(error, errors.NotFound):  # the topic was deleted, and perhaps created again
            for topic in self._outgoing.topics():
                self._store.forget_topic(topic.name)
        late = isinstance(error, errors.DeadlineExceeded)
        kind = errors.TransactionTimedOut if late else errors.DeliveryFailed
        return kind(f"transaction {self._begin.transaction} was aborted: {error}")

    def _abort(self, deadline: Deadline) -> None:
        """Abort the transaction: drop its messages in memory, and remove stored ones until the deadline."""
        self._outgoing.clear()
        self._acks.clear()
        if self._stored and self._begun is not None:
            try:
                transaction = self._begun.transaction
                ending.abort_open(self._store, self._connection, transaction, "aborted", deadline)
            except errors.TxnBridgeError as error:
                _log.warning("stored messages of aborted transaction %s remain: %s", self._begun.transaction, error)
        self._begun = None

    def _reconnect(self) -> None:
        self._connection.close()
        self._connection = self._store.connect()

    def close(self) -> None:
        self._abort(Deadline(CLOSING_SECONDS))
        self._connection.close()
        self._closed(self, self.instance)


class PlainWriter(EmbeddedWriter):
    """Commits in one write transaction of the file, which also stores the transaction's number in table `writers`."""

    def __init__(
        self,
        store: Store,
        owner: Owner,
        closed: Callable[[EmbeddedWriter, WriterRow | None], None],
        instance: WriterRow,
    ) -> None:
        super().__init__(store, owner, closed)
        self.instance: WriterRow = instance
        self._stale = False  # True if the row is retired, or may be
        self._how: dict[str, Any] = {}
        self._trimmed_at = time.monotonic()

    def begin(self, begin: Begin) -> None:
        # The number in a token must never be used for another transaction.
        if self._stale or self.instance.in_token or self.instance.retired_by_other:
            self.reopen(begin.deadline)
        super().begin(begin)
        self._how = {"w": self.instance.id, "n": self.instance.last + 1}

    def evidence(self) -> Evidence:
        # `instance` may have changed since `begin`; the token has the values at `begin`.
        self.instance.in_token = True
        return Evidence(self._how, self._outgoing.count, self._expires_at)

    def commit(self, deadline: Deadline) -> None:
        try:
            with (
                self._store.events.step("step:store", self._begin.transaction, messages=self._outgoing.count),
                self._store.writing(self._connection, deadline, "the commit"),
            ):
                self._write()
        except CommitUnclear as error:
            self._resolve_unclear(error, deadline)
        except errors.TxnBridgeError as error:
            aborted = self._aborted(error)
            self._abort(deadline)
            raise aborted from (error.__cause__ or error)
        else:
            self.instance.last += 1
        self._begun = None
        self._trim(deadline)

    def _trim(self, deadline: Deadline) -> None:
        """Remove messages beyond retention from the topics that were just written, at most every ten seconds."""
        now = time.monotonic()
        if now - self._trimmed_at < self._store.settings.timing.trim_interval:
            return
        self._trimmed_at = now
        try:
            for topic in self._outgoing.topics():
                retention.trim(self._store, self._connection, topic, deadline)
        except errors.TxnBridgeError as error:  # the commit has succeeded, and the next writer tries again
            _log.debug("messages beyond retention are removed later: %s", error)

    def _write(self) -> None:
        connection = self._connection
        self._check_storable()
        self.instance.record_commit(connection)
        for context, positions in self._acks:
            acks.apply_acks(connection, context, positions)
        now = now_ms()
        for rows in self._outgoing.pending():
            store(connection, rows, now)
        if self._stored:
            mine = connection.execute(
                "DELETE FROM transactions WHERE id = ? AND state = 'open' RETURNING number", (self._begin.transaction,)
            ).fetchall()
            if not mine:
                raise self._ended_by_others()
            connection.execute("DELETE FROM undecided WHERE number = ?", mine[0])

    def _resolve_unclear(self, error: CommitUnclear, deadline: Deadline) -> None:
        """Find out whether a commit during which SQLite failed took effect: return if it did.

        Otherwise raise an error: `OutcomeUnknown`, or the error of an aborted transaction.
        """
        self._stale = True
        try:
            self._reconnect()
            if self.instance.was_committed(self._store, self._connection, deadline):
                return
        except errors.TxnBridgeError as failure:
            raise errors.OutcomeUnknown(f"{error}; and {failure}") from error.__cause__
        aborted = self._aborted(error)
        self._abort(deadline)
        raise aborted from error.__cause__

    def abort(self, deadline: Deadline) -> None:
        self._abort(deadline)

    def reopen(self, deadline: Deadline) -> None:
        self._reconnect()
        self._abort(deadline)
        fresh = WriterRow(self._owner)
        with (
            self._store.events.step("step:open", writers=1),
            self._store.writing(self._connection, deadline, "opening a writer"),
        ):
            self._owner.check(self._connection)
            self.instance.retire(self._connection)
            fresh.add(self._connection)
        self.instance = fresh
        self._stale = False


class PreparingWriter(EmbeddedWriter):
    """Prepares one transaction at a time. The transaction's token ends it later, without this writer."""

    _prepared = False  # True if the transaction is, or may be, prepared

    def begin(self, begin: Begin) -> None:
        super().begin(begin)
        self._prepared = False

    def evidence(self) -> Evidence:
        return Evidence({"p": 1}, self._outgoing.count, self._expires_at)

    def prepare(self, deadline: Deadline) -> None:
        hold = self._begin.hold
        ends = self._expires_at + int(1000 * (self._store.settings.hold_seconds if hold is None else hold))
        self._prepared = True  # set first, because a signal handler's exception may follow the commit
        try:
            with (
                self._store.events.step("step:store", self._begin.transaction, messages=self._outgoing.count),
                self._store.writing(self._connection, deadline, "the prepare"),
            ):
                self._check_storable()
                number = self._set_state("prepared", ends)
                for context, positions in self._acks:
                    acks.apply_acks(self._connection, context, positions, number)
                self._store_undecided(self._outgoing.pending(), number)
        except CommitUnclear as error:
            self._resolve_unclear(error, deadline)
        except errors.TxnBridgeError as error:
            self._prepared = False
            aborted = self._aborted(error)
            self._abort(deadline)
            raise aborted from (error.__cause__ or error)
        self._expires_at = ends

    def _resolve_unclear(self, error: CommitUnclear, deadline: Deadline) -> None:
        """Find out whether a prepare during which SQLite failed took effect: return if it did.

        Otherwise abort the transaction and raise an error. If the prepare still took effect later, the transaction
        would expire, because it has no token.
        """
        try:
            self._reconnect()
            with self._store.reading(self._connection, deadline):
                row = self._connection.execute(
                    "SELECT state FROM transactions WHERE id = ?", (self._begin.transaction,)
                ).fetchone()
        except errors.TxnBridgeError as failure:
            raise errors.OutcomeUnknown(f"{error}; and looking up the outcome: {failure}") from error.__cause__
        if row is None or row[0] != "prepared":
            self._prepared = False
            aborted = self._aborted(error)
            self._abort(deadline)
            raise aborted from error.__cause__

    def commit(self, deadline: Deadline) -> None:
        raise errors.InvalidState("a prepared transaction is committed by its token")

    def abort(self, deadline: Deadline) -> None:
        if not self._prepared:
            return self._abort(deadline)
        try:
            transaction = self._begin.transaction
            ended = ending.decide(self._store, self._connection, transaction, Decision.ABORT, deadline)
        except (errors.EvidenceLost, errors.InvalidState):  # the transaction was not prepared
            self._prepared = False
            return self._abort(deadline)
        if ended is Outcome.COMMITTED:
            raise errors.InvalidState(f"transaction {self._begin.transaction} was committed by its token")
        return None

    def reopen(self, deadline: Deadline) -> None:
        self._reconnect()
        self._abort(deadline)

    def close(self) -> None:
        if self._prepared:
            self._begun = None
        super().close()
