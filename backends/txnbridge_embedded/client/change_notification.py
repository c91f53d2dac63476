"""Lets a reader wait until another connection, in any process, has committed into the file.

By `PRAGMA data_version` SQLite shows whether another connection has changed the file. But the pragma has to be polled.
Linux notifies by inotify when the write-ahead log is written, some milliseconds before a commit. So on Linux a reader
waits for the notification, and then polls SQLite, at first often. On other systems the reader always polls.
"""

from __future__ import annotations

import ctypes
import os
import select
import sqlite3
import time
from pathlib import Path

from txnbridge_embedded.client.store import FileConnection

# The first pause after the write-ahead log was written, for quick commits.
_FIRST_PAUSE = 0.001
# Later pauses are this share of the time since the write. So the delay is at most this share of the commit's duration,
# and a reader soon polls less often after a write without a commit.
_PAUSE_SHARE = 0.25
# The longest pause without inotify: polling takes less than 2 % of a core, and the mean delay is 2 ms.
_BLIND_PAUSE = 0.004

_IN_MODIFY = 2  # <sys/inotify.h>


class ChangeNotification:
    """Waits for commits into the file by connections other than the reader's own."""

    def __init__(self, connection: FileConnection, path: Path) -> None:
        self._connection, self._cursor = connection, connection.cursor()
        self._seen: object = None
        self._written_at = 0.0
        self._log = _WalWatch(f"{path}-wal")

    def remember_version(self) -> None:
        self._seen = self._version()

    def wait(self, seconds: float) -> None:
        """Wait until the file has changed since `remember_version` was called, or until the time has passed."""
        until = time.monotonic() + seconds
        while self._version() == self._seen:
            now = time.monotonic()
            if now >= until:
                return
            pause = max(_FIRST_PAUSE, _PAUSE_SHARE * (now - self._written_at))
            if self._log.is_written_within(min(pause, until - now)):
                self._written_at = time.monotonic()
                time.sleep(_FIRST_PAUSE)  # otherwise this process would be busy during another's long write
        if self._log.blind:
            self._written_at = time.monotonic()

    def _version(self) -> object:
        try:
            with self._connection.in_use():
                return self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError:
            # The file is being recovered, which is a change. A permanent error is raised by the reader's next query.
            return None

    def close(self) -> None:
        self._log.close()


class _WalWatch:
    """Watches the write-ahead log by Linux's inotify.

    `blind` is true if the system has no inotify, or has reached its limit of watches.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = _watch(path)
        self.blind = self._descriptor < 0
        self._poll = select.poll()
        if not self.blind:
            self._poll.register(self._descriptor, select.POLLIN)

    def is_written_within(self, seconds: float) -> bool:
        """Wait for a write to the file, and return whether there was one; without inotify only wait, briefly."""
        if self.blind:
            time.sleep(min(seconds, _BLIND_PAUSE))
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
    """Return an inotify descriptor, which becomes readable when a file is written; -1 if there is none."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return -1
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        return -1
    return descriptor
