"""Sends without a transaction: each message once and in order, by sequence also across crashes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    DeadlineExceeded,
    DeliveryFailed,
    InvalidOption,
    InvalidState,
    NotSupported,
    TxnBridgeError,
)
from txnbridge.spi import Deadline, Ledger, Publisher, RawHeaders
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import again, needing, translate
from txnbridge_pulsar.topics import NEEDS_REST
from txnbridge_pulsar.write.message_format import key_hash, to_properties, wire_key
from txnbridge_pulsar.write.sequences import SequenceRecord

# So many messages without a key go to one partition in a row: with sequences, a change waits until all are stored.
_A_TURN = 1000
_DENIED = (wire.NotAuthorized, wire.NotAuthenticated)


class PulsarPublisher(Publisher):
    """Sends at once. After a failure nothing more is taken.

    When a connection is lost, messages without a receipt are sent again where it is known that the broker drops
    duplicates. Elsewhere the loss is a failure, because they may be stored.
    """

    def __init__(self, cluster: ClusterAccess, name: str | None, ledger_of: Callable[[str], Ledger]) -> None:
        self._cluster = cluster
        self._name = name
        self._ledger_of = ledger_of  # the ledger of any id
        self._lock = threading.Lock()
        self._plain: dict[str, _PartitionProducer] = {}  # by concrete topic
        self._sequenced: dict[str, _SequencedTopic] = {}  # by topic
        self._turn = secrets.randbelow(1000) * _A_TURN
        self._failed: TxnBridgeError | None = None
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
        message = wire.Single(value, wire_key(key), to_properties(headers or ()), timestamp)
        with self._lock:
            self._check()
            concrete = self._cluster.topics.require(topic, partition, deadline)
            number = self._chosen(key, len(concrete)) if partition is None else partition
            if sequence is None:
                self._watched(lambda: self._line(concrete[number], deadline).send(message, None, deadline))
            else:
                sequenced = self._sequenced_topic(topic, deadline)
                self._watched(lambda: sequenced.send(number, message, sequence, deadline))

    def _chosen(self, key: bytes | None, count: int) -> int:
        if key is not None:
            return key_hash(key) % count
        self._turn += 1
        return self._turn // _A_TURN % count

    def _line(self, concrete: str, deadline: Deadline) -> _PartitionProducer:
        found = self._plain.get(concrete)
        if found is None:
            found = self._plain[concrete] = _PartitionProducer(self._cluster, concrete, None, deadline)
        return found

    def _sequenced_topic(self, topic: str, deadline: Deadline) -> _SequencedTopic:
        if self._name is None:
            raise InvalidOption("a sequence belongs to a publisher with a name: bridge.publisher(name)")
        found = self._sequenced.get(topic)
        if found is None:
            full = self._cluster.settings.namespace.full_name(topic)
            ledger = self._ledger_of(f"sequence/{self._cluster.id}/{full}/{self._name}")
            found = self._sequenced[topic] = _SequencedTopic(self._cluster, topic, self._name, ledger)
        found.look(deadline)
        return found

    # --- what became of it ----------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline) -> None:
        with self._lock:
            self._check()
            self._settle(deadline)

    def _settle(self, deadline: Deadline) -> None:
        for line in self._lines():
            self._watched(lambda line=line: line.settle(deadline))  # type: ignore[misc]
        for sequenced in self._sequenced.values():
            sequenced.note_first(deadline)

    def _lines(self) -> list[_PartitionProducer]:
        return [*self._plain.values(), *(line for each in self._sequenced.values() for line in each.lines)]

    def last_sequence(self, topic: str, deadline: Deadline) -> int | None:
        with self._lock:
            self._check()
            return self._sequenced_topic(topic, deadline).last_stored

    def _watched(self, call: Callable[[], None]) -> None:
        try:
            call()
        except _SendFailed as failure:
            cause = failure.cause
            kind = AccessDenied if isinstance(cause, _DENIED) else DeliveryFailed
            self._failed = kind(f"a message could not be stored, and nothing after it in its partition is: {cause}")
            raise self._failed from cause

    def _check(self) -> None:
        if self._closed:
            raise InvalidState("this publisher is closed")
        if self._failed is not None:
            raise type(self._failed)(str(self._failed)) from self._failed.__cause__

    def close(self, deadline: Deadline) -> None:
        """As the contract says. Raises the errors of `flush`; messages that are not stored then are given up."""
        with self._lock:
            if self._closed:
                return
            try:
                self._check()
                self._settle(deadline)
                for sequenced in self._sequenced.values():
                    sequenced.note(deadline)
            finally:
                self._closed = True
                for line in self._lines():
                    line.close(deadline)


class _SendFailed(Exception):
    """The failure that ends a publisher; `cause` is the client's own error."""

    def __init__(self, cause: wire.PulsarError) -> None:
        super().__init__(cause)
        self.cause = cause


