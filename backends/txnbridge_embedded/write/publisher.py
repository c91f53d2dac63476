"""Sending without transactions: a thread stores all messages that were sent during its last commit at once."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing

from txnbridge import errors
from txnbridge.spi import Deadline, Publisher, RawHeaders
from txnbridge_embedded.client.store import CommitUnclear, Store, StoredTopic, now_ms
from txnbridge_embedded.write.owner import Owner, WriterRow, take_over
from txnbridge_embedded.write.staged_messages import Rows, StagedMessages, store

# The prefix of a publisher's name in the table `identities`. No transactional id can begin with it.
_PREFIX = "\x1fpublisher "


class EmbeddedPublisher(Publisher):
    """Stores messages in batches.

    A publisher with a name fences an older publisher of that name, and continues its sequence numbers. After a failure
    the publisher accepts no more messages, because later messages would be out of order.
    """

    def __init__(
        self,
        store: Store,
        name: str | None,
        deadline: Deadline,
        closed: Callable[[EmbeddedPublisher, WriterRow | None], None],
    ) -> None:
        self._store = store
        self._name = name
        self._closed = closed
        self._most_bytes = store.settings.spill_bytes
        self._instance: WriterRow | None = None
        self._state = threading.Condition()  # guards the attributes below
        self._outgoing = StagedMessages(self._find_topic, lambda: None, store.settings)
        self._call = deadline  # the deadline of the running call
        self._oldest: Deadline | None = None  # the deadline of the oldest message in memory
        self._taken: dict[int, int] = {}  # by topic id: the last sequence that was sent, stored or not
        self._sequences: dict[int, int] = {}  # by topic id: the last sequence in memory
        self._sent = self._stored = 0
        self._error: errors.TxnBridgeError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="txnbridge-publisher", daemon=True)
        with ExitStack() as opened:
            # For calling threads; the publisher's own thread has another connection.
            self._lookups = opened.enter_context(closing(store.connect()))
            self._connection = opened.enter_context(closing(store.connect()))
            self._owner = self._open(deadline)
            self._thread.start()
            opened.pop_all()

    def _open(self, deadline: Deadline) -> Owner:
        host = f"{socket.gethostname()} pid {os.getpid()}"
        if self._name is None:
            return Owner("", host, None)
        with self._store.writing(self._lookups, deadline, "opening a publisher"):
            return Owner(_PREFIX + self._name, host, take_over(self._lookups, _PREFIX + self._name, host))

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
        sequence: int | None,
        deadline: Deadline,
    ) -> None:
        with self._state:
            self._call = deadline
            self._wait(lambda: self._outgoing.bytes < self._most_bytes, "memory for a message", deadline)
            topic_id = -1 if sequence is None else self._find_topic(topic).id
            if sequence is not None and sequence <= self._last_taken(topic_id):
                return
            try:
                self._outgoing.add(topic, value, key, headers, partition, timestamp)
                if sequence is not None:
                    self._taken[topic_id] = self._sequences[topic_id] = sequence
                self._sent += 1
                self._oldest = self._oldest or deadline
                self._state.notify_all()
            except BaseException as error:
                if not isinstance(error, errors.TxnBridgeError):  # an interrupt: part of the message may be in memory
                    self._outgoing.clear()
                    self._error = errors.DeliveryFailed("a call of `send` was interrupted")
                raise

    def flush(self, deadline: Deadline) -> None:
        with self._state:
            sent = self._sent
            self._wait(lambda: self._stored >= sent, "its messages to be stored", deadline)

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        with self._state, self._store.reading(self._lookups, deadline):
            row = self._lookups.execute(
                "SELECT last FROM sequences JOIN topics ON topics.id = topic_id WHERE publisher = ? AND name = ?",
                (self._name, topic),
            ).fetchone()
        return None if row is None else int(row[0])

    def close(self, deadline: Deadline) -> None:
        with self._state:
            if self._closing:
                return
            self._closing = True
            self._state.notify_all()
        try:
            self.flush(deadline)
        finally:
            self._thread.join(deadline.left())
            self._lookups.close()
            self._closed(self, self._instance)

    # --- on the caller's thread, with the state locked -------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], what: str, deadline: Deadline) -> None:
        ended = self._state.wait_for(lambda: self._error is not None or done(), deadline.left())
        if self._error is not None:
            raise _repeated(self._error) from self._error
        if not ended:
            raise errors.DeadlineExceeded(f"the publisher waited {deadline.seconds:g} s for {what}")

    def _find_topic(self, name: str) -> StoredTopic:
        return self._store.ensure_topic(self._lookups, name, self._call)

    def _last_taken(self, topic_id: int) -> int:
        last = self._taken.get(topic_id)
        if last is None:
            with self._store.reading(self._lookups, self._call):
                row = self._lookups.execute(
                    "SELECT last FROM sequences WHERE publisher = ? AND topic_id = ?", (self._name, topic_id)
                ).fetchone()
            last = self._taken[topic_id] = -1 if row is None else row[0]
        return last

    # --- on the publisher's own thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._store_next():
                pass
        finally:
            self._connection.close()

    def _store_next(self) -> bool:
        """Wait for messages, and store all that are in memory. Return False after a failure, or after `close`."""
        with self._state:
            self._state.wait_for(lambda: self._outgoing.count or self._closing)
            if not self._outgoing.count:
                return False
            rows, sequences, sent, deadline = self._outgoing.take(), self._sequences, self._sent, self._oldest
            self._outgoing.clear()
            self._sequences, self._oldest = {}, None
            self._state.notify_all()  # there is memory for more messages
        assert deadline is not None
        error: errors.TxnBridgeError | None = None
        try:
            self._store_rows(rows, sequences, deadline)
        except errors.TxnBridgeError as failure:
            error = failure
        except Exception as bug:  # otherwise the error would be lost with the thread
            error = errors.DeliveryFailed(f"{type(bug).__name__}: {bug}")
            error.__cause__ = bug
        with self._state:
            if error is None:
                self._stored = sent
            self._error = self._error or error
            self._state.notify_all()
        return self._error is None

    def _store_rows(self, rows: list[Rows], sequences: dict[int, int], deadline: Deadline) -> None:
        instance = self._instance or WriterRow(self._owner)
        try:
            with (
                self._store.events.step("step:store", messages=sum(len(part.values) for part in rows)),
                self._store.writing(self._connection, deadline, "storing messages"),
            ):
                if self._instance is None:
                    self._owner.check(self._connection)
                    instance.add(self._connection)
                try:
                    instance.record_commit(self._connection)
                except errors.TransactionAborted:
                    # The row was deleted by age; no token names it, so a new row replaces it.
                    instance = WriterRow(self._owner)
                    instance.add(self._connection)
                    instance.record_commit(self._connection)
                self._write(rows, sequences)
        except CommitUnclear:
            self._connection.close()
            self._connection = self._store.connect()
            self._instance = None
            if not instance.was_committed(self._store, self._connection, deadline):
                raise
        else:
            instance.last += 1
            self._instance = instance

    def _write(self, rows: list[Rows], sequences: dict[int, int]) -> None:
        now = now_ms()
        for part in rows:
            store(self._connection, part, now)
        self._connection.executemany(
            "INSERT INTO sequences VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET last = excluded.last",
            ((self._name, topic_id, last) for topic_id, last in sequences.items()),
        )


def _repeated(error: errors.TxnBridgeError) -> errors.TxnBridgeError:
    """Return the error for each later call of a publisher that has failed with `error`."""
    if isinstance(error, errors.Fenced):
        return errors.Fenced(str(error), newer=error.newer)
    if isinstance(error, errors.OutcomeUnknown):
        return errors.OutcomeUnknown(str(error))
    return errors.DeliveryFailed(
        f"a message could not be stored, and no later message was; open a new publisher: {error}"
    )
