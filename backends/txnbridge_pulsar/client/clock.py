"""The deadline of a call, and the pauses between its attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

# The first pause lets a broker finish its work; the longest limits requests without delaying a retry much.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0


class ClientDeadline:
    """The moment by which a call ends, on the monotonic clock."""

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


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each next attempt: up to twice the last, at random to spread clients."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, LONGEST_PAUSE)
