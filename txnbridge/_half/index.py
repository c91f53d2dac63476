"""`LaneIndex`: which half messages of a lane, a topic of ours, are not published or dropped yet.

The index has no bodies: they are read again at their positions when `check` or a publication needs them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Message, Position
from txnbridge._base.token import Outcome
from txnbridge._half.records import Beat, HalfDone, HalfParked, HalfPart, Refusal, places_of, read_record, topics_of
from txnbridge._read.consumer import RawConsumer
from txnbridge._read.open_consumers import Consumers
from txnbridge.errors import PositionLost
from txnbridge.spi import Half, HalfMessage

_POLL_RECORDS, _POLL_SECONDS, _REST_SECONDS = 2_000, 0.1, 1.0
# Reading on is faster than a new request to the broker up to about this many records in between.
_READ_ON_RECORDS = 5_000
# The number of outcomes that are kept in memory for owners whose work ends after a check-back did.
_MOST_OUTCOMES = 100_000


@dataclass(slots=True, eq=False)
class UndoneHalf:
    """A half (a transaction's half messages) that is neither published nor dropped. Times are ms since 1970."""

    check_at: int
    deadline_at: int
    checks: int
    parts: int
    parked: str = ""  # the reason, if it is parked
    first: Position | None = None  # of its first record; None if this process stored it and has not read it
    rank: int = 0  # the number of records that were read before its first one
    size: int = 0  # of its messages' values, in bytes, as far as they were read


class LaneIndex:
    """Knows which half messages in a lane (a topic of half messages) have not ended. One thread at a time reads it."""

    def __init__(self, consumers: Consumers, topic: str, outcomes: OrderedDict[str, Outcome]) -> None:
        self.undone: dict[str, UndoneHalf] = {}
        self.refused: dict[str, Refusal] = {}  # halves that are committed and cannot be published now
        self.outcomes = outcomes  # of halves of the group, in all of its lanes, that this process knows
        self.patience = 0.0  # the time within which the holder has promised the next record
        self.nonces: set[str] = set()  # of beats that were read
        self._awaited = ""  # the nonce of the beat up to which a call reads
        self.position: Position = ()  # behind the last record that was read
        self.read = 0  # the number of records that were read
        self.lock = threading.Lock()
        self._consumers = consumers
        self._partition = topic, 0
        self._consumer: RawConsumer | None = None
        self._elsewhere = False  # whether the consumer reads bodies, and not at `position`
        self._used_at = 0.0

    def close(self) -> None:
        consumer, self._consumer, self._elsewhere = self._consumer, None, True
        if consumer is not None:
            consumer.close()

    def rest(self) -> None:
        """Close the consumer if it was not used lately: it would fetch all new records of the topic."""
        if self._consumer is not None and time.monotonic() - self._used_at > _REST_SECONDS:
            self.close()

    def add(self, half: Half) -> None:
        """Add a half (a transaction's half messages) that is about to be stored."""
        with self.lock:
            parts = len(half.messages)
            self.undone[half.transaction] = UndoneHalf(half.check_at, half.deadline_at, half.checks, parts)

    def end(self, transaction: str, outcome: Outcome) -> None:
        """Note that a half, the half messages of a transaction, is published or dropped."""
        with self.lock:
            self._end(transaction, outcome)

    def _end(self, transaction: str, outcome: Outcome) -> None:
        self.undone.pop(transaction, None)
        self.refused.pop(transaction, None)
        self.outcomes[transaction] = outcome
        if len(self.outcomes) > _MOST_OUTCOMES:
            self.outcomes.popitem(last=False)

    def park(self, transaction: str, reason: str, refusal: Refusal | None) -> None:
        """Note that check-backs about a transaction have stopped for `reason`; if it is "", they begin again."""
        with self.lock:
            self._park(transaction, reason, refusal)

    def _park(self, transaction: str, reason: str, refusal: Refusal | None) -> None:
        if (each := self.undone.get(transaction)) is None:
            return
        each.parked = reason
        if refusal is not None:
            self.refused[transaction] = refusal
        if not reason:
            each.checks, each.check_at = 0, 0

    def refused_since(self, transaction: str) -> int:
        """Return the time (ms) since which a transaction is refused; if not yet, one after all other refusals."""
        with self.lock:
            if (known := self.refused.get(transaction)) is not None:
                return known.since
            return max([int(time.time() * 1000), *(each.since + 1 for each in self.refused.values())])

    def freed(self) -> list[tuple[str, Refusal]]:
        """Return refused transactions that had to wait behind another one with the same keys, and no longer have to."""
        with self.lock:
            return [
                (id, each._replace(behind=""))
                for id, each in self.refused.items()
                if each.behind and each.behind not in self.undone
            ]

    def waits_for(self, transaction: str, messages: Sequence[HalfMessage]) -> str:
        """Return the last transaction refused before this one that has one of its keys; "" if there is none."""
        with self.lock:
            own = self.refused.get(transaction)
            keys = own.keys if own is not None else places_of(messages)
            keys |= topics_of(messages)
            before = [
                (each.since, id)
                for id, each in self.refused.items()
                if id != transaction and (own is None or each.since < own.since) and each.keys & keys
            ]
        return max(before, default=(0, ""))[1]

    def _note(self, message: Message) -> None:
        match read_record(message):
            case HalfPart() as part:
                self._note_part(part, message.position)
            case HalfDone(transaction, outcome):
                self._end(transaction, outcome)
            case HalfParked(transaction, reason, refusal):
                self._park(transaction, reason, refusal)
            case Beat(nonce, seconds):
                self.patience = seconds
                self.nonces.add(nonce)
                if nonce == self._awaited:
                    self._awaited = ""

    def _note_part(self, part: HalfPart, position: Position) -> None:
        if part.transaction in self.outcomes:
            return
        each = self.undone.get(part.transaction)
        if each is None:
            each = UndoneHalf(part.check_at, part.deadline_at, part.checks, part.of)
            self.undone[part.transaction] = each
        if part.number == 0 or each.first is None:  # a half that was stored again is found at its last copy
            each.first, each.rank = position, self.read
            if part.checks > each.checks:
                each.checks, each.check_at = part.checks, part.check_at
            each.size = 0
        each.size += len(part.message.value or b"")

    def read_until(self, nonce: str, deadline: Deadline) -> None:
        """Read up to the record with this nonce, which the caller has just stored, and all records before it."""
        self._awaited = nonce
        while self._awaited:
            deadline.check(f"reading {self._partition[0]!r}")
            self._read_some(deadline)

    def read_all(self, deadline: Deadline) -> None:
        """Read the topic of half messages up to its present readable end."""
        consumer = self._at_position(deadline)
        while self._read_some(deadline) or any(consumer.lag_within(deadline.left()).values()):
            deadline.check(f"reading {self._partition[0]!r}")

    def _read_some(self, deadline: Deadline) -> int:
        consumer = self._at_position(deadline)
        messages = consumer.take(_POLL_RECORDS, min(_POLL_SECONDS, deadline.left()))
        for message in messages:
            with self.lock:
                self._note(message)
            self.read += 1
        if messages:
            self.position = consumer.positions().get(self._partition, self.position)
        return len(messages)

    def skip_to(self, position: Position) -> None:
        """Read on at a position: the half messages in all records before it are published or dropped."""
        if position > self.position:
            self.position, self._elsewhere = position, True

    def oldest(self) -> tuple[Position, int]:
        """Return the position of the oldest half messages that have not ended, and how many records were read since."""
        with self.lock:
            known = [(each.first, each.rank) for each in self.undone.values() if each.first is not None]
        first, rank = min(known, default=(self.position, self.read))
        return first, self.read - rank

    def bodies(self, transactions: Sequence[str], deadline: Deadline) -> dict[str, list[HalfMessage]]:
        """Return the messages of undecided transactions, by transaction, except those whose records are gone."""
        found: dict[str, dict[int, HalfMessage]] = {}
        places = sorted((e.first, e.rank, e.parts, t) for t in transactions if (e := self.undone.get(t)) and e.first)
        for chunk in _near(places):
            while chunk:
                try:
                    self._read_bodies(chunk[0][0], {t: parts for *_, parts, t in chunk}, found, deadline)
                    break
                except PositionLost:
                    del chunk[0]
        return {
            transaction: [parts[number] for number in sorted(parts)]
            for _, _, of, transaction in places
            if len(parts := found.get(transaction, {})) == of
        }

    def _read_bodies(
        self, start: Position, left: dict[str, int], found: dict[str, dict[int, HalfMessage]], deadline: Deadline
    ) -> None:
        """Read the messages of the transactions in `left`, from a position on, into `found`."""
        consumer, self._elsewhere = self._reader(deadline), True
        consumer.seek({self._partition: start})
        while left:
            deadline.check(f"reading bodies in {self._partition[0]!r}")
            messages = consumer.take(_POLL_RECORDS, min(_POLL_SECONDS, deadline.left()))
            for message in messages:
                if message.position >= self.position:
                    return
                part = read_record(message)
                if isinstance(part, HalfPart) and part.transaction in left:
                    parts = found.setdefault(part.transaction, {})
                    parts[part.number] = part.message
                    if len(parts) == left[part.transaction]:
                        del left[part.transaction]
            if not messages and not any(consumer.lag_within(deadline.left()).values()):
                return

    def _reader(self, deadline: Deadline) -> RawConsumer:
        if self._consumer is None:
            self._consumer = RawConsumer._open(self._consumers, self._partition[0], None, "earliest", deadline=deadline)
        self._used_at = time.monotonic()
        return self._consumer

    def _at_position(self, deadline: Deadline) -> RawConsumer:
        consumer = self._reader(deadline)
        if self._elsewhere and self.position:
            consumer.seek({self._partition: self.position})
            self._elsewhere = False
        return consumer


def _near(places: Sequence[tuple[Position, int, int, str]]) -> Iterator[list[tuple[Position, int, int, str]]]:
    """Divide stored half messages into groups that are read in one go, because few records lie between them.

    A place has the position of a transaction's first record, its number in the partition, how many records the
    transaction has, and its id. Places come in the order of positions.
    """
    chunk: list[tuple[Position, int, int, str]] = []
    for place in places:
        if chunk and place[1] - chunk[-1][1] > _READ_ON_RECORDS:
            yield chunk
            chunk = []
        chunk.append(place)
    if chunk:
        yield chunk
