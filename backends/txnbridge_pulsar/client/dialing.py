"""Makes a connection within a deadline: resolves the name, connects to one of its addresses, starts TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from .address import Address
from .clock import ClientDeadline

# A socket takes 0 for "do not wait".
_LEAST_SECONDS = 0.001


def dial(address: Address, tls: ssl.SSLContext | None, deadline: ClientDeadline) -> socket.socket:
    """Return a socket to an address, with TLS if given. Raise `OSError`, `ValueError`."""
    sock = _any_of(_resolved(address, deadline), deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return sock
        sock.settimeout(max(deadline.left, _LEAST_SECONDS))
        return tls.wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise


def _any_of(places: list[tuple[str, int]], deadline: ClientDeadline) -> socket.socket:
    """Connect to the first address that listens: of a name's IPv6 and IPv4 addresses one may be served."""
    for place in places[:-1]:
        with suppress(OSError):
            return socket.create_connection(place, max(deadline.left, _LEAST_SECONDS))
    return socket.create_connection(places[-1], max(deadline.left, _LEAST_SECONDS))


def _resolved(address: Address, deadline: ClientDeadline) -> list[tuple[str, int]]:
    """Resolve an address's name on a thread of its own, because a resolver takes no deadline."""
    resolved: Future[list[tuple[str, int]]] = Future()

    def resolve() -> None:
        try:
            infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            resolved.set_result([(str(info[4][0]), address.port) for info in infos])
        except (OSError, UnicodeError) as error:
            resolved.set_exception(OSError(f"its name leads nowhere: {error}"))

    threading.Thread(target=resolve, name=f"pulsar resolve {address.host}", daemon=True).start()
    try:
        return resolved.result(deadline.left)
    except FutureTimeout:
        raise OSError("its name was not resolved in time") from None
