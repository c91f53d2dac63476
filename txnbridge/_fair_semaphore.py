"""A semaphore that is fair: threads get its places in the order in which they came.

A bridge's writers are such places, and so is the one turn to write into a file. Waking a thread for each transaction
would take a tenth of the time of a small transaction. So a thread that begins one transaction after the other keeps its
place for a short time while others wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, SimpleQueue

from txnbridge._deadline import Deadline

# How often the first waiting thread looks whether a place is free because its last thread has not come back.
_LOOK_SECONDS = 0.0005
# How often the other waiting threads look whether they are first: the thread that had to wake them may have been
# interrupted.
_LOOK_BEHIND_SECONDS = 0.1


class _Ticket:
    __slots__ = ("thread", "woken")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.woken: SimpleQueue[None] = SimpleQueue()


class FairSemaphore:
    """Gives `size` places to threads, first come first served. A thread keeps its place for `keep_seconds` at most.

    Any step may be interrupted by an exception from a signal handler. So each step can be repeated, and the first
    waiting thread does what an interrupted one has left out. With `one_per_thread` a thread never has two places: one
    that comes again gives back the place that it could not give back before.
    """

    def __init__(self, size: int, keep_seconds: float, *, one_per_thread: bool = False) -> None:
        self._size = size
        self._keep_seconds = keep_seconds
        self._one_per_thread = one_per_thread
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._waiting: deque[_Ticket] = deque()
        self._inside: set[_Ticket] = set()
        self._dropped: deque[_Ticket] = deque()  # of places that were garbage-collected without `leave`
        self._since: dict[int, float] = {}  # by thread that has a place, or had it last: the time when it got it

    @property
    def busy(self) -> int:
        """The number of taken places."""
        with self._guard:
            self._clear_dropped()
            return len(self._inside)

    def place(self) -> Place:
        """Return a place for this thread; `Place.enter` takes it."""
        return Place(self)

    def _enter(self, ticket: _Ticket) -> bool:
        """Take a place for the ticket, or queue up; return whether it has a place."""
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
        """Wait in the queue until the deadline; return whether the ticket has a place."""
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
            self._waiting[0].woken.put(None)  # it is first now

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
    """One thread's place, or its wait for one. A place that is garbage-collected without `leave` is given back, too."""

    __slots__ = ("_semaphore", "_ticket")

    def __init__(self, semaphore: FairSemaphore) -> None:
        self._semaphore = semaphore
        self._ticket: _Ticket | None = _Ticket(threading.get_ident())

    def enter(self, deadline: Deadline) -> bool:
        """Take the place; return False if none became free in time. The thread keeps its position in the queue."""
        ticket = self._ticket
        assert ticket is not None
        return self._semaphore._enter(ticket) or self._semaphore._wait(ticket, deadline)

    def leave(self) -> None:
        """Give the place back, or stop waiting for it. Any thread may call this."""
        if self._ticket is not None:
            self._semaphore._leave(self._ticket)
            self._ticket = None

    def __del__(self) -> None:
        # Garbage is collected at any time, also while the lock is held, so no lock is taken here.
        ticket = getattr(self, "_ticket", None)  # missing if an interrupt came before it was set
        if ticket is not None:
            self._semaphore._dropped.append(ticket)
