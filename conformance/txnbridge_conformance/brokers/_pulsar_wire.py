"""Sends single requests of Pulsar's protocols, without a client library, to check that a broker is ready."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from typing import Any, NamedTuple, Self

from txnbridge_conformance._protobuf import Value, decode, encode
from txnbridge_conformance.brokers._ports import HOST

COORDINATORS = "persistent://pulsar/system/transaction_coordinator_assign"

CONNECT, CONNECTED, ERROR, LOOKUP, LOOKUP_RESPONSE = 2, 3, 14, 23, 24
TC_CLIENT_CONNECT_REQUEST, TC_CLIENT_CONNECT_RESPONSE = 62, 63

# The newest protocol version that brokers know. Transactions need at least version 19.
_PROTOCOL_VERSION = 21
# The largest message and 10 KiB of overhead. A peer that sends more is no Pulsar broker.
_MOST_BYTES = 5 * 1024 * 1024 + 10 * 1024
_SECONDS = 5.0
_REDIRECT, _MOST_REDIRECTS = 0, 5


class PulsarCommand(NamedTuple):
    """A command from a broker: its kind, its fields by number, and the payload after the command."""

    kind: int
    fields: dict[int, Value]
    payload: bytes


class PulsarConnection:
    """A connection to a broker. Every method raises `OSError` if the connection or the broker fails."""

    def __init__(self, port: int, timeout: float = _SECONDS) -> None:
        self._socket = socket.create_connection((HOST, port), timeout)
        try:
            self._answers = self._socket.makefile("rb")
            self.connected = self.ask(CONNECTED, CONNECT, (1, b"txnbridge"), (4, _PROTOCOL_VERSION), (5, b"none"))
        except BaseException:
            self._socket.close()
            raise

    def send(self, kind: int, *fields: tuple[int, Value], payload: bytes = b"") -> None:
        """Send one command."""
        command = encode([(1, kind), (kind, encode(fields))])
        size = 4 + len(command) + len(payload)
        self._socket.sendall(struct.pack(">II", size, len(command)) + command + payload)

    def receive(self) -> PulsarCommand:
        """Return the broker's next command."""
        size, command_size = struct.unpack(">II", self._exactly(8))
        if not 4 + command_size <= size <= _MOST_BYTES:
            raise OSError("the peer does not speak Pulsar's protocol")
        frame = self._exactly(size - 4)
        command = dict(decode(frame[:command_size]))
        kind = command.get(1)
        body = command.get(kind) if isinstance(kind, int) else None
        if not isinstance(kind, int) or not isinstance(body, bytes):
            raise OSError("the peer does not speak Pulsar's protocol")
        return PulsarCommand(kind, dict(decode(body)), frame[command_size:])

    def ask(self, answer: int, kind: int, *fields: tuple[int, Value], payload: bytes = b"") -> dict[int, Value]:
        """Send a command. Wait for a command of the kind `answer`, and return the fields of that command."""
        self.send(kind, *fields, payload=payload)
        while (command := self.receive()).kind != answer:
            if command.kind == ERROR:
                raise OSError(f"the broker refused the command: {command.fields.get(3)!r}")
        return command.fields

    def _exactly(self, size: int) -> bytes:
        data = self._answers.read(size)
        if len(data) < size:
            raise OSError("the broker hung up")
        return data

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_coordinator(port: int, number: int = 0) -> None:
    """Make a broker of the cluster load the transaction coordinator `number`, and wait until it is loaded.

    `port` is the port of any broker of the cluster. Raise `OSError` if the coordinator is not ready.
    """
    # Only a lookup makes a broker load the topic, and the coordinator with it.
    with PulsarConnection(_serving(port, f"{COORDINATORS}-partition-{number}".encode())) as connection:
        loaded = connection.ask(TC_CLIENT_CONNECT_RESPONSE, TC_CLIENT_CONNECT_REQUEST, (1, 2), (2, number))
        if 2 in loaded:
            raise OSError("the transaction coordinator is not ready")


def _serving(port: int, topic: bytes) -> int:
    """Return the port of the broker that serves a topic. Raise `OSError` if none does."""
    authoritative: Value = 0
    for _ in range(_MOST_REDIRECTS):
        with PulsarConnection(port) as connection:
            response = connection.ask(LOOKUP_RESPONSE, LOOKUP, (1, topic), (2, 1), (3, authoritative))
        url = response.get(1)
        if 6 in response or not isinstance(url, bytes):
            raise OSError("no broker serves the topic now")
        port, authoritative = int(url.rpartition(b":")[2]), response.get(5, 0)
        if response.get(3) != _REDIRECT:
            return port
    raise OSError("the brokers redirect in circles")


def rest(port: int, path: str) -> Any:
    """Return the JSON document at a path of the broker's HTTP administration. Raise `OSError` for any other answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise OSError(f"{path}: {answer.status}")
        return json.loads(answer.read())
    except (http.client.HTTPException, ValueError):
        raise OSError(f"port {port} does not speak HTTP as Pulsar does") from None
    finally:
        connection.close()
