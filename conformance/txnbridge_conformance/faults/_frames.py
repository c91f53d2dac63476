"""Splits a stream of bytes into the frames of a broker's protocol, and matches requests with their answers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

# The most unanswered requests that are kept for one connection, beyond which the oldest are dropped. No real client
# sends so many without reading an answer.
MOST_PENDING = 100_000

# The longest head. Pulsar's heads are whole commands, which are no longer than a broker's longest frame by default (the
# largest message and 10 KiB).
_MOST_HEAD = 5 * 1024 * 1024 + 10 * 1024


@dataclass(eq=False)
class Request:
    """A request, decoded from the head of its frame. The proxy sets `answered` when the broker's answer arrives."""

    kind: int
    correlation_id: int
    version: int = 0
    answered: threading.Event = field(default_factory=threading.Event, repr=False)


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
