"""One writer: a transactional producer, thrown away whenever a request of it may still be on its way."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import repeat
from operator import itemgetter, length_hint
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    Conflict,
    DeadlineExceeded,
    DeliveryFailed,
    EvidenceLost,
    Fenced,
    InvalidOption,
    NotFound,
    OutcomeUnknown,
    PositionLost,
    StorageFailed,
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
from txnbridge_kafka.client.coordinator_session import Witness
from txnbridge_kafka.client.group_membership import member_of
from txnbridge_kafka.client.librdkafka import milliseconds, too_large
from txnbridge_kafka.client.offsets import is_another, made_anew
from txnbridge_kafka.client.responses import DONE, OPEN, SETTLED, Described
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.errors import DENIED, kafka_error, translate
from txnbridge_kafka.outcome.hanging_transactions import mend_own
from txnbridge_kafka.outcome.outcome import plain_status
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition
from txnbridge_kafka.write.acks import AckContext
from txnbridge_kafka.write.owner import Owner, evidence_key
from txnbridge_kafka.write.producer import LEAST_TIMEOUT_MS, TransactionalProducer

_log = logging.getLogger("txnbridge")

# A transaction whose time is over must still be told aborted: for that an abort may go on for so long.
_ABORT_GRACE = 2.0
# What is still on its way when a transaction aborts makes its writer doubtful (and a new one has to be opened), so
# it is sent first, unless that takes longer than this.
_FLUSH_BEFORE_ABORT = 0.5
# The coordinator ends a transaction within milliseconds.
_MOMENT = 0.01
# So many messages are given to the client at a time, half a millisecond in which nothing else of Python's runs.
_CHUNK = 1000
_PLAIN = {bytes, type(None)}  # values and keys that the client takes as they are
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
# The coordinator has ended the transaction, or the id is another producer's.
_ENDED = {*_FENCED, KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING}
# What an administrator has to grant.
_NEEDED = {
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Write on this transactional id",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Write on every topic that it sends to and Read on those it acknowledges",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Read on the group",
}


class KafkaWriter(Writer):
    """A writer under one transactional id of Kafka's, opened when it is first used or by `open`."""

    not_taken = (KeyError, TypeError, BufferError, KafkaException)

    def __init__(self, cluster: Cluster, owner: Owner, id: str, timeout_ms: int) -> None:
        self.id = id
        self._cluster = cluster
        self._owner = owner
        self._timeout_ms = max(timeout_ms, LEAST_TIMEOUT_MS)
        self._producer: TransactionalProducer | None = None
        self._witness: Witness | None = None
        self._stale = ""  # why the producer is not used for another transaction
        self._opened: Described | None = None  # what the coordinator said right after the id was opened
        self._begun_under: Described | None = None  # the same, of the opening that the last transaction is in
        self.past: Described | None = None  # and before
        self._unknown = False  # whether a token was given out whose only evidence is at the coordinator
        self._unrecorded = False  # whether that evidence is lost when the id is opened again
        self._log: Mapping[str, Any] | None = None
        self._partitions: dict[str, int] = {}  # of the topics that were looked at since the id was opened
        self._mended_groups: set[str] = set()
        self._acks: dict[str, tuple[AckContext, dict[Partition, int]]] = {}
        self.quick: dict[str, Callable[..., object]] = {}
        self._asked = False  # whether a commit was asked for, of which everything was stored
        self._start: int | None = None  # the coordinator's start time of the transaction, where it was asked

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline) -> None:
        """Open the id: what another process had open under it is aborted, and it is fenced."""
        # A process that slept since it looked would fence the owner that has come meanwhile.
        self._check_owner(deadline)
        if self._owner.denied or self._unrecorded:
            # A time-out raises the epoch by one, and so does an opening, which is told from it by what was recorded.
            # Without a record an epoch is left out.
            self._cluster.requests.fence(self.id, self._timeout_ms, deadline)
        producer = TransactionalProducer(self._cluster.settings, self.id, self._timeout_ms)
        with self._cluster.events.step("step:open", id=self.id):
            try:
                producer.open(deadline)
            except BrokerUnavailable as error:
                if _is_fenced(error.__cause__):  # by somebody who opens the id at the same moment
                    self._check_owner(deadline)
                raise
        with ExitStack() as unless_opened:
            witness = self._cluster.requests.witness(self.id, deadline)
            unless_opened.callback(witness.close)
            found = witness.first
            # If somebody else opened the id after us, this is what they got: then the log names them as its owner.
            self._owner.check(deadline)
            if found is None:
                raise BrokerUnavailable(f"the coordinator does not know {self.id}, which was just opened; try again")
            if self._owner.denied and self._opened is not None and found.epoch not in (1, self._opened.epoch + 2):
                raise self._taken_over()  # between our look and our opening, which is now in its way: so both stop
            unless_opened.pop_all()
        self._drop()
        self._producer, self._witness, self._opened, self._stale = producer, witness, found, ""
        self._unrecorded = False
        self.quick.clear()
        self._partitions.clear()
        self._mended_groups.clear()

    def _check_owner(self, deadline: Deadline) -> None:
        """Raise `Fenced` if the id is a newer owner's, by the log or, without it, by the epoch that the id has now."""
        self._owner.check(deadline)
        if self._owner.denied and self._opened is not None:
            found = self._cluster.requests.describe([self.id], deadline).get(self.id)
            if found is not None and (found.pid, found.epoch) != (self._opened.pid, self._opened.epoch):
                raise self._taken_over()

    def _taken_over(self) -> Fenced:
        return Fenced(
            f"{self.id} was opened by another process since, or the time of its transaction was over: without the"
            " decision log nobody can tell which, so this owner must stop"
        )

    def reopen(self, deadline: Deadline) -> None:
        self._unknown = True  # somebody may hold a token of the last transaction
        self._reopen(deadline)

    def _reopen(self, deadline: Deadline) -> None:
        self._check_owner(deadline)
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
        self.past = end_if_open(self._cluster, self.id, deadline, only=opened)
        if self._unknown and self._asked and not self._owner.denied:
            try:
                self._owner.open_once(deadline)
                self._note_outcome(deadline)
            except AccessDenied as error:
                # Going on is worth more than what a token, if there is one, can be told later: UNKNOWN, for good.
                self._unrecorded = True
                _log.warning("what became of the last transaction of %s cannot be recorded: %s", self.id, error)

    def _note_outcome(self, deadline: Deadline) -> None:
        how = self.evidence().how
        status = plain_status(self._cluster, self._owner.ledger, how, deadline)
        self._unrecorded = status.state is TokenState.UNKNOWN
        if not self._unrecorded:
            key = evidence_key(self.id, how["pid"], f"epoch {how['epoch']}")
            self._owner.note_outcome(key, status.state is TokenState.COMMITTED, deadline)

    def _ready(self, deadline: Deadline) -> TransactionalProducer:
        # Also what happened since the last transaction: a broker that went away meanwhile may have forgotten its end.
        if self._producer is None or self._stale or self._producer.doubt() or not self._is_complete(deadline):
            self._reopen(deadline)
        assert self._producer is not None
        return self._producer

    def _is_complete(self, deadline: Deadline) -> bool:
        """Whether the markers of the last transaction are certainly written.

        If they are not, our next request to one of its partitions would begin a transaction that takes in what the
        last one left there, and ends it in its own way: what was committed would be aborted.
        """
        assert self._witness is not None
        last = self._witness.last(deadline)
        return last is not None and last.state in SETTLED and _is_under(last, self._opened)

    def _open_for_longer(self, timeout_ms: int, deadline: Deadline) -> None:
        """A broker takes the time-out when an id is opened. Raises `InvalidOption` if it allows no such time."""
        before, self._timeout_ms = self._timeout_ms, timeout_ms
        try:
            self._reopen(deadline)
        except InvalidOption:
            self._timeout_ms = before
            raise

    # --- one transaction ------------------------------------------------------------------------------------------

    def begin(self, begin: Begin) -> None:
        if (needed := int(begin.deadline.seconds * 1000)) > self._timeout_ms:
            self._open_for_longer(needed, begin.deadline)
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
        self._acks = {}
        self.messages = 0
        self._acknowledged = self._asked = False
        self._start = None

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
        where: dict[str, Any] = {}
        if headers is not None or partition is not None or timestamp is not None:
            where = {
                "partition": -1 if partition is None else partition,
                "timestamp": milliseconds(timestamp),
                "headers": list(headers or ()),
            }
        while True:
            try:
                self.quick[topic](topic, value, key, **where)
            except BufferError:
                self._wait_for_room()
            except KafkaException as error:
                raise self._refused(error, topic) from error
            else:
                break
        self.messages += 1

    def send_many(self, topic: str, items: Iterable[Item]) -> None:
        if topic not in self._partitions:
            self._look_at(topic, None, self._begun.deadline)
        if isinstance(items, list | tuple):
            for start in range(0, len(items), _CHUNK):
                self._send_chunk(topic, items[start : start + _CHUNK])
        else:
            self._send_each(topic, items)

    def _send_chunk(self, topic: str, items: Sequence[Item]) -> None:
        """Plain items in a loop that runs in C: a fifth less processor time for small messages, all counted."""
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

    def _send_each(self, topic: str, items: Iterable[Item]) -> None:
        for item in items:
            if item.__class__ is bytes:
                self.send(topic, item, None, None, None, None)
            else:
                value, key, headers = encode_item(item)
                self.send(topic, value, key, headers, None, None)

    def _look_at(self, topic: str, partition: int | None, deadline: Deadline) -> None:
        """Before the first message to a topic: does it exist, and did the broker forget markers of ours there?"""
        assert self._producer is not None
        count = self._cluster.topics.require(topic, partition, deadline)
        partitions = [(topic, number) for number in range(count)]
        self._cluster.places.update(partitions)
        if topic not in self._partitions:
            self._mend(partitions, deadline)
        else:
            self._producer.look_at(topic, deadline)  # it has grown since
        self._partitions[topic] = count
        self.quick[topic] = self._producer.produce

    def _mend(self, partitions: Sequence[Partition], deadline: Deadline) -> None:
        if self.past is not None:
            assert self._opened is not None
            mend_own(self._cluster, self._owner, self._opened, self.past, partitions, deadline)

    def _mend_group(self, group: str, deadline: Deadline) -> None:
        if self.past is not None:
            count = self._cluster.topics.partitions(OFFSETS_TOPIC, deadline)
            self._mend([offsets_partition(group, count)], deadline)
        self._mended_groups.add(group)

    def _wait_for_room(self) -> None:
        assert self._producer is not None
        self._begun.deadline.check("waiting for the broker to take messages")
        error = self._producer.wait(min(_ROOM_SECONDS, self._begun.deadline.left()))
        if error is not None:
            raise self._not_stored(error, self._begun.deadline) from KafkaException(error)

    def _refused(self, error: KafkaException, topic: str) -> TxnBridgeError:
        assert self._producer is not None
        found = self._producer.cause(error.args[0])
        if found.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return too_large(topic)
        if found.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
            return NotFound(f"{topic} or the partition does not exist: {found.str()}")
        return self._failed(found, f"sending a message to {topic}", self._begun.deadline, DeliveryFailed)

    def ack(self, context: object, positions: Mapping[Partition, Sequence[Position]]) -> None:
        assert isinstance(context, AckContext)
        _, offsets = self._acks.setdefault(context.group, (context, {}))
        self._acks[context.group] = context, offsets
        for partition, acked in positions.items():
            # A group has one position a partition: the next to read.
            offsets[partition] = max(offsets.get(partition, 0), max(map(itemgetter(0), acked)) + 1)

    def _send_acks(self, deadline: Deadline) -> None:
        for group, (context, offsets) in self._acks.items():
            if group not in self._mended_groups:
                self._mend_group(group, deadline)
            self._check_topics(context, offsets, deadline)
            with self._cluster.events.step("step:acks", self._begun.transaction, group=group):
                error = self._acknowledge(context, offsets, deadline)
            if error is None:
                continue
            what = f"acknowledging for group {group}"
            found = translate(error, what)
            if not isinstance(found, StorageFailed):
                found = self._failed(error, what, deadline)
            raise found from KafkaException(error)
        self._acks = {}

    def _check_topics(self, context: AckContext, offsets: Mapping[Partition, int], deadline: Deadline) -> None:
        """Raise `PositionLost` if what is acknowledged was read in topics that have been made anew since."""
        ids = self._cluster.offsets.topic_ids({topic for topic, _ in offsets}, deadline)
        for partition, offset in offsets.items():
            if is_another(ids.get(partition[0]), context.topic_ids.get(partition)):
                raise PositionLost(made_anew(f"the position of group {context.group!r}", partition, offset))

    def _acknowledge(
        self, context: AckContext, offsets: Mapping[Partition, int], deadline: Deadline
    ) -> KafkaError | None:
        """By our own requests: the client's call may take ten times its deadline when a broker restarts."""
        assert self._opened is not None and isinstance(context.metadata, bytes)
        self._acknowledged = True
        pid, epoch, member = self._opened.pid, self._opened.epoch, member_of(context.metadata)
        lost = "the answer to an acknowledgement was lost"  # so a copy of it may still arrive
        try:
            found = self._cluster.requests.acknowledge(
                self.id, pid, epoch, member, offsets, deadline, context.topic_ids
            )
        except DeadlineExceeded:
            self._stale = self._stale or lost
            raise
        if found.again:
            self._stale = self._stale or lost
        return None if found.code == DONE else KafkaError(found.code)

    def flush(self, deadline: Deadline) -> None:
        """Return when everything taken so far is stored. Raises `DeliveryFailed`."""
        assert self._producer is not None
        error = self._producer.flush(deadline)
        if error is not None:
            raise self._not_stored(error, deadline) from KafkaException(error)

    def evidence(self) -> Evidence:
        under = self._begun_under
        how: dict[str, Any] = {"id": self.id, "asked": self._asked}
        if under is not None:
            how |= {"pid": under.pid, "epoch": under.epoch}
        if self._start is not None:
            how["start"] = self._start
        if self._owner.opening is not None or self._owner.denied:
            how["opening"] = self._owner.opening
        return Evidence(how, self.messages, log=self._log)

    # --- ending ---------------------------------------------------------------------------------------------------

    def prepare(self, deadline: Deadline) -> None:
        raise NotImplementedError("a plain writer is never asked to prepare")

    def commit(self, deadline: Deadline) -> None:
        assert self._producer is not None
        self._store(deadline)
        # If anything was stored, the coordinator's state is this transaction's own and not the previous one's.
        self._asked = bool(self.messages or self._acknowledged)
        if self._asked and (self._stale or self._producer.doubt()):
            self._start = self._ask_for_start(deadline)
        asked_at = time.monotonic()
        with self._cluster.events.step("step:commit", self._begun.transaction):
            error, once = self._commit_acks(deadline) if self._has_acks_alone() else (None, True)
            if error is None:
                error = self._producer.commit(deadline)
        at_once = once and time.monotonic() - asked_at < self._cluster.settings.soonest_retry
        self._stale = self._stale or self._producer.doubt() or ("" if once else "a commit was asked for twice")
        if error is None:
            return
        refused_only_once = at_once and not self._producer.watch.doubt and error.code() in _ENDED
        self._stale = self._stale or error.str()
        if error.retriable():
            self._unknown = True
            raise OutcomeUnknown(f"the broker did not answer the commit: {error.str()}") from KafkaException(error)
        self._settle(error, refused_only_once, deadline)

    def _has_acks_alone(self) -> bool:
        """Then the client, which did not see them, takes the transaction for empty, and sends nothing to end it."""
        return self._acknowledged and not self.messages

    def _commit_acks(self, deadline: Deadline) -> tuple[KafkaError | None, bool]:
        """The refusal, if any, and whether only one copy of the request can have arrived."""
        assert self._opened is not None
        try:
            ended = self._cluster.requests.end(
                self.id, self._opened.pid, self._opened.epoch, True, deadline, shut_out=False
            )
        except OutcomeUnknown:
            self._unknown, self._stale = True, "a commit was not answered"
            raise
        return (None if ended.code == DONE else KafkaError(ended.code)), ended.only_once

    def _ask_for_start(self, deadline: Deadline) -> int | None:
        """By which this transaction is told from one that a late copy of a request of it may begin behind it."""
        found = self._cluster.requests.describe([self.id], deadline).get(self.id)
        own = found is not None and found.state == OPEN and _is_under(found, self._opened)
        return found.start if own and found is not None else None

    def _store(self, deadline: Deadline) -> None:
        """Acknowledge and flush; on any trouble the transaction is aborted here, or is left for `abort`."""
        deadline.check("the transaction")
        try:
            # In this order, because the coordinator takes one new partition or group at a time.
            self.flush(deadline)
            self._send_acks(deadline)
        except (TransactionAborted, Fenced):
            self.abort(deadline)
            raise

    def _settle(self, error: KafkaError, refused_only_once: bool, deadline: Deadline) -> None:
        """The broker refused a commit. What is true is what its coordinator says.

        If that has no word on it any more, because the id was opened since: a request of which only one copy can have
        arrived, and that was refused, was certainly not carried out.
        """
        self._unknown = True
        try:
            # If it is open still, the refusal came before any decision; no request of this producer may follow now.
            self._drop()
            assert self._opened is not None
            found = end_if_open(self._cluster, self.id, deadline, only=self._opened)
            if refused_only_once and not (found is not None and _is_under(found, self._opened)):
                raise self._failed(error, "committing", deadline) from KafkaException(error)
            status = plain_status(self._cluster, self._owner.ledger, self.evidence().how, deadline)
        except (BrokerUnavailable, AccessDenied) as unheard:
            raise OutcomeUnknown(
                f"neither the coordinator nor the decision log says what became of the commit: {unheard}"
            ) from unheard
        if status.state is TokenState.COMMITTED:
            return
        if status.state is TokenState.ABORTED:
            raise self._failed(error, "committing", deadline) from KafkaException(error)
        kind = EvidenceLost if status.permanent else OutcomeUnknown
        raise kind(f"the broker refused the commit ({error.str()}): {status.reason}") from KafkaException(error)

    def _failed(
        self,
        error: KafkaError,
        what: str,
        deadline: Deadline,
        otherwise: type[TransactionAborted] = TransactionAborted,
    ) -> TxnBridgeError:
        """What an error means after which a transaction can only be aborted, or is already."""
        code, text = error.code(), f"{what}: {error.str()} ({error.name()})"
        if code in _GROUP_MOVED_ON:
            return Conflict(f"{text}: other members of the group have these partitions now")
        if code in DENIED:
            self._stale = error.str()
            needed = f"; the user of {self.id} needs {_NEEDED[code]}" if code in _NEEDED else ""
            return AccessDenied(text + needed)
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            return otherwise(f"{text}: it is larger than its topic takes (max.message.bytes); smaller messages pass")
        if code in _FENCED or error.fatal():
            return self._lost(error, what, deadline)
        fenced = self._newer_owner(deadline) if code in _ENDED else None
        return fenced or otherwise(f"{text}; run it again")

    def _newer_owner(self, deadline: Deadline) -> Fenced | None:
        try:
            self._check_owner(deadline)
        except Fenced as fenced:
            return fenced
        except TxnBridgeError as unheard:
            _log.debug("whether %s has a newer owner is asked again before its next transaction: %s", self.id, unheard)
        return None

    def _lost(self, error: KafkaError, what: str, deadline: Deadline) -> TxnBridgeError:
        """This producer can do nothing more: another owner, the transaction was ended without us, or it is broken."""
        self._stale = error.str()
        if fenced := self._newer_owner(deadline):
            return fenced
        text = f"{what}: {error.str()} ({error.name()})"
        if error.code() not in _ENDED:
            return TransactionAborted(
                f"{text}: the client could not go on, and the transaction is aborted; run it again"
            )
        if self._begun.deadline.expired:
            return TransactionTimedOut(f"{text}: the transaction was aborted because its time was over; run it again")
        return TransactionAborted(f"{text}: the broker or an administrator ended the transaction; run it again")

    def _not_stored(self, error: KafkaError, deadline: Deadline) -> TxnBridgeError:
        self._stale = self._stale or error.str()
        return self._failed(error, "storing messages", deadline, DeliveryFailed)

    def abort(self, deadline: Deadline) -> None:
        if deadline.left() < _ABORT_GRACE:
            deadline = Deadline(_ABORT_GRACE)
        producer = self._producer
        if producer is None:
            return
        if not self._stale:
            with suppress(BrokerUnavailable):
                producer.flush(Deadline(min(_FLUSH_BEFORE_ABORT, deadline.left())))
        # After a failure the client would open the id by itself, and nobody could tell that from another process.
        if self._has_acks_alone():
            self._stale = self._stale or "it has acknowledgements that its client did not see"
        if not self._stale and not producer.failures and producer.abort(Deadline(deadline.left() / 2)) is None:
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
        except (BrokerUnavailable, AccessDenied) as unheard:
            raise OutcomeUnknown(f"the broker did not answer the abort: {unheard}") from unheard

    def close(self) -> None:
        """Let go; what is open dies by its timeout, or when the id is opened again."""
        self._drop()

    def _drop(self) -> None:
        if self._producer is not None:
            self.quick.clear()  # these are methods of its client, and would keep it
            self._producer.drop()
            self._producer = None
        if self._witness is not None:
            self._witness.close()
            self._witness = None


