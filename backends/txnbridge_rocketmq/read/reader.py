"""Reading committed messages, in a group or alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from txnbridge.errors import (
    BrokerUnavailable,
    EvidenceLost,
    InvalidOption,
    InvalidState,
    NotFound,
    NotSupported,
    OutcomeUnknown,
    PositionLost,
    TxnBridgeError,
)
from txnbridge.spi import BackgroundTask, Deadline, Message, Partition, Position, Reader, ReaderListener, Subscription
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.read.anchored_position import AnchoredPosition
from txnbridge_rocketmq.read.partition import QueueReader, SeekTarget, out_of_range
from txnbridge_rocketmq.read.rebalance import GroupMember, QueueAssignment, open_client
from txnbridge_rocketmq.read.start_positions import GroupPositions, InitialPositions, QueueOffsets, ResolvedPositions
from txnbridge_rocketmq.write.acks import RocketMQAckContext

_log = logging.getLogger("txnbridge.rocketmq.client")

# A call without a deadline of its own (seek) asks the broker something; it waits this long for the answer.
SHORT_CALL = 10.0
# Nothing that has to be noticed goes unannounced, but for a signal, and times at which something is due.
_IDLE_SECONDS, _BUSY_SECONDS = 0.25, 0.05
# How often a reader looks for partitions that were added to its topics.
_LOOK_SECONDS = 3.0
# Name servers answer in milliseconds. Without them everything goes on, but for what is new.
_NAMING_SECONDS = 3.0
# One poll hands out so many bytes at most: nobody asks for 10,000 messages to hold as many megabytes.
_ENOUGH_BYTES = 16 * 2**20
# What is done for others at the end may take so long; they find out by themselves.
_LEAVING_SECONDS = 1.0


@dataclass(frozen=True)
class _RefreshResult:
    """What came of the work behind a reader: how its group is shared out, and where partitions go on.

    `moves` are those of the cursors that were asked about, at that time.
    """

    queues: Mapping[Partition, Queue]
    assignment: QueueAssignment | None = None
    found: ResolvedPositions = field(default_factory=ResolvedPositions)
    moves: Mapping[QueueReader, int] = field(default_factory=dict)


class RocketMQReader(Reader):
    """Reads queues over connections of its own. What takes time besides reading is done on another thread."""

    def __init__(
        self, ender: HalfEnder, subscription: Subscription, listener: ReaderListener, deadline: Deadline
    ) -> None:
        if subscription.sharing != "partition":
            raise NotSupported("each queue of RocketMQ is read by one member of a group: sharing='partition'")
        self._cluster = cluster = ender.cluster
        self._subscription = subscription
        self._listener = listener
        self._timeout = cluster.settings.timeout
        self._wake = threading.Event()
        self._guard = threading.Lock()  # acknowledgements come from other threads
        self._readers: dict[Partition, QueueReader] = {}
        self._paused: set[Partition] = set()
        self._work: BackgroundTask[_RefreshResult] | None = None
        self._look_at = 0.0
        self._turn = 0
        self._closed = False
        # A group may wait for a topic that nobody has written yet; whoever only looks makes none.
        create = subscription.group is not None
        topics = {topic: cluster.topics.queues(topic, deadline, create=create) for topic in subscription.topics}
        queues = self._queues = {(topic, each.queue): each for topic, found in topics.items() for each in found}
        self._member: GroupMember | None = None
        self._group: GroupPositions | None = None
        self._context: RocketMQAckContext | None = None
        if subscription.group is None:
            self._client = open_client(cluster.settings)
        else:
            self._member = GroupMember(
                cluster.settings, subscription.group, subscription.topics, self._wake.set, deadline
            )
            self._client = self._member.client
        try:
            self._offsets = QueueOffsets(self._client)
            self._starts = InitialPositions(self._offsets, subscription, queues, deadline)
            if subscription.group is None:
                self._add_all(queues, self._starts, deadline)
            else:
                self._group = GroupPositions(self._offsets, self._starts, subscription.group, cluster.context, ender)
                self._context = RocketMQAckContext(
                    subscription.group, self._group, self._readers, self._guard, self._tell, self._timeout
                )
        except BaseException:
            self.close(deadline)
            raise

    def _add_all(self, queues: Mapping[Partition, Queue], starts: InitialPositions, deadline: Deadline) -> None:
        first = {partition: starts.first(partition, queue, deadline) for partition, queue in queues.items()}
        for partition, at in first.items():
            self._add(partition, queues[partition]).go_on(at)

    def _add(self, partition: Partition, queue: Queue) -> QueueReader:
        reader = QueueReader(partition, queue)
        reader.paused = partition in self._paused
        reader.source = self._listener.assigned(partition)
        with self._guard:
            self._readers[partition] = reader
        return reader

    # --- reading ----------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        looked = False
        while True:
            self._follow()
            for reader in self._readers.values():
                reader.take_in()
            messages = self._hand_out(max_messages)
            for reader in self._readers.values():
                reader.ask(self._submit)
            if messages:
                return messages
            self._raise_faults()
            if looked and deadline.expired:
                return []
            self._wake.wait(min(deadline.left(), self._idle_seconds()))
            self._wake.clear()
            looked = True

    def _idle_seconds(self) -> float:
        if self._work is not None or any(reader.is_busy for reader in self._readers.values()):
            return _BUSY_SECONDS
        return _IDLE_SECONDS if self._member is None else min(_IDLE_SECONDS, self._member.due_in())

    def _submit(self, broker: str, request: RpcRequest[Any], timeout: float) -> Call[Any]:
        call = self._client.submit(broker, request, timeout)
        call.when_done(lambda _: self._wake.set())
        return call

    def _hand_out(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        room = _ENOUGH_BYTES
        for reader in self._in_turn():
            while len(messages) < limit and room > 0 and reader.has_some:
                message = reader.hand_out()
                if message is not None:
                    messages.append(message)
                    room -= len(message.value or b"")
        return messages

    def _in_turn(self) -> list[QueueReader]:
        """All cursors, another one first each time, so that a long partition does not keep the others waiting."""
        readers = list(self._readers.values())
        if len(readers) > 1:
            self._turn = (self._turn + 1) % len(readers)
            readers = readers[self._turn :] + readers[: self._turn]
        return readers

    def _raise_faults(self) -> None:
        for reader in self._readers.values():
            if (fault := reader.fault) is not None and not reader.paused:
                if isinstance(fault, NotFound):  # the topic may be made anew
                    reader.fault = None
                raise fault

    # --- partitions come and go ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Take in what came of the work behind the reader, and have done what is due."""
        if self._work is not None and self._work.done:
            work, self._work = self._work, None
            try:
                work.finish()
            except (PositionLost, EvidenceLost):
                raise
            except (BrokerUnavailable, OutcomeUnknown) as error:
                _log.warning("tried again: %s", error)
        if self._work is None and (due := self._due()) is not None:
            deadline = Deadline(self._timeout)
            self._work = BackgroundTask(lambda: due(deadline), self._take, self._wake.set)

    def _due(self) -> Callable[[Deadline], _RefreshResult] | None:
        """What takes time and is to be done now."""
        readers = list(self._readers.values())
        is_cut_off = any(reader.is_cut_off for reader in readers)
        if self._member is not None:
            moved = {reader: reader.moves for reader in readers if not reader.settled}
            targets = {reader.partition: None if reader.overtaken else reader.target for reader in moved}
            if moved or is_cut_off or not self._member.due_in():
                holding = frozenset(self._readers)
                return lambda deadline: self._look_at_group(holding, targets, moved, deadline)
        elif is_cut_off or time.monotonic() >= self._look_at:
            return self._look_at_topics
        return None

    def _look_at_group(
        self,
        holding: frozenset[Partition],
        targets: Mapping[Partition, SeekTarget | None],
        moves: Mapping[QueueReader, int],
        deadline: Deadline,
    ) -> _RefreshResult:
        assert self._member is not None and self._group is not None
        queues = self._look_at_queues()
        by_topic: dict[str, list[Queue]] = {}
        for (topic, _), queue in queues.items():
            by_topic.setdefault(topic, []).append(queue)
        assignment = self._member.look(by_topic, holding, deadline)
        asked = {each: targets.get(each) for each in assignment.free if each in targets or each not in holding}
        found = self._group.settle(asked, queues, deadline) if asked else ResolvedPositions()
        return _RefreshResult(queues, assignment, found, moves)

    def _look_at_topics(self, deadline: Deadline) -> _RefreshResult:
        queues = self._look_at_queues()
        new = {partition: queue for partition, queue in queues.items() if partition not in self._readers}
        for queue in {queue.broker: queue for queue in queues.values()}.values():
            self._offsets.end(queue, deadline)  # it answers again
        first = {partition: self._starts.first(partition, queue, deadline) for partition, queue in new.items()}
        return _RefreshResult(queues, found=ResolvedPositions(first))

    def _look_at_queues(self) -> dict[Partition, Queue]:
        """All that there is to read, with what was added. What is missing is on a broker that is away, mostly."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            for topic in self._subscription.topics:
                with suppress(BrokerUnavailable):
                    found = self._cluster.topics.look(topic, Deadline(_NAMING_SECONDS))
                    self._queues = {**self._queues, **{(topic, each.queue): each for each in found}}
        return self._queues

    def _take(self, seen: _RefreshResult) -> None:
        for reader in self._readers.values():
            reader.is_cut_off = False
        if seen.assignment is not None:
            self._leave([each for each in self._readers if each in seen.assignment.taken], self._listener.lost)
            self._leave([each for each in self._readers if each not in seen.assignment.mine], self._listener.revoking)
        for partition in (*seen.found.known, *seen.found.lost):
            reader = self._readers.get(partition) or self._add(partition, seen.queues[partition])
            if seen.moves.get(reader, reader.moves) == reader.moves:
                self._settle(reader, seen.found)

    def _settle(self, reader: QueueReader, found: ResolvedPositions) -> None:
        with self._guard:
            if reader.partition in found.known:
                place = found.known[reader.partition]
                reader.go_on(AnchoredPosition(place.next, place.anchor or reader.anchor))
            else:
                at, fault = found.lost[reader.partition]
                reader.go_on(AnchoredPosition(at))
                reader.lose(fault)

    def _leave(self, partitions: Sequence[Partition], tell: Callable[[Sequence[Partition]], None]) -> None:
        if not partitions:
            return
        try:
            tell(partitions)
        finally:
            with self._guard:
                left = [self._readers.pop(partition) for partition in partitions]
            if self._member is not None:
                self._member.let_go([reader.queue for reader in left])

    # --- where it stands --------------------------------------------------------------------------------------------

    def positions(self) -> dict[Partition, Position]:
        return {partition: (reader.next,) for partition, reader in self._readers.items()}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        wanted = {self._reader(partition): _checked(position) for partition, position in positions.items()}
        if self._group is not None:  # going back behind an abort must not fail because a broker is away
            for reader, at in wanted.items():
                reader.unsettle(SeekTarget(at, chosen=True))
            return
        deadline = Deadline(SHORT_CALL)
        for reader, at in wanted.items():
            begin = self._offsets.begin(reader.queue, deadline)
            if at < begin:
                raise PositionLost(out_of_range("the position to seek", reader.partition, at, begin, begin))
        for reader, place in {c: self._offsets.place(c.queue, at, deadline) for c, at in wanted.items()}.items():
            reader.go_on(place)

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        self._go_back({self._reader(partition): _checked(position) for partition, position in positions.items()})

    def _go_back(self, wanted: Mapping[QueueReader, int]) -> None:
        for reader, at in wanted.items():
            if self._group is not None:
                reader.unsettle(SeekTarget(at, chosen=False))
            elif not isinstance(reader.fault, PositionLost):
                reader.go_back(at)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        wanted = {c: self._offsets.since(c.queue, timestamp, deadline) for c in self._readers.values()}
        places = {c: self._offsets.place(c.queue, at, deadline) for c, at in wanted.items()}
        for reader, place in places.items():
            if self._group is not None:
                reader.unsettle(SeekTarget(place.next, chosen=True))
            else:
                reader.go_on(place)

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for partition, given in positions.items():
            reader = self._readers.get(partition)
            if reader is not None and given:  # else they come again where it is now
                self._go_back({reader: min(reader.next, *map(_checked, given))})

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
            raise InvalidState(
                f"{topic}[{number}] is not with this reader now; `positions()` lists the partitions that are"
            )
        return reader

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        stands: Mapping[Partition, int] = {}
        if self._group is not None:
            stands, _ = self._group.positions(deadline)
        found = {}
        for partition, reader in self._readers.items():
            at = stands.get(partition, reader.next)
            if at >= reader.behind:  # nothing is outstanding, so it stands behind the repeats that were passed over
                at = max(at, reader.next)
            found[partition] = max(0, self._offsets.end(reader.queue, deadline) - at)
        return found

    def ack_context(self) -> RocketMQAckContext:
        if self._context is None:
            raise InvalidState("what was read without a group cannot be acknowledged")
        return self._context

    def _tell(self, reader: QueueReader, at: int) -> None:
        self._offsets.tell(str(self._subscription.group), reader.queue, at)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        if self._closed:
            return
        self._closed = True
        if self._work is not None:  # it might lock again what is let go now
            self._work.join(min(deadline.left(), _LEAVING_SECONDS))
        if self._context is not None and self._context.was_used and self._group is not None:
            with suppress(TxnBridgeError):
                stands, _ = self._group.positions(Deadline(min(deadline.left(), _LEAVING_SECONDS)))
                for partition, reader in self._readers.items():
                    if partition in stands:  # else only a seek can say where it goes on
                        self._tell(reader, stands[partition])
        if self._member is not None:
            self._member.close(deadline)
        else:
            self._client.close(deadline.left())


def _checked(position: Position) -> int:
    match position:
        case (int(offset),) if offset >= 0:
            return offset
    raise InvalidOption(f"{position!r} is not a position of this broker, such as (0,)")
