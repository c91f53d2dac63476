"""Sends single requests of Kafka's protocol, without a client library, to ask a broker for its cluster."""

from __future__ import annotations

import socket
import struct

from txnbridge_conformance.brokers._ports import HOST

_METADATA = 3
# This version of the Metadata answer has the ids of nodes and cluster. Every broker from 0.11 to 4 supports it.
_METADATA_VERSION = 4
# The largest answer that is read. An answer has hundreds of bytes: a peer that sends more than this is no broker.
_MOST_BYTES = 1 << 20


def ask(port: int, api: int, version: int, body: bytes, timeout: float = 5) -> bytes:
    """Send one request to a port, and return its answer's body. Raise `OSError` if no valid answer comes."""
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
    """Ask the broker at a port for the cluster's id and number of live nodes. Raise `OSError` without an answer."""
    body = ask(port, _METADATA, _METADATA_VERSION, struct.pack(">i?", 0, False))  # no topics, and create none
    try:
        return _parse(body)
    except (struct.error, UnicodeDecodeError):
        raise OSError(f"port {port} does not speak Kafka's protocol") from None


def _parse(body: bytes) -> tuple[str, int]:
    _throttled, nodes = struct.unpack_from(">ii", body)
    at = 8
    for _ in range(nodes):
        at += 4  # the node's id
        _, at = _text(body, at)
        at += 4  # the node's port
        _, at = _text(body, at)  # the node's rack
    name, _ = _text(body, at)
    return name, nodes


def _text(body: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", body, at)
    end = at + 2 + max(size, 0)  # -1: null
    return body[at + 2 : end].decode(), end
