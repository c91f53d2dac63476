"""The reader: returns the messages of all partitions that are assigned to it, in a group or without one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from txnbridge import errors
from txnbridge.spi import (
    BackgroundTask,
    Deadline,
    Message,
    Partition,
    Position,
    Reader,
    ReaderListener,
    Subscription,
    as_offset,
)
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.read.partition import QueueReader, SeekTarget, out_of_range
from txnbridge_rocketmq.read.rebalance import QueueAssignment, Rebalancer, open_client
from txnbridge_rocketmq.read.start_positions import GroupPositions, InitialPositions, QueueOffsets, ResolvedPositions
from txnbridge_rocketmq.read.verifiable_offset import VerifiableOffset
from txnbridge_rocketmq.write.acks import RocketMQAckContext

_log = logging.getLogger("txnbridge.rocketmq.client")

# Timeout of `seek`, which gets no deadline from its caller.
SEEK_SECONDS = 10.0
# The longest wait in `poll`, and if `QueueReader.needs_early_poll`. Responses end the wait early; signals do not.
_IDLE_WAIT_SECONDS, _EARLY_POLL_SECONDS = 0.25, 0.05
# The interval of checks for partitions that were added to the reader's topics.
_NEW_PARTITIONS_SECONDS = 3.0
# Timeout of such a check. Without name servers the reader continues, but finds no new partitions.
_ROUTE_LOOK_UP_SECONDS = 3.0
# The maximum number of bytes that one `poll` returns: 10,000 large messages would take gigabytes.
_MOST_POLL_BYTES = 16 * 2**20
# Timeout of the last requests in `close`. Without them, other members and tools only learn of the end later.
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True)
class _RefreshResult:
    """The result of a reader's background task: queues, the assignment of partitions, and positions to continue at.

    `moves` has each `QueueReader.moves` at the begin of the task. If a seek moved a partition since, the partition's
    position in `positions` is out of date, and not used.
    """

    queues: Mapping[Partition, Queue]
    assignment: QueueAssignment | None = None
    positions: ResolvedPositions = field(default_factory=ResolvedPositions)
    moves: Mapping[QueueReader, int] = field(default_factory=dict)


class RocketMQReader(Reader):
    """Reader with connections of its own. Background tasks find assignment and positions, so `poll` need not wait."""

    def __init__(
        self, ender: HalfEnder, subscription: Subscription, listener: ReaderListener, deadline: Deadline
    ) -> None:
        self._cluster = cluster = ender.cluster
        self._subscription = subscription
        self._listener = listener
        self._timeout = cluster.settings.timeout
        self._wake = threading.Event()
        self._guard = threading.Lock()  # acknowledgements come from other threads
        self._readers: dict[Partition, QueueReader] = {}
        self._paused: set[Partition] = set()
        self._task: BackgroundTask[_RefreshResult] | None = None
        self._refresh_at = 0.0
        self._closed = False
        # A group may be started before its topic exists. A reader without a group only looks, so it creates no topic.
        topics = {t: cluster.topics.queues(t, deadline, subscription.creates(t)) for t in subscription.topics}
        queues = self._queues = {(topic, each.queue): each for topic, found in topics.items() for each in found}
        self._rebalancer: Rebalancer | None = None
        self._group: GroupPositions | None = None
        self._context: RocketMQAckContext | None = None
        if subscription.group is None:
            self._client = open_client(cluster.settings)
        else:
            self._rebalancer = Rebalancer(
                cluster.settings, subscription.group, subscription.topics, self._wake.set, deadline
            )
            self._client = self._rebalancer.client
        try:
            self._offsets = QueueOffsets(self._client, cluster.settings.timing.missing_timeout)
            self._starts = InitialPositions(self._offsets, subscription, queues, deadline)
            if subscription.group is None:
                first = {each: self._starts.first(each, queue, deadline) for each, queue in queues.items()}
                for partition, at in first.items():
                    self._add(partition, queues[partition]).continue_at(at)
            else:
                self._group = GroupPositions(self._offsets, self._starts, subscription.group, cluster.context, ender)
                self._context = RocketMQAckContext(
                    subscription.group, self._group, self._readers, self._guard, self._commit_offsets
                )
        except BaseException:
            self.close(deadline)
            raise

    def _add(self, partition: Partition, queue: Queue) -> QueueReader:
        reader = QueueReader(partition, queue, self._cluster.settings.timing)
        reader.paused = partition in self._paused
        reader.source = self._listener.assigned(partition)
        with self._guard:
            self._readers[partition] = reader
        return reader

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        looked = False
        while True:
            self._run_background_task()
            for reader in self._readers.values():
                reader.process_responses()
            messages = self._hand_out(max_messages)
            for reader in self._readers.values():
                reader.send_pulls(self._submit)
            if messages:
                return messages
            self._raise_faults()
            if looked and deadline.expired:
                return []
            self._wake.wait(min(deadline.left(), self._idle_seconds()))
            self._wake.clear()
            looked = True

    def _idle_seconds(self) -> float:
        if self._task is not None or any(reader.needs_early_poll for reader in self._readers.values()):
            return _EARLY_POLL_SECONDS
        return _IDLE_WAIT_SECONDS if self._rebalancer is None else min(_IDLE_WAIT_SECONDS, self._rebalancer.due_in())

    def _submit(self, broker: str, request: RpcRequest[Any], timeout: float) -> Call[Any]:
        call = self._client.submit(broker, request, timeout)
        call.when_done(lambda _: self._wake.set())
        return call

    def _hand_out(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        room = _MOST_POLL_BYTES
        for reader in self._rotated(self._readers.values()):
            while len(messages) < limit and room > 0 and reader.has_message:
                if (message := reader.hand_out()) is not None:
                    messages.append(message)
                    room -= len(message.value or b"")
        return messages

    def _raise_faults(self) -> None:
        for reader in self._readers.values():
            if (fault := reader.fault) is not None and not reader.paused:
                # The topic may be created again, or the right be granted, so the next `poll` tries again.
                if isinstance(fault, errors.NotFound | errors.AccessDenied):
                    reader.fault = None
                raise fault

    def _run_background_task(self) -> None:
        """Apply the result of the background task if it has ended, and start the next task if one is due."""
        if self._task is not None and self._task.done:
            task, self._task = self._task, None
            try:
                task.finish()
            except (errors.PositionLost, errors.EvidenceLost):
                raise
            except (errors.BrokerUnavailable, errors.OutcomeUnknown) as error:
                _log.warning("the assignment or a position is not known, and is asked for again: %s", error)
        if self._task is None and (due := self._due_task()) is not None:
            deadline = Deadline(self._timeout)
            self._task = BackgroundTask(lambda: due(deadline), self._apply, self._wake.set)

    def _due_task(self) -> Callable[[Deadline], _RefreshResult] | None:
        """Return the background task that is due now; None if no task is due."""
        readers = list(self._readers.values())
        is_cut_off = any(reader.is_cut_off for reader in readers)
        if self._rebalancer is not None:
            moved = {reader: reader.moves for reader in readers if not reader.settled}
            targets = {reader.partition: None if reader.overtaken else reader.target for reader in moved}
            if moved or is_cut_off or not self._rebalancer.due_in():
                holding = frozenset(self._readers)
                return lambda deadline: self._refresh_group(holding, targets, moved, deadline)
        elif is_cut_off or time.monotonic() >= self._refresh_at:
            return self._refresh_topics
        return None

    def _refresh_group(
        self,
        holding: frozenset[Partition],
        targets: Mapping[Partition, SeekTarget | None],
        moves: Mapping[QueueReader, int],
        deadline: Deadline,
    ) -> _RefreshResult:
        assert self._rebalancer is not None and self._group is not None
        queues = self._refresh_queues()
        by_topic: dict[str, list[Queue]] = {}
        for (topic, _), queue in queues.items():
            by_topic.setdefault(topic, []).append(queue)
        assignment = self._rebalancer.refresh(by_topic, holding, deadline)
        asked = {each: targets.get(each) for each in assignment.free if each in targets or each not in holding}
        resolved = self._group.resolve(asked, queues, deadline) if asked else ResolvedPositions()
        return _RefreshResult(queues, assignment, resolved, moves)

    def _refresh_topics(self, deadline: Deadline) -> _RefreshResult:
        queues = self._refresh_queues()
        new = {partition: queue for partition, queue in queues.items() if partition not in self._readers}
        for queue in {queue.broker: queue for queue in queues.values()}.values():
            self._offsets.end(queue, deadline)  # check that the broker responds again
        first = {partition: self._starts.first(partition, queue, deadline) for partition, queue in new.items()}
        return _RefreshResult(queues, positions=ResolvedPositions(first))

    def _refresh_queues(self) -> dict[Partition, Queue]:
        """Return all queues of the topics, with new ones. Keep queues that are missing now: a broker may be down."""
        if time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + _NEW_PARTITIONS_SECONDS
            for topic in self._subscription.topics:
                with suppress(errors.BrokerUnavailable):
                    queues = self._cluster.topics.existing_queues(topic, Deadline(_ROUTE_LOOK_UP_SECONDS))
                    self._queues = {**self._queues, **{(topic, each.queue): each for each in queues}}
        return self._queues

    def _apply(self, result: _RefreshResult) -> None:
        assigned = result.assignment or QueueAssignment()
        for reader in self._readers.values():
            reader.is_cut_off &= reader.partition in assigned.mine - assigned.free  # its broker did not respond
        if result.assignment is not None:
            self._remove([each for each in self._readers if each in result.assignment.taken], self._listener.lost)
            self._remove([key for key in self._readers if key not in result.assignment.mine], self._listener.revoking)
        for partition in (*result.positions.known, *result.positions.lost):
            reader = self._readers.get(partition) or self._add(partition, result.queues[partition])
            if result.moves.get(reader, reader.moves) == reader.moves:
                self._settle(reader, result.positions)

    def _settle(self, reader: QueueReader, resolved: ResolvedPositions) -> None:
        with self._guard:
            if reader.partition in resolved.known:
                position = resolved.known[reader.partition]
                reader.continue_at(VerifiableOffset(position.next, position.reference or reader.reference))
            else:
                at, fault = resolved.lost[reader.partition]
                reader.continue_at(VerifiableOffset(at))
                reader.fail_until_seek(fault)

    def _remove(self, partitions: Sequence[Partition], tell: Callable[[Sequence[Partition]], None]) -> None:
        if not partitions:
            return
        try:
            tell(partitions)
        finally:
            with self._guard:
                left = [self._readers.pop(partition) for partition in partitions]
            if self._rebalancer is not None:
                self._rebalancer.release([reader.queue for reader in left])

    def positions(self) -> dict[Partition, Position]:
        return {partition: (reader.next,) for partition, reader in self._readers.items()}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        wanted = {self._reader(partition): as_offset(position) for partition, position in positions.items()}
        if self._group is not None:  # this sends no request, so that a seek after an abort cannot fail
            for reader, at in wanted.items():
                reader.unsettle(SeekTarget(at, chosen=True))
            return
        deadline = Deadline(SEEK_SECONDS)
        for reader, at in wanted.items():
            begin = self._offsets.begin(reader.queue, deadline)
            if at < begin:
                raise errors.PositionLost(out_of_range("the position to seek", reader.partition, at, begin, begin))
        found = {each: self._offsets.verifiable(each.queue, at, deadline) for each, at in wanted.items()}
        for reader, position in found.items():
            reader.continue_at(position)

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        self._go_back({self._reader(partition): as_offset(position) for partition, position in positions.items()})

    def _go_back(self, wanted: Mapping[QueueReader, int]) -> None:
        for reader, at in wanted.items():
            if self._group is not None:
                reader.unsettle(SeekTarget(at, chosen=False))
            elif not isinstance(reader.fault, errors.PositionLost):
                reader.go_back(at)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        wanted = {c: self._offsets.since(c.queue, timestamp, deadline) for c in self._readers.values()}
        positions_by_reader = {c: self._offsets.verifiable(c.queue, at, deadline) for c, at in wanted.items()}
        for reader, position in positions_by_reader.items():
            if self._group is not None:
                reader.unsettle(SeekTarget(position.next, chosen=True))
            else:
                reader.continue_at(position)

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for partition, given in positions.items():
            reader = self._readers.get(partition)
            if reader is not None and given:  # the next reader of a lost partition delivers its messages again anyway
                self._go_back({reader: min(reader.next, *map(as_offset, given))})

    def pause(self, partitions: Sequence[Partition]) -> None:
        for reader in [self._reader(partition) for partition in partitions]:
            reader.paused = True
            self._paused.add(reader.partition)

    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            reader = self._readers.get(partition) if partition in self._paused else self._reader(partition)
            self._paused.discard(partition)
            if reader is not None:
                reader.paused = False

    def _reader(self, partition: Partition) -> QueueReader:
        reader = self._readers.get(partition)
        if reader is None:
            topic, number = partition
            raise errors.InvalidState(
                f"{topic}[{number}] is not assigned to this reader now; `positions()` lists the partitions that are"
            )
        return reader

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        positions: Mapping[Partition, int] = {}
        if self._group is not None:
            positions, _ = self._group.positions(deadline)
        lags = {}
        for partition, reader in self._readers.items():
            at = positions.get(partition, reader.next)
            if at >= reader.delivered_end:  # nothing is unacknowledged, so skipped duplicates count as read
                at = max(at, reader.next)
            lags[partition] = max(0, self._offsets.end(reader.queue, deadline) - at)
        return lags

    def ack_context(self) -> RocketMQAckContext:
        if self._context is None:
            raise errors.InvalidState("messages that were read without a group cannot be acknowledged")
        return self._context

    def _commit_offsets(self, offsets: Mapping[Queue, int], deadline: Deadline) -> None:
        self._offsets.commit(str(self._subscription.group), offsets, deadline)

    def close(self, deadline: Deadline) -> None:
        if self._closed:
            return
        self._closed = True
        if self._task is not None:  # otherwise the task might lock queues again after they are unlocked below
            self._task.join(min(deadline.left(), _CLOSE_SECONDS))
        if self._context is not None and self._context.was_used and self._group is not None:
            with suppress(errors.TxnBridgeError):
                positions, _ = self._group.positions(Deadline(min(deadline.left(), _CLOSE_SECONDS)))
                # Without partitions in which the group has no position yet
                known = {reader.queue: positions[at] for at, reader in self._readers.items() if at in positions}
                self._commit_offsets(known, deadline)
        if self._rebalancer is not None:
            self._rebalancer.close(deadline)
        else:
            self._client.close(deadline.left())