class _SequencedTopic:
    """One topic under a publisher's name, whose sequences are counted over all its partitions.

    Each partition counts for itself. So a message for another partition waits until all messages before it are stored:
    then every sequence below the highest one of any partition is stored somewhere.
    """

    def __init__(self, cluster: ClusterAccess, topic: str, name: str, ledger: Ledger) -> None:
        self._cluster = cluster
        self._topic = topic
        self._name = name
        self._record = SequenceRecord(name, topic, ledger)
        self._is_checked = False
        self._current: _PartitionProducer | None = None
        self._last = -1  # stored or on its way
        self._settled = 0  # lines of which it is known that the broker removes duplicates there
        self.lines: list[_PartitionProducer] = []

    def look(self, deadline: Deadline) -> None:
        """Open the partitions that are not open yet: some may have been added."""
        concrete = self._cluster.topics.concrete(self._topic, deadline)
        for name in concrete[len(self.lines) :]:
            self.lines.append(_PartitionProducer(self._cluster, name, self._name, deadline))
        # Asked by each call until it is known that duplicates are removed: else the next call would send without.
        for name, line in list(zip(concrete, self.lines, strict=False))[self._settled :]:
            if not self._cluster.topics.deduplicates(name, deadline):
                raise NotSupported(
                    f"sequences on topic {self._topic!r} are not kept, as far as can be told: the broker has to remove"
                    f" duplicates there (brokerDeduplicationEnabled). To be told, {NEEDS_REST}"
                )
            self._last = max(self._last, line.last_stored)
            self._settled += 1
        if not self._is_checked:
            self._record.check(self._last, deadline)
            self._is_checked = True
            self.note(deadline)

    def note(self, deadline: Deadline) -> None:
        """Have the decision log know what is stored."""
        if self._is_checked and self.last_stored is not None:
            self._record.note(self.last_stored, deadline)

    def note_first(self, deadline: Deadline) -> None:
        """The same, if it knows nothing yet."""
        if self._is_checked and self.last_stored is not None:
            self._record.note_first(self.last_stored, deadline)

    @property
    def last_stored(self) -> int | None:
        found = max((line.last_stored for line in self.lines), default=-1)
        return None if found < 0 else found

    def send(self, number: int, message: wire.Single, sequence: int, deadline: Deadline) -> None:
        if sequence <= self._last:
            return
        line = self.lines[number]
        if self._current is not None and self._current is not line:
            self._current.settle(deadline)
        self._current = line
        line.send(message, sequence, deadline)
        self._last = sequence


