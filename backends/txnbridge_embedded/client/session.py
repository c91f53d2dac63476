"""One connection to the file for what is neither a writer's nor a reader's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from txnbridge.errors import DeadlineExceeded, InvalidState, OutcomeUnknown
from txnbridge.spi import Deadline, Emitter
from txnbridge_embedded.client.store import CommitUnclear, Connection, Store
from txnbridge_embedded.settings import Settings


class Session:
    """`with session(deadline) as connection:`, for one caller at a time."""

    def __init__(self, store: Store, settings: Settings, events: Emitter) -> None:
        self.store = store
        self.settings = settings
        self.events = events
        self._lock = threading.Lock()
        self._connection: Connection | None = store.connect()
        self._closed = False

    @contextmanager
    def __call__(self, deadline: Deadline) -> Iterator[Connection]:
        if not self._lock.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(f"other calls kept {self.store.path} busy for {deadline.seconds:g} s")
        try:
            if self._connection is None:
                if self._closed:
                    raise InvalidState("this bridge is closed")
                self._connection = self.store.connect()
            yield self._connection
        except (CommitUnclear, OutcomeUnknown):
            self._disconnect()  # whatever state it is in
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
