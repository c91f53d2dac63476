"""One partition as one reader sees it, and the wire client's entries as our messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from txnbridge.errors import Conflict, TxnBridgeError
from txnbridge.spi import NO_HEADERS, Headers, Message, Partition, Position
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.write.message_format import to_headers

# Where a topic begins whose first message nobody knows; ledgers of the first number are the brokers' own.
BEGIN: Position = (0, 0, 0)
_COUNTS = 1000  # counts of deliveries that are kept without asking whether they are still needed

_EntryPlace = tuple[int, int]  # ledger and entry
_Bits = dict[_EntryPlace, int]  # places in batches, as bits


def position_of(id: wire.MessageId) -> Position:
    """A message's position: ledger, entry, place in the batch."""
    return id.ledger, id.entry, max(id.batch_index, 0)


def behind(id: wire.MessageId) -> Position:
    """The position of what comes behind an entry; below every position there if the topic has none yet."""
    return BEGIN if id.ledger < 0 else (id.ledger, id.entry + 1, 0)


@dataclass(eq=False)
class AckedMessages:
    """Messages that were acknowledged in a transaction while copies of them may have been under way.

    What comes behind the broker's answer is no such copy: the transaction was aborted. `until` is how many entries had
    come by then; None as long as there is no answer.
    """

    bits: _Bits
    until: int | None = None


