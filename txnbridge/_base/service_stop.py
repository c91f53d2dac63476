"""`Shutdown`: stops a processor's or resolver's loop. Any thread may ask for it; after a deadline it uses force."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from txnbridge._base.deadline import Wake

# The part of the stop's time that is kept for aborting a transaction that does not end, and for leaving the group; both
# take milliseconds if the broker answers.
_LEAVING_SHARE, _LEAVING_SECONDS = 0.2, 2.0


def leaving_seconds(seconds: float) -> float:
    """Return how many of the `seconds` allowed for a stop are reserved, at the end, for ending the loop by force."""
    return min(_LEAVING_SECONDS, seconds * _LEAVING_SHARE)


class StopNow(BaseException):
    """Raised to end the loop at once, also inside a handler, which cannot catch it as an `Exception`."""


@contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Let a function handle these signals during the block; call this on the main thread.

    A child that is forked in the block has the handlers from before: a program ends such children by SIGTERM.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handler(number, frame)
        else:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Shutdown:
    """The request to stop a loop, which checks `asked` between its steps.

    `hurry(at)` is called with the deadline when a stop is asked for. If the loop still runs shortly before the
    deadline, `hurry(at)` is called again, and `StopNow` is raised in the loop. Without `by_signals`, `give_up()` is
    called instead. Both functions are called on a thread of their own.
    """

    def __init__(self, seconds: float, name: str, hurry: Callable[[float], None], give_up: Callable[[], None]) -> None:
        self._seconds = seconds
        self._name = name
        self._hurry = hurry
        self._give_up = give_up
        # A signal handler may call `ask` at any point of the program. So `ask` waits for no lock: it sets attributes,
        # and wakes threads in ways that are reentrant.
        self._at: float | None = None
        self._wake_loop = Wake()
        self._wake_watcher: SimpleQueue[None] = SimpleQueue()
        self._ended = threading.Event()
        self._catches_signals = False
        self.signalled: int | None = None  # the number of the last signal
        self.forced = False

    @property
    def asked(self) -> bool:
        return self._at is not None

    def ask(self) -> None:
        """Ask for a stop. Return at once; any thread or signal handler may call this."""
        if self._at is None:
            self._at = time.monotonic() + self._seconds
        self._wake_loop.wake()
        self._wake_watcher.put(None)

    def left(self) -> float | None:
        """Return the seconds until the stop's deadline; None if no stop was asked for."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def sleep(self, seconds: float) -> None:
        """Sleep for this time, or until a stop is asked for."""
        self._wake_loop.wait(seconds)

    # --- by force -------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the loop in this block. Beyond a stop's deadline, raise `StopNow` in the loop or call `give_up`."""
        watcher = threading.Thread(target=self._watch, name=f"txnbridge {self._name} stop", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._ended.set()
            self._wake_watcher.put(None)
            watcher.join()

    def _watch(self) -> None:
        self._wake_watcher.get()
        if self._ended.is_set() or self._at is None:
            return
        self._hurry(self._at)
        if not self._ended.wait(max(0.0, self._at - leaving_seconds(self._seconds) - time.monotonic())):
            self._force(self._at)

    def _force(self, at: float) -> None:
        self._hurry(at)
        self.forced = True
        if not self._catches_signals:
            self._give_up()
            return
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)  # `_on_signal` raises StopNow on the main thread, inside the handler

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """On the main thread, let SIGTERM and SIGINT ask for a stop during the block; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signals_handled(self._on_signal, signal.SIGTERM, signal.SIGINT):
            self._catches_signals = True
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ended.is_set():
            return
        if not self.forced:
            first, self.signalled = self.signalled is None, number
            if first:
                self.ask()
                return
        raise StopNow
