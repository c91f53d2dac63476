"""`Resolver`: answers check-backs about half messages whose sender did not report the outcome of its local work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from txnbridge._base.connection import Connection
from txnbridge._base.deadline import Deadline, check_seconds
from txnbridge._base.messages import Headers, Message
from txnbridge._base.service import Service
from txnbridge._base.token import Decision, Outcome
from txnbridge._half.common import check_decision, check_group, end_half, half_store
from txnbridge._process.handler import handler_location
from txnbridge.errors import Abort, EvidenceLost, InvalidOption, TxnBridgeError
from txnbridge.spi import Half

_log = logging.getLogger("txnbridge")

Check = Callable[[str, Sequence[Message]], Decision]

# The pauses before the next request to a broker that is silent: each is twice as long, from first to last.
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0
# The interval at which the loop checks whether a check has ended while `parallel` checks are running.
_LOOK_SECONDS = 0.1


class ResolverStats(NamedTuple):
    """Counts of a resolver's work since it was made."""

    checks: int = 0  # check-backs that were answered
    committed: int = 0
    aborted: int = 0
    failed: int = 0  # checks that raised an error, or returned no decision; the broker asks again


class Resolver(Service):
    """Calls `check(transaction_id, messages)` for undecided half messages of a group, and ends them by its answers.

    Several resolvers may run, in any processes: the first answer counts. Each check runs on a thread of its own, at
    most `parallel` at once. After UNDECIDED, an exception, or an ABORT before the transaction's deadline the check is
    repeated later. A check that takes longer than `check_timeout` is logged, and counts as running until it ends.
    """

    def __init__(
        self,
        connection: Connection,
        group: str,
        check: Check,
        *,
        parallel: int = 4,
        check_timeout: float = 30.0,
        stop_timeout: float = 30.0,
    ) -> None:
        if not callable(check):
            raise InvalidOption(f"check= is called as f(transaction_id, messages), not {type(check).__name__}")
        if type(parallel) is not int or parallel < 1:
            raise InvalidOption(f"parallel= is how many checks may run at once, from 1, not {parallel!r}")
        check_seconds("check_timeout", check_timeout, above_0=True)
        super().__init__(connection, f"resolver of {check_group(group)}", stop_timeout)
        self._group = group
        self._check = check
        self._parallel = parallel
        self._check_timeout = check_timeout
        self._store = half_store(connection)
        self._changed = threading.Condition()
        self._asking: dict[threading.Thread, tuple[str, float]] = {}  # transaction id and begin of each running check
        self._late: set[threading.Thread] = set()  # running checks that were logged as too slow
        self._stats = ResolverStats()
        self._failing_since: float | None = None  # the time since which all requests to the broker have failed
        self._wait = Deadline(0)  # of the request that waits for check-backs

    @property
    def stats(self) -> ResolverStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        """True if the resolver runs, the broker has answered within the bridge's timeout, and not all checks hang."""
        with self._changed:
            hang = len(self._late) >= self._parallel
        since = self._failing_since
        failing = since is not None and time.monotonic() - since > self._connection.timeout
        return self._runs and not hang and not failing

    def stop(self) -> None:
        super().stop()
        self._wait.shorten(time.monotonic())

    def _leave(self) -> None:
        if not any(isinstance(one, Resolver) and one._group == self._group for one in list(self._connection.services)):
            with suppress(TxnBridgeError), self._connection.call():  # a bridge that is being closed leaves all groups
                self._store.leave(self._group, Deadline(self._connection.timing.check_wait))

    def _loop(self) -> None:
        self._answer_all()
        self._wait_for_checks()

    def _answer_all(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.asked and not self._connection.closed:
            free = self._free_places()
            try:
                halves = self._due(free) if free else self._tend()
            except TxnBridgeError as error:
                if self._stop.asked or self._connection.closed:
                    return
                self._failing_since = self._failing_since or time.monotonic()
                _log.warning("the resolver of %s retries in %.1f s: %s", self._group, pause, error)
                self._stop.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
                continue
            pause, self._failing_since = _FIRST_PAUSE, None
            for half in halves:
                self._begin(half)

    def _due(self, limit: int) -> list[Half]:
        with self._connection.call():
            self._wait = Deadline(self._connection.timing.check_wait)
            return self._store.checks(self._group, limit, self._wait)

    def _tend(self) -> list[Half]:
        """Wait for a check to end, and let the half store do its regular work meanwhile; return an empty list."""
        with self._connection.call():
            self._store.tend(self._group, self._connection.deadline())
        with self._changed:
            if len(self._asking) >= self._parallel:
                self._changed.wait(_LOOK_SECONDS)
        return []

    def _begin(self, half: Half) -> None:
        thread = threading.Thread(
            target=self._ask, args=(half,), name=f"txnbridge check {half.transaction}", daemon=True
        )
        with self._changed:
            if any(half.transaction == transaction for transaction, _ in self._asking.values()):
                return  # the broker asks again while a check is running; checks that hang must not take all threads
            self._asking[thread] = half.transaction, time.monotonic()
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start another thread at present
            with self._changed:
                del self._asking[thread]
            _log.warning("half-message transaction %s will be checked again: %s", half.transaction, error)

    def _ask(self, half: Half) -> None:
        """Call the application's `check` for half messages, and end them by its answer; runs on a thread of its own."""
        try:
            decision = self._answer(half)
            if decision is Decision.ABORT and time.time() * 1000 < half.deadline_at:
                decision = Decision.UNDECIDED  # the local work may be running, and may still succeed
            with self._connection.call():
                outcome = end_half(self._connection, self._store, half, decision, self._connection.deadline())
            self._note_end(half, outcome)
        except EvidenceLost as error:
            _log.warning("the outcome of half-message transaction %s can never be known: %s", half.transaction, error)
        except TxnBridgeError as error:
            _log.info("half-message transaction %s will be checked again: %s", half.transaction, error)
        finally:
            with self._changed:
                self._asking.pop(threading.current_thread(), None)
                self._late.discard(threading.current_thread())
                self._changed.notify_all()

    def _answer(self, half: Half) -> Decision:
        """Return the answer of the application's `check`; UNDECIDED if it raises an error."""
        age = int(time.time() * 1000) - half.deadline_at
        asked = {"checks": half.checks, "past_deadline_ms": age, "messages": len(half.messages)}
        try:
            with self._connection.events.step("half.check", half.transaction, **asked) as found:
                decision = self._decide(half)
                check_decision("check", decision)
                found["decision"] = decision.value
                return decision
        except Abort:
            return Decision.ABORT
        except Exception as error:
            text = "check failed for half-message transaction %s (%s); it will be called again"
            _log.warning(text, half.transaction, handler_location(error, __file__))
            with self._changed:
                self._stats = self._stats._replace(failed=self._stats.failed + 1)
            return Decision.UNDECIDED

    def _decide(self, half: Half) -> Decision:
        """Return the decision by the application's `check` about half messages; a subclass may look further."""
        return self._check(half.transaction, [_shown(half, number) for number in range(len(half.messages))])

    def _note_end(self, half: Half, outcome: Outcome) -> None:
        """Count a check-back that was answered, after the broker has recorded the half's outcome."""
        with self._changed:
            checks, committed, aborted, failed = self._stats
            committed, aborted = committed + (outcome is Outcome.COMMITTED), aborted + (outcome is Outcome.ABORTED)
            self._stats = ResolverStats(checks + 1, committed, aborted, failed)

    def _free_places(self) -> int:
        with self._changed:
            for thread, (transaction, since) in self._asking.items():
                if thread not in self._late and time.monotonic() - since > self._check_timeout:
                    self._late.add(thread)
                    text = "check has run for half-message transaction %s for more than %g s, and occupies one of %d"
                    _log.warning(text + " threads", transaction, self._check_timeout, self._parallel)
            return self._parallel - len(self._asking)

    def _wait_for_checks(self) -> None:
        """After a stop, wait for running checks until the stop's deadline."""
        while left := self._stop.left() or 0.0:
            with self._changed:
                if not self._asking:
                    return
                self._changed.wait(min(left, _LOOK_SECONDS))
        with self._changed:
            hang = sorted(transaction for transaction, _ in self._asking.values())
        if hang:
            _log.warning("the resolver of %s ends while check still runs for %s", self._group, ", ".join(hang))


def _shown(half: Half, number: int) -> Message:
    """Return a half message as a `Message` for `check`, without a position, which it gets when it is published."""
    topic, value, key, headers, partition, timestamp = half.messages[number]
    place = -1 if partition is None else partition
    return Message(topic, place, (), key, value, Headers(headers), timestamp or 0, half.checks, None)
