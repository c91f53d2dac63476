"""`Transaction`: the sends, acknowledgements, commit and abort of one transaction of messages."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from txnbridge import errors
from txnbridge._base.connection import Connection, ConnectionUser, never_ran
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Message, as_messages, check_place, encode_key, split_item
from txnbridge._base.token import Outcome, State, Token
from txnbridge._base.topic import Topic, as_topic, check_topic_name, encode_message
from txnbridge._read.deliveries import Deliveries, hold
from txnbridge._write.token_operations import Outcomes
from txnbridge._write.writers import KeptMessage, TakenWriter
from txnbridge.spi import Raw, RawHeaders

_log = logging.getLogger("txnbridge")

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Module constants, because `send` runs millions of times and an enum's attribute is slow to look up.
_OPEN = State.OPEN
_OUTCOMES = {State.COMMITTED: Outcome.COMMITTED, State.ABORTED: Outcome.ABORTED, State.UNKNOWN: Outcome.UNKNOWN}
_UNFINISHED = {State.OPEN, State.FAILED}
# A revoked partition whose messages the transaction holds waits for the transaction's running call to end, and checks
# at this interval. Most calls take microseconds.
_TURN_SECONDS = 0.001


def _one_call(
    call: str,
) -> Callable[
    [Callable[Concatenate[Transaction, _Parameters], _Result]], Callable[Concatenate[Transaction, _Parameters], _Result]
]:
    """Decorate a method that is a call on a transaction: it is refused while another call runs.

    The transaction fails with any error of the method, except one that says that the call itself is wrong.
    """

    def decorate(
        method: Callable[Concatenate[Transaction, _Parameters], _Result],
    ) -> Callable[Concatenate[Transaction, _Parameters], _Result]:
        @wraps(method)
        def run(self: Transaction, /, *arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            held: list[Any] = []
            try:
                if not self._take_turn(held):
                    raise self._busy(call)
                result = method(self, *arguments, **named)  # with `return` here, a signal could come before `finally`
            except errors.UsageError:
                raise
            except BaseException as error:
                if not never_ran(error):
                    self._fail(error)
                raise
            finally:
                self._turn.extend(held)
            return result

        return run

    return decorate


class Transaction(ConnectionUser):
    """Sends and acknowledgements that take effect together or not at all.

    The end of a `with` block commits the transaction (or prepares it, with `prepare=True`); an exception in the block
    aborts it, and `raise Abort` aborts it without an exception outside the block. `commit()` and `abort()` inside the
    block are final. Only one thread at a time may use a transaction.
    """

    __slots__ = (
        "__weakref__",
        "_began_at",
        "_begin",
        "_cause",
        "_events",
        "_feeder",
        "_fingerprint",
        "_holds",
        "_in_span",
        "_is_ending",
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
        self._connection = connection
        self._outcomes = outcomes
        self._taken = taken
        self._writer = writer = taken.interface
        self._begin = begin = taken.parameters
        self._prepare = begin.prepare
        self._events = connection.events
        self._state = State.OPEN
        self._token: Token | None = None
        self._cause: BaseException | None = None  # the error because of which the state is FAILED
        self._holds: dict[Deliveries, object] = {}  # each with its consumer, so that it is not garbage-collected
        self._in_span = False  # whether a consumer waits for the outcome once it is prepared
        self._shut = False  # whether it was aborted because the bridge was closed
        self._lent = False  # True while a handler of a processor has it: the handler may not commit it
        self._is_ending = False  # whether a thread is about to end it, which `Bridge.close` then leaves to the thread
        self._feeder: int | None = None  # id of the thread whose `send_many` is running the program's generator
        self._fingerprint = fingerprint
        # The time of `time.monotonic` at the begin; None if no listener wants the event of the end, or has got it.
        self._began_at = time.monotonic() if self._events.wants("transaction.end") else None
        self._write = writer.send
        # An event listener, a header maker or a fingerprint needs the slow path for each message.
        self._slow = self._events.wants("message.send") or bool(connection.header_makers) or fingerprint is not None
        # The list is a lock: a call on the transaction removes its only entry and puts it back at the call's end. A
        # real lock takes twice the time, which is a sixth of the time for sending a small message.
        self._turn = [None if self._slow else writer.quick]

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The transaction's id, unique for ever. Events, log lines and the doctor's lists contain it."""
        return self._begin.transaction

    @property
    def state(self) -> State:
        return self._state

    @property
    def outcome(self) -> Outcome | None:
        """The transaction's outcome; None before its end, and while it is prepared."""
        return _OUTCOMES.get(self._state)

    @property
    def deadline(self) -> float:
        """The seconds until the transaction's deadline."""
        return self._begin.deadline.left()

    @property
    def token(self) -> Token | None:
        """The token of a prepared transaction, or of one whose outcome is unknown; None otherwise."""
        return self._token

    def __repr__(self) -> str:
        return f"<Transaction {self.id} {self._state.value}>"

    @property
    def _has_writer(self) -> bool:
        """Whether the transaction has a writer of its own at the broker; else its calls may wait for one."""
        return self._taken.writer is not None

    # --- sending --------------------------------------------------------------------------------------------------

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
        """Add one message to the transaction. Wait while the broker is slow, but not beyond the transaction's deadline.

        `timestamp` is in milliseconds since 1970, or a datetime with a time zone; the default is now.

        Raise `NotFound` if the topic does not exist, `InvalidOption` for a message that cannot be sent: the transaction
        stays usable. After any other error it can only be aborted.
        """
        turn = self._turn
        try:
            quick = turn.pop()
        except BaseException as error:
            raise self._not_sent(error) from None
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
                    timestamp = check_place(partition, timestamp)
                self._write(topic, value, key, None, partition, timestamp)
        except errors.UsageError:
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
        timestamp: int | datetime | None,
    ) -> None:
        timestamp = check_place(partition, timestamp)
        name, data, key_data, pairs = encode_message(topic, value, key, headers, self._connection.header_makers)
        size = len(data) if data is not None else None
        with self._events.step("message.send", self.id, topic=name, partition=partition, bytes=size):
            self._write(name, data, key_data, pairs or None, partition, timestamp)
        if self._fingerprint is not None:
            self._fingerprint = (self._fingerprint + _hash(key_data, data)) & 0xFFFF_FFFF_FFFF_FFFF

    @_one_call("send")
    def _send_encoded(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders, partition: int | None, timestamp: int | None
    ) -> None:
        """Add a message that was encoded before, as `send` does; plug-ins have added their headers to it already."""
        if self._state is not _OPEN:
            raise self._refusal("send")
        self._write(topic, value, key, headers or None, partition, timestamp)

    def _send_from_loop(
        self,
        topic: str | Topic,
        value: Any,
        key: Any,
        headers: Any,
        partition: int | None,
        timestamp: int | datetime | None,
    ) -> bool:
        """Add one message as `send` does if that needs memory only, and return True; otherwise do nothing.

        An event loop may call this: it runs no codec and no plug-in, takes no lock, and sends no request.
        """
        plain = headers is None and topic.__class__ is str and (value.__class__ is bytes or value is None)
        if self._slow or not plain:
            return False
        try:
            quick = self._turn.pop()
        except IndexError:
            return False
        try:
            if self._state is not _OPEN:
                return False
            assert isinstance(topic, str)
            check_topic_name(topic)
            timestamp = check_place(partition, timestamp)
            return self._taken.keep(KeptMessage(topic, value, encode_key(key), None, partition, timestamp))
        finally:
            self._turn.append(quick)

    @_one_call("send_many")
    def send_many(self, topic: str | Topic, items: Iterable[Any]) -> None:
        """Add many messages for one topic; each item is a value, (value, key) or (value, key, headers).

        This is faster than a `send` for each message. A generator is read only as fast as the broker takes its items.

        Raise the errors of `send`, with the number of the item. After any error the transaction can only be aborted,
        because the items before the failing one were taken already.
        """
        if self._state is not _OPEN:
            raise self._refusal("send_many")
        if topic.__class__ is str:
            check_topic_name(topic)
        else:
            topic = as_topic(topic)
        self._feeder = threading.get_ident()
        try:
            self._send_all(topic, items)
        finally:
            self._feeder = None
        if self._state is not _OPEN:  # the transaction failed while the caller's generator ran
            assert self._cause is not None
            raise self._cause

    def _send_all(self, topic: str | Topic, items: Iterable[Any]) -> None:
        before = self._writer.messages
        try:
            makers, name = self._connection.header_makers, topic.name if isinstance(topic, Topic) else topic
            if self._events.wants("message.send") or self._fingerprint is not None:
                for item in items:
                    value, key, headers = split_item(item)
                    self._send_slowly(topic, value, key, headers, None, None)
            elif makers or (isinstance(topic, Topic) and not topic.plain):
                target = as_topic(topic)
                self._writer.send_many(name, (_encode_item(target, item, makers) for item in items))
            else:
                self._writer.send_many(name, items)
        except BaseException as error:
            if isinstance(error, errors.UsageError):
                error.args = (f"item {self._writer.messages - before} of send_many (counted from 0): {error}",)
            self._fail(error)
            raise

    # --- acknowledging --------------------------------------------------------------------------------------------

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Acknowledge one message or a batch as part of this transaction: the ack takes effect with its commit.

        Raise `InvalidState` for a message that was not delivered to a consumer of this bridge, that was acknowledged
        already, or that is out of order on a broker that only knows positions; `Conflict` if the message's partition
        was taken from the consumer since.
        """
        self._acknowledge(as_messages("ack", messages), up_to=False)

    def ack_up_to(self, message: Message) -> None:
        """Acknowledge all delivered messages of the message's partition up to and including this message."""
        if not isinstance(message, Message):
            raise errors.InvalidOption("ack_up_to takes one message that was read")
        self._acknowledge((message,), up_to=True)

    @_one_call("ack")
    def _acknowledge(self, messages: tuple[Message, ...], up_to: bool) -> None:
        if self._state is not _OPEN:
            raise self._refusal("ack")
        if not messages:
            return
        with self._events.step("ack", self.id, messages=len(messages)):
            for context, positions in hold(self, self._connection, messages, up_to):
                self._writer.ack(context, positions)

    @_one_call("store")
    def _store(self) -> None:
        """Wait until the messages are stored, where the broker may refuse one only then."""
        try:
            self._writer.store(self._begin.deadline)
        except BaseException as error:
            self._fail(error)
            raise

    # --- ending ---------------------------------------------------------------------------------------------------

    @_one_call("commit")
    def commit(self) -> None:
        """Commit the transaction now; return only after the broker has confirmed the commit.

        Raise `TransactionAborted` (or a subclass) if it was aborted, `Fenced` if a newer owner has opened the
        transactional id, or `OutcomeUnknown` with the token by which to ask for the outcome later.
        """
        if self._lent:
            refused = errors.InvalidState(
                f"the handler ended transaction {self.id} itself: it does not commit, its processor does, with the"
                " acknowledgement; raise txnbridge.Abort to have the messages redelivered"
            )
            self._fail(refused)  # the transaction fails even if the handler catches the error
            raise refused
        if self._prepare:
            raise errors.InvalidState("a transaction with prepare=True is committed by its token: bridge.commit(token)")
        if self._state is not State.OPEN:
            raise self._refusal("commit")
        self._end_by_asking(self._commit)

    def _commit_from_loop(self, on_end: Callable[[], object]) -> bool:
        """Begin a commit that needs no thread of the caller; return False if `commit` has to be called in a thread.

        Another thread calls `on_end()` at the commit's end. Then `commit`, or the end of the block, completes the call;
        if `_taken.is_committed`, that needs memory only.
        """
        plain = self._state is _OPEN and not (self._events.wants("commit") or self._prepare or self._lent)
        return plain and bool(self._turn) and self._taken.join_from_loop(on_end)

    @_one_call("abort")
    def abort(self) -> None:
        """Abort the transaction now. A failed transaction allows only this call. A second abort has no effect."""
        if self._state is State.ABORTED:
            return
        if self._state not in _UNFINISHED:
            raise self._refusal("abort", "open or failed")
        self._end_by_asking(self._abort)

    def __enter__(self) -> Transaction:
        if self._in_span:  # prepared before the first part, it would be left to its hold by a death
            raise errors.InvalidState(f"transaction {self.id} takes no block of its own: its span ends it")
        if self._state is not State.OPEN:
            raise self._refusal("a block")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            self._end_block(error)
        except BaseException as failure:
            if error is None or not self._connection.forked:  # in a forked child, `sys.exit` ends the program
                if self._state in _UNFINISHED:  # the broker got no request, so this block has to abort the transaction
                    self._end_block(failure)
                raise
        return isinstance(error, errors.Abort)

    @_one_call("the end of the block")
    def _end_block(self, error: BaseException | None) -> None:
        if self._state in _UNFINISHED:
            if error is None:
                self._finish()
            else:
                self._abort_after(error)
        elif self._shut and self._state is State.ABORTED and error is None:
            self._connection.check_process()
            raise errors.TransactionAborted(f"transaction {self.id} was aborted: its bridge was closed meanwhile")

    def _finish(self) -> None:
        """Commit or prepare at the end of a block without an exception; abort and raise if the transaction failed."""
        if self._state is State.FAILED:
            cause = self._cause
            self._end_by_asking(self._abort)
            if isinstance(cause, errors.TransactionAborted | errors.Fenced):
                raise cause
            text = f"transaction {self.id} was aborted because part of it failed ({self._why_failed()})"
            raise errors.TransactionAborted(text) from cause
        self._end_by_asking(self._do_prepare if self._prepare else self._commit)

    def _abort_after(self, error: BaseException) -> None:
        """Abort because of an exception. An error of the abort is logged; it is raised only after `Abort`."""
        try:
            self._end_by_asking(self._abort)
        except Exception as failure:
            if isinstance(error, errors.Abort):
                raise
            _log.warning("transaction %s: abort failed after %s: %s", self.id, type(error).__name__, failure)

    def _end_by_asking(self, ask: Callable[[], None]) -> None:
        """Call `ask`, which requests a commit, abort or prepare from the broker.

        If an exception interrupts the request, for example one from a signal handler, end the transaction with an
        unknown outcome, because the broker may have received the request.
        """
        asked_at = time.monotonic() if self._began_at is not None else 0.0
        try:
            ask()
        except BaseException:
            if self._state in (State.COMMITTING, State.ABORTING):  # a signal handler's exception, or a bug
                self._end_interrupted()
            elif self._state not in _UNFINISHED:
                self._end(self._state)
            raise
        finally:
            if self._began_at is not None and self._state not in _UNFINISHED:
                self._tell_end(asked_at)

    def _tell_end(self, asked_at: float) -> None:
        """Emit the event of the transaction's end, once; its end was requested at the monotonic time `asked_at`."""
        now, began_at = time.monotonic(), self._began_at
        assert began_at is not None
        self._began_at = None
        times = {"seconds": now - began_at, "end_seconds": now - asked_at}
        self._events.emit("transaction.end", "after", self.id, state=self._state.value, **times)

    def _commit(self) -> None:
        self._taken.open = False
        self._state = State.COMMITTING
        try:
            with self._commit_step():
                self._taken.commit(self._begin.deadline)
        except (errors.TransactionAborted, errors.Fenced):
            self._end(State.ABORTED)
            raise
        except errors.OutcomeUnknown as error:
            self._settle(error)
        except errors.TxnBridgeError as error:
            # The commit was not requested. The transaction can only be aborted, by the block's end or the caller.
            self._state = State.OPEN
            self._taken.open = True
            self._fail(error)
            raise
        else:
            self._end(State.COMMITTED)

    def _commit_step(self) -> AbstractContextManager[object]:
        """Return the context manager that emits the events before and after the commit."""
        return self._events.step("commit", self.id)

    def _settle(self, error: errors.OutcomeUnknown) -> None:
        """Ask the broker for the outcome after a commit without an answer, until the transaction's deadline.

        Raise `TransactionAborted` if it was aborted, `OutcomeUnknown` if the outcome is still unknown.
        """
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
            raise errors.TransactionAborted(f"transaction {self.id} was aborted; its answer was lost first") from error
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
        except (errors.TransactionAborted, errors.Fenced):
            pass  # the transaction is aborted, as wanted
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
            if isinstance(error, errors.TransactionAborted | errors.Fenced):
                self._end(State.ABORTED)
            else:
                self._abort_after(error)
            raise
        self._end(State.PREPARED)

    def _end_interrupted(self) -> None:
        state = self._taken.state_after_interrupt()
        if state is State.UNKNOWN:  # the request may have been sent
            self._end_unknown()
        else:
            self._end(state)

    def _end_unknown(self) -> None:
        self._token = self._taken.token or self._outcomes.token_of(self._writer, self.id, prepared=False)
        self._end(State.UNKNOWN)

    def _end(self, state: State) -> None:
        """Set the final state, return the writer to the pool, and release the held messages.

        Safe to repeat, because a signal handler's exception may interrupt it at any point.
        """
        self._state = state
        self._taken.give_back(sound=state is not State.UNKNOWN)
        waits = self._in_span and state is State.PREPARED
        for deliveries in self._holds:
            deliveries.end(self, State.UNKNOWN if waits else state, self._token)
        if state is not State.UNKNOWN and not waits:
            self._holds.clear()

    def _found(self, outcome: Outcome) -> None:
        """Note the outcome of this part of a transaction over several brokers: its consumer need not ask for it."""
        for deliveries in self._holds:
            deliveries.found(self.id, outcome)
        self._holds.clear()

    # --- guards ---------------------------------------------------------------------------------------------------

    def _take_turn(self, held: list[Any]) -> bool:
        """Take the right to call the transaction from `_turn` into `held`; return False if another call has it.

        A signal handler's exception may come behind any call, but not inside this move, which is one call for Python.
        So call this in a `try` whose `finally` moves the entry back.
        """
        with suppress(IndexError):
            held.extend(map(self._turn.pop, (-1,)))
        return bool(held)

    def _not_sent(self, error: BaseException) -> BaseException:
        """Return the error of a `send` that found another call at work, or that a signal handler interrupted."""
        if isinstance(error, IndexError):
            return self._busy("send")
        self._turn[:] = [None if self._slow else self._writer.quick]
        self._fail(error)
        return error

    def _busy(self, call: str) -> errors.TxnBridgeError:
        self._connection.check_process()
        if self._connection.closed:
            return errors.InvalidState(f"{call} on transaction {self.id}, whose bridge is closed")
        text = f"{call} on transaction {self.id} while another call on it runs: one thread at a time"
        return errors.InvalidState(text)

    def _refusal(self, call: str, needed: str = "open") -> errors.TxnBridgeError:
        self._connection.check_process()
        text = f"{call} needs an {needed} transaction; {self.id} is {self._state.value}"
        if self._state is State.FAILED:
            text += f" ({self._why_failed()}); abort it and run it again"
        if self._shut:
            text += ": its bridge was closed meanwhile"
        return errors.InvalidState(text)

    def _why_failed(self) -> str:
        """Return why the transaction failed; foreign errors without their text, which may contain message data."""
        kind = type(self._cause).__name__
        return f"{kind}: {self._cause}" if isinstance(self._cause, errors.TxnBridgeError) else kind

    def _fail(self, error: BaseException) -> None:
        if self._state is State.OPEN:
            self._state = State.FAILED
            self._cause = error

    def _fail_from_outside(self, error: errors.Conflict, patience: float) -> None:
        """Fail the transaction because a partition whose messages it holds is revoked; then it can only be aborted.

        First wait up to `patience` seconds for a running call on the transaction, unless that call is on this thread (a
        `send_many` whose generator polls), because waiting for it would never end.
        """
        if self._feeder == threading.get_ident():
            self._fail(error)
            return
        until = time.monotonic() + patience
        held: list[Any] = []
        try:
            while not self._take_turn(held):
                if time.monotonic() >= until:
                    break  # a commit that runs goes on: `_fail` changes an open transaction only
                time.sleep(_TURN_SECONDS)
            self._fail(error)
        finally:
            self._turn.extend(held)

    def _end_from_outside(self, deadline: Deadline) -> bool:
        """Abort because the bridge is being closed, unless a call on the transaction is running, or about to end it.

        Return whether the transaction was aborted.
        """
        held: list[Any] = []
        try:
            if self._is_ending or not self._take_turn(held) or self._state not in _UNFINISHED:
                return False
            self._shut = True
            self._end_by(deadline.at)
            self._end_by_asking(self._abort)
            return True
        finally:
            self._turn.extend(held)

    def _end_by(self, at: float) -> None:
        """Move the transaction's deadline to the time `at` if that is earlier; waiting calls notice the change."""
        self._begin.deadline.shorten(at)

    def _refuse_calls(self) -> None:
        """Make every later call raise an error, in the child of a fork; `send` needs no check of its own for that."""
        self._turn.clear()

    def __del__(self) -> None:
        if getattr(self, "_state", None) in _UNFINISHED and not self._connection.forked:
            # `Writers` aborts the transaction later, because garbage collection may run while locks are held.
            text = f"transaction {self.id} was left unfinished; it will be aborted"
            warnings.warn(text, ResourceWarning, stacklevel=2)


def _encode_item(topic: Topic, item: Any, makers: Sequence[Any]) -> Any:
    _, value, key, pairs = encode_message(topic, *split_item(item), makers)
    return value, key, pairs or None


def _hash(key: bytes | None, value: bytes | None) -> int:
    """Return the number that a message adds to the fingerprint, whose value does not depend on the messages' order."""
    import xxhash

    seed = 0 if key is None else xxhash.xxh3_64_intdigest(key) | 1
    return xxhash.xxh3_64_intdigest(b"" if value is None else value, seed=seed)
