"""`Consumers`: closes a bridge's consumers with the bridge, and garbage-collected consumers on a thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from txnbridge._base.connection import Connection, close_logging_errors, exiting
from txnbridge._base.deadline import Deadline
from txnbridge._write.token_operations import Outcomes
from txnbridge._write.writers import Writers
from txnbridge.errors import InvalidState
from txnbridge.spi import Reader

# The interval at which a closing bridge checks whether another thread's poll has ended; most polls take milliseconds.
_LOOK_SECONDS = 0.01


class ClosableConsumer(Protocol):
    def close(self, timeout: float | None = None) -> None: ...

    def _close_behind_bridge(self) -> None: ...


class Consumers:
    """A bridge's open consumers, which are closed with the bridge, and the objects by which they look outcomes up."""

    def __init__(self, connection: Connection, outcomes: Outcomes, writers: Writers) -> None:
        self.connection = connection
        self.outcomes = outcomes
        self.writers = writers
        self._guard = threading.RLock()  # reentrant, because a signal handler may run while it is held
        self._alive: weakref.WeakKeyDictionary[ClosableConsumer, Reader] = weakref.WeakKeyDictionary()
        self._readers: set[Reader] = set()  # readers of open consumers, and of garbage-collected ones until closed
        # Readers of garbage-collected consumers; None ends the thread that closes these readers.
        self._dropped: SimpleQueue[Reader | None] = SimpleQueue()
        self._closer: threading.Thread | None = None  # closes the readers of garbage-collected consumers

    def add(self, consumer: ClosableConsumer, reader: Reader) -> None:
        with self._guard:
            self._alive[consumer] = reader
            self._readers.add(reader)
            if self._closer is None:
                self._start_closer()

    def _start_closer(self) -> None:
        name = f"txnbridge {self.connection.name} dropped"
        arguments = weakref.ref(self), self._dropped
        with suppress(RuntimeError):  # if this machine starts no more threads now: the next opening tries again
            (thread := threading.Thread(target=_close_dropped, args=arguments, name=name, daemon=True)).start()
            self._closer = thread
            weakref.finalize(self, self._dropped.put, None).atexit = False

    def drop(self, reader: Reader) -> None:
        """Have a thread close a garbage-collected consumer's reader. The collector calls this, so it takes no lock."""
        self._dropped.put(reader)

    def close_reader(self, reader: Reader, deadline: Deadline) -> None:
        reader.close(deadline)
        with self._guard:
            self._readers.discard(reader)

    def close_dropped(self, reader: Reader) -> None:
        try:
            with self.connection.call():
                self.close_reader(reader, self.connection.deadline())
        except InvalidState:  # the bridge is being closed, and `Consumers.close` closes the reader
            if not self.connection.closed:
                raise

    def close(self, polls: Deadline, deadline: Deadline) -> None:
        """Close all consumers by `deadline`. Wait for polls of other threads until the deadline `polls`.

        Each consumer is closed on a thread of its own, because a member that is still joining its group takes seconds.
        """
        with self._guard:
            consumers = list(self._alive.items())
            dropped = self._readers.difference(reader for _, reader in consumers)
        closing = [partial(close_logging_errors, _close, consumer, polls, deadline) for consumer, _ in consumers]
        closing += [partial(close_logging_errors, self.close_reader, reader, deadline) for reader in dropped]
        beside = [threading.Thread(target=close, daemon=True) for close in closing[1:]]
        if exiting():  # an interpreter that is ending starts no threads
            beside = []
        for thread in beside:
            thread.start()
        for close in closing[: len(closing) - len(beside)]:
            close()
        for thread in beside:
            thread.join(deadline.left())
        self._dropped.put(None)


def _close(consumer: ClosableConsumer, polls: Deadline, deadline: Deadline) -> None:
    while True:
        try:
            return consumer.close(deadline.left())
        except InvalidState:  # another thread is polling
            if polls.expired:
                with suppress(RuntimeError):  # an interpreter that is ending starts no threads
                    threading.Thread(target=consumer._close_behind_bridge, daemon=True).start()
                raise
        time.sleep(_LOOK_SECONDS)


def _close_dropped(consumers_of: Callable[[], Consumers | None], dropped: SimpleQueue[Reader | None]) -> None:
    """Close the readers in `dropped`, so that other members get their partitions; runs in a thread until a None."""
    while (reader := dropped.get()) is not None:
        if (consumers := consumers_of()) is not None:
            close_logging_errors(consumers.close_dropped, reader)
        del consumers, reader  # so that both can be garbage-collected while this thread waits
