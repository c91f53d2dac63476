"""The publisher: sends without a transaction, each message once and in order; with sequences also over a crash."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from txnbridge import errors
from txnbridge.errors import AccessDenied, EvidenceLost, TxnBridgeError
from txnbridge.spi import Deadline, Ledger, LedgerValue, Publisher, RawHeaders
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import needing, retry_translated, translate
from txnbridge_pulsar.topics import NEEDS_REST
from txnbridge_pulsar.write.message_format import key_hash, key_on_wire, to_properties

# Messages without a key that go to one partition in a row. With sequences, a change waits for all receipts.
_MESSAGES_IN_A_ROW = 1000
_DENIED = (wire.NotAuthorized, wire.NotAuthenticated)


class PulsarPublisher(Publisher):
    """Sends each message immediately. After a message has failed, it refuses all further messages.

    After a lost connection, messages without a receipt are sent again if the broker is known to drop duplicates.
    Otherwise a lost connection is a failure, because the broker may have stored the messages already.
    """

    def __init__(self, cluster: ClusterAccess, name: str | None, ledger_of: Callable[[str], Ledger]) -> None:
        self._cluster = cluster
        self._name = name
        self._ledger_of = ledger_of  # returns the decision log's ledger for an id
        self._lock = threading.Lock()
        self._plain: dict[str, _PartitionProducer] = {}  # by concrete topic
        self._sequenced: dict[str, _SequencedTopic] = {}  # by topic
        self._unkeyed_count = secrets.randbelow(1000) * _MESSAGES_IN_A_ROW
        self._failed: errors.TxnBridgeError | None = None
        self._closed = False

    # --- sending --------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
        sequence: int | None,
        deadline: Deadline,
    ) -> None:
        message = wire.Single(value, key_on_wire(key), to_properties(headers or ()), timestamp)
        with self._lock:
            self._check()
            concrete = self._cluster.topics.require(topic, partition, deadline)
            number = self._choose_partition(key, len(concrete)) if partition is None else partition
            if sequence is None:
                plain = self._producer_of(concrete[number], deadline)
                self._or_fail(lambda: plain.send(message, None, deadline), deadline)
            else:
                sequenced = self._sequenced_topic(topic, deadline)
                self._or_fail(lambda: sequenced.send(number, message, sequence, deadline), deadline)

    def _choose_partition(self, key: bytes | None, count: int) -> int:
        if key is not None:
            return key_hash(key) % count
        self._unkeyed_count += 1
        return self._unkeyed_count // _MESSAGES_IN_A_ROW % count

    def _producer_of(self, concrete: str, deadline: Deadline) -> _PartitionProducer:
        producer = self._plain.get(concrete)
        if producer is None:
            producer = self._plain[concrete] = _PartitionProducer(self._cluster, concrete, None, deadline)
        return producer

    def _sequenced_topic(self, topic: str, deadline: Deadline) -> _SequencedTopic:
        assert self._name is not None
        sequenced = self._sequenced.get(topic)
        if sequenced is None:
            full = self._cluster.settings.namespace.full_name(topic)
            ledger = self._ledger_of(f"sequence/{self._cluster.id}/{full}/{self._name}")
            sequenced = self._sequenced[topic] = _SequencedTopic(self._cluster, topic, self._name, ledger)
        sequenced.open_producers(deadline)
        return sequenced

    # --- receipts and failures ------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline) -> None:
        with self._lock:
            self._check()
            self._settle(deadline)

    def _settle(self, deadline: Deadline) -> None:
        for producer in self._all_producers():
            self._or_fail(lambda producer=producer: producer.settle(deadline), deadline)  # type: ignore[misc]
        for sequenced in self._sequenced.values():
            sequenced.record_stored(deadline, first=True)

    def _all_producers(self) -> list[_PartitionProducer]:
        return [*self._plain.values(), *(producer for each in self._sequenced.values() for producer in each.producers)]

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        with self._lock:
            self._check()
            return self._sequenced_topic(topic, deadline).last_stored

    def _or_fail(self, call: Callable[[], None], deadline: Deadline) -> None:
        try:
            call()
        except _SendFailed as failure:
            cause = failure.__cause__
            for sequenced in self._sequenced.values():
                sequenced.record_failed(deadline)
            kind = errors.AccessDenied if isinstance(cause, _DENIED) else errors.DeliveryFailed
            self._failed = kind(f"a message could not be stored, so later ones in its partition are not: {cause}")
            raise self._failed from cause

    def _check(self) -> None:
        if self._closed:
            raise errors.InvalidState("this publisher is closed")
        if self._failed is not None:
            raise type(self._failed)(str(self._failed)) from self._failed.__cause__

    def close(self, deadline: Deadline) -> None:
        """Flush and close the producers. If the flush fails, drop messages without a receipt, and raise its error."""
        with self._lock:
            if self._closed:
                return
            try:
                self._check()
                self._settle(deadline)
                for sequenced in self._sequenced.values():
                    sequenced.record_stored(deadline)
            finally:
                self._closed = True
                for producer in self._all_producers():
                    producer.close(deadline)


class _SendFailed(Exception):
    """A message may not be stored, so the publisher refuses all further ones. Its `__cause__` is the client's error."""


