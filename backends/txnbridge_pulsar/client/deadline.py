"""`ClientDeadline`: the moment by which one call of the client has to return.

`retry` repeats a request after temporary errors, with growing pauses, until then.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .errors import PulsarError, RequestTimedOut

T = TypeVar("T")

# The first pause lets a broker finish its work; the longest limits requests without delaying a retry much.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0


class ClientDeadline:
    """A deadline on the monotonic clock, made from the timeout of a call and passed to each step of the call."""

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._at

    @contextmanager
    def locking(self, lock: threading.Lock) -> Iterator[bool]:
        """Wait for a lock until the deadline, and hold it in the block. Yield False if it was not got in time.

        A signal handler's exception may come after any call of Python, so acquiring the lock and noting that are one
        call.
        """
        held: list[bool] = []
        try:
            held.extend(filter(None, map(lock.acquire, (True,), (self.left,))))
            yield bool(held)
        finally:
            if held:
                lock.release()


def backoff_pauses() -> Iterator[float]:
    """Yield the seconds before each next attempt: about doubled up to a limit, and partly random to spread clients."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, LONGEST_PAUSE)


def retry(deadline: ClientDeadline, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it returns, raises an error that is not `retriable`, or the deadline passes. Return the
    result. A repeated call must be harmless, because a failed attempt may have had an effect.

    At the deadline raise the last error. If this error is a timeout, its text also names the last refusal by the
    broker.
    """
    refusal: PulsarError | None = None
    for pause in backoff_pauses():
        try:
            return attempt()
        except RequestTimedOut as error:
            if deadline.left <= pause:
                if refusal is None:
                    raise
                raise RequestTimedOut(f"{error}; before that: {refusal}", error.may_have_had_effect) from error
        except PulsarError as error:
            if not error.retriable or deadline.left <= pause:
                raise
            refusal = error
        time.sleep(pause)
    raise AssertionError("pauses never end")
