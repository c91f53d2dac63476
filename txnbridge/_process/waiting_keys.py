"""`WaitingKeys`: which keys have a message in a retry topic, so that later messages of these keys wait behind it.

With `keep_order` a message goes to the retry topic's partition of its own partition's number. Only the member that has
this partition sends there, and what it has sent itself, or an earlier member of the partition, it reads from the
topics: up to a marker of its own, before which every earlier transaction is decided. When such a message is processed
at last, its pass stores a note, also in the retry topic, that it does not wait any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Message
from txnbridge._process.pass_transaction import PassTransaction
from txnbridge._process.polled_batch import PolledBatch
from txnbridge._process.retries import DONE, KEPT, MARKER, WaitingMessage, WaitsBehind
from txnbridge._read.consumer import RawConsumer
from txnbridge._read.deliveries import Assignment
from txnbridge._read.open_consumers import Consumers
from txnbridge.errors import DeadlineExceeded, PositionLost
from txnbridge.spi import Partition

_READ_AT_ONCE, _READ_SECONDS = 1000, 0.25

_Key = tuple[str, int, bytes]  # the original topic, its partition, and the message's key


class _Waiting(NamedTuple):
    key: _Key
    level: int  # the place of its retry topic, from 1 on
    due: int


class WaitingKeys:
    """Knows the messages that wait in a processor's retry topics, which it reads without a group."""

    def __init__(self, consumers: Consumers, topics: list[str], begin: Callable[..., PassTransaction]) -> None:
        self._consumers = consumers
        self._topics = topics
        self._begin = begin
        self._reader: RawConsumer | None = None
        self._partitions: list[Partition] = []
        self._waiting: dict[str, _Waiting] = {}  # by the original place
        self._done: tuple[set[str], set[str]] = set(), set()  # places of notes since the last reading, and before it
        self._seen: set[str] = set()  # the markers that were read
        self._known: set[Assignment] = set()
        self.behind = True  # whether something may have been sent that was not read yet

    def partition(self, topic: str, original: Message) -> int:
        """Return the partition of a retry topic in which the messages of a message's partition wait."""
        return original.partition % sum(name == topic for name, _ in self._partitions)

    def hold_back(self, batch: PolledBatch, timeout: float) -> None:
        """Mark the messages of a batch that wait behind earlier ones of their keys."""
        sources = {message.source for message in batch.delivered}
        if self.behind or not sources <= self._known:
            self._read_all(Deadline(timeout))
            self._known = {source for source in self._known | sources if not source.ended}
        elif self._waiting:
            self._read(0.0)
        if not self._waiting:
            return
        latest = {each.key: each for each in sorted(self._waiting.values(), key=lambda each: (each.level, each.due))}
        for index in batch.good():
            key = _key(batch.originals[index])
            before = None if key is None else latest.get(key)
            if before is not None and before.level > self._level(batch.delivered[index]):
                batch.set_aside(index, WaitsBehind(before.due), delayed=True)

    def hold_followers(self, batch: PolledBatch, first: int) -> None:
        """Mark the messages of a batch that follow one that waits from now on, at index `first`, with its key."""
        if (key := _key(batch.originals[first])) is None:
            return
        for index in batch.good():
            later = index > first and _key(batch.originals[index]) == key
            if later and self._level(batch.delivered[index]) <= self._level(batch.delivered[first]):
                batch.set_aside(index, WaitsBehind(), delayed=True)

    def _level(self, delivered: Message) -> int:
        return self._topics.index(delivered.topic) + 1 if delivered.topic in self._topics else 0

    # --- reading the retry topics -------------------------------------------------------------------------------------

    def _read_all(self, deadline: Deadline) -> None:
        """Read all that was committed before this call: up to a marker of its own in each partition."""
        connection = self._consumers.connection
        if self._reader is None:
            self._reader = RawConsumer._open(self._consumers, self._topics, None, "earliest")
        self._partitions = sorted(connection.broker.admin.bounds(self._topics, deadline))
        markers = {f"{uuid.uuid4().hex}/{topic}/{number}": (topic, number) for topic, number in self._partitions}
        with self._begin(timeout=deadline.left()) as txn:
            source: Any = getattr(txn, "of_source", txn)
            for marker, (topic, number) in markers.items():
                source.send(topic, b"", key=None, headers=[(MARKER, marker.encode())], partition=number)
        self._done = set(), self._done[0]
        try:
            while not markers.keys() <= self._seen:
                if deadline.expired:
                    raise DeadlineExceeded(f"reading {', '.join(self._topics)} took longer than {deadline.seconds:g} s")
                self._read(_READ_SECONDS)
        except PositionLost:  # retention has removed what was not read: what is left is read from its begin
            self.close()
            raise DeadlineExceeded(f"{', '.join(self._topics)} are read again from their begin") from None
        self._seen.clear()
        self.behind = False

    def _read(self, timeout: float) -> None:
        assert self._reader is not None
        while messages := self._reader.take(_READ_AT_ONCE, timeout):
            timeout = 0.0
            for message in messages:
                self._take(message)

    def _take(self, message: Message) -> None:
        if MARKER in message.headers:
            self._seen.add(message.headers[MARKER])
        elif DONE in message.headers:
            self._waiting.pop(message.headers[DONE], None)
            self._done[0].add(message.headers[DONE])
        elif KEPT in message.headers and message.key is not None and (waits := WaitingMessage.of(message)) is not None:
            place, level = waits.place, self._level(message)
            known = self._waiting.get(place)
            # Partitions are read beside each other, so that a note may come before what it is about.
            if not any(place in done for done in self._done) and (known is None or known.level < level):
                self._waiting[place] = _Waiting((waits.topic, waits.partition, bytes(message.key)), level, waits.due)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self.behind = None, True
        self._waiting.clear()


def _key(original: Message) -> _Key | None:
    return None if original.key is None else (original.topic, original.partition, bytes(original.key))
