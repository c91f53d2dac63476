"""Blocking connections to one server: the calling thread sends its requests and reads their responses itself.

So a request wakes no other thread. Requests of the broker, such as check-backs, come on the `RemotingConnection` on
which the client has registered its groups, and never here. Nobody reads an idle connection, so it is looked at before
it is used again, and closed after some seconds. A connection whose response did not come whole, or in time, is closed.

An exception of a signal handler may come behind any call. The connection and the slot that a thread has taken are freed
when nothing refers to them any more, so such a thread loses neither.
"""

from __future__ import annotations

import itertools
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from txnbridge_rocketmq.client.connection import ConnectionSettings
from txnbridge_rocketmq.client.errors import Disconnected, RemotingError, ResponseTimeout, Unreachable
from txnbridge_rocketmq.client.protocol.frames import FrameDecoder, RemotingCommand, RpcRequest
from txnbridge_rocketmq.client.signal_safe_locks import Slot, Slots
from txnbridge_rocketmq.client.transport import connect

# The maximum number of connections to one server; the next request waits. A broker is no faster with more.
MOST_CONNECTIONS = 64
# A connection that was idle for longer is not used again. If its peer, or the way to it, went away without a word, the
# next request would wait for seconds, and then fail. A new connection costs a round trip.
IDLE_SECONDS = 2.0
_READ_BYTES = 64 << 10
# The longest wait in one system call. The deadline is checked between two waits.
_WAIT_SECONDS = 1.0

_opaques = itertools.count(1)


@dataclass(eq=False, repr=False)
class Exchange:
    """Requests that were sent together on one connection, and whose responses `results` reads, in any order."""

    _pool: BlockingPool
    _connection: BlockingConnection
    _requests: dict[int, RpcRequest[Any]]
    _until: float

    def results(self) -> list[Any]:
        """Read the responses. Return, for each request, the decoded response or the `RemotingError` that it met."""
        answers = None
        try:
            answers = self._connection.receive(self._requests, self._until)
        finally:
            if answers is None:
                self._connection.close()
            self._pool.give_back(self._connection)
        return [_result(request, answers[opaque]) for opaque, request in self._requests.items()]

    def abandon(self) -> None:
        self._connection.close()
        self._pool.give_back(self._connection)


class BlockingPool:
    """The blocking connections to one server. Safe for use by several threads."""

    def __init__(self, address: str, settings: ConnectionSettings, most: int = MOST_CONNECTIONS) -> None:
        self.address = address
        self._settings = settings
        self._slots = Slots(most)
        self._idle: list[BlockingConnection] = []
        self._connections: WeakSet[BlockingConnection] = WeakSet()
        self._lock = threading.RLock()  # of the set; reentrant, because a signal handler may run while it is held
        self._closed = threading.Event()

    def begin(self, requests: Sequence[RpcRequest[Any]], until: float) -> Exchange:
        """Send requests on a free or new connection. `Exchange.results` must follow.

        Raise `ValueError` for a request that is too large, or a `RemotingError`.
        """
        numbered = {next(_opaques) & 0x7FFFFFFF: request for request in requests}
        frames = b"".join([self._settings.frame(request, opaque) for opaque, request in numbered.items()])
        connection = self._take(until)
        try:
            connection.send(frames, requests[0].action, until, alone=len(numbered) == 1)
        except BaseException:
            connection.close()
            self.give_back(connection)
            raise
        return Exchange(self, connection, numbered, until)

    def _take(self, until: float) -> BlockingConnection:
        if time.monotonic() >= until:
            raise ResponseTimeout(f"no time was left for a request to {self.address}")
        slot = self._slots.take(until - time.monotonic())
        if slot is None:
            raise ResponseTimeout(f"too many requests are in flight to {self.address}")
        try:
            connection = self._idle_connection() or self._connect(until)
            connection.slot = slot
            return connection
        except BaseException:
            slot.free()
            raise

    def _idle_connection(self) -> BlockingConnection | None:
        self.close_unused()
        with suppress(IndexError):  # none is left
            while not (connection := self._idle.pop()).is_quiet():
                self._drop(connection)
            return connection
        return None

    def _connect(self, until: float) -> BlockingConnection:
        if self._closed.is_set():
            raise Unreachable("this client is closed")
        connection = BlockingConnection(self.address, until, self._settings)
        with self._lock:
            self._connections.add(connection)
        if self._closed.is_set():  # `close` may have listed the connections before this one was added
            connection.shut_down()
        return connection

    def give_back(self, connection: BlockingConnection) -> None:
        """Give a connection back to the pool for other threads; if it is closed, another may be opened in its place."""
        slot, connection.slot = connection.slot, None
        connection.idle_since = time.monotonic()
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._drop(connection)
        if self._closed.is_set() or not connection.is_open:  # if one failed, the server may be gone from the others
            self._close_idle()
        if slot is not None:
            slot.free()

    def _drop(self, connection: BlockingConnection) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)

    def close_unused(self) -> None:
        """Close the connections that were idle for too long: a server closes them, too, and nothing notices that."""
        for connection in list(self._idle):
            if time.monotonic() - connection.idle_since > IDLE_SECONDS:
                with suppress(ValueError):  # another thread has taken it, and closes it
                    self._idle.remove(connection)
                    self._drop(connection)

    def close(self) -> None:
        """Close all connections. Threads that wait for a response get `Disconnected`."""
        self._closed.set()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.shut_down()
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):  # another thread has taken the last one
                self._drop(self._idle.pop())


