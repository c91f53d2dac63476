"""The positions at which the reading of partitions starts and continues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from txnbridge.errors import Conflict, EvidenceLost, PositionLost
from txnbridge.spi import Ack, Context, Deadline, Decision, Partition, Position, Subscription
from txnbridge_rocketmq.client import groups, reading
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.client.retry import retry_call
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.outcome.outcome import publish_decided
from txnbridge_rocketmq.read.anchored_offset import Anchor, AnchoredOffset, topic_recreated
from txnbridge_rocketmq.read.partition import SURE_SECONDS, SeekTarget
from txnbridge_rocketmq.read.pull import GROUP
from txnbridge_rocketmq.settings.names import encoded
from txnbridge_rocketmq.write.half_batch import parts_as_json
from txnbridge_rocketmq.write.message_format import timestamp_of

T = TypeVar("T")

Queues = Mapping[Partition, Queue]
Targets = Mapping[Partition, SeekTarget | None]

_AGAIN_SECONDS = 0.01
_LOOK_SECONDS = 0.1
# Timeout of committing a group's offset to the broker, which only serves administrators and tools.
_COMMIT_SECONDS = 5.0


class QueueOffsets:
    """Requests about the offsets of queues. Safe for use by several threads."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client

    def begin(self, queue: Queue, deadline: Deadline) -> int:
        """Return the offset of the first message that the queue still has."""
        return max(0, self._ask(queue, reading.min_offset(queue.topic, queue.queue), deadline))

    def end(self, queue: Queue, deadline: Deadline) -> int:
        """Return the offset after the last message of the queue."""
        return self._ask(queue, reading.max_offset(queue.topic, queue.queue), deadline)

    def since(self, queue: Queue, timestamp: int, deadline: Deadline) -> int:
        """Return the offset of the first message with this timestamp or a later one; the end if there is none.

        Brokers search by store time. The sender's timestamps are compared from that offset on. Therefore a message with
        a timestamp in the future is found only if it was stored after `timestamp`.
        """
        at = max(self._ask(queue, reading.offset_at(queue.topic, queue.queue, timestamp), deadline), 0)
        at, end = max(at, self.begin(queue, deadline)), self.end(queue, deadline)
        while at < end:
            pulled = self._ask(queue, reading.pull(queue.topic, queue.queue, at, GROUP), deadline)
            for record in pulled.records:
                if record.queue_offset >= at and timestamp_of(record) >= timestamp:
                    return record.queue_offset
            if pulled.next_offset <= at:  # the queue's last message becomes readable in a moment
                deadline.check(f"looking for a time in {queue.topic}[{queue.queue}]")
                time.sleep(_AGAIN_SECONDS)
            at = max(at, pulled.next_offset)
        return at

    def anchored(self, queue: Queue, at: int, deadline: Deadline) -> AnchoredOffset:
        """Return the position at an offset, with the message before the offset as its anchor if that message exists."""
        log_offset = self._log_offset(queue, at - 1, deadline) if at else None
        return AnchoredOffset(at, None if log_offset is None else Anchor(at - 1, log_offset))

    def has_anchor(self, queue: Queue, anchor: Anchor, deadline: Deadline) -> bool:
        """Return whether the queue still has its anchor, or retention has dropped it.

        A missing record is requested again for some seconds, because a broker may just have started.
        """
        sure = time.monotonic() + SURE_SECONDS
        while (log_offset := self._log_offset(queue, anchor.offset, deadline)) is None:
            if self.begin(queue, deadline) > anchor.offset:
                return True
            if time.monotonic() >= sure:
                return False
            deadline.check(f"looking for the last message that was read of {queue.topic}[{queue.queue}]")
            time.sleep(_LOOK_SECONDS)
        return log_offset == anchor.log_offset

    def _log_offset(self, queue: Queue, offset: int, deadline: Deadline) -> int | None:
        return self._ask(queue, reading.log_offset_at(queue.topic, queue.queue, offset), deadline)

    def committed(self, group: str, queue: Queue, deadline: Deadline) -> int | None:
        """Return the group's offset in the broker's offset store; None if the store has none."""
        return self._ask(queue, groups.committed_offset(encoded(group), queue.topic, queue.queue), deadline)

    def commit(self, group: str, queue: Queue, offset: int) -> None:
        """Commit a group's offset to the broker's offset store, for tools. Do not wait for the response."""
        request = groups.commit_offset(encoded(group), queue.topic, queue.queue, offset)
        with suppress(RemotingError):  # the next acknowledgement commits the offset again
            self._client.submit(queue.broker, request, _COMMIT_SECONDS)

    def _ask(self, queue: Queue, request: RpcRequest[T], deadline: Deadline) -> T:
        action = f"asking about {queue.topic}[{queue.queue}]"
        return retry_call(self._client, queue.broker, request, action, deadline)


