"""Where the reading of a partition starts, and goes on."""

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
from txnbridge_rocketmq.read.anchored_position import Anchor, AnchoredPosition, topic_recreated
from txnbridge_rocketmq.read.partition import SURE_SECONDS, SeekTarget
from txnbridge_rocketmq.read.pull import GROUP
from txnbridge_rocketmq.settings.names import encoded
from txnbridge_rocketmq.write.half_batch import parts_as_json
from txnbridge_rocketmq.write.message_format import timestamp_of

T = TypeVar("T")

Queues = Mapping[Partition, Queue]

_AGAIN_SECONDS = 0.01
_LOOK_SECONDS = 0.1
# The bridge tells brokers where a group stands only for people and tools to look at, and waits for no answer.
_TELL_SECONDS = 5.0


class QueueOffsets:
    """What can be asked about queues. Any thread may call."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client

    def begin(self, queue: Queue, deadline: Deadline) -> int:
        """The offset of the first message that there still is."""
        return max(0, self._ask(queue, reading.min_offset(queue.topic, queue.queue), deadline))

    def end(self, queue: Queue, deadline: Deadline) -> int:
        """The offset that the next message will have."""
        return self._ask(queue, reading.max_offset(queue.topic, queue.queue), deadline)

    def since(self, queue: Queue, timestamp: int, deadline: Deadline) -> int:
        """The offset of the first message stamped at or after a time; the end if there is none.

        Brokers know when they stored a message. What a sender stamped otherwise is looked for from there on; of what is
        stamped with a time to come only that is found which was stored since.
        """
        at = max(self._ask(queue, reading.offset_at(queue.topic, queue.queue, timestamp), deadline), 0)
        at, end = max(at, self.begin(queue, deadline)), self.end(queue, deadline)
        while at < end:
            pulled = self._ask(queue, reading.pull(queue.topic, queue.queue, at, GROUP), deadline)
            for record in pulled.records:
                if record.queue_offset >= at and timestamp_of(record) >= timestamp:
                    return record.queue_offset
            if pulled.next_offset <= at:  # its last message can be read in a moment
                deadline.check(f"looking for a time in {queue.topic}[{queue.queue}]")
                time.sleep(_AGAIN_SECONDS)
            at = max(at, pulled.next_offset)
        return at

    def place(self, queue: Queue, at: int, deadline: Deadline) -> AnchoredPosition:
        """Return an offset with the message before it, if there is one, by which the queue will be known."""
        log_offset = self._log_offset(queue, at - 1, deadline) if at else None
        return AnchoredPosition(at, None if log_offset is None else Anchor(at - 1, log_offset))

    def has(self, queue: Queue, anchor: Anchor, deadline: Deadline) -> bool:
        """Return whether the queue still has a record at its place, or may have had it until retention dropped it.

        A broker that has just started is asked for some seconds before it is believed that there is no record.
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

    def known(self, group: str, queue: Queue, deadline: Deadline) -> int | None:
        """Where the broker believes that a group stands."""
        return self._ask(queue, groups.committed_offset(encoded(group), queue.topic, queue.queue), deadline)

    def tell(self, group: str, queue: Queue, offset: int) -> None:
        """Tell the broker where a group stands, for tools that look there. Does not wait for the answer."""
        request = groups.commit_offset(encoded(group), queue.topic, queue.queue, offset)
        with suppress(RemotingError):  # it is told with the next acknowledgement
            self._client.submit(queue.broker, request, _TELL_SECONDS)

    def _ask(self, queue: Queue, request: RpcRequest[T], deadline: Deadline) -> T:
        what = f"asking about {queue.topic}[{queue.queue}]"
        return retry_call(self._client, queue.broker, request, what, deadline)


class InitialPositions:
    """Where the subscription says that reading begins. "latest" means when the reader was opened."""

    def __init__(self, offsets: QueueOffsets, subscription: Subscription, queues: Queues, deadline: Deadline) -> None:
        self._offsets = offsets
        self._start = subscription.start
        latest = self._start == "latest"
        self._latest: dict[Partition, AnchoredPosition] = {}
        for each, queue in queues.items() if latest else ():
            self._latest[each] = offsets.place(queue, offsets.end(queue, deadline), deadline)

    def first(self, partition: Partition, queue: Queue, deadline: Deadline) -> AnchoredPosition:
        """Where a partition begins; one that was added since, at its beginning: all of it has come since."""
        if partition in self._latest:
            return self._latest[partition]
        if isinstance(self._start, int):
            at = self._offsets.since(queue, self._start, deadline)
        else:
            at = self._offsets.begin(queue, deadline)
        return self._offsets.place(queue, at, deadline)


@dataclass(frozen=True)
class ResolvedPositions:
    """Where partitions go on, and those of which only the user can say that."""

    known: Mapping[Partition, AnchoredPosition] = field(default_factory=dict)
    lost: Mapping[Partition, tuple[int, PositionLost]] = field(default_factory=dict)


