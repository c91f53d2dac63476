"""`Processor`: a loop that consumes, transforms and produces messages, input and output in one transaction.

One pass of the loop is: poll, begin a transaction, call the handler, acknowledge in the transaction, commit. If a pass
fails, the group's positions do not change: the pass is repeated, or the loop stops with the error
(`_process.failure_policy`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

from txnbridge import errors
from txnbridge._base.connection import ConnectionUser, close_logging_errors
from txnbridge._base.deadline import check_seconds
from txnbridge._base.messages import Batch, Message
from txnbridge._base.plugins import plugins
from txnbridge._base.service_stop import Shutdown, StopNow, leaving_seconds
from txnbridge._base.token import State
from txnbridge._base.topic import Topic, as_topic
from txnbridge._process.dead_letters import DeadLetters
from txnbridge._process.failure_policy import (
    ExceptionClasses,
    FailurePolicy,
    HandlerTooSlow,
    refuses_message,
    require_not_ended,
)
from txnbridge._process.handler import call_inside, handler_location, loggable
from txnbridge._process.input_topics import InputTopics
from txnbridge._process.inputs import ProcessorInputs
from txnbridge._process.pass_transaction import CommitRefused, PassTransaction
from txnbridge._process.polled_batch import PolledBatch
from txnbridge._process.retries import Retries, WaitsBehind, is_follower, is_note
from txnbridge._process.side_by_side import SideBySide, check_side_by_side
from txnbridge._process.waiting_keys import WaitingKeys
from txnbridge._read.consumer import topic_list
from txnbridge._read.open_consumers import Consumers
from txnbridge.capabilities import Capability

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from txnbridge.sql import Outbox
    from txnbridge.sql.processing import DatabaseTransactions

_log = logging.getLogger("txnbridge")

# The time that one poll waits for a first message. A stop takes effect after it at the latest, and four polls per
# second cost an idle process no measurable time.
_POLL_SECONDS = 0.25
# The interval between two measurements of the lag; on some brokers each needs a request.
_LAG_SECONDS = 1.0
# The deadline of this measurement: an idle processor asks the broker nothing else, and a stop waits for the answer.
_LAG_DEADLINE = 3.0

# With a `Transaction`, or with `db=` a `Connection` of SQLAlchemy.
Each = Callable[[Message, Any], object]
OnBatch = Callable[[Batch, Any], object]


# Not a dataclass: creating a dataclass would take most of this module's import time.
class ProcessorStats(NamedTuple):
    """Counts of a processor's work since it started.

    `messages` is the number of acknowledged messages, `dead_letters` of them as dead letters; `transactions` counts
    commits, `retries` failed attempts to poll and process a batch, which are repeated in place. `last_error` is the
    error of the last of these as text, without data of messages. `delayed` of the messages were sent to a retry topic,
    which does not count in `retries`; each counts again when it has come from there.
    """

    messages: int = 0
    transactions: int = 0
    dead_letters: int = 0
    retries: int = 0
    last_error: str | None = None
    delayed: int = 0


class _TimeToPoll(Exception):
    """Raised to poll before the rest of a slow batch: some brokers expel a group's member that polls too rarely."""


