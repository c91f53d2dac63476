"""A reader's state for one partition, and the conversion of received entries to messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from txnbridge.errors import Conflict, TxnBridgeError
from txnbridge.spi import NO_HEADERS, Headers, Message, Partition, Position
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.write.message_format import to_headers

# The position before all messages of a topic: no ledger has the number 0.
BEGIN: Position = (0, 0, 0)

_EntryId = tuple[int, int]  # ledger and entry
_Bits = dict[_EntryId, int]  # batch indexes as bits, by entry


def position_of(id: wire.MessageId) -> Position:
    """Return a message's position: ledger, entry and batch index; of a message in chunks, those of its last chunk."""
    return id.ledger, id.entry, max(id.batch_index, 0)


def position_after(id: wire.MessageId) -> Position:
    """Return the position after an entry; `BEGIN` for the last id of a topic without entries, which names no ledger."""
    return BEGIN if id.ledger < 0 else (id.ledger, id.entry + 1, 0)


@dataclass(eq=False)
class AckedMessages:
    """The messages that one call has acknowledged in a transaction, kept to recognise their redeliveries.

    Such a message that arrives again before the broker's answer to the acknowledgement is dropped. If it arrives after
    the answer, `poll` returns it, because the transaction was aborted. `until` is how many entries had arrived when the
    answer came; None before the answer.
    """

    bits: _Bits
    until: int | None = None


# A redelivery that leaves out an entry is repeated so often. If the entry still does not come, another member has
# acknowledged it, or retention has removed it.
_MAX_REPEATED_REDELIVERIES = 5

# Entries whose committed parts are kept, besides the outstanding entries. Another transaction may acknowledge the rest.
_MAX_COMMITTED_IN_PART = 1000

# A broker stops at 50,000 messages of one consumer that it counts as unacknowledged, by default.
MAX_OVERCOUNT = 10_000

# Seconds without an entry, growing, after which the broker of a shared group is asked to go on.
_SILENCE_SECONDS, _LONGEST_SILENCE_SECONDS = 5.0, 60.0


def query_pause(vain: int) -> float:
    """Return the seconds until the broker is asked whether all of an entry is committed, as it mostly is by then."""
    return 3.0 * (1 << min(vain, 4))


