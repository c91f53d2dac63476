"""Waiting until somebody has committed something into the file, in whatever process.

SQLite tells by `PRAGMA data_version` whether another connection has changed the file, but it has to be asked, and
sleeping and waking costs some 40 us of a core each time. Linux tells at once that the write-ahead log is being written,
which comes some milliseconds before the commit that it announces, if one comes. So a waiting reader sleeps until then
and asks from then on, at first often. Where Linux is not there to tell, the reader asks all the time.
"""

from __future__ import annotations

import ctypes
import os
import select
import sqlite3
import time
from pathlib import Path

# The first pause after the log was written, for commits that are quick.
_SHORT = 0.001
# Later pauses are this part of the time since then: so a commit is noticed late by no more than this part of the time
# that it took, and a write that was never committed is soon not asked about any more.
_PART = 0.25
# The longest pause of a reader that nobody tells: it keeps an idle one below 2 % of a core, and wakes it in 2 ms.
_LONG = 0.004

_IN_MODIFY = 2  # <sys/inotify.h>


class Watch:
    """Tells when another connection has changed the file."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._cursor = connection.cursor()
        self._seen: object = None
        self._written_at = 0.0
        self._log = _LogWatch(f"{path}-wal")

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
            pause = max(_SHORT, _PART * (now - self._written_at))
            if self._log.is_written_within(min(pause, until - now)):
                self._written_at = time.monotonic()
                time.sleep(_SHORT)  # or a long write would keep this process busy as well
        if self._log.blind:
            self._written_at = time.monotonic()

    def _version(self) -> object:
        try:
            return self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError:
            # The file is being recovered: that is a change, and whoever looks next meets what is wrong, if it lasts.
            return None

    def close(self) -> None:
        """Let go of what tells."""
        self._log.close()


class _LogWatch:
    """Linux's inotify on one file; `blind` where there is none (or no more, its number is limited)."""

    def __init__(self, path: str) -> None:
        self._descriptor = _watch(path)
        self.blind = self._descriptor < 0
        self._poll = select.poll()
        if not self.blind:
            self._poll.register(self._descriptor, select.POLLIN)

    def is_written_within(self, seconds: float) -> bool:
        """Wait for a write; False if none came. A blind one never sees any, and does not wait for long."""
        if self.blind:
            time.sleep(min(seconds, _LONG))
            return False
        if not self._poll.poll(seconds * 1000):
            return False
        os.read(self._descriptor, 1 << 16)  # what happened is all the same
        return True

    def close(self) -> None:
        descriptor, self._descriptor, self.blind = self._descriptor, -1, True
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _watch(path: str) -> int:
    """A descriptor that becomes readable when a file is written; -1 if that cannot be had."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return -1
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        return -1
    return descriptor
