"""One deadline for a whole call, however many steps it takes."""

from __future__ import annotations

import time
from threading import TIMEOUT_MAX

from txnbridge.errors import DeadlineExceeded, InvalidOption


def check_seconds(what: str, given: object, *, above_0: bool = False) -> None:
    """Raise `InvalidOption` unless this is a number of seconds that a thread can wait for."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        shown = type(given).__name__
    elif 0 <= given <= TIMEOUT_MAX and (
        given or not above_0
    ):  # Python cannot wait longer than this, which is centuries
        return
    else:
        shown = repr(given)
    raise InvalidOption(f"{what} is a number of seconds {'above' if above_0 else 'from'} 0, not {shown}")


def check_times(timeout: object, hold: object) -> None:
    """Raise `InvalidOption` unless these can be a transaction's `timeout` and `hold`."""
    check_seconds("timeout", timeout, above_0=True)
    if hold is not None:
        check_seconds("hold", hold)


class Deadline:
    """A point on the monotonic clock, made from a number of seconds.

    It may be shortened while a thread waits, so each step of waiting asks again how much time is left.
    """

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        check_seconds("a timeout", seconds)
        self.seconds = float(seconds)
        self.at = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def shorten(self, at: float) -> None:
        """Move the deadline to this point of the monotonic clock, if that is earlier."""
        self.at = min(self.at, at)

    def check(self, what: str) -> None:
        """Raise `DeadlineExceeded` if the deadline has passed; `what` names the work for the error's text."""
        if self.expired:
            raise DeadlineExceeded(f"{what} took longer than the deadline of {self.seconds:g} s")

    def __repr__(self) -> str:
        return f"Deadline({self.left():.3f} of {self.seconds:g} s left)"
