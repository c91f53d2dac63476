"""`WaitingKeys`: which messages wait in the retry topics, so that later messages of their keys wait behind them.

With `keep_order` a message waits in the partitions of the retry topics that have its own partition's number, and it is
processed only if no earlier message of its key waits. What this member has sent there it knows. What earlier members of
a partition have sent it reads from the topics: up to a marker of its own, before which every earlier transaction is
decided. When such a message is processed at last, its pass stores a note, also in the retry topic, that it is done.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Message
from txnbridge._process.pass_transaction import PassTransaction
from txnbridge._process.polled_batch import PolledBatch
from txnbridge._process.retries import DONE, KEPT, MARKER, NEXT, WaitingMessage, WaitsBehind, place_of
from txnbridge._read.consumer import RawConsumer
from txnbridge._read.deliveries import Assignment
from txnbridge._read.open_consumers import Consumers
from txnbridge.errors import DeadlineExceeded, PositionLost
from txnbridge.spi import Partition, Position

_READ_AT_ONCE, _READ_SECONDS = 1000, 0.25
_MOST_NOTES = 10_000  # notes in memory after which all is read, so that they can be forgotten

_Key = tuple[str, int, bytes]  # the original topic, its partition, and the message's key


class WaitingKeys:
    """Knows which messages wait in a processor's retry topics; it reads these topics without a group."""

    def __init__(self, consumers: Consumers, topics: list[str], begin: Callable[..., PassTransaction]) -> None:
        self._consumers = consumers
        self._topics = topics
        self._begin = begin
        self._reader: RawConsumer | None = None
        self._partitions: list[Partition] = []
        # By key and original position: the retry topic in which the message waits, and when it is due.
        self._waiting = defaultdict[_Key, dict[Position, tuple[str, float]]](dict)
        self.places: dict[str, tuple[_Key, Position]] = {}  # of the waiting messages, by their places
        # The places that notes name, with the partitions where notes were read: since the last reading, and before it.
        self._done: tuple[dict[str, Partition], dict[str, Partition]] = {}, {}
        self._seen: set[str] = set()  # the markers that were read
        self._known: set[Assignment] = set()
        self._left: set[tuple[str, str]] = set()  # places of messages, and retry topics that they left for others
        self._complete = False  # whether all was read once
        self.in_doubt = True  # whether something may wait that is not known

    def partition(self, topic: str, original: Message) -> int:
        """Return the partition of a retry topic in which the messages of a message's partition wait."""
        return original.partition % sum(name == topic for name, _ in self._partitions)

    def hold_back(self, batch: PolledBatch, timeout: float) -> None:
        """Mark the messages of a batch that wait behind earlier ones of their keys."""
        sources = {message.source for message in batch.delivered}
        try:
            if self.in_doubt or not sources <= self._known or len(self._done[0]) > _MOST_NOTES:
                self.read_all(Deadline(timeout))
                self._known = {source for source in self._known | sources if not source.ended}
            elif self.places:
                self.read(0.0)
        except PositionLost:  # retention has removed what was not read: what is left is read from its begin
            self.close()
            raise DeadlineExceeded(f"{', '.join(self._topics)} are read again from their begin") from None
        goes_first: set[tuple[_Key, Position]] = set()  # in this batch
        lines: dict[_Key, list[Position]] = {}  # what waits, the earliest last, but for what goes first
        poison, marked = batch.poison, batch.marked
        for index in range(len(batch) if self.places else 0):
            original = batch.originals[index]
            if (index in marked and index not in poison) or (key := _key(original)) is None:
                continue
            if (line := lines.get(key)) is None:
                line = lines[key] = sorted(self._waiting.get(key, ()), reverse=True)
            while line and (key, line[-1]) in goes_first:
                line.pop()
            if line and line[-1] < original.position and index not in poison:
                batch.set_aside(index, WaitsBehind(*self._waiting[key][line[-1]]), delayed=True)
            else:
                goes_first.add((key, original.position))

    def hold_followers(self, batch: PolledBatch, first: int, topic: str) -> None:
        """Mark messages of a batch after the one at `first`, with its key: it will wait in the retry topic `topic`."""
        if (key := _key(batch.originals[first])) is not None:
            for index in batch.good():
                if index > first and _key(batch.originals[index]) == key:
                    batch.set_aside(index, WaitsBehind(topic), delayed=True)

    def note(self, batch: PolledBatch, sent: dict[int, tuple[str, float]]) -> None:
        """Note what a committed batch has `sent` to retry topics, with the due time, and what was processed."""
        for index, original in enumerate(batch.originals if self.places or sent else ()):
            if index in sent:
                self._add(original, *sent[index], _key(original))
            elif (place := place_of(original)) in self.places:
                self._remove(place)

    def _add(
        self, original: Message | WaitingMessage, topic: str, due: float, key: _Key | None, at: Partition | None = None
    ) -> None:
        place = place_of(original)
        # A note before it in its partition is about another message: of a topic before this one, or before a redrive.
        if key is not None and not any(at and done.get(place, at) != at for done in self._done):
            self.places[place] = key, original.position
            line = self._waiting[key]
            # Topics are read beside each other: of several entries for a message the last due tells where it waits.
            if original.position not in line or due >= line[original.position][1]:
                line[original.position] = topic, due

    def _remove(self, place: str, at: Partition = ("", 0)) -> None:
        self._done[0][place] = at
        if (known := self.places.pop(place, None)) is not None:
            key, position = known
            del self._waiting[key][position]
            if not self._waiting[key]:
                del self._waiting[key]

    # --- reading the retry topics -------------------------------------------------------------------------------------

    def read_all(self, deadline: Deadline) -> None:
        """Read all that was committed before this call."""
        self._read_to_markers(deadline)
        if not self._complete and (gone := self._gone()):
            # These went on to a topic that retry= does not have any more, or in which retention has removed them; or
            # their next entries are only now there.
            self._read_to_markers(deadline)
            for place, _ in gone & self._gone():
                self._remove(place)
        self._complete = True
        self._left.clear()
        self.in_doubt = False

    def _read_to_markers(self, deadline: Deadline) -> None:
        """Send a marker message to each partition of the retry topics, and read up to it."""
        connection = self._consumers.connection
        if self._reader is None:
            self._reader = RawConsumer._open(self._consumers, self._topics, None, "earliest")
        self._partitions = sorted(connection.broker.admin.bounds(self._topics, deadline))
        if deadline.expired:
            raise DeadlineExceeded(f"opening {', '.join(self._topics)} took longer than {deadline.seconds:g} s")
        markers = {f"{uuid.uuid4().hex}/{topic}/{number}": (topic, number) for topic, number in self._partitions}
        with self._begin(timeout=max(0.001, deadline.left())) as txn:
            source: Any = getattr(txn, "of_source", txn)
            for marker, (topic, number) in markers.items():
                source.send(topic, b"", key=None, headers=[(MARKER, marker.encode())], partition=number)
        while not markers.keys() <= self._seen:
            if deadline.expired:
                raise DeadlineExceeded(f"reading {', '.join(self._topics)} took longer than {deadline.seconds:g} s")
            self.read(_READ_SECONDS)
        # Only now: before all is read, a note may come long before what it is about.
        self._done = {}, self._done[0]
        self._seen.clear()

    def _gone(self) -> set[tuple[str, str]]:
        """Return the original places of messages that left the retry topic where they waited last, with the topics."""
        left = [(place, topic, *self.places[place]) for place, topic in self._left if place in self.places]
        return {(place, topic) for place, topic, key, position in left if self._waiting[key][position][0] == topic}

    def read(self, timeout: float) -> None:
        assert self._reader is not None
        while messages := self._reader.take(_READ_AT_ONCE, timeout):
            timeout = 0.0
            for message in messages:
                self.take(message)

    def take(self, message: Message) -> None:
        # Partitions are read beside each other, so that a note may come before what it is about.
        if MARKER in message.headers:
            self._seen.add(message.headers[MARKER])
        elif DONE in message.headers:
            if NEXT not in message.headers:
                self._remove(message.headers[DONE], message[:2])
            elif not self._complete:
                self._left.add((message.headers[DONE], message.topic))
        elif KEPT in message.headers and message.key is not None:
            waits = WaitingMessage.of(message)
            if waits is not None:
                self._left.discard((place_of(waits), message.topic))
                key = waits.topic, waits.partition, bytes(message.key)
                self._add(waits, message.topic, waits.due, key, message[:2])

    def close(self, timeout: float | None = None) -> None:
        if self._reader is not None:
            self._reader.close(timeout)
        self._reader, self.in_doubt, self._complete = None, True, False
        self._waiting.clear()
        self.places.clear()
        self._left.clear()


def _key(original: Message) -> _Key | None:
    return None if original.key is None else (original.topic, original.partition, bytes(original.key))
