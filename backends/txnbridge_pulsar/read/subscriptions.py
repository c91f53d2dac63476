"""The ways to read partitions: without a group, or by a failover, shared or key-shared subscription."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from txnbridge.errors import NotSupported, PositionLost
from txnbridge.spi import Deadline, Position, Subscription
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.errors import needing
from txnbridge_pulsar.read.partition import BEGIN, PulsarPartition, position_after

# Messages that the broker may send ahead for one partition: ten times the default of a poll.
_MAX_PERMITS = 5000
# Seconds between tries while another client holds the subscription exclusively for a moment.
_BUSY_PAUSE_SECONDS = 0.05


class SubscriptionMode(ABC):
    """A way to read partitions: without or in a group. Methods with a deadline may send requests to the broker."""

    grouped = True
    in_order = False  # whether a group's messages stay in order, whichever member has the partition

    def __init__(
        self, client: wire.PulsarClient, subscription: Subscription, inbox: wire.Inbox, connection_key: str
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._inbox = inbox
        self._connection_key = connection_key
        self._name = uuid.uuid4().hex  # brokers assign partitions by the order of the names of a group's consumers

    @abstractmethod
    def open(self, topic: str, first: bool, deadline: Deadline) -> wire.PulsarConsumer:
        """Open a consumer on a partition, or an unpartitioned topic; `first` is False once a group has begun."""

    @abstractmethod
    def has_left(self, partition: PulsarPartition) -> str:
        """Return "" while the partition is assigned to this reader, then "revoking" or "lost".

        "revoking" means that acknowledgements of its delivered messages may still succeed.
        """

    @abstractmethod
    def is_due(self, partition: PulsarPartition) -> bool:
        """Return whether the broker has given this partition to the reader, which may begin to read it."""

    def is_undecided(self, partition: PulsarPartition) -> bool:
        """Return whether the broker has not yet said which member of the group has the partition."""
        return self.in_order and partition.consumer.lost is None and partition.consumer.active is None

    @abstractmethod
    def begin(self, partition: PulsarPartition, deadline: Deadline) -> Position:
        """Return the position from which a partition that is being assigned is read."""

    def check_kept(self, partition: PulsarPartition, deadline: Deadline) -> None:
        """Raise `PositionLost` if retention has removed a partition's next message while its connection was lost."""

    @abstractmethod
    def seek(self, partition: PulsarPartition, position: Position, deadline: Deadline) -> None:
        """Make `position` the next position to read."""

    @abstractmethod
    def nack(self, partition: PulsarPartition, positions: Sequence[Position]) -> None:
        """Have the broker redeliver these messages."""

    def redeliver(self, partition: PulsarPartition) -> None:
        """Have the broker redeliver unacknowledged messages in order; the reader drops those that its user has."""
        raise NotSupported("only members of a group that is read in order have everything delivered again")

    def seek_to_time(self, partition: PulsarPartition, timestamp: int, deadline: Deadline) -> None:
        """Read on from the first message with this or a later timestamp, or else from the partition's present end."""
        last, _ = partition.consumer.progress(deadline.left())
        self.seek(partition, BEGIN, deadline)
        partition.since = timestamp, position_after(last)

    def grant_permits(self, partition: PulsarPartition, messages: int) -> None:
        """Grant the broker permits for this many messages of a partition. Each poll calls this before it waits."""

    def hold(self, partition: PulsarPartition, held: bool) -> None:
        """Have the broker send no more messages of the partition if `held`, else let it send them again."""
        partition.consumer.hold(held)


