"""The fence topic of a transactional id. Only the id's newest owner can write to it.

Whoever opens the id takes the fence topic from the older owner at once, so the older owner can store no more records.
An owner names each transaction in a record before it sends the transaction's first message, so the next owner finds all
transactions that it has to end. The broker fences the older owner on this topic only: messages that the older owner
still sends to other topics belong to transactions that the newer owner ends.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from txnbridge.errors import DeadlineExceeded, DeliveryFailed, EvidenceLost, Fenced, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel, last_entry, value_of
from txnbridge_pulsar.errors import translate, translated
from txnbridge_pulsar.settings.topic_names import encoded
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, FenceRecord

_log = logging.getLogger("txnbridge")

# Earlier records are trimmed each time after this many records: only the last one counts, and a trim takes 10 ms.
_RECORDS_PER_TRIM = 1000
# Pause between attempts to open a producer on a topic that is busy, for milliseconds, because of another takeover or of
# a lost connection that the broker still counts as open.
_BUSY_PAUSE_SECONDS = 0.05


def fence_prefix(cluster: ClusterAccess) -> str:
    """Return the prefix of all fence topics' names. The transactional id, encoded, follows the prefix."""
    return f"{cluster.settings.prefix}fence-"


def last_fence_record(
    cluster: ClusterAccess, topic: str, deadline: Deadline
) -> tuple[wire.MessageId, FenceRecord] | None:
    """Return the last record of a fence topic (given by its full name) with its position; None if there is none."""
    last = last_entry(cluster, topic, deadline)
    return None if last is None else (last.id, FenceRecord.unpack(value_of(last)))


def listed_record(cluster: ClusterAccess, topic: str, deadline: Deadline) -> FenceRecord | None:
    """Return the last record of a fence topic for a list; None also for a damaged one, which an opening reports."""
    with suppress(EvidenceLost):
        if newest := last_fence_record(cluster, topic, deadline):
            return newest[1]
    return None


def at_risk(cluster: ClusterAccess, deadline: Deadline) -> list[AnnouncedTransaction]:
    """Return the ended transactions on fence topics whose late messages a broker may still accept, for the doctor."""
    begins = f"persistent://{cluster.settings.namespace}/{fence_prefix(cluster)}"
    topics = [topic for topic in cluster.topics.all_concrete(deadline) if topic.startswith(begins)]
    records = in_parallel(lambda topic: listed_record(cluster, topic, deadline), topics)
    return [each for record in records if record is not None for each in record.at_risk]


