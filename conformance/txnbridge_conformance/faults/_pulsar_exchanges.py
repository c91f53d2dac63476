"""Matches the answers of Pulsar's binary protocol with their commands, for the proxy."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import ClassVar

from txnbridge_conformance.faults._frames import MOST_PENDING, Conversation, Request

_CONNECT, _CONNECTED, _SEND, _SEND_RECEIPT, _SEND_ERROR, _PING, _PONG = 2, 3, 6, 7, 8, 18, 19

# By the kind of a request or an answer, the number of the field with the request id.
_REQUEST_ID_FIELDS = {
    4: 5,  # SUBSCRIBE
    5: 3,  # PRODUCER
    10: 8,  # ACK
    12: 2,  # UNSUBSCRIBE
    15: 2,  # CLOSE_PRODUCER
    16: 2,  # CLOSE_CONSUMER
    21: 2,  # PARTITIONED_METADATA
    23: 2,  # LOOKUP
    28: 2,  # SEEK
    29: 2,  # GET_LAST_MESSAGE_ID
    **dict.fromkeys((25, 32, 34, 39, 50, 52, 54, 56, 58, 60, 62, 64, 67), 1),
}
_ANSWER_ID_FIELDS = {
    22: 2,  # PARTITIONED_METADATA_RESPONSE
    24: 4,  # LOOKUP_RESPONSE
    30: 2,  # GET_LAST_MESSAGE_ID_RESPONSE
    38: 6,  # ACK_RESPONSE
    **dict.fromkeys((13, 14, 17, 26, 33, 35, 40, 51, 53, 55, 57, 59, 61, 63, 65), 1),
}
# The number of the field with a batch's last sequence id. The error for a failed batch has only this id.
_HIGHEST_SEQUENCE_ID = {_SEND: 6, _SEND_RECEIPT: 4}

# The most receipts that one sequence id may wait for on one connection.
_MOST_REPEATS = 100

# A field's value: a number, or the bytes of a string or of a nested message.
Value = int | bytes

_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
# The most bytes of a varint: it has 64 bits, seven in each byte.
_MOST_NUMBER_BYTES = 10

_Key = tuple[int, ...]


class PulsarConversation(Conversation):
    """Matches answers on a Pulsar connection: by request id, or by producer id and sequence id.

    A head is a whole command. A message is identified by its sequence id, and a batch by its last sequence id. A
    command that the broker sends unasked, such as a message, counts as an answered request.
    """

    # The commands that a client sends, and those that a broker sends unasked. An answer has the name of its request.
    kinds: ClassVar[Mapping[str, int]] = {
        "CONNECT": 2,
        "SUBSCRIBE": 4,
        "PRODUCER": 5,
        "SEND": 6,
        "MESSAGE": 9,
        "ACK": 10,
        "FLOW": 11,
        "UNSUBSCRIBE": 12,
        "CLOSE_PRODUCER": 15,
        "CLOSE_CONSUMER": 16,
        "PING": 18,
        "PONG": 19,
        "REDELIVER_UNACKNOWLEDGED_MESSAGES": 20,
        "PARTITIONED_METADATA": 21,
        "LOOKUP": 23,
        "CONSUMER_STATS": 25,
        "REACHED_END_OF_TOPIC": 27,
        "SEEK": 28,
        "GET_LAST_MESSAGE_ID": 29,
        "ACTIVE_CONSUMER_CHANGE": 31,
        "GET_TOPICS_OF_NAMESPACE": 32,
        "GET_SCHEMA": 34,
        "AUTH_CHALLENGE": 36,
        "AUTH_RESPONSE": 37,
        "GET_OR_CREATE_SCHEMA": 39,
        "NEW_TXN": 50,
        "ADD_PARTITION_TO_TXN": 52,
        "ADD_SUBSCRIPTION_TO_TXN": 54,
        "END_TXN": 56,
        "END_TXN_ON_PARTITION": 58,
        "END_TXN_ON_SUBSCRIPTION": 60,
        "TC_CLIENT_CONNECT_REQUEST": 62,
        "WATCH_TOPIC_LIST": 64,
        "WATCH_TOPIC_UPDATE": 66,
        "WATCH_TOPIC_LIST_CLOSE": 67,
        "TOPIC_MIGRATED": 68,
    }

    def __init__(self, most_pending: int = MOST_PENDING) -> None:
        self._most_pending = most_pending
        self._lock = threading.Lock()
        self._pending: OrderedDict[_Key, deque[Request]] = OrderedDict()

    def request(self, head: bytes) -> Request:
        kind, numbers = _command(head)
        key = _request_key(kind, numbers)
        request = Request(kind, key[-1] if key else 0)
        if key:
            with self._lock:
                self._pending.setdefault(key, deque(maxlen=_MOST_REPEATS)).append(request)
                if len(self._pending) > self._most_pending:
                    self._pending.popitem(last=False)
        return request

    def answer(self, head: bytes) -> Request:
        kind, numbers = _command(head)
        request = self._take(_answer_key(kind, numbers)) or Request(kind, 0)
        request.answered.set()
        return request

    def _take(self, key: _Key | None) -> Request | None:
        with self._lock:
            waiting = self._pending.get(key) if key else None
            if not key or not waiting:
                return None
            if len(waiting) == 1:
                del self._pending[key]
            return waiting.popleft()


def _command(head: bytes) -> tuple[int, dict[int, int]]:
    """Return a command's kind and its numeric fields; the kind is -1 for bytes that are no command."""
    fields = dict(decode(head[4:]))
    kind = fields.get(1)
    body = fields.get(kind) if isinstance(kind, int) else None
    if not isinstance(kind, int) or not isinstance(body, bytes):
        return -1, {}
    return kind, {field: value for field, value in decode(body) if isinstance(value, int)}