class UngroupedMode(SubscriptionMode):
    """Reading without a group. The broker stores no position, so reading begins at the subscription's `start`."""

    grouped = False

    def open(self, topic: str, first: bool, deadline: Deadline) -> wire.PulsarConsumer:
        return self._read(topic, BEGIN, deadline)

    def _read(self, topic: str, position: Position, deadline: Deadline) -> wire.PulsarConsumer:
        ledger, entry, _ = position
        start = wire.EARLIEST if position == BEGIN else wire.MessageId(ledger, entry - 1)
        with needing("consume", topic):
            return self._client.read(
                topic, timeout=deadline.left(), start=start, inbox=self._inbox, connection_key=self._connection_key
            )

    def has_left(self, partition: PulsarPartition) -> str:
        return ""

    def is_due(self, partition: PulsarPartition) -> bool:
        return False

    def begin(self, partition: PulsarPartition, deadline: Deadline) -> Position:
        start = self._subscription.start
        if start == "latest":
            # Seek to the last message's id, not to "latest": an open transaction may have written before that.
            last, _ = partition.consumer.progress(deadline.left())
            # A broker drops an empty ledger when it loads the topic again, and positions in the ledger become invalid.
            self.seek(partition, position_after(last) if last.entry >= 0 else BEGIN, deadline)
        elif isinstance(start, int):
            self.seek_to_time(partition, start, deadline)
        return partition.next

    def check_kept(self, partition: PulsarPartition, deadline: Deadline) -> None:
        self._check_kept(partition, partition.next, deadline)

    def seek(self, partition: PulsarPartition, position: Position, deadline: Deadline) -> None:
        self._check_kept(partition, position, deadline)
        partition.consumer.close(deadline.left())
        partition.go_to(position)
        partition.consumer = self._read(partition.topic, position, deadline)
        partition.received = (position[0], position[1] - 1)
        partition.generation = partition.consumer.generation
        partition.consumer.hold(partition.paused)

    def _check_kept(self, partition: PulsarPartition, position: Position, deadline: Deadline) -> None:
        """Raise `PositionLost` if a position is in a BookKeeper ledger that the topic no longer has.

        A broker says neither that ledgers were trimmed, nor that a topic was deleted and created again. But the ledger
        of the position is gone if the topic's first ledger has a higher number: a broker trims whole ledgers, and a new
        topic's ledgers have higher numbers than all earlier ones in the cluster. The length of a trimmed ledger is not
        known, so a position after its last entry counts as lost, too.
        """
        if position[0] == BEGIN[0]:
            return
        reader = self._client.read(partition.topic, timeout=deadline.left(), connection_key=self._connection_key)
        with wire.closing(reader, deadline.left):
            _, before = reader.progress(deadline.left())
        if before is not None and before.ledger > position[0]:
            topic, number = partition.key
            raise PositionLost(
                f"the position {topic}[{number}] {position} is lost: the broker keeps messages from"
                f" {position_after(before)} on. Retention has removed earlier ones, or the topic was deleted and"
                " recreated. Seek to a later position"
            )

    def nack(self, partition: PulsarPartition, positions: Sequence[Position]) -> None:
        raise NotSupported("a reader without a group cannot give messages back: seek to them")


class FailoverMode(SubscriptionMode):
    """Reading in a group by a failover subscription: each partition has one member at a time, and is read in order."""

    in_order = True

    def open(self, topic: str, first: bool, deadline: Deadline) -> wire.PulsarConsumer:
        return self._join(topic, first, wire.SubscriptionType.FAILOVER, _MAX_PERMITS, deadline)

    def _join(
        self, topic: str, first: bool, type: wire.SubscriptionType, permits: int, deadline: Deadline
    ) -> wire.PulsarConsumer:
        start = self._subscription.start
        # A partition that was added later is read from its beginning.
        how = {"type": type, "start": wire.EARLIEST, "name": self._name, "inbox": self._inbox, "permits": permits}
        while True:
            if first and start != "earliest":
                self._begin_at(topic, start, deadline)
            try:
                return self._subscribe(topic, deadline, **how)
            except wire.ConsumerBusy:
                if start == "earliest" or deadline.expired:
                    raise  # the group uses another kind of subscription
            time.sleep(_BUSY_PAUSE_SECONDS)

    def _subscribe(self, topic: str, deadline: Deadline, **options: Any) -> wire.PulsarConsumer:
        assert self._subscription.group is not None
        group = self._subscription.group
        with needing("consume", topic):
            return self._client.subscribe(
                topic, group, timeout=deadline.left(), connection_key=self._connection_key, **options
            )

    def _begin_at(self, topic: str, start: str | int, deadline: Deadline) -> None:
        """Set a new group's position on a topic to the end, or to a time; do nothing if it has members or acks there.

        Meanwhile this client holds the subscription exclusively, so no position changes. Calls may be repeated.
        """
        try:
            alone = self._subscribe(topic, deadline, start=wire.LATEST if start == "latest" else wire.EARLIEST)
        except wire.ConsumerBusy:
            return  # the group has members, or another client is setting the position
        alone.joins_chunks = False  # the group begins before the first chunk of its first message
        with wire.closing(alone, deadline.left):
            last, acknowledged = alone.progress(deadline.left())
            at = acknowledged or wire.EARLIEST
            if isinstance(start, int):
                passed = _last_before(alone, start, last, deadline) if last.entry >= 0 > at.entry else None
            else:  # a broker's "latest" is behind the messages of open transactions: the group would lose them
                passed = last if at[:2] > last[:2] else None
            if passed is not None:
                # Seek: an acknowledgement, unlike a seek, would be lost if the topic were unloaded at once.
                with suppress(wire.ConsumerBusy):  # a member that subscribes meanwhile finds the position set
                    alone.seek(_position_after(passed) if passed.entry >= 0 else wire.EARLIEST, deadline.left())

    def has_left(self, partition: PulsarPartition) -> str:
        consumer = partition.consumer
        if consumer.lost is not None or consumer.generation != partition.generation:
            return "lost"
        # The partition may have left and returned, and another member may have received the same messages in between.
        is_here = not self.in_order or (consumer.active and consumer.activations == partition.activations)
        return "" if is_here else "revoking"

    def is_due(self, partition: PulsarPartition) -> bool:
        return partition.consumer.lost is None and (bool(partition.consumer.active) or not self.in_order)

    def begin(self, partition: PulsarPartition, deadline: Deadline) -> Position:
        _, acknowledged = partition.consumer.progress(deadline.left())
        return BEGIN if acknowledged is None or acknowledged.entry < 0 else position_after(acknowledged)

    def seek(self, partition: PulsarPartition, position: Position, deadline: Deadline) -> None:
        partition.expect_again()
        partition.go_to(position)
        self.redeliver(partition)

    def nack(self, partition: PulsarPartition, positions: Sequence[Position]) -> None:
        partition.expect_again()
        partition.give_back(positions)
        self.redeliver(partition)

    def redeliver(self, partition: PulsarPartition) -> None:
        partition.expect_again()
        partition.drop()
        with suppress(wire.BrokerConnectionLost):  # then the partition's next member receives them
            partition.expect_again(partition.consumer.redeliver())


