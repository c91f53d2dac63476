"""A bridge's SQLite connection for all calls except those of writers and readers, which have their own connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from txnbridge.errors import InvalidState, OutcomeUnknown
from txnbridge.spi import Deadline
from txnbridge_embedded.client.store import CommitUnclear, FileConnection, Store


class SharedConnection:
    """A SQLite connection that one caller uses at a time: `with shared(deadline) as connection:`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._connection: FileConnection | None = store.connect()
        self._closed = False

    @contextmanager
    def __call__(self, deadline: Deadline) -> Iterator[FileConnection]:
        with deadline.holding(self._lock, f"other calls of this bridge used {self.store.path}"):
            if self._connection is None:
                if self._closed:
                    raise InvalidState("this bridge is closed")
                self._connection = self.store.connect()
            try:
                yield self._connection
            except (CommitUnclear, OutcomeUnknown):
                self._disconnect()  # the connection's state is not known
                raise

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        if (connection := self._connection) is not None:
            connection.close()
            self._connection = None
