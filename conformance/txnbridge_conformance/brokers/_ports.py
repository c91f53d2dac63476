"""Chooses free ports of the loopback interface."""

from __future__ import annotations

import random
import socket
from typing import NamedTuple

HOST = "127.0.0.1"

# The range is below the ports that Linux, macOS and the BSDs give to outgoing connections, so that no such connection
# takes the port of a broker that is down for a moment.
_LOWEST, _HIGHEST = 20_000, 32_767


class Route(NamedTuple):
    """The two ports by which a proxy reaches a node. `upstream` is a port of the node itself.

    `listen` is the port on which the proxy listens, and to which answers direct the proxy's clients.
    """

    listen: int
    upstream: int


def free_ports(count: int) -> list[int]:
    """Return this many different free ports.

    If another process takes one of the ports before the broker listens on it, the broker does not start.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(_LOWEST, _HIGHEST)
        if port not in ports and _is_free(port):
            ports.append(port)
    return ports


def is_open(port: int) -> bool:
    """Return whether a process listens on a port."""
    try:
        socket.create_connection((HOST, port), 5).close()
    except OSError:
        return False
    return True


def loopback_interface() -> str:
    """Return the name of the interface of `HOST`: lo or lo0."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
