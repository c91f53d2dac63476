"""One transaction: sends, acknowledgements, and the end of its block."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from txnbridge._connection import Connection, ConnectionUser
from txnbridge._deadline import Deadline
from txnbridge._deliveries import Deliveries, hold
from txnbridge._messages import (
    Headers,
    Message,
    as_messages,
    check_place,
    encode_headers,
    encode_key,
    split_item,
)
from txnbridge._outcomes import Outcomes
from txnbridge._state import State
from txnbridge._token import Outcome, Token
from txnbridge._topics import Topic, as_topic, check_topic_name, encode_message
from txnbridge._writers import TakenWriter
from txnbridge.errors import (
    Abort,
    Conflict,
    Fenced,
    InvalidOption,
    InvalidState,
    OutcomeUnknown,
    TransactionAborted,
    TxnBridgeError,
    UsageError,
)

_log = logging.getLogger("txnbridge")


# Module constants, because `send` runs millions of times and an enum's attribute is slow to look up.
_OPEN = State.OPEN
_OUTCOMES = {
    State.COMMITTED: Outcome.COMMITTED,
    State.ABORTED: Outcome.ABORTED,
    State.UNKNOWN: Outcome.UNKNOWN,
}
_UNFINISHED = {State.OPEN, State.FAILED}
# How often a partition that leaves looks whether a running call on its transaction has ended; most calls take
# microseconds.
_TURN_SECONDS = 0.001


class Transaction(ConnectionUser):
    """Sends and acknowledgements that take effect together or not at all.

    As a block it commits at its end (or prepares, with `prepare=True`) and aborts on an exception; `raise Abort` leaves
    it quietly. `commit()` and `abort()` inside the block are final. One thread uses it at a time.
    """

    __slots__ = (
        "__weakref__",
        "_begin",
        "_cause",
        "_events",
        "_feeder",
        "_fingerprint",
        "_holds",
        "_lent",
        "_outcomes",
        "_prepare",
        "_shut",
        "_slow",
        "_state",
        "_taken",
        "_token",
        "_turn",
        "_write",
        "_writer",
    )

    def __init__(self, connection: Connection, taken: TakenWriter, outcomes: Outcomes, fingerprint: int | None) -> None:
        assert taken.writer is not None
        self._connection = connection
        self._outcomes = outcomes
        self._taken = taken
        self._writer = writer = taken.writer
        self._begin = begin = taken.begin
        self._prepare = begin.prepare
        self._events = connection.events
        self._state = State.OPEN
        self._token: Token | None = None
        self._cause: BaseException | None = None  # why it is FAILED
        self._holds: dict[Deliveries, object] = {}  # with their consumers, to keep those alive
        self._shut = False  # aborted because the bridge was closed
        self._lent = False  # while a handler of a processor has it, which may not commit it
        self._feeder: int | None = None  # the thread in whose `send_many` the program's generator runs
        self._fingerprint = fingerprint
        self._write = writer.send
        # A listener, a header maker or a fingerprint needs the slow path for each message.
        self._slow = bool(connection.events) or bool(connection.header_makers) or fingerprint is not None
        # A call on the transaction takes the only entry and puts it back. A lock does the same and costs twice as
        # much, which is a sixth of sending a small message.
        self._turn = [None if self._slow else writer.quick]

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The transaction's id, unique for ever. Events, logs and the doctor's lists name it."""
        return self._begin.transaction

    @property
    def state(self) -> State:
        return self._state

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; None until it has ended."""
        return _OUTCOMES.get(self._state)

    @property
    def deadline(self) -> float:
        """The seconds until its deadline."""
        return self._begin.deadline.left()

    @property
    def token(self) -> Token | None:
        """The token of a prepared transaction, or of one whose outcome is unknown; None otherwise."""
        return self._token

    def __repr__(self) -> str:
        return f"<Transaction {self.id} {self._state.value}>"

    # --- sending --------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str | Topic,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Add one message. It waits while the broker is slow, never beyond the transaction's deadline.

        Raise `NotFound` and `InvalidOption` for a message that cannot be sent: the transaction stays usable. After any
        other error only abort is left.
        """
        turn = self._turn
        try:
            quick = turn.pop()
        except IndexError:
            raise self._busy("send") from None
        try:
            if self._state is not _OPEN:
                raise self._refusal("send")
            if (
                quick is not None
                and headers is None
                and value.__class__ is bytes
                and partition is None
                and timestamp is None
                and (key is None or key.__class__ is bytes)
            ):
                try:
                    quick[topic](topic, value, key)
                    self._writer.messages += 1
                    return
                except self._writer.not_taken:
                    pass
            if (
                self._slow
                or headers is not None
                or topic.__class__ is not str
                or (value.__class__ is not bytes and value is not None)
            ):
                self._send_slowly(topic, value, key, headers, partition, timestamp)
            else:
                check_topic_name(topic)
                if key is not None and key.__class__ is not bytes:
                    key = encode_key(key)
                if partition is not None or timestamp is not None:
                    check_place(partition, timestamp)
                self._write(topic, value, key, None, partition, timestamp)
        except UsageError:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            turn.append(quick)

    def _send_slowly(
        self,
        topic: str | Topic,
        value: Any,
        key: Any,
        headers: Any,
        partition: int | None,
        timestamp: int | None,
    ) -> None:
        check_place(partition, timestamp)
        name, data, key_data, pairs = encode_message(topic, value, key, headers, self._connection.header_makers)
        size = len(data) if data is not None else None
        with self._events.step("message.send", self.id, topic=name, partition=partition, bytes=size):
            self._write(name, data, key_data, pairs or None, partition, timestamp)
        if self._fingerprint is not None:
            self._fingerprint = (self._fingerprint + _hash(key_data, data)) & 0xFFFF_FFFF_FFFF_FFFF

    def send_many(self, topic: str | Topic, items: Iterable[Any]) -> None:
        """Add many messages to one topic: values, (value, key) or (value, key, headers).

        This is the fast way for many messages. A generator is read only as fast as the broker takes its items.

        Raise as `send` does, with the number of the item. Then only abort is left, because the items before it were
        taken already.
        """
        quick = self._enter("send_many")
        try:
            if self._state is not _OPEN:
                raise self._refusal("send_many")
            if topic.__class__ is str:
                check_topic_name(topic)
            else:
                topic = as_topic(topic)
            self._feeder = threading.get_ident()
            self._send_all(topic, items)
            if self._state is not _OPEN:  # it failed from inside the caller's generator
                assert self._cause is not None
                raise self._cause
        finally:
            self._feeder = None
            self._turn.append(quick)

    def _send_all(self, topic: str | Topic, items: Iterable[Any]) -> None:
        before = self._writer.messages
        try:
            if self._slow:
                for item in items:
                    value, key, headers = split_item(item)
                    self._send_slowly(topic, value, key, headers, None, None)
            elif isinstance(topic, Topic) and not topic.plain:
                self._writer.send_many(topic.name, (_encode_item(topic, item) for item in items))
            else:
                self._writer.send_many(topic.name if isinstance(topic, Topic) else topic, items)
        except BaseException as error:
            if isinstance(error, UsageError):
                error.args = (f"item {self._writer.messages - before} of send_many (counted from 0): {error}",)
            self._fail(error)
            raise

    # --- acknowledging --------------------------------------------------------------------------------------------

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Acknowledge a message, or all of a batch, with this transaction.

        Raise `InvalidState` for a message that was not delivered to a consumer of this bridge, that was acknowledged
        already, or that is out of order on a broker that only knows positions; `Conflict` if its assignment has ended.
        """
        self._acknowledge(as_messages("ack", messages), up_to=False)

    def ack_up_to(self, message: Message) -> None:
        """Acknowledge all delivered messages of a partition up to and with this message."""
        if not isinstance(message, Message):
            raise InvalidOption("ack_up_to takes one message that was read")
        self._acknowledge((message,), up_to=True)

    def _acknowledge(self, messages: tuple[Message, ...], up_to: bool) -> None:
        quick = self._enter("ack")
        try:
            if self._state is not _OPEN:
                raise self._refusal("ack")
            if not messages:
                return
            try:
                with self._events.step("ack", self.id, messages=len(messages)):
                    for context, positions in hold(self, self._connection, messages, up_to):
                        self._writer.ack(context, positions)
            except UsageError:
                raise
            except BaseException as error:
                self._fail(error)
                raise
        finally:
            self._turn.append(quick)

    # --- ending ---------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit now; return only after the broker has said "committed".

        Raise `TransactionAborted` (or a subclass), `Fenced`, or `OutcomeUnknown` with the token by which to ask later.
        """
        quick = self._enter("commit")
        try:
            if self._prepare:
                raise InvalidState("a transaction with prepare=True is committed by its token: bridge.commit(token)")
            if self._lent:
                refused = InvalidState(
                    f"the handler ended transaction {self.id} itself: it does not commit, its processor does, with the"
                    " acknowledgement; raise txnbridge.Abort to have the messages again"
                )
                self._fail(refused)  # also if the handler catches the error
                raise refused
            if self._state is not State.OPEN:
                raise self._refusal("commit")
            self._end_by_asking(self._commit)
        finally:
            self._turn.append(quick)

    def abort(self) -> None:
        """Abort now. A failed transaction allows only this call. Aborting twice changes nothing."""
        quick = self._enter("abort")
        try:
            if self._state is State.ABORTED:
                return
            if self._state not in _UNFINISHED:
                raise self._refusal("abort", "open or failed")
            self._end_by_asking(self._abort)
        finally:
            self._turn.append(quick)

    def __enter__(self) -> Transaction:
        if self._state is not State.OPEN:
            raise self._refusal("a block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        quiet = isinstance(error, Abort)
        turn = self._enter("the end of the block")
        try:
            if self._state in _UNFINISHED:
                if error is None:
                    self._finish_or_abort()
                else:
                    self._abort_after(error, quiet)
            elif self._shut and error is None:
                self._connection.check_process()
                raise TransactionAborted(f"transaction {self.id} was aborted: its bridge was closed meanwhile")
        finally:
            self._turn.append(turn)
        return quiet

    def _finish_or_abort(self) -> None:
        try:
            self._finish()
        except BaseException as error:
            if self._state in _UNFINISHED:  # the broker was not asked, so this block has to end the transaction
                self._abort_after(error, quiet=False)
            raise

    def _finish(self) -> None:
        """End a block without an exception."""
        if self._state is State.FAILED:
            cause = self._cause
            self._end_by_asking(self._abort)
            if isinstance(cause, TransactionAborted | Fenced):
                raise cause
            raise TransactionAborted(
                f"transaction {self.id} was aborted because part of it failed ({self._why_failed()})"
            ) from cause
        self._end_by_asking(self._do_prepare if self._prepare else self._commit)

    def _abort_after(self, error: BaseException, quiet: bool) -> None:
        """Abort because of an exception in the block; a failing abort does not hide that exception."""
        try:
            self._end_by_asking(self._abort)
        except Exception as failure:
            if quiet:
                raise
            _log.warning("transaction %s: abort failed after %s: %s", self.id, type(error).__name__, failure)

    def _end_by_asking(self, ask: Callable[[], None]) -> None:
        """Ask the broker, and end the transaction also if an exception from a signal handler interrupts that."""
        try:
            ask()
        except BaseException:
            if self._state in (State.COMMITTING, State.ABORTING):
                self._end_unknown()  # an interrupt, or a bug: the request may have been sent
            elif self._state not in _UNFINISHED:
                self._end(self._state)
            raise

    def _commit(self) -> None:
        self._taken.open = False
        self._state = State.COMMITTING
        try:
            with self._events.step("commit", self.id):
                self._taken.commit(self._begin.deadline)
        except (TransactionAborted, Fenced):
            self._end(State.ABORTED)
            raise
        except OutcomeUnknown as error:
            self._settle(error)
        except TxnBridgeError as error:
            # This call decided nothing, so only abort is left: the block's end or the caller aborts.
            self._state = State.OPEN
            self._taken.open = True
            self._fail(error)
            raise
        else:
            self._end(State.COMMITTED)

    def _settle(self, error: OutcomeUnknown) -> None:
        """Ask the broker for the outcome in the remaining time, before the program gets `OutcomeUnknown`."""
        self._end_unknown()
        if error.permanent:
            error.token = str(self._token)
            raise error
        deadline = self._begin.deadline
        outcome = None if deadline.expired else self._outcomes.resolve(self._token, deadline)
        if outcome is Outcome.COMMITTED:
            self._end(State.COMMITTED)
        elif outcome is Outcome.ABORTED:
            self._end(State.ABORTED)
            raise TransactionAborted(f"transaction {self.id} was aborted; its answer was lost first") from error
        else:
            raise type(error)(
                f"no answer to the end of transaction {self.id}: {error}. Ask later with its token",
                token=str(self._token),
            ) from (error.__cause__ or error)

    def _abort(self) -> None:
        self._taken.open = False
        self._state = State.ABORTING
        try:
            with self._events.step("abort", self.id):
                self._writer.abort(self._begin.deadline)
        except (TransactionAborted, Fenced):
            pass  # the transaction did not happen, as wanted
        self._end(State.ABORTED)

    def _do_prepare(self) -> None:
        try:
            with self._events.step("prepare", self.id) as found:
                self._writer.prepare(self._begin.deadline)
                self._token = self._outcomes.token_of(
                    self._writer, self.id, prepared=True, fingerprint=self._fingerprint
                )
                found["expires_at"] = self._token.expires_at
        except BaseException as error:
            self._token = None
            if isinstance(error, TransactionAborted | Fenced):
                self._end(State.ABORTED)
            else:
                self._abort_after(error, quiet=False)
            raise
        self._end(State.PREPARED)

    def _end_unknown(self) -> None:
        self._token = self._outcomes.token_of(self._writer, self.id, prepared=False)
        self._end(State.UNKNOWN)

    def _end(self, state: State) -> None:
        """Give back the writer and the held messages. Safe to repeat: it may be interrupted at any point."""
        self._state = state
        self._taken.give_back(sound=state is not State.UNKNOWN)
        for deliveries in self._holds:
            deliveries.end(self, state, self._token)
        if state is not State.UNKNOWN:
            self._holds.clear()

    # --- guards ---------------------------------------------------------------------------------------------------

    def _enter(self, call: str) -> Any:
        """Take the turn for a call, which puts it back at its end: one call at a time."""
        try:
            return self._turn.pop()
        except IndexError:
            raise self._busy(call) from None

    def _busy(self, call: str) -> TxnBridgeError:
        self._connection.check_process()
        if self._connection.closed:
            return InvalidState(f"{call} on transaction {self.id}, whose bridge is closed")
        return InvalidState(f"{call} on transaction {self.id} while another call on it runs: one thread at a time")

    def _refusal(self, call: str, needed: str = "open") -> TxnBridgeError:
        self._connection.check_process()
        text = f"{call} needs an {needed} transaction; {self.id} is {self._state.value}"
        if self._state is State.FAILED:
            text += f" ({self._why_failed()}); abort it and run it again"
        if self._shut:
            text += ": its bridge was closed meanwhile"
        return InvalidState(text)

    def _why_failed(self) -> str:
        """Return the cause of the failure, with the text only of our own errors: others may quote a message."""
        kind = type(self._cause).__name__
        return f"{kind}: {self._cause}" if isinstance(self._cause, TxnBridgeError) else kind

    def _fail(self, error: BaseException) -> None:
        if self._state is State.OPEN:
            self._state = State.FAILED
            self._cause = error

    def _fail_from_outside(self, error: Conflict, patience: float) -> None:
        """Allow only abort, because a partition with held messages is leaving; first wait for a running call.

        It does not wait for a call on this very thread, which would wait for ever: a `send_many` whose generator polls.
        """
        if self._feeder == threading.get_ident():
            self._fail(error)
            return
        until = time.monotonic() + patience
        while True:
            try:
                quick = self._enter("fail")
                try:
                    self._fail(error)
                finally:
                    self._turn.append(quick)
                return
            except InvalidState:
                if time.monotonic() >= until:
                    return
            time.sleep(_TURN_SECONDS)

    def _end_from_outside(self, deadline: Deadline) -> bool:
        """Abort, because the bridge is closed, unless a call runs; return whether the transaction was aborted."""
        try:
            quick = self._enter("close")
        except InvalidState:
            return False
        try:
            if self._state not in _UNFINISHED:
                return False
            self._shut = True
            self._end_by(deadline.at)
            self._end_by_asking(self._abort)
            return True
        finally:
            self._turn.append(quick)

    def _end_by(self, at: float) -> None:
        """Move the deadline to this point in time, if that is earlier; waiting calls notice it."""
        self._begin.deadline.shorten(at)

    def _refuse_calls(self) -> None:
        """Refuse every call, in the child of a fork; this costs `send` nothing."""
        self._turn.clear()

    def __del__(self) -> None:
        if getattr(self, "_state", None) in _UNFINISHED and not self._connection.forked:
            # `Writers` aborts it later: garbage is collected at any time, also while locks are held.
            warnings.warn(
                f"transaction {self.id} was left unfinished; it will be aborted",
                ResourceWarning,
                stacklevel=2,
            )


def _encode_item(topic: Topic, item: Any) -> Any:
    value, key, headers = split_item(item)
    pairs = None if headers is None else encode_headers(headers)
    return topic.encode_value(value, Headers(pairs or ())), topic.encode_key(key), pairs


def _hash(key: bytes | None, value: bytes | None) -> int:
    """Return a message's part of the fingerprint; the sum of the parts does not depend on the order."""
    import xxhash

    seed = 0 if key is None else xxhash.xxh3_64_intdigest(key) | 1
    return xxhash.xxh3_64_intdigest(b"" if value is None else value, seed=seed)
