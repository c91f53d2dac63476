"""A producer with a transactional id. It is replaced, and the id opened again, when going on may be unsafe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from confluent_kafka import KafkaError

from txnbridge.errors import AccessDenied, BrokerUnavailable, Fenced, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Partition
from txnbridge_kafka.client.librdkafka import membership_of
from txnbridge_kafka.client.marker_proof import CoordinatorSession
from txnbridge_kafka.client.messages import offsets_of
from txnbridge_kafka.client.protocol_types import DONE, OPEN, SETTLED, TransactionDescription
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.errors import is_fenced
from txnbridge_kafka.outcome.hanging_transactions import write_missing_markers_of_owner
from txnbridge_kafka.write.acks import KafkaAckContext
from txnbridge_kafka.write.owner import KafkaOwner
from txnbridge_kafka.write.producer import LEAST_TIMEOUT_MS, TransactionalProducer

_log = logging.getLogger("txnbridge")

# The pause before a coordinator that is ending a transaction is asked again. Ending takes milliseconds.
_RETRY_SECONDS = 0.01


class ProducerSession:
    """A transactional id of Kafka, and this process's producer with that id. One thread at a time.

    If a request of the producer may still be under way, `stale` has the reason. Before the next transaction the
    producer is then freed, and the id opened again (hazard H1).
    """

    def __init__(self, cluster: KafkaCluster, owner: KafkaOwner, id: str, timeout_ms: int) -> None:
        self.id = id
        self.timeout_ms = max(timeout_ms, LEAST_TIMEOUT_MS)
        self.producer: TransactionalProducer | None = None
        # By topic, the client's method `produce`. Cleared with the producer, because the method keeps the client alive.
        self.quick: dict[str, Callable[..., object]] = {}
        self.stale = ""  # the reason why the producer is not used for another transaction
        # The coordinator's descriptions of the id, right after this process opened it and right before.
        self.opened: TransactionDescription | None = None
        self.previous_transaction: TransactionDescription | None = None
        self.unrecorded = False  # whether only the coordinator has the last transaction's outcome
        self._cluster = cluster
        self._owner = owner
        self._coordinator: CoordinatorSession | None = None

    def use_id(self, id: str) -> None:
        """Free the producer, and continue with another transactional id, which is not opened yet."""
        self.drop()
        self.id = id
        self.opened = self.previous_transaction = None

    def open(self, deadline: Deadline) -> None:
        """Open the id: the coordinator fences any other process with it, and aborts that process's transaction."""
        # A process that was suspended since its last check would fence a newer owner (hazard H14).
        self.check_owner(deadline)
        if self._owner.denied or self.unrecorded:
            # A token must distinguish a time-out of its transaction, which raises the epoch by one, from an opening. If
            # no outcome is recorded, this additional opening raises the epoch by two.
            self._cluster.requests.fence(self.id, self.timeout_ms, deadline)
        producer = TransactionalProducer(self._cluster.settings, self.id, self.timeout_ms)
        with ExitStack() as unless_opened:
            coordinator = self._cluster.requests.coordinator_session(self.id, deadline)
            unless_opened.callback(lambda: coordinator.close())
            with self._cluster.events.step("step:open", id=self.id):
                try:
                    producer.open(deadline)
                except BrokerUnavailable as error:
                    if is_fenced(error.__cause__):  # another process is opening the id at this moment
                        self.check_owner(deadline)
                    raise
            if (opened := coordinator.last_transaction(deadline)) is None:
                # The coordinator moved, or its broker left. The client repeats its request without a line in the log.
                producer.log_monitor.taint_reason = "the coordinator's connection was lost during the opening"
                coordinator = self._cluster.requests.coordinator_session(self.id, deadline)
                opened = coordinator.first_description
            # The description may be of a later opening by another process. Then the decision log has a newer owner.
            self._owner.check(deadline)
            if opened is None:
                raise BrokerUnavailable(f"the coordinator does not know {self.id}, which was just opened; try again")
            if self._owner.denied and self.opened is not None and opened.epoch not in (1, self.opened.epoch + 2):
                # Another process opened the id after the check, and was fenced by this opening: both stop.
                raise self._taken_over()
            unless_opened.pop_all()
        self.drop()
        self.producer, self._coordinator, self.opened, self.stale = producer, coordinator, opened, ""
        self.unrecorded = False
        self.quick.clear()

    def check_owner(self, deadline: Deadline) -> None:
        """Raise `Fenced` if the id has a newer owner, by the decision log or (without it) by the producer epoch."""
        self._owner.check(deadline)
        if self._owner.denied and self.opened is not None:
            now = self.describe(deadline)
            if now is not None and not self.is_own(now):
                raise self._taken_over()

    def _taken_over(self) -> Fenced:
        return Fenced(
            f"{self.id} was opened by another process since, or its transaction timed out: without the decision log the"
            " two cannot be distinguished, so this owner must stop"
        )

    def newer_owner(self, deadline: Deadline) -> Fenced | None:
        """Return a `Fenced` error if the id has a newer owner; None if there is none, or if the check fails."""
        try:
            self.check_owner(deadline)
        except Fenced as fenced:
            return fenced
        except TxnBridgeError as error:
            _log.debug("the owner of %s is checked again before its next transaction: %s", self.id, error)
        return None

    def is_usable(self, deadline: Deadline) -> bool:
        """Return whether the producer may begin another transaction; otherwise the id must be opened again."""
        producer = self.producer
        return producer is not None and not (self.stale or producer.taint_reason()) and self._is_complete(deadline)

    def _is_complete(self, deadline: Deadline) -> bool:
        """Return whether the control markers of the last transaction are certainly written.

        In a partition without the marker the producer's next transaction would include the messages of the last one. An
        abort of the next would then abort committed messages (hazard H6).
        """
        assert self._coordinator is not None
        last = self._coordinator.last_transaction(deadline)
        return last is not None and last.state in SETTLED and self.is_own(last)

    def write_missing_markers(self, partitions: Sequence[Partition], deadline: Deadline) -> None:
        """Write the missing control markers of this id's earlier transactions in these partitions (hazard H5)."""
        if self.previous_transaction is not None:
            assert self.opened is not None
            write_missing_markers_of_owner(
                self._cluster, self._owner, self.opened, self.previous_transaction, partitions, deadline
            )

    def describe(self, deadline: Deadline) -> TransactionDescription | None:
        return self._cluster.requests.describe([self.id], deadline).get(self.id)

    def is_own(self, description: TransactionDescription) -> bool:
        """Return whether a description has the producer id and epoch with which this process opened the id."""
        opened = self.opened
        return opened is not None and (description.pid, description.epoch) == (opened.pid, opened.epoch)

    def start_of_open_transaction(self, deadline: Deadline) -> int | None:
        """Return the start time of this producer's open transaction; None if no transaction is open.

        A later transaction of the same epoch has another start time (hazard H19).
        """
        now = self.describe(deadline)
        return now.start if now is not None and now.state == OPEN and self.is_own(now) else None

    def acknowledge(
        self, context: KafkaAckContext, offsets: Mapping[Partition, int], deadline: Deadline
    ) -> KafkaError | None:
        """Add a group's offsets to the transaction by a raw request (hazard H20). Return the error, or None."""
        assert self.opened is not None and isinstance(context.metadata, bytes)
        fields = offsets_of(membership_of(context.metadata), offsets, context.topic_ids, context.epochs)
        told = None
        try:
            told = self._cluster.requests.acknowledge(self.id, self.opened.pid, self.opened.epoch, fields, deadline)
        finally:
            if told is None or told.answer_lost:  # a copy of the request may still arrive (hazard H4)
                self.stale = self.stale or "the answer to an acknowledgement was lost"
        return None if told.code == DONE else KafkaError(told.code)

    def commit_by_request(self, deadline: Deadline) -> tuple[KafkaError | None, bool]:
        """Commit by a raw EndTxn. Return the broker's error or None, and whether the request was sent only once."""
        assert self.opened is not None
        pid, epoch = self.opened.pid, self.opened.epoch
        try:
            ended = self._cluster.requests.end(self.id, pid, epoch, True, deadline, bump_epoch=False)
        except OutcomeUnknown:
            self.stale = "a commit was not answered"
            raise
        return (None if ended.code == DONE else KafkaError(ended.code)), ended.only_once

    def end_if_open(self, deadline: Deadline) -> TransactionDescription | None:
        """Abort the last transaction if it is still open, and return the coordinator's description of it.

        Return None if the coordinator does not know the id any more. The producer must have been freed: with the same
        epoch it could still send messages after the abort, and commit them. A transaction with another producer id or
        epoch is a newer owner's, and is not aborted.
        """
        while True:
            now = self.describe(deadline)
            if now is None or now.state in SETTLED or not self.is_own(now):
                return now
            if now.state == OPEN:
                with self._cluster.events.step("step:end", id=self.id, decision="abort"):
                    ended = self._cluster.requests.end(self.id, now.pid, now.epoch, False, deadline)
                if ended.code == DONE:
                    # The end may have raised the epoch. The description keeps the old epoch, as tokens do.
                    return replace(now, state="CompleteAbort")
            deadline.check(f"waiting until the coordinator has ended the last transaction of {self.id}")
            time.sleep(_RETRY_SECONDS)

    def abort_from_outside(self, deadline: Deadline) -> None:
        """Free the producer, and abort its transaction by a raw request if it is still open."""
        self.drop()
        try:
            self.end_if_open(deadline)
        except (BrokerUnavailable, AccessDenied) as error:
            raise OutcomeUnknown(f"the broker did not answer the abort: {error}") from error

    def drop(self) -> None:
        """Free the producer. The open transaction is aborted by its time-out, or when the id is opened again."""
        producer, self.producer = self.producer, None
        if producer is not None:
            self.quick.clear()
            producer.drop()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