class _SequencedTopic:
    """The producers of a named publisher on one topic.

    A sequence is the number that the publisher gives a message. The numbers increase over all partitions of the topic,
    while the broker keeps the last sequence of each partition. So a message for another partition waits until all
    earlier messages are stored: then every sequence below the highest stored one is stored in some partition.
    """

    def __init__(self, cluster: ClusterAccess, topic: str, name: str, ledger: Ledger) -> None:
        self._cluster = cluster
        self._topic = topic
        self._name = name
        self._record = SequenceRecord(name, topic, ledger)
        self._is_checked = False
        self._current: _PartitionProducer | None = None
        self._last = -1  # the last sequence that was sent or is stored
        self._checked_partitions = 0  # how many partitions are known to remove duplicates
        self.producers: list[_PartitionProducer] = []

    def open_producers(self, deadline: Deadline) -> None:
        """Open a producer on each partition that has none, also on added partitions.

        Raise `NotSupported` unless the broker is known to drop duplicates on each partition, `EvidenceLost` if the
        broker has forgotten sequences that were stored.
        """
        concrete = self._cluster.topics.concrete(self._topic, deadline)
        for name in concrete[len(self.producers) :]:
            self.producers.append(_PartitionProducer(self._cluster, name, self._name, deadline))
        # A partition counts as checked once its check succeeded: else a call after a failure would send unchecked.
        for name, producer in list(zip(concrete, self.producers, strict=False))[self._checked_partitions :]:
            if not self._cluster.topics.deduplicates(name, deadline):
                raise errors.NotSupported(
                    f"topic {self._topic!r} has no sequences unless its broker is known to remove duplicates there"
                    f" (brokerDeduplicationEnabled). To check that, {NEEDS_REST}"
                )
            producer.wait_for_earlier_writes(deadline)
            self._last = max(self._last, producer.last_stored)
            self._checked_partitions += 1
        if not self._is_checked:
            self._record.check(self._last, deadline)
            self._is_checked = True
            self.record_stored(deadline)

    def record_stored(self, deadline: Deadline, first: bool = False) -> None:
        """Record the highest stored sequence in the decision log; if `first`, only if the log has none yet."""
        if self._is_checked and self.last_stored is not None:
            self._record.record_stored(self.last_stored, deadline, first)

    def record_failed(self, deadline: Deadline) -> None:
        """Record in the decision log which sequence failed first, if any."""
        if failed := [producer.failed for producer in self.producers if producer.failed is not None]:
            self._record.record_failed(min(failed), deadline)

    @property
    def last_stored(self) -> int | None:
        last = max((producer.last_stored for producer in self.producers), default=-1)
        return None if last < 0 else last

    def send(self, number: int, message: wire.Single, sequence: int, deadline: Deadline) -> None:
        if sequence <= self._last:
            return
        producer = self.producers[number]
        if self._current is not None and self._current is not producer:
            self._current.settle(deadline)
        self._current = producer
        producer.send(message, sequence, deadline)
        self._last = sequence


