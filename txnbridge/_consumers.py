"""The consumers of a bridge, which its end closes, and the readers of those that were dropped without a close."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from txnbridge._connection import Connection, close_logging_errors, exiting
from txnbridge._deadline import Deadline
from txnbridge.errors import InvalidState
from txnbridge.spi import Reader

if TYPE_CHECKING:
    from txnbridge._consumer import Consumer

# How often closing looks whether another thread's poll has ended; most take milliseconds.
_LOOK_SECONDS = 0.01


class Consumers:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._guard = threading.RLock()  # a signal handler may come here, too
        self._alive: weakref.WeakKeyDictionary[Consumer, Reader] = weakref.WeakKeyDictionary()
        self._readers: set[Reader] = set()  # theirs, and those of consumers that were dropped
        self._dropped: SimpleQueue[Reader | None] = SimpleQueue()  # for the thread that closes the latter
        self._closer: threading.Thread | None = None  # that thread

    def add(self, consumer: Consumer, reader: Reader) -> None:
        with self._guard:
            self._alive[consumer] = reader
            self._readers.add(reader)
            if self._closer is None:
                self._close_what_is_dropped()

    def _close_what_is_dropped(self) -> None:
        name = f"txnbridge {self._connection.name} dropped"
        arguments = weakref.ref(self), self._dropped
        self._closer = threading.Thread(target=_close_dropped, args=arguments, name=name, daemon=True)
        self._closer.start()
        weakref.finalize(self, self._dropped.put, None).atexit = False

    def drop(self, reader: Reader) -> None:
        """Its consumer is gone. (Called by the garbage collector: no lock is taken here.)"""
        self._dropped.put(reader)

    def close_reader(self, reader: Reader, deadline: Deadline) -> None:
        reader.close(deadline)
        with self._guard:
            self._readers.discard(reader)

    def close_dropped(self, reader: Reader) -> None:
        try:
            with self._connection.call():
                self.close_reader(reader, self._connection.deadline())
        except InvalidState:  # the bridge is being closed, and closes it
            if not self._connection.closed:
                raise

    def close(self, polls: Deadline, deadline: Deadline) -> None:
        """All of them, by the deadline. A call of another thread is waited for until `polls`, and then left to it.

        They close side by side: a member that is still joining its group may take seconds.
        """
        with self._guard:
            consumers = list(self._alive.items())
            dropped = self._readers.difference(reader for _, reader in consumers)
        closing = [partial(close_logging_errors, _close, consumer, polls, deadline) for consumer, _ in consumers]
        closing += [partial(close_logging_errors, self.close_reader, reader, deadline) for reader in dropped]
        beside = [threading.Thread(target=close, daemon=True) for close in closing[1:]]
        if exiting():  # then no thread begins any more
            beside = []
        for thread in beside:
            thread.start()
        for close in closing[: len(closing) - len(beside)]:
            close()
        for thread in beside:
            thread.join(deadline.left())
        self._dropped.put(None)


def _close(consumer: Consumer, polls: Deadline, deadline: Deadline) -> None:
    while True:
        try:
            return consumer.close(deadline.left())
        except InvalidState:  # another thread polls
            if polls.expired:
                with suppress(RuntimeError):  # none begins while the interpreter ends
                    threading.Thread(target=consumer._close_behind_its_bridge, daemon=True).start()
                raise
        time.sleep(_LOOK_SECONDS)


def _close_dropped(consumers_of: Callable[[], Consumers | None], dropped: SimpleQueue[Reader | None]) -> None:
    """In a thread: close the readers of consumers that were dropped without a close, so that others get their part."""
    while (reader := dropped.get()) is not None:
        if (consumers := consumers_of()) is not None:
            close_logging_errors(consumers.close_dropped, reader)
        del consumers, reader  # neither is kept while this waits
