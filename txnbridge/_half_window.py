"""`PartitionWindow`: the halves that a resolver has read from one partition of a half topic and not acknowledged yet.

A group acknowledges by position on some brokers, so everything up to an acknowledged position must be handled: it is
published, dropped, or stored again elsewhere. The records of two halves may be interleaved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from txnbridge._connection import random_name
from txnbridge._half_records import Barrier, HalfPart, Handled, Resume, StoredHalf, read_record
from txnbridge._messages import NO_HEADERS, Message, Position

if TYPE_CHECKING:
    from txnbridge._decisions import Claim


# The largest number of halves in a window and of bytes in their messages: a second of work for a resolver.
_MOST_HALVES, _MOST_BYTES = 10_000, 32_000_000


@dataclass(frozen=True)
class Scanned:
    """The result of a resolver's reading of a partition up to its barrier: the position up to which it is handled."""

    up_to: Position


@dataclass(eq=False)
class WaitingHalf:
    """A complete copy of a half in a window. Times are those of `time.monotonic`."""

    half: StoredHalf
    first: Position
    last: Position
    read_at: float
    claim: Claim | None = None
    settled_at: float = 0.0  # the time at which this resolver learned the decision, or the problem
    problem: str = ""  # why it has to be parked; empty if it need not be parked

    @property
    def is_published(self) -> bool:
        """True if the decision publishes this copy of the half."""
        return self.claim is not None and self.claim.data.get("copy") == self.half.copy

    @property
    def is_settled(self) -> bool:
        """True if this copy need not wait in the window any more."""
        return self.claim is not None or bool(self.problem)


@dataclass
class _Incomplete:
    first: Position
    half: StoredHalf
    numbers: set[int] = field(default_factory=set)


class PartitionWindow:
    """Collects the records of one partition in one assignment. Only one thread at a time may use it.

    Its halves may be handled once it is `ready`: it has read the barrier that this resolver appended, so it has read
    everything that an earlier resolver stored or acknowledged.
    """

    def __init__(self, number: int, source: object, scanned: Scanned | None) -> None:
        """Begin a window in an assignment; it is ready if this resolver has scanned the partition in it before."""
        self.number = number
        self.source = source
        self.ready = scanned is not None
        self.barrier = random_name(8)
        self.barrier_is_stored = self.ready
        self.overflowed = False  # whether halves were dropped from memory, and have to be read again
        self.handled = () if scanned is None else scanned.up_to
        self.waiting: list[WaitingHalf] = []  # in the order of their last records
        self.bytes = 0
        self.expected: set[str] = set()  # copies that this resolver has appended here and not read yet
        self._records: list[Message] = []  # all records of the window, without their contents
        self._incomplete: dict[str, _Incomplete] = {}
        self._resumed: set[str] = set()  # transactions whose check-backs an administrator has started again

    def __len__(self) -> int:
        return len(self._records)

    def add(self, message: Message, now: float) -> None:
        record = read_record(message)
        if self.overflowed and isinstance(record, HalfPart):
            return
        self._records.append(message._replace(key=None, value=None, headers=NO_HEADERS))
        match record:
            case HalfPart():
                self._add_part(record, message.position, now)
            case Barrier(nonce):
                self.ready |= nonce == self.barrier
            case Handled(up_to):
                self.handled = max(self.handled, up_to)
                # The group's positions were lost or set back, so these halves are read again.
                self._drop([each for each in self.waiting if each.first <= self.handled])
            case Resume(transaction):
                self._resumed.add(transaction)
        if not self.ready and self.is_full:
            self._overflow()

    def _add_part(self, part: HalfPart, position: Position, now: float) -> None:
        copy = part.half.copy
        found = self._incomplete.setdefault(copy, _Incomplete(position, replace(part.half, messages=[])))
        if part.number in found.numbers:
            return
        found.numbers.add(part.number)
        found.half = replace(found.half, messages=[*found.half.messages, *part.half.messages])
        if len(found.numbers) < part.of:
            return
        del self._incomplete[copy]
        self.expected.discard(copy)
        if found.first > self.handled:
            self.waiting.append(WaitingHalf(found.half, found.first, position, now))
            self.bytes += found.half.bytes

    def _overflow(self) -> None:
        """Drop the halves from memory, and only look for the barrier from now on: the partition is read twice then."""
        self.overflowed = True
        self.waiting, self._incomplete, self._records, self.bytes = [], {}, [], 0

    @property
    def is_full(self) -> bool:
        return len(self.waiting) > _MOST_HALVES or self.bytes > _MOST_BYTES

    @property
    def scanned(self) -> Scanned:
        return Scanned(self.handled)

    def is_resumed(self, each: WaitingHalf) -> bool:
        """Return whether an administrator has asked to start the check-backs of a parked half again."""
        return each.half.transaction in self._resumed

    # --- handling ---------------------------------------------------------------------------------------------------

    def closed(self, chosen: Collection[WaitingHalf]) -> list[WaitingHalf]:
        """Return the halves that must be handled together with the chosen ones; an empty list if that is not possible.

        No other half may have a record in front of the last record of a chosen one.
        """
        handled = set(chosen)
        while handled:
            last = max(each.last for each in handled)
            if any(each.first < last for each in self._incomplete.values()):
                return []
            more = {each for each in self.waiting if each.first < last} - handled
            if not more:
                break
            handled |= more
        return [each for each in self.waiting if each in handled]

    def last_record(self, handled: Collection[WaitingHalf]) -> Message:
        """Return the record up to which the partition can be acknowledged once these halves are handled."""
        others = [each.first for each in self.waiting if each not in handled]
        others += [each.first for each in self._incomplete.values()]
        end = bisect_left(self._records, min(others), key=_position_of) if others else len(self._records)
        return self._records[end - 1]

    def acknowledged(self, handled: Collection[WaitingHalf], last: Message) -> None:
        """Forget halves that were handled, and all records up to `last`."""
        self._drop(handled)
        self._resumed.difference_update(each.half.transaction for each in handled)
        del self._records[: bisect_left(self._records, last.position, key=_position_of) + 1]

    def _drop(self, gone: Collection[WaitingHalf]) -> None:
        away = set(gone)
        self.bytes -= sum(each.half.bytes for each in away)
        self.waiting = [each for each in self.waiting if each not in away]

    def undecided(self) -> Iterator[WaitingHalf]:
        return (each for each in self.waiting if not each.is_settled)


def _position_of(message: Message) -> Position:
    return message.position