class _PartitionProducer:
    """A publisher's producer on one partition, which reopens after a lost connection.

    After the reopening it sends unconfirmed messages again if the broker drops duplicates.
    """

    def __init__(self, cluster: ClusterAccess, concrete: str, name: str | None, deadline: Deadline) -> None:
        self._cluster = cluster
        self._concrete = concrete
        self._name = name
        self._failure: wire.PulsarError | None = None
        self.failed: int | None = None  # the first sequence that failed
        self._what = f"opening a producer on {concrete}"
        self._open(deadline)

    def _open(self, deadline: Deadline) -> None:
        self._producer = retry_translated(lambda: self._opened(deadline), self._what, deadline, self._as_bridge_error)
        self.last_stored = self._producer.last_sequence_id  # the highest stored sequence; -1 if there is none

    def _opened(self, deadline: Deadline) -> wire.PulsarProducer:
        client, pack = self._cluster.client, self._cluster.settings.pack
        with needing("produce", self._concrete):
            return client.create_producer(self._concrete, timeout=deadline.left(), name=self._name, compression=pack)

    def wait_for_earlier_writes(self, deadline: Deadline) -> None:
        """Wait until earlier messages are stored: brokers report the last sequence that they received, not stored."""
        if self.last_stored >= 0:
            self._cluster.topics.wait_for_writes(self._concrete, deadline)
            self._producer.close(deadline.left())
            self._open(deadline)

    def send(self, message: wire.Single, sequence: int | None, deadline: Deadline) -> None:
        """Send a message; wait only while the queue is full. Raise `_SendFailed` if an earlier message has failed."""
        while True:
            if self._is_interrupted:
                self._recover(deadline)
            self._check()
            try:
                self._producer.send(
                    message,
                    sequence_id=sequence,
                    timeout=deadline.left(),
                    when_done=lambda send: self._note_result(send, again=sequence is not None),
                )
            except wire.BrokerConnectionLost as error:
                if error.may_have_had_effect:
                    return  # the producer keeps the message and sends it later
                if isinstance(error, wire.RequestTimedOut):
                    raise errors.DeadlineExceeded(f"sending to {self._concrete}: {error}") from error
            except wire.PulsarError as error:
                raise translate(error, f"sending to {self._concrete}") from error
            else:
                return

    def _note_result(self, send: wire.Send, again: bool) -> None:
        """Note that a message is stored or has failed. If sent `again`, it may be a duplicate for the broker.

        A lost connection is left to the next `send` or `settle`. The client's reading thread calls this.
        """
        try:
            receipt = send.result(0)
        except wire.BrokerConnectionLost:
            return
        except wire.PulsarError as error:
            if self._failure is None:
                self._failure, self.failed = error, send.sequence_id
            return
        if receipt.duplicate and not again:
            self._failure = self._failure or wire.PulsarError(
                f"the broker dropped a new message to {self._concrete} as a duplicate"
            )
        self.last_stored = max(self.last_stored, send.highest_sequence_id)

    def settle(self, deadline: Deadline) -> None:
        """Wait until all messages are stored. Raise `_SendFailed` if one failed, `DeadlineExceeded` at the deadline."""
        while True:
            if self._is_interrupted:
                self._recover(deadline)
            try:
                self._producer.flush(deadline.left())
            except wire.RequestTimedOut as error:
                raise errors.DeadlineExceeded(f"sending to {self._concrete}: {error}; some may be stored") from error
            self._check()
            if not self._is_interrupted:
                return

    @property
    def _is_interrupted(self) -> bool:
        """Return whether the connection is lost, or messages of a lost connection still have to be sent again."""
        return self._producer.lost is not None or bool(self._producer.unconfirmed)

    def _recover(self, deadline: Deadline) -> None:
        """Reopen the producer, and send messages without a receipt again; fail if the broker may keep duplicates."""
        # One that is not lost was reopened by an earlier call: a broker could confuse a second reopening with that.
        if self._producer.lost is not None:
            reopen = lambda: self._producer.reopen(deadline.left())  # noqa: E731
            retry_translated(reopen, self._what, deadline, self._as_bridge_error)
        if not self._producer.unconfirmed:
            return
        if not self._drops_duplicates(deadline):
            lost = wire.BrokerConnectionLost(
                f"the connection to {self._concrete} was lost before messages had receipts, and it is not known whether"
                " the broker removes duplicates"
            )
            self._failure = self._failure or lost
            return
        try:
            self._producer.resend(deadline.left(), lambda send: self._note_result(send, again=True))
        except wire.RequestTimedOut as error:
            raise errors.DeadlineExceeded(f"sending to {self._concrete}: {error}") from error
        except wire.BrokerConnectionLost:
            return  # the next call finds the connection lost, and resends the rest

    def _drops_duplicates(self, deadline: Deadline) -> bool:
        """Return whether the broker is known to drop messages that this producer sends again."""
        if self._name is not None:
            return True  # `_SequencedTopic.open_producers` has checked it before the first message
        if self.last_stored >= 0:
            return self._producer.last_sequence_id >= self.last_stored
        return self._cluster.topics.deduplicates(self._concrete, deadline)

    def _check(self) -> None:
        if self._failure is not None:
            raise _SendFailed from self._failure

    def _as_bridge_error(self, error: wire.PulsarError, what: str) -> errors.TxnBridgeError:
        if isinstance(error, wire.ProducerBusy):  # also for a moment after a publisher's process died
            return errors.BrokerUnavailable(f"{what}: the name {self._name!r} is in use by another publisher")
        return translate(error, what)

    def close(self, deadline: Deadline) -> None:
        self._producer.close(deadline.left())


