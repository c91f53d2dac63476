"""Opens a socket to a broker within a deadline: resolves the host name, connects to one of its addresses, adds TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from txnbridge_pulsar.client.deadline import ClientDeadline

from .address import Address

# A socket takes 0 for "do not wait".
_MIN_TIMEOUT = 0.001


def dial(address: Address, tls: ssl.SSLContext | None, deadline: ClientDeadline) -> socket.socket:
    """Return a socket that is connected to `address`, with TLS if a context is given. Raise `OSError`, or `ValueError`
    for an invalid host name.
    """
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
