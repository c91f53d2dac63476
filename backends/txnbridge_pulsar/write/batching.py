"""The way out of a writer: messages are gathered into entries, and entries are counted until they have receipts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from txnbridge.errors import DeadlineExceeded, DeliveryFailed
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import needing, translate
from txnbridge_pulsar.outcome.end_delivery import Participant, participant_of

# An entry is sent when it has about so many bytes, each message counted with what it costs besides: a thousand
# messages of 100 bytes, 220 of a kibibyte. Larger entries gain nothing, and a broker's memory is theirs.
ENTRY_BYTES = 256 * 1024
MESSAGE_BYTES = 160
# So many values are looked at together; more would make entries of small ones too large.
_MANY = 256


class DroppedAsDuplicate(wire.PulsarError):
    """The broker took a new entry for one that it has already, and did not store it."""


def not_stored(error: wire.PulsarError) -> DeliveryFailed:
    """The error of a writer whose entry has no receipt and gets none; to be raised `from` the client's own error."""
    return DeliveryFailed(f"storing messages: {error}; the transaction can only be aborted, and run again")


class PendingReceipts:
    """Entries of one transaction that have no receipt yet, and the first thing that went wrong."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._out: Counter[TransactionProducer] = Counter()
        self.failure: wire.PulsarError | None = None
        self.lost: dict[TransactionProducer, wire.PulsarError] = {}  # lines with entries that may be stored or not

    def sent(self, producer: TransactionProducer) -> None:
        with self._changed:
            self._out[producer] += 1

    def done(self, producer: TransactionProducer, failure: wire.PulsarError | None) -> None:
        """Called by the thread that reads receipts."""
        with self._changed:
            self._out[producer] -= 1
            if isinstance(failure, wire.BrokerConnectionLost):
                self.lost.setdefault(producer, failure)
            elif failure is not None:
                self.failure = self.failure or failure
            self._changed.notify_all()

    def found(self, producer: TransactionProducer) -> None:
        """The entries that were lost on this line are on their way again."""
        with self._changed:
            self.lost.pop(producer, None)

    def wait(self, deadline: Deadline, producer: TransactionProducer | None = None) -> bool:
        """Until nothing is on its way, or nothing on one line, or the deadline; whether nothing is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (any(self._out.values()) if producer is None else self._out[producer]), deadline.left()
            )

    @property
    def settled(self) -> bool:
        """Whether no entry can reach the broker any more."""
        with self._changed:
            return not any(self._out.values()) and not self.lost


