"""Half messages: messages that are published if work outside the broker succeeds, and dropped if it does not.

The broker stores them first, invisible to readers; then the sender does the local work, such as a database's commit. If
the process dies before it has ended them, a resolver of the group (`_half.resolver`) asks the application for the
outcome.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Any

from txnbridge import errors
from txnbridge._base.connection import Connection, ConnectionUser, random_name
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.messages import check_place, split_item
from txnbridge._base.token import Decision, Outcome
from txnbridge._base.topic import Topic, encode_message
from txnbridge._half.common import RefusedHalf, check_decision, check_group, end_half, half_store
from txnbridge._half.resolver import Check, Resolver
from txnbridge.spi import Half, HalfMessage, HalfStore

_log = logging.getLogger("txnbridge")

Execute = Callable[["HalfTransaction", Any], Decision]

# The least time for sending the outcome to the broker, even if the local work took the whole time.
END_SECONDS = 2.0

_WANTED = {Decision.COMMIT: Outcome.COMMITTED, Decision.ABORT: Outcome.ABORTED, Decision.UNDECIDED: Outcome.UNKNOWN}


class HalfTransaction(ConnectionUser):
    """A transaction of half messages: the end of its block stores the messages, and then does the local work.

    An exception in the block drops the messages before they are stored; `raise Abort` does so without an exception
    outside the block. Only one thread at a time may use the object.
    """

    def __init__(
        self, connection: Connection, store: HalfStore, group: str, id: str, execute: Execute, arg: Any, timeout: float
    ) -> None:
        self._connection = connection
        self._store = store
        self._group = group
        self._id = id
        self._execute = execute
        self._arg = arg
        self._deadline = Deadline(timeout)
        self._began = time.time()
        self._messages: list[HalfMessage] = []
        self._turn = threading.Lock()
        self._open = True
        self._outcome: Outcome | None = None

    @property
    def id(self) -> str:
        """The transaction's id, unique for ever. The local work must store it where `check` can find it."""
        return self._id

    @property
    def outcome(self) -> Outcome | None:
        """The transaction's outcome; None until it has ended. After UNKNOWN a check-back decides the outcome later."""
        return self._outcome

    @property
    def deadline(self) -> float:
        """The seconds until the deadline, by which the local work must end: later an ABORT of `check` counts."""
        return self._deadline.left()

    def __repr__(self) -> str:
        state = "open" if self._open else self._outcome.value if self._outcome else "ending"
        return f"<HalfTransaction {self._id} {state}>"

    def send(
        self,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> None:
        """Add one message, kept in memory until the end of the block. Raise `InvalidOption` if it can't be sent."""
        with self._in_turn("send"):
            self._connection.check_open()
            timestamp = check_place(partition, timestamp)
            most = self._connection.broker.limits.transaction_messages
            if most is not None and len(self._messages) >= most:
                raise errors.InvalidOption(f"a transaction has at most {most} messages on this broker")
            name, data, key_data, pairs = encode_message(topic, value, key, headers, self._connection.header_makers)
            size = len(data) if data is not None else None
            with self._connection.events.step("message.send", self._id, topic=name, partition=partition, bytes=size):
                self._messages.append(HalfMessage(name, data, key_data, pairs, partition, timestamp))

    def send_many(self, topic: str | Topic, items: Iterable[Any]) -> None:
        """Add many messages for one topic; each item is a value, (value, key) or (value, key, headers)."""
        for item in items:
            value, key, headers = split_item(item)
            self.send(topic, value, key=key, headers=headers)

    def __enter__(self) -> HalfTransaction:
        if not self._open:
            raise self._refusal("a block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._in_turn("the end of the block"):
            self._open = False
        try:
            if error is None:
                with self._connection.call():
                    self._finish()
        finally:
            if self._outcome is None:
                self._outcome = Outcome.ABORTED
        return isinstance(error, errors.Abort)

    def _finish(self) -> None:
        half = self._stored()
        try:
            decision = self._do_the_work()
            self._outcome = self._end(half, decision)
        except BaseException:
            self._outcome = Outcome.UNKNOWN  # a check-back will decide the outcome
            raise
        if decision is Decision.UNDECIDED or self._outcome is _WANTED[decision]:
            return
        answered = f"check answered {'ABORT' if decision is Decision.COMMIT else 'COMMIT'} before execute had ended"
        if decision is Decision.COMMIT:
            text = f"transaction {self._id} was aborted although its work is done: {answered}. Whatever answers ABORT"
            raise errors.TransactionAborted(text + " has to make sure that the work can no longer be done")
        raise errors.InvalidState(f"transaction {self._id} is committed although execute answered ABORT: {answered}")

    def _stored(self) -> Half | None:
        """Store the messages at the broker; return the stored half, None if there are no messages.

        Raise an error if it is not certain that they are stored: the local work must not be done then.
        """
        if self._deadline.expired:
            raise errors.TransactionTimedOut(f"transaction {self._id} lasted longer than {self._deadline.seconds:g} s")
        if not self._messages:
            return None
        deadline_at = self._began + self._deadline.seconds
        check_at = min(self._began + self._connection.timing.first_check, deadline_at)
        half = Half(self._group, self._id, self._messages, int(check_at * 1000), int(deadline_at * 1000))
        try:
            with self._connection.events.step("half.store", self._id, messages=len(self._messages)):
                return self._store.put(half, self._deadline)
        except BaseException as error:
            # The work is not done: `check` answers ABORT if the half is stored nevertheless, and dropping it fails.
            with suppress(errors.TxnBridgeError):
                self._store.end(half, Decision.ABORT, Deadline(min(END_SECONDS, self._deadline.left())))
            if isinstance(error, errors.OutcomeUnknown):
                text = f"the messages could not be stored, and nothing was done: {error}"
                raise errors.BrokerUnavailable(text) from error
            raise

    def _do_the_work(self) -> Decision:
        try:
            decision = self._execute(self, self._arg)
        except errors.Abort:
            return Decision.ABORT
        except BaseException as error:
            _log.warning(
                "execute raised %s in half-message transaction %s: check will decide it", type(error).__name__, self._id
            )
            raise
        check_decision("execute", decision)
        return decision

    def _end(self, half: Half | None, decision: Decision) -> Outcome:
        if half is None or decision is Decision.UNDECIDED:  # the broker needs no request: a check-back will follow
            return _WANTED[decision]
        deadline = self._deadline if self._deadline.left() > END_SECONDS else Deadline(END_SECONDS)
        try:
            return end_half(self._connection, self._store, half, decision, deadline)
        except (errors.EvidenceLost, RefusedHalf):
            raise
        except errors.TxnBridgeError as error:  # whatever it says of the call, the work is done
            raise errors.OutcomeUnknown(
                f"transaction {self._id} was decided ({decision.value}), and the broker may not know it yet: {error}."
                " check is asked, and ends it"
            ) from error

    @contextmanager
    def _in_turn(self, call: str) -> Iterator[None]:
        held: list[bool] = []
        try:
            if not Deadline(0).acquire(self._turn, held):
                raise errors.InvalidState(f"{call} on {self._id} while another call on it runs: one thread at a time")
            if not self._open:
                raise self._refusal(call)
            yield
        finally:
            if held:
                self._turn.release()

    def _refusal(self, call: str) -> errors.InvalidState:
        return errors.InvalidState(f"{call} needs an open transaction; the block of {self._id} has ended")


class HalfMessages(ConnectionUser):
    """Sends the half messages of one group, and answers check-backs about them while it is open.

    Use it in a `with` block, or call `close`; otherwise the bridge's `close` closes it.
    """

    def __init__(self, connection: Connection, group: str, execute: Execute, check: Check) -> None:
        if not callable(execute):
            raise errors.InvalidOption(f"execute= is called as f(txn, arg), not {type(execute).__name__}")
        self._connection = connection
        self._group = group
        self._execute = execute
        self._store = half_store(connection)
        # Transaction ids have the form that other transactions' ids have: the owner, the bridge and a number.
        self._name = f"half-{check_group(group)}-{random_name(8)}/{connection.name[-8:]}"
        self._numbers = iter(range(1, 1 << 62))
        with connection.call():
            self._store.ready(group, connection.deadline())
        self._resolver = Resolver(connection, group, check)
        self._resolver.start()

    def transaction(self, arg: Any = None, *, timeout: float | None = None) -> HalfTransaction:
        """Begin a transaction, for a `with` block. At the block's end `execute(txn, arg)` does the local work."""
        self._connection.check_open()
        timeout = self._connection.timeout if timeout is None else timeout
        check_seconds("timeout", timeout, above_0=True)
        id = f"{self._name}/{next(self._numbers)}"
        return HalfTransaction(self._connection, self._store, self._group, id, self._execute, arg, timeout)

    def close(self) -> None:
        """Stop answering check-backs. Undecided half messages wait for another process of the group."""
        self._resolver.close()

    def __enter__(self) -> HalfMessages:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
