"""The producer under one transactional id, its opening, and its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from confluent_kafka import KafkaError

from txnbridge.errors import AccessDenied, BrokerUnavailable, DeadlineExceeded, Fenced, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.coordinator_session import CoordinatorSession
from txnbridge_kafka.client.librdkafka import membership_of
from txnbridge_kafka.client.responses import DONE, OPEN, SETTLED, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.hanging_transactions import write_missing_markers_of_owner
from txnbridge_kafka.write.acks import KafkaAckContext
from txnbridge_kafka.write.failures import is_fenced
from txnbridge_kafka.write.owner import KafkaOwner
from txnbridge_kafka.write.producer import LEAST_TIMEOUT_MS, TransactionalProducer

_log = logging.getLogger("txnbridge")

# The pause before a coordinator is asked again that is ending a transaction, which takes it milliseconds.
_PAUSE = 0.01


class ProducerSession:
    """A transactional id of Kafka's, and the producer that this process has under it. One thread at a time.

    The producer is dropped, and the id opened anew, whenever a request of the producer may still be on its way
    (hazard H1): `stale` says why.
    """

    def __init__(self, cluster: KafkaCluster, owner: KafkaOwner, id: str, timeout_ms: int) -> None:
        self.id = id
        self.timeout_ms = max(timeout_ms, LEAST_TIMEOUT_MS)
        self.producer: TransactionalProducer | None = None
        # The client's method `produce`, by topic: it goes with the producer, because it would keep the client.
        self.quick: dict[str, Callable[..., object]] = {}
        self.stale = ""  # why the producer is not used for another transaction
        # The coordinator's description of the id right after this process opened it, and right before.
        self.opened: TransactionDescription | None = None
        self.previous_transaction: TransactionDescription | None = None
        self.unrecorded = False  # whether opening the id again destroys the only evidence about its last transaction
        self._cluster = cluster
        self._owner = owner
        self._coordinator: CoordinatorSession | None = None

    def use_id(self, id: str) -> None:
        """Go on under another transactional id, which is not opened yet."""
        self.drop()
        self.id = id
        self.opened = self.previous_transaction = None

    def open(self, deadline: Deadline) -> None:
        """Open the id: the coordinator fences any other process, and aborts what that had open."""
        # A process that slept since it last checked would fence a newer owner (hazard H14).
        self.check_owner(deadline)
        if self._owner.denied or self.unrecorded:
            # A time-out raises the epoch by one, and so does an opening; the record of an outcome tells the two apart.
            # Without a record one epoch is left out instead.
            self._cluster.requests.fence(self.id, self.timeout_ms, deadline)
        producer = TransactionalProducer(self._cluster.settings, self.id, self.timeout_ms)
        with self._cluster.events.step("step:open", id=self.id):
            try:
                producer.open(deadline)
            except BrokerUnavailable as error:
                if is_fenced(error.__cause__):  # by a process that opens the id at the same moment
                    self.check_owner(deadline)
                raise
        with ExitStack() as unless_opened:
            coordinator = self._cluster.requests.coordinator_session(self.id, deadline)
            unless_opened.callback(coordinator.close)
            opened = coordinator.first_description
            # If another process opened the id after us, the description is of its opening, and the decision log names
            # that process as the owner.
            self._owner.check(deadline)
            if opened is None:
                raise BrokerUnavailable(f"the coordinator does not know {self.id}, which was just opened; try again")
            if self._owner.denied and self.opened is not None and opened.epoch not in (1, self.opened.epoch + 2):
                # Another process opened the id between our check and our opening, which has fenced it: both stop.
                raise self._taken_over()
            unless_opened.pop_all()
        self.drop()
        self.producer, self._coordinator, self.opened, self.stale = producer, coordinator, opened, ""
        self.unrecorded = False
        self.quick.clear()

    def check_owner(self, deadline: Deadline) -> None:
        """Raise `Fenced` if the id has a newer owner, by the decision log or, without it, by the id's epoch now."""
        self._owner.check(deadline)
        if self._owner.denied and self.opened is not None:
            now = self.describe(deadline)
            if now is not None and not self.is_own(now):
                raise self._taken_over()

    def _taken_over(self) -> Fenced:
        return Fenced(
            f"{self.id} was opened by another process since, or the time of its transaction was over: without the"
            " decision log nobody can tell which, so this owner must stop"
        )

    def newer_owner(self, deadline: Deadline) -> Fenced | None:
        """Return the error that names a newer owner; None if there is none, or if that cannot be found out now."""
        try:
            self.check_owner(deadline)
        except Fenced as fenced:
            return fenced
        except TxnBridgeError as error:
            _log.debug("whether %s has a newer owner is asked again before its next transaction: %s", self.id, error)
        return None

    def is_usable(self, deadline: Deadline) -> bool:
        """Return whether the producer may begin another transaction.

        Events after the last transaction count too: a broker that went away meanwhile may have forgotten its markers.
        """
        producer = self.producer
        return producer is not None and not (self.stale or producer.taint_reason()) and self._is_complete(deadline)

    def _is_complete(self, deadline: Deadline) -> bool:
        """Return whether the markers of the last transaction are certainly written.

        If they are not, our next request to one of its partitions would begin a transaction that takes in what the
        last one left there, and ends it in its own way: what was committed would be aborted (hazard H6).
        """
        assert self._coordinator is not None
        last = self._coordinator.last_transaction(deadline)
        return last is not None and last.state in SETTLED and self.is_own(last)

    def write_missing_markers(self, partitions: Sequence[Partition], deadline: Deadline) -> None:
        """End hanging transactions of earlier openings of this id in these partitions (hazard H5)."""
        if self.previous_transaction is not None:
            assert self.opened is not None
            write_missing_markers_of_owner(
                self._cluster, self._owner, self.opened, self.previous_transaction, partitions, deadline
            )

    def describe(self, deadline: Deadline) -> TransactionDescription | None:
        return self._cluster.requests.describe([self.id], deadline).get(self.id)

    def is_own(self, description: TransactionDescription) -> bool:
        """Return whether the coordinator's description is still about this opening of the id."""
        opened = self.opened
        return opened is not None and (description.pid, description.epoch) == (opened.pid, opened.epoch)

    def start_of_open_transaction(self, deadline: Deadline) -> int | None:
        """Return the open transaction's start, which tells it from one that a late request may begin (hazard H19)."""
        now = self.describe(deadline)
        return now.start if now is not None and now.state == OPEN and self.is_own(now) else None

    def acknowledge(
        self, context: KafkaAckContext, offsets: Mapping[Partition, int], deadline: Deadline
    ) -> KafkaError | None:
        """Put a group's positions into the transaction by a raw request (hazard H20). Return the refusal, if any."""
        assert self.opened is not None and isinstance(context.metadata, bytes)
        pid, epoch, member = self.opened.pid, self.opened.epoch, membership_of(context.metadata)
        lost = "the answer to an acknowledgement was lost"  # a copy of the request may still arrive (hazard H4)
        try:
            result = self._cluster.requests.acknowledge(
                self.id, pid, epoch, member, offsets, deadline, context.topic_ids
            )
        except DeadlineExceeded:
            self.stale = self.stale or lost
            raise
        if result.answer_lost:
            self.stale = self.stale or lost
        return None if result.code == DONE else KafkaError(result.code)

    def commit_by_request(self, deadline: Deadline) -> tuple[KafkaError | None, bool]:
        """Commit, and return the refusal, if any, and whether only one copy of the request can have arrived."""
        assert self.opened is not None
        pid, epoch = self.opened.pid, self.opened.epoch
        try:
            ended = self._cluster.requests.end(self.id, pid, epoch, True, deadline, bump_epoch=False)
        except OutcomeUnknown:
            self.stale = "a commit was not answered"
            raise
        return (None if ended.code == DONE else KafkaError(ended.code)), ended.only_once

    def end_if_open(self, deadline: Deadline) -> TransactionDescription | None:
        """Abort what is open under this opening, and describe the id's last transaction; None if the id is forgotten.

        The producer must have been dropped: it would go on under the same epoch, and commit the rest. A transaction of
        another producer id or epoch is a newer owner's, and is left alone.
        """
        while True:
            now = self.describe(deadline)
            if now is None or now.state in SETTLED or not self.is_own(now):
                return now
            if now.state == OPEN:
                with self._cluster.events.step("step:end", id=self.id, decision="abort"):
                    ended = self._cluster.requests.end(self.id, now.pid, now.epoch, False, deadline)
                if ended.code == 0:
                    # With the epoch before: ending the transaction may have raised it, and tokens carry the old one.
                    return replace(now, state="CompleteAbort")
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self.id}")
            time.sleep(_PAUSE)

    def abort_from_outside(self, deadline: Deadline) -> None:
        """Drop the producer, and let the coordinator abort the transaction if it is still open there."""
        self.drop()
        try:
            self.end_if_open(deadline)
        except (BrokerUnavailable, AccessDenied) as error:
            raise OutcomeUnknown(f"the broker did not answer the abort: {error}") from error

    def drop(self) -> None:
        """Let go of the producer; what is open dies by its time-out, or when the id is opened again."""
        if self.producer is not None:
            self.quick.clear()
            self.producer.drop()
            self.producer = None
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