_log = logging.getLogger("txnbridge")

# Seconds that a flush waits for the decision log: the messages are stored whether the sequence is recorded or not.
_RECORD_SECONDS = 3.0


class SequenceRecord:
    """The highest sequence in the decision log for one publisher's name and one topic.

    Brokers forget a producer name that is unused for hours, and then answer as if nobody had published under it. A
    publisher that believed this answer would store all its messages again. So each publisher records in the decision
    log, when it begins and when it ends, up to which sequence all messages are stored. A broker that answers with a
    lower sequence has forgotten the name (hazard H58). The broker may have stored higher ones, if the publisher died
    before it recorded them.
    """

    def __init__(self, name: str, topic: str, ledger: Ledger) -> None:
        self._name = name
        self._topic = topic
        self._value = LedgerValue(ledger)
        self._last = -1  # recorded by this process, or read from the log
        self._is_disabled = False

    def check(self, stored: int, deadline: Deadline) -> None:
        """Raise `EvidenceLost` if the broker's last sequence `stored` (-1 for none) is below the recorded one, or not
        below a recorded sequence that failed.
        """
        value: Mapping[str, Any] = {}
        try:
            value = self._value.read(deadline) or value
        except AccessDenied as error:
            self._disable_check(error)
        recorded, failed = int(value.get("stored", -1)), int(value.get("failed", stored + 1))
        if stored < recorded:
            why = (
                f"has stored up to {recorded}, and the broker only knows of {stored if stored >= 0 else 'none'}: it"
                " forgets a name that is unused for hours (brokerDeduplicationProducerInactivityTimeoutMinutes), or the"
                " topic was recreated. Messages that are sent again under this name would be stored twice"
            )
        elif stored >= failed:
            why = f"could not store {failed}, and the broker knows of {stored}: messages in between may be missing"
        else:
            self._last = -1 if "failed" in value else recorded  # `record_stored` replaces a record of failure
            return
        raise EvidenceLost(
            f"sequences of publisher {self._name!r} on topic {self._topic!r}: it {why}. Continue under another name,"
            " after the topic's last message"
        )

    def record_stored(self, stored: int, deadline: Deadline, first: bool) -> None:
        """Record that all messages up to sequence `stored` are stored.

        The next publisher with this name records its own, too. If `first`, record it only if none is recorded.
        """

        def change(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            is_known = value and "failed" not in value and int(value["stored"]) >= stored
            return None if is_known else {"stored": stored}

        if not self._is_disabled and self._last < (0 if first else stored):
            self._update(change, deadline)

    def record_failed(self, sequence: int, deadline: Deadline) -> None:
        """Record that this sequence failed: later ones may be stored nevertheless."""
        self._update(lambda value: {"stored": -1, **(value or {}), "failed": sequence}, deadline)

    def _update(self, change: Callable[[Mapping[str, Any] | None], Any], deadline: Deadline) -> None:
        """Change the record in the decision log; log errors."""
        try:
            value = self._value.update(change, Deadline(min(_RECORD_SECONDS, deadline.left())))
            self._last = int((value or {})["stored"])
        except AccessDenied as error:
            self._disable_check(error)
        except TxnBridgeError as error:
            self._is_disabled = True
            _log.debug("the last sequence of publisher %r on %s is not recorded: %s", self._name, self._topic, error)

    def _disable_check(self, error: AccessDenied) -> None:
        self._is_disabled = True
        _log.warning(
            "publisher %r: it will not be noticed if the broker forgets its sequences on %s: %s",
            *(self._name, self._topic, error),
        )