class TransactionProducer:
    """One producer of a writer, on one concrete topic; opened when it is first used.

    Entries whose connection was lost are sent again only where it is known that the broker drops what it has already:
    otherwise the first copy could be stored after the commit, which would take the whole transaction back.
    """

    def __init__(self, cluster: ClusterAccess, concrete: str, connection_key: str) -> None:
        self.concrete = concrete
        self._cluster = cluster
        self._connection_key = connection_key
        self._producer: wire.PulsarProducer | None = None
        self._stored = -1  # the highest number with a receipt
        self.last: tuple[int, int] | None = None  # where the last entry stands, if that is known

    def send(
        self, content: wire.Single | wire.MessageBatch, txn: TxnId, receipts: PendingReceipts, deadline: Deadline
    ) -> None:
        """Put an entry on its way; the tally learns what became of it. Waits for room only."""
        while True:
            producer = self.open(deadline)
            try:
                send = producer.send(content, txn, timeout=deadline.left())
            except wire.BrokerConnectionLost as error:
                if error.may_have_had_effect:
                    receipts.sent(self)
                    receipts.done(self, error)
                    return
                if isinstance(error, wire.RequestTimedOut):
                    raise DeadlineExceeded(f"sending to {self.concrete}: {error}") from error
                self._go_on(error, receipts, deadline)
            except wire.PulsarError as error:
                raise translate(error, f"sending to {self.concrete}") from error
            else:
                self._watch(send, receipts, again=False)
                return

    def _go_on(self, error: wire.BrokerConnectionLost, receipts: PendingReceipts, deadline: Deadline) -> None:
        """Reopen the producer, and send entries without a receipt again before anything else is sent."""
        deadline.check(f"sending to {self.concrete}")
        settled = receipts.wait(deadline, self)  # the tally hears of each lost entry by itself
        if settled and self not in receipts.lost:
            self._reopen(deadline)
        elif not settled or not self.recover(receipts, deadline):
            raise not_stored(error) from error

    def open(self, deadline: Deadline) -> wire.PulsarProducer:
        """The producer. To be opened before the topic is named in a transaction: while a broker has not loaded a topic
        that one names, it may list no open transactions.
        """
        if self._producer is None:
            try:
                with needing("produce", self.concrete):
                    self._producer = self._cluster.client.create_producer(
                        self.concrete,
                        timeout=deadline.left(),
                        compression=self._cluster.settings.pack,
                        transactions=True,
                        connection_key=self._connection_key,
                    )
            except wire.PulsarError as error:
                raise translate(error, f"opening a producer on {self.concrete}") from error
            self._stored = -1
        return self._producer

    @property
    def is_open(self) -> bool:
        """Whether the broker serves the producer, as far as it has said."""
        return self._producer is not None and self._producer.lost is None

    def ready(self, deadline: Deadline) -> None:
        """Have the broker serve the producer, before a transaction names the topic: a topic that was terminated
        refuses that, and would keep a transaction that has named it from ever ending.
        """
        if self.open(deadline).lost is not None:
            self._reopen(deadline)

    @property
    def participant(self) -> Participant | None:
        """Return the topic as a participant of the transaction; None if this producer was never opened."""
        return None if self._producer is None else participant_of(self.concrete, None, self._producer)

    def _watch(self, send: wire.Send, receipts: PendingReceipts, again: bool) -> None:
        receipts.sent(self)
        send.when_done(lambda send: receipts.done(self, self._became(send, again)))

    def _became(self, send: wire.Send, again: bool) -> wire.PulsarError | None:
        try:
            receipt = send.result(0)
        except wire.PulsarError as error:
            return error
        if receipt.duplicate and not again:
            return DroppedAsDuplicate(f"the broker dropped a new entry on {self.concrete} as if it had it already")
        self._stored = max(self._stored, send.highest_sequence_id)
        self.last = None if receipt.duplicate else (receipt.message_id.ledger, receipt.message_id.entry)
        return None

    def recover(self, receipts: PendingReceipts, deadline: Deadline) -> bool:
        """After a connection was lost: reopen, and send again what has no receipt. False where that is not safe."""
        producer = self._producer
        if producer is None:
            return False
        while not deadline.expired:
            self._reopen(deadline)
            if not self._is_remembered(producer, deadline):
                return False
            try:
                again = producer.resend(deadline.left())
            except wire.RequestTimedOut:
                return False
            except wire.BrokerConnectionLost:
                continue
            receipts.found(self)
            for send in again:
                self._watch(send, receipts, again=True)
            return True
        return False

    def _is_remembered(self, producer: wire.PulsarProducer, deadline: Deadline) -> bool:
        """Whether the broker is known to drop repetitions: one that remembers what this name has sent does."""
        if self._stored >= 0:
            return producer.last_sequence_id >= self._stored
        return self._cluster.topics.deduplicates(self.concrete, deadline)

    def _reopen(self, deadline: Deadline) -> None:
        assert self._producer is not None
        try:
            with needing("produce", self.concrete):
                self._producer.reopen(deadline.left())
        except wire.PulsarError as error:
            raise translate(error, f"reopening a producer on {self.concrete}") from error

    def drop(self) -> None:
        """Forget the producer: the next use opens another, under a name that no broker has seen."""
        self._producer = None

    def close(self, deadline: Deadline) -> None:
        if self._producer is not None:
            self._producer.close(deadline.left())
            self._producer = None


