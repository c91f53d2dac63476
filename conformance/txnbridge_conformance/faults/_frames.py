"""Where frames begin in a stream of bytes, and what kind they are. Nothing but a frame's head is ever kept."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

# Requests of Kafka that a fault may be aimed at; others go by their number.
KAFKA_REQUESTS = {
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

# Requests that may wait for their answers on one connection. A client that sends more without reading any is not one;
# its oldest are forgotten.
_MOST_PENDING = 100_000


@dataclass(eq=False)
class Request:
    """The head of a request."""

    kind: int
    version: int
    correlation_id: int
    answered: threading.Event = field(default_factory=threading.Event, repr=False)


class Piece(NamedTuple):
    """Some bytes of a stream; `head` is there if they are a frame's first."""

    data: bytes
    head: bytes | None = None


class Splitter:
    """Cuts a stream of frames, each after its length in four bytes, so that each frame begins a piece.

    The pieces together are the stream, byte for byte. A length that no frame can have ends the cutting, not the stream:
    whatever follows is one piece as it comes.
    """

    def __init__(self, head_size: int) -> None:
        self._head_size = head_size
        self._start = b""  # of a frame, as long as it is shorter than a head
        self._left = 0  # how much of the present frame has not come yet
        self._lost = False

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are complete with these bytes."""
        while data and not self._lost:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                yield Piece(piece)
                continue
            missing = 4 + self._head_size - len(self._start)
            self._start, data = self._start + data[:missing], data[missing:]
            yield from self._begin()
        if data:
            yield Piece(data)

    def _begin(self) -> Iterator[Piece]:
        if len(self._start) < 4:
            return
        (length,) = struct.unpack_from(">i", self._start)
        self._lost = length < self._head_size
        if self._lost:
            yield from self.flush()
        elif len(self._start) == 4 + self._head_size:
            self._left = length - self._head_size
            start, self._start = self._start, b""
            yield Piece(start, start[4:])

    def flush(self) -> Iterator[Piece]:
        """What is left of a stream that has ended."""
        if self._start:
            start, self._start = self._start, b""
            yield Piece(start)


class Conversation(Protocol):
    """How one connection of a protocol is understood. Each method is given the heads of its own direction in order."""

    request_head: int
    answer_head: int

    def request(self, head: bytes) -> Request:
        """What a request is."""

    def answer(self, head: bytes) -> Request | None:
        """Which request it answers, None if that is not known."""


class KafkaConversation:
    """Kafka answers the requests of a connection in their order, except those that want no answer."""

    request_head = 8
    answer_head = 4

    def __init__(self) -> None:
        self._pending: deque[Request] = deque(maxlen=_MOST_PENDING)

    def request(self, head: bytes) -> Request:
        request = Request(*struct.unpack(">hhi", head))
        self._pending.append(request)
        return request

    def answer(self, head: bytes) -> Request | None:
        (correlation_id,) = struct.unpack(">i", head)
        if not any(request.correlation_id == correlation_id for request in list(self._pending)):
            return None
        while (request := self._pending.popleft()).correlation_id != correlation_id:
            pass  # it wanted no answer
        request.answered.set()
        return request