def end_if_open(cluster: Cluster, id: str, deadline: Deadline, only: Described) -> Described | None:
    """Abort what an owner itself has open, and say what its last transaction came to; None for an id that is forgotten.

    Its producer must have been dropped: a living one goes on under this epoch, and would commit the rest. What is not
    open under this producer id and epoch is left alone: it is a newer owner's.
    """
    while True:
        found = cluster.requests.describe([id], deadline).get(id)
        if found is None or found.state in SETTLED or not _is_under(found, only):
            return found
        if found.state == OPEN:
            with cluster.events.step("step:end", id=id, decision="abort"):
                ended = cluster.requests.end(id, found.pid, found.epoch, False, deadline)
            if ended.code == 0:
                # With the epoch that it had: ending it may have raised that, and tokens know the one before.
                return replace(found, state="CompleteAbort")
        deadline.check(f"waiting until the coordinator has ended the last transaction of {id}")
        time.sleep(_MOMENT)


def _columns(items: Sequence[Item]) -> tuple[Sequence[bytes | None], ...]:
    """As (values,) or (values, keys) if all are what the client takes; nothing if each has to be looked at."""
    kinds = set(map(type, items))
    if kinds == {bytes}:
        return (items,)
    if kinds == {tuple} and set(map(len, items)) == {2}:
        values, keys = zip(*items, strict=True)
        if {*map(type, values), *map(type, keys)} <= _PLAIN:
            return values, keys
    return ()


def _is_under(found: Described, opened: Described | None) -> bool:
    """Whether the coordinator still speaks of this opening."""
    return opened is not None and (found.pid, found.epoch) == (opened.pid, opened.epoch)


def _is_fenced(error: BaseException | None) -> bool:
    found = None if error is None else kafka_error(error)
    return found is not None and found.code() in _FENCED