class _FailedBehind(Exception):
    """Raised if the handler failed for the message at `index` after others succeeded: these are committed first."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Found(Exception):
    """Raised after messages were marked as poison or delayed: aborts the transaction, to repeat it without them."""


class _Hidden(Exception):
    """Raised if it is not known which message of a batch failed: the batch is then processed in halves to find it."""


class HandlerSettings(TypedDict, total=False):
    """The settings of a `Processor` that belong to its handler; see there for their meaning and defaults."""

    dead_letter: str | Topic | None
    poison: ExceptionClasses
    fatal: ExceptionClasses
    max_attempts: int | None
    retry: Sequence[float] | None
    keep_order: bool
    max_messages: int
    max_wait: float
    timeout: float | None
    max_dead_letters_in_a_row: int | None
    concurrency: int
    order: str
    backoff: tuple[float, float]
    retry_for: float | None
    start: str | int | datetime
    db: str | Engine | None
    outbox: Outbox | None


class ProcessorSettings(HandlerSettings, total=False):
    """The settings of `Bridge.processor`."""

    stop_timeout: float


class Processor(ConnectionUser):
    """Consumes, transforms and produces exactly once; made by `bridge.processor(inputs, group=…, each=… | batch=…)`.

    The handler, `each=f(message, txn)` or `batch=f(batch, txn)`, is called inside a transaction. The messages that it
    sends with `txn`, and the acknowledgement of its input, take effect together or not at all. The handler may run more
    than once for the same message, and only its sends with `txn` take effect once. It must neither commit nor
    acknowledge.

    - `inputs`: topics, also as patterns: `orders-*` is all topics whose names fit, and those that come later, which are
      found within half a minute and read from their begin.
    - `dead_letter`: the topic for poison: messages that cannot be decoded, or for which the handler raises `Poison` or
      an exception of a class in `poison`. Without this topic, poison stops the loop with the `Poison` error. More than
      `max_dead_letters_in_a_row` consecutive poison messages stop the loop, too (None: no limit).
    - `max_attempts`: a message for which the handler has failed so often, with whatever error, is treated as poison
      (None: no limit). Errors of the broker do not count as attempts. `fatal`: exception classes of the handler that
      stop the loop at once.
    - `retry`: a list of delays in seconds. A message for which the handler has failed `max_attempts` times (1 by
      default) is sent to a retry topic, in the transaction that acknowledges it, and is processed again after the
      first delay; after each further failure it waits for the next one. Only after the last delay it is treated as
      poison. Messages behind it overtake it. With `keep_order` those of its partition with its key wait with it.
    - `max_messages`, `max_wait`: the largest size of a batch, and the seconds after its first message to wait for more.
    - `timeout`: the timeout of each transaction; by default the bridge's.
    - `concurrency`: how many messages of a poll are handled at once, each in a thread. What they send is sent in the
      order of the messages. `order`: "key" handles the messages of one key one after another, "partition" those of one
      partition, "none" as they come. Not with `batch` or `db`.
    - `backoff`: the first and the longest wait, in seconds, before a failed poll or batch is tried again;
      `retry_for`: after so many seconds in which each attempt failed and nothing was committed, the loop stops with the
      error (None: no limit).
    - `stop_timeout`: after a stop the handler has so many seconds to finish; then its transaction is aborted.
    - `start`: where a group begins that has never read, as in `bridge.consumer`.
    - `db`: a database (an `Engine` of SQLAlchemy, or a URL). The transactions are then the database's: the handler gets
      a `Connection` instead of `txn`, and what it writes there takes effect once. `outbox`: an `Outbox` in the same
      database, through which dead letters and messages for retry topics are sent.

    Run a processor with `run()`, or in a thread of its own with a `with` block. It runs only once.

    Raise `InvalidOption` for invalid settings and for a handler that does not take two arguments or is asynchronous,
    `NotSupported` on a broker that cannot acknowledge in a transaction.
    """

    def __init__(
        self,
        consumers: Consumers,
        begin: Callable[..., PassTransaction],
        inputs: str | Topic | Iterable[str | Topic],
        *,
        group: str,
        each: Each | None = None,
        batch: OnBatch | None = None,
        dead_letter: str | Topic | None = None,
        poison: ExceptionClasses = (),
        fatal: ExceptionClasses = (),
        max_attempts: int | None = None,
        retry: Sequence[float] | None = None,
        keep_order: bool = False,
        max_messages: int = 500,
        max_wait: float = 0.0,
        timeout: float | None = None,
        stop_timeout: float = 30.0,
        max_dead_letters_in_a_row: int | None = 10,
        concurrency: int = 1,
        order: str = "key",
        backoff: tuple[float, float] = (0.1, 30.0),
        retry_for: float | None = None,
        start: str | int | datetime = "earliest",
        db: str | Engine | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        if (each is None) == (batch is None) or not callable(each or batch):
            raise errors.InvalidOption("a processor takes each=f(message, txn) or batch=f(batch, txn), one of them")
        _check_takes_two("each" if batch is None else "batch", each or batch)
        if not group:
            raise errors.InvalidOption("a processor reads in a group: group= is a non-empty name")
        connection = consumers.connection
        connection.capabilities.require(Capability.ATOMIC_ACK)
        self._consumers = consumers
        self._begin_transaction: Callable[..., PassTransaction] = begin
        self._connection = connection
        self._topics = topic_list(inputs)
        self._group = group
        self._each, self._batch = each, batch
        self._observe_handler()
        self._database: DatabaseTransactions | None = None
        dead_topic = None if dead_letter is None else as_topic(dead_letter).name
        self._dead_letters = DeadLetters(dead_topic, group, max_dead_letters_in_a_row, self._attempts_at)
        self._retries = Retries(retry, group)
        self._input_topics = InputTopics(self._topics, [dead_topic or "", *self._retries.topics])
        self._waiting_keys = WaitingKeys(consumers, self._retries.topics, begin) if keep_order else None
        if retry is not None and max_attempts is None:
            max_attempts = 1
        self._policy = FailurePolicy(poison, fatal, max_attempts)
        if type(max_messages) is not int or max_messages < 1:
            raise errors.InvalidOption(f"max_messages is a whole number from 1, not {max_messages!r}")
        self._max_messages = min(max_messages, connection.timing.unacked_messages)
        self._max_wait = max_wait
        self._timeout = connection.timeout if timeout is None else timeout
        self._stop_timeout = stop_timeout
        self._backoff = backoff
        self._retry_for = retry_for
        self._start = start
        self._check_settings()
        check_side_by_side(concurrency, order, plain=batch is None and db is None)
        many = self._each if concurrency > 1 else None
        self._side_by_side = many and SideBySide(many, concurrency, order, group)
        if keep_order and retry is None:
            raise errors.InvalidOption("keep_order=True is for retry=")
        if keep_order and db is not None:
            raise errors.NotSupported("keep_order=True is not for db=: a relay sends what waits for a retry, later")
        if db is not None and self._input_topics.patterns:
            raise errors.NotSupported("a pattern of topics is not for db=: name the topics")
        if db is not None:
            self._use_database(db, outbox)
        elif outbox is not None:
            raise errors.InvalidOption("outbox= is for the dead letters and the retries of a processor with db=")

        self._sent_to_wait: dict[int, tuple[str, float]] = {}  # by the pass, by index: the retry topics, when due
        self._started = False
        self._inputs: ProcessorInputs | None = None
        self._transaction: PassTransaction | None = None  # the open transaction of the current pass
        self._stats = ProcessorStats()
        self._failures = 0  # the number of failed passes since the last successful one
        self._poll_by = 0.0  # when the rest of a batch is left to the next poll, by `time.monotonic`
        self._lag: int | None = None
        self._lag_at = 0.0
        self._failed: Message | None = None  # the message for which the handler has failed last, if it is known
        self._called_at: float | None = None  # when the handler was called; None between two calls
        self._asked_at: float | None = None  # when the broker was asked for the lag; None once it has answered
        self._since: float | None = None  # begin of the attempts since the last success; None while it does not run
        self._is_over: Callable[[bool], bool] = bool  # by whether a pass was idle and all is read: ends the loop

        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # the error that ended the loop in its thread
        self._stop = Shutdown(stop_timeout, group, self._hurry, self._give_up)
        connection.processors.add(self)
        self._names = {"group": group, "topics": ",".join(topic.name for topic in self._topics)}
        self._add(messages=0, transactions=0, dead_letters=0, delayed=0, retries=0)

    def _observe_handler(self) -> None:
        """Have the handler called inside the context managers of plug-ins, if there are any."""
        makers, group, each, batch = plugins.context_makers(), self._group, self._each, self._batch
        if makers and each is not None:
            self._each = lambda message, txn: call_inside(makers, (message,), group, each, message, txn)
        elif makers and batch is not None:
            self._batch = lambda messages, txn: call_inside(makers, messages, group, batch, messages, txn)

    def _check_settings(self) -> None:
        match self._backoff:
            case (int() | float() as first, int() | float() as most) if 0 < first <= most:
                pass
            case _:
                raise errors.InvalidOption("backoff= is two numbers of seconds: the first wait and the longest")
        check_seconds("timeout", self._timeout, above_0=True)
        check_seconds("stop_timeout", self._stop_timeout, above_0=True)
        check_seconds("max_wait", self._max_wait)
        if self._retry_for is not None:
            check_seconds("retry_for", self._retry_for)
        if self._dead_letters.topic in {topic.name for topic in self._topics}:
            raise errors.InvalidOption(f"{self._dead_letters.topic!r} is an input: dead letters need another topic")
        for topic in self._retries.topics:
            if topic == self._dead_letters.topic or topic in {topic.name for topic in self._topics}:
                raise errors.InvalidOption(
                    f"{topic!r} is a retry topic of group {self._group!r}: it can be neither an input nor take the dead"
                    " letters"
                )

    def _use_database(self, db: str | Engine, outbox: Outbox | None) -> None:
        if outbox is None and (self._dead_letters.topic is not None or self._retries.topics):
            raise errors.InvalidOption("with db=, dead letters and messages for a retry use a relay: set outbox=")
        from txnbridge.sql.processing import DatabaseTransactions

        names = [*(topic.name for topic in self._topics), *self._retries.topics]
        begin = self._begin_transaction
        database = DatabaseTransactions(self._connection, begin, names, self._group, db, outbox)
        self._begin_transaction = database.begin
        self._each = self._each and database.lend(self._each)
        self._batch = self._batch and database.lend(self._batch)
        self._database = database

    # --- state, readable from any thread --------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """True while the loop runs, its batch takes no longer than a transaction may, and the broker answers."""
        since, asked, now = self._since, self._asked_at, time.monotonic()
        longest = self._timeout + self._max_wait + self._connection.timing.pass_slack
        return since is not None and now - since <= longest and (asked is None or now - asked <= self._timeout)

    @property
    def _call_seconds(self) -> float:
        """For how long the handler has been in its present call; 0 between two calls."""
        return 0.0 if (at := self._called_at) is None else time.monotonic() - at

    @property
    def lag(self) -> int | None:
        """The number of unread messages (positions, on some brokers) in the assigned partitions.

        It is measured about once a second; None before the first measurement and while no partition is assigned.
        """
        return self._lag

    @property
    def stats(self) -> ProcessorStats:
        """Counts of the processor's work so far."""
        return self._stats

    def __repr__(self) -> str:
        return f"<Processor of {', '.join(t.name for t in self._topics)} in group {self._group!r}>"

    # --- running and stopping -------------------------------------------------------------------------------------

    def run(self, until_idle: bool = False) -> None:
        """Process messages on this thread until stopped; with `until_idle=True` until all assigned partitions are read.

        With `until_idle`, and while no partition is assigned, it runs until the group has nothing left to read, as far
        as the broker reports it.

        On the main thread SIGTERM and SIGINT stop the loop, and a second signal aborts at once and raises `SystemExit`.
        If the handler is still running after `stop_timeout`, it is interrupted (on the main thread) or its transaction
        is aborted while it runs on, and `DeadlineExceeded` is raised.

        Raise errors that a retry cannot solve: `Fenced`, `EvidenceLost`, `PositionLost`; `Poison` without
        `dead_letter=` or too often in a row, also for a message that has had its `max_attempts`; the handler's error
        after `retry_for` or of a class in `fatal`; an error by a wrong setting.
        """
        self._begin()
        with self._stop.by_signals():
            self._loop_until_stopped(until_idle)

    def stop(self) -> None:
        """Ask the loop to stop after the running transaction. Return at once; any thread or handler may call this."""
        self._stop.ask()

    def __enter__(self) -> Processor:
        """Run the loop in a thread of its own until the end of the block, which raises the loop's error, if any."""
        self._begin()
        self._thread = threading.Thread(target=self._loop_in_thread, name=f"txnbridge {self._group}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._leave()
            raise
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
            raise errors.InvalidState(f"{self!r} runs once; make another with bridge.processor(…)")
        self._started = True
        with ExitStack() as unless_opened:
            if self._database is not None:
                unless_opened.callback(self._database.close)
                self._database.open()
            elif self._dead_letters.topic is not None:  # with a database a relay sends them, perhaps to another broker
                use = f"the dead letters of group {self._group!r} go to"
                self._connection.require_topic(self._dead_letters.topic, use)
            self._input_topics.look(self._connection, now=True)
            self._inputs = self._join(self._start)
            unless_opened.pop_all()
        self._retries.warn_of_unread_topics(self._connection)
        self._since = time.monotonic()

    def _join(self, start: str | int | datetime) -> ProcessorInputs:
        """Join the group, without a topic that a pattern has found if it was deleted meanwhile."""
        while True:
            topics = self._input_topics.now
            try:
                return ProcessorInputs(self._consumers, self._input_topics, self._retries.topics, self._group, start)
            except errors.NotFound:
                self._input_topics.look(self._connection, now=True)
                if self._input_topics.now is topics:
                    raise

    def _late(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"{self!r} did not end within {self._stop_timeout:g} s after the stop and was abandoned; messages"
            " that were not committed by then will be redelivered"
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
            if self._since is not None:  # no thread could be started that watches over a stop
                self._leave()
            if self._stop.forced:
                raise self._late() from error
            raise

    def _loop(self, until_idle: bool) -> None:
        with self._stop.watched():
            try:
                retrying = self._policy.retrying(self._backoff, self._retry_for, self._stop.sleep, self._note_failure)
                while not self._stop.asked and not retrying(self._pass, until_idle):
                    pass
            finally:
                self._since = None
                self._leave()

    def _leave(self) -> None:
        assert self._inputs is not None
        try:
            try:
                if self._database is not None and not self._stop.forced:
                    left = self._stop.left()
                    self._database.acknowledge(self._timeout if left is None else min(self._timeout, left))
            finally:
                left = self._stop.left()
                # A broker that does not answer removes the member when its heartbeats stop.
                away = self._asked_at is not None and left is not None
                self._inputs.close(min(left or 0.0, leaving_seconds(self._stop_timeout)) if away else left)
        except errors.TxnBridgeError as error:
            # The broker removes the member from the group when its heartbeats stop.
            _log.warning("%r could not leave its group: %s", self, error)
        if self._database is not None:
            self._database.close()
        if self._side_by_side is not None:
            self._side_by_side.close()
        if self._waiting_keys is not None:
            close_logging_errors(self._waiting_keys.close, leaving_seconds(self._stop_timeout))

    # --- by force -------------------------------------------------------------------------------------------------

    def _hurry(self, at: float) -> None:
        """Move the open transaction's deadline to the time `at`, so that its requests to the broker end in time."""
        if (transaction := self._transaction) is not None:
            transaction._end_by(at)
        if self._database is not None:
            self._database.end_by(at)

    def _give_up(self) -> None:
        """Abort the transaction and leave the group while the handler runs on: threads cannot be interrupted."""
        if (transaction := self._transaction) is not None:
            with suppress(errors.TxnBridgeError):
                transaction.abort()
        self._leave()

    # --- failed passes --------------------------------------------------------------------------------------------

    def _note_failure(self, error: BaseException, wait: float) -> None:
        self._count_failure(error)
        _log.warning("%r: %s; again in %.1f s", self, self._loggable(error), wait)

    def _loggable(self, error: BaseException) -> str:
        """Return an error as text for log lines: for an error of the handler its class and line.

        The text of a handler's error may contain data of messages, so it is logged only at debug level.
        """
        if error is not self._policy.of_handler:
            return loggable(error)
        _log.debug("the handler of %r failed", self, exc_info=error)
        message = f" for {self._failed!r}" if self._failed is not None else ""
        return f"the handler failed{message}: {handler_location(error, __file__)}"

    def _count_failure(self, error: BaseException) -> None:
        self._failures += 1
        self._stats = self._stats._replace(last_error=loggable(error))
        self._add(retries=1)

    # --- one pass -------------------------------------------------------------------------------------------------

    def _pass(self, until_idle: bool) -> bool:
        """Poll once and process the batch. Return True to end the loop: by a stop, or `until_idle` if all is read."""
        if self._stop.asked:
            return True
        assert self._inputs is not None
        if not self._failures:
            self._since = time.monotonic()
        rest = False
        committed = self._stats.transactions
        try:
            if not self._failures and not self._inputs.in_doubt:
                self._follow_topics()
            items = self._poll(self._inputs)
            self._poll_by = time.monotonic() + self._timeout
            self._process(items)
        except _TimeToPoll:
            self._take_back(failed=False)
            rest = True
        except BaseException as error:
            if not self._stop.forced:
                self._take_back()
            own = error is not self._policy.of_handler
            if own and isinstance(error, errors.NotFound | errors.AccessDenied) and self._follow_topics(failed=True):
                self._failures += 1
                return self._stop.asked
            if own and isinstance(error, errors.NotFound) and self._input_topics.gone and not until_idle:
                raise errors.BrokerUnavailable(f"no topic fits the pattern now: {error}") from error
            if not self._is_handled(error, progress=self._stats.transactions > committed):
                raise
            return self._stop.asked
        self._failures = 0
        self._policy.of_handler = None
        # After a full batch more messages are likely, so the request for the lag is saved.
        idle = until_idle and not rest and len(items) < self._max_messages
        return self._ends_idle(self._inputs, idle, progress=self._stats.transactions > committed)

    def _ends_idle(self, inputs: ProcessorInputs, idle: bool, progress: bool) -> bool:
        """Measure the lag if it is time. Return True to end the loop: by a stop, or if it is `idle` and all is read."""
        try:
            self._measure_lag(inputs, now=idle)
        except errors.TxnBridgeError as error:
            # A broker that commits, but does not report the lag, neither slows the loop down nor ends it (`retry_for`).
            if not self._is_handled(error, progress):
                raise
            return self._stop.asked
        return self._is_over(idle and inputs.is_all_read(self._lag, self._timeout))

    def _follow_topics(self, failed: bool = False) -> bool:
        """Join the group again if other topics fit the patterns by now; return whether it has joined.

        After a first failure (`failed`), or if all were gone, join also with the same topics: one may be another now.
        """
        assert self._inputs is not None
        again = failed and (self._input_topics.gone or not self._failures)
        looked = self._input_topics.look(self._connection, now=failed)
        if not looked or self._input_topics.gone or (self._inputs.topics is self._input_topics.now and not again):
            return False
        before = self._inputs
        try:
            self._inputs = self._join("earliest")  # topics that are new are read whole
        except (errors.UsageError, errors.AccessDenied) as error:  # a topic of others fits, say
            _log.warning("%r goes on without its new topics: %s", self, error)
            return False
        close_logging_errors(before.close, self._timeout)
        return True

    def _take_back(self, failed: bool = True) -> None:
        assert self._inputs is not None
        if self._database is not None:
            self._database.take_back(self._timeout)
        self._inputs.take_back(failed)

    def _is_handled(self, error: BaseException, progress: bool) -> bool:
        """Return whether a failed batch needs no retry: a stop was asked for, or a part of its messages is committed.

        The next batch begins after that part. It is not a repetition of this one, so it is not made to wait: otherwise
        the waits would grow for a handler that fails now and then, although its group advances.
        """
        if self._stop.forced or not self._policy.is_temporary(error):
            if error is self._policy.ends_loop:
                _log.error("%r: %s; it stops", self, self._loggable(error))
            return False
        if self._stop.asked:
            self._count_failure(error)
            _log.warning("%r: %s; stopped: uncommitted messages will be redelivered", self, self._loggable(error))
        elif progress:
            self._failures = 0
            self._note_failure(error, 0.0)
        return self._stop.asked or progress

    def _poll(self, inputs: ProcessorInputs) -> PolledBatch:
        """Poll until the batch has `max_messages` or `max_wait` has passed; return the batch, decoded."""
        messages = inputs.take(self._max_messages, _POLL_SECONDS)
        # An empty poll is no success: it would end the growing waits between failed attempts.
        while not messages and inputs.awaits_failed and not self._stop.asked:
            messages = inputs.take(self._max_messages, _POLL_SECONDS)
        until = time.monotonic() + self._max_wait
        while messages and len(messages) < self._max_messages and not self._stop.asked:
            left = until - time.monotonic()
            if left <= 0:
                break
            messages += inputs.take_more(self._max_messages - len(messages), min(left, _POLL_SECONDS))
        # A partition may have been revoked during a later poll: its new member gets these messages again.
        here = [message for message in messages if not message.source.ended]
        if self._database is not None:
            here = self._database.without_processed(here)
        return self._read(here)

    def _read(self, delivered: list[Message]) -> PolledBatch:
        """Return delivered messages as a batch: as they were in their original topics, and decoded."""
        items = PolledBatch(delivered, delivered, delivered, {})
        if self._retries.topics:
            items.originals = [self._original(items, index) for index in range(len(delivered))]
            items.messages = items.originals
        if self._side_by_side is not None:
            self._side_by_side.keep(delivered)
        if not all(topic.plain for topic in self._topics):
            items.messages = [self._decode(items, index) for index in range(len(delivered))]
        return items

    def _original(self, items: PolledBatch, index: int) -> Message:
        delivered = items.delivered[index]
        if delivered.topic in self._retries.topics and is_note(delivered):
            items.set_aside(index, WaitsBehind(delivered.topic), delayed=None)
            return delivered
        # Other members may have sent earlier messages of its key to other retry topics, so these are read first.
        if self._waiting_keys is not None and delivered.topic in self._retries.topics and is_follower(delivered):
            self._waiting_keys.in_doubt = True
        try:
            return self._retries.original(delivered, self._input_topics.topic)
        except errors.Poison as poison:
            items.set_aside(index, poison)
            return delivered

    def _decode(self, items: PolledBatch, index: int) -> Message:
        original = items.originals[index]
        topic = self._input_topics.topic(original.topic)
        try:
            return original if topic is None or topic.plain else topic.decode(original)
        except errors.Poison as poison:
            items.set_aside(index, poison)
            return original

    def _measure_lag(self, inputs: ProcessorInputs, now: bool) -> None:
        if now or time.monotonic() - self._lag_at >= _LAG_SECONDS:
            self._asked_at = self._asked_at or time.monotonic()
            try:
                self._lag = inputs.lag(min(_LAG_DEADLINE, self._timeout))
            except (errors.NotFound, errors.AccessDenied):
                if not self._input_topics.patterns:
                    raise
                self._lag = None  # until `_follow_topics` finds out which topic is gone, or may not be read
            self._lag_at, self._asked_at = time.monotonic(), None

    def _process(self, items: PolledBatch) -> None:
        """Process a batch in order: in one transaction, or in several if messages are set aside or time is short.

        Raise `_TimeToPoll` if a part is processed, and the rest would take too long.
        """
        part = items  # what to process in the next transaction
        while items and not self._stop.asked:
            try:
                part = items = items.behind(self._transact(part))
            except _Found:
                continue
            except _FailedBehind as failed:
                part = items.first(failed.index)
                continue
            except _Hidden:
                middle = len(part) // 2
                self._process(part.first(middle))
                part = items = items.behind(middle)
                continue
            if items and time.monotonic() > self._poll_by:
                raise _TimeToPoll

    def _transact(self, items: PolledBatch) -> int:
        """Process messages from the first on in one transaction; return how many messages it has acknowledged."""
        if self._waiting_keys is not None:
            self._waiting_keys.hold_back(items, self._timeout)
        items = self._dead_letters.without_fatal_poison(items)
        in_a_row = 0
        if not self._failures:
            self._since = time.monotonic()
        try:
            with self._begin_transaction(timeout=self._timeout) as txn:
                self._transaction = txn
                txn._lent = True
                done = self._handle(items, txn)
                txn._lent = False
                self._check_after_handler(txn)
                if txn.state is State.OPEN:  # otherwise the end of the block raises the transaction's error
                    self._store(done, txn)
                    in_a_row = self._send_set_aside(done, txn)
                    txn.ack(done.delivered)
                    self._commit(done, txn)
        finally:
            self._transaction = self._called_at = None
        self._since = time.monotonic()
        if self._waiting_keys is not None:
            self._waiting_keys.note(done, self._sent_to_wait)
            # On some brokers readers see nothing of an undecided transaction and do not wait for it.
            self._waiting_keys.in_doubt = self._inputs is not None and self._inputs.in_doubt
        self._dead_letters.in_a_row = in_a_row
        self._count(done)
        return len(done)

    def _send_set_aside(self, items: PolledBatch, txn: PassTransaction) -> int:
        """Send poison and delayed messages to their topics; return how many dead letters in a row are at the end."""
        of_source = getattr(txn, "of_source", txn)  # also if the handler sends to another broker
        if (keys := self._waiting_keys) is None:
            self._retries.send(items, of_source, self._attempts_at)
        else:
            self._sent_to_wait = self._retries.send(items, of_source, self._attempts_at, keys.partition)
            keys.in_doubt = True  # until the transaction is committed
        return self._dead_letters.send(items, of_source)

    def _attempts_at(self, delivered: Message) -> int:
        """Return how often the handler has tried a message: in earlier retries, and now."""
        return self._retries.attempts(delivered) + self._failures + 1

    def _handle(self, items: PolledBatch, txn: PassTransaction) -> PolledBatch:
        try:
            if self._batch is not None:
                self._handle_batch(self._batch, items, txn)
                return items
            assert self._each is not None
            return self._handle_each(self._each, items, txn)
        except errors.Abort as error:
            raise errors.TransactionAborted("the handler aborted its transaction (Abort)") from error

    def _handle_each(self, each: Each, items: PolledBatch, txn: PassTransaction) -> PolledBatch:
        """Call the handler for each message; return the messages handled in this transaction as a batch.

        If the handler fails for a message behind others, these are committed first, and it is tried again as the first
        one: so a handler that fails now and then is not called again and again for all. After poison the others are
        tried, too, so that one abort finds all poison.
        """
        now = time.monotonic()
        half_time = now + txn.deadline / 2
        messages = items.messages
        if (side_by_side := self._side_by_side) is not None:
            self._called_at = now
            makers = self._connection.header_makers
            done = side_by_side.handle(items, txn, makers, self._if_slow, lambda: self._stop.asked)
            each, messages = side_by_side.send, items.delivered[:done]
            now = time.monotonic()
            half_time = now + txn.deadline / 2  # of the sends
        known = items.marked
        found = succeeded = False
        done = 0
        for index, message in enumerate(messages):
            done += 1
            if index not in known:
                self._called_at, failure = now, None
                try:
                    each(message, txn)
                except Exception as error:
                    failure = error
                now = time.monotonic()
                failure = self._if_slow(now - self._called_at, failure)
                if failure is None:
                    succeeded = True
                else:
                    self._judge(failure, items, index, txn, first=not (found or succeeded))
                    found = True
            # A failed transaction refuses sends. A database may refuse all statements after an error, and it still has
            # what the failed message has written, by which a later message would be judged.
            if found and (self._database is not None or txn.state is not State.OPEN):
                break
            # If the handler is slow, end the transaction after a part of the batch, to commit before its deadline.
            if (self._stop.asked and side_by_side is None) or now > half_time:
                break
        if found:
            raise _Found
        return items.first(done)

    def _if_slow(self, seconds: float, failure: Exception | None) -> Exception | None:
        """Return `failure`, the handler's error; another error if a call lasted so long that no commit is possible."""
        if seconds <= self._timeout:
            return failure
        slow = HandlerTooSlow(f"the handler took {seconds:.1f} s, longer than timeout={self._timeout:g}")
        slow.__cause__ = failure
        return slow

    def _judge(self, error: Exception, items: PolledBatch, index: int, txn: PassTransaction, first: bool) -> None:
        """Mark the message for which the handler has failed. Raise the error unless the message is to be set aside.

        `first` is True if the handler was called for no earlier message in this transaction.
        """
        self._failed = items.originals[index]
        may_pass = self._policy.may_pass(error, txn)
        if may_pass and not first:
            raise _FailedBehind(index)
        if self._side_by_side is not None:
            self._side_by_side.drop(items.delivered[index])
        self._policy.raise_unless_set_aside(error, txn, (items.delivered[index],))
        self._mark(items, index, error)
        if may_pass:
            raise _Found

    def _handle_batch(self, batch: OnBatch, items: PolledBatch, txn: PassTransaction) -> None:
        good = items.good()
        if not good:
            return
        self._called_at = called_at = time.monotonic()
        failure = None
        try:
            batch(Batch(list(map(items.messages.__getitem__, good))), txn)
        except Exception as error:
            failure = error
        failure = self._if_slow(time.monotonic() - called_at, failure)
        if failure is not None:
            self._find_culprit(failure, items, txn)

    def _store(self, items: PolledBatch, txn: PassTransaction) -> None:
        """Wait until the broker has taken the handler's output. If it refuses one (too large, say), find whose it is.

        This comes before the messages are set aside, whose sends would be told of the refusal, or acknowledged.
        """
        try:
            txn._store()
        except errors.DeliveryFailed as error:
            if not refuses_message(error):
                raise
            if len(items) > 1:
                raise _Hidden from error  # the others are committed without the message that the broker refuses
            self._find_culprit(error, items, txn)

    def _commit(self, items: PolledBatch, txn: PassTransaction) -> None:
        try:
            txn.commit()
        except CommitRefused as refused:
            self._find_culprit(refused.error, items, txn)

    def _find_culprit(self, error: Exception, items: PolledBatch, txn: PassTransaction) -> NoReturn:
        """Raise the error of a batch's handler again, unless a message of the batch is set aside because of it.

        Then raise `_Found` if this message is known, and otherwise `_Hidden`.
        """
        good = items.good()
        self._failed = items.originals[good[0]] if len(good) == 1 else None
        if not good:
            raise error  # what is set aside is refused
        self._policy.raise_unless_set_aside(error, txn, [items.delivered[index] for index in good])
        culprit = items.index_named_by(error)
        if culprit is None:
            raise _Hidden from error
        self._mark(items, culprit, error)
        raise _Found from error

    def _mark(self, items: PolledBatch, index: int, error: Exception) -> None:
        """Mark a message as delayed if another attempt is left, otherwise as poison."""
        another = self._retries.takes(items.delivered[index])
        delayed = another and not self._policy.is_poison(error)
        items.set_aside(index, error, delayed=delayed)
        if delayed and self._waiting_keys is not None:
            self._waiting_keys.hold_followers(items, index, self._retries.next_topic(items.delivered[index]))

    def _check_after_handler(self, txn: PassTransaction) -> None:
        if self._stop.forced:
            raise StopNow  # the handler has caught the `StopNow` raised in it, or returned before it was raised
        require_not_ended(txn)
        if txn.outcome is not None:
            raise errors.InvalidState(
                f"the handler ended transaction {txn.id} itself ({txn.outcome.value}); leave that to the processor, or"
                " raise txnbridge.Abort to have the messages redelivered"
            )

    def _count(self, done: PolledBatch) -> None:
        dead, delayed = done.poison, done.delayed
        self._policy.forget_attempts(done.delivered)
        for index, poison in dead.items():
            _log.warning("%r in group %r: dead letter, %s", done.originals[index], self._group, loggable(poison))
        for index, error in delayed.items():
            if isinstance(error, WaitsBehind):
                _log.info("%r in group %r: %s", done.originals[index], self._group, error)
                continue
            _log.debug("the handler of %r failed", self, exc_info=error)
            why = handler_location(error, __file__)
            _log.warning("%r in group %r: will be retried later, %s", done.originals[index], self._group, why)
        self._add(messages=len(done) - done.notes, transactions=1, dead_letters=len(dead), delayed=len(delayed))

    def _add(self, **more: int) -> None:
        self._stats = self._stats._replace(**{name: getattr(self._stats, name) + more[name] for name in more})
        self._connection.events.emit("processor.count", "after", None, **self._names, **more)


def _check_takes_two(setting: str, handler: Any) -> None:
    """Raise `InvalidOption` if a handler, given as `setting`, is asynchronous or does not take two arguments."""
    called = handler if inspect.isroutine(handler) or isinstance(handler, functools.partial) else type(handler).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
        raise errors.InvalidOption(
            f"{setting}= is a plain function: an `async def` or a generator would be called and never run. It may be an"
            " `async def` in a processor of txnbridge.aio, and in an App"
        )
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        what = "message" if setting == "each" else "batch"
        text = f"{setting}= is called as f({what}, txn), which this one does not take: {error}"
        raise errors.InvalidOption(text) from None
