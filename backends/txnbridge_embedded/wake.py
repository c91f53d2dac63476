"""Waiting until somebody has written into the file, in whatever process."""

from __future__ import annotations

import sqlite3
import time

# How often a waiting reader looks. Sleeping and waking costs about 40 us of a core each time, so the longer pause keeps
# an idle reader at 1 % and wakes it after 2 ms on average; the shorter one serves those who are talking to each other.
_SHORT, _LONG = 0.001, 0.004
_TALKING = 0.02  # seconds after the last change during which a next one is likely


class Watch:
    """Tells when another connection has changed the file. It asks SQLite, which answers from shared memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._cursor = connection.cursor()
        self._seen: object = None
        self._changed_at = 0.0

    def mark(self) -> None:
        """What is there now is known (or will be looked at next)."""
        self._seen = self._version()

    def wait(self, seconds: float) -> None:
        """Return as soon as something has changed since `mark`, or when the time is over."""
        until = time.monotonic() + seconds
        while self._version() == self._seen:
            now = time.monotonic()
            if now >= until:
                return
            pause = _SHORT if now - self._changed_at < _TALKING else _LONG
            time.sleep(min(pause, until - now))
        self._changed_at = time.monotonic()

    def _version(self) -> object:
        try:
            return self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError:
            # The file is being recovered: that is a change, and whoever looks next meets what is wrong, if it lasts.
            return None
