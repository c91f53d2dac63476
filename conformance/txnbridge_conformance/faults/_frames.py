"""Where frames begin in a stream of bytes, and what kind they are. Nothing but a frame's head is ever kept."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

# Requests that may wait for their answers on one connection. A client that sends more without reading any is not one;
# its oldest are forgotten.
MOST_PENDING = 100_000

# Pulsar's heads are whole commands: no longer than the longest frame that a broker takes unless it is told to (the
# largest message and 10 KiB around it).
_MOST_HEAD = 5 * 1024 * 1024 + 10 * 1024


@dataclass(eq=False)
class Request:
    """The head of a request."""

    kind: int
    correlation_id: int
    version: int = 0
    answered: threading.Event = field(default_factory=threading.Event, repr=False)


class Piece(NamedTuple):
    """Some bytes of a stream; `head` is there if they are a frame's first."""

    data: bytes
    head: bytes | None = None


class Splitter:
    """Cuts a stream of frames, each after its length in four bytes, so that each frame begins a piece.

    A head is so many bytes; or, if that is None, as many as its own first four bytes say, behind these.

    The pieces together are the stream, byte for byte. A length that no frame can have ends the cutting, not the stream:
    whatever follows is one piece as it comes.
    """

    def __init__(self, head_size: int | None) -> None:
        self._head_size = head_size
        self._start = bytearray()  # of a frame, as long as its head is not whole
        self._wanted = 4  # how much of the start says more
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
            missing = self._wanted - len(self._start)
            self._start += data[:missing]
            data = data[missing:]
            if len(self._start) == self._wanted:
                yield from self._begin()
        if data:
            yield Piece(data)

    def _begin(self) -> Iterator[Piece]:
        length = int.from_bytes(self._start[:4], "big", signed=True)
        head_size = self._present_head_size()
        self._lost = not head_size <= min(length, _MOST_HEAD)
        if self._lost:
            yield from self.flush()
        elif self._wanted < 4 + head_size:
            self._wanted = 4 + head_size
        else:
            start = bytes(self._start)
            self._start, self._wanted, self._left = bytearray(), 4, length - head_size
            yield Piece(start, start[4:])

    def _present_head_size(self) -> int:
        """How long the head is, as far as is known."""
        if self._head_size is not None:
            return self._head_size
        return 4 + int.from_bytes(self._start[4:8], "big")

    @property
    def is_inside(self) -> bool:
        """Whether more of the present frame is to come, behind its head."""
        return bool(self._left)

    def flush(self) -> Iterator[Piece]:
        """What is left of a stream that has ended."""
        if self._start:
            start, self._start = bytes(self._start), bytearray()
            yield Piece(start)


class Conversation(Protocol):
    """How one connection of a protocol is understood. Each method is given the heads of its own direction in order."""

    kinds: ClassVar[Mapping[str, int]]
    """What can be picked by name."""
    tells_addresses: ClassVar[Collection[int]]
    """The kinds whose answers say where brokers are and that no setting of a broker changes; the proxy changes them."""

    @property
    def request_head(self) -> int | None:
        """What a `Splitter` has to know of the heads of requests."""

    @property
    def answer_head(self) -> int | None:
        """The same of answers."""

    def request(self, head: bytes) -> Request:
        """What a request is."""

    def answer(self, head: bytes) -> Request | None:
        """Which request it answers, None if that is not known; what nobody asked for is one of its own."""
