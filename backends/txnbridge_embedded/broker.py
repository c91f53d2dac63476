"""One bridge's connection to a broker file: it opens writers and readers, and ends transactions by tokens."""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from typing import Any

from txnbridge.errors import DeadlineExceeded, InvalidToken, TxnBridgeError
from txnbridge.spi import (
    Admin,
    Broker,
    Capabilities,
    Deadline,
    Decision,
    DecisionLog,
    HalfStore,
    Identity,
    Ledger,
    Limits,
    Outcome,
    Publisher,
    Reader,
    ReaderListener,
    Status,
    Subscription,
    Token,
    TokenState,
    TopicRules,
    Writer,
)
from txnbridge_embedded.admin.admin import EmbeddedAdmin
from txnbridge_embedded.client.shared_connection import SharedConnection
from txnbridge_embedded.client.store import CLOSING_SECONDS, FileConnection, Store, now_ms
from txnbridge_embedded.decision_log import EmbeddedLog
from txnbridge_embedded.half_store import EmbeddedHalves
from txnbridge_embedded.outcome import ending
from txnbridge_embedded.read.reader import open_reader
from txnbridge_embedded.write.owner import Owner, WriterRow, take_over
from txnbridge_embedded.write.publisher import EmbeddedPublisher
from txnbridge_embedded.write.writer import EmbeddedWriter, PlainWriter, PreparingWriter


