"""One partition's state in one reader, and the conversion of the client's messages into the core's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import dropwhile, groupby
from typing import Any

from confluent_kafka import Message as Raw
from confluent_kafka import TopicPartition

from txnbridge.spi import NO_HEADERS, Headers, Message, Partition

_COUNTS = 1000  # the most delivery counts that are kept for a partition


@dataclass(frozen=True, eq=False)
class SeekRequest:
    """A request to find, and check at the broker, the offset at which a partition's reading starts or resumes.

    `target` is the offset of a seek, `refused` an offset that the broker did not have; with neither, the partition has
    just been assigned. `topic_id` is the id of the offset's topic; None for an offset that is valid in any topic that
    has the name now.
    """

    target: int | None = None
    since: tuple[int, int] | None = None  # the time of a seek to a time, and the partition's end offset at the seek
    refused: int | None = None
    topic_id: str | None = None


SeekRequests = Mapping[Partition, SeekRequest]


class PartitionReadState(Enum):
    """The states of a partition that is assigned to a reader.

    | state    | event                                                     | next state |
    |----------|-----------------------------------------------------------|------------|
    | ASSIGNED | its first offset is found, and the listener is called     | SEEKING    |
    | SEEKING  | the client fetches from the offset                        | READING    |
    | SEEKING  | the offset is lost, and the user has to seek              | LOST       |
    | READING  | a seek, or the broker does not have the offset to read at | SEEKING    |
    | LOST     | a seek                                                    | SEEKING    |
    """

    ASSIGNED = "the listener does not know of it yet"
    SEEKING = "its seek request is not answered yet"
    READING = "the client reads it"
    LOST = "it is not read before the user says where to go on"


class KafkaPartition:
    """One assignment of a partition to a reader; `next` is the next offset to hand out, None until it is known."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.state = PartitionReadState.ASSIGNED
        self.source: object = None
        self.next: int | None = None
        self.topic_id: str | None = None  # the id of the topic in which `next` is an offset, if topics have ids
        self.request = SeekRequest()
        self.why_lost = ""
        self.placed = False  # whether the client fetches this partition, at any offset
        # After a seek to a time: (time, end). Below `end`, messages stamped before `time` are skipped until one is
        # stamped later, because the broker's search by time also finds the control markers of transactions.
        self.since: tuple[int, int] | None = None
        # The end offset that the client reached without a message: aborted messages do not move the client's position.
        # None after a message of the client was dropped: the client's position, after that message, is then too high.
        self.reached: int | None = 0
        self._first: int | None = None
        self._handed = -1
        self._times: dict[int, int] = {}

    @property
    def announced(self) -> bool:
        """Return whether the listener was told of the partition's assignment."""
        return self.state is not PartitionReadState.ASSIGNED

    @property
    def reading(self) -> bool:
        return self.state is PartitionReadState.READING

    def was_handed_out(self, offset: int) -> bool:
        """Return whether an offset is in the range handed out in this assignment, or directly after that range."""
        return self._first is not None and self._first <= offset <= self._handed

    def announce(self, source: object) -> None:
        self.source = source
        self.state = PartitionReadState.SEEKING

    def seek(self, request: SeekRequest) -> None:
        """Hand out no message until the request is answered."""
        self.request = request
        self.since = request.since
        if self.announced:
            self.state = PartitionReadState.SEEKING

    def lose(self, why: str, at: int) -> None:
        """Mark the position as lost, with the reason: no message is handed out until the user seeks."""
        self.next = at
        self.state, self.why_lost = PartitionReadState.LOST, why

    def start_reading(self) -> None:
        self.state = PartitionReadState.READING

    def at_next(self) -> TopicPartition:
        """Return the client's `TopicPartition` of this partition with the `next` offset."""
        return TopicPartition(*self.partition, self.next or 0)

    def hand_out(self, run: Sequence[Any]) -> list[Message]:
        """Convert the client's messages of this partition into the core's, and move `next` after them."""
        behind = run[-1].offset() + 1
        if self.since is not None:
            run = self._skip_before(self.since, run)
            if not run:
                self.next = behind
                return []
        topic, number = self.partition
        source, new, none, handed = self.source, tuple.__new__, NO_HEADERS, self._handed
        # This runs for every message, and tuple.__new__ is much faster than Message(...).
        messages = [
            new(
                Message,
                (
                    topic,
                    number,
                    (offset := message.offset(),),
                    message.key(),
                    message.value(),
                    none if (headers := message.headers()) is None else _headers(headers),
                    message.timestamp()[1],
                    1 if offset >= handed else self._delivery_count(offset),
                    source,
                ),
            )
            for message in run
        ]
        if self._first is None:
            self._first = run[0].offset()
        self.next = behind
        self._handed = max(handed, behind)
        return messages

    def _skip_before(self, since: tuple[int, int], run: Sequence[Any]) -> Sequence[Any]:
        """Return the messages from the first one on with a timestamp at or after the time of a seek."""
        time, end = since
        rest = list(dropwhile(lambda message: message.timestamp()[1] < time and message.offset() < end, run))
        if rest:
            self.since = None
        return rest

    def _delivery_count(self, offset: int) -> int:
        """Count one more delivery of an offset that was handed out before, and return the number of deliveries."""
        count = self._times[offset] = self._times.get(offset, 1) + 1
        if len(self._times) > _COUNTS:
            # The messages with the lowest offsets were probably acknowledged since.
            for old in sorted(self._times)[: _COUNTS // 2]:
                del self._times[old]
        return count


def _headers(pairs: Sequence[tuple[str, bytes | None]]) -> Headers:
    return Headers(pairs)


def split(batch: Sequence[Any], topics: Collection[str]) -> Iterator[tuple[Partition, Sequence[Any]]]:
    """Split a non-empty batch of messages of these topics into runs of consecutive messages of one partition."""
    # The loops below run in C and take a tenth of the time of the conversion. Comparing topics costs twice as much as
    # comparing partition numbers, so the latter are compared first.
    if len(set(map(Raw.partition, batch))) == 1 and (len(topics) == 1 or len(set(map(Raw.topic, batch))) == 1):
        yield _partition_of(batch[0]), batch  # the common case
    else:
        for partition, run in groupby(batch, _partition_of):
            yield partition, list(run)


def has_errors(batch: Sequence[Any]) -> bool:
    """Return whether a batch holds an error in place of a message."""
    return any(map(Raw.error, batch))


def _partition_of(message: Any) -> Partition:
    return message.topic(), message.partition()
