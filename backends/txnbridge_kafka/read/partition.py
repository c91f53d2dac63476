"""One partition as one reader sees it, and the client's messages as ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import dropwhile, groupby
from typing import Any

from confluent_kafka import Message as Raw
from confluent_kafka import TopicPartition

from txnbridge.spi import NO_HEADERS, Headers, Message, Partition

_COUNTS = 1000  # delivery counts that are kept without asking whether they are still needed


@dataclass(frozen=True, eq=False)
class SeekRequest:
    """A question that the broker has to answer before a partition can be read: whether it has the offset to go on at.

    `target` is the offset that a seek asks for, `refused` an offset that the broker did not have; with neither, the
    partition has just been assigned. `topic_id` is the id of the topic that the offset belongs to, None for an offset
    that holds in whatever topic has the name now.
    """

    target: int | None = None
    since: tuple[int, int] | None = None  # the time that `target` stands for, and the end of the log at the seek
    refused: int | None = None
    topic_id: str | None = None


SeekRequests = Mapping[Partition, SeekRequest]


class PartitionReadState(Enum):
    """The states of a partition that a reader has.

    | state    | event                                                     | next state |
    |----------|-----------------------------------------------------------|------------|
    | ASSIGNED | its start is found, and the listener is told of it        | SEEKING    |
    | SEEKING  | the client reads from there                               | READING    |
    | SEEKING  | only the user can say where to go on                      | LOST       |
    | READING  | a seek, or the broker does not have the offset to read at | SEEKING    |
    | LOST     | a seek                                                    | SEEKING    |
    """

    ASSIGNED = "the listener does not know of it yet"
    SEEKING = "its seek request is not answered yet"
    READING = "the client reads it"
    LOST = "it is not read before the user says where to go on"


class KafkaPartition:
    """One assignment of a partition to a reader; `next` is the offset to hand out next, None until it is known."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.state = PartitionReadState.ASSIGNED
        self.source: object = None
        self.next: int | None = None
        self.topic_id: str | None = None  # of the topic that `next` belongs to, where topics have ids
        self.request = SeekRequest()
        self.why_lost = ""
        self.placed = False  # whether the client reads this partition, at whatever offset
        # After a seek to a time: (time, end). Below `end`, messages stamped before `time` are skipped until one is
        # stamped later, because the broker's search by time also finds the control markers of transactions.
        self.since: tuple[int, int] | None = None
        # The offset up to which the client came without a message: aborted messages do not move the client's own
        # position. None once a message was dropped here: the client's position, which is behind it, is too high then.
        self.reached: int | None = 0
        self._first: int | None = None
        self._handed = -1
        self._times: dict[int, int] = {}

    @property
    def announced(self) -> bool:
        """Return whether the listener knows of the partition."""
        return self.state is not PartitionReadState.ASSIGNED

    @property
    def reading(self) -> bool:
        return self.state is PartitionReadState.READING

    def was_handed_out(self, offset: int) -> bool:
        """Return whether an offset lies within what was handed out in this assignment, or at its end."""
        return self._first is not None and self._first <= offset <= self._handed

    def announce(self, source: object) -> None:
        self.source = source
        self.state = PartitionReadState.SEEKING

    def seek(self, request: SeekRequest) -> None:
        """Hand out nothing until the request is answered."""
        self.request = request
        self.since = request.since
        if self.announced:
            self.state = PartitionReadState.SEEKING

    def lose(self, why: str, at: int) -> None:
        """Hand out nothing until a seek says where to go on."""
        self.next = at
        self.state, self.why_lost = PartitionReadState.LOST, why

    def start_reading(self) -> None:
        self.state = PartitionReadState.READING

    def at_next(self) -> TopicPartition:
        """Return the client's name of this partition, with the offset to go on at."""
        return TopicPartition(*self.partition, self.next or 0)

    def hand_out(self, run: Sequence[Any]) -> list[Message]:
        """Return the client's messages of this partition, in order, as ours."""
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
        """Return the messages from the first one on that is stamped at or after a time."""
        time, end = since
        rest = list(dropwhile(lambda message: message.timestamp()[1] < time and message.offset() < end, run))
        if rest:
            self.since = None
        return rest

    def _delivery_count(self, offset: int) -> int:
        """Count one more delivery of an offset that was handed out before, and return how many there were."""
        count = self._times[offset] = self._times.get(offset, 1) + 1
        if len(self._times) > _COUNTS:
            # The lowest offsets were given back longest ago, or are acknowledged by now.
            for old in sorted(self._times)[: _COUNTS // 2]:
                del self._times[old]
        return count


def _headers(pairs: Sequence[tuple[str, bytes | None]]) -> Headers:
    return Headers(pairs)


def split(batch: Sequence[Any], topics: Collection[str]) -> Iterator[tuple[Partition, Sequence[Any]]]:
    """Split a batch that is not empty, of messages of these topics, into runs of messages of one partition."""
    # These loops run in C and cost a tenth of handing the messages out. Comparing topics costs twice as much as
    # comparing partition numbers.
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