class _PartitionProducer:
    """One producer on one concrete topic."""

    def __init__(self, cluster: ClusterAccess, concrete: str, name: str | None, deadline: Deadline) -> None:
        self._cluster = cluster
        self._concrete = concrete
        self._name = name
        self._failure: wire.PulsarError | None = None
        self._stored = -1  # the highest number with a receipt
        self._producer = again(lambda: self._opened(deadline), self._in_our_words, deadline)

    def _opened(self, deadline: Deadline) -> wire.PulsarProducer:
        pack = self._cluster.settings.pack
        with needing("produce", self._concrete):
            return self._cluster.client.create_producer(
                self._concrete, timeout=deadline.left(), name=self._name, compression=pack
            )

    @property
    def last_stored(self) -> int:
        """The highest number that is known to be stored; -1 if there is none."""
        return max(self._stored, self._producer.last_sequence_id)

    def send(self, message: wire.Single, sequence: int | None, deadline: Deadline) -> None:
        """Put a message on its way; waits for room only. Raises `_Failure`, also of an earlier one."""
        while True:
            if self._is_interrupted:
                self._recover(deadline)
            self._check()
            try:
                self._producer.send(
                    message,
                    sequence_id=sequence,
                    timeout=deadline.left(),
                    when_done=lambda send: self._became(send, again=sequence is not None),
                )
            except wire.BrokerConnectionLost as error:
                if error.may_have_had_effect:
                    return  # the rest of it goes out later, or it is among those that are sent again
                if isinstance(error, wire.RequestTimedOut):
                    raise DeadlineExceeded(f"sending to {self._concrete}: {error}") from error
            except wire.PulsarError as error:
                raise translate(error, f"sending to {self._concrete}") from error
            else:
                return

    def _became(self, send: wire.Send, again: bool) -> None:
        """Called by the thread that reads receipts. The next `send` or `settle` looks after a lost connection."""
        try:
            receipt = send.result(0)
        except wire.BrokerConnectionLost:
            return
        except wire.PulsarError as error:
            self._failure = self._failure or error
            return
        if receipt.duplicate and not again:
            self._failure = self._failure or wire.PulsarError(
                f"the broker dropped a new message to {self._concrete} as if it had it already"
            )
        self._stored = max(self._stored, send.highest_sequence_id)

    def settle(self, deadline: Deadline) -> None:
        """Return when all is stored. Raises `_Failure`, and `DeadlineExceeded`: then it goes on."""
        while True:
            if self._is_interrupted:
                self._recover(deadline)
            try:
                self._producer.flush(deadline.left())
            except wire.RequestTimedOut as error:
                raise DeadlineExceeded(f"sending to {self._concrete}: {error}; they may yet be stored") from error
            self._check()
            if not self._is_interrupted:
                return

    @property
    def _is_interrupted(self) -> bool:
        """Whether the connection was lost, or messages were on their way by then that have not been sent again: it was
        opened anew, and then something else failed.
        """
        return self._producer.lost is not None or bool(self._producer.unconfirmed)

    def _recover(self, deadline: Deadline) -> None:
        """Open again, and send messages without a receipt once more, where that makes no copies."""
        if self._producer.lost is not None:  # else that was done, and a broker may take a second time for the first
            again(lambda: self._producer.reopen(deadline.left()), self._in_our_words, deadline)
        if not self._producer.unconfirmed:
            return
        if not self._is_remembered(deadline):
            lost = wire.BrokerConnectionLost(
                f"the connection to {self._concrete} was lost with messages on their way, and it is not known that the"
                " broker removes duplicates"
            )
            self._failure = self._failure or lost
            return
        try:
            self._producer.resend(deadline.left(), lambda send: self._became(send, again=True))
        except wire.RequestTimedOut as error:
            raise DeadlineExceeded(f"sending to {self._concrete}: {error}") from error
        except wire.BrokerConnectionLost:
            return  # the next call finds the connection lost, and sends the rest

    def _is_remembered(self, deadline: Deadline) -> bool:
        """Whether the broker remembers what this producer has sent, and so drops copies."""
        if self._name is not None:
            return True  # that was asked before its first message
        if self._stored >= 0:
            return self._producer.last_sequence_id >= self._stored
        return self._cluster.topics.deduplicates(self._concrete, deadline)

    def _check(self) -> None:
        if self._failure is not None:
            raise _SendFailed(self._failure)

    def _in_our_words(self, error: wire.PulsarError) -> TxnBridgeError:
        what = f"opening a producer on {self._concrete}"
        if isinstance(error, wire.ProducerBusy):  # for a moment also after its process died
            return BrokerUnavailable(f"{what}: the name {self._name!r} is in use by another publisher")
        return translate(error, what)

    def close(self, deadline: Deadline) -> None:
        self._producer.close(deadline.left())