class GroupPositions:
    """Where a group stands, by the decisions that acknowledge; and where it begins, which is such a decision, too.

    It stands in the log before anything is handed out: so nothing is skipped if the first batch aborts, and of members
    that begin at the same time one decides.

    The member by whose decision the group stands there may have died before it had published that transaction. The
    member that goes on behind it publishes the transaction first: else its own messages would overtake those.
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
        """Where the group stands, and up to where in the log that was read. Raises `PositionLost`."""
        places, read_up_to = self._places(deadline)
        return {partition: place.next for partition, place in places.items()}, read_up_to

    def _places(self, deadline: Deadline) -> tuple[dict[Partition, AnchoredPosition], Position]:
        with self._with_evidence():
            found, read_up_to = self._ledger.positions(self._group, deadline)
        return {partition: AnchoredPosition.of(position) for partition, position in found.items()}, read_up_to

    @contextmanager
    def _with_evidence(self) -> Iterator[None]:
        try:
            yield
        except EvidenceLost as error:
            raise PositionLost(
                f"nobody can tell where group {self._group!r} stands: {error}. Nothing was skipped or read again"
            ) from error

    def settle(
        self, targets: Mapping[Partition, SeekTarget | None], queues: Queues, deadline: Deadline
    ) -> ResolvedPositions:
        """Where partitions go on: not before what the group has acknowledged, and not before what a seek wants.

        `queues` are all of the topics' partitions. A group begins to read a topic with all that it has then. Where
        there is no wish, another member may have moved the group last. In a topic that was made anew the group goes on
        where the user says, and is moved there, back or forth.
        """
        while True:
            stands, read_up_to = self._places(deadline)
            renewed = self._renewed({each: stands[each] for each in targets if each in stands}, queues, deadline)
            chosen = {each: target.at for each in renewed if (target := targets[each]) is not None and target.chosen}
            if chosen:
                begun = {each: self._offsets.place(queues[each], at, deadline) for each, at in chosen.items()}
                self._claim(begun, read_up_to, deadline)
                continue
            if all(partition in stands for partition in targets):
                self._publish_before({each for each, target in targets.items() if target is None}, deadline)
                return self._found(targets, stands, renewed, queues, deadline)
            # In this order: what the broker was told before stands in the log by now.
            told = {each: self._offsets.known(self._group, queues[each], deadline) for each in queues}
            stands, read_up_to = self._places(deadline)
            new = set(queues) - {each for each in queues if any(each[0] == topic for topic, _ in stands)}
            begun = {}
            lost = renewed
            for partition, queue in queues.items():
                if partition in stands or not (partition in targets or partition in new):
                    continue
                if (target := targets.get(partition)) is not None:
                    begun[partition] = self._offsets.place(queue, target.at, deadline)
                elif (at := told[partition]) is not None:
                    lost[partition] = at, self._lost(partition, at)
                elif partition in new:
                    begun[partition] = self._starts.first(partition, queue, deadline)
                else:  # it was added since the group began: it has all come since
                    begun[partition] = self._offsets.place(queue, self._offsets.begin(queue, deadline), deadline)
            if begun and not self._claim(begun, read_up_to, deadline):
                continue
            self._publish_before(
                {each for each, target in targets.items() if target is None and each in stands}, deadline
            )
            return self._found(targets, {**stands, **begun}, lost, queues, deadline)

    def _found(
        self,
        targets: Mapping[Partition, SeekTarget | None],
        stands: Mapping[Partition, AnchoredPosition],
        lost: Mapping[Partition, tuple[int, PositionLost]],
        queues: Queues,
        deadline: Deadline,
    ) -> ResolvedPositions:
        known = {
            each: self._further(stands[each], target, queues[each], deadline)
            for each, target in targets.items()
            if each in stands and each not in lost
        }
        return ResolvedPositions(known, {each: lost[each] for each in targets if each in lost})

    def _further(
        self, stands: AnchoredPosition, target: SeekTarget | None, queue: Queue, deadline: Deadline
    ) -> AnchoredPosition:
        if target is None or target.at <= stands.next:
            return stands
        return (
            self._offsets.place(queue, target.at, deadline)
            if target.chosen
            else AnchoredPosition(target.at, stands.anchor)
        )

    def _renewed(
        self, stands: Mapping[Partition, AnchoredPosition], queues: Queues, deadline: Deadline
    ) -> dict[Partition, tuple[int, PositionLost]]:
        """Those of these partitions that are not what the group has read: their topics were made anew."""
        found = {}
        for partition, (at, anchor) in stands.items():
            if anchor is not None and not self._offsets.has(queues[partition], anchor, deadline):
                found[partition] = at, topic_recreated(f"the position of group {self._group!r}", partition, at, anchor)
        return found

    def _publish_before(self, partitions: Collection[Partition], deadline: Deadline) -> None:
        """Publish the transactions that acknowledged last on these; their authors had done the same before them."""
        if not partitions:
            return
        with self._with_evidence():
            decided = self._ledger.acknowledged(self._group, deadline)
        for transaction, claim in dict(decided[each] for each in partitions if each in decided).items():
            publish_decided(self._ender, transaction, claim, deadline)

    def _claim(self, begun: Mapping[Partition, AnchoredPosition], read_up_to: Position, deadline: Deadline) -> bool:
        """Decide where the group begins; False if another member has moved it meanwhile."""
        acks = [Ack(self._group, each, (place.next,), place.position, read_up_to) for each, place in begun.items()]
        with self._with_evidence(), self._events.step("step:start", None, group=self._group):
            log = self._ledger.begin(deadline)
            try:
                self._ledger.claim(uuid.uuid4().hex, Decision.COMMIT, parts_as_json(()), deadline, log=log, acks=acks)
            except Conflict:
                return False
        return True

    def _lost(self, partition: Partition, told: int) -> PositionLost:
        topic, number = partition
        return PositionLost(
            f"group {self._group!r} has read {topic}[{number}] up to {told}, by what the broker was told; but this"
            " application's decision log does not know it: another application or another client reads in a group of"
            " this name, or the log was lost. Nothing was skipped or read again: say where to go on by"
            f" seek({{({topic!r}, {number}): (offset,)}}), or read with a new group"
        )
