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
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Call, Queue
from txnbridge_rocketmq.outcome.end_transaction import Ender
from txnbridge_rocketmq.read.anchored_position import Place
from txnbridge_rocketmq.read.partition import Cursor, Wish, out_of_range
from txnbridge_rocketmq.read.rebalance import Shares, Sharing, open_client
from txnbridge_rocketmq.read.start_positions import Found, GroupStarts, Offsets, Starts
from txnbridge_rocketmq.write.acks import AckContext

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
class _Seen:
    """What came of the work behind a reader: how its group is shared out, and where partitions go on.

    `moves` are those of the cursors that were asked about, at that time.
    """

    queues: Mapping[Partition, Queue]
    shares: Shares | None = None
    found: Found = field(default_factory=Found)
    moves: Mapping[Cursor, int] = field(default_factory=dict)


class RocketMQReader(Reader):
    """Reads queues over connections of its own. What takes time besides reading is done on another thread."""

    def __init__(self, ender: Ender, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> None:
        if subscription.sharing != "partition":
            raise NotSupported("each queue of RocketMQ is read by one member of a group: sharing='partition'")
        self._cluster = cluster = ender.cluster
        self._subscription = subscription
        self._listener = listener
        self._timeout = cluster.settings.timeout
        self._wake = threading.Event()
        self._guard = threading.Lock()  # acknowledgements come from other threads
        self._cursors: dict[Partition, Cursor] = {}
        self._paused: set[Partition] = set()
        self._work: BackgroundTask[_Seen] | None = None
        self._look_at = 0.0
        self._turn = 0
        self._closed = False
        # A group may wait for a topic that nobody has written yet; whoever only looks makes none.
        create = subscription.group is not None
        topics = {topic: cluster.topics.queues(topic, deadline, create=create) for topic in subscription.topics}
        queues = self._queues = {(topic, each.queue): each for topic, found in topics.items() for each in found}
        self._sharing: Sharing | None = None
        self._group: GroupStarts | None = None
        self._context: AckContext | None = None
        if subscription.group is None:
            self._client = open_client(cluster.settings)
        else:
            self._sharing = Sharing(cluster.settings, subscription.group, subscription.topics, self._wake.set, deadline)
            self._client = self._sharing.client
        try:
            self._offsets = Offsets(self._client)
            self._starts = Starts(self._offsets, subscription, queues, deadline)
            if subscription.group is None:
                self._add_all(queues, self._starts, deadline)
            else:
                self._group = GroupStarts(self._offsets, self._starts, subscription.group, cluster.context, ender)
                self._context = AckContext(
                    subscription.group, self._group, self._cursors, self._guard, self._tell, self._timeout
                )
        except BaseException:
            self.close(deadline)
            raise

    def _add_all(self, queues: Mapping[Partition, Queue], starts: Starts, deadline: Deadline) -> None:
        first = {partition: starts.first(partition, queue, deadline) for partition, queue in queues.items()}
        for partition, at in first.items():
            self._add(partition, queues[partition]).go_on(at)

    def _add(self, partition: Partition, queue: Queue) -> Cursor:
        cursor = Cursor(partition, queue)
        cursor.paused = partition in self._paused
        cursor.source = self._listener.assigned(partition)
        with self._guard:
            self._cursors[partition] = cursor
        return cursor

    # --- reading ----------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        looked = False
        while True:
            self._follow()
            for cursor in self._cursors.values():
                cursor.take_in()
            messages = self._hand_out(max_messages)
            for cursor in self._cursors.values():
                cursor.ask(self._submit)
            if messages:
                return messages
            self._raise_faults()
            if looked and deadline.expired:
                return []
            self._wake.wait(min(deadline.left(), self._idle_seconds()))
            self._wake.clear()
            looked = True

    def _idle_seconds(self) -> float:
        if self._work is not None or any(cursor.is_busy for cursor in self._cursors.values()):
            return _BUSY_SECONDS
        return _IDLE_SECONDS if self._sharing is None else min(_IDLE_SECONDS, self._sharing.due_in())

    def _submit(self, broker: str, request: remoting.Request[Any], timeout: float) -> Call[Any]:
        call = self._client.submit(broker, request, timeout)
        call.when_done(lambda _: self._wake.set())
        return call

    def _hand_out(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        room = _ENOUGH_BYTES
        for cursor in self._in_turn():
            while len(messages) < limit and room > 0 and cursor.has_some:
                message = cursor.hand_out()
                if message is not None:
                    messages.append(message)
                    room -= len(message.value or b"")
        return messages

    def _in_turn(self) -> list[Cursor]:
        """All cursors, another one first each time, so that a long partition does not keep the others waiting."""
        cursors = list(self._cursors.values())
        if len(cursors) > 1:
            self._turn = (self._turn + 1) % len(cursors)
            cursors = cursors[self._turn :] + cursors[: self._turn]
        return cursors

    def _raise_faults(self) -> None:
        for cursor in self._cursors.values():
            if (fault := cursor.fault) is not None and not cursor.paused:
                if isinstance(fault, NotFound):  # the topic may be made anew
                    cursor.fault = None
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

    def _due(self) -> Callable[[Deadline], _Seen] | None:
        """What takes time and is to be done now."""
        cursors = list(self._cursors.values())
        is_cut_off = any(cursor.is_cut_off for cursor in cursors)
        if self._sharing is not None:
            moved = {cursor: cursor.moves for cursor in cursors if not cursor.settled}
            wishes = {cursor.partition: None if cursor.overtaken else cursor.wish for cursor in moved}
            if moved or is_cut_off or not self._sharing.due_in():
                holding = frozenset(self._cursors)
                return lambda deadline: self._look_at_group(holding, wishes, moved, deadline)
        elif is_cut_off or time.monotonic() >= self._look_at:
            return self._look_at_topics
        return None

    def _look_at_group(
        self,
        holding: frozenset[Partition],
        wishes: Mapping[Partition, Wish | None],
        moves: Mapping[Cursor, int],
        deadline: Deadline,
    ) -> _Seen:
        assert self._sharing is not None and self._group is not None
        queues = self._look_at_queues()
        by_topic: dict[str, list[Queue]] = {}
        for (topic, _), queue in queues.items():
            by_topic.setdefault(topic, []).append(queue)
        shares = self._sharing.look(by_topic, holding, deadline)
        asked = {each: wishes.get(each) for each in shares.free if each in wishes or each not in holding}
        found = self._group.settle(asked, queues, deadline) if asked else Found()
        return _Seen(queues, shares, found, moves)

    def _look_at_topics(self, deadline: Deadline) -> _Seen:
        queues = self._look_at_queues()
        new = {partition: queue for partition, queue in queues.items() if partition not in self._cursors}
        for queue in {queue.broker: queue for queue in queues.values()}.values():
            self._offsets.end(queue, deadline)  # it answers again
        first = {partition: self._starts.first(partition, queue, deadline) for partition, queue in new.items()}
        return _Seen(queues, found=Found(first))

    def _look_at_queues(self) -> dict[Partition, Queue]:
        """All that there is to read, with what was added. What is missing is on a broker that is away, mostly."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            for topic in self._subscription.topics:
                with suppress(BrokerUnavailable):
                    found = self._cluster.topics.look(topic, Deadline(_NAMING_SECONDS))
                    self._queues = {**self._queues, **{(topic, each.queue): each for each in found}}
        return self._queues

    def _take(self, seen: _Seen) -> None:
        for cursor in self._cursors.values():
            cursor.is_cut_off = False
        if seen.shares is not None:
            self._leave([each for each in self._cursors if each in seen.shares.taken], self._listener.lost)
            self._leave([each for each in self._cursors if each not in seen.shares.mine], self._listener.revoking)
        for partition in (*seen.found.known, *seen.found.lost):
            cursor = self._cursors.get(partition) or self._add(partition, seen.queues[partition])
            if seen.moves.get(cursor, cursor.moves) == cursor.moves:
                self._settle(cursor, seen.found)

    def _settle(self, cursor: Cursor, found: Found) -> None:
        with self._guard:
            if cursor.partition in found.known:
                place = found.known[cursor.partition]
                cursor.go_on(Place(place.next, place.anchor or cursor.anchor))
            else:
                at, fault = found.lost[cursor.partition]
                cursor.go_on(Place(at))
                cursor.lose(fault)

    def _leave(self, partitions: Sequence[Partition], tell: Callable[[Sequence[Partition]], None]) -> None:
        if not partitions:
            return
        try:
            tell(partitions)
        finally:
            with self._guard:
                left = [self._cursors.pop(partition) for partition in partitions]
            if self._sharing is not None:
                self._sharing.let_go([cursor.queue for cursor in left])

    # --- where it stands --------------------------------------------------------------------------------------------

    def positions(self) -> dict[Partition, Position]:
        return {partition: (cursor.next,) for partition, cursor in self._cursors.items()}

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        wanted = {self._cursor(partition): _checked(position) for partition, position in positions.items()}
        if self._group is not None:  # going back behind an abort must not fail because a broker is away
            for cursor, at in wanted.items():
                cursor.unsettle(Wish(at, chosen=True))
            return
        deadline = Deadline(SHORT_CALL)
        for cursor, at in wanted.items():
            begin = self._offsets.begin(cursor.queue, deadline)
            if at < begin:
                raise PositionLost(out_of_range("the position to seek", cursor.partition, at, begin, begin))
        for cursor, place in {c: self._offsets.place(c.queue, at, deadline) for c, at in wanted.items()}.items():
            cursor.go_on(place)

    def rewind(self, positions: Mapping[Partition, Position]) -> None:
        self._go_back({self._cursor(partition): _checked(position) for partition, position in positions.items()})

    def _go_back(self, wanted: Mapping[Cursor, int]) -> None:
        for cursor, at in wanted.items():
            if self._group is not None:
                cursor.unsettle(Wish(at, chosen=False))
            elif not isinstance(cursor.fault, PositionLost):
                cursor.go_back(at)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        wanted = {c: self._offsets.since(c.queue, timestamp, deadline) for c in self._cursors.values()}
        places = {c: self._offsets.place(c.queue, at, deadline) for c, at in wanted.items()}
        for cursor, place in places.items():
            if self._group is not None:
                cursor.unsettle(Wish(place.next, chosen=True))
            else:
                cursor.go_on(place)

    def nack(self, positions: Mapping[Partition, Sequence[Position]]) -> None:
        for partition, given in positions.items():
            cursor = self._cursors.get(partition)
            if cursor is not None and given:  # else they come again where it is now
                self._go_back({cursor: min(cursor.next, *map(_checked, given))})

    def pause(self, partitions: Sequence[Partition]) -> None:
        for cursor in [self._cursor(partition) for partition in partitions]:
            cursor.paused = True
            self._paused.add(cursor.partition)

    def resume(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            cursor = self._cursors.get(partition) if partition in self._paused else self._cursor(partition)
            self._paused.discard(partition)
            if cursor is not None:
                cursor.paused = False

    def _cursor(self, partition: Partition) -> Cursor:
        cursor = self._cursors.get(partition)
        if cursor is None:
            topic, number = partition
            raise InvalidState(
                f"{topic}[{number}] is not with this reader now; `positions()` lists the partitions that are"
            )
        return cursor

    def lag(self, deadline: Deadline) -> dict[Partition, int]:
        stands: Mapping[Partition, int] = {}
        if self._group is not None:
            stands, _ = self._group.positions(deadline)
        found = {}
        for partition, cursor in self._cursors.items():
            at = stands.get(partition, cursor.next)
            if at >= cursor.behind:  # nothing is outstanding, so it stands behind the repeats that were passed over
                at = max(at, cursor.next)
            found[partition] = max(0, self._offsets.end(cursor.queue, deadline) - at)
        return found

    def ack_context(self) -> AckContext:
        if self._context is None:
            raise InvalidState("what was read without a group cannot be acknowledged")
        return self._context

    def _tell(self, cursor: Cursor, at: int) -> None:
        self._offsets.tell(str(self._subscription.group), cursor.queue, at)

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
                for partition, cursor in self._cursors.items():
                    if partition in stands:  # else only a seek can say where it goes on
                        self._tell(cursor, stands[partition])
        if self._sharing is not None:
            self._sharing.close(deadline)
        else:
            self._client.close(deadline.left())


def _checked(position: Position) -> int:
    match position:
        case (int(offset),) if offset >= 0:
            return offset
    raise InvalidOption(f"{position!r} is not a position of this broker, such as (0,)")
