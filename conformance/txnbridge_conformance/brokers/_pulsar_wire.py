"""Just enough of Pulsar's protocols to ask a broker whether it can be used."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from txnbridge_conformance._protobuf import Value, decode, encode
from txnbridge_conformance.brokers._ports import HOST

_Self = TypeVar("_Self", bound="Connection")

COORDINATORS = "persistent://pulsar/system/transaction_coordinator_assign"

CONNECT, CONNECTED, ERROR, LOOKUP, LOOKUP_RESPONSE = 2, 3, 14, 23, 24
TC_CLIENT_CONNECT_REQUEST, TC_CLIENT_CONNECT_RESPONSE = 62, 63

# The newest that brokers know; from 19 on they have transactions as we need them.
_PROTOCOL_VERSION = 21
# The largest message and 10 KiB around it: whoever sends more is no Pulsar broker.
_MOST_BYTES = 5 * 1024 * 1024 + 10 * 1024
_SECONDS = 5.0
_REDIRECT, _MOST_REDIRECTS = 0, 5


class Command(NamedTuple):
    """What a broker said: the fields of a command by their numbers, and what followed it."""

    kind: int
    fields: dict[int, Value]
    payload: bytes


class Connection:
    """One connection to a broker. Everything raises `OSError`."""

    def __init__(self, port: int, timeout: float = _SECONDS) -> None:
        self._socket = socket.create_connection((HOST, port), timeout)
        try:
            self._answers = self._socket.makefile("rb")
            self.connected = self.ask(CONNECTED, CONNECT, (1, b"txnbridge"), (4, _PROTOCOL_VERSION), (5, b"none"))
        except BaseException:
            self._socket.close()
            raise

    def send(self, kind: int, *fields: tuple[int, Value], payload: bytes = b"") -> None:
        """Send a command with these fields."""
        command = encode([(1, kind), (kind, encode(fields))])
        size = 4 + len(command) + len(payload)
        self._socket.sendall(struct.pack(">II", size, len(command)) + command + payload)

    def receive(self) -> Command:
        """The next command of the broker."""
        size, command_size = struct.unpack(">II", self._exactly(8))
        if not 4 + command_size <= size <= _MOST_BYTES:
            raise OSError("it does not speak Pulsar's protocol")
        frame = self._exactly(size - 4)
        command = dict(decode(frame[:command_size]))
        kind = command.get(1)
        body = command.get(kind) if isinstance(kind, int) else None
        if not isinstance(kind, int) or not isinstance(body, bytes):
            raise OSError("it does not speak Pulsar's protocol")
        return Command(kind, dict(decode(body)), frame[command_size:])

    def ask(self, answer: int, kind: int, *fields: tuple[int, Value], payload: bytes = b"") -> dict[int, Value]:
        """Send a command and return the fields of the answer, which is of that kind."""
        self.send(kind, *fields, payload=payload)
        while (command := self.receive()).kind != answer:
            if command.kind == ERROR:
                raise OSError(f"the broker refused it: {command.fields.get(3)!r}")
        return command.fields

    def _exactly(self, size: int) -> bytes:
        data = self._answers.read(size)
        if len(data) < size:
            raise OSError("the broker hung up")
        return data

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_coordinator(port: int, number: int = 0) -> None:
    """Have a transaction coordinator loaded by the broker that serves it, as any broker of the cluster says.

    Raises `OSError` as long as that does not.
    """
    # Without a lookup a broker does not take on what belongs to the topic.
    with Connection(_serving(port, f"{COORDINATORS}-partition-{number}".encode())) as connection:
        loaded = connection.ask(TC_CLIENT_CONNECT_RESPONSE, TC_CLIENT_CONNECT_REQUEST, (1, 2), (2, number))
        if 2 in loaded:
            raise OSError("the transaction coordinator is not ready")


def _serving(port: int, topic: bytes) -> int:
    """The port of the broker that serves a topic. Raises `OSError`."""
    authoritative: Value = 0
    for _ in range(_MOST_REDIRECTS):
        with Connection(port) as connection:
            found = connection.ask(LOOKUP_RESPONSE, LOOKUP, (1, topic), (2, 1), (3, authoritative))
        url = found.get(1)
        if 6 in found or not isinstance(url, bytes):
            raise OSError("no broker serves it now")
        port, authoritative = int(url.rpartition(b":")[2]), found.get(5, 0)
        if found.get(3) != _REDIRECT:
            return port
    raise OSError("the brokers redirect in circles")


def rest(port: int, path: str) -> Any:
    """The document that the broker's administration gives at a path. Raises `OSError`."""
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
