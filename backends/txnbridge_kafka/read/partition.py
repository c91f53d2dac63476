"""One partition as one reader sees it, and the client's messages as ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import dropwhile, groupby
from typing import Any

from confluent_kafka import Message as Raw
from confluent_kafka import TopicPartition

from txnbridge.spi import NO_HEADERS, Headers, Message, Partition

_COUNTS = 1000  # counts of deliveries that are kept without asking whether they are still needed


@dataclass(frozen=True, eq=False)
class Wish:
    """What is to be settled about a partition: where a seek wants it to go on, or what the broker does not have.

    `topic_id` is of the topic that the offset belongs to; None for an offset that holds in whatever topic is there.
    """

    target: int | None = None
    since: tuple[int, int] | None = None  # a point in time that the target stands for, and where the log ended then
    refused: int | None = None
    topic_id: str | None = None


class State(Enum):
    """Where a partition goes on with its reader, and what becomes of that.

    | it is   | it happens that                                        | then it is |
    |---------|--------------------------------------------------------|------------|
    | COMING  | it is found where it goes on, and the listener told    | SEEKING    |
    | SEEKING | the client reads from there                            | READING    |
    | SEEKING | only the user can say where it goes on                 | LOST       |
    | READING | a seek, or the broker does not have where it goes on   | SEEKING    |
    | LOST    | a seek                                                 | SEEKING    |
    """

    COMING = "nobody knows of it yet"
    SEEKING = "its wish is to be settled"
    READING = "where it goes on is certain, and the client reads there"
    LOST = "it cannot go on without being told where"


class Cursor:
    """One stay of one partition with a reader: where it goes on, and what was handed out.

    `next` is the offset to hand out next, None until that is known.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.state = State.COMING
        self.source: object = None
        self.next: int | None = None
        self.topic_id: str | None = None  # of the topic that `next` belongs to, where topics have ids
        self.wish = Wish()
        self.why_lost = ""
        self.placed = False  # it is among the partitions that the client reads, wherever
        # Up to an offset nothing stamped before a time is handed out, until something stamped later has been: by the
        # broker's count a marker of a transaction may be what is stamped later.
        self.since: tuple[int, int] | None = None
        # So far the client has come to an end without a message: what was aborted does not move its own position. None
        # once something was dropped that the client takes for handed out: then its own position says nothing.
        self.reached: int | None = 0
        self._first: int | None = None
        self._handed = -1
        self._times: dict[int, int] = {}

    @property
    def told(self) -> bool:
        """Whether the listener knows of it."""
        return self.state is not State.COMING

    def was_handed_out(self, offset: int) -> bool:
        """Whether an offset lies within what this stay has handed out, its end included."""
        return self._first is not None and self._first <= offset <= self._handed

    def come(self, source: object) -> None:
        self.source = source
        self.state = State.SEEKING

    def seek(self, wish: Wish) -> None:
        """Hand out nothing until it is settled where it goes on."""
        self.wish = wish
        self.since = wish.since
        if self.told:
            self.state = State.SEEKING

    def lose(self, why: str, at: int) -> None:
        """Hand out nothing until a seek says where it goes on."""
        self.next = at
        self.state, self.why_lost = State.LOST, why

    def read(self) -> None:
        """The client reads where it goes on."""
        self.state = State.READING

    def at_next(self) -> TopicPartition:
        """What the client calls this partition, with where it goes on."""
        return TopicPartition(*self.partition, self.next or 0)

    def hand_out(self, run: Sequence[Any]) -> list[Message]:
        """Messages of this partition, in order, as ours."""
        behind = run[-1].offset() + 1
        if self.since is not None:
            run = self._reach(self.since, run)
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
                    1 if offset >= handed else self._count(offset),
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

    def _reach(self, since: tuple[int, int], run: Sequence[Any]) -> Sequence[Any]:
        """The messages from the first one on that is stamped at or after a time."""
        time, end = since
        reached = list(dropwhile(lambda message: message.timestamp()[1] < time and message.offset() < end, run))
        if reached:
            self.since = None
        return reached

    def _count(self, offset: int) -> int:
        """How many times an offset that was handed out before is handed out with this one."""
        count = self._times[offset] = self._times.get(offset, 1) + 1
        if len(self._times) > _COUNTS:
            # The lowest were given back longest ago, or are acknowledged by now.
            for old in sorted(self._times)[: _COUNTS // 2]:
                del self._times[old]
        return count


def _headers(pairs: Sequence[tuple[str, bytes | None]]) -> Headers:
    return Headers(pairs)


def split(batch: Sequence[Any], topics: Collection[str]) -> Iterator[tuple[Partition, Sequence[Any]]]:
    """A batch that is not empty, from these topics, as runs of messages of one partition."""
    # These loops run in C: they cost a tenth of what handing out does, a name twice as much as a number.
    if len(set(map(Raw.partition, batch))) == 1 and (len(topics) == 1 or len(set(map(Raw.topic, batch))) == 1):
        yield _name(batch[0]), batch  # as it is nearly always
    else:
        for partition, run in groupby(batch, _name):
            yield partition, list(run)


def has_errors(batch: Sequence[Any]) -> bool:
    """Whether something in a batch is no message."""
    return any(map(Raw.error, batch))


def _name(message: Any) -> Partition:
    return message.topic(), message.partition()
