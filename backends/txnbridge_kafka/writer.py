"""One writer: a transactional producer, thrown away whenever a request of it may still be on its way."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    Conflict,
    DeliveryFailed,
    EvidenceLost,
    Fenced,
    InvalidOption,
    NotFound,
    OutcomeUnknown,
    TransactionAborted,
    TransactionTimedOut,
    TxnBridgeError,
)
from txnbridge.spi import (
    Begin,
    Deadline,
    Evidence,
    Item,
    Partition,
    Position,
    RawHeaders,
    TokenState,
    Writer,
    encode_item,
)
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.endings import plain_status
from txnbridge_kafka.errors import translate
from txnbridge_kafka.mending import mend
from txnbridge_kafka.owner import OPEN, SETTLED, Owner
from txnbridge_kafka.producer import LEAST_TIMEOUT_MS, TransactionalProducer
from txnbridge_kafka.reader import AckContext
from txnbridge_kafka.requests import Described
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition

_log = logging.getLogger("txnbridge")

# A transaction whose time is over must still be told aborted: for that an abort may go on for so long.
_ABORT_GRACE = 2.0
# What is still on its way when a transaction aborts makes its writer doubtful (a new one takes 0.3 s), so it is sent
# first, unless that takes longer than this.
_FLUSH_BEFORE_ABORT = 0.5
# The coordinator ends a transaction within milliseconds.
_MOMENT = 0.01
# One turn of waiting for room in the client's buffer.
_ROOM_SECONDS = 0.05

_GROUP_MOVED_ON = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}
_FENCED = {
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
}


class KafkaWriter(Writer):
    """A writer under one transactional id of Kafka's, opened when it is first used or by `open`."""

    def __init__(self, cluster: Cluster, owner: Owner, id: str, timeout_ms: int) -> None:
        self.id = id
        self._cluster = cluster
        self._owner = owner
        self._timeout_ms = max(timeout_ms, LEAST_TIMEOUT_MS)
        self._producer: TransactionalProducer | None = None
        self._stale = ""  # why the producer is not used for another transaction
        self._opened: Described | None = None  # what the coordinator said right after the id was opened
        self._begun_under: Described | None = None  # the same, of the opening that the last transaction is in
        self.past: Described | None = None  # and before
        self._unknown = False  # whether a token was given out whose only evidence is at the coordinator
        self._log: Mapping[str, Any] | None = None
        self._partitions: dict[str, int] = {}  # of the topics that were looked at since the id was opened
        self._mended_groups: set[str] = set()
        self._acks: dict[str, tuple[AckContext, dict[Partition, int]]] = {}
        self._messages = 0
        self._asked = False  # whether a commit was asked for, of which everything was stored

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline) -> None:
        """Open the id: what another process had open under it is aborted, and it is fenced."""
        # A process that slept since it looked would fence the owner that has come meanwhile.
        self._owner.check(deadline)
        producer = TransactionalProducer(self._cluster.settings, self.id, self._timeout_ms)
        with self._cluster.events.step("step:open", id=self.id):
            producer.open(deadline)
        found = self._cluster.requests.describe([self.id], deadline).get(self.id)
        # If somebody else opened the id after us, this is what they got: then the log names them as its owner.
        self._owner.check(deadline)
        if found is None:
            raise BrokerUnavailable(f"the coordinator does not know {self.id}, which was just opened; try again")
        self._producer, self._opened, self._stale = producer, found, ""
        self._partitions.clear()
        self._mended_groups.clear()

    def reopen(self, deadline: Deadline) -> None:
        self._unknown = True  # somebody may hold a token of the last transaction
        self._reopen(deadline)

    def _reopen(self, deadline: Deadline) -> None:
        self._owner.check(deadline)
        self._drop()
        if self._opened is not None:
            self._end_leftover(self._opened, deadline)
        self._unknown = False
        topics, groups = list(self._partitions), list(self._mended_groups)
        self.open(deadline)
        # Where this writer was at work before: what a killed broker forgot there holds readers and groups back now.
        for topic in topics:
            self._look_at(topic, None, deadline)
        for group in groups:
            self._mend_group(group, deadline)

    def _end_leftover(self, opened: Described, deadline: Deadline) -> None:
        """End what is open, and keep what a token may be asked about: opening the id destroys that evidence."""
        self.past = found = end_if_open(self._cluster, self.id, deadline, only=opened)
        if self._unknown and found is not None and found.pid == opened.pid:
            try:
                self._owner.open_once(deadline)
                self._owner.note_outcome(found, deadline)
            except AccessDenied as error:
                # Going on is worth more than what a token, if there is one, can be told later: UNKNOWN, for good.
                _log.warning("what became of the last transaction of %s cannot be recorded: %s", self.id, error)

    def _ready(self, deadline: Deadline) -> TransactionalProducer:
        # Also what happened since the last transaction: a broker that went away meanwhile may have forgotten its end.
        if self._producer is None or self._stale or self._producer.doubt():
            self._reopen(deadline)
        assert self._producer is not None
        return self._producer

    # --- one transaction ------------------------------------------------------------------------------------------

    def begin(self, begin: Begin) -> None:
        producer = self._ready(begin.deadline)
        if self._owner.opening is not None:
            self._log = self._where_evidence_begins(begin.deadline)
        if producer.begin() is not None:
            # It was fenced, or its last transaction timed out at the broker: whether the id is still ours shows now.
            self._reopen(begin.deadline)
            producer = self._ready(begin.deadline)
            if error := producer.begin():
                raise translate(error, f"beginning a transaction on {self.id}") from KafkaException(error)
        self._begun = begin
        self._begun_under = self._opened
        self._produce = producer.produce
        self._acks = {}
        self._messages = 0
        self._acknowledged = self._asked = False

    def _where_evidence_begins(self, deadline: Deadline) -> Mapping[str, Any]:
        try:
            return self._owner.ledger.begin(deadline)
        except EvidenceLost:
            raise
        except OutcomeUnknown as error:
            # It is unknown whether a record was stored that nobody needs; of the transaction nothing is.
            raise BrokerUnavailable(f"the transaction did not begin: {error}") from error

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: RawHeaders | None,
        partition: int | None,
        timestamp: int | None,
    ) -> None:
        if topic not in self._partitions or (partition is not None and partition >= self._partitions[topic]):
            self._look_at(topic, partition, self._begun.deadline)
        try:
            if headers is None and partition is None and timestamp is None:
                self._produce(topic, value, key)
            else:
                self._produce(
                    topic,
                    value,
                    key,
                    partition=-1 if partition is None else partition,
                    timestamp=_timestamp(timestamp),
                    headers=list(headers or ()),
                )
        except BufferError:
            self._wait_for_room()
            self.send(topic, value, key, headers, partition, timestamp)
            return
        except KafkaException as error:
            raise self._refused(error, topic) from error
        self._messages += 1

    def send_many(self, topic: str, items: Iterable[Item]) -> None:
        if topic not in self._partitions:
            self._look_at(topic, None, self._begun.deadline)
        produce = self._produce
        count = 0
        try:
            for item in items:
                if item.__class__ is bytes:
                    try:
                        produce(topic, item)
                    except BufferError:
                        self._wait_for_room()
                        produce(topic, item)
                    count += 1
                else:
                    value, key, headers = encode_item(item)
                    self.send(topic, value, key, headers, None, None)
        except KafkaException as error:
            raise self._refused(error, topic) from error
        finally:
            self._messages += count

    def _look_at(self, topic: str, partition: int | None, deadline: Deadline) -> None:
        """Before the first message to a topic: does it exist, and did the broker forget markers of ours there?"""
        if partition is not None and partition < 0:
            raise NotFound(f"{topic}[{partition}]: partitions are numbered from 0")
        count = self._cluster.topics.partitions(topic, deadline, at_least=(partition or 0) + 1)
        if partition is not None and partition >= count:
            raise NotFound(f"{topic} has {count} partitions, so there is no partition {partition}")
        if topic not in self._partitions:
            self._mend([(topic, number) for number in range(count)], deadline)
        elif self._producer is not None:
            self._producer.look_at(topic, deadline)  # it has grown since
        self._partitions[topic] = count

    def _mend(self, partitions: Sequence[Partition], deadline: Deadline) -> None:
        if self.past is not None:
            assert self._opened is not None
            mend(self._cluster, self._owner, self._opened, self.past, partitions, deadline)

    def _mend_group(self, group: str, deadline: Deadline) -> None:
        if self.past is not None:
            count = self._cluster.topics.partitions(OFFSETS_TOPIC, deadline)
            self._mend([offsets_partition(group, count)], deadline)
        self._mended_groups.add(group)

    def _wait_for_room(self) -> None:
        assert self._producer is not None
        self._begun.deadline.check("waiting for the broker to take messages")
        self._producer.poll(min(_ROOM_SECONDS, self._begun.deadline.left()))
        if self._producer.failures:
            raise _delivery_failed(self._producer.failures[0])

    def _refused(self, error: KafkaException, topic: str) -> TxnBridgeError:
        found: KafkaError = error.args[0]
        if found.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return InvalidOption(f"a message to {topic} is larger than the client's bound (message.max.bytes)")
        if found.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
            return NotFound(f"{topic} or the partition does not exist: {found.str()}")
        if found.code() in _FENCED or found.fatal():
            self._stale = found.str()
        return DeliveryFailed(f"a message to {topic} was refused: {found.str()}")

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert isinstance(context, AckContext)
        _, offsets = self._acks.setdefault(context.group, (context, {}))
        self._acks[context.group] = context, offsets
        for partition, acked in positions.items():
            # A group has one position a partition: the next to read.
            offsets[partition] = max(offsets.get(partition, 0), max(acked)[0] + 1)

    def _send_acks(self, producer: TransactionalProducer, deadline: Deadline) -> None:
        for group, (context, offsets) in self._acks.items():
            if group not in self._mended_groups:
                self._mend_group(group, deadline)
            wanted = [TopicPartition(topic, number, offset) for (topic, number), offset in offsets.items()]
            with self._cluster.events.step("step:acks", self._begun.transaction, group=group):
                error = producer.send_offsets(wanted, context.metadata, deadline)
            if error is None:
                continue
            if error.code() in _GROUP_MOVED_ON:
                raise Conflict(
                    f"group {group} has given these partitions to other members: {error.str()}"
                ) from KafkaException(error)
            if error.code() in _FENCED or error.fatal():
                raise self._lost(error, deadline)
            raise translate(error, f"acknowledging for group {group}") from KafkaException(error)
        self._acknowledged = self._acknowledged or bool(self._acks)
        self._acks = {}

    def flush(self, deadline: Deadline) -> None:
        assert self._producer is not None
        error = self._producer.flush(deadline)
        if error is not None:
            raise self._not_stored(error, deadline) from KafkaException(error)

    def evidence(self) -> Evidence:
        under = self._begun_under
        how: dict[str, Any] = {"id": self.id, "asked": self._asked}
        if under is not None:
            how |= {"pid": under.pid, "epoch": under.epoch}
        if self._owner.opening is not None:
            how["opening"] = self._owner.opening
        return Evidence(how, self._messages, log=self._log)

    # --- ending ---------------------------------------------------------------------------------------------------

    def prepare(self, deadline: Deadline) -> None:
        raise NotImplementedError("a plain writer is never asked to prepare")

    def commit(self, deadline: Deadline) -> None:
        assert self._producer is not None
        self._store(self._producer, deadline)
        # If anything was stored, the coordinator's state is this transaction's own and not the previous one's.
        self._asked = bool(self._messages or self._acknowledged)
        with self._cluster.events.step("step:commit", self._begun.transaction):
            error = self._producer.commit(deadline)
        self._stale = self._producer.doubt()
        if error is None:
            return
        self._stale = self._stale or error.str()
        if error.retriable():
            self._unknown = True
            raise OutcomeUnknown(f"the broker did not answer the commit: {error.str()}") from KafkaException(error)
        self._settle(error, deadline)

    def _store(self, producer: TransactionalProducer, deadline: Deadline) -> None:
        """Acknowledge and flush; on any trouble the transaction is aborted here, or is left for `abort`."""
        deadline.check("the transaction")
        try:
            self._send_acks(producer, deadline)
            self.flush(deadline)
        except (TransactionAborted, Fenced):
            self.abort(deadline)
            raise

    def _settle(self, error: KafkaError, deadline: Deadline) -> None:
        """The broker refused a commit. What is true is what its coordinator says."""
        self._unknown = True
        try:
            # If it is open still, the refusal came before any decision; no request of this producer may follow now.
            self._drop()
            assert self._opened is not None
            end_if_open(self._cluster, self.id, deadline, only=self._opened)
            status = plain_status(self._cluster.requests, self._owner.ledger, self.evidence().how, deadline)
        except BrokerUnavailable as unreachable:
            raise OutcomeUnknown(f"the broker does not say what became of the commit: {unreachable}") from unreachable
        if status.state is TokenState.COMMITTED:
            return
        if status.state is TokenState.ABORTED:
            raise self._why_aborted(error, deadline) from KafkaException(error)
        kind = EvidenceLost if status.permanent else OutcomeUnknown
        raise kind(f"the broker refused the commit ({error.str()}): {status.reason}") from KafkaException(error)

    def _why_aborted(self, error: KafkaError, deadline: Deadline) -> TxnBridgeError:
        if error.code() in _GROUP_MOVED_ON:
            return Conflict(f"the group has moved on: {error.str()}")
        if error.code() in _FENCED or error.fatal():
            return self._lost(error, deadline)
        return TransactionAborted(f"the broker refused the commit: {error.str()}")

    def _lost(self, error: KafkaError, deadline: Deadline) -> TxnBridgeError:
        """The broker shut this producer out: another owner, or the transaction was ended without us."""
        self._stale = error.str()
        try:
            self._owner.check(deadline)
        except Fenced as fenced:
            return fenced
        if self._begun.deadline.expired:
            return TransactionTimedOut(f"the transaction was aborted because its time was over: {error.str()}")
        return TransactionAborted(f"the broker or an administrator ended the transaction: {error.str()}")

    def _not_stored(self, error: KafkaError, deadline: Deadline) -> TxnBridgeError:
        self._stale = self._stale or error.str()
        if error.code() in _FENCED or error.fatal():
            return self._lost(error, deadline)
        return _delivery_failed(error)

    def abort(self, deadline: Deadline) -> None:
        if deadline.left() < _ABORT_GRACE:
            deadline = Deadline(_ABORT_GRACE)
        producer = self._producer
        if producer is None:
            return
        if not self._stale:
            with suppress(BrokerUnavailable):
                producer.flush(Deadline(min(_FLUSH_BEFORE_ABORT, deadline.left())))
            if producer.abort(Deadline(deadline.left() / 2)) is None:
                self._stale = producer.doubt()
                return
        self._stale = self._stale or producer.doubt() or "an abort failed"
        self._abort_from_outside(deadline)

    def _abort_from_outside(self, deadline: Deadline) -> None:
        """Whatever the client thinks: ask the coordinator to abort, if the transaction is still open there."""
        self._drop()
        assert self._opened is not None
        try:
            end_if_open(self._cluster, self.id, deadline, only=self._opened)
        except BrokerUnavailable as error:
            raise OutcomeUnknown(f"the broker did not answer the abort: {error}") from error

    def close(self) -> None:
        """Let go; what is open dies by its timeout, or when the id is opened again."""
        self._drop()

    def _drop(self) -> None:
        if self._producer is not None:
            self._producer.drop()
            self._producer = None