class BlockingConnection:
    """A connection for one thread at a time. The constructor may raise `Unreachable`. `until` is a monotonic time."""

    def __init__(self, address: str, until: float, settings: ConnectionSettings) -> None:
        self.address = address
        self.is_open = True
        self.slot: Slot | None = None
        self.idle_since = math.inf
        self._socket = connect(address, until, settings.tls)
        self._socket.setblocking(True)
        self._frames = FrameDecoder()
        self._wait = 0.0
        self._shut_down = False
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def is_quiet(self) -> bool:
        """Return whether the idle connection is still open and nothing unexpected has come on it."""
        return not self._poll.poll(0)

    def send(self, data: bytes, action: str, until: float, alone: bool) -> None:
        """Send frames. Raise `Disconnected` or `ResponseTimeout`.

        A broker carries out no request whose frame it did not get whole. So only the first frames of several (not
        `alone`) may have had effect.
        """
        left = memoryview(data)
        try:
            while left:
                if time.monotonic() >= until:
                    raise ResponseTimeout(f"{action}: no time was left")
                self._limit_wait(until)
                with suppress(BlockingIOError, TimeoutError):
                    left = left[self._socket.send(left) :]
        except (OSError, ResponseTimeout) as error:
            kind = ResponseTimeout if isinstance(error, ResponseTimeout) else Disconnected
            effect = not alone and len(left) < len(data)
            raise kind(f"{action}: not sent to {self.address}: {error}", may_have_had_effect=effect) from error

    def _limit_wait(self, until: float) -> None:
        """Let the connection's next system call wait until the deadline, but for a second at most."""
        wait = max(0.001, min(_WAIT_SECONDS, until - time.monotonic()))
        if wait == self._wait:
            return
        self._wait = wait
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(wait)
            return
        # A timeout of Python's own would cost another system call for each one. These are the kernel's.
        limit = struct.pack("ll", int(wait), max(1, int(wait % 1 * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive(self, requests: dict[int, RpcRequest[Any]], until: float) -> dict[int, RemotingCommand | RemotingError]:
        """Return the response to each request, by its `opaque`, or an error. Close the connection if one is missing."""
        answers: dict[int, RemotingCommand | RemotingError] = {}
        began = time.monotonic()
        try:
            while len(answers) < len(requests):
                for command in self._frames.feed(self._next(until)):
                    if command.is_answer and command.opaque in requests:
                        answers.setdefault(command.opaque, command)
        except (OSError, RemotingError) as error:
            self.close()
            kind = type(error) if isinstance(error, RemotingError) else Disconnected
            why = f"{self.address}: {error}"
            if isinstance(error, ResponseTimeout):
                why = f"{self.address} did not answer within {time.monotonic() - began:.3g} s"
            for opaque, request in requests.items():
                answers.setdefault(opaque, kind(f"{request.action}: {why}", may_have_had_effect=True))
        except BaseException:  # including an interrupt in the middle of a response
            self.close()
            raise
        return answers

    def _next(self, until: float) -> bytes:
        """Return the next bytes. After the deadline, return those that have arrived already."""
        while True:
            if time.monotonic() >= until and self.is_quiet():
                raise ResponseTimeout("no time was left")
            self._limit_wait(until)
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, TimeoutError):
                continue
            if not data:
                raise Disconnected("the connection was closed" + ("" if self._shut_down else " by its peer, or lost"))
            return data

    def shut_down(self) -> None:
        """End the connection from another thread; the thread that waits on it wakes, and closes it."""
        self._shut_down = True
        with suppress(OSError):  # the connection may have ended by itself
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_open = False
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # missing if connecting failed
            self._socket.close()


def _result(request: RpcRequest[Any], answer: RemotingCommand | RemotingError) -> Any:
    try:
        return answer if isinstance(answer, RemotingError) else request.result(answer)
    except RemotingError as error:
        return error
