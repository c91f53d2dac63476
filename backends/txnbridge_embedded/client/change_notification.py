"""Waits until another connection, in any process, has committed into the file.

SQLite shows by `PRAGMA data_version` whether another connection has changed the file. But this has to be polled, and
each sleep costs some 40 us of a core. Linux notifies by inotify at once when the write-ahead log is written, some
milliseconds before the commit, if one follows. So a waiting reader sleeps until the notification, and then polls
SQLite, at first often. On another system the reader polls all the time.
"""

from __future__ import annotations

import ctypes
import os
import select
import sqlite3
import time
from pathlib import Path

# The first pause after the write-ahead log was written, for quick commits.
_SHORT = 0.001
# Later pauses are this share of the time since the write. So a commit is noticed late by this share of its duration at
# most, and the reader soon polls less often after a write without a commit.
_PART = 0.25
# The longest pause of a reader without inotify: polling takes less than 2 % of a core, and the delay is 2 ms.
_LONG = 0.004

_IN_MODIFY = 2  # <sys/inotify.h>


class ChangeNotification:
    """Detects and waits for commits into the file by connections other than the reader's own."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._cursor = connection.cursor()
        self._seen: object = None
        self._written_at = 0.0
        self._log = _LogWatch(f"{path}-wal")

    def mark(self) -> None:
        """Remember the file's current version, with which `wait` compares."""
        self._seen = self._version()

    def wait(self, seconds: float) -> None:
        """Wait until the file has changed since `mark`, or until the time has passed."""
        until = time.monotonic() + seconds
        while self._version() == self._seen:
            now = time.monotonic()
            if now >= until:
                return
            pause = max(_SHORT, _PART * (now - self._written_at))
            if self._log.is_written_within(min(pause, until - now)):
                self._written_at = time.monotonic()
                time.sleep(_SHORT)  # without this pause a long write would keep this process busy as well
        if self._log.blind:
            self._written_at = time.monotonic()

    def _version(self) -> object:
        try:
            return self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError:
            # The file is being recovered, which is a change; the reader's next query raises a lasting error.
            return None

    def close(self) -> None:
        """Close the inotify descriptor."""
        self._log.close()


class _LogWatch:
    """Linux's inotify on one file. `blind` is true without inotify, or if the limit of watches is reached."""

    def __init__(self, path: str) -> None:
        self._descriptor = _watch(path)
        self.blind = self._descriptor < 0
        self._poll = select.poll()
        if not self.blind:
            self._poll.register(self._descriptor, select.POLLIN)

    def is_written_within(self, seconds: float) -> bool:
        """Wait for a write to the file, and return whether one came. A blind watch waits briefly and returns False."""
        if self.blind:
            time.sleep(min(seconds, _LONG))
            return False
        if not self._poll.poll(seconds * 1000):
            return False
        os.read(self._descriptor, 1 << 16)  # the kind of event does not matter
        return True

    def close(self) -> None:
        descriptor, self._descriptor, self.blind = self._descriptor, -1, True
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _watch(path: str) -> int:
    """Return a descriptor that becomes readable when a file is written; -1 if the system gives none."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return -1
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        return -1
    return descriptor
