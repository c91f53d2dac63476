"""Appends of several threads in one request: a thread that appends also sends what other threads wait to append."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from txnbridge.spi import Deadline
from txnbridge_rocketmq.client.errors import RemotingError, ResponseTimeout
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage

T = TypeVar("T")

# The limits of one request. A broker takes 4 MiB by default.
_MOST_TOGETHER, _MOST_BYTES = 64, 1 << 20
# A request has the time of the thread that sends it. A message goes along only if its thread has hardly more time, so
# that a thread with a short deadline fails no other one.
_MORE_TIME = 1.1


class _Append(Generic[T]):
    """A message that waits to be stored. `wake` is released once it has a result, or once its thread has to send."""

    def __init__(self, message: WireMessage, deadline: Deadline) -> None:
        self.message = message
        self.deadline = deadline
        self.result: T | RemotingError | None = None
        self.sends = False
        self.wake = threading.Lock()
        self.wake.acquire()


class AppendQueue(Generic[T]):
    """Stores messages of several threads together: one thread at a time calls `send` for messages that wait.

    The next sender is the first waiting thread that has about as much time left as any other. `send` returns a result
    for each message. An error of `send` is the result of each of its messages.
    """

    def __init__(self, send: Callable[[Sequence[WireMessage], Deadline], Sequence[T]]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[_Append[T]] = deque()
        self._has_sender = False

    def store(self, message: WireMessage, deadline: Deadline) -> T:
        """Store a message, and return its result. Raise a `RemotingError`."""
        append: _Append[T] = _Append(message, deadline)
        try:
            with self._lock:
                self._waiting.append(append)
                append.sends = not self._has_sender
                self._has_sender = True
            if append.sends or (append.wake.acquire(timeout=deadline.left()) and append.sends):
                self._send_waiting(append)
        finally:
            self._leave(append)
        if append.result is None:
            raise ResponseTimeout("another thread has sent this message and got no answer", may_have_had_effect=True)
        if isinstance(append.result, RemotingError):
            raise append.result
        return append.result

    def _leave(self, append: _Append[T]) -> None:
        """Take back a message that was not sent. If its thread was to send, let another waiting thread do so."""
        with self._lock:
            if append.result is None and append in self._waiting:
                self._waiting.remove(append)
                append.result = ResponseTimeout("no time was left to send this message")
            if not append.sends:
                return
            self._has_sender = bool(self._waiting)
            if self._waiting:
                left = [(each, each.deadline.left()) for each in self._waiting]
                longest = max(seconds for _, seconds in left)
                sender = next(each for each, seconds in left if seconds * _MORE_TIME >= longest)
                sender.sends = True
                sender.wake.release()

    def _send_waiting(self, own: _Append[T]) -> None:
        with self._lock:
            together = self._take(own)
        found: Sequence[T | RemotingError | None] = [None] * len(together)
        try:
            found = self._send([append.message for append in together], own.deadline)
        except RemotingError as error:
            found = [error] * len(together)
        finally:
            for append, result in zip(together, found, strict=True):
                append.result = result
                if not append.sends:
                    append.wake.release()

    def _take(self, own: _Append[T]) -> list[_Append[T]]:
        """Remove this thread's own message and the first others that fit into one request, and return them in order."""
        taken, size = {own}, len(own.message.body)
        most_time = own.deadline.left() * _MORE_TIME
        for append in self._waiting:
            if append is own or append.deadline.left() > most_time:
                continue
            size += len(append.message.body)
            if len(taken) >= _MOST_TOGETHER or size > _MOST_BYTES:
                break
            taken.add(append)
        together = [append for append in self._waiting if append in taken]
        self._waiting = deque(append for append in self._waiting if append not in taken)
        return together