class SharedMode(FailoverMode):
    """Reading in a group by a shared or key-shared subscription: the members share the messages of each partition."""

    in_order = False

    def open(self, topic: str, first: bool, deadline: Deadline) -> wire.PulsarConsumer:
        type = wire.SubscriptionType.KEY_SHARED if self._subscription.sharing == "key" else wire.SubscriptionType.SHARED
        return self._join(topic, first, type, 0, deadline)

    def seek(self, partition: PulsarPartition, position: Position, deadline: Deadline) -> None:
        raise NotSupported(
            "members of a group that share messages have no position of their own to seek: nack gives messages back,"
            ' and a group with sharing="partition" can seek'
        )

    def nack(self, partition: PulsarPartition, positions: Sequence[Position]) -> None:
        # Entries are redelivered whole, perhaps to another member, so this reader drops their other messages, too.
        given_up = partition.give_up([(ledger, entry) for ledger, entry, _ in positions], delivered_again=False)
        # The broker redelivers what an aborted transaction had acknowledged, unless it had refused the acknowledgement.
        wanted = [*given_up, *partition.refused]
        partition.refused.clear()
        with suppress(wire.BrokerConnectionLost):
            partition.consumer.redeliver(wanted)

    def grant_permits(self, partition: PulsarPartition, messages: int) -> None:
        if not partition.paused:
            partition.consumer.request_messages(messages, again=partition.is_silent())

    def hold(self, partition: PulsarPartition, held: bool) -> None:
        pass  # the broker sends only what was requested


def _last_before(
    consumer: wire.PulsarConsumer, timestamp: int, end: wire.MessageId, deadline: Deadline
) -> wire.MessageId | None:
    """Return the id of the last message up to `end` before the first with this timestamp or a later one, if any."""
    passed: wire.MessageId | None = None
    while passed is None or passed[:2] < end[:2]:
        deadline.check("looking for where the group begins")
        for entry in consumer.receive(deadline.left()):
            for time_ms, id in _times(entry):
                if time_ms >= timestamp:
                    return passed
                passed = id
    return passed


def _times(entry: wire.ReceivedEntry) -> list[tuple[int, wire.MessageId]]:
    """Return the times and ids of an entry's messages; of a chunk, or an entry that cannot be read, its own."""
    if entry.chunk is not None:
        return [(wire.ReceivedMessage(entry, -1, b"", entry.metadata).event_time or entry.publish_time, entry.id)]
    try:
        return [(message.event_time or entry.publish_time, message.id) for message in entry.messages()]
    except wire.PulsarError:  # a member that reaches the entry gets this error
        return [(entry.publish_time, entry.id)]


def _position_after(id: wire.MessageId) -> wire.MessageId:
    """Return the id that a message directly after `id` has or would have, where a subscription continues."""
    if id.batch_index + 1 < id.batch_size:
        return id._replace(batch_index=id.batch_index + 1)
    return wire.MessageId(id.ledger, id.entry + 1)


def mode_of(
    client: wire.PulsarClient, subscription: Subscription, inbox: wire.Inbox, connection_key: str
) -> SubscriptionMode:
    """Return the way to read for a subscription: by its group, and by how the members share messages."""
    grouped = FailoverMode if subscription.sharing == "partition" else SharedMode
    kind = UngroupedMode if subscription.group is None else grouped
    return kind(client, subscription, inbox, connection_key)
