"""Asks the application about half messages whose sender did not tell the outcome of its local work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from txnbridge._connection import Connection, ConnectionUser
from txnbridge._deadline import Deadline, check_seconds
from txnbridge._half_store import check_decision, check_group, end_half, half_store
from txnbridge._handler_errors import handler_location
from txnbridge._messages import Headers, Message
from txnbridge._shutdown import Shutdown, StopNow
from txnbridge._token import Decision, Outcome
from txnbridge.errors import Abort, EvidenceLost, InvalidOption, InvalidState, TxnBridgeError
from txnbridge.spi import Half

_log = logging.getLogger("txnbridge")

Check = Callable[[str, Sequence[Message]], Decision]

# The time for which one request to the broker waits for check-backs; a stop is noticed by then.
_WAIT_SECONDS = 1.0
# The pauses before a broker that is away is asked again: the first one, then twice as long each time, up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0
# How often the loop looks whether a check has ended while all places are taken.
_LOOK_SECONDS = 0.1


class ResolverStats(NamedTuple):
    """The work of a resolver since it was made."""

    checks: int = 0  # answered check-backs
    committed: int = 0
    aborted: int = 0
    failed: int = 0  # checks that raised, or returned no decision; they are repeated


class Resolver(ConnectionUser):
    """Calls `check(transaction_id, messages)` for the half messages of a group, and ends them by its answers.

    Several resolvers may run, in any processes: the first answer counts. Each check runs on a thread of its own,
    `parallel` of them at once. UNDECIDED, an exception, and an ABORT before the transaction's own deadline mean: ask
    again later. A check that takes longer than `check_timeout` is logged, and keeps its place until it ends.
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
        check_seconds("stop_timeout", stop_timeout)
        self._connection = connection
        self._group = check_group(group)
        self._check = check
        self._parallel = parallel
        self._check_timeout = check_timeout
        self._store = half_store(connection.broker)
        self._changed = threading.Condition()
        self._asking: dict[threading.Thread, tuple[str, float]] = {}  # transaction and begin of each running check
        self._late: set[threading.Thread] = set()  # running checks that were logged as too slow
        self._stats = ResolverStats()
        self._failing_since: float | None = None  # since then all requests to the broker have failed
        # The loop waits for nothing longer than a second, so a stop needs no force.
        self._stop = Shutdown(stop_timeout, f"resolver of {group}", lambda _: None, lambda: None)
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def stats(self) -> ResolverStats:
        return self._stats

    @property
    def healthy(self) -> bool:
        """True if it runs, the broker has answered within the bridge's timeout, and not all checks hang."""
        with self._changed:
            hang = len(self._late) >= self._parallel
        since = self._failing_since
        failing = since is not None and time.monotonic() - since > self._connection.timeout
        running = self._running.locked() and self._error is None and not self._connection.closed
        return running and not hang and not failing

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until stopped, on the main thread also by SIGTERM and Ctrl-C. Raise errors that will not pass."""
        if not self._running.acquire(blocking=False):
            raise InvalidState(f"this resolver of {self._group} runs already")
        self._connection.resolvers.add(self)
        try:
            with self._stop.by_signals(), suppress(StopNow):
                self._loop()
                self._wait_for_checks()
        finally:
            self._connection.resolvers.discard(self)
            self._leave()
            self._running.release()

    def _leave(self) -> None:
        if not any(other._group == self._group for other in list(self._connection.resolvers)):
            with suppress(TxnBridgeError), self._connection.call():  # a bridge that closes leaves all groups
                self._store.leave(self._group, Deadline(_WAIT_SECONDS))

    def start(self) -> None:
        """Run on a thread of its own."""
        self._thread = threading.Thread(target=self._run_quietly, name=f"txnbridge resolver {self._group}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for the end; `run` returns after the running checks. Returns at once; may be called anywhere."""
        self._stop.ask()

    def close(self) -> None:
        """Stop, and wait for the thread that `start` made."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stop_by(self, deadline: Deadline) -> None:
        """Stop, because the bridge closes, and wait for the end until the deadline."""
        self.stop()
        if self._running.acquire(timeout=deadline.left()):
            self._running.release()

    def __enter__(self) -> Resolver:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self._error is not None and error[0] is None:
            raise self._error

    def _run_quietly(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
            _log.error("the resolver of %s has ended: %s", self._group, error)

    def _loop(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.asked and not self._connection.closed:
            free = self._free_places()
            if not free:
                self._wait_for_a_place()
                continue
            try:
                halves = self._due(free)
            except TxnBridgeError as error:
                if self._stop.asked or self._connection.closed:
                    return
                self._failing_since = self._failing_since or time.monotonic()
                _log.warning("the resolver of %s looks again in %.1f s: %s", self._group, pause, error)
                self._stop.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
                continue
            pause, self._failing_since = _FIRST_PAUSE, None
            for half in halves:
                self._begin(half)

    def _due(self, limit: int) -> list[Half]:
        with self._connection.call():
            return self._store.checks(self._group, limit, Deadline(_WAIT_SECONDS))

    # --- checks -----------------------------------------------------------------------------------------------------

    def _begin(self, half: Half) -> None:
        thread = threading.Thread(
            target=self._ask, args=(half,), name=f"txnbridge check {half.transaction}", daemon=True
        )
        with self._changed:
            if any(half.transaction == transaction for transaction, _ in self._asking.values()):
                return  # its check takes longer than the half is lent for; a check that hangs would take all places
            self._asking[thread] = half.transaction, time.monotonic()
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads just now
            with self._changed:
                del self._asking[thread]
            _log.warning("half-message transaction %s is asked about again: %s", half.transaction, error)

    def _ask(self, half: Half) -> None:
        """Ask the application, on a thread of its own, and end the half by the answer."""
        try:
            decision = self._answer(half)
            if decision is Decision.ABORT and time.time() * 1000 < half.deadline_at:
                decision = Decision.UNDECIDED  # the work may be under way, and would be done for nothing
            with self._connection.call():
                outcome = end_half(self._connection, self._store, half, decision, self._connection.deadline())
            self._count(outcome)
        except EvidenceLost as error:
            _log.warning("nobody can tell what became of half-message transaction %s: %s", half.transaction, error)
        except TxnBridgeError as error:
            _log.info("half-message transaction %s is asked about again: %s", half.transaction, error)
        finally:
            with self._changed:
                self._asking.pop(threading.current_thread(), None)
                self._late.discard(threading.current_thread())
                self._changed.notify_all()

    def _answer(self, half: Half) -> Decision:
        """Return the application's answer; UNDECIDED if it fails to answer."""
        age = int(time.time() * 1000) - half.deadline_at
        asked = {"checks": half.checks, "past_deadline_ms": age, "messages": len(half.messages)}
        try:
            with self._connection.events.step("half.check", half.transaction, **asked) as found:
                decision = self._check(half.transaction, [_shown(half, number) for number in range(len(half.messages))])
                check_decision("check", decision)
                found["decision"] = decision.value
                return decision
        except Abort:
            return Decision.ABORT
        except Exception as error:
            _log.warning(
                "check failed for half-message transaction %s (%s); it is asked again",
                half.transaction,
                handler_location(error, __file__),
            )
            with self._changed:
                self._stats = self._stats._replace(failed=self._stats.failed + 1)
            return Decision.UNDECIDED

    def _count(self, outcome: Outcome) -> None:
        with self._changed:
            before = self._stats
            self._stats = before._replace(
                checks=before.checks + 1,
                committed=before.committed + (outcome is Outcome.COMMITTED),
                aborted=before.aborted + (outcome is Outcome.ABORTED),
            )

    # --- places -----------------------------------------------------------------------------------------------------

    def _free_places(self) -> int:
        with self._changed:
            for thread, (transaction, since) in self._asking.items():
                if thread not in self._late and time.monotonic() - since > self._check_timeout:
                    self._late.add(thread)
                    _log.warning(
                        "check has been at half-message transaction %s for more than %g s, and keeps one of %d places",
                        transaction,
                        self._check_timeout,
                        self._parallel,
                    )
            return self._parallel - len(self._asking)

    def _wait_for_a_place(self) -> None:
        with self._changed:
            self._changed.wait(_LOOK_SECONDS)

    def _wait_for_checks(self) -> None:
        """Wait for running checks after a stop, as long as there is time."""
        while left := self._stop.left() or 0.0:
            with self._changed:
                if not self._asking:
                    return
                self._changed.wait(min(left, _LOOK_SECONDS))
        with self._changed:
            hang = sorted(transaction for transaction, _ in self._asking.values())
        if hang:
            _log.warning("the resolver of %s ends while check is still at %s", self._group, ", ".join(hang))


def _shown(half: Half, number: int) -> Message:
    """Return a message for `check`: it has no position yet."""
    topic, value, key, headers, partition, timestamp = half.messages[number]
    place = -1 if partition is None else partition
    return Message(topic, place, (), key, value, Headers(headers), timestamp or 0, half.checks, None)
