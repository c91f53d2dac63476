"""The queue in which received entries of one or several consumers wait until the caller takes them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from txnbridge_pulsar.client.format.codec import Fields
from txnbridge_pulsar.client.format.received_entries import ReceivedEntry

from .deadline import ClientDeadline


class EntryAcceptor(Protocol):
    """The method of a consumer that its inbox calls to parse an entry, when the caller takes the entry."""

    def accept(self, generation: int, fields: Fields, tail: bytes) -> ReceivedEntry | None: ...


_Waiting = tuple[EntryAcceptor, int, Fields, bytes]

# The default size: enough to keep a fast network busy.
DEFAULT_BYTES = 64 * 1024 * 1024


class Inbox:
    """A queue of received entries, shared by several consumers. Permits limit it to about `max_bytes` in all.

    Each consumer may also keep chunks of incomplete messages, up to `max_bytes`. Only one thread at a time may call
    `take`.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._consumers: set[int] = set()
        self._woken = False

    def take(self, timeout: float, most: int = 100) -> list[ReceivedEntry]:
        """Return up to `most` entries in the order of arrival. Wait for the first entry; at the timeout return an empty
        list.

        Return an empty list at once if a consumer of this inbox is lost; `PulsarConsumer.lost` has the reason.
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
        """Return how many bytes of the inbox each consumer may fill: equal shares."""
        return self.max_bytes // max(1, len(self._consumers))

    def join(self, consumer: EntryAcceptor) -> None:
        with self._changed:
            self._consumers.add(id(consumer))

    def leave(self, consumer: EntryAcceptor) -> None:
        """Remove a consumer that is closed, and the entries of it that nobody has taken."""
        with self._changed:
            self._consumers.discard(id(consumer))
        self.drop(consumer)

    def put(self, consumer: EntryAcceptor, generation: int, fields: Fields, tail: bytes) -> None:
        with self._changed:
            self._waiting.append((consumer, generation, fields, tail))
            self._changed.notify()

    def drop(self, consumer: EntryAcceptor) -> list[tuple[int, Fields, bytes]]:
        """Remove and return the waiting entries of one consumer."""
        with self._changed:
            dropped = [(item[1], item[2], item[3]) for item in self._waiting if item[0] is consumer]
            self._waiting = deque(item for item in self._waiting if item[0] is not consumer)
        return dropped

    def wake(self) -> None:
        """Make a waiting `take` return, so that its caller can check the consumers."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()
