"""A fair semaphore: threads acquire its places in the order in which they asked.

It limits the open transactions of a bridge to its writers, and the threads of a process that write into an embedded
broker's file to one at a time. Waking a thread for each transaction would take a tenth of the time of a small
transaction. So a thread that runs one transaction after the other keeps its place for a short time while other threads
wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from txnbridge._base.deadline import Deadline, Wake

# The interval at which the first waiting thread checks for a free place whose last thread has not asked for it again.
_LOOK_SECONDS = 0.0005
# The interval at which the other waiting threads check whether they are first in the queue, because the thread that had
# to wake them may have been interrupted.
_LOOK_BEHIND_SECONDS = 0.1


class _Ticket:
    __slots__ = ("thread", "wake")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.wake = Wake()


class FairSemaphore:
    """A semaphore with `size` places, acquired in the order of requests.

    A thread may release and acquire a place repeatedly for `keep_seconds` while other threads wait. A signal handler's
    exception may interrupt any step; so each step can be repeated, and the first waiting thread completes interrupted
    steps. With `one_per_thread`, a thread that asks for a place first gives up any place that it has already.
    """

    def __init__(self, size: int, keep_seconds: float, *, one_per_thread: bool = False) -> None:
        self._size = size
        self._keep_seconds = keep_seconds
        self._one_per_thread = one_per_thread
        self._guard = threading.RLock()  # reentrant, because a signal handler may run while it is held
        self._waiting: deque[_Ticket] = deque()
        self._inside: set[_Ticket] = set()
        self._dropped: deque[_Ticket] = deque()  # tickets of places that were garbage-collected without `leave`
        self._since: dict[int, float] = {}  # by thread that has or last had a place: the time when it first got one

    @property
    def busy(self) -> int:
        """The number of taken places."""
        with self._guard:
            self._clear_dropped()
            return len(self._inside)

    def place(self) -> Place:
        """Return an object for this thread, whose `enter` acquires a place of the semaphore and `leave` releases it."""
        return Place(self)

    def _enter(self, ticket: _Ticket) -> bool:
        """Acquire a place for the ticket, or append it to the queue; return whether it has a place."""
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
        """Wait in the queue until the ticket gets a place or the deadline passes; return whether it has one."""
        while True:
            with self._guard:
                pause = _LOOK_SECONDS if self._is_first(ticket) else _LOOK_BEHIND_SECONDS
            ticket.wake.wait(min(deadline.left(), pause))
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
        ticket.wake.wake()
        if self._waiting:
            self._waiting[0].wake.wake()  # this ticket is the first in the queue now

    def _leave(self, ticket: _Ticket) -> None:
        """Release the ticket's place, or remove the ticket from the queue."""
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
                self._waiting[0].wake.wake()

    def _clear_dropped(self) -> None:
        while self._dropped:
            self._forget(self._dropped[0])
            self._dropped.popleft()


class Place:
    """One thread's place in a semaphore, or its wait for one. Garbage collection releases a place that was not left."""

    __slots__ = ("_semaphore", "_ticket")

    def __init__(self, semaphore: FairSemaphore) -> None:
        self._semaphore = semaphore
        self._ticket: _Ticket | None = _Ticket(threading.get_ident())

    def enter(self, deadline: Deadline) -> bool:
        """Acquire a place; return False if none is free by the deadline. The thread then stays in the queue."""
        ticket = self._ticket
        assert ticket is not None
        return self._semaphore._enter(ticket) or self._semaphore._wait(ticket, deadline)

    def leave(self) -> None:
        """Release the place, or stop waiting for one. Any thread may call this."""
        if self._ticket is not None:
            self._semaphore._leave(self._ticket)
            self._ticket = None

    def __del__(self) -> None:
        # Take no lock here, because garbage collection may run while the lock is held.
        ticket = getattr(self, "_ticket", None)  # missing if a signal handler's exception interrupted `__init__`
        if ticket is not None:
            self._semaphore._dropped.append(ticket)
