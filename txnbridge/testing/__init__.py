"""The testing kit for programs that use txnbridge: a bridge to a fresh embedded broker, and faults on demand.

`pytest_plugins = ["txnbridge.testing"]` in the top `conftest.py` brings the fixtures `bridge` and `bridge_url`:

    def test_an_order_is_shipped(bridge):
        take_order(bridge, 42)
        assert [m.value for m in bridge.read("shipments", limit=10)] == [b"42"]

A program that will run on another broker is tested against that broker's promises:

    @pytest.fixture
    def bridge_url(bridge_url):
        return bridge_url + "?like=kafka"

The functions of this package work without pytest. (PYTEST_DONT_REWRITE: this module may be imported before pytest.)
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import txnbridge
from txnbridge._base.events import Event
from txnbridge._base.plugins import hookimpl, plugins
from txnbridge._base.token import Outcome
from txnbridge.errors import InvalidOption, OutcomeUnknown, TransactionAborted
from txnbridge.spi import Deadline, Writer
from txnbridge.testing.child_processes import Child, Point, StopAt, Unvisited, tell

__all__ = ["Child", "Point", "StopAt", "Unvisited", "crash_everywhere", "listening", "next_commit", "recorded", "tell"]

try:
    import pytest
except ImportError:
    pass  # without pytest there are no fixtures
else:
    __all__ += ["bridge", "bridge_url"]

    @pytest.fixture
    def bridge_url(tmp_path: Path) -> str:
        """Return the URL of a new embedded broker; override this fixture to add options, such as `?like=kafka`."""
        return f"embedded:{tmp_path / 'broker.db'}"

    @pytest.fixture
    def bridge(bridge_url: str) -> Iterator[txnbridge.Bridge]:
        """Yield a bridge to a new embedded broker, and close it after the test."""
        with txnbridge.connect(bridge_url) as opened:
            yield opened


@contextmanager
def listening(function: Callable[[Event], object]) -> Iterator[None]:
    """Call a function with every event of each bridge that is opened inside this block, until the bridge is closed."""

    class Listener:
        @hookimpl
        def txnbridge_event(self, event: Event) -> None:
            function(event)

    with plugins.registered(Listener()):
        yield


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """Yield a list to which every event of the bridges opened inside this block is appended."""
    events: list[Event] = []
    with listening(events.append):
        yield events


def next_commit(bridge: txnbridge.Bridge, outcome: Outcome, *, happened: bool = True) -> _NextCommit:
    """Inject the outcome of the next commit of a transaction of this bridge.

    With `Outcome.UNKNOWN` the commit's answer is lost: the program gets `OutcomeUnknown` at once, and
    `bridge.status(error.token)` returns later that the transaction was committed (aborted, with `happened=False`). With
    `Outcome.ABORTED` the transaction is aborted, and the program gets `TransactionAborted`.

    This applies from the call on. Used as a block, it raises `AssertionError` if no commit was called inside.
    """
    if outcome is Outcome.COMMITTED:
        raise InvalidOption("a commit cannot be told to succeed; choose Outcome.UNKNOWN or Outcome.ABORTED")
    return _NextCommit(bridge, outcome, happened)


class _NextCommit:
    def __init__(self, bridge: txnbridge.Bridge, outcome: Outcome, happened: bool) -> None:
        self._writers = bridge._writers
        self._outcome = outcome
        self._happened = happened
        self._used = threading.Lock()
        self._commit = self._writers.commit
        self._writers.commit = self._instead

    def _instead(self, writer: Writer, deadline: Deadline) -> None:
        if not self._used.acquire(blocking=False):  # another thread's commit has the injected outcome
            return self._commit(writer, deadline)
        self._writers.commit = self._commit
        if self._outcome is Outcome.ABORTED:
            writer.abort(deadline)
            raise TransactionAborted("the testing kit was asked to abort this transaction")
        if self._happened:
            writer.commit(deadline)
        else:
            writer.abort(deadline)
            writer.reopen(deadline)  # the abort is certain at once, not only after the broker's own timeout
        deadline.shorten(time.monotonic())
        raise OutcomeUnknown("the testing kit was asked to lose the answer")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if not self._used.locked():
            self._writers.commit = self._commit
            if error[0] is None:
                raise AssertionError("next_commit: no transaction was committed inside the block")


def crash_everywhere(
    function: Callable[[Any], object],
    check: Callable[[Any], object],
    *,
    fresh: Callable[[], Any] | None = None,
    timeout: float = 60,
    at_once: int = 1,
) -> list[Point]:
    """Kill a program at each of its events in turn, run it again after each kill, and check the result.

    `function(start)` runs in a child process that is killed with SIGKILL at its first event; then the function runs
    again to its end, and `check(start)` is called in this process. This repeats with a new start and a kill at the next
    event, until all events were killed at. The function must be importable (as in a test module), and must recover by
    itself from an earlier run. `fresh()` makes each start, by default the URL of a new embedded broker. Each run may
    take `timeout` seconds; `at_once` starts run in parallel.

    Return the events at which the function was killed. Raise `AssertionError`, naming the event, if a check failed, and
    if the function has no events.
    """
    killed_at: list[Point] = []
    with ExitStack() as stack:
        make_start = fresh or _embedded_urls(stack)
        side_by_side = stack.enter_context(ThreadPoolExecutor(at_once)).map if at_once > 1 else map

        def kill_at(event: Unvisited) -> Point | None:
            return _kill_and_check(function, check, make_start(), event, timeout)

        points: list[Point | None] = []
        while not points or points[0] is not None:
            visited, starts = frozenset(killed_at), 1 if None in points else at_once  # one shows that none is left
            points = list(side_by_side(kill_at, [Unvisited(visited, skip) for skip in range(starts)]))
            killed_at += [point for point in points if point is not None and point not in killed_at]
    if not killed_at:
        raise AssertionError(f"{function.__qualname__} caused no event, so it was killed nowhere and nothing is proven")
    return killed_at


def _embedded_urls(stack: ExitStack) -> Callable[[], str]:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="txnbridge-"))
    numbers = count(1)
    return lambda: f"embedded:{folder}/{next(numbers)}.db"


def _kill_and_check(
    function: Callable[[Any], object],
    check: Callable[[Any], object],
    start: Any,
    event: str | Unvisited,
    timeout: float,
) -> Point | None:
    """Run a function in a child that is killed at an event, run it again, and check what it has left.

    Return this event; None if the function ended before it.
    """
    with Child(function, start, kill=event) as child:
        point = child._stopped_or_returned(timeout)
    try:
        if point is not None:
            with Child(function, start) as child:
                child.result(timeout)
        check(start)
    except Exception as error:
        when = f"killed at {point} and run again" if point else "not killed"
        raise AssertionError(f"{function.__qualname__}, {when}: {type(error).__name__}: {error}") from error
    return point
