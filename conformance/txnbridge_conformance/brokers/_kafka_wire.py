"""Just enough of Kafka's protocol to ask a broker who it is."""

from __future__ import annotations

import socket
import struct

from txnbridge_conformance.brokers._ports import HOST

_METADATA = 3
# Of each node tells its id, and of the cluster its id; every broker from 0.11 to 4 takes it.
_METADATA_VERSION = 4
# An answer to this one request takes hundreds of bytes; whoever sends more is no Kafka broker.
_MOST_BYTES = 1 << 20


def ask(port: int, api: int, version: int, body: bytes, timeout: float = 5) -> bytes:
    """Send one request and return the body of its answer. Raises `OSError`."""
    head = struct.pack(">hhih9s", api, version, 1, 9, b"txnbridge")
    with socket.create_connection((HOST, port), timeout) as connection:
        connection.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        with connection.makefile("rb") as answer:
            (size,) = struct.unpack(">i", _exactly(answer.read(4), 4))
            if not 4 <= size <= _MOST_BYTES:
                raise OSError(f"port {port} does not speak Kafka's protocol")
            return _exactly(answer.read(size), size)[4:]


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise OSError("the broker hung up")
    return data


def cluster(port: int) -> tuple[str, int]:
    """The id of the cluster behind a port, and how many of its nodes live. Raises `OSError`."""
    body = ask(port, _METADATA, _METADATA_VERSION, struct.pack(">i?", 0, False))  # no topics, and make none
    try:
        return _parse(body)
    except (struct.error, UnicodeDecodeError):
        raise OSError(f"port {port} does not speak Kafka's protocol") from None


def _parse(body: bytes) -> tuple[str, int]:
    _throttled, nodes = struct.unpack_from(">ii", body)
    at = 8
    for _ in range(nodes):
        at += 4  # its id
        _, at = _text(body, at)
        at += 4  # its port
        _, at = _text(body, at)  # its rack
    name, _ = _text(body, at)
    return name, nodes


def _text(body: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", body, at)
    end = at + 2 + max(size, 0)  # -1: null
    return body[at + 2 : end].decode(), end
