"""The brokers' protocols, as far as the proxy knows them: where a frame begins, and which request an answer is for."""

from __future__ import annotations

import json
import struct
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

# The most unanswered requests that are kept for one connection, beyond which the oldest are dropped. No real client
# sends so many without reading an answer.
_MOST_PENDING = 100_000

# The longest head. Pulsar's heads are whole commands, which are no longer than a broker's longest frame by default (the
# largest message and 10 KiB).
_MOST_HEAD = 5 * 1024 * 1024 + 10 * 1024


class StreamPiece(NamedTuple):
    """Consecutive bytes of a stream of frames. `head` is the frame's head if the bytes begin a frame, else None."""

    data: bytes
    head: bytes | None = None


class FrameSplitter:
    """Splits a stream of bytes at the begin of each frame, and changes no byte.

    A frame begins with its length in four bytes, and then its head of `head_size` bytes. If `head_size` is None, the
    head's first four bytes give the number of its other bytes. After a length that no frame can have, the rest of the
    stream passes unsplit.
    """

    def __init__(self, head_size: int | None) -> None:
        self._head_size = head_size
        self._start = bytearray()  # the first bytes of a frame whose head is not complete
        self._wanted = 4  # the number of start bytes needed for the next step
        self._left = 0  # the number of bytes of the current frame that have not arrived
        self._lost = False

    def feed(self, data: bytes) -> Iterator[StreamPiece]:
        """Take the stream's next bytes, and yield them split at frames. Bytes of an incomplete head wait for more."""
        while data and not self._lost:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                yield StreamPiece(piece)
                continue
            missing = self._wanted - len(self._start)
            self._start += data[:missing]
            data = data[missing:]
            if len(self._start) == self._wanted:
                yield from self._begin()
        if data:
            yield StreamPiece(data)

    def _begin(self) -> Iterator[StreamPiece]:
        length = int.from_bytes(self._start[:4], "big", signed=True)
        # Before the head's first four bytes have arrived, its size is a lower bound.
        head_size = 4 + int.from_bytes(self._start[4:8], "big") if self._head_size is None else self._head_size
        self._lost = not head_size <= min(length, _MOST_HEAD)
        if self._lost:
            yield from self.flush()
        elif self._wanted < 4 + head_size:
            self._wanted = 4 + head_size
        else:
            start = bytes(self._start)
            self._start, self._wanted, self._left = bytearray(), 4, length - head_size
            yield StreamPiece(start, start[4:])

    @property
    def is_inside(self) -> bool:
        """Whether the current frame is incomplete: its head has arrived, but not all of its other bytes."""
        return bool(self._left)

    def flush(self) -> Iterator[StreamPiece]:
        """Yield the bytes of an incomplete head, after the end of the stream."""
        if self._start:
            start, self._start = bytes(self._start), bytearray()
            yield StreamPiece(start)


@dataclass(eq=False)
class Request:
    """A request, decoded from the head of its frame. The proxy sets `answered` when the broker's answer arrives."""

    kind: int
    correlation_id: int
    version: int = 0
    answered: threading.Event = field(default_factory=threading.Event, repr=False)


class Conversation(ABC):
    """Matches answers with requests on one connection, by the first bytes (head) of each frame, taken in order."""

    kinds: ClassVar[Mapping[str, int]]
    """The kinds of requests that a test can hold by name."""
    rewritten_kinds: ClassVar[Collection[int]] = ()
    """The kinds of requests whose answers have brokers' real addresses; the proxy replaces them by its own."""
    request_head: ClassVar[int | None] = None
    answer_head: ClassVar[int | None] = None
    """The size in bytes of a request's or an answer's head; None if its first bytes tell it (see `FrameSplitter`)."""

    @abstractmethod
    def request(self, head: bytes) -> Request:
        """Return the request whose frame has this head."""

    @abstractmethod
    def answer(self, head: bytes) -> Request | None:
        """Return the request that an answer belongs to, by the head of the answer's frame; None if it is not known.

        A frame that the broker sends by itself, such as a check-back, counts as an answered request.
        """


# --- Kafka ------------------------------------------------------------------------------------------------------------

API_VERSIONS = 18
# Stands for a request that the broker is said not to know.
_UNKNOWN_REQUEST = 10_000


def with_versions(answer: bytes, version: int, highest: Mapping[int, int | None]) -> bytes:
    """Return an answer to ApiVersions with these highest versions of requests, where lower; None removes a request."""
    changed = bytearray(answer)
    if struct.unpack_from(">h", answer, 8) != (0,):
        return answer  # an error
    # The number of entries is a byte more than theirs from version 3 on, as the lists of brokers are shorter than 127.
    count, at, size = (answer[10] - 1, 11, 7) if version >= 3 else (*struct.unpack_from(">i", answer, 10), 14, 6)
    for each in range(at, at + count * size, size):
        key, _, most = struct.unpack_from(">hhh", answer, each)
        if (limit := highest.get(key, most)) is None:
            struct.pack_into(">h", changed, each, _UNKNOWN_REQUEST)
        else:
            struct.pack_into(">h", changed, each + 4, min(limit, most))
    return bytes(changed)


