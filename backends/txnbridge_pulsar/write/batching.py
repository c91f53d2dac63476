"""Collects a transaction's messages into entries, sends the entries, and counts their receipts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

from txnbridge.errors import DeadlineExceeded, DeliveryFailed
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import needing, translate, translated
from txnbridge_pulsar.outcome.end_delivery import Participant

# An entry is sent when its messages, each with its overhead, have about this size: a thousand messages of 100 bytes, or
# 220 of a kibibyte. Larger entries gain nothing and use the broker's memory.
ENTRY_BYTES = 256 * 1024
MESSAGE_OVERHEAD_BYTES = 160
# `take_many` adds this many values at a time; a larger number would make entries of small values too large.
_VALUES_PER_STEP = 256


class DroppedAsDuplicate(wire.PulsarError):
    """The broker dropped a new entry because it took the entry for a duplicate (hazard H36)."""


def not_stored(error: wire.PulsarError) -> DeliveryFailed:
    """Return the error for an entry that may not be stored. The caller raises it `from` the client's error."""
    return DeliveryFailed(f"messages may not be stored: {error}; the transaction is aborted, run it again")


class PendingReceipts:
    """A transaction's entries without a receipt, counted for each producer, and the first failure of an entry."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._out: Counter[TransactionProducer] = Counter()
        self.failure: wire.PulsarError | None = None
        # Producers with entries that may or may not be stored.
        self.lost: dict[TransactionProducer, wire.PulsarError] = {}

    def sent(self, producer: TransactionProducer) -> None:
        with self._changed:
            self._out[producer] += 1

    def done(self, producer: TransactionProducer, failure: wire.PulsarError | None) -> None:
        """Note that an entry of a producer has its receipt, or a `failure`. The client's reading thread calls this."""
        with self._changed:
            self._out[producer] -= 1
            if isinstance(failure, wire.BrokerConnectionLost):
                self.lost.setdefault(producer, failure)
            elif failure is not None:
                self.failure = self.failure or failure
            self._changed.notify_all()

    def resent(self, producer: TransactionProducer) -> None:
        """Note that a producer has sent the entries of its lost connection again."""
        with self._changed:
            self.lost.pop(producer, None)

    def wait(self, deadline: Deadline, producer: TransactionProducer | None = None) -> bool:
        """Wait until each sent entry (of `producer`, if given) has a receipt or has failed; return False if late."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (any(self._out.values()) if producer is None else self._out[producer]), deadline.left()
            )

    @property
    def settled(self) -> bool:
        """Return whether no entry can reach the broker any more: each has a receipt or was refused."""
        with self._changed:
            return not any(self._out.values()) and not self.lost


class TransactionProducer:
    """A writer's producer on a partition, or a topic without partitions. It is opened when it is first used.

    After a lost connection, entries without a receipt are sent again only if the broker is known to drop duplicates.
    Otherwise a delayed copy could arrive after the commit, and make all committed messages of the transaction on the
    topic disappear (hazard H35).
    """

    def __init__(self, cluster: ClusterAccess, concrete: str, connection_key: str) -> None:
        self.concrete = concrete
        self._cluster = cluster
        self._connection_key = connection_key
        self._producer: wire.PulsarProducer | None = None
        self._stored = -1  # the highest sequence id with a receipt
        self.last: tuple[int, int] | None = None  # position of the last stored entry, if it is known

    def send(
        self, content: wire.Single | wire.MessageBatch, txn: TxnId, receipts: PendingReceipts, deadline: Deadline
    ) -> None:
        """Send an entry, whose receipt is counted in `receipts`. Wait only while the queue is full."""
        while True:
            producer = self.open(deadline)
            try:
                self._track(producer.send(content, txn, timeout=deadline.left()), receipts, again=False)
                return
            except wire.BrokerConnectionLost as error:
                if error.may_have_had_effect:
                    receipts.sent(self)
                    receipts.done(self, error)
                    return
                if isinstance(error, wire.RequestTimedOut):
                    raise DeadlineExceeded(f"sending to {self.concrete}: {error}") from error
                self._send_again(error, receipts, deadline)
            except wire.PulsarError as error:
                raise translate(error, f"sending to {self.concrete}") from error
            except BaseException:  # an interrupt: the entry may be under way, and nobody waits for its receipt
                receipts.sent(self)
                raise

    def _send_again(self, error: wire.BrokerConnectionLost, receipts: PendingReceipts, deadline: Deadline) -> None:
        """Reopen the producer after a lost connection. Entries without a receipt are sent again before any new one."""
        deadline.check(f"sending to {self.concrete}")
        settled = receipts.wait(deadline, self)  # the client reports each lost entry to `receipts`
        if settled and self not in receipts.lost:
            self._reopen(deadline)
        elif not settled or not self.recover(receipts, deadline):
            raise not_stored(error) from error

    def open(self, deadline: Deadline) -> wire.PulsarProducer:
        """Return the producer; open it at the first call, which is before the topic is registered with a transaction.

        Brokers may be unable to list open transactions while a registered topic is not loaded.
        """
        key, pack = self._connection_key, self._cluster.settings.pack
        if self._producer is None:
            with translated(f"opening a producer on {self.concrete}"), needing("produce", self.concrete):
                self._producer = self._cluster.client.create_producer(
                    self.concrete, timeout=deadline.left(), compression=pack, transactions=True, connection_key=key
                )
            self._stored = -1
        return self._producer

    @property
    def is_open(self) -> bool:
        """Return whether the producer is open and, as far as this client knows, still connected."""
        return self._producer is not None and self._producer.lost is None

    def ready(self, deadline: Deadline) -> None:
        """Open the producer, or reopen it, before the writer registers its topic with a transaction.

        A terminated topic refuses producers, so it is not registered. A transaction with a terminated topic would never
        end (hazard H54).
        """
        if self.open(deadline).lost is not None:
            self._reopen(deadline)

    @property
    def participant(self) -> Participant | None:
        """Return the topic as a participant of the transaction; None if this producer was never opened."""
        used = self._producer
        return None if used is None else Participant(self.concrete, None, used, used.generation)

    def _track(self, send: wire.Send, receipts: PendingReceipts, again: bool) -> None:
        receipts.sent(self)
        send.when_done(lambda send: receipts.done(self, self._result_of(send, again)))

    def _result_of(self, send: wire.Send, again: bool) -> wire.PulsarError | None:
        try:
            receipt = send.result(0)
        except wire.PulsarError as error:
            return error
        if receipt.duplicate and not again:
            return DroppedAsDuplicate(f"the broker dropped a new entry on {self.concrete} as a duplicate")
        self._stored = max(self._stored, send.highest_sequence_id)
        self.last = None if receipt.duplicate else (receipt.message_id.ledger, receipt.message_id.entry)
        return None

    def recover(self, receipts: PendingReceipts, deadline: Deadline) -> bool:
        """Reopen the producer after a lost connection, and send its entries without a receipt again.

        Return False at the deadline, and, without sending, if the broker is not known to drop duplicates.
        """
        producer = self.open(deadline)
        while not deadline.expired:
            self._reopen(deadline)
            if not self._drops_duplicates(producer, deadline):
                return False
            try:
                # Each result counts, also if the connection is lost before all entries are sent.
                again = producer.resend(deadline.left(), lambda send: self._track(send, receipts, again=True))
            except wire.RequestTimedOut:
                return False
            except wire.BrokerConnectionLost:
                continue
            receipts.resent(self)
            for send in again:
                self._track(send, receipts, again=True)
            return True
        return False

    def _drops_duplicates(self, producer: wire.PulsarProducer, deadline: Deadline) -> bool:
        """Return whether the broker is known to drop entries that are sent again.

        After the first receipt, it does so if it still has this producer's last sequence id. Before the first receipt,
        it does so if deduplication is enabled on the topic.
        """
        if self._stored >= 0:
            return producer.last_sequence_id >= self._stored
        return self._cluster.topics.deduplicates(self.concrete, deadline)

    def _reopen(self, deadline: Deadline) -> None:
        assert self._producer is not None
        with translated(f"reopening a producer on {self.concrete}"), needing("produce", self.concrete):
            self._producer.reopen(deadline.left())


class EntryBuffer:
    """The messages that are collected for the next entry of one partition, in order.

    Only messages with the same key share an entry, unless `mixed`: a key-shared subscription delivers a whole entry by
    the key of its first message.
    """

    __slots__ = ("_batch", "_key", "_left", "_mixed", "_plain", "number")

    def __init__(self, number: int, mixed: bool) -> None:
        self.number = number  # partition number
        self._mixed = mixed
        self._start()

    def _start(self) -> None:
        self._batch = wire.MessageBatch()
        self._key: str | bytes | None = None  # the key of all messages in the batch
        self._plain: list[bytes] = []  # bare values, sent after the batch; adding many at once is faster
        self._left = ENTRY_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._plain and not self._batch.count

    def add_plain(self, value: bytes, size: int) -> bool:
        """Add a value without key and headers, of this size in bytes. Return whether the buffer is full afterwards."""
        self._plain.append(value)
        self._left -= size + MESSAGE_OVERHEAD_BYTES
        return self._left < 0

    def add_many(self, values: Sequence[bytes], size: int) -> bool:
        self._plain += values
        self._left -= size + MESSAGE_OVERHEAD_BYTES * len(values)
        return self._left < 0

    def fits(self, key: str | bytes | None, size: int) -> bool:
        """Return whether a message of this key and size may join the collected ones. A large one gets its own entry."""
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
        self._left -= size + MESSAGE_OVERHEAD_BYTES
        return self._left < 0

    def _empty_plain(self) -> None:
        if self._plain:
            self._batch.extend(self._plain)
            self._plain = []

    def take(self) -> list[wire.MessageBatch]:
        """Empty the buffer and return its messages as entries."""
        batches = []
        if self._is_split:
            batches.append(self._batch)
            self._batch = wire.MessageBatch()
        self._empty_plain()
        if self._batch.count:
            batches.append(self._batch)
        self._start()
        return batches


class NotBareValue(Exception):
    """Raised if a message has a key or is large: the fast path has not added it, and `PulsarWriter.send` must."""


@dataclass(eq=False, repr=False)
class TopicBatcher:
    """A transaction's unsent messages to one topic: chooses their partitions, and passes full entries to `send_entry`.

    Messages without a key go to one partition until its entry is full, then to the next partition.
    """

    concrete: tuple[str, ...]
    first_partition: InitVar[int]
    _mixed: bool
    _send_entry: Callable[[str, wire.MessageBatch], None]

    def __post_init__(self, first_partition: int) -> None:
        self._buffers: dict[int, EntryBuffer] = {}
        self._current = self.buffer(first_partition % len(self.concrete))

    def buffer(self, number: int | None) -> EntryBuffer:
        """Return a partition's buffer; for None, the one to which messages without a key are added now."""
        if number is None:
            return self._current
        buffer = self._buffers.get(number)
        if buffer is None:
            buffer = self._buffers[number] = EntryBuffer(number, self._mixed)
        return buffer

    def take(self, topic: object, value: bytes, key: bytes | None) -> None:
        """Add a value on the fast path; `topic` is not used. Raise `NotBareValue` for a key or a large value."""
        size = len(value)
        if key is not None or size > ENTRY_BYTES:
            raise NotBareValue
        if self._current.add_plain(value, size):
            self.send(self._current)

    def take_many(self, values: Sequence[bytes]) -> int:
        """Add values without key and headers, several at a step; return how many fitted into entries."""
        done = 0
        while done < len(values):
            some = values[done : done + _VALUES_PER_STEP]
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
            self._send_entry(self.concrete[buffer.number], batch)

    def waiting(self) -> list[str]:
        """Return the full names of the partitions for which there are unsent messages."""
        return [self.concrete[number] for number, buffer in self._buffers.items() if not buffer.is_empty]

    def flush(self) -> None:
        for buffer in list(self._buffers.values()):
            self.send(buffer)
