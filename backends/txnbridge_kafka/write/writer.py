"""One writer: it writes one transaction after another under one transactional id of Kafka."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import itemgetter, length_hint
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge import errors
from txnbridge.spi import (
    Begin,
    Deadline,
    Evidence,
    Partition,
    Position,
    Raw,
    RawHeaders,
    TokenState,
    Writer,
    encode_item,
)
from txnbridge_kafka.client.librdkafka import milliseconds, sendable, too_large
from txnbridge_kafka.client.protocol_types import TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import ENDED, ends_producer, failure, translate
from txnbridge_kafka.outcome.outcome import plain_status
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition
from txnbridge_kafka.write.acks import KafkaAckContext, check_topics
from txnbridge_kafka.write.owner import KafkaOwner, evidence_key
from txnbridge_kafka.write.producer import TransactionalProducer
from txnbridge_kafka.write.replaceable_producer import ProducerSession

_log = logging.getLogger("txnbridge")

# The least time for an abort, also after the transaction's deadline: the caller must learn that it is aborted.
_SHORTEST_ABORT = 2.0
# The longest flush before an abort: a Produce request under way may arrive late, and the producer must be replaced.
_FLUSH_BEFORE_ABORT = 0.5
# How many messages are passed to the client at a time, in half a millisecond. No other Python thread runs meanwhile.
_SENT_AT_ONCE = 1000
_PLAIN = {bytes, type(None)}  # the types of values and keys that need no conversion


class KafkaWriter(Writer):
    """A writer with one transactional id of Kafka, which is opened at its first use or by `open`."""

    not_taken = (KeyError, TypeError, BufferError, KafkaException)

    def __init__(self, cluster: KafkaCluster, owner: KafkaOwner, id: str, timeout_ms: int) -> None:
        self.session = ProducerSession(cluster, owner, id, timeout_ms)
        self.quick: dict[str, Callable[..., object]] = self.session.quick
        self._cluster = cluster
        self._owner = owner
        self._begun_under: TransactionDescription | None = None  # the id's description when the transaction began
        self._unknown = False  # whether only the coordinator has the outcome of a transaction with a token
        self._log: Mapping[str, Any] | None = None
        self._partitions: dict[str, int] = {}  # by topic that was checked since the id was opened: its partitions
        self._checked_groups: set[str] = set()
        self._acks: dict[str, tuple[KafkaAckContext, dict[Partition, int]]] = {}
        self._asked = False  # whether the commit was requested
        self._start: int | None = None  # the transaction's start time, if it was looked up at the coordinator

    @property
    def id(self) -> str:
        return self.session.id

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline) -> None:
        """Open the id: the coordinator fences any other process with it, and aborts that process's transaction."""
        self.session.open(deadline)
        self._partitions.clear()
        self._checked_groups.clear()

    def reopen(self, deadline: Deadline) -> None:
        self._unknown = True  # the application may have kept a token of the last transaction
        self._reopen(deadline)

    def _reopen(self, deadline: Deadline) -> None:
        self.session.check_owner(deadline)
        self.session.drop()
        if self.session.opened is not None:
            self._end_leftover(deadline)
        self._unknown = False
        # Each topic and group is checked again before its next use, so a deleted topic fails no other transaction.
        self.open(deadline)

    def _end_leftover(self, deadline: Deadline) -> None:
        """Abort the transaction that an earlier owner, or this writer before a failure, left open under the id.

        Record the outcome of the id's last transaction if a token of that transaction may exist (hazard H18).
        """
        self.session.previous_transaction = self.session.end_if_open(deadline)
        if self._unknown and self._asked and not self._owner.denied:
            try:
                self._owner.open_once(deadline)
                self._record_outcome(deadline)
            except errors.AccessDenied as error:
                # The writer continues. The status of the last transaction's token, if there is one, is UNKNOWN.
                self.session.unrecorded = True
                _log.warning("the outcome of the last transaction of %s cannot be recorded: %s", self.id, error)

    def _record_outcome(self, deadline: Deadline) -> None:
        how = self.evidence().how
        status = plain_status(self._cluster, self._owner.ledger, how, deadline)
        self.session.unrecorded = status.state is TokenState.UNKNOWN
        if not self.session.unrecorded:
            key = evidence_key(self.id, how["pid"], f"epoch {how['epoch']}")
            self._owner.record_outcome(key, status.state is TokenState.COMMITTED, deadline)

    def _ready(self, deadline: Deadline) -> TransactionalProducer:
        if not self.session.is_usable(deadline):
            self._reopen(deadline)
        return self._producer()

    def _producer(self) -> TransactionalProducer:
        assert self.session.producer is not None
        return self.session.producer

    # --- sending --------------------------------------------------------------------------------------------------

    def begin(self, begin: Begin) -> None:
        if (needed := int(begin.deadline.seconds * 1000)) > self.session.timeout_ms:
            before, self.session.timeout_ms = self.session.timeout_ms, needed
            try:
                self._reopen(begin.deadline)  # the broker takes a time-out only when an id is opened (hazard H25)
            except errors.InvalidOption:  # the broker refuses it
                self.session.timeout_ms = before
                raise
        producer = self._ready(begin.deadline)
        if self._owner.opening is not None:
            self._log = self._evidence_log(begin.deadline)
        if producer.begin() is not None:
            # The producer was fenced, or its last transaction timed out. Reopening raises `Fenced` for a newer owner.
            self._reopen(begin.deadline)
            producer = self._ready(begin.deadline)
            if error := producer.begin():
                raise translate(error, f"beginning a transaction on {self.id}") from KafkaException(error)
        self._begun = begin
        self._begun_under = self.session.opened
        self._acks = {}
        self.messages = 0
        self._acknowledged = self._asked = False
        self._start = None

    def _evidence_log(self, deadline: Deadline) -> Mapping[str, Any]:
        try:
            return self._owner.ledger.begin(deadline)
        except errors.EvidenceLost:
            raise
        except errors.OutcomeUnknown as error:
            # The ledger may have stored a record that is not needed. Nothing of the transaction is stored.
            raise errors.BrokerUnavailable(f"the transaction did not begin: {error}") from error

    def send(
        self, topic: str, value: Raw, key: Raw, headers: RawHeaders | None, partition: int | None, timestamp: int | None
    ) -> None:
        if topic not in self._partitions or (partition is not None and not 0 <= partition < self._partitions[topic]):
            self._check_topic(topic, partition, self._begun.deadline)
        where: dict[str, Any] = {}
        if headers is not None or partition is not None or timestamp is not None:
            where = {
                "partition": -1 if partition is None else partition,
                "timestamp": milliseconds(timestamp),
                "headers": sendable(headers),
            }
        while True:
            try:
                self.quick[topic](topic, value, key, **where)
            except BufferError:
                self._wait_for_buffer_space()
            except KafkaException as error:
                raise self._refused(error, topic) from error
            else:
                break
        self.messages += 1

    def send_many(self, topic: str, items: Iterable[Any]) -> None:
        if topic not in self._partitions:
            self._check_topic(topic, None, self._begun.deadline)
        if isinstance(items, list | tuple):
            for start in range(0, len(items), _SENT_AT_ONCE):
                self._send_chunk(topic, items[start : start + _SENT_AT_ONCE])
        else:
            self._send_each(topic, items)

    def _send_chunk(self, topic: str, items: Sequence[Any]) -> None:
        """Send items. A loop in C sends items that need no conversion: for small messages it saves 20 % of CPU time."""
        done = 0
        if columns := _columns(items):
            left = iter(columns[0])
            try:
                deque(map(self.quick[topic], repeat(topic), left, *columns[1:]), maxlen=0)
                done = len(items)
            except self.not_taken:
                done = len(items) - length_hint(left) - 1
            self.messages += done
        self._send_each(topic, items[done:])

    def _send_each(self, topic: str, items: Iterable[Any]) -> None:
        for item in items:
            if item.__class__ is bytes:
                self.send(topic, item, None, None, None, None)
            else:
                value, key, headers = encode_item(item)
                self.send(topic, value, key, headers, None, None)

    def _check_topic(self, topic: str, partition: int | None, deadline: Deadline) -> None:
        """Check that a topic exists, and learn its number of partitions.

        Before the topic's first message, also write this id's missing control markers in the topic's partitions.
        """
        # A topic that this bridge has used before was deleted since: it is not created again.
        create = (topic, 0) not in self._cluster.watched_partitions
        count = self._cluster.topics.require(topic, partition, deadline, create)
        partitions = [(topic, number) for number in range(count)]
        self._cluster.watched_partitions.update(partitions)
        if topic not in self._partitions:
            self.session.write_missing_markers(partitions, deadline)
        else:
            self._producer().refresh_metadata(topic, deadline)  # partitions were added since
        self._partitions[topic] = count
        self.quick[topic] = self._producer().produce

    def _check_group(self, group: str, deadline: Deadline) -> None:
        """Before a group's first offsets, write this id's missing control markers in their partition, if it is seen."""
        if self.session.previous_transaction is not None:
            try:
                count = self._cluster.topics.partitions(OFFSETS_TOPIC, deadline)
            except errors.AccessDenied as error:  # as in most clouds
                _log.warning("without the right to describe, hanging transactions cannot be looked for: %s", error)
            except errors.NotFound as error:  # a broker may keep positions elsewhere
                _log.debug("hanging transactions are not looked for among the positions of groups: %s", error)
            else:
                self.session.write_missing_markers([offsets_partition(group, count)], deadline)
        self._checked_groups.add(group)

    def _wait_for_buffer_space(self) -> None:
        self._begun.deadline.check("waiting for the broker to take messages")
        longest = self._cluster.settings.timing.buffer_poll
        error = self._producer().wait(min(longest, self._begun.deadline.left()))
        if error is not None:
            raise self._not_stored(error, self._begun.deadline) from KafkaException(error)

    def _refused(self, error: KafkaException, topic: str) -> errors.TxnBridgeError:
        own, what = error.args[0], f"sending messages, the last one to {topic}"  # an earlier one may be the cause
        if own.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return too_large(topic)
        if own.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
            return errors.NotFound(f"{topic} or the partition does not exist: {own.str()}")
        return self._failed(self._producer().cause(own), what, self._begun.deadline, errors.DeliveryFailed)

    def flush(self, deadline: Deadline) -> None:
        """Wait until every message sent so far is stored. Raise `DeliveryFailed` if one cannot be stored."""
        error = self._producer().flush(deadline)
        if error is not None:
            raise self._not_stored(error, deadline) from KafkaException(error)

    store = flush  # a topic's own limit of the size is told only by the broker

    # --- acknowledging --------------------------------------------------------------------------------------------

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert isinstance(context, KafkaAckContext)
        _, offsets = self._acks.get(context.group, (context, {}))
        self._acks[context.group] = context, offsets
        for partition, acked in positions.items():
            # A group's committed offset in a partition is the next offset to read.
            offsets[partition] = max(offsets.get(partition, 0), max(map(itemgetter(0), acked)) + 1)

    def _send_acks(self, deadline: Deadline) -> None:
        for group, (context, offsets) in self._acks.items():
            if group not in self._checked_groups:
                self._check_group(group, deadline)
            check_topics(self._cluster.requests, context, offsets, deadline)
            what = f"acknowledging for group {group}"
            try:
                with self._cluster.events.step("step:acks", self._begun.transaction, group=group):
                    self._acknowledged = True
                    error = self.session.acknowledge(context, offsets, deadline)
            except errors.NotFound as gone:
                # If the offsets were left out, perhaps nothing told that another member has processed the messages.
                raise errors.Conflict(f"{what}: {gone} any more") from gone
            if error is None:
                continue
            refusal = translate(error, what)
            if not isinstance(refusal, errors.StorageFailed):
                refusal = self._failed(error, what, deadline)
            raise refusal from KafkaException(error)
        self._acks = {}

    # --- ending ---------------------------------------------------------------------------------------------------

    def evidence(self) -> Evidence:
        how: dict[str, Any] = {"id": self.id, "asked": self._asked}
        if (opened := self._begun_under) is not None:
            how |= {"pid": opened.pid, "epoch": opened.epoch}
        if self._start is not None:
            how["start"] = self._start
        if self._owner.opening is not None or self._owner.denied:
            how["opening"] = self._owner.opening
        return Evidence(how, self.messages, log=self._log)

    def commit(self, deadline: Deadline) -> None:
        session, producer = self.session, self._producer()
        self._store(deadline)
        # If a message or an offset was stored, the coordinator describes this transaction, and not the previous one.
        self._asked = bool(self.messages or self._acknowledged)
        if self._asked and (session.stale or producer.taint_reason()):
            self._start = session.start_of_open_transaction(deadline)
        asked_at = time.monotonic()
        with self._cluster.events.step("step:commit", self._begun.transaction):
            error, once = self._commit_acks(deadline) if self._has_acks_alone() else (None, True)
            if error is None:
                error = producer.commit(deadline)
        at_once = once and time.monotonic() - asked_at < self._cluster.settings.soonest_retry
        session.stale = session.stale or producer.taint_reason() or ("" if once else "a commit was sent twice")
        if error is None:
            return
        refused_only_once = at_once and not producer.log_monitor.taint_reason and error.code() in ENDED
        session.stale = session.stale or error.str()
        if error.retriable():
            self._unknown = True
            unanswered = f"the broker did not answer the commit: {error.str()}"
            raise errors.OutcomeUnknown(unanswered) from KafkaException(error)
        self._settle(error, refused_only_once, deadline)

    def _has_acks_alone(self) -> bool:
        """Return whether the transaction has acknowledgements and no messages.

        Acknowledgements are sent by raw requests. So the client regards such a transaction as empty, and cannot end it.
        """
        return self._acknowledged and not self.messages

    def _commit_acks(self, deadline: Deadline) -> tuple[KafkaError | None, bool]:
        try:
            return self.session.commit_by_request(deadline)
        except errors.OutcomeUnknown:
            self._unknown = True
            raise

    def _store(self, deadline: Deadline) -> None:
        """Flush the messages, then send the acknowledgements. Abort after `TransactionAborted` or `Fenced`."""
        deadline.check("the transaction")
        try:
            # Not in parallel, because the coordinator adds new partitions and groups one at a time.
            self.flush(deadline)
            self._send_acks(deadline)
        except (errors.TransactionAborted, errors.Fenced):
            self.abort(deadline)
            raise

    def _settle(self, error: KafkaError, refused_only_once: bool, deadline: Deadline) -> None:
        """Find out the outcome after the broker has refused a commit: return if it is committed, else raise an error.

        The coordinator's description decides. The description may be of another transaction, because the id was opened
        since. Then a commit that was sent only once, and refused, was certainly not carried out.
        """
        self._unknown = True
        try:
            # If the transaction is still open, no request of this producer may decide it any more.
            self.session.drop()
            last = self.session.end_if_open(deadline)
            if refused_only_once and not (last is not None and self.session.is_own(last)):
                raise self._failed(error, "committing", deadline) from KafkaException(error)
            status = plain_status(self._cluster, self._owner.ledger, self.evidence().how, deadline)
        except (errors.BrokerUnavailable, errors.AccessDenied) as unheard:
            raise errors.OutcomeUnknown(
                f"the outcome of the commit could not be read from the coordinator or the decision log: {unheard}"
            ) from unheard
        if status.state is TokenState.COMMITTED:
            return
        if status.state is TokenState.ABORTED:
            raise self._failed(error, "committing", deadline) from KafkaException(error)
        kind = errors.EvidenceLost if status.permanent else errors.OutcomeUnknown
        raise kind(f"the broker refused the commit ({error.str()}): {status.reason}") from KafkaException(error)

    def _failed(
        self,
        error: KafkaError,
        what: str,
        deadline: Deadline,
        otherwise: type[errors.TransactionAborted] = errors.TransactionAborted,
    ) -> errors.TxnBridgeError:
        if ends_producer(error):
            self.session.stale = error.str()
        newer_owner = partial(self.session.newer_owner, deadline)
        return failure(error, what, self.id, newer_owner, self._begun.deadline, otherwise)

    def _not_stored(self, error: KafkaError, deadline: Deadline) -> errors.TxnBridgeError:
        self.session.stale = self.session.stale or error.str()
        return self._failed(error, "storing messages", deadline, errors.DeliveryFailed)

    def abort(self, deadline: Deadline) -> None:
        if deadline.left() < _SHORTEST_ABORT:
            deadline = Deadline(_SHORTEST_ABORT)
        session, producer = self.session, self.session.producer
        if producer is None:
            if self._start is not None:  # the transaction was prepared, and then its program was interrupted
                session.abort_from_outside(deadline)
            return
        if not session.stale:
            with suppress(errors.BrokerUnavailable):
                producer.flush(Deadline(min(_FLUSH_BEFORE_ABORT, deadline.left())))
        # After a failure the client's own abort would open the id, which looks like an opening by another process.
        if self._has_acks_alone():
            session.stale = session.stale or "the client does not know of the transaction's acknowledgements"
        if not session.stale and not producer.failures and producer.abort(Deadline(deadline.left() / 2)) is None:
            session.stale = producer.taint_reason()
            return
        session.stale = session.stale or producer.taint_reason() or "an abort failed"
        session.abort_from_outside(deadline)

    def close(self) -> None:
        """Free the producer. Its open transaction is aborted by its time-out, or when the id is opened again."""
        self.session.drop()


def _columns(items: Sequence[Any]) -> tuple[Sequence[bytes | None], ...]:
    """Return (values,) or (values, keys) of all items, as lists, if none of them needs conversion; else ()."""
    kinds = set(map(type, items))
    if kinds == {bytes}:
        return (items,)
    if kinds == {tuple} and set(map(len, items)) == {2}:
        values, keys = zip(*items, strict=True)
        if {*map(type, values), *map(type, keys)} <= _PLAIN:
            return values, keys
    return ()
