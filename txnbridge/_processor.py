"""The loop that consumes, transforms and produces: input and output are one atom.

One pass is: poll, begin a transaction, call the handler, acknowledge in the transaction, commit. Whatever goes wrong,
the messages hold their place: the pass is repeated, or the loop stops with the error.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from txnbridge._connection import Connection
from txnbridge._consumer import RawConsumer, topic_list
from txnbridge._deadletters import dead_letter_headers, reason_of
from txnbridge._deadline import check_seconds
from txnbridge._messages import Batch, Message
from txnbridge._shutdown import Shutdown, StopNow
from txnbridge._topics import Topic, as_topic
from txnbridge._transaction import State, Transaction
from txnbridge.capabilities import Capability
from txnbridge.errors import (
    Abort,
    BrokerUnavailable,
    Conflict,
    DeadlineExceeded,
    EvidenceLost,
    Fenced,
    InvalidOption,
    InvalidState,
    OutcomeUnknown,
    Poison,
    PositionLost,
    TransactionAborted,
    TxnBridgeError,
    UsageError,
)

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

    from txnbridge._bridge import Bridge

_log = logging.getLogger("txnbridge")

# How long one poll waits for a first message: a stop is noticed after that at the latest, and four polls a second cost
# an idle process nothing that could be measured.
_POLL_SECONDS = 0.25
# How often the lag is looked up: it costs a request on some brokers, and nobody reads it more often.
_LAG_SECONDS = 1.0
# A pass may take longer than its transaction by what a poll and the end of the transaction add.
_SLACK_SECONDS = 5.0
# A member that gets no partition, on a broker that cannot say what the others have left to do, has nothing to wait for
# after this: longer than any broker waits by default for a member that died (Kafka's 45 s), whose partitions come here.
_NOTHING_SECONDS = 60.0

# Going on would be wrong, also where the handler raised them.
_FINAL = (Fenced, EvidenceLost, PositionLost)
# Outside the handler these pass by themselves; anything else there is a bug or a wrong setting.
_PASSING = (TransactionAborted, BrokerUnavailable, OutcomeUnknown)
# A codec that asks a registry raises these when it cannot; the message is as good as before.
_NOT_THE_MESSAGES_FAULT = (OSError, MemoryError, TxnBridgeError)

_PACKAGE = os.path.dirname(__file__) + os.sep

Each = Callable[[Message, Transaction], object]
OnBatch = Callable[[Batch, Transaction], object]


# Not dataclasses: those take longer to make than anything else here, at each `import txnbridge`.
class ProcessorStats(NamedTuple):
    """What a processor has done since it started.

    `messages` were acknowledged in `transactions` that committed, `dead_letters` of them as dead letters; `retries`
    counts the passes that failed. `last_error` is why the last one did: it holds no data of a message.
    """

    messages: int = 0
    transactions: int = 0
    dead_letters: int = 0
    retries: int = 0
    last_error: str | None = None


class _Items:
    """Messages of a batch: as they were read, as the handler gets them, and why those are poison that are.

    No object for each: those would double what garbage collections have to look at.
    """

    __slots__ = ("_poison", "messages", "raws")

    def __init__(self, raws: list[Message], messages: list[Message], poison: dict[int, Exception]) -> None:
        self.raws = raws
        self.messages = messages
        self._poison = poison  # may go on behind the last of these

    def __len__(self) -> int:
        return len(self.raws)

    def first(self, count: int) -> _Items:
        """The first of them; what is marked as poison there is marked here."""
        return self if count >= len(self) else _Items(self.raws[:count], self.messages[:count], self._poison)

    def behind(self, count: int) -> _Items:
        poison = {index - count: error for index, error in self._poison.items() if index >= count}
        return _Items(self.raws[count:], self.messages[count:], poison)

    def mark(self, index: int, error: Exception) -> None:
        self._poison[index] = error

    @property
    def poison(self) -> dict[int, Exception]:
        """Which are poison, by their place, in order."""
        return {index: self._poison[index] for index in sorted(self._poison) if index < len(self)}

    def good(self) -> list[int] | range:
        """The places of those that are not."""
        if not (poison := self.poison):
            return range(len(self))
        return [index for index in range(len(self)) if index not in poison]


class _PoisonFound(Exception):
    """Poison was found and marked; the transaction is aborted and the batch run again, now knowing it."""


class _PoisonHidden(Exception):
    """One of these messages is poison, and only smaller batches can tell which."""


class Processor:
    """Consumes, transforms and produces exactly once; made by `bridge.processor(inputs, group=…, each=… | batch=…)`.

    `each=f(message, txn)` or `batch=f(batch, txn)` is called inside a transaction. What it sends with `txn`, and the
    acknowledgement of what it was given, become visible together or not at all. It may run more than once for the same
    message: only what goes through `txn` happens once. It neither commits nor acknowledges.

    - `dead_letter`: the topic for poison: values that cannot be decoded, messages for which the handler raises
      `Poison`, and exceptions of the classes in `poison`. Without it the loop stops with the `Poison` error.
      `max_dead_letters_in_a_row` (None: no limit) poison messages with no good one between stop it as well.
    - `max_attempts`: after so many failed attempts of one and the same message, whatever the handler raised, it is set
      aside as poison is, or the loop stops with the error if there is no `dead_letter` (None: it is tried for ever).
      What a broker did is no attempt. `fatal`: exception classes of the handler that stop the loop at once.
    - `max_messages`, `max_wait`: a batch is as many messages, or what came within so many seconds after the first.
    - `timeout`: of each transaction; by default the bridge's.
    - `backoff`: the first and the longest wait, in seconds, before what failed is tried again; `retry_for`: after so
      many seconds of failing the loop stops with the error (None: it goes on trying).
    - `stop_timeout`: a stop lets the handler finish for so long; then its transaction is aborted.
    - `start`: where a group begins that has never read, as in `bridge.consumer`.

    Run it with `run()`, or as a block in a thread of its own. It runs once.

    Raises `InvalidOption` for settings that make no sense and for a handler that does not take two arguments or is
    asynchronous, `NotSupported` on a broker that cannot acknowledge in a transaction.
    """

    def __init__(
        self,
        bridge: Bridge,
        connection: Connection,
        inputs: str | Topic | Iterable[str | Topic],
        *,
        group: str,
        each: Each | None = None,
        batch: OnBatch | None = None,
        dead_letter: str | Topic | None = None,
        poison: type[Exception] | Sequence[type[Exception]] = (),
        fatal: type[Exception] | Sequence[type[Exception]] = (),
        max_attempts: int | None = None,
        max_messages: int = 500,
        max_wait: float = 0.0,
        timeout: float | None = None,
        stop_timeout: float = 30.0,
        max_dead_letters_in_a_row: int | None = 10,
        backoff: tuple[float, float] = (0.1, 30.0),
        retry_for: float | None = None,
        start: str | int = "earliest",
    ) -> None:
        if (each is None) == (batch is None) or not callable(each or batch):
            raise InvalidOption("a processor takes each=f(message, txn) or batch=f(batch, txn), one of them")
        _check_takes_two("each" if batch is None else "batch", each or batch)
        if not group:
            raise InvalidOption("a processor reads in a group: group= is a non-empty name")
        bridge.capabilities.require(Capability.ATOMIC_ACK)
        self._bridge = bridge
        self._connection = connection
        self._topics = topic_list(inputs)
        self._group = group
        self._each = each
        self._batch = batch
        self._dead_letter = None if dead_letter is None else as_topic(dead_letter).name
        self._poison = _poison_classes(poison)
        self._fatal = _exception_classes("fatal", fatal)
        self._max_attempts = max_attempts
        self._max_messages = max_messages
        self._max_wait = max_wait
        self._timeout = connection.timeout if timeout is None else timeout
        self._stop_timeout = stop_timeout
        self._most_in_a_row = max_dead_letters_in_a_row
        self._backoff = backoff
        self._retry_for = retry_for
        self._start = start
        self._check_settings()

        self._started = False
        self._consumer: RawConsumer | None = None
        self._transaction: Transaction | None = None  # the one that is open now
        self._blamed: BaseException | None = None  # the handler's last error, to tell it from the broker's
        self._final: BaseException | None = None  # the handler's error that it may not be run again after
        self._attempts: dict[tuple[Any, ...], int] = {}  # failed ones, of messages that are not done
        self._nothing_since: float | None = None  # it has had no partition
        self._in_a_row = 0  # dead letters since the last good message
        self._stats = ProcessorStats()
        self._failures = 0  # passes that failed since the last that did not
        self._lag: int | None = None
        self._lag_at = 0.0
        self._since: float | None = None  # when the first attempt of the current pass began; None while it does not run

        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # what ended the thread
        self._stop = Shutdown(stop_timeout, group, self._hurry, self._give_up)

    def _check_settings(self) -> None:
        first, most = self._backoff
        if not 0 < first <= most:
            raise InvalidOption("backoff= is two numbers of seconds: the first wait and the longest")
        check_seconds("timeout", self._timeout, above_0=True)
        check_seconds("stop_timeout", self._stop_timeout, above_0=True)
        check_seconds("max_wait", self._max_wait)
        if self._max_messages < 1:
            raise InvalidOption(f"max_messages must be at least 1, not {self._max_messages}")
        if self._most_in_a_row is not None and self._most_in_a_row < 0:
            raise InvalidOption("max_dead_letters_in_a_row must be at least 0, or None for no limit")
        if self._max_attempts is not None and (type(self._max_attempts) is not int or self._max_attempts < 1):
            raise InvalidOption("max_attempts must be a whole number from 1, or None to try for ever")
        if self._retry_for is not None:
            check_seconds("retry_for", self._retry_for)
        if self._dead_letter in {topic.name for topic in self._topics}:
            raise InvalidOption(f"{self._dead_letter!r} is an input; its dead letters need a topic of their own")

    # --- what can be read at any time, from any thread ------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether it runs, and gets on: no pass, with all its attempts, has taken longer than a transaction may."""
        since = self._since
        return since is not None and time.monotonic() - since <= self._timeout + self._max_wait + _SLACK_SECONDS

    @property
    def lag(self) -> int | None:
        """Messages (positions, on some brokers) left in its partitions, looked up about once a second while it runs.

        None while it has none, and until it has looked for the first time.
        """
        return self._lag

    @property
    def stats(self) -> ProcessorStats:
        """What it has done so far."""
        return self._stats

    def __repr__(self) -> str:
        return f"<Processor of {', '.join(t.name for t in self._topics)} in group {self._group!r}>"

    # --- running and stopping -------------------------------------------------------------------------------------

    def run(self, until_idle: bool = False) -> None:
        """Process until stopped, in this thread; with `until_idle=True` until every partition it holds is read.

        While it holds none, that means: until the group has nothing left to read, as far as this member can see.

        On the main thread SIGTERM and SIGINT stop it, and a second one aborts at once and raises `SystemExit`. A
        handler that is still busy when `stop_timeout` ends is interrupted there (on the main thread) or left behind
        with an aborted transaction, and `DeadlineExceeded` is raised.

        Raises the error that nothing but a person can mend: `Fenced`, `EvidenceLost`, `PositionLost`, `Poison` without
        `dead_letter=` or too often in a row, the handler's own after `retry_for` or `max_attempts` or of a class in
        `fatal`, a wrong setting.
        """
        self._begin()
        with self._stop.by_signals():
            self._loop_until_stopped(until_idle)

    def stop(self) -> None:
        """Ask it to stop after the transaction that is running. Returns at once; safe anywhere, also in a handler."""
        self._stop.ask()

    def __enter__(self) -> Processor:
        """Process in a thread of its own until the end of the block, which raises what ended the loop early."""
        self._begin()
        self._thread = threading.Thread(target=self._loop_in_thread, name=f"txnbridge {self._group}", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self.stop()
        self._thread.join(self._stop.left())
        failure = self._late() if self._thread.is_alive() else self._failure
        if failure is None:
            return
        if error is None:
            raise failure
        _log.error("%r ended with an error, and so did its block: %s", self, loggable(failure))

    def _begin(self) -> None:
        self._connection.check_open()
        if self._started:
            raise InvalidState(f"{self!r} runs once; make another with bridge.processor(…)")
        self._started = True
        self._consumer = RawConsumer.open(self._connection, self._topics, self._group, self._start)
        self._since = time.monotonic()

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self!r} did not end within {self._stop_timeout:g} s after the stop and was given up; what had not"
            " committed by then comes again"
        )

    def _loop_in_thread(self) -> None:
        try:
            self._loop_until_stopped(until_idle=False)
        except BaseException as error:
            self._failure = error

    def _loop_until_stopped(self, until_idle: bool) -> None:
        try:
            self._loop(until_idle)
        except StopNow:
            if self._stop.forced:
                raise self._late() from None
            assert self._stop.signalled is not None
            raise SystemExit(128 + self._stop.signalled) from None
        except Exception as error:
            if self._stop.forced:
                raise self._late() from error
            raise

    def _loop(self, until_idle: bool) -> None:
        with self._stop.watched():
            try:
                retrying = self._retrying()
                while not self._stop.asked and not retrying(self._pass, until_idle):
                    pass
            finally:
                self._since = None
                self._leave()

    def _leave(self) -> None:
        assert self._consumer is not None
        try:
            self._consumer.close(self._stop.left())
        except TxnBridgeError as error:
            # It leaves by itself when the broker misses it.
            _log.warning("%r could not leave its group: %s", self, error)

    # --- by force -------------------------------------------------------------------------------------------------

    def _hurry(self, at: float) -> None:
        """What the open transaction still asks of the broker ends in time, too."""
        if (transaction := self._transaction) is not None:
            transaction._end_by(at)

    def _give_up(self) -> None:
        """No thread can be interrupted by another one. Its transaction can be ended, and its partitions given back."""
        if (transaction := self._transaction) is not None:
            with suppress(TxnBridgeError):
                transaction.abort()
        self._leave()

    # --- again and again ------------------------------------------------------------------------------------------

    def _retrying(self) -> Retrying:
        import tenacity  # here, because it takes longer to import than all of txnbridge

        first, most = self._backoff
        growing = tenacity.wait_random_exponential(multiplier=first, max=most)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._passes_by_itself),
            wait=lambda state: 0.0 if _is_plain_abort(state) else growing(state),
            stop=tenacity.stop_never if self._retry_for is None else tenacity.stop_after_delay(self._retry_for),
            sleep=self._stop.sleep,
            before_sleep=self._note_failure,
            reraise=True,
        )

    def _passes_by_itself(self, error: BaseException) -> bool:
        if isinstance(error, _FINAL) or error is self._final:
            return False
        return error is self._blamed or isinstance(error, _PASSING)

    def _note_failure(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        assert error is not None
        self._count_failure(error)
        wait = state.upcoming_sleep
        _log.warning("%r: %s; again in %.1f s", self, self._told(error), wait)

    def _told(self, error: BaseException) -> str:
        """An error for logs: the handler's own with its place. Its text may quote the message: it is for debugging."""
        if error is not self._blamed:
            return loggable(error)
        _log.debug("the handler of %r failed", self, exc_info=error)
        return f"the handler failed: {handler_location(error)}"

    def _count_failure(self, error: BaseException) -> None:
        self._failures += 1
        self._stats = self._stats._replace(retries=self._stats.retries + 1, last_error=loggable(error))

    # --- one pass -------------------------------------------------------------------------------------------------

    def _pass(self, until_idle: bool) -> bool:
        """Poll once and process what came. True when everything is read and the caller wants no more."""
        if self._stop.asked:
            return True
        assert self._consumer is not None
        if not self._failures:
            self._since = time.monotonic()
        try:
            items = self._poll(self._consumer)
            self._process(items)
        except BaseException as error:
            if not self._stop.forced:
                self._consumer.take_back()
            if self._stop.asked and not self._stop.forced and self._passes_by_itself(error):
                self._count_failure(error)
                _log.warning("%r: %s; stopped: what was not committed comes again", self, self._told(error))
                return True
            if error is self._final:
                _log.error("%r: %s; it stops", self, self._told(error))
            raise
        self._failures = 0
        self._blamed = None
        # While batches are full there is more to come, and to ask for the lag takes a request.
        idle = until_idle and len(items) < self._max_messages
        self._look_at_lag(self._consumer, now=idle)
        return idle and self._is_all_read(self._consumer)

    def _is_all_read(self, consumer: RawConsumer) -> bool:
        """Whether nothing is left in its partitions; if it has none, in those of the group."""
        if self._lag is not None:
            self._nothing_since = None
            return self._lag == 0
        left = consumer.group_lag(self._timeout)
        if left is not None:
            return left == 0
        now = time.monotonic()
        self._nothing_since = self._nothing_since or now
        return now - self._nothing_since >= _NOTHING_SECONDS

    def _poll(self, consumer: RawConsumer) -> _Items:
        """A batch by size and time, in the order of each partition."""
        messages = consumer.take(self._max_messages, _POLL_SECONDS)
        until = time.monotonic() + self._max_wait
        while messages and len(messages) < self._max_messages and not self._stop.asked:
            left = until - time.monotonic()
            if left <= 0:
                break
            messages += consumer.take(self._max_messages - len(messages), min(left, _POLL_SECONDS))
        # A partition may have left during a later poll; what it had delivered comes again where it is now.
        here = [message for message in messages if not message.source.ended]
        items = _Items(here, here, {})
        if consumer.decodes:
            items.messages = [self._decode(consumer, items, index) for index in range(len(here))]
        return items

    def _decode(self, consumer: RawConsumer, items: _Items, index: int) -> Message:
        raw = items.raws[index]
        try:
            return consumer.decode(raw)
        except Poison as poison:
            cause = poison.__cause__
            if isinstance(cause, _NOT_THE_MESSAGES_FAULT):
                self._blamed = cause
                raise cause from None
            items.mark(index, poison)
            return raw

    def _look_at_lag(self, consumer: RawConsumer, now: bool) -> None:
        if now or time.monotonic() - self._lag_at >= _LAG_SECONDS:
            lag = consumer.lag()
            self._lag = sum(lag.values()) if lag else None
            self._lag_at = time.monotonic()

    def _process(self, items: _Items) -> None:
        """All of it, in order: in one transaction, in smaller ones to find hidden poison or to keep within time."""
        while items and not self._stop.asked:
            try:
                items = items.behind(self._transact(items))
                continue
            except _PoisonFound:
                continue
            except _PoisonHidden:
                middle = len(items) // 2
            self._process(items.first(middle))
            items = items.behind(middle)

    def _transact(self, items: _Items) -> int:
        """One transaction; returns how many messages, from the first on, are done with it."""
        items = self._up_to_fatal_poison(items)
        in_a_row = 0
        self._since = time.monotonic()
        try:
            with self._bridge.transaction(timeout=self._timeout) as txn:
                self._transaction = txn
                txn._lent = True
                done = self._handle(items, txn)
                txn._lent = False
                self._check_after_handler(txn)
                if txn.state is State.OPEN:  # else the block's end says what failed
                    in_a_row = self._set_aside(done, txn)
                    txn.ack(done.raws)
                    txn.commit()
        finally:
            self._transaction = None
        self._in_a_row = in_a_row
        self._count(done)
        return len(done)

    def _handle(self, items: _Items, txn: Transaction) -> _Items:
        try:
            if self._batch is not None:
                self._handle_batch(self._batch, items, txn)
                return items
            assert self._each is not None
            return self._handle_each(self._each, items, txn)
        except Abort as error:
            raise TransactionAborted("the handler gave its transaction up (Abort)") from error

    def _handle_each(self, each: Each, items: _Items, txn: Transaction) -> _Items:
        """Message by message. After poison the rest is tried too, in vain, so that one abort finds all of it."""
        half_time = time.monotonic() + txn.deadline / 2
        known = items.poison
        found = False
        done = 0
        for index, message in enumerate(items.messages):
            done += 1
            if index not in known:
                try:
                    each(message, txn)
                except Exception as error:
                    self._blame_unless_poison(error, txn, (message,))
                    items.mark(index, error)
                    found = True
            if found and txn.state is not State.OPEN:  # it takes nothing more, so nothing more can be tried
                break
            # Slow handlers get smaller transactions rather than one that cannot be in time.
            if self._stop.asked or time.monotonic() > half_time:
                break
        if found:
            raise _PoisonFound
        return items.first(done)

    def _handle_batch(self, batch: OnBatch, items: _Items, txn: Transaction) -> None:
        good = items.good()
        if not good:
            return
        try:
            batch(Batch(list(map(items.messages.__getitem__, good))), txn)
        except Exception as error:
            self._blame_unless_poison(error, txn, [items.raws[index] for index in good])
            culprit = _named_by(error, items, good)
            if culprit is None:
                raise _PoisonHidden from error
            items.mark(culprit, error)
            raise _PoisonFound from error

    def _blame_unless_poison(self, error: Exception, txn: Transaction, tried: Sequence[Message]) -> None:
        """In an `except`: raise on, as the handler's own error, what is not poison. `tried` is what it was given."""
        _require_unended(txn)
        if isinstance(error, self._fatal):
            self._final = error
        elif not _is_brokers_doing(error, txn):
            if self._is_poison(error):
                return
            if not isinstance(error, Abort) and self._is_last_attempt(tried):
                if self._dead_letter is not None:
                    return
                self._final = error
        self._blamed = error
        raise error

    def _is_last_attempt(self, tried: Sequence[Message]) -> bool:
        """Count a failed attempt of each; whether one of them has had as many as it may."""
        if self._max_attempts is None:
            return False
        for message in tried:
            self._attempts[message[:3]] = self._attempts.get(message[:3], 0) + 1
        return any(self._attempts[message[:3]] >= self._max_attempts for message in tried)

    def _is_poison(self, error: Exception) -> bool:
        """Only what is declared."""
        # A refused call (too large, no such topic) may as well be a wrong setting, which would empty the input into
        # the dead letters; so only a class of these counts that is named as such.
        if isinstance(error, UsageError):
            return isinstance(error, tuple(c for c in self._poison if issubclass(c, UsageError)))
        return isinstance(error, (Poison, *self._poison))

    def _check_after_handler(self, txn: Transaction) -> None:
        if self._stop.forced:
            raise StopNow  # the handler swallowed it, or did not notice
        _require_unended(txn)
        if txn.outcome is not None:
            raise InvalidState(
                f"the handler ended transaction {txn.id} itself ({txn.state.value}); leave that to the processor, or"
                " raise txnbridge.Abort to have the messages again"
            )

    # --- poison ---------------------------------------------------------------------------------------------------

    def _up_to_fatal_poison(self, items: _Items) -> _Items:
        """Without a dead-letter topic: what comes before the first poison is done first, then the loop stops there."""
        if self._dead_letter is not None:
            return items
        for index, poison in items.poison.items():
            if index:
                return items.first(index)
            raise self._stopped_by(items.raws[0], poison, "and there is no dead_letter= topic to set it aside in")
        return items

    def _set_aside(self, items: _Items, txn: Transaction) -> int:
        """Send what is poison to the dead letters; returns how many of them the batch ends with in a row.

        The limit is looked at here, before the commit: with the one that exceeds it nothing of the batch is done.
        """
        in_a_row = self._in_a_row
        behind = 0  # the last one that was poison
        for index, poison in items.poison.items():
            in_a_row = in_a_row + 1 if index == behind else 1
            behind = index + 1
            raw = items.raws[index]
            if self._most_in_a_row is not None and in_a_row > self._most_in_a_row:
                raise self._stopped_by(
                    raw, poison, f"and so were the {in_a_row - 1} before it: more than max_dead_letters_in_a_row"
                )
            assert self._dead_letter is not None
            txn.send(
                self._dead_letter,
                raw.value,
                key=raw.key,
                headers=dead_letter_headers(raw, self._group, poison, attempts=self._failures + 1),
            )
        return in_a_row if behind == len(items) else 0

    def _stopped_by(self, raw: Message, poison: Exception, why: str) -> Poison:
        error = Poison(
            f"{raw!r} is poison ({loggable(poison)}), {why}; it holds its place in group {self._group!r}", message=raw
        )
        error.__cause__ = poison
        return error

    def _count(self, done: _Items) -> None:
        dead = done.poison
        if self._attempts:
            for raw in done.raws:
                self._attempts.pop(raw[:3], None)
        for index, poison in dead.items():
            _log.warning("%r in group %r: dead letter, %s", done.raws[index], self._group, loggable(poison))
        self._stats = self._stats._replace(
            messages=self._stats.messages + len(done),
            transactions=self._stats.transactions + 1,
            dead_letters=self._stats.dead_letters + len(dead),
        )


def _require_unended(txn: Transaction) -> None:
    """A handler that tried to commit is wrong for good: running it again would not help."""
    if isinstance(txn._cause, InvalidState):
        raise txn._cause


def loggable(error: BaseException | None) -> str:
    """An error for logs: the text of ours, which never holds data, but of others only the class."""
    if isinstance(error, TxnBridgeError | Poison):
        return reason_of(error)
    return type(error).__name__


def handler_location(error: BaseException) -> str:
    """An error, and the innermost line of the handler's file that it comes from, whatever library that line called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    theirs = [frame for frame in frames[ours[-1] + 1 if ours else 0 :] if not frame.filename.startswith(_PACKAGE)]
    place = next((f for f in reversed(theirs) if f.filename == theirs[0].filename), frames[-1] if frames else None)
    return loggable(error) if place is None else f"{loggable(error)} at {place.filename}:{place.lineno}"


def _is_plain_abort(state: RetryCallState) -> bool:
    """Aborted for the first time, by nobody who might be at it still: worth trying again at once."""
    assert state.outcome is not None
    error = state.outcome.exception()
    return state.attempt_number == 1 and isinstance(error, TransactionAborted) and not isinstance(error, Conflict)


def _check_takes_two(setting: str, handler: Any) -> None:
    """Raise `InvalidOption` for a handler that cannot be called with what it is for, and the transaction."""
    called = handler if inspect.isroutine(handler) or isinstance(handler, functools.partial) else type(handler).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
        raise InvalidOption(
            f"{setting}= is a plain function: an `async def` or a generator would be called and never run. Inside a"
            " plain one, asyncio.run(…) runs what is asynchronous"
        )
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        what = "message" if setting == "each" else "batch"
        raise InvalidOption(f"{setting}= is called as f({what}, txn), which this one does not take: {error}") from None


def _exception_classes(setting: str, given: type[Exception] | Sequence[type[Exception]]) -> tuple[type[Exception], ...]:
    classes = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in classes):
        raise InvalidOption(f"{setting}= takes exception classes")
    return classes


def _poison_classes(given: type[Exception] | Sequence[type[Exception]]) -> tuple[type[Exception], ...]:
    classes = _exception_classes("poison", given)
    for kind in classes:
        if issubclass(kind, TxnBridgeError) and not issubclass(kind, UsageError):
            raise InvalidOption(f"{kind.__name__} is a broker's error, which is never the message's fault: not poison")
    return classes


def _is_brokers_doing(error: Exception, txn: Transaction) -> bool:
    """Whether a broker, and not the message, is behind it, whatever the handler made of it."""
    failed = txn.state is not State.OPEN and not isinstance(txn._cause, UsageError)
    return failed or any(_is_brokers(e) for e in _chain(error))


def _is_brokers(error: BaseException) -> bool:
    return isinstance(error, TxnBridgeError) and not isinstance(error, UsageError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _named_by(error: Exception, items: _Items, good: Sequence[int]) -> int | None:
    """The place of what a batch handler's error names as its `message`, or of the only one that there is."""
    if len(good) == 1:
        return good[0]
    named = error.message if isinstance(error, Poison) else None
    if not isinstance(named, Message):
        return None
    return next((index for index in good if items.raws[index][:3] == named[:3]), None)