class PulsarPartition:
    """One partition with a reader: what has come and waits, where it goes on, and what was handed out.

    In a group `hand` knows what was handed out and neither acknowledged nor given back. By it copies are told: brokers
    deliver everything anew that is not acknowledged whenever some transaction aborts.
    """

    def __init__(self, key: Partition, topic: str, consumer: wire.PulsarConsumer, grouped: bool) -> None:
        self.key = key
        self.topic = topic  # the concrete one
        self.consumer = consumer
        self.source: object = None
        self.paused = False
        self.next: Position = BEGIN
        self.is_here = False  # with this reader, as its listener knows
        self.assignment: object = object()  # each time it comes another one
        self.generation = consumer.generation  # of the consumer, and its activations, that this stay belongs to
        self.activations = consumer.activations
        # Until when it waits for open transactions that hold messages in front; None if it does not.
        self.waits_until: float | None = None
        self.received: _EntryPlace = (-1, -1)  # the last entry that came
        self.refused: list[wire.MessageId] = []  # the broker took no acknowledgement, so only we can have them again
        self.fault: TxnBridgeError | None = None  # what comes next cannot be read
        # A point in time and an end: up to the end nothing is handed out until something was stamped since then.
        self.since: tuple[int, Position] | None = None
        self._grouped = grouped
        self._waiting: deque[wire.ReceivedEntry] = deque()
        self._rest: deque[Message] = deque()  # of an entry, what did not fit in the last poll
        self._rest_of: wire.ReceivedEntry | None = None
        self._hand: _Bits = {}
        self._acked: list[AckedMessages] = []
        self._sizes: dict[_EntryPlace, int] = {}  # of the batches in hand
        self._parts: dict[_EntryPlace, tuple[wire.MessageId, ...]] = {}  # of the messages in hand that came in chunks
        self._skipped: list[tuple[Position, Position]] = []  # what a seek has gone over
        self._handed: _EntryPlace = (-1, -1)
        self._times: dict[Position, int] = {}

    # --- coming and going -------------------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """Whether its consumer has been told already what the reader's listener has not."""
        consumer = self.consumer
        return consumer.lost is not None or consumer.generation != self.generation or consumer.active is False

    def arrive(self, source: object, first: Position) -> None:
        """A stay begins."""
        self.source, self.next = source, first
        self.assignment = object()
        self.is_here = True

    def leave(self) -> None:
        """The stay has ended: nothing that was delivered in it counts any more."""
        self.is_here = False
        self.drop()
        self._hand.clear()
        self._acked.clear()
        self._sizes.clear()
        self._parts.clear()
        self.refused.clear()
        self._skipped.clear()
        self._times.clear()
        self._handed = (-1, -1)

    def drop(self) -> None:
        """Forget what waits: it comes anew."""
        self._waiting.clear()
        self._rest.clear()
        self._rest_of = None
        self.fault = None

    def put(self, entry: wire.ReceivedEntry) -> None:
        """An entry has come."""
        self._waiting.append(entry)
        self.received = max(self.received, (entry.id.ledger, entry.id.entry))

    # --- handing out ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return bool(self._rest or self._waiting) and not self.paused and self.fault is None and self.is_here

    @property
    def waiting(self) -> int:
        """How many messages wait, about."""
        return len(self._rest) + sum(entry.permits for entry in self._waiting)

    def take(self, limit: int) -> tuple[list[Message], int]:
        """Up to so many messages of the next entry, and about how many bytes they are; none if it holds nothing new.

        Notes a fault instead of raising it.
        """
        if not self._rest:
            entry = self._waiting.popleft()
            if self._is_passed_over(entry):
                return [], 0
            try:
                self._rest.extend(self._read(entry))
            except wire.PulsarError as error:
                # It stays where it is: to go on behind it takes a seek.
                self._waiting.appendleft(entry)
                topic, number = self.key
                self.fault = translate(error, f"reading {topic}[{number}] at {position_of(entry.id)}")
                self.fault.__cause__ = error
                return [], 0
            self._rest_of = entry
        if len(self._rest) <= limit:
            found = list(self._rest)
            self._rest.clear()
        else:
            found = [self._rest.popleft() for _ in range(limit)]
        if not found or self._rest_of is None:
            return [], 0
        self._hand_out(self._rest_of, found)
        size = max(self._rest_of.size, self._rest_of.metadata.get("uncompressed_size", 0))
        return found, size * len(found) // self._rest_of.count

    def _read(self, entry: wire.ReceivedEntry) -> list[Message]:
        messages = self._convert(entry)
        if self._grouped:
            messages = self._without_copies(entry, messages)
        elif messages and messages[0].position < self.next:
            messages = [message for message in messages if message.position >= self.next]
        if self.since is not None and messages:
            messages = self._reach(self.since, messages)
        return messages

    def _is_passed_over(self, entry: wire.ReceivedEntry) -> bool:
        first, end = (entry.id.ledger, entry.id.entry, 0), behind(entry.id)
        if not self._grouped:
            return end <= self.next
        return any(since <= first and end <= until for since, until in self._skipped)

    def _convert(self, entry: wire.ReceivedEntry) -> list[Message]:
        topic, number = self.key
        ledger, at = entry.id.ledger, entry.id.entry
        source, published, none, new = self.source, entry.publish_time, NO_HEADERS, tuple.__new__
        count = self._deliveries(entry)
        # This runs for every message, and tuple.__new__ is much faster than Message(...).
        return [
            new(Message, (topic, number, (ledger, at, index), None, payload, none, published, count, source))
            if not described
            else new(
                Message,
                (
                    topic,
                    number,
                    (ledger, at, index if index > 0 else 0),
                    (raw := wire.ReceivedMessage(entry, index, payload, described)).key,
                    raw.value,
                    Headers(to_headers(found)) if (found := raw.properties) else none,
                    raw.event_time or published,
                    count,
                    source,
                ),
            )
            for index, payload, described in entry.records()
        ]

    def _deliveries(self, entry: wire.ReceivedEntry) -> int:
        place = (entry.id.ledger, entry.id.entry)
        if place > self._handed:
            return 1 + entry.redeliveries
        # On subscriptions that keep an order the broker does not count.
        count = self._times[place] = self._times.get(place, 1) + 1
        if len(self._times) > _COUNTS:
            for old in sorted(self._times)[: _COUNTS // 2]:  # given back longest ago, or acknowledged by now
                del self._times[old]
        return max(count, 1 + entry.redeliveries)

    def _without_copies(self, entry: wire.ReceivedEntry, messages: list[Message]) -> list[Message]:
        place = (entry.id.ledger, entry.id.entry)
        held = self._hand.get(place, 0)
        for acked in self._acked[:]:
            if acked.until is None or entry.arrival <= acked.until:
                held |= acked.bits.get(place, 0)
            else:
                self._acked.remove(acked)  # whatever was under way then has come
        if held:
            messages = [message for message in messages if not held >> message.position[2] & 1]
        for first, end in self._skipped:
            messages = [message for message in messages if not first <= message.position < end]
        return messages

    def _reach(self, since: tuple[int, Position], messages: list[Message]) -> list[Message]:
        time, end = since
        for at, message in enumerate(messages):
            if message.timestamp >= time or message.position >= end:
                self.since = None
                return messages[at:]
        return []

    def _hand_out(self, entry: wire.ReceivedEntry, messages: list[Message]) -> None:
        place = (entry.id.ledger, entry.id.entry)
        self._handed = max(self._handed, place)
        last = messages[-1].position
        is_last = not entry.is_batch or last[2] == entry.count - 1
        self.next = max(self.next, behind(entry.id) if is_last else (*place, last[2] + 1))
        if not self._grouped:
            return
        bits = 0
        first = messages[0].position[2]
        if last[2] - first + 1 == len(messages):
            bits = (1 << last[2] + 1) - (1 << first)
        else:
            for message in messages:
                bits |= 1 << message.position[2]
        self._hand[place] = self._hand.get(place, 0) | bits
        if entry.is_batch:
            self._sizes[place] = entry.count
        if entry.parts:
            self._parts[place] = entry.parts

    # --- taking back ------------------------------------------------------------------------------------------------

    @property
    def in_hand(self) -> int:
        """How many messages were handed out and are neither acknowledged nor given back."""
        return sum(bits.bit_count() for bits in self._hand.values())

    def check_in_hand(self, positions: Sequence[Position]) -> None:
        """Raises `Conflict` for a position that was not handed out in this stay, or has been given back since."""
        for ledger, entry, index in positions:
            if not self._hand.get((ledger, entry), 0) >> index & 1:
                topic, number = self.key
                raise Conflict(
                    f"the message at {topic}[{number}] {(ledger, entry, index)} is not with this reader any more; it"
                    " comes again"
                )

    def give_back(self, positions: Sequence[Position]) -> Sequence[Position]:
        """Forget that positions are in hand; those that were."""
        held = [(a, b, index) for a, b, index in positions if self._hand.get((a, b), 0) >> index & 1]
        self.let_go(held)
        return held

    def give_up(self, places: Iterable[_EntryPlace], delivered_again: bool) -> list[wire.MessageId]:
        """Forget all messages of these entries, handed out or waiting. Return the ids of the entries that had any.

        `delivered_again`: the broker is about to deliver the entries once more, so older deliveries that are still on
        their way do not count.
        """
        given_up: list[wire.MessageId] = []
        for place in set(places):
            size = self._sizes.pop(place, 1)
            had = self._hand.pop(place, 0)
            if self._rest and self._rest_of is not None and place == (self._rest_of.id.ledger, self._rest_of.id.entry):
                had = 1
                self._rest.clear()
            parts = self._parts.pop(place, ())  # a message in chunks comes again if all its chunks do
            if had:
                given_up += parts or (wire.MessageId(*place),)
            if had and delivered_again:
                self._acked.append(AckedMessages({place: (1 << size) - 1}, self.consumer.arrived))
        return given_up

    def let_go(self, positions: Sequence[Position]) -> list[wire.MessageId]:
        """Forget that positions, each there once, are in hand; what the broker calls them."""
        return [id for place, indexes in self._by_entry(positions) for id in self._release(place, indexes)]

    def acknowledge(self, positions: Sequence[Position]) -> tuple[list[wire.MessageId], AckedMessages]:
        """Let go of positions to acknowledge them; also returns what to tell of how that went."""
        places = {(ledger, entry) for ledger, entry, _ in positions}
        before = {place: self._hand[place] for place in places}
        ids = self.let_go(positions)
        acked = AckedMessages({place: bits & ~self._hand.get(place, 0) for place, bits in before.items()})
        self._acked.append(acked)
        return ids, acked

    def acknowledged(self, acked: AckedMessages) -> None:
        """The broker holds them for their transaction."""
        acked.until = self.consumer.arrived
        if not self._waiting and self.consumer.all_taken:
            self._forget(acked)

    def not_acknowledged(self, acked: AckedMessages, ids: Sequence[wire.MessageId]) -> None:
        """It does not, or nobody knows."""
        self.refused += ids
        self._forget(acked)

    def _forget(self, acked: AckedMessages) -> None:
        if acked in self._acked:
            self._acked.remove(acked)

    def _by_entry(self, positions: Sequence[Position]) -> Iterator[tuple[_EntryPlace, Sequence[int]]]:
        ordered = sorted(positions)
        at = 0
        while at < len(ordered):
            ledger, entry, index = ordered[at]
            size = self._sizes.get((ledger, entry), 1)
            # Most batches are acknowledged as they came: all of them, which the last one shows.
            if index == 0 and ordered[at + size - 1 : at + size] == [(ledger, entry, size - 1)]:
                yield (ledger, entry), range(size)
                at += size
            else:
                yield (ledger, entry), (index,)
                at += 1

    def _release(self, place: _EntryPlace, indexes: Sequence[int]) -> Sequence[wire.MessageId]:
        size = self._sizes.get(place, 0)
        left = self._hand[place] & ~sum(1 << index for index in indexes) if len(indexes) < max(size, 1) else 0
        if left:
            self._hand[place] = left
        else:
            del self._hand[place]
            self._sizes.pop(place, None)
        if not size:
            return self._parts.pop(place, None) or (wire.MessageId(*place),)
        if len(indexes) == size:
            return (wire.MessageId(*place, -1, -1, size),)
        return [wire.MessageId(*place, -1, index, size) for index in indexes]

    def go_to(self, position: Position) -> None:
        """Everything from a position on comes again; what lies between the place so far and one further on does not."""
        self.drop()
        self.since = None
        if self._grouped:
            floor = position[0], position[1]
            for place in [place for place in self._hand if place >= floor]:
                self._hand[place] &= (1 << position[2]) - 1 if place == floor else 0
                if not self._hand[place]:
                    del self._hand[place]
            self._skipped = [(first, min(end, position)) for first, end in self._skipped if first < position]
            if position > self.next:
                self._skipped.append((self.next, position))
        self.next = position
