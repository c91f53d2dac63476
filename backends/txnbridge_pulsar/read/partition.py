"""A reader's state for one partition, and the conversion of the client's entries to messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from txnbridge.errors import Conflict, TxnBridgeError
from txnbridge.spi import NO_HEADERS, Headers, Message, Partition, Position
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.write.message_format import to_headers

# The position before all messages of a topic; no topic has a ledger with this number.
BEGIN: Position = (0, 0, 0)
_COUNTS = 1000  # the most delivery counts that are kept for one partition

_EntryPlace = tuple[int, int]  # ledger and entry
_Bits = dict[_EntryPlace, int]  # batch indexes as bits, by entry


def position_of(id: wire.MessageId) -> Position:
    """Return a message's position: ledger, entry, batch index."""
    return id.ledger, id.entry, max(id.batch_index, 0)


def behind(id: wire.MessageId) -> Position:
    """Return the position after an entry; `BEGIN` for the id that stands for a topic without entries."""
    return BEGIN if id.ledger < 0 else (id.ledger, id.entry + 1, 0)


@dataclass(eq=False)
class AckedMessages:
    """Messages that a transaction acknowledged while the broker may have been redelivering copies of them.

    A message that arrives after the broker's answer is no copy: it is redelivered because the transaction was aborted.
    `until` is the number of entries that had arrived before the answer; None until the answer arrives.
    """

    bits: _Bits
    until: int | None = None