class KafkaConversation(Conversation):
    """Matches answers on a Kafka connection: they come in the order of requests; some requests have no answer."""

    # The requests that a test can hold by name; it can hold others by their API key.
    kinds: ClassVar[Mapping[str, int]] = {
        "Produce": 0,
        "Fetch": 1,
        "ListOffsets": 2,
        "Metadata": 3,
        "OffsetCommit": 8,
        "OffsetFetch": 9,
        "FindCoordinator": 10,
        "JoinGroup": 11,
        "Heartbeat": 12,
        "LeaveGroup": 13,
        "SyncGroup": 14,
        "DescribeGroups": 15,
        "ApiVersions": 18,
        "CreateTopics": 19,
        "DeleteTopics": 20,
        "InitProducerId": 22,
        "AddPartitionsToTxn": 24,
        "AddOffsetsToTxn": 25,
        "EndTxn": 26,
        "WriteTxnMarkers": 27,
        "TxnOffsetCommit": 28,
        "DescribeProducers": 61,
        "DescribeTransactions": 65,
        "ListTransactions": 66,
        "ConsumerGroupHeartbeat": 68,
    }
    request_head = 8
    answer_head = 4

    def __init__(self) -> None:
        self._pending: deque[Request] = deque(maxlen=_MOST_PENDING)

    def request(self, head: bytes) -> Request:
        kind, version, correlation_id = struct.unpack(">hhi", head)
        request = Request(kind, correlation_id, version)
        self._pending.append(request)
        return request

    def answer(self, head: bytes) -> Request | None:
        (correlation_id,) = struct.unpack(">i", head)
        if not any(request.correlation_id == correlation_id for request in list(self._pending)):
            return None
        while (request := self._pending.popleft()).correlation_id != correlation_id:
            pass  # this older request has no answer
        request.answered.set()
        return request


# --- Pulsar's binary protocol -----------------------------------------------------------------------------------------

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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: OrderedDict[_Key, deque[Request]] = OrderedDict()

    def request(self, head: bytes) -> Request:
        kind, numbers = _command(head)
        key = _request_key(kind, numbers)
        request = Request(kind, key[-1] if key else 0)
        if key:
            with self._lock:
                self._pending.setdefault(key, deque(maxlen=_MOST_REPEATS)).append(request)
                if len(self._pending) > _MOST_PENDING:
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


# --- RocketMQ's remoting protocol -------------------------------------------------------------------------------------

_ANSWER, _ONE_WAY = 1, 2  # bits of a header's flag
# The kind of a frame that cannot be decoded, and of a client's answer to a request of the broker.
_UNKNOWN_KIND = -1


class RocketMQConversation(Conversation):
    """Matches answers on a RocketMQ connection by the request's number (opaque); answers come in any order.

    A frame's head is its JSON header. A request that the broker sends, such as a check-back, counts as an answered one.
    """

    # The requests that a client or a broker sends. An answer has the name of its request.
    kinds: ClassVar[Mapping[str, int]] = {
        "PULL_MESSAGE": 11,
        "QUERY_MESSAGE": 12,
        "QUERY_CONSUMER_OFFSET": 14,
        "UPDATE_CONSUMER_OFFSET": 15,
        "UPDATE_AND_CREATE_TOPIC": 17,
        "UPDATE_BROKER_CONFIG": 25,
        "GET_BROKER_CONFIG": 26,
        "SEARCH_OFFSET_BY_TIMESTAMP": 29,
        "GET_MAX_OFFSET": 30,
        "GET_MIN_OFFSET": 31,
        "VIEW_MESSAGE_BY_ID": 33,
        "HEART_BEAT": 34,
        "UNREGISTER_CLIENT": 35,
        "END_TRANSACTION": 37,
        "GET_CONSUMER_LIST_BY_GROUP": 38,
        "CHECK_TRANSACTION_STATE": 39,
        "NOTIFY_CONSUMER_IDS_CHANGED": 40,
        "LOCK_BATCH_MQ": 41,
        "UNLOCK_BATCH_MQ": 42,
        "GET_ROUTE_INFO_BY_TOPIC": 105,
        "GET_BROKER_CLUSTER_INFO": 106,
        "UPDATE_AND_CREATE_SUBSCRIPTION_GROUP": 200,
        "GET_PRODUCER_CONNECTION_LIST": 204,
        "GET_ALL_TOPIC_LIST_FROM_NAME_SERVER": 206,
        "DELETE_SUBSCRIPTION_GROUP": 207,
        "DELETE_TOPIC_IN_BROKER": 215,
        "DELETE_TOPIC_IN_NAME_SERVER": 216,
        "SEND_MESSAGE_V2": 310,
        "SEND_BATCH_MESSAGE": 320,
        "RESUME_CHECK_HALF_MESSAGE": 323,
        "GET_TOPIC_CONFIG": 351,
        "GET_SUBSCRIPTION_GROUP_CONFIG": 352,
    }
    rewritten_kinds = (105, 106)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: OrderedDict[int, Request] = OrderedDict()

    def request(self, head: bytes) -> Request:
        code, number, flag = _header(head)
        if flag & _ANSWER:
            return Request(_UNKNOWN_KIND, number)
        request = Request(code, number)
        if not flag & _ONE_WAY:
            with self._lock:
                self._pending[number] = request
                if len(self._pending) > _MOST_PENDING:
                    self._pending.popitem(last=False)
        return request

    def answer(self, head: bytes) -> Request | None:
        code, number, flag = _header(head)
        if flag & _ANSWER:
            with self._lock:
                request = self._pending.pop(number, None)
        else:
            request = Request(code, number)
        if request is not None:
            request.answered.set()
        return request


def _header(head: bytes) -> tuple[int, int, int]:
    """Return the code, number and flag of a header; for other bytes, `_UNKNOWN_KIND` and the one-way flag."""
    try:
        header = json.loads(head[4:])
        return int(header["code"]), int(header["opaque"]), int(header["flag"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return _UNKNOWN_KIND, _UNKNOWN_KIND, _ONE_WAY