class EmbeddedBroker(Broker):
    """A bridge's connection to a file. All calls except those of writers and readers share one SQLite connection."""

    group_commit = True
    commits_in_turn = True

    def __init__(self, store: Store, capabilities: Capabilities, limits: Limits) -> None:
        self.capabilities = capabilities
        self.limits = limits
        self.cluster = store.cluster
        self.store = store
        self.session = SharedConnection(store)
        self._owners: dict[str, Owner] = {}
        self._writers: set[EmbeddedWriter] = set()  # the writers that are not closed
        self._closed_rows: list[WriterRow] = []  # the rows of closed writers and publishers
        self._publishers: set[EmbeddedPublisher] = set()  # those that are not closed
        self._closed = False
        self._admin = EmbeddedAdmin(self.session)

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        with self.session(deadline) as connection:
            with (
                self.store.events.step("step:open", identity=identity.name, writers=count),
                self.store.writing(connection, deadline, "opening an id"),
            ):
                ending.delete_old_rows(connection, now_ms() - int(self.store.settings.keep_seconds * 1000))
                epoch = take_over(connection, identity.name, identity.host) if identity.owned else None
                owner = Owner(identity.name, identity.host, epoch)
                rows = [WriterRow(owner) for _ in range(count)]
                for row in rows:
                    row.add(connection)
            self._owners[identity.name] = owner
            ending.remove_aborted_messages(self.store, connection, deadline)
        with ExitStack() as opened:
            new = [opened.enter_context(closing(PlainWriter(self.store, owner, self._forget, row))) for row in rows]
            self._writers.update(new)
            opened.pop_all()
        return [*new]

    def _forget(self, closed: Any, instance: WriterRow | None) -> None:
        self._writers.discard(closed)
        self._publishers.discard(closed)
        if instance is not None:
            self._closed_rows.append(instance)

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        if identity.owned and identity.name not in self._owners:
            self.open_writers(identity, 0, ledger, deadline)
        owner = self._owners.get(identity.name) or Owner(identity.name, identity.host, None)
        with self.session(deadline) as connection, self.store.reading(connection, deadline):
            owner.check(connection)
        writer = PreparingWriter(self.store, owner, self._forget)
        self._writers.add(writer)
        return writer

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        publisher = EmbeddedPublisher(self.store, name, deadline, self._forget)
        self._publishers.add(publisher)
        return publisher

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        return open_reader(self.store, subscription, listener, deadline)

    def require_topic(self, topic: str, deadline: Deadline) -> TopicRules:
        with self.session(deadline) as connection:
            self.store.ensure_topic(connection, topic, deadline)
        return TopicRules()

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return self._end(token, Decision.COMMIT, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return self._end(token, Decision.ABORT, deadline)

    def _end(self, token: Token, decision: Decision, deadline: Deadline) -> Outcome:
        _check(token)
        with self.session(deadline) as connection:
            return ending.decide(self.store, connection, token.transaction, decision, deadline)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        _check(token)
        with self.session(deadline) as connection:
            with self.store.reading(connection, deadline):
                status = _status(connection, token)
            if status is not None:
                return status
            # The deadline has passed, and the transaction has not ended. A commit checks the deadline while it holds
            # the file's lock. So if the transaction has still not ended when this call holds the lock, it can no longer
            # be committed. It is recorded as aborted, because the clock may be set back.
            try:
                with self.store.writing(connection, deadline, "looking up a transaction"):
                    return _status(connection, token) or _record_expired(connection, token)
            except DeadlineExceeded:
                return Status(TokenState.UNKNOWN, reason="its deadline has passed, and another process locks the file")

    @property
    def admin(self) -> Admin:
        return self._admin

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        return EmbeddedLog(self.session, name, deadline)

    def half_store(self) -> HalfStore | None:
        return EmbeddedHalves(self.session)

    def close(self, deadline: Deadline) -> None:
        if self._closed:
            return
        for writer in list(self._writers):
            if not writer.in_use:  # else the caller that ends its transaction closes it
                writer.close()
        for publisher in list(self._publishers):
            with suppress(TxnBridgeError):  # the application gets the error from the publisher's own flush
                publisher.close(deadline)
        leaving = Deadline(min(deadline.left(), CLOSING_SECONDS))
        with suppress(TxnBridgeError), self.session(leaving) as connection:
            self._leave(connection, leaving)
        self.session.close()
        self.store.close()
        self._closed = True  # last: after an exception from a signal handler the next call does the rest

    def _leave(self, connection: FileConnection, deadline: Deadline) -> None:
        """Delete the rows in `writers` of closed writers that no token names, and retire rows of other closed writers.

        A writer with a retired row commits nothing more.
        """
        if self._closed_rows:
            with self.store.writing(connection, deadline, "closing"):
                for instance in self._closed_rows:
                    (instance.retire if instance.in_token else instance.forget)(connection)


def _check(token: Token) -> None:
    """Raise `InvalidToken` if a token's fields are not those of this broker."""
    writer, number = token.how.get("w"), token.how.get("n")
    plain = isinstance(writer, str) and type(number) is int and 0 <= number < 1 << 63
    if not plain and "p" not in token.how:
        raise InvalidToken("this token is damaged: it lacks the fields of the embedded broker's tokens")


def _status(connection: FileConnection, token: Token) -> Status | None:
    """Return the status of a token's transaction; None if the transaction is undecided and its deadline has passed."""
    return _prepared_status(connection, token) if "p" in token.how else _plain_status(connection, token)


def _record_expired(connection: FileConnection, token: Token) -> Status:
    """Record an expired transaction as aborted, inside the caller's write transaction; return its status."""
    reason = "its deadline passed"
    if "p" in token.how:
        ((number,),) = connection.execute("SELECT number FROM transactions WHERE id = ?", (token.transaction,))
        ending.mark_aborted(connection, number, reason)
    else:
        connection.execute("UPDATE writers SET retired = 1 WHERE id = ?", (token.how.get("w"),))
    return Status(TokenState.ABORTED, reason=reason)


def _prepared_status(connection: FileConnection, token: Token) -> Status | None:
    row = connection.execute(
        "SELECT state, deadline_at, reason FROM transactions WHERE id = ?", (token.transaction,)
    ).fetchone()
    if row is None:
        return _FORGOTTEN
    state, deadline_at, reason = row
    if state == "committed":
        return Status(TokenState.COMMITTED)
    if state in ("aborting", "aborted"):
        return Status(TokenState.ABORTED, reason=reason)
    if deadline_at < now_ms():
        return None
    if state == "prepared":
        return Status(TokenState.PREPARED, expires_at=deadline_at)
    return Status(TokenState.UNKNOWN, expires_at=deadline_at, reason="it is still open and not prepared yet")


def _plain_status(connection: FileConnection, token: Token) -> Status | None:
    row = connection.execute("SELECT last, retired FROM writers WHERE id = ?", (token.how.get("w"),)).fetchone()
    if row is None:
        return _FORGOTTEN
    last, retired = row
    number: Any = token.how.get("n")
    if last >= number:
        return Status(TokenState.COMMITTED)
    if retired:
        return Status(TokenState.ABORTED, reason="its writer was replaced before it committed")
    if token.expires_at is not None and token.expires_at < now_ms():
        return None
    return Status(TokenState.UNKNOWN, expires_at=token.expires_at, reason="it is still open")


_FORGOTTEN = Status(
    TokenState.UNKNOWN, reason="its outcome was deleted: it ended more than `keep_seconds` ago", permanent=True
)
