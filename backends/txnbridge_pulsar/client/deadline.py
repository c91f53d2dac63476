"""`ClientDeadline`: the moment by which one call of the client has to return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


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
