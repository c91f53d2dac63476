"""A client of Pulsar's protocol, one command after another."""

import itertools
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple, Self

from txnbridge_conformance.faults._protocols import Value, decode

CONNECT, CONNECTED, ERROR, LOOKUP, LOOKUP_RESPONSE = 2, 3, 14, 23, 24
# The newest protocol version that brokers know. Transactions need at least version 19.
_PROTOCOL_VERSION = 21
# The largest message and 10 KiB of overhead. A peer that sends more is no Pulsar broker.
_MOST_BYTES = 5 * 1024 * 1024 + 10 * 1024
SUBSCRIBE, PRODUCER, SEND, SEND_RECEIPT, MESSAGE, ACK, FLOW, SUCCESS = 4, 5, 6, 7, 9, 10, 11, 13
PRODUCER_SUCCESS, PING, PONG, ACK_RESPONSE = 17, 18, 19, 38
NEW_TXN, ADD_PARTITION_TO_TXN, ADD_SUBSCRIPTION_TO_TXN, END_TXN = 50, 52, 54, 56
EARLIEST = 1
SUBSCRIPTION = b"sub"

_numbers = itertools.count(1)


def encode(fields: Iterable[tuple[int, Value]]) -> bytes:
    """Return these fields, in this order, encoded as a protobuf message. A field may be repeated."""
    return b"".join(_field(number, value) for number, value in fields)


def _field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # protobuf writes a negative number as 64 bits
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


class PulsarCommand(NamedTuple):
    """A command from a broker: its kind, its fields by number, and the payload after the command."""

    kind: int
    fields: dict[int, Value]
    payload: bytes


class PulsarConnection:
    """A connection to a broker. Every method raises `OSError` if the connection or the broker fails."""

    def __init__(self, port: int, timeout: float = 5.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout)
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


def new_topic(name: str) -> bytes:
    """Return the name of a topic that no other test of this run uses."""
    return f"persistent://public/default/{name}-{next(_numbers)}".encode()


class Client(PulsarConnection):
    """One connection with at most one producer and one consumer. Every method raises `OSError`."""

    def __init__(self, port: int) -> None:
        super().__init__(port, timeout=30)
        self._requests = itertools.count(1)
        self._producer_name: Value = b""

    def lookup(self, topic: bytes) -> bytes:
        """Return the URL of the broker that serves a topic."""
        found = self.ask(LOOKUP_RESPONSE, LOOKUP, (1, topic), (2, next(self._requests)), (3, 0))
        assert isinstance(found[1], bytes)
        return found[1]

    # --- transactions, of the first coordinator -----------------------------------------------------------------------

    def begin(self) -> int:
        ten_minutes = (2, 600_000)  # a busy machine takes a minute to start a broker
        txn = self._ask_coordinator(NEW_TXN, ten_minutes, (3, 0))[2]
        assert isinstance(txn, int)
        return txn

    def add_topic(self, txn: int, topic: bytes) -> None:
        self._ask_coordinator(ADD_PARTITION_TO_TXN, (2, txn), (3, 0), (4, topic))

    def add_subscription(self, txn: int, topic: bytes) -> None:
        subscription = encode([(1, topic), (2, SUBSCRIPTION)])
        self._ask_coordinator(ADD_SUBSCRIPTION_TO_TXN, (2, txn), (3, 0), (4, subscription))

    def commit(self, txn: int) -> None:
        self._ask_coordinator(END_TXN, (2, txn), (3, 0), (4, 0))

    def ask_to_commit(self, txn: int) -> None:
        """Send END_TXN, and do not wait for the response."""
        self.send(END_TXN, (1, next(self._requests)), (2, txn), (3, 0), (4, 0))

    def _ask_coordinator(self, kind: int, *fields: tuple[int, Value]) -> dict[int, Value]:
        answer = self.ask(kind + 1, kind, (1, next(self._requests)), *fields)
        assert 4 not in answer, answer[5]
        return answer

    # --- messages -----------------------------------------------------------------------------------------------------

    def produce(self, topic: bytes) -> None:
        self.lookup(topic)
        opened = self.ask(PRODUCER_SUCCESS, PRODUCER, (1, topic), (2, 1), (3, next(self._requests)), (12, 1))
        self._producer_name = opened[2]

    def put(self, sequence_id: int, body: bytes, txn: int | None = None) -> None:
        """Send a message, and do not wait for the receipt."""
        command: list[tuple[int, Value]] = [(1, 1), (2, sequence_id), (3, 1)]
        head: list[tuple[int, Value]] = [(1, self._producer_name), (2, sequence_id), (3, 1)]
        if txn is not None:
            command += [(4, txn), (5, 0)]
            head += [(22, txn), (23, 0)]
        metadata = encode(head)
        self.send(SEND, *command, payload=struct.pack(">I", len(metadata)) + metadata + body)

    def receipt(self) -> int:
        """Return the sequence id of the next receipt."""
        while (command := self.receive()).kind != SEND_RECEIPT:
            pass
        sequence_id = command.fields[2]
        assert isinstance(sequence_id, int)
        return sequence_id

    def subscribe(self, topic: bytes) -> None:
        self.lookup(topic)
        start = (13, EARLIEST)
        exclusive, consumer = (3, 0), (4, 1)
        request = (5, next(self._requests))
        self.ask(SUCCESS, SUBSCRIBE, (1, topic), (2, SUBSCRIPTION), exclusive, consumer, request, start)
        self.send(FLOW, (1, 1), (2, 1000))

    def message(self) -> tuple[bytes, bytes]:
        """Return the next message and its id, as the broker encodes it."""
        while (command := self.receive()).kind != MESSAGE:
            pass
        body = command.payload
        if body.startswith(b"\x0e\x01"):
            body = body[6:]  # a checksum
        (size,) = struct.unpack_from(">I", body)
        id = command.fields[2]
        assert isinstance(id, bytes)
        return body[4 + size :], id

    def ask_to_ack(self, message_id: bytes, txn: int) -> None:
        """Send the ACK, and do not wait for the response."""
        self.send(ACK, (1, 1), (2, 0), (3, message_id), (6, txn), (7, 0), (8, next(self._requests)))


def commit_one(port: int, topic: bytes, body: bytes) -> None:
    """Commit one message in a transaction."""
    with Client(port) as client:
        client.produce(topic)
        txn = client.begin()
        client.add_topic(txn, topic)
        client.put(0, body, txn)
        client.receipt()
        client.commit(txn)


def first_message(port: int, topic: bytes) -> bytes:
    """Return the first message that a new consumer of a topic gets."""
    with Client(port) as client:
        client.subscribe(topic)
        return client.message()[0]


def port_of(url: str) -> int:
    return int(url.split("/")[2].rpartition(":")[2])
