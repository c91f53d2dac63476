"""One partition's state in one reader, and the conversion of the client's messages into the core's or into columns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import dropwhile, groupby
from operator import itemgetter
from typing import Any, TypeVar

from confluent_kafka import Message as Raw
from confluent_kafka import TopicPartition

from txnbridge.spi import NO_HEADERS, Headers, Message, MessageColumns, Partition
from txnbridge_kafka.client.librdkafka import headers_of

_log = logging.getLogger("txnbridge")

_MOST_DELIVERY_COUNTS = 1000  # kept for each partition

# The type of the items that `poll`, or `poll_columns`, returns.
Found = TypeVar("Found", bound=Message | MessageColumns)

Conversion = Callable[["KafkaPartition", Sequence[Any]], list[Found]]

_SECOND = itemgetter(1)


@dataclass(frozen=True, eq=False)
class SeekRequest:
    """A request to look up the offset at which a partition is read next, and to check the offset at the broker.

    `target` is the offset of a seek, and `refused` an offset that the broker did not have. If both are None, the
    partition has just been assigned. `topic_id` is the id of the offset's topic, None for any topic with the name.
    """

    target: int | None = None
    since: tuple[int, int] | None = None  # for a seek to a time: the time, and the partition's end offset then
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
    | READING  | a seek, or the broker does not have the next offset       | SEEKING    |
    | LOST     | a seek                                                    | SEEKING    |
    """

    ASSIGNED = "the listener does not know of it yet"
    SEEKING = "its seek request is not answered yet"
    READING = "the client reads it"
    LOST = "it is not read until the user seeks"