def _request_key(kind: int, numbers: dict[int, int]) -> _Key | None:
    """Return the key by which the answer to a command will be matched, or None if the command has no answer."""
    if kind in (_CONNECT, _PING):
        return (kind, 0)
    return _message_key(kind, numbers) if kind == _SEND else _id_key(_REQUEST_ID_FIELDS.get(kind), numbers)


def _answer_key(kind: int, numbers: dict[int, int]) -> _Key | None:
    """Return the key of the request that a command answers; None if the command is no answer."""
    if kind in (_CONNECTED, _PONG):
        return (kind - 1, 0)
    if kind in (_SEND_RECEIPT, _SEND_ERROR):
        return _message_key(kind, numbers)
    return _id_key(_ANSWER_ID_FIELDS.get(kind), numbers)


def _message_key(kind: int, numbers: dict[int, int]) -> _Key:
    highest = numbers.get(_HIGHEST_SEQUENCE_ID.get(kind, 0), 0)
    if highest >= 2**63:
        highest = 0  # -1 in the protocol: the message is no batch
    return (_SEND, numbers.get(1, 0), max(numbers.get(2, 0), highest))


def _id_key(field: int | None, numbers: dict[int, int]) -> _Key | None:
    return (0, numbers[field]) if field in numbers else None


def decode(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the fields of a protobuf message in order, up to the first malformed byte."""
    at = 0
    with suppress(IndexError, ValueError):
        while at < len(data):
            key, at = _number(data, at)
            kind = key & 7
            if kind == _NUMBER:
                value, at = _number(data, at)
                yield key >> 3, value
                continue
            size, at = _number(data, at) if kind == _BYTES else (_FIXED.get(kind, len(data) + 1), at)
            if size > len(data) - at:
                return
            yield key >> 3, data[at : at + size]
            at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it. Raise `IndexError` or `ValueError` if malformed."""
    value = 0
    for position in range(_MOST_NUMBER_BYTES):
        byte = data[at + position]
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value & (2**64 - 1), at + position + 1
    raise ValueError("a number of more than 64 bits")