class PulsarPartition:
    """A reader's state for one partition: the received entries, the next position, and the outstanding messages.

    In a group, messages are outstanding after `poll` has returned them, until they are acknowledged or given back by
    `nack`. Repeated deliveries of outstanding messages are dropped: whenever any transaction aborts, a broker
    redelivers all unacknowledged messages.

    In a shared group, an entry that was never delivered before is with this reader alone, and may be acknowledged
    whole. Any other entry may also be with other members, as may be the rest of an entry of which a part was
    acknowledged. Their messages are acknowledged one by one, and an index that stays unacknowledged keeps the broker
    comparing these acknowledgements (hazard H140). Once this reader has committed all of the entry, or the broker has
    shown that others have committed the rest, the entry is acknowledged whole.
    """

    def __init__(
        self, key: Partition, topic: str, consumer: wire.PulsarConsumer, grouped: bool, max_delivery_counts: int
    ) -> None:
        self.key = key
        self.topic = topic  # concrete topic
        self.consumer = consumer
        self.source: object = None
        self.paused = False
        self.next: Position = BEGIN
        self.is_assigned = False  # whether the reader's listener was called for the present assignment
        self.assignment: object = object()  # a new object for each assignment
        self.generation = consumer.generation  # `generation` and `activations` of the consumer at the assignment
        self.activations = consumer.activations
        # Deadline of the wait for open transactions that hold earlier messages; None without a wait.
        self.waits_until: float | None = None
        self.received: _EntryId = (-1, -1)  # the highest entry that arrived
        # Entries whose acknowledgement the broker refused: it redelivers them only on request. In a key-shared group
        # also entries that an aborted transaction acknowledged in part: else the broker takes them for this member's.
        self.refused: list[wire.MessageId] = []
        self.overcount = 0  # messages that the broker may count twice as unacknowledged (hazard H161)
        self.fault: TxnBridgeError | None = None  # why the next entry cannot be read
        # Set by a seek to a time: messages with earlier timestamps are skipped, at most up to this position.
        self.since: tuple[int, Position] | None = None
        self._grouped = grouped
        self._waiting: deque[wire.ReceivedEntry] = deque()
        self._rest: deque[Message] = deque()  # messages of an entry that did not fit in the last poll
        self._rest_of: wire.ReceivedEntry | None = None
        self._outstanding: _Bits = {}
        self._acked: list[AckedMessages] = []
        self._committed: _Bits = {}  # parts of entries that this reader's committed transactions have acknowledged
        # Entries that other members may have, too, and the messages that their newest delivery here left out.
        self._left_out: _Bits = {}
        # Entries whose messages are all acknowledged or pending, as size, indexes of which it is not known whether
        # their transactions are committed, how often the entry was redelivered or the broker asked in vain, and when to
        # ask it again (see `finish_entries`).
        self.unfinished: dict[_EntryId, tuple[int, int, int, float]] = {}
        self._sizes: dict[_EntryId, int] = {}  # batch sizes of outstanding entries
        # Chunk ids of outstanding messages that came in chunks.
        self._parts: dict[_EntryId, tuple[wire.MessageId, ...]] = {}
        self._skipped: list[tuple[Position, Position]] = []  # ranges that seeks have skipped
        self._handed: _EntryId = (-1, -1)
        self._arrived: _EntryId = (-1, -1)  # the entry that arrived last
        # Entries that have to arrive again before any later ones (hazard H94), in order.
        self._expected: deque[_EntryId] = deque()
        self._repeated_redeliveries = 0
        # The progress that a check has found while the partition was idle and the group had not read all, and whether
        # the check before had found the same: then the broker has skipped messages.
        self._unread: tuple[int, wire.MessageId | None, int] | None = None
        self.is_behind = False
        self.mark_delete: wire.MessageId | None = None  # the mark-delete position at the last check
        self._count = 0  # of entries put here
        self._heard = (0, 0)  # the consumer's generation and `_count` at the last entry
        # Seconds until a partition is silent, the time, and how many entries, with chunks of messages, had come before.
        self._silence, self._silent_at, self._seen = 0.0, 0.0, 0
        self._delivery_counts: dict[Position, int] = {}
        self._max_delivery_counts = max_delivery_counts

    # --- assignments ----------------------------------------------------------------------------------------------

    @property
    def is_leaving(self) -> bool:
        """Return whether the broker has ended the assignment, although the reader's listener has not been told yet."""
        consumer = self.consumer
        return consumer.lost is not None or consumer.generation != self.generation or consumer.active is False

    def arrive(self, source: object, first: Position) -> None:
        """Start a new assignment of this partition to the reader, at the position `first`."""
        self.source, self.next = source, first
        self.assignment = object()
        for known in (self._committed, self._left_out, self.unfinished):
            known.clear()  # the subscription may have been reset
        self.is_assigned = True

    def leave(self) -> None:
        """End the assignment. Messages that were delivered in this assignment can no longer be acknowledged."""
        self.is_assigned = False
        self.drop()
        self.since, self.overcount = None, 0
        for known in (self._outstanding, self._sizes, self._parts, self._delivery_counts):
            known.clear()
        self._acked.clear()
        self.refused.clear()
        self._skipped.clear()
        self._handed = self._arrived = (-1, -1)
        self._expected.clear()

    def drop(self) -> None:
        """Drop the received messages that `poll` has not returned. The broker has to redeliver them."""
        self._waiting.clear()
        self._rest.clear()
        self._rest_of = None
        self.fault = None

    def put(self, entry: wire.ReceivedEntry) -> None:
        if entry.comes_again:
            return
        self._waiting.append(entry)
        self._count += 1
        self.received = max(self.received, (entry.id.ledger, entry.id.entry))

    def is_silent(self) -> bool:
        """Return whether nothing has come for some seconds; then not before twice as many have passed again."""
        now, heard, arrived = time.monotonic(), (self.consumer.generation, self._count), self.consumer.arrived
        is_same = heard == self._heard
        if is_same and now < self._silent_at:
            return False
        is_silent = is_same and arrived == self._seen
        self._heard, self._seen = heard, arrived
        self._silence = min(self._silence * (1 + is_silent), _LONGEST_SILENCE_SECONDS) if is_same else _SILENCE_SECONDS
        self._silent_at = now + self._silence
        return is_silent

    def misses_entries_before(self, entry: wire.ReceivedEntry) -> bool:
        """Return whether the broker has left out entries before this one while it redelivers (hazard H94).

        A broker delivers again when it is asked to, and also unasked when a transaction aborts.
        """
        entry_id = entry.id.ledger, entry.id.entry
        if self._expected and self._expected[0] < entry_id:
            self._repeated_redeliveries += 1
            if self._repeated_redeliveries <= _MAX_REPEATED_REDELIVERIES:
                return True
            self._expected.clear()
        if entry_id <= self._arrived:
            self.expect_again()
        self._arrived = entry_id
        while self._expected and self._expected[0] <= entry_id:
            self._expected.popleft()
        if not self._expected:
            self._repeated_redeliveries = 0
        return False

    @property
    def is_idle(self) -> bool:
        """Return whether all received messages are acknowledged or to come again, and no seek has skipped any."""
        return not (self.waiting or self._outstanding or self._skipped)

    def note_progress(self, last: wire.MessageId, acknowledged: wire.MessageId | None) -> None:
        """Note the broker's answer: the id of the last message, and the group's mark-delete position."""
        before, self.mark_delete = self._unread, acknowledged
        is_unread = self.is_idle and acknowledged is not None and acknowledged[:2] < last[:2]
        self._unread = (self._count, acknowledged, self.consumer.generation) if is_unread else None
        self.is_behind = self._unread is not None and self._unread == before

    def expect_again(self, dropped: Iterable[wire.MessageId] = ()) -> None:
        """Note that the broker delivers all entries with unacknowledged messages again.

        `dropped` are the ids of entries dropped unread; ids up to the last entry handed out are repeated deliveries.
        """
        arrived = [*(entry.id for entry in self._waiting), *dropped]
        again = {id[:2] for id in arrived if id[:2] > self._handed}
        if self._rest and self._rest_of is not None:
            again.add(self._rest_of.id[:2])
        self._expected = deque(sorted(again.union(self._expected, self._outstanding)))

    # --- handing out ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return bool(self._rest or self._waiting) and not self.paused and self.fault is None and self.is_assigned

    @property
    def waiting(self) -> int:
        """Return about how many messages have been received and not yet returned by `poll`."""
        return len(self._rest) + sum(entry.permits for entry in self._waiting)

    def take(self, limit: int) -> tuple[list[Message], int]:
        """Return up to `limit` messages of the next entry, perhaps none, and about how many bytes they have.

        If the entry cannot be read, keep the error in `fault` instead of raising it.
        """
        if not self._rest:
            entry = self._waiting.popleft()
            if self._is_skipped(entry):
                return [], 0
            try:
                self._rest.extend(self._read(entry))
            except wire.PulsarError as error:
                since = self.since
                if since is not None and entry.publish_time < since[0] and position_of(entry.id) < since[1]:
                    return [], 0
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
            self._note_left_out(entry)
            messages = self._without_repeats(entry, messages)
        elif messages and messages[0].position < self.next:
            messages = [message for message in messages if message.position >= self.next]
        if self.since is not None and messages:
            messages = self._skip_until_time(self.since, messages)
        return messages

    def _is_skipped(self, entry: wire.ReceivedEntry) -> bool:
        first, end = (entry.id.ledger, entry.id.entry, 0), position_after(entry.id)
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
        entry_id = (entry.id.ledger, entry.id.entry)
        if entry_id > self._handed:
            return 1 + entry.redeliveries
        # Brokers count no deliveries on subscriptions that keep the order.
        count = self._delivery_counts[entry_id] = self._delivery_counts.get(entry_id, 1) + 1
        if len(self._delivery_counts) > self._max_delivery_counts:
            for oldest in sorted(self._delivery_counts)[: self._max_delivery_counts // 2]:  # probably acknowledged
                del self._delivery_counts[oldest]
        return max(count, 1 + entry.redeliveries)

    def _without_repeats(self, entry: wire.ReceivedEntry, messages: list[Message]) -> list[Message]:
        entry_id = (entry.id.ledger, entry.id.entry)
        held = self._outstanding.get(entry_id, 0)
        for acked in self._acked[:]:
            if acked.until is None or entry.arrival <= acked.until:
                held |= acked.bits.get(entry_id, 0)
            else:
                self._acked.remove(acked)  # all deliveries before the broker's answer have arrived
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
        entry_id = (entry.id.ledger, entry.id.entry)
        self._handed = max(self._handed, entry_id)
        last = messages[-1].position
        is_last = not entry.is_batch or last[2] == entry.count - 1
        self.next = max(self.next, position_after(entry.id) if is_last else (*entry_id, last[2] + 1))
        if not self._grouped:
            return
        first = messages[0].position[2]
        if last[2] - first + 1 == len(messages):
            bits = (1 << last[2] + 1) - (1 << first)
        else:
            bits = sum(1 << message.position[2] for message in messages)
        self._outstanding[entry_id] = self._outstanding.get(entry_id, 0) | bits
        if entry.is_batch:
            self._sizes[entry_id] = entry.count
        if entry.parts:
            self._parts[entry_id] = entry.parts

    # --- acknowledging and giving back ------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Return how many messages `poll` has returned that are neither acknowledged nor given back."""
        return sum(bits.bit_count() for bits in self._outstanding.values())

    def check_outstanding(self, positions: Sequence[Position]) -> None:
        """Raise `Conflict` if one of these messages was given back by `nack`, or delivered in an earlier assignment."""
        for ledger, entry, index in positions:
            if not self._outstanding.get((ledger, entry), 0) >> index & 1:
                topic, number = self.key
                raise Conflict(
                    f"the message at {topic}[{number}] {(ledger, entry, index)} is no longer with this reader; it"
                    " comes again"
                )

    def give_back(self, positions: Sequence[Position]) -> None:
        """Mark messages that `poll` has returned as given back by `nack`; ignore those that are not outstanding."""
        self.release([(a, b, index) for a, b, index in positions if self._outstanding.get((a, b), 0) >> index & 1])

    def give_up(self, entry_ids: Iterable[_EntryId], delivered_again: bool) -> list[wire.MessageId]:
        """Forget all messages of entries, also ones that `poll` has not returned; return the affected entries' ids.

        `delivered_again` says that the broker is about to redeliver these entries. Then earlier deliveries of them that
        arrive late are dropped.
        """
        given_up: list[wire.MessageId] = []
        for entry_id in set(entry_ids):
            size = self._sizes.pop(entry_id, 1)
            had = self._outstanding.pop(entry_id, 0)
            self.unfinished.pop(entry_id, None)
            if self._rest and self._rest_of is not None and entry_id == self._rest_of.id[:2]:
                had = 1
                self._rest.clear()
            parts = self._parts.pop(entry_id, ())  # a message in chunks is redelivered only with all its chunks
            if had:
                given_up += parts or (wire.MessageId(*entry_id),)
            if had and delivered_again:
                self._acked.append(AckedMessages({entry_id: (1 << size) - 1}, self.consumer.arrived))
        return given_up

    def release(self, positions: Sequence[Position]) -> list[wire.MessageId]:
        """Mark outstanding messages, each given once, as no longer outstanding. Return their ids for an ACK command."""
        return [id for entry_id, indexes in self._by_entry(positions) for id in self._release_entry(entry_id, indexes)]

    def acknowledge(self, positions: Sequence[Position]) -> tuple[list[wire.MessageId], AckedMessages]:
        """Mark messages as acknowledged in a transaction; return ids for ACK commands, and what `acknowledged` gets."""
        entry_ids = {(ledger, entry) for ledger, entry, _ in positions}
        before = {entry_id: self._outstanding[entry_id] for entry_id in entry_ids}
        ids = self.release(positions)
        self._expected = deque(each for each in self._expected if each not in entry_ids)
        bits = {entry_id: had & ~self._outstanding.get(entry_id, 0) for entry_id, had in before.items()}
        acked = AckedMessages(bits)
        self._acked.append(acked)
        return ids, acked

    def acknowledged(self, acked: AckedMessages) -> None:
        """Note that the broker has confirmed these acknowledgements as pending acks of their transaction."""
        if not self._waiting and self.consumer.all_taken:
            self._forget(acked)

    def not_acknowledged(self, acked: AckedMessages, ids: Sequence[wire.MessageId]) -> None:
        """Note that the broker has refused the acknowledgements of `ids`, or that its answer was lost.

        The next `nack` on a shared subscription requests their redelivery; their deliveries are no longer dropped.
        """
        self.refused += ids
        self._forget(acked)

    def committed(self, ids: Sequence[wire.MessageId]) -> list[wire.MessageId]:
        """Note that a transaction which has acknowledged `ids` was committed. Return the entries that are acknowledged
        in parts, and of which committed transactions have by now acknowledged all messages.
        """
        complete = []
        for id in ids:
            if id.batch_index >= 0:
                self._committed[id[:2]] = self._committed.pop(id[:2], 0) | 1 << id.batch_index
                if self._committed[id[:2]].bit_count() == id.batch_size:
                    complete.append(id)
                    self.finished(id[:2])
                else:
                    self._find_unfinished(id[:2], id.batch_size)
        return complete

    def _note_left_out(self, entry: wire.ReceivedEntry) -> None:
        """Note which messages of an entry are acknowledged or pending, because this delivery leaves them out."""
        entry_id = (entry.id.ledger, entry.id.entry)
        self.unfinished.pop(entry_id, None)
        self._left_out.pop(entry_id, None)
        if entry.left_out or entry.redeliveries:
            self._left_out[entry_id] = entry.left_out
            self._find_unfinished(entry_id, entry.count, entry.redeliveries)

    def note_prepared(self, ids: Sequence[wire.MessageId]) -> None:
        """Note that a transaction has acknowledged `ids` that is prepared, or whose outcome is unknown."""
        for id in ids:
            if id.batch_index >= 0:
                self._left_out[id[:2]] = self._left_out.get(id[:2], 0) | 1 << id.batch_index
                self._find_unfinished(id[:2], id.batch_size)

    def _find_unfinished(self, entry_id: _EntryId, size: int, vain: int = 0) -> None:
        unknown = (1 << size) - 1 & ~self._committed.get(entry_id, 0)
        if not unknown & ~self._left_out.get(entry_id, 0):
            self.unfinished[entry_id] = size, unknown, vain, time.monotonic() + query_pause(vain)
        for known in (self._committed, self._left_out, self.unfinished):
            if len(known) > _MAX_COMMITTED_IN_PART + len(self._outstanding):
                for oldest in [each for each in known if each not in self._outstanding][: _MAX_COMMITTED_IN_PART // 2]:
                    del known[oldest]

    def finished(self, entry_id: _EntryId) -> None:
        """Forget an entry, all of whose messages are acknowledged by committed transactions."""
        for known in (self._committed, self._left_out, self.unfinished):
            known.pop(entry_id, None)

    def _forget(self, acked: AckedMessages) -> None:
        if acked in self._acked:
            self._acked.remove(acked)

    def _by_entry(self, positions: Sequence[Position]) -> Iterator[tuple[_EntryId, Sequence[int]]]:
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

    def _release_entry(self, entry_id: _EntryId, indexes: Sequence[int]) -> Sequence[wire.MessageId]:
        size = self._sizes.get(entry_id, 0)
        left = self._outstanding[entry_id] & ~sum(1 << index for index in indexes) if len(indexes) < max(size, 1) else 0
        if left:
            self._outstanding[entry_id] = left
        else:
            del self._outstanding[entry_id]
            self._sizes.pop(entry_id, None)
        if not size:
            return self._parts.pop(entry_id, None) or (wire.MessageId(*entry_id),)
        if len(indexes) == size and entry_id not in self._left_out:
            return (wire.MessageId(*entry_id, -1, -1, size),)
        return [wire.MessageId(*entry_id, -1, index, size) for index in indexes]

    def go_to(self, position: Position) -> None:
        """Make `position` the next position to read: deliver messages from it on again, and skip earlier ones."""
        self.drop()
        self.since = None
        if self._grouped:
            floor = position[0], position[1]
            for entry_id in [entry_id for entry_id in self._outstanding if entry_id >= floor]:
                self._outstanding[entry_id] &= (1 << position[2]) - 1 if entry_id == floor else 0
                if not self._outstanding[entry_id]:
                    del self._outstanding[entry_id]
            self._skipped = [(first, min(end, position)) for first, end in self._skipped if first < position]
            if position > self.next:
                self._skipped.append((self.next, position))
        self.next = position
