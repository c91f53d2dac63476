"""`Deadline`: the time limit of a whole call, shared by all steps of the call; and waits that keep to a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Lock, RLock
from typing import TypeVar

from txnbridge.errors import DeadlineExceeded, InvalidOption

T = TypeVar("T")


def check_seconds(what: str, given: object, *, above_0: bool = False) -> None:
    """Raise `InvalidOption` unless `given`, the setting `what`, is a number of seconds that a thread can wait for."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        shown = type(given).__name__
    elif 0 <= given <= TIMEOUT_MAX and (given or not above_0):  # Python cannot wait longer than centuries
        return
    else:
        shown = repr(given)
    raise InvalidOption(f"{what} is a number of seconds {'above' if above_0 else 'from'} 0, not {shown}")


def check_times(timeout: object, hold: object) -> None:
    """Raise `InvalidOption` unless the values are a valid `timeout` and `hold` of a transaction, in seconds."""
    check_seconds("timeout", timeout, above_0=True)
    if hold is not None:
        check_seconds("hold", hold)


class Deadline:
    """A time on the monotonic clock, a given number of seconds after the object is made.

    Another thread may shorten it, so a thread that waits must ask for the time left in short intervals.
    """

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        check_seconds("a timeout", seconds)
        self.seconds: float = float(seconds)
        self.at: float = time.monotonic() + self.seconds

    def left(self) -> float:
        """Return the seconds left until the deadline; 0 once it has passed."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def shorten(self, at: float) -> None:
        """Move the deadline to the time `at` of the monotonic clock if that is earlier."""
        self.at = min(self.at, at)

    def acquire(self, lock: Lock | RLock, held: list[bool]) -> bool:
        """Acquire a lock by the deadline, and append True to `held`; return whether the lock is acquired.

        A signal handler's exception may come behind any call, but not between these two steps, which are one call for
        Python. So call this in a `try` whose `finally` releases the lock if `held` has an entry.
        """
        held.extend(filter(None, map(lock.acquire, (True,), (self.left(),))))
        return bool(held)

    @contextmanager
    def holding(self, lock: Lock | RLock, what: str) -> Iterator[None]:
        """Hold a lock in the block. Raise `DeadlineExceeded` at the deadline; `what` tells what others do with it."""
        held: list[bool] = []
        try:
            if not self.acquire(lock, held):
                raise DeadlineExceeded(f"{what} for longer than {self.seconds:g} s")
            yield
        finally:
            if held:
                lock.release()

    def check(self, what: str) -> None:
        """Raise `DeadlineExceeded` if the deadline has passed; `what` names the work for the error's text."""
        if self.expired:
            raise DeadlineExceeded(f"{what} took longer than the deadline of {self.seconds:g} s")

    def __repr__(self) -> str:
        return f"Deadline({self.left():.3f} of {self.seconds:g} s left)"


def next_within(queue: SimpleQueue[T], seconds: float) -> T:
    """Return the next item of a queue; raise `Empty` if none comes in this time."""
    try:
        return queue.get_nowait()
    except Empty:
        if seconds <= 0:
            raise
    # Without the failed call before, CPython waits for ever if the time passes between two steps of this one.
    return queue.get(timeout=seconds)


class Wake:
    """Wakes a thread that waits. A signal handler may call `wake` at any point of the program.

    A `SimpleQueue` can do that, too, but its `get` waits for ever if a signal handler runs longer than its timeout.
    """

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep = Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        """Let the present `wait` return, or else the next one."""
        with suppress(RuntimeError):  # if the thread has not waited since it was woken last
            self._asleep.release()

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until another thread or a signal handler calls `wake`."""
        self._asleep.acquire(timeout=max(0.0, seconds))
