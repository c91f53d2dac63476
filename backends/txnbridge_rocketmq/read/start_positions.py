"""Finds the positions at which a reader starts, and at which a group continues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from txnbridge.errors import Conflict, EvidenceLost, PositionLost
from txnbridge.spi import Ack, Context, Deadline, Decision, Held, Partition, Position, Subscription
from txnbridge_rocketmq.client import groups
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.retry import retry_call
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.outcome.outcome import publish_decided
from txnbridge_rocketmq.read.partition import SeekTarget
from txnbridge_rocketmq.read.pull import GROUP
from txnbridge_rocketmq.read.verifiable_offset import ReferenceRecord, VerifiableOffset, topic_recreated
from txnbridge_rocketmq.settings.names import encoded
from txnbridge_rocketmq.write.half_buffer import halves_as_json
from txnbridge_rocketmq.write.message_format import timestamp_of
from txnbridge_rocketmq.write.transaction_properties import is_over

T = TypeVar("T")

Queues = Mapping[Partition, Queue]
Targets = Mapping[Partition, SeekTarget | None]

# The wait between two reads of a stored message that is not readable yet, and of a missing reference record.
_VISIBLE_POLL_SECONDS = 0.01
_MISSING_RECORD_POLL_SECONDS = 0.1
# The wait while prepared transactions hold all partitions that a member would read.
_HELD_POLL_SECONDS = 0.1
# Timeout of committing a group's offsets to brokers, which may be away. Only administrators and tools need them.
_OFFSET_COMMIT_SECONDS = 1.0


class QueueOffsets:
    """Requests about the offsets of queues. Safe for use by several threads."""

    def __init__(self, client: RemotingClient, missing_timeout: float) -> None:
        self._client = client
        self._missing_timeout = missing_timeout

    def begin(self, queue: Queue, deadline: Deadline) -> int:
        """Return the offset of the first message that the queue still has."""
        return max(0, self._ask(queue, read_requests.min_offset(queue.topic, queue.queue), deadline))

    def end(self, queue: Queue, deadline: Deadline) -> int:
        """Return the offset after the last message of the queue."""
        return self._ask(queue, read_requests.max_offset(queue.topic, queue.queue), deadline)

    def since(self, queue: Queue, timestamp: int, deadline: Deadline) -> int:
        """Return the offset of the first message with this timestamp or a later one; the end if there is none.

        The broker finds the first message stored since `timestamp`. From there, messages are read until the sender's
        own timestamp is late enough. So messages that were stored before `timestamp` are never found.
        """
        at = max(self._ask(queue, read_requests.offset_at(queue.topic, queue.queue, timestamp), deadline), 0)
        at, end = max(at, self.begin(queue, deadline)), self.end(queue, deadline)
        while at < end:
            pulled = self._ask(queue, read_requests.pull(queue.topic, queue.queue, at, GROUP), deadline)
            for record in pulled.records:
                if record.queue_offset >= at and timestamp_of(record) >= timestamp:
                    return record.queue_offset
            if pulled.next_offset <= at:  # the last message is stored, and becomes readable in a moment
                deadline.check(f"looking for the offset of a time in {queue.topic}[{queue.queue}]")
                time.sleep(_VISIBLE_POLL_SECONDS)
            at = max(at, pulled.next_offset)
        return at

    def verifiable(self, queue: Queue, at: int, deadline: Deadline) -> VerifiableOffset:
        """Return the position at the offset `at`, with the message before it, if any, to notice a recreated topic."""
        log_offset = self._log_offset(queue, at - 1, deadline) if at else None
        return VerifiableOffset(at, None if log_offset is None else ReferenceRecord(at - 1, log_offset))

    def is_same_queue(self, queue: Queue, reference: ReferenceRecord, deadline: Deadline) -> bool:
        """Return whether a queue still has a record that was read before, or dropped the record by retention.

        Request a missing record again for some seconds: the broker may just have started.
        """
        sure = time.monotonic() + self._missing_timeout
        while (log_offset := self._log_offset(queue, reference.offset, deadline)) is None:
            if self.begin(queue, deadline) > reference.offset:
                return True
            if time.monotonic() >= sure:
                return False
            deadline.check(f"looking for the last message that was read from {queue.topic}[{queue.queue}]")
            time.sleep(_MISSING_RECORD_POLL_SECONDS)
        return log_offset == reference.log_offset

    def _log_offset(self, queue: Queue, offset: int, deadline: Deadline) -> int | None:
        return self._ask(queue, read_requests.log_offset_at(queue.topic, queue.queue, offset), deadline)

    def committed(self, group: str, queue: Queue, deadline: Deadline) -> int | None:
        """Return the group's offset in the broker's offset store; None if the store has no offset of the group."""
        return self._ask(queue, groups.committed_offset(encoded(group), queue.topic, queue.queue), deadline)

    def commit(self, group: str, offsets: Mapping[Queue, int], deadline: Deadline) -> None:
        """Commit a group's offsets to the brokers' offset stores, for tools. Do not wait for the responses."""
        deadline = Deadline(min(_OFFSET_COMMIT_SECONDS, deadline.left()))
        for queue, offset in offsets.items():
            request = groups.commit_offset(encoded(group), queue.topic, queue.queue, offset)
            with suppress(RemotingError):  # the next acknowledgement commits the offset again
                self._client.submit(queue.broker, request, deadline.left())

    def _ask(self, queue: Queue, request: RpcRequest[T], deadline: Deadline) -> T:
        return retry_call(self._client, queue.broker, request, f"asking about {queue.topic}[{queue.queue}]", deadline)


class InitialPositions:
    """Finds where a reader begins if it has no group, or a new one. "latest" is the end when the reader was opened."""

    def __init__(self, offsets: QueueOffsets, subscription: Subscription, queues: Queues, deadline: Deadline) -> None:
        self._offsets = offsets
        self._start = subscription.start
        self._latest: dict[Partition, VerifiableOffset] = {}
        for each, queue in queues.items() if self._start == "latest" else ():
            self._latest[each] = offsets.verifiable(queue, offsets.end(queue, deadline), deadline)

    def first(self, partition: Partition, queue: Queue, deadline: Deadline) -> VerifiableOffset:
        """Return where to begin a partition. With "latest", begin a partition added later at its first message."""
        if partition in self._latest:
            return self._latest[partition]
        if isinstance(self._start, int):
            at = self._offsets.since(queue, self._start, deadline)
        else:
            at = self._offsets.begin(queue, deadline)
        return self._offsets.verifiable(queue, at, deadline)


@dataclass(frozen=True)
class ResolvedPositions:
    """The partitions whose positions are found (`known`), with the position at which each continues.

    `lost` has the partitions that need a seek first, each with the group's old offset and the error to raise.
    """

    known: Mapping[Partition, VerifiableOffset] = field(default_factory=dict)
    lost: Mapping[Partition, tuple[int, PositionLost]] = field(default_factory=dict)


class GroupPositions:
    """The positions of a group in the decision log. Each recorded commit that acknowledges messages moves positions.

    A new group records its first position before a member hands out the first message. Therefore no message is skipped
    if the first transaction aborts, and members that begin at the same time agree on the position (hazard H79).

    The member that moved the group last may have died before its transaction was published. The next member that reads
    publishes that transaction first. Otherwise its own messages could overtake those of the transaction (hazard H78).
    """

    def __init__(
        self, offsets: QueueOffsets, starts: InitialPositions, group: str, context: Context, ender: HalfEnder
    ) -> None:
        self._offsets = offsets
        self._starts = starts
        self._group = group
        self._ender = ender
        self._skew = ender.cluster.settings.timing.clocks_differ
        self._events = context.events
        self._ledger = context.ledger(context.application, f"group/{group}")

    def positions(self, deadline: Deadline) -> tuple[dict[Partition, int], Position]:
        """Return the group's offsets, and the position in the decision log up to which the log was read for them.

        Raise `PositionLost` if the broker has dropped the records that have the offsets.
        """
        positions, read_up_to = self._verifiable_offsets(deadline)
        return {partition: position.next for partition, position in positions.items()}, read_up_to

    def held(self, deadline: Deadline) -> dict[Partition, Held]:
        """Return partitions on which undecided prepared transactions acknowledge, by the records read so far."""
        with self._with_evidence():
            return {place: held for group, place, held in self._ledger.holds(deadline) if group == self._group}

    def _free(self, targets: Targets, deadline: Deadline) -> Targets:
        """Return `targets` without the partitions on which a prepared transaction acknowledges (hazard H95).

        Abort a transaction that has been prepared too long: perhaps nobody has its token any more. If no partition is
        left, wait a moment, because the caller asks again.
        """
        self.positions(deadline)  # reads the log
        held = self.held(deadline)
        for partition in [each for each in targets if each in held and is_over(held[each].expires_at, self._skew)]:
            holder = held[partition]
            self._ledger.claim(holder.transaction, Decision.ABORT, halves_as_json(()), deadline, log=holder.log)
        free = {partition: target for partition, target in targets.items() if partition not in held}
        if targets and not free:
            time.sleep(min(_HELD_POLL_SECONDS, deadline.left()))
        return free

    def _verifiable_offsets(self, deadline: Deadline) -> tuple[dict[Partition, VerifiableOffset], Position]:
        with self._with_evidence():
            positions, read_up_to = self._ledger.positions(self._group, deadline)
        return {partition: VerifiableOffset.of(position) for partition, position in positions.items()}, read_up_to

    @contextmanager
    def _with_evidence(self) -> Iterator[None]:
        try:
            yield
        except EvidenceLost as error:
            raise PositionLost(
                f"the position of group {self._group!r} is lost: {error}. Nothing was skipped or read again"
            ) from error

    def resolve(self, targets: Targets, queues: Queues, deadline: Deadline) -> ResolvedPositions:
        """Return where the partitions of `targets` continue: at the group's position, or at a later target of a seek.

        Partitions on which a prepared transaction acknowledges are left out until it has ended. `queues` has all
        partitions of the topics, because a group claims its first positions in a whole topic at once. In a partition
        whose target is None, first publish the transaction that moved the group last. In a recreated topic, move the
        group to the target that the user has chosen, even if that is an earlier offset.
        """
        targets = self._free(targets, deadline)
        while targets:
            current, read_up_to = self._verifiable_offsets(deadline)
            recreated = self._recreated({each: current[each] for each in targets if each in current}, queues, deadline)
            chosen = {each: target.at for each in recreated if (target := targets[each]) is not None and target.chosen}
            if chosen:
                begun = {each: self._offsets.verifiable(queues[each], at, deadline) for each, at in chosen.items()}
                self._claim(begun, read_up_to, deadline)
                continue
            if all(partition in current for partition in targets):
                self._publish_before({each for each, target in targets.items() if target is None}, deadline)
                return self._resolved(targets, current, recreated, queues, deadline)
            # Read the log after the broker's offsets: a member writes its decision to the log before it commits the
            # offset to the broker, so an offset without a decision then is from another application or client.
            committed = {each: self._offsets.committed(self._group, queues[each], deadline) for each in queues}
            current, read_up_to = self._verifiable_offsets(deadline)
            new = set(queues) - {each for each in queues if any(each[0] == topic for topic, _ in current)}
            begun = {}
            lost = recreated
            for partition, queue in queues.items():
                if partition in current or not (partition in targets or partition in new):
                    continue
                if (target := targets.get(partition)) is not None:
                    begun[partition] = self._offsets.verifiable(queue, target.at, deadline)
                elif (at := committed[partition]) is not None:
                    lost[partition] = at, self._position_unknown(partition, at)
                elif partition in new:
                    begun[partition] = self._starts.first(partition, queue, deadline)
                else:  # the partition was added after the group began, so the group reads all its messages
                    begun[partition] = self._offsets.verifiable(queue, self._offsets.begin(queue, deadline), deadline)
            if begun and not self._claim(begun, read_up_to, deadline):
                continue
            self._publish_before({p for p, target in targets.items() if target is None and p in current}, deadline)
            return self._resolved(targets, {**current, **begun}, lost, queues, deadline)
        return ResolvedPositions()

    def _resolved(
        self,
        targets: Targets,
        current: Mapping[Partition, VerifiableOffset],
        lost: Mapping[Partition, tuple[int, PositionLost]],
        queues: Queues,
        deadline: Deadline,
    ) -> ResolvedPositions:
        known = {
            each: self._advanced(current[each], target, queues[each], deadline)
            for each, target in targets.items()
            if each in current and each not in lost
        }
        return ResolvedPositions(known, {each: lost[each] for each in targets if each in lost})

    def _advanced(
        self, current: VerifiableOffset, target: SeekTarget | None, queue: Queue, deadline: Deadline
    ) -> VerifiableOffset:
        if target is None or target.at <= current.next:
            return current
        if target.chosen:
            return self._offsets.verifiable(queue, target.at, deadline)
        return VerifiableOffset(target.at, current.reference)

    def _recreated(
        self, current: Mapping[Partition, VerifiableOffset], queues: Queues, deadline: Deadline
    ) -> dict[Partition, tuple[int, PositionLost]]:
        """Return, by partition, the old offset and an error for topics recreated since the group read them."""
        errors, owner = {}, f"the position of group {self._group!r}"
        for partition, (at, reference) in current.items():
            if reference is not None and not self._offsets.is_same_queue(queues[partition], reference, deadline):
                errors[partition] = at, topic_recreated(owner, partition, at, reference)
        return errors

    def _publish_before(self, partitions: Collection[Partition], deadline: Deadline) -> None:
        """Publish the last transaction that moved the group in each partition. Earlier ones are published already."""
        if not partitions:
            return
        with self._with_evidence():
            decided = self._ledger.acknowledged(self._group, deadline)
        for transaction, claim in dict(decided[each] for each in partitions if each in decided).items():
            publish_decided(self._ender, transaction, claim, deadline)

    def _claim(self, begun: Mapping[Partition, VerifiableOffset], read_up_to: Position, deadline: Deadline) -> bool:
        """Record in the decision log that the group begins at the positions `begun`, and return True.

        Return False if another member has recorded positions after `read_up_to`, up to which the log was read.
        """
        acks = [Ack(self._group, each, (at.next,), at.position, read_up_to) for each, at in begun.items()]
        with self._with_evidence(), self._events.step("step:start", None, group=self._group):
            log = self._ledger.begin(deadline)
            try:
                self._ledger.claim(uuid.uuid4().hex, Decision.COMMIT, halves_as_json(()), deadline, log=log, acks=acks)
            except Conflict:
                return False
        return True

    def _position_unknown(self, partition: Partition, offset: int) -> PositionLost:
        topic, number = partition
        return PositionLost(
            f"group {self._group!r} has read {topic}[{number}] up to {offset}, by the broker's offset store. But the"
            " group is not in this application's decision log: another application or another client reads in a group"
            " of this name, or the log was lost. Nothing was skipped or read again: choose where to continue by"
            f" seek({{({topic!r}, {number}): (offset,)}}), or read with a new group"
        )