def end_if_open(cluster: Cluster, id: str, deadline: Deadline, only: Described | None = None) -> Described | None:
    """Abort what an id has open, and say what its last transaction came to; None for an id never used.

    `only`: leave it alone unless it is open under this producer id and epoch; anything else is a newer owner's.
    """
    while True:
        found = cluster.requests.describe([id], deadline).get(id)
        if found is None or found.state in SETTLED:
            return found
        if only is not None and (found.pid, found.epoch) != (only.pid, only.epoch):
            return found
        if found.state == OPEN:
            with cluster.events.step("step:end", id=id, decision="abort"):
                ended = cluster.requests.end(id, found.pid, found.epoch, False, deadline)
            if ended.code == 0:
                # With the epoch that it had: ending it may have raised that, and tokens know the one before.
                return replace(found, state="CompleteAbort")
        deadline.check(f"waiting until the coordinator has ended the last transaction of {id}")
        time.sleep(_MOMENT)


def _timestamp(timestamp: int | None) -> int:
    if timestamp is None:
        return 0  # the client puts the present time
    if timestamp < 1:
        raise InvalidOption(f"a timestamp is milliseconds since 1970, at least 1, not {timestamp}")
    return timestamp


def _delivery_failed(error: KafkaError) -> DeliveryFailed:
    failed = DeliveryFailed(f"a message could not be stored: {error.str()} ({error.name()})")
    failed.__cause__ = KafkaException(error)
    return failed
