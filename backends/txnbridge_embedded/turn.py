"""Whose turn it is to write.

SQLite gives its lock to whoever asks at the right moment: that starves others, and all the asking slows down the one
who writes. So writers queue for locks of their own, which the system serves in order, waking one waiter at a time, and
takes back when a process dies. Nobody can ask the system to wait for one no longer than some time, so a thread waits.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from txnbridge.errors import AccessDenied


class Turn:
    """One connection's place in the queue; one thread uses it at a time.

    Who writes has locked `{file}-turn`, and who is next `{file}-next`: without that, a writer that goes on at once
    would be quicker than the one that has to wake first.
    """

    def __init__(self, path: Path) -> None:
        # These locks belong to descriptors, not to processes, so that threads of one process queue as well.
        self._turn = _open(f"{path}-turn")
        self._next = _open(f"{path}-next")
        self.queued = False  # the thread waits
        self._wanted = False  # for the caller; and if it does not wait, the turn is the caller's
        self._closed = False
        self._guard = threading.Lock()  # of these three
        self._thread: threading.Thread | None = None
        self._asked = threading.Semaphore(0)
        self._came = threading.Semaphore(0)

    def take(self, seconds: float) -> bool:
        """Wait for the turn; False if it has not come in time. The place in the queue is kept until `give_back`."""
        with self._guard:
            if not self.queued:
                if self._wanted or self._is_free():
                    self._wanted = True
                    return True
                self._queue()
            self._wanted = True
        return self._came.acquire(timeout=max(0.0, seconds))

    def give_back(self) -> None:
        """Let the next one write; or leave the queue."""
        with self._guard:
            if not self.queued:
                self._came.acquire(blocking=False)  # it may have come when it was not waited for any more
                fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._wanted = False

    def _is_free(self) -> bool:
        """Whether nobody writes or waits; then the turn is ours."""
        try:
            fcntl.flock(self._next, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._next, fcntl.LOCK_UN)
        return True

    def _queue(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="txnbridge-turn", daemon=True)
            self._thread.start()
        self.queued = True
        self._asked.release()

    def _wait(self) -> None:
        while self._asked.acquire() and not self._closed:
            fcntl.flock(self._next, fcntl.LOCK_EX)
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            with self._guard:
                self.queued = False
                if self._wanted:
                    self._came.release()
                else:
                    fcntl.flock(self._turn, fcntl.LOCK_UN)
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._close()

    def close(self) -> None:
        """Leave the queue for good. A thread that waits goes when its turn comes."""
        with self._guard:
            self._closed = True
            self._wanted = False
        if self._thread is None:
            self._close()
        else:
            self._asked.release()

    def _close(self) -> None:
        os.close(self._turn)
        os.close(self._next)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise AccessDenied(f"{path} cannot be opened: {error.strerror}") from error