class InitialPositions:
    """The positions at which a subscription begins. "latest" means the end when the reader was opened."""

    def __init__(self, offsets: QueueOffsets, subscription: Subscription, queues: Queues, deadline: Deadline) -> None:
        self._offsets = offsets
        self._start = subscription.start
        latest = self._start == "latest"
        self._latest: dict[Partition, AnchoredOffset] = {}
        for each, queue in queues.items() if latest else ():
            self._latest[each] = offsets.anchored(queue, offsets.end(queue, deadline), deadline)

    def first(self, partition: Partition, queue: Queue, deadline: Deadline) -> AnchoredOffset:
        """Return a partition's first position. A partition that was added later begins at its first message."""
        if partition in self._latest:
            return self._latest[partition]
        if isinstance(self._start, int):
            at = self._offsets.since(queue, self._start, deadline)
        else:
            at = self._offsets.begin(queue, deadline)
        return self._offsets.anchored(queue, at, deadline)


@dataclass(frozen=True)
class ResolvedPositions:
    """The positions at which partitions continue, and errors for partitions whose position only the user can choose."""

    known: Mapping[Partition, AnchoredOffset] = field(default_factory=dict)
    lost: Mapping[Partition, tuple[int, PositionLost]] = field(default_factory=dict)


class GroupPositions:
    """The position of a group: the end of the last decision in the decision log that acknowledges messages of the
    group.

    A new group begins by a decision with its first position, written before the first message is handed out. Therefore
    no message is skipped if the first transaction aborts, and of members that begin at the same time one decides
    (hazard H79).

    The member whose decision moved the group may have died before it published that transaction. The member that
    continues publishes the transaction first. Otherwise its own messages would overtake the messages of that
    transaction (hazard H78).
    """

    def __init__(
        self, offsets: QueueOffsets, starts: InitialPositions, group: str, context: Context, ender: HalfEnder
    ) -> None:
        self._offsets = offsets
        self._starts = starts
        self._group = group
        self._ender = ender
        self._events = context.events
        self._ledger = context.ledger(context.application, f"group/{group}")

    def positions(self, deadline: Deadline) -> tuple[dict[Partition, int], Position]:
        """Return the group's positions, and the position up to which the decision log was read. Raise `PositionLost` if
        the log has lost the group's position.
        """
        positions, read_up_to = self._anchored_offsets(deadline)
        return {partition: position.next for partition, position in positions.items()}, read_up_to

    def _anchored_offsets(self, deadline: Deadline) -> tuple[dict[Partition, AnchoredOffset], Position]:
        with self._with_evidence():
            positions, read_up_to = self._ledger.positions(self._group, deadline)
        return {partition: AnchoredOffset.of(position) for partition, position in positions.items()}, read_up_to

    @contextmanager
    def _with_evidence(self) -> Iterator[None]:
        try:
            yield
        except EvidenceLost as error:
            raise PositionLost(
                f"nobody can tell where group {self._group!r} stands: {error}. Nothing was skipped or read again"
            ) from error

    def resolve(self, targets: Targets, queues: Queues, deadline: Deadline) -> ResolvedPositions:
        """Return the positions at which partitions continue: not before the group's position or the target of a seek.

        `queues` are all partitions of the topics: a group begins a topic with all partitions that exist then. A
        partition without a target may have been moved by another member. In a recreated topic the group moves to the
        target that the user has chosen, forward or back.
        """
        while True:
            current, read_up_to = self._anchored_offsets(deadline)
            recreated = self._recreated({each: current[each] for each in targets if each in current}, queues, deadline)
            chosen = {each: target.at for each in recreated if (target := targets[each]) is not None and target.chosen}
            if chosen:
                begun = {each: self._offsets.anchored(queues[each], at, deadline) for each, at in chosen.items()}
                self._claim(begun, read_up_to, deadline)
                continue
            if all(partition in current for partition in targets):
                self._publish_before({each for each, target in targets.items() if target is None}, deadline)
                return self._resolved(targets, current, recreated, queues, deadline)
            # Read the log again after the broker's offsets: a member commits an offset to the broker after its decision
            # is in the log.
            committed = {each: self._offsets.committed(self._group, queues[each], deadline) for each in queues}
            current, read_up_to = self._anchored_offsets(deadline)
            new = set(queues) - {each for each in queues if any(each[0] == topic for topic, _ in current)}
            begun = {}
            lost = recreated
            for partition, queue in queues.items():
                if partition in current or not (partition in targets or partition in new):
                    continue
                if (target := targets.get(partition)) is not None:
                    begun[partition] = self._offsets.anchored(queue, target.at, deadline)
                elif (at := committed[partition]) is not None:
                    lost[partition] = at, self._lost(partition, at)
                elif partition in new:
                    begun[partition] = self._starts.first(partition, queue, deadline)
                else:  # the partition was added since the group began, so all its messages are new
                    begun[partition] = self._offsets.anchored(queue, self._offsets.begin(queue, deadline), deadline)
            if begun and not self._claim(begun, read_up_to, deadline):
                continue
            self._publish_before({p for p, target in targets.items() if target is None and p in current}, deadline)
            return self._resolved(targets, {**current, **begun}, lost, queues, deadline)

    def _resolved(
        self,
        targets: Targets,
        current: Mapping[Partition, AnchoredOffset],
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
        self, current: AnchoredOffset, target: SeekTarget | None, queue: Queue, deadline: Deadline
    ) -> AnchoredOffset:
        if target is None or target.at <= current.next:
            return current
        if target.chosen:
            return self._offsets.anchored(queue, target.at, deadline)
        return AnchoredOffset(target.at, current.anchor)

    def _recreated(
        self, current: Mapping[Partition, AnchoredOffset], queues: Queues, deadline: Deadline
    ) -> dict[Partition, tuple[int, PositionLost]]:
        """Return the errors of those partitions whose topics were recreated since the group read them."""
        errors = {}
        for partition, (at, anchor) in current.items():
            if anchor is not None and not self._offsets.has_anchor(queues[partition], anchor, deadline):
                errors[partition] = at, topic_recreated(f"the position of group {self._group!r}", partition, at, anchor)
        return errors

    def _publish_before(self, partitions: Collection[Partition], deadline: Deadline) -> None:
        """Publish the last transactions that acknowledged on these partitions. Earlier ones are published already."""
        if not partitions:
            return
        with self._with_evidence():
            decided = self._ledger.acknowledged(self._group, deadline)
        for transaction, claim in dict(decided[each] for each in partitions if each in decided).items():
            publish_decided(self._ender, transaction, claim, deadline)

    def _claim(self, begun: Mapping[Partition, AnchoredOffset], read_up_to: Position, deadline: Deadline) -> bool:
        """Write the group's first position to the decision log. Return False if another member was first."""
        acks = [
            Ack(self._group, each, (position.next,), position.position, read_up_to) for each, position in begun.items()
        ]
        with self._with_evidence(), self._events.step("step:start", None, group=self._group):
            log = self._ledger.begin(deadline)
            try:
                self._ledger.claim(uuid.uuid4().hex, Decision.COMMIT, parts_as_json(()), deadline, log=log, acks=acks)
            except Conflict:
                return False
        return True

    def _lost(self, partition: Partition, offset: int) -> PositionLost:
        topic, number = partition
        return PositionLost(
            f"group {self._group!r} has read {topic}[{number}] up to {offset}, by what the broker was told; but this"
            " application's decision log does not know it: another application or another client reads in a group of"
            " this name, or the log was lost. Nothing was skipped or read again: say where to go on by"
            f" seek({{({topic!r}, {number}): (offset,)}}), or read with a new group"
        )