class PulsarPartition:
    """A reader's state for one partition: the received entries, the next position, and the messages that `poll`
    returned.

    In a group, outstanding messages were handed out by `poll`, and neither acknowledged nor given back. Copies of
    outstanding messages are dropped: a broker redelivers all unacknowledged messages whenever any transaction aborts.
    """

    def __init__(self, key: Partition, topic: str, consumer: wire.PulsarConsumer, grouped: bool) -> None:
        self.key = key
        self.topic = topic  # concrete topic
        self.consumer = consumer
        self.source: object = None
        self.paused = False
        self.next: Position = BEGIN
        self.is_assigned = False  # whether the reader's listener has been told so
        self.assignment: object = object()  # a new object for each assignment
        self.generation = consumer.generation  # `generation` and `activations` of the consumer at the assignment
        self.activations = consumer.activations
        # Deadline of the wait for open transactions that hold earlier messages; None without a wait.
        self.waits_until: float | None = None
        self.received: _EntryPlace = (-1, -1)  # the highest entry that arrived
        # Entries whose acknowledgement the broker refused: it redelivers them only on request.
        self.refused: list[wire.MessageId] = []
        self.fault: TxnBridgeError | None = None  # why the next entry cannot be read
        # Set by a seek to a time: the timestamp, and a position before which messages with earlier timestamps are
        # skipped.
        self.since: tuple[int, Position] | None = None
        self._grouped = grouped
        self._waiting: deque[wire.ReceivedEntry] = deque()
        self._rest: deque[Message] = deque()  # messages of an entry that did not fit in the last poll
        self._rest_of: wire.ReceivedEntry | None = None
        self._outstanding: _Bits = {}
        self._acked: list[AckedMessages] = []
        self._sizes: dict[_EntryPlace, int] = {}  # batch sizes of outstanding entries
        # Chunk ids of outstanding messages that came in chunks.
        self._parts: dict[_EntryPlace, tuple[wire.MessageId, ...]] = {}
        self._skipped: list[tuple[Position, Position]] = []  # ranges that seeks have skipped
        self._handed: _EntryPlace = (-1, -1)
        self._times: dict[Position, int] = {}

    # --- assignments ----------------------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """Return whether the assignment has ended, and the reader's listener has not been told yet."""
        consumer = self.consumer
        return consumer.lost is not None or consumer.generation != self.generation or consumer.active is False

    def arrive(self, source: object, first: Position) -> None:
        """Start a new assignment of this partition."""
        self.source, self.next = source, first
        self.assignment = object()
        self.is_assigned = True

    def leave(self) -> None:
        """End the assignment: messages delivered under it can no longer be acknowledged."""
        self.is_assigned = False
        self.drop()
        self._outstanding.clear()
        self._acked.clear()
        self._sizes.clear()
        self._parts.clear()
        self.refused.clear()
        self._skipped.clear()
        self._times.clear()
        self._handed = (-1, -1)

    def drop(self) -> None:
        """Drop the received entries that were not handed out; the broker redelivers them."""
        self._waiting.clear()
        self._rest.clear()
        self._rest_of = None
        self.fault = None

    def put(self, entry: wire.ReceivedEntry) -> None:
        """Add a received entry."""
        self._waiting.append(entry)
        self.received = max(self.received, (entry.id.ledger, entry.id.entry))

    # --- handing out ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return bool(self._rest or self._waiting) and not self.paused and self.fault is None and self.is_assigned

    @property
    def waiting(self) -> int:
        """Return about how many received messages were not handed out."""
        return len(self._rest) + sum(entry.permits for entry in self._waiting)

    def take(self, limit: int) -> tuple[list[Message], int]:
        """Return up to `limit` messages of the next entry, perhaps none, and their size in bytes, about.

        An error in reading the entry is kept in `fault`, not raised.
        """
        if not self._rest:
            entry = self._waiting.popleft()
            if self._is_passed_over(entry):
                return [], 0
            try:
                self._rest.extend(self._read(entry))
            except wire.PulsarError as error:
                # The entry stays the next one: only a seek skips it.
                self._waiting.appendleft(entry)
                topic, number = self.key
                self.fault = translate(error, f"reading {topic}[{number}] at {position_of(entry.id)}")
                self.fault.__cause__ = error
                return [], 0
            self._rest_of = entry
        if len(self._rest) <= limit:
            messages = list(self._rest)
            self._rest.clear()
        else:
            messages = [self._rest.popleft() for _ in range(limit)]
        if not messages or self._rest_of is None:
            return [], 0
        self._hand_out(self._rest_of, messages)
        size = max(self._rest_of.size, self._rest_of.metadata.get("uncompressed_size", 0))
        return messages, size * len(messages) // self._rest_of.count

    def _read(self, entry: wire.ReceivedEntry) -> list[Message]:
        messages = self._convert(entry)
        if self._grouped:
            messages = self._without_copies(entry, messages)
        elif messages and messages[0].position < self.next:
            messages = [message for message in messages if message.position >= self.next]
        if self.since is not None and messages:
            messages = self._skip_until_time(self.since, messages)
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
                    Headers(to_headers(properties)) if (properties := raw.properties) else none,
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
        # Brokers count no deliveries on subscriptions that keep the order.
        count = self._times[place] = self._times.get(place, 1) + 1
        if len(self._times) > _COUNTS:
            for old in sorted(self._times)[: _COUNTS // 2]:  # given back longest ago, or acknowledged by now
                del self._times[old]
        return max(count, 1 + entry.redeliveries)

    def _without_copies(self, entry: wire.ReceivedEntry, messages: list[Message]) -> list[Message]:
        place = (entry.id.ledger, entry.id.entry)
        held = self._outstanding.get(place, 0)
        for acked in self._acked[:]:
            if acked.until is None or entry.arrival <= acked.until:
                held |= acked.bits.get(place, 0)
            else:
                self._acked.remove(acked)  # all copies that were sent before the answer have arrived
        if held:
            messages = [message for message in messages if not held >> message.position[2] & 1]
        for first, end in self._skipped:
            messages = [message for message in messages if not first <= message.position < end]
        return messages

    def _skip_until_time(self, since: tuple[int, Position], messages: list[Message]) -> list[Message]:
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
        self._outstanding[place] = self._outstanding.get(place, 0) | bits
        if entry.is_batch:
            self._sizes[place] = entry.count
        if entry.parts:
            self._parts[place] = entry.parts

    # --- acknowledging and giving back ------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Return how many messages were handed out and are neither acknowledged nor given back."""
        return sum(bits.bit_count() for bits in self._outstanding.values())

    def check_outstanding(self, positions: Sequence[Position]) -> None:
        """Raise `Conflict` if a message was not handed out under this assignment, or was given back since."""
        for ledger, entry, index in positions:
            if not self._outstanding.get((ledger, entry), 0) >> index & 1:
                topic, number = self.key
                raise Conflict(
                    f"the message at {topic}[{number}] {(ledger, entry, index)} is not with this reader any more; it"
                    " comes again"
                )

    def give_back(self, positions: Sequence[Position]) -> Sequence[Position]:
        """Mark messages as no longer outstanding. Return the positions of those that were outstanding."""
        held = [(a, b, index) for a, b, index in positions if self._outstanding.get((a, b), 0) >> index & 1]
        self.let_go(held)
        return held

    def give_up(self, places: Iterable[_EntryPlace], delivered_again: bool) -> list[wire.MessageId]:
        """Forget all messages of these entries, handed out or not. Return the ids of entries that had such messages.

        With `delivered_again` the broker is about to redeliver the entries, so copies from earlier deliveries are
        dropped.
        """
        given_up: list[wire.MessageId] = []
        for place in set(places):
            size = self._sizes.pop(place, 1)
            had = self._outstanding.pop(place, 0)
            if self._rest and self._rest_of is not None and place == (self._rest_of.id.ledger, self._rest_of.id.entry):
                had = 1
                self._rest.clear()
            parts = self._parts.pop(place, ())  # a message in chunks is redelivered only with all its chunks
            if had:
                given_up += parts or (wire.MessageId(*place),)
            if had and delivered_again:
                self._acked.append(AckedMessages({place: (1 << size) - 1}, self.consumer.arrived))
        return given_up

    def let_go(self, positions: Sequence[Position]) -> list[wire.MessageId]:
        """Mark outstanding messages, each given once, as no longer outstanding. Return their message ids."""
        return [id for place, indexes in self._by_entry(positions) for id in self._release(place, indexes)]

    def acknowledge(self, positions: Sequence[Position]) -> tuple[list[wire.MessageId], AckedMessages]:
        """Mark messages as acknowledged in a transaction. Return their message ids, and a record of them."""
        places = {(ledger, entry) for ledger, entry, _ in positions}
        before = {place: self._outstanding[place] for place in places}
        ids = self.let_go(positions)
        acked = AckedMessages({place: bits & ~self._outstanding.get(place, 0) for place, bits in before.items()})
        self._acked.append(acked)
        return ids, acked

    def acknowledged(self, acked: AckedMessages) -> None:
        """Note that the broker has confirmed these acknowledgements as pending acks of their transaction."""
        acked.until = self.consumer.arrived
        if not self._waiting and self.consumer.all_taken:
            self._forget(acked)

    def not_acknowledged(self, acked: AckedMessages, ids: Sequence[wire.MessageId]) -> None:
        """Note that the broker refused these acknowledgements, or that the result is not known."""
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
            # Most batches are acknowledged whole, which the batch's last index shows.
            if index == 0 and ordered[at + size - 1 : at + size] == [(ledger, entry, size - 1)]:
                yield (ledger, entry), range(size)
                at += size
            else:
                yield (ledger, entry), (index,)
                at += 1

    def _release(self, place: _EntryPlace, indexes: Sequence[int]) -> Sequence[wire.MessageId]:
        size = self._sizes.get(place, 0)
        left = self._outstanding[place] & ~sum(1 << index for index in indexes) if len(indexes) < max(size, 1) else 0
        if left:
            self._outstanding[place] = left
        else:
            del self._outstanding[place]
            self._sizes.pop(place, None)
        if not size:
            return self._parts.pop(place, None) or (wire.MessageId(*place),)
        if len(indexes) == size:
            return (wire.MessageId(*place, -1, -1, size),)
        return [wire.MessageId(*place, -1, index, size) for index in indexes]

    def go_to(self, position: Position) -> None:
        """Continue at a position. Messages from the position on are delivered again; messages before it are skipped."""
        self.drop()
        self.since = None
        if self._grouped:
            floor = position[0], position[1]
            for place in [place for place in self._outstanding if place >= floor]:
                self._outstanding[place] &= (1 << position[2]) - 1 if place == floor else 0
                if not self._outstanding[place]:
                    del self._outstanding[place]
            self._skipped = [(first, min(end, position)) for first, end in self._skipped if first < position]
            if position > self.next:
                self._skipped.append((self.next, position))
        self.next = position
