"""The queue in which entries wait to be taken, for one consumer or for many."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from .clock import ClientDeadline
from .codec import Fields
from .incoming import ReceivedEntry


class EntryAcceptor(Protocol):
    """A consumer, as its inbox uses it."""

    def accept(self, generation: int, fields: Fields, tail: bytes) -> ReceivedEntry | None: ...


_Waiting = tuple[EntryAcceptor, int, Fields, bytes]

# What a program with some partitions can spare, and enough to keep a fast network busy.
DEFAULT_BYTES = 64 * 1024 * 1024


class Inbox:
    """A queue that consumers share. Permits bound it to about `max_bytes` over all of them.

    Each consumer may hold as much again of incomplete messages in chunks. One thread takes at a time.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._consumers: set[int] = set()
        self._woken = False

    def take(self, timeout: float, most: int = 100) -> list[ReceivedEntry]:
        """Return up to `most` entries in the order of arrival; empty if none came in time.

        Return an empty list at once when one of its consumers is lost, which `lost` explains.
        """
        deadline = ClientDeadline(timeout)
        while True:
            taken, woken = self._taken(deadline, most)
            accepted = (consumer.accept(generation, fields, tail) for consumer, generation, fields, tail in taken)
            entries = [entry for entry in accepted if entry is not None]
            if entries or woken or deadline.expired:
                return entries

    def _taken(self, deadline: ClientDeadline, most: int) -> tuple[list[_Waiting], bool]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._woken, deadline.left)
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            woken, self._woken = self._woken and not taken, self._woken and bool(taken)
            return taken, woken

    # ------------------------------------------------------------------------------------------ by consumers

    @property
    def bytes_each(self) -> int:
        """Return how many bytes each consumer may have on their way."""
        return self.max_bytes // max(1, len(self._consumers))

    def join(self, consumer: EntryAcceptor) -> None:
        with self._changed:
            self._consumers.add(id(consumer))

    def leave(self, consumer: EntryAcceptor) -> None:
        """Remove a consumer, and drop its waiting entries."""
        with self._changed:
            self._consumers.discard(id(consumer))
        self.drop(consumer)

    def put(self, consumer: EntryAcceptor, generation: int, fields: Fields, tail: bytes) -> None:
        with self._changed:
            self._waiting.append((consumer, generation, fields, tail))
            self._changed.notify()

    def drop(self, consumer: EntryAcceptor) -> list[tuple[int, Fields, bytes]]:
        """Take out the waiting entries of one consumer."""
        with self._changed:
            dropped = [(item[1], item[2], item[3]) for item in self._waiting if item[0] is consumer]
            self._waiting = deque(item for item in self._waiting if item[0] is not consumer)
        return dropped

    def wake(self) -> None:
        """Let `take` return, so that its caller looks at its consumers."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()