class EntryBuffer:
    """Messages for one partition that wait to be sent together, in order.

    Those of different keys go into different entries, unless `mixed`: where a group shares by key, the broker gives an
    entry to one member by the key of its first message.
    """

    __slots__ = ("_batch", "_key", "_left", "_mixed", "_plain", "number")

    def __init__(self, number: int, mixed: bool) -> None:
        self.number = number  # of the partition
        self._mixed = mixed
        self._start()

    def _start(self) -> None:
        self._batch = wire.MessageBatch()
        self._key: str | bytes | None = None  # of all in the batch
        self._plain: list[bytes] = []  # payloads that come after the batch: they are added many at a time
        self._left = ENTRY_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._plain and not self._batch.count

    def add_plain(self, value: bytes, size: int) -> bool:
        """Whether it is full now."""
        self._plain.append(value)
        self._left -= size + MESSAGE_BYTES
        return self._left < 0

    def add_many(self, values: Sequence[bytes], size: int) -> bool:
        self._plain += values
        self._left -= size + MESSAGE_BYTES * len(values)
        return self._left < 0

    def fits(self, key: str | bytes | None, size: int) -> bool:
        """Whether a message may go into the same entry; one that is large goes alone."""
        if self.is_empty:
            return True
        last = self._key if not self._plain else None
        return size <= ENTRY_BYTES and (self._mixed or (last == key and not self._is_split))

    @property
    def _is_split(self) -> bool:
        return bool(self._plain and self._batch.count and self._key is not None and not self._mixed)

    def add(
        self,
        value: bytes | None,
        key: str | bytes | None,
        properties: list[tuple[str, str]],
        event_time: int | None,
        size: int,
    ) -> bool:
        self._empty_plain()
        self._key = key
        self._batch.append(value, key, properties, event_time)
        self._left -= size + MESSAGE_BYTES
        return self._left < 0

    def _empty_plain(self) -> None:
        if self._plain:
            self._batch.extend(self._plain)
            self._plain = []

    def take(self) -> list[wire.MessageBatch]:
        """Empty the buffer, and return its messages as entries."""
        found = []
        if self._is_split:
            found.append(self._batch)
            self._batch = wire.MessageBatch()
        self._empty_plain()
        if self._batch.count:
            found.append(self._batch)
        self._start()
        return found


class NotBareValue(Exception):
    """A message that takes the long way; nothing of it was taken."""


class TopicBatcher:
    """One topic of a writer: which partition a message goes to, and what waits for each.

    Messages without a key go to one partition until an entry is full, then to the next. `ship` is given what is to be
    sent to a concrete topic.
    """

    def __init__(
        self, concrete: tuple[str, ...], turn: int, mixed: bool, ship: Callable[[str, wire.MessageBatch], None]
    ) -> None:
        self.concrete = concrete
        self._mixed = mixed
        self._ship = ship
        self._buffers: dict[int, EntryBuffer] = {}
        self._current = self.buffer(turn % len(concrete))

    def buffer(self, number: int | None) -> EntryBuffer:
        """That of a partition; without one, of the partition whose turn it is."""
        if number is None:
            return self._current
        found = self._buffers.get(number)
        if found is None:
            found = self._buffers[number] = EntryBuffer(number, self._mixed)
        return found

    def take(self, topic: object, value: bytes, key: bytes | None) -> None:
        """The quick way for a value alone. Raises `NotPlain` and `TypeError` for others."""
        size = len(value)
        if key is not None or size > ENTRY_BYTES:
            raise NotBareValue
        if self._current.add_plain(value, size):
            self.send(self._current)

    def take_many(self, values: Sequence[bytes]) -> int:
        """Values alone, all bytes; how many of them were taken, which are the first."""
        done = 0
        while done < len(values):
            some = values[done : done + _MANY]
            sizes = list(map(len, some))
            if sum(sizes) > ENTRY_BYTES:
                break
            if self._current.add_many(some, sum(sizes)):
                self.send(self._current)
            done += len(some)
        return done

    def send(self, buffer: EntryBuffer) -> None:
        if buffer.is_empty:
            return
        if buffer is self._current:
            self._current = self.buffer((buffer.number + 1) % len(self.concrete))
        for batch in buffer.take():
            self._ship(self.concrete[buffer.number], batch)

    def waiting(self) -> list[str]:
        """The concrete topics that something waits for."""
        return [self.concrete[number] for number, buffer in self._buffers.items() if not buffer.is_empty]

    def flush(self) -> None:
        for buffer in list(self._buffers.values()):
            self.send(buffer)
