"""`ClientDeadline`: the moment by which one call of the client has to return."""

from __future__ import annotations

import time


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