class Fence:
    """An owner's exclusive access to its transactional id's fence topic. Thread-safe once `take` has returned."""

    def __init__(self, cluster: ClusterAccess, name: str, opening: str) -> None:
        self._cluster = cluster
        self._name = name
        self._opening = opening
        # Its connection is not shared: the broker closes the whole connection of a fenced producer (hazard H41).
        self._connection_key = f"fence {opening}"
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._producer: wire.PulsarProducer | None = None
        self._generation = 0
        self._written = 0
        self._last: wire.MessageId | None = None
        self._gap = (-1, 0)  # ledger of the last record, and its entry number minus its sequence id
        self._fenced: Fenced | None = None
        self.topic = ""

    def take(self, deadline: Deadline) -> FenceRecord | None:
        """Fence older owners of the transactional id; return the fence topic's last record, None if there is none."""
        self.topic = self._cluster.topics.internal(f"{fence_prefix(self._cluster)}{encoded(self._name)}", deadline)
        with translated(f"opening {self._name}"):
            while True:
                self._fence_older_producer(deadline)
                try:
                    self._producer = self._open(wire.AccessMode.EXCLUSIVE, deadline)
                    break
                except wire.ProducerFenced:
                    if deadline.left() <= _BUSY_PAUSE_SECONDS:
                        raise
                # Another process opens the same id at this moment. Random pauses let one of the two succeed.
                time.sleep(random.uniform(0, _BUSY_PAUSE_SECONDS))
        self._last, record = last_fence_record(self._cluster, self.topic, deadline) or (None, None)
        return record

    def _fence_older_producer(self, deadline: Deadline) -> None:
        """Fence the topic's producer by opening an exclusive producer with fencing, and close the new producer.

        If two processes do this at once, both succeed: the broker gives both the same epoch and accepts both. If both
        then open an exclusive producer on the free topic, the broker refuses one of them (hazard H39).
        """
        # With a new producer name, because for the old name a broker may answer "busy" (hazard H41), and drops sequence
        # ids that were used before.
        self._open(wire.AccessMode.EXCLUSIVE_WITH_FENCING, deadline).close(deadline.left())

    def _open(self, access: wire.AccessMode, deadline: Deadline) -> wire.PulsarProducer:
        return self._cluster.client.create_producer(
            self.topic, timeout=deadline.left(), access=access, connection_key=self._connection_key
        )

    def write(self, make: Callable[[], FenceRecord], deadline: Deadline) -> None:
        """Store the fence record that `make` returns, called at the moment of sending.

        So if two threads write at once, the record with the newer content is stored last. Raise `Fenced` if a newer
        owner exists, and `DeliveryFailed` if the record is too large for the broker, which then stores nothing. After
        any other error the record may or may not be stored.
        """
        while True:
            generation, send = self._send(make, deadline)
            try:
                if send is not None:
                    self._stored(send.result(deadline.left()))
                    return
            except wire.RequestTimedOut as error:
                raise DeadlineExceeded(f"writing to {self.topic}: {error}") from error
            except wire.PulsarError as error:
                if not isinstance(error, wire.BrokerConnectionLost):
                    raise translate(error, f"writing to {self.topic}") from error
            self._reopen(generation, deadline)

    def _send(self, make: Callable[[], FenceRecord], deadline: Deadline) -> tuple[int, wire.Send | None]:
        with deadline.holding(self._lock, f"other threads wrote to {self.topic}"):
            if self._fenced is not None:
                raise self._fresh_copy(self._fenced)
            assert self._producer is not None
            try:
                content = wire.Single(make().pack())
                return self._generation, self._producer.send(content, timeout=deadline.left())
            except wire.RequestTimedOut as error:
                raise DeadlineExceeded(f"writing to {self.topic}: {error}") from error
            except wire.BrokerConnectionLost:
                return self._generation, None
            except wire.MessageTooLarge as error:
                raise DeliveryFailed(f"writing to {self.topic}: {error} (maxMessageSize of the broker)") from error
            except wire.PulsarError as error:
                raise translate(error, f"writing to {self.topic}") from error

    def _stored(self, receipt: wire.Receipt) -> None:
        """Note that a record is stored. After every `_RECORDS_PER_TRIM` records, trim the topic.

        Threads may note their records in another order than that of the topic. So an older record than the newest one
        says nothing about other producers, and the trim leaves the newest record that is known to be stored.
        """
        with self._noting:
            self._written += 1
            before, id = self._last, receipt.message_id
            if before is not None and id < before:
                return
            self._check_sole_producer(receipt)
            self._last = id
        if before is not None and self._written % _RECORDS_PER_TRIM == 1:
            self._trim(before)

    def _check_sole_producer(self, receipt: wire.Receipt) -> None:
        """Raise `Fenced` if another producer writes to the topic, too (hazard H39).

        With two producers the topic's entry numbers grow faster than this producer's sequence ids.
        """
        gap = receipt.message_id.entry - receipt.sequence_id
        ledger, known = self._gap
        if receipt.message_id.ledger != ledger or gap < known:  # the gap shrinks with each record that was not stored
            self._gap = receipt.message_id.ledger, gap
        elif gap > known:
            self._fenced = Fenced(f"another process has opened {self._name} at the same time: this one must stop")
            raise self._fresh_copy(self._fenced)

    def _reopen(self, generation: int, deadline: Deadline) -> None:
        """Reopen a lost producer, unless a thread has reopened this `generation`. Raise `Fenced` for a newer owner."""
        with deadline.holding(self._lock, f"other threads wrote to {self.topic}"):
            if self._fenced is not None:
                raise self._fresh_copy(self._fenced)
            if generation == self._generation:
                self._reopen_with_old_epoch(deadline)
                self._generation += 1

    def _reopen_with_old_epoch(self, deadline: Deadline) -> None:
        assert self._producer is not None
        with translated(f"writing to {self.topic}"):
            while True:
                try:
                    # The reopened producer keeps its epoch; the broker refuses that of an older owner (hazard H40).
                    self._producer.reopen(deadline.left())
                    break
                except wire.ProducerFenced as error:
                    raise self._fenced_by_newer(deadline) from error
                except wire.ProducerBusy:
                    if deadline.left() <= _BUSY_PAUSE_SECONDS:
                        raise
                    time.sleep(_BUSY_PAUSE_SECONDS)
        self._producer.forget()
        self._gap = (-1, 0)
        # If the topic was deleted and created again, its epochs have started again, and the broker has accepted ours.
        # Only the records show who the owner is.
        self.check(deadline)

    def check(self, deadline: Deadline) -> None:
        """Raise `Fenced` if a newer owner has written a record, or the fence topic has no records any more."""
        if self._fenced is not None:
            raise self._fresh_copy(self._fenced)
        last = last_fence_record(self._cluster, self.topic, deadline)
        if last is None or last[1].opening != self._opening:
            raise self._fenced_by_newer(deadline)

    def _fenced_by_newer(self, deadline: Deadline) -> Fenced:
        """Return the error that names the newer owner's host, if the newer owner's record can be read.

        The error is kept: this owner stays fenced, even if the topic becomes free again.
        """
        host, is_gone = None, False
        try:
            last = last_fence_record(self._cluster, self.topic, deadline)
            is_gone = last is None
            # Until the newer owner has written its record, its name is not known.
            host = last[1].host if last is not None and last[1].opening != self._opening else None
        except Exception as error:
            _log.debug("the newer owner of %s cannot be read: %s", self._name, error)
        text = f"{self._name} was opened by {host or 'another process'} since: this process must stop"
        if is_gone:
            text = f"the fence topic of {self._name} was deleted: this process must stop"
        self._fenced = Fenced(text, newer=host)
        return self._fresh_copy(self._fenced)

    def _fresh_copy(self, fenced: Fenced) -> Fenced:
        return Fenced(str(fenced), newer=fenced.newer)

    def _trim(self, up_to: wire.MessageId) -> None:
        """Acknowledge the records up to a position, so that the broker can delete them. Errors are only logged."""
        try:
            self._cluster.topics.trim(self.topic, (up_to.ledger, up_to.entry + 1), "trimming", Deadline(1.0))
        except TxnBridgeError as error:
            _log.debug("earlier records on %s are not trimmed: %s", self.topic, error)

    def close(self, deadline: Deadline) -> None:
        """Close the producer, so that the next owner finds the fence topic free."""
        if self._producer is not None:
            self._producer.close(deadline.left())
        self._cluster.client.hang_up(self._connection_key)
