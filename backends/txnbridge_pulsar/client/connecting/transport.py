"""A socket, plain or TLS, to which several threads write whole frames and from which one thread reads.

The socket never blocks. A writing thread waits within its deadline until the socket accepts its frame. The reading
thread may not wait: it leaves its frames to the next writing thread, or writes them when the socket accepts more.
`dial` opens the socket within a deadline: it resolves the host name, connects to one of its addresses, and adds TLS.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext, suppress

from txnbridge_pulsar.client.deadline import ClientDeadline

from .address import Address

_READ = select.POLLIN | select.POLLERR | select.POLLHUP
_WRITE = select.POLLOUT | select.POLLERR | select.POLLHUP
# A TLS write may wait for handshake bytes that the reading thread has received, so it tries again after this time.
_TLS_POLL_SECONDS = 0.02
# More milliseconds than fit in a C int are an error.
_MAX_POLL_SECONDS = 3600.0
# The most small frames, such as pongs, that wait to be written: if there are more, the peer does not read.
_MAX_QUEUED_FRAMES = 1000
# A blocking socket takes 0 for "do not wait".
_MIN_TIMEOUT = 0.001


class NotWritten(OSError):
    """A frame was not written by the deadline. If a part was written (`started`), the rest is written later."""

    def __init__(self, started: bool) -> None:
        super().__init__("the connection did not accept the frame in time")
        self.started = started


class Transport:
    """A connected socket that writes whole frames and reads bytes. After an error, an `OSError`, only `close` works."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        # Reading and writing by TLS change the same state.
        self._tls_lock = threading.Lock() if self._is_tls else nullcontext()
        self._writing = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._unsent = memoryview(b"")
        self._closed = False
        sock.setblocking(False)

    def write(self, frame: bytes, deadline: ClientDeadline) -> None:
        """Write a whole frame. Raise `NotWritten` at the deadline."""
        with deadline.locking(self._writing) as is_held:
            if not is_held or not self._drain(deadline):
                raise NotWritten(started=False)
            self._unsent = memoryview(frame)
            if not self._drain(deadline):
                raise NotWritten(started=not self._withdrawn(frame))
        self._flush_waiting()

    def _withdrawn(self, frame: bytes) -> bool:
        # TLS must be given the same bytes again, because a part of them may be encrypted already.
        if self._is_tls or len(self._unsent) < len(frame):
            return False
        self._unsent = memoryview(b"")
        return True

    def post(self, frame: bytes) -> None:
        """Write a small frame without waiting: at once, or as soon as the socket accepts more bytes."""
        if len(self._waiting) >= _MAX_QUEUED_FRAMES:
            raise OSError("the other side has stopped reading")
        self._waiting.append(frame)
        self._flush_waiting()

    def _flush_waiting(self) -> None:
        # The thread that holds the lock checks again after releasing it, so no frame stays unwritten.
        while self._waiting:
            with ClientDeadline(0).locking(self._writing) as is_held:
                while is_held and self._push() and self._waiting:
                    self._unsent = memoryview(self._waiting.popleft())
            if not is_held or self._unsent:
                return

    def _drain(self, deadline: ClientDeadline) -> bool:
        while not self._push():
            if deadline.expired or self._closed:
                return False
            self._wait(_WRITE, min(deadline.left, _TLS_POLL_SECONDS) if self._is_tls else deadline.left)
        return True

    def _push(self) -> bool:
        """Write as many waiting bytes as the socket accepts now. Return whether none are left."""
        while self._unsent:
            try:
                with self._tls_lock:
                    self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False
            except BaseException:  # an interrupt: how much was sent is not known
                self.interrupt()
                raise
        return True

    def read_into(self, space: memoryview, seconds: float) -> int | None:
        """Read into `space`; return the byte count, None at the timeout. Raise `OSError`, also at the stream's end."""
        received = self._receive(space)
        if received is None:
            # This thread's own frames that the socket did not take before are sent here.
            self._wait(_READ | (_WRITE if self._unsent else 0), seconds)
            if self._unsent:
                self._flush_unsent()
            received = self._receive(space)
        if received == 0:
            raise OSError("the broker closed the connection")
        return received

    def _flush_unsent(self) -> None:
        with ClientDeadline(0).locking(self._writing) as is_held:
            if is_held:
                self._push()
        if is_held:
            self._flush_waiting()

    def _receive(self, space: memoryview) -> int | None:
        try:
            with self._tls_lock:
                return self._sock.recv_into(space)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def _wait(self, events: int, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._sock, events)
        poll.poll(min(max(0.0, seconds), _MAX_POLL_SECONDS) * 1000)

    def interrupt(self) -> None:
        """Wake up waiting threads: from now on reading and writing fail. Thread-safe."""
        self._closed = True
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the reading thread may call this, as its last step."""
        self.interrupt()
        with self._writing:
            self._sock.close()


def dial(address: Address, tls: ssl.SSLContext | None, deadline: ClientDeadline) -> socket.socket:
    """Return a connected socket, with TLS if a context is given. Raise `OSError`, `ValueError` for an invalid host."""
    sock = _connect_to_any(_resolved(address, deadline), deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return sock
        sock.settimeout(max(deadline.left, _MIN_TIMEOUT))
        return tls.wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise


def _connect_to_any(addresses: list[tuple[str, int]], deadline: ClientDeadline) -> socket.socket:
    """Connect to the first of these addresses that accepts. A host may have IPv6 and IPv4 addresses while the broker
    listens on only one of them. An address that does not answer gets half of the time that is left.
    """
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection(address, max(deadline.left / 2, _MIN_TIMEOUT))
    return socket.create_connection(addresses[-1], max(deadline.left, _MIN_TIMEOUT))


def _resolved(address: Address, deadline: ClientDeadline) -> list[tuple[str, int]]:
    """Return a host name's addresses. A thread of its own resolves the name, because `getaddrinfo` has no timeout."""
    resolved: Future[list[tuple[str, int]]] = Future()

    def resolve() -> None:
        try:
            infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            resolved.set_result([(str(info[4][0]), address.port) for info in infos])
        except (OSError, UnicodeError) as error:
            resolved.set_exception(OSError(f"its name cannot be resolved: {error}"))

    threading.Thread(target=resolve, name=f"pulsar resolve {address.host}", daemon=True).start()
    try:
        return resolved.result(deadline.left)
    except FutureTimeout:
        raise OSError("its name was not resolved in time") from None
