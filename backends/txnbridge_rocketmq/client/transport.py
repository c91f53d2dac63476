"""A TCP or TLS socket that one thread reads and several threads write. Every operation has a deadline."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress

from txnbridge_rocketmq.client.errors import ResponseTimeout, Unreachable
from txnbridge_rocketmq.client.signal_safe_locks import Slots

# The size of one read. Pull responses have up to 256 KB.
_READ_BYTES = 256 << 10
# The wait for a socket to become writable. It is short: the reading thread may take the bytes that TLS waits for.
_TLS_POLL_SECONDS = 0.05
# The limit of one attempt to connect, as in the Java client: the broker may have moved, and its old host may be gone.
CONNECT_SECONDS = 3.0
# A connection ends if its peer's kernel acknowledges neither data nor, while none is sent, probes for five seconds: the
# host, or the way to it, is gone. Linux would wait a quarter of an hour. It ends, too, if the process reads nothing
# for so long and more was sent than both kernels hold. Each platform has some of these options.
TCP_OPTIONS = {"TCP_NODELAY": 1, "TCP_USER_TIMEOUT": 5000, "TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 1}


class RemotingTransport:
    """A connected socket. Only one thread calls `receive`. `until` is a time by `time.monotonic()`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        # A TLS connection has one state for both directions, so two threads must not use it at once.
        self._socket_lock = threading.Lock()
        # A frame is written completely before the next one begins.
        self._senders = Slots(1)
        self._closed = False

    def send(self, data: bytes, until: float) -> None:
        """Write a whole frame. Raise `ResponseTimeout` at the deadline, `OSError` if the connection fails.

        After an error the peer has not received the whole frame. A partly written frame closes the connection.
        """
        slot = self._senders.take(until - time.monotonic())
        if slot is None:
            raise ResponseTimeout("the call's timeout passed before the request could be sent")
        with slot:
            try:
                if not self._send(memoryview(data), until):
                    raise ResponseTimeout("the peer accepted no more bytes within the call's timeout")
            except ResponseTimeout:
                raise
            except BaseException:  # including an interrupt in the middle of a frame
                self.close()
                raise

    def _send(self, left: memoryview, until: float) -> bool:
        size = len(left)
        while left:
            try:
                with self._socket_lock:
                    left = left[self._socket.send(left) :]
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                event = select.POLLOUT
            except ssl.SSLWantReadError:
                event = select.POLLIN
            self._wait(event, min(until, time.monotonic() + _TLS_POLL_SECONDS))
            if time.monotonic() >= until:
                # Bytes of a TLS record may have been sent although none was reported.
                if len(left) < size or self._encrypted:
                    self.close()
                return False
        return True

    def receive(self, until: float) -> bytes | None:
        """Return the next bytes; b"" at the end of the stream; None at the deadline. Raise `OSError` on failures."""
        while True:
            try:
                with self._socket_lock:
                    return self._socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            if not self._wait(event, until):
                return None

    def _wait(self, event: int, until: float) -> bool:
        """Wait for `event` on the socket, or for the connection's end. Return False if neither came by `until`."""
        if self._closed:
            raise OSError("the connection is closed")
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except ValueError:
            raise OSError("the connection is closed") from None
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def close(self) -> None:
        """Close the connection and wake the threads that wait on it. Safe to repeat."""
        self._closed = True
        with suppress(OSError):  # the connection may have ended by itself
            # The plain socket's method: a TLS socket's own `shutdown` would drop the encryption that other threads use.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def release(self) -> None:
        """Free the socket. Call it after `close`, when no thread receives any more; a thread that sends gets `OSError`.

        It does not wait for the sender: a signal handler's exception may keep the sender's `Slot` as long as its
        traceback is kept.
        """
        with self._socket_lock:
            self._socket.close()


def connect(address: str, until: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Connect to "host:port" or raise `Unreachable`. Name resolution is not bounded by `until`."""
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
        sock: socket.socket | None = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(min(left, CONNECT_SECONDS))
            sock.connect(target)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in TCP_OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if tls is not None:
                sock.settimeout(max(0.001, until - time.monotonic()))
                sock = tls.wrap_socket(sock, server_hostname=host)
            return sock
        except (OSError, ValueError) as error:
            if sock is not None:
                sock.close()
            reason = error
    raise Unreachable(f"{address}: {reason}") from (reason if isinstance(reason, Exception) else None)


def split(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raise `ValueError`."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{address!r} is not an address; write host:port")
    return host.strip("[]"), int(port)
