"""One deadline for a whole call, however many steps it takes."""

from __future__ import annotations

import time

from txnbridge.errors import DeadlineExceeded, InvalidOption


class Deadline:
    """A point on the monotonic clock, made from a number of seconds."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise InvalidOption(f"a timeout is a number of seconds, not {seconds!r}")
        self.seconds = float(seconds)
        self.at = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def check(self, what: str) -> None:
        """Raise `DeadlineExceeded` if the time is over; `what` says what was being waited for."""
        if self.expired:
            raise DeadlineExceeded(f"{what} took longer than the deadline of {self.seconds:g} s")

    def __repr__(self) -> str:
        return f"Deadline({self.left():.3f} of {self.seconds:g} s left)"
