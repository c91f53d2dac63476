"""Loopback, and ports there that nobody uses."""

from __future__ import annotations

import random
import socket
from typing import NamedTuple

HOST = "127.0.0.1"

# Below the ports that Linux, macOS and the BSDs give to outgoing connections: no such connection takes the port of a
# broker that is down for a moment.
_LOWEST, _HIGHEST = 20_000, 32_767


class Route(NamedTuple):
    """Where a proxy must listen, because the broker tells clients this port, and the port that it must connect to."""

    listen: int
    upstream: int


def free_ports(count: int) -> list[int]:
    """That many different ports that nobody listens on now.

    Somebody else may take one before the broker does: then the broker does not start.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randint(_LOWEST, _HIGHEST)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((HOST, port), 5).close()
    except OSError:
        return False
    return True


def loopback_interface() -> str:
    """The name of the interface that `HOST` is on: lo, or lo0."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
