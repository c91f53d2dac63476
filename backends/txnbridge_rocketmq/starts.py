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
from txnbridge_rocketmq import remoting
from txnbridge_rocketmq.asking import ask
from txnbridge_rocketmq.endings import publish_decided
from txnbridge_rocketmq.ends import Ender
from txnbridge_rocketmq.fetching import GROUP
from txnbridge_rocketmq.halves import parts_as_json
from txnbridge_rocketmq.messages import timestamp_of
from txnbridge_rocketmq.names import encoded
from txnbridge_rocketmq.remoting import Client, Queue, groups, reading

T = TypeVar("T")

Queues = Mapping[Partition, Queue]

_AGAIN_SECONDS = 0.01
# The bridge tells brokers where a group stands only for people and tools to look at, and waits for no answer.
_TELL_SECONDS = 5.0


class Offsets:
    """What can be asked about queues. Any thread may call."""

    def __init__(self, client: Client) -> None:
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

    def known(self, group: str, queue: Queue, deadline: Deadline) -> int | None:
        """Where the broker believes that a group stands."""
        return self._ask(queue, groups.committed_offset(encoded(group), queue.topic, queue.queue), deadline)

    def tell(self, group: str, queue: Queue, offset: int) -> None:
        """Tell the broker where a group stands, for tools that look there. Does not wait for the answer."""
        request = groups.commit_offset(encoded(group), queue.topic, queue.queue, offset)
        with suppress(remoting.RemotingError):  # it is told with the next acknowledgement
            self._client.submit(queue.broker, request, _TELL_SECONDS)

    def _ask(self, queue: Queue, request: remoting.Request[T], deadline: Deadline) -> T:
        what = f"asking about {queue.topic}[{queue.queue}]"
        return ask(self._client, queue.broker, request, what, deadline)


class Starts:
    """Where the subscription says that reading begins. "latest" means when the reader was opened."""

    def __init__(self, offsets: Offsets, subscription: Subscription, queues: Queues, deadline: Deadline) -> None:
        self._offsets = offsets
        self._start = subscription.start
        latest = self._start == "latest"
        self._latest = {each: offsets.end(queue, deadline) for each, queue in queues.items()} if latest else {}

    def first(self, partition: Partition, queue: Queue, deadline: Deadline) -> int:
        """Where a partition begins; one that was added since, at its beginning: all of it has come since."""
        if isinstance(self._start, int):
            return self._offsets.since(queue, self._start, deadline)
        if partition in self._latest:
            return self._latest[partition]
        return self._offsets.begin(queue, deadline)


@dataclass(frozen=True)
class Found:
    """Where partitions go on, and those of which only the user can say that."""

    known: Mapping[Partition, int] = field(default_factory=dict)
    lost: Mapping[Partition, tuple[int, PositionLost]] = field(default_factory=dict)


class GroupStarts:
    """Where a group stands, by the decisions that acknowledge; and where it begins, which is such a decision, too.

    It stands in the log before anything is handed out: so nothing is skipped if the first batch aborts, and of members
    that begin at the same time one decides.

    The member by whose decision the group stands there may have died before it had published that transaction. The
    member that goes on behind it publishes the transaction first: else its own messages would overtake those.
    """

    def __init__(self, offsets: Offsets, starts: Starts, group: str, context: Context, ender: Ender) -> None:
        self._offsets = offsets
        self._starts = starts
        self._group = group
        self._ender = ender
        self._events = context.events
        self._ledger = context.ledger(context.application, f"group/{group}")

    def positions(self, deadline: Deadline) -> tuple[dict[Partition, int], Position]:
        """Where the group stands, and up to where in the log that was read. Raises `PositionLost`."""
        with self._with_evidence():
            found, read_up_to = self._ledger.positions(self._group, deadline)
        return {partition: position[0] for partition, position in found.items()}, read_up_to

    @contextmanager
    def _with_evidence(self) -> Iterator[None]:
        try:
            yield
        except EvidenceLost as error:
            raise PositionLost(
                f"nobody can tell where group {self._group!r} stands: {error}. Nothing was skipped or read again"
            ) from error

    def settle(self, wishes: Mapping[Partition, int | None], queues: Queues, deadline: Deadline) -> Found:
        """Where partitions go on: not before what the group has acknowledged, and not before what a seek wants.

        `queues` are all of the topics' partitions. A group begins to read a topic with all that it has then. Where
        there is no wish, another member may have moved the group last.
        """
        while True:
            stands, _ = self.positions(deadline)
            if all(partition in stands for partition in wishes):
                self._publish_before({each for each, wish in wishes.items() if wish is None}, deadline)
                return Found({partition: max(stands[partition], wish or 0) for partition, wish in wishes.items()})
            # In this order: what the broker was told before stands in the log by now.
            told = {each: self._offsets.known(self._group, queues[each], deadline) for each in queues}
            stands, read_up_to = self.positions(deadline)
            new = set(queues) - {each for each in queues if any(each[0] == topic for topic, _ in stands)}
            begun: dict[Partition, int] = {}
            lost: dict[Partition, tuple[int, PositionLost]] = {}
            for partition, queue in queues.items():
                if partition in stands or not (partition in wishes or partition in new):
                    continue
                if (wish := wishes.get(partition)) is not None:
                    begun[partition] = wish
                elif (at := told[partition]) is not None:
                    lost[partition] = at, self._lost(partition, at)
                elif partition in new:
                    begun[partition] = self._starts.first(partition, queue, deadline)
                else:  # it was added since the group began: it has all come since
                    begun[partition] = self._offsets.begin(queue, deadline)
            if begun and not self._claim(begun, read_up_to, deadline):
                continue
            self._publish_before({each for each, wish in wishes.items() if wish is None and each in stands}, deadline)
            known = {**stands, **begun}
            return Found(
                {each: max(known[each], wish or 0) for each, wish in wishes.items() if each in known},
                {each: lost[each] for each in wishes if each in lost},
            )

    def _publish_before(self, partitions: Collection[Partition], deadline: Deadline) -> None:
        """Publish the transactions that acknowledged last on these; their authors had done the same before them."""
        if not partitions:
            return
        with self._with_evidence():
            decided = self._ledger.acknowledged(self._group, deadline)
        for transaction, claim in dict(decided[each] for each in partitions if each in decided).items():
            publish_decided(self._ender, transaction, claim, deadline)

    def _claim(self, begun: Mapping[Partition, int], read_up_to: Position, deadline: Deadline) -> bool:
        """Decide where the group begins; False if another member has moved it meanwhile."""
        acks = [Ack(self._group, partition, (at,), (at,), read_up_to) for partition, at in begun.items()]
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
