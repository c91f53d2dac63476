"""Places that threads wait for, such as a bridge's writers, or the one turn to write into a file.

Waking a thread for each transaction takes a tenth of the time of a small transaction. So a thread that begins one
transaction after the other keeps its place for some of them while others wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, SimpleQueue

from txnbridge._deadline import Deadline

# How often the first of those who wait looks whether a place is free because its last owner does not come back.
_LOOK_SECONDS = 0.0005
# How often the others look whether they are the first by now: whoever was to tell them may have been interrupted.
_LOOK_BEHIND_SECONDS = 0.1


class _Ticket:
    __slots__ = ("thread", "woken")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.woken: SimpleQueue[None] = SimpleQueue()


class FairSemaphore:
    """So many places, for whoever came first. A thread may keep its own for so many seconds while others wait.

    Any step may be interrupted by an exception from a signal handler. So each step can be repeated, and the first of
    those who wait does what an interrupted one has left out. Where a thread never has two places at once
    (`one_per_thread`), one that comes again gives back what it could not give back before.
    """

    def __init__(self, size: int, keep_seconds: float, *, one_per_thread: bool = False) -> None:
        self._size = size
        self._keep_seconds = keep_seconds
        self._one_per_thread = one_per_thread
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._waiting: deque[_Ticket] = deque()
        self._inside: set[_Ticket] = set()
        self._dropped: deque[_Ticket] = deque()  # their places went without `leave`
        self._since: dict[int, float] = {}  # the threads that have a place, or had it last, have it since then

    @property
    def busy(self) -> int:
        """How many places are taken."""
        with self._guard:
            self._clear_dropped()
            return len(self._inside)

    def place(self) -> Place:
        """Return a place for this thread; it is taken by `Place.enter`."""
        return Place(self)

    def _enter(self, ticket: _Ticket) -> bool:
        """Take a place for the ticket, or queue up; whether it is inside."""
        with self._guard:
            self._clear_dropped()
            if ticket in self._inside:
                return True
            if self._one_per_thread:
                for earlier in [other for other in self._inside if other.thread == ticket.thread]:
                    self._inside.discard(earlier)
            if len(self._inside) < self._size and (not self._waiting or self._keeps(ticket.thread)):
                self._let_in(ticket)
                return True
            if ticket not in self._waiting:
                self._waiting.append(ticket)
            return False

    def _keeps(self, thread: int) -> bool:
        return time.monotonic() - self._since.get(thread, 0.0) < self._keep_seconds

    def _let_in(self, ticket: _Ticket) -> None:
        self._since.setdefault(ticket.thread, time.monotonic())
        self._inside.add(ticket)

    def _wait(self, ticket: _Ticket, deadline: Deadline) -> bool:
        """Wait in the queue until the deadline; whether the ticket is inside."""
        while True:
            with self._guard:
                pause = _LOOK_SECONDS if self._is_first(ticket) else _LOOK_BEHIND_SECONDS
            try:
                ticket.woken.get(timeout=min(deadline.left(), pause))
            except Empty:
                with self._guard:
                    self._clear_dropped()
                    if self._is_first(ticket) and len(self._inside) < self._size:
                        self._let_first_in()
            if ticket in self._inside:
                return True
            if deadline.expired:
                return False

    def _is_first(self, ticket: _Ticket) -> bool:
        return bool(self._waiting) and self._waiting[0] is ticket

    def _let_first_in(self) -> None:
        ticket = self._waiting[0]
        self._since.pop(ticket.thread, None)
        self._let_in(ticket)
        self._waiting.popleft()
        ticket.woken.put(None)
        if self._waiting:
            self._waiting[0].woken.put(None)  # it is the first now

    def _leave(self, ticket: _Ticket) -> None:
        """Give the ticket's place back, or leave the queue."""
        with self._guard:
            self._clear_dropped()
            self._forget(ticket)
            if not self._waiting:
                self._since.clear()
            elif len(self._inside) < self._size and not self._keeps(ticket.thread):
                self._since.pop(ticket.thread, None)
                self._let_first_in()

    def _forget(self, ticket: _Ticket) -> None:
        self._inside.discard(ticket)
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            if self._waiting:
                self._waiting[0].woken.put(None)

    def _clear_dropped(self) -> None:
        while self._dropped:
            self._forget(self._dropped[0])
            self._dropped.popleft()


class Place:
    """One thread's place, or its wait for one. If it goes without `leave`, its place is given back all the same."""

    __slots__ = ("_ticket", "_turns")

    def __init__(self, turns: FairSemaphore) -> None:
        self._turns = turns
        self._ticket: _Ticket | None = _Ticket(threading.get_ident())

    def enter(self, deadline: Deadline) -> bool:
        """Take the place; False if none became free in time. Whoever tries again has kept its position in the queue."""
        ticket = self._ticket
        assert ticket is not None
        return self._turns._enter(ticket) or self._turns._wait(ticket, deadline)

    def leave(self) -> None:
        """Give it back, or wait no longer; any thread may."""
        if self._ticket is not None:
            self._turns._leave(self._ticket)
            self._ticket = None

    def __del__(self) -> None:
        # Garbage is collected at any time, also while the lock is held, so no lock is taken here.
        ticket = getattr(self, "_ticket", None)  # none where an interrupt came before there was one
        if ticket is not None:
            self._turns._dropped.append(ticket)