class KafkaPartition:
    """A reader's state for one assigned partition. `next` is the next offset to hand out, None until it is known."""

    def __init__(self, partition: Partition, epochs: dict[Partition, int]) -> None:
        self.partition = partition
        self._epochs = epochs  # gets the highest leader epoch of the messages that were handed out
        self.state = PartitionReadState.ASSIGNED
        self.source: object = None
        self.next: int | None = None
        self.topic_id: str | None = None  # the id of the topic in which `next` is valid, if known
        self.request = SeekRequest()
        self.why_lost = ""
        self.fetched = False  # whether the client fetches this partition, at any offset
        # After a seek to a time: the time, and the end offset. The broker's search by time also finds control markers,
        # so messages with an earlier timestamp may follow. They are skipped up to the end offset.
        self.since: tuple[int, int] | None = None
        # The last end offset that the client reported. It counts for the lag, because the client's position stays
        # before aborted messages at the end. None after a message was dropped: the client's position is then too high.
        self.reached: int | None = 0
        self._first: int | None = None
        self._handed_out_to = -1
        self._delivery_counts: dict[int, int] = {}
        self._replaced_names = False  # whether a header name was not UTF-8, which is logged once

    @property
    def announced(self) -> bool:
        """Return whether the reader's listener was told that the partition is assigned to this reader."""
        return self.state is not PartitionReadState.ASSIGNED

    @property
    def reading(self) -> bool:
        return self.state is PartitionReadState.READING

    def was_handed_out(self, offset: int) -> bool:
        """Return whether an offset was handed out in this assignment, or is the next offset after those handed out."""
        return self._first is not None and self._first <= offset <= self._handed_out_to

    def announce(self, source: object) -> None:
        self.source, self.state = source, PartitionReadState.SEEKING

    def seek(self, request: SeekRequest) -> None:
        """Set the seek request: no message is handed out until the offset to read next was looked up for it."""
        self.request = request
        self.since = request.since
        if request.topic_id is None or request.since is not None:
            self._epochs.pop(self.partition, None)  # the topic may be another one
        if self.announced:
            self.state = PartitionReadState.SEEKING

    def lose(self, why: str, at: int) -> None:
        """Note that the offset `at` cannot be read: no message is handed out until the user seeks."""
        self.next, self.state, self.why_lost = at, PartitionReadState.LOST, why

    def at_next(self) -> TopicPartition:
        """Return the client's `TopicPartition` of this partition with the `next` offset."""
        return TopicPartition(*self.partition, self.next or 0)

    def hand_out(self, run: Sequence[Any], convert: Conversion[Found]) -> list[Found]:
        """Convert and return the client's messages `run`, and set `next` to the offset after the last one.

        `convert` is `KafkaPartition.to_messages` or `KafkaPartition.to_columns`.
        """
        next_offset = run[-1].offset() + 1
        if self.since is not None:
            run = self._skip_before(self.since, run)
            if not run:
                self.next = next_offset
                return []
        found = convert(self, run)
        if self._first is None:
            self._first = run[0].offset()
        self.next = next_offset
        if (epoch := run[-1].leader_epoch()) is not None:
            self._epochs[self.partition] = max(epoch, self._epochs.get(self.partition, epoch))
        self._handed_out_to = max(self._handed_out_to, next_offset)
        return found

    def to_messages(self, run: Sequence[Any]) -> list[Message]:
        topic, number = self.partition
        source, new, none, handed = self.source, tuple.__new__, NO_HEADERS, self._handed_out_to
        # This runs for every message, so tuple.__new__ is used, which is much faster than Message(...).
        return [
            new(
                Message,
                (
                    topic,
                    number,
                    (offset := message.offset(),),
                    message.key(),
                    message.value(),
                    none if headers is None else Headers(headers),
                    message.timestamp()[1],
                    1 if offset >= handed else self._delivery_count(offset),
                    source,
                ),
            )
            for message, headers in zip(run, self._headers(run), strict=True)
        ]

    def to_columns(self, run: Sequence[Any]) -> list[MessageColumns]:
        # These loops run in C.
        fields: tuple[Any, ...] = Raw.offset, Raw.key, Raw.value, Raw.timestamp
        offsets, keys, values, times = (list(map(field, run)) for field in fields)
        headers = self._headers(run)
        return [MessageColumns(*self.partition, (offsets,), keys, values, headers, list(map(_SECOND, times)))]

    def _headers(self, run: Sequence[Any]) -> list[Any]:
        headers, replaced = headers_of(run)
        if replaced and not self._replaced_names:
            self._replaced_names = True
            _log.warning(
                "%s[%d]: the message at offset %d has a header name that is not UTF-8. U+FFFD replaces the wrong bytes,"
                " here and in later messages of this partition",
                *(*self.partition, run[replaced[0]].offset()),
            )
        return headers

    def _skip_before(self, since: tuple[int, int], run: Sequence[Any]) -> Sequence[Any]:
        """Drop the messages before the first one that is not older than the time of a seek; return the rest.

        `since` is this time, and the offset from which no message is dropped.
        """
        time, end = since
        rest = list(dropwhile(lambda message: message.timestamp()[1] < time and message.offset() < end, run))
        if rest:
            self.since = None
        return rest

    def _delivery_count(self, offset: int) -> int:
        """Count one more delivery of an offset that was handed out before, and return the count."""
        count = self._delivery_counts[offset] = self._delivery_counts.get(offset, 1) + 1
        if len(self._delivery_counts) > _MOST_DELIVERY_COUNTS:
            # The messages with the lowest offsets have probably been acknowledged since.
            for old in sorted(self._delivery_counts)[: _MOST_DELIVERY_COUNTS // 2]:
                del self._delivery_counts[old]
        return count


def split_runs(batch: Sequence[Any], topics: Collection[str]) -> Iterator[tuple[Partition, Sequence[Any]]]:
    """Split a batch, which is not empty, into runs of messages that follow each other and are of one partition.

    All messages are of these `topics`. If there is only one, the messages' topics are not compared.
    """
    # These loops run in C. Partition numbers are compared first, because comparing topics takes twice as long.
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
