"""Places that threads wait for, such as a bridge's writers, or the one turn to write into a file.

To wake a thread for each transaction takes a tenth of what a small one takes. So a thread that begins one after the
other keeps its place for some of them while others wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, SimpleQueue

from txnbridge._deadline import Deadline

# How often the first of those who wait looks whether a place is free because its last owner does not come back.
_LOOK_SECONDS = 0.0005


class _Waiter:
    __slots__ = ("granted", "thread", "woken")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.woken: SimpleQueue[None] = SimpleQueue()
        self.granted = False


class Turns:
    """So many places, for whoever came first. A thread may keep its own for so many seconds while others wait."""

    def __init__(self, size: int, keep_seconds: float) -> None:
        self._size = size
        self._keep_seconds = keep_seconds
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._waiting: deque[_Waiter] = deque()
        self._since: dict[int, float] = {}  # the threads that have a place, or had it last, have it since then
        self.busy = 0  # places that are taken

    def enter(self, deadline: Deadline) -> bool:
        """Take a place; False if none became free in time."""
        thread = threading.get_ident()
        with self._guard:
            if self.busy < self._size and (not self._waiting or thread in self._since):
                self._take(thread)
                return True
            waiter = _Waiter(thread)
            self._waiting.append(waiter)
        try:
            while not self._is_granted(waiter, deadline):
                if deadline.expired:
                    return self._give_up(waiter)
        except BaseException:
            if self._give_up(waiter):
                self.leave()
            raise
        return True

    def leave(self) -> None:
        """Give a place back; any thread may."""
        thread = threading.get_ident()
        with self._guard:
            self.busy -= 1
            if not self._waiting:
                self._since.clear()
            elif time.monotonic() - self._since.get(thread, 0.0) >= self._keep_seconds:
                self._since.pop(thread, None)
                self._grant_next()

    def _take(self, thread: int) -> None:
        self.busy += 1
        self._since.setdefault(thread, time.monotonic())

    def _is_granted(self, waiter: _Waiter, deadline: Deadline) -> bool:
        left = deadline.left()
        try:
            waiter.woken.get(timeout=min(left, _LOOK_SECONDS) if self._is_next(waiter) else left)
        except Empty:
            with self._guard:
                if not waiter.granted and self.busy < self._size and self._waiting[0] is waiter:
                    self._grant_next()
        return waiter.granted

    def _is_next(self, waiter: _Waiter) -> bool:
        with self._guard:
            return bool(self._waiting) and self._waiting[0] is waiter

    def _grant_next(self) -> None:
        waiter = self._waiting.popleft()
        self._take(waiter.thread)
        waiter.granted = True
        waiter.woken.put(None)
        if self._waiting:
            self._waiting[0].woken.put(None)  # it is the first now

    def _give_up(self, waiter: _Waiter) -> bool:
        """Wait no longer; whether a place came at the last moment."""
        with self._guard:
            if not waiter.granted:
                self._waiting.remove(waiter)
                if self._waiting:
                    self._waiting[0].woken.put(None)
            return waiter.granted
