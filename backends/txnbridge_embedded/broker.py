"""The connection to one broker file: it opens transactional ids, and ends or looks up transactions by tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from txnbridge.errors import DeadlineExceeded, InvalidToken, TxnBridgeError
from txnbridge.spi import (
    Admin,
    Broker,
    Capabilities,
    Context,
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
    Writer,
)
from txnbridge_embedded.admin.admin import EmbeddedAdmin
from txnbridge_embedded.client.session import SharedConnection
from txnbridge_embedded.client.store import LEAVING_SECONDS, FileConnection, Store, now_ms
from txnbridge_embedded.decision_log import EmbeddedLog
from txnbridge_embedded.half_store import EmbeddedHalves
from txnbridge_embedded.outcome import outcome
from txnbridge_embedded.outcome.writer_evidence import Instance, Owner, take_over
from txnbridge_embedded.read.reader import open_reader
from txnbridge_embedded.settings import Settings
from txnbridge_embedded.write.publisher import EmbeddedPublisher
from txnbridge_embedded.write.writer import EmbeddedWriter, PlainWriter, PreparingWriter


class EmbeddedBroker(Broker):
    """A bridge's connection to one file. All calls except those of writers and readers share one SQLite connection."""

    def __init__(
        self, store: Store, settings: Settings, context: Context, capabilities: Capabilities, limits: Limits
    ) -> None:
        self.capabilities = capabilities
        self.limits = limits
        self.cluster = store.cluster
        self.store = store
        self.settings = settings
        self.events = context.events
        self.session = SharedConnection(store, settings, context.events)
        self._owners: dict[str, Owner] = {}
        self._writers: set[EmbeddedWriter] = set()  # the writers that are not closed
        self._left: list[Instance] = []  # instances of closed writers and publishers
        self._publishers: list[EmbeddedPublisher] = []
        self._closed = False
        self._admin = EmbeddedAdmin(self.session)

    # --- writing ---------------------------------------------------------------------------------------------------

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        with self.session(deadline) as connection:
            with (
                self.events.step("step:open", identity=identity.name, writers=count),
                self.store.writing(connection, deadline, "opening an id"),
            ):
                outcome.forget_old(connection, now_ms() - int(self.settings.keep_seconds * 1000))
                epoch = take_over(connection, identity.name, identity.host) if identity.owned else None
                owner = Owner(identity.name, identity.host, epoch)
                instances = [Instance(owner) for _ in range(count)]
                for instance in instances:
                    instance.add(connection)
            self._owners[identity.name] = owner
            outcome.finish_aborts(self.store, connection, deadline, self.events)
        return [self._plain_writer(owner, instance) for instance in instances]

    def _plain_writer(self, owner: Owner, instance: Instance) -> Writer:
        writer = PlainWriter(self.store, self.settings, self.events, owner, self._forget, instance)
        self._writers.add(writer)
        return writer

    def _forget(self, writer: EmbeddedWriter, instance: Instance | None) -> None:
        self._writers.discard(writer)
        if instance is not None:
            self._left.append(instance)

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        if identity.owned and identity.name not in self._owners:
            self.open_writers(identity, 0, ledger, deadline)
        owner = self._owners.get(identity.name) or Owner(identity.name, identity.host, None)
        with self.session(deadline) as connection, self.store.reading(connection, deadline):
            owner.check(connection)
        writer = PreparingWriter(self.store, self.settings, self.events, owner, self._forget)
        self._writers.add(writer)
        return writer

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        publisher = EmbeddedPublisher(self.store, self.settings, self.events, name, deadline, self._left.append)
        self._publishers.append(publisher)
        return publisher

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        return open_reader(self.store, self.settings, subscription, listener, self.events, deadline)

    # --- tokens ----------------------------------------------------------------------------------------------------

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return self._end(token, Decision.COMMIT, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return self._end(token, Decision.ABORT, deadline)

    def _end(self, token: Token, decision: Decision, deadline: Deadline) -> Outcome:
        _check(token)
        with self.session(deadline) as connection:
            return outcome.decide(self.store, connection, token.transaction, decision, deadline, self.events)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        _check(token)
        with self.session(deadline) as connection:
            with self.store.reading(connection, deadline):
                status = _look(connection, token)
            if status is not None:
                return status
            # The transaction's deadline has passed, and it has not ended. A commit checks the deadline while it holds
            # the file's lock. So if the transaction has not ended once this call has the lock, it can no longer be
            # committed. It is recorded as aborted, because the clock may be set back.
            try:
                with self.store.writing(connection, deadline, "looking at a transaction"):
                    return _look(connection, token) or _record_expired(connection, token)
            except DeadlineExceeded:
                return Status(TokenState.UNKNOWN, reason="its deadline has passed, and another process writes just now")

    # --- administration and closing --------------------------------------------------------------------------------

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
        self._closed = True
        for writer in list(self._writers):
            if not writer.in_use:  # a writer in use is closed by the caller that ends its transaction
                writer.close()
        for publisher in self._publishers:
            with suppress(TxnBridgeError):  # the application gets the error from the publisher's own flush
                publisher.close(deadline)
        leaving = Deadline(min(deadline.left(), LEAVING_SECONDS))
        with suppress(TxnBridgeError), self.session(leaving) as connection:
            self._leave(connection, leaving)
        self.session.close()
        self.store.close()

    def _leave(self, connection: FileConnection, deadline: Deadline) -> None:
        """Delete the rows of closed writers that no token names, and retire the others: they commit nothing more."""
        if self._left:
            with self.store.writing(connection, deadline, "closing"):
                for instance in self._left:
                    if instance.told:
                        instance.retire(connection)
                    else:
                        instance.forget(connection)


def _check(token: Token) -> None:
    """Raise `InvalidToken` for a token that no writer of this broker can have made."""
    writer, number = token.how.get("w"), token.how.get("n")
    plain = isinstance(writer, str) and type(number) is int and 0 <= number < 1 << 63
    if not plain and "p" not in token.how:
        raise InvalidToken("this token is damaged: its fields are not those of a transaction of the embedded broker")


def _look(connection: FileConnection, token: Token) -> Status | None:
    """Return the status of a token's transaction; None if it is undecided and its deadline has passed."""
    return _look_at_prepared(connection, token) if "p" in token.how else _look_at_plain(connection, token)


def _record_expired(connection: FileConnection, token: Token) -> Status:
    """Abort a transaction whose deadline has passed, inside a write transaction, so that it stays aborted."""
    reason = "its deadline passed"
    if "p" in token.how:
        ((number,),) = connection.execute("SELECT number FROM transactions WHERE id = ?", (token.transaction,))
        outcome.mark_aborted(connection, number, reason)
    else:
        connection.execute("UPDATE writers SET retired = 1 WHERE id = ?", (token.how.get("w"),))
    return Status(TokenState.ABORTED, reason=reason)


def _look_at_prepared(connection: FileConnection, token: Token) -> Status | None:
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


def _look_at_plain(connection: FileConnection, token: Token) -> Status | None:
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
    TokenState.UNKNOWN, reason="the file has forgotten it: it ended more than `keep_seconds` ago", permanent=True
)
