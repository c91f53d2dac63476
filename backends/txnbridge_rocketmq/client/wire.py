"""A TCP connection, plain or TLS, that one thread reads while others write, and on which nobody waits too long."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress

from txnbridge_rocketmq.client.errors import TimedOut, Unreachable

# A read takes what is there, up to this: some answers of 256 KB.
_CHUNK = 256 << 10
# What encryption waits to read, the reading thread may have taken: then there is nothing to wait for.
_LOOK_AGAIN = 0.05


class Wire:
    """A connected socket. `receive` belongs to one thread, `send` to any, `close` to any.

    Times are points of `time.monotonic()`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        # A TLS connection is one state for both directions, which two threads may not touch at once.
        self._touching = threading.Lock()
        # A frame is written whole before the next begins.
        self._sending = threading.Lock()
        self._closed = False

    def send(self, data: bytes, until: float) -> None:
        """Write all of it.

        Raises `TimedOut` or `OSError`. Then some of it may be on its way, but never all: the other side never has a
        whole frame. A connection on which a frame was begun is closed then.
        """
        if not self._sending.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimedOut("no time was left to send the request")
        try:
            if not self._send(memoryview(data), until):
                raise TimedOut("the broker took no more bytes within the call's time")
        except TimedOut:
            raise
        except BaseException:  # also an interrupt in the middle of a frame
            self.close()
            raise
        finally:
            self._sending.release()

    def _send(self, left: memoryview, until: float) -> bool:
        size = len(left)
        while left:
            try:
                with self._touching:
                    left = left[self._socket.send(left) :]
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                event = select.POLLOUT
            except ssl.SSLWantReadError:
                event = select.POLLIN
            self._wait(event, min(until, time.monotonic() + _LOOK_AGAIN))
            if time.monotonic() >= until:
                if len(left) < size or self._encrypted:  # of an encrypted record some may be sent unseen
                    self.close()
                return False
        return True

    def receive(self, until: float) -> bytes | None:
        """The bytes that come next, empty at the end, None if none came in time. Raises `OSError`."""
        while True:
            try:
                with self._touching:
                    return self._socket.recv(_CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            if not self._wait(event, until):
                return None

    def _wait(self, event: int, until: float) -> bool:
        """Whether it came about in time; also if the connection ended."""
        if self._closed:
            raise OSError("the connection is closed")
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def close(self) -> None:
        """End the connection; whoever waits on it is woken. May be called again."""
        self._closed = True
        with suppress(OSError):  # it may have ended by itself
            # The plain one: that of a TLS socket drops the encryption under the threads that still use it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the socket back, after `close`, when no thread receives any more."""
        with self._sending, self._touching:
            self._socket.close()


def connect(address: str, until: float, tls: ssl.SSLContext | None = None) -> Wire:
    """Connect to "host:port". Raises `Unreachable`.

    Looking up a name waits for the machine's resolver, however long that takes.
    """
    reason: Exception | str = "no time was left"
    try:
        host, port = split(address)
        choices = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise Unreachable(f"{address}: {error}") from error
    for family, kind, protocol, _, target in choices:
        left = until - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left)
            sock.connect(target)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                sock.settimeout(max(0.001, until - time.monotonic()))
                sock = tls.wrap_socket(sock, server_hostname=host)
            return Wire(sock)
        except (OSError, ValueError) as error:
            sock.close()
            reason = error
    raise Unreachable(f"{address}: {reason}") from (reason if isinstance(reason, Exception) else None)


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{address!r} is no address; write host:port")
    return host.strip("[]"), int(port)
