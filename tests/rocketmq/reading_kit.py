"""Helpers for tests of readers: readers without a bridge's consumer, and messages that a real broker stores."""

import uuid
from contextlib import closing
from typing import Any

from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol.send_requests import HalfAddress, HalfEnd, end, half_address, send, send_half
from txnbridge_rocketmq.cluster import RocketMQCluster
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.read.reader import RocketMQReader
from txnbridge_rocketmq.read.rebalance import Rebalancer
from txnbridge_rocketmq.read.start_positions import GroupPositions
from txnbridge_rocketmq.write.half_buffer import halves_as_json
from txnbridge_rocketmq.write.message_format import to_wire
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, TransactionPlace, properties, unique_key

import txnbridge
from tests.core.reading_kit import SOON, Listener, Polling, by_partition
from tests.inside import broker_of
from tests.rocketmq.kit import BROKER, LONG
from txnbridge import Bridge
from txnbridge.spi import Deadline, Decision, LedgerClaim, Subscription


def connect_to(url: str, **settings: Any) -> Bridge:
    """Open a bridge that creates topics at first use."""
    return txnbridge.connect(url, **{"create_topics": 1, "writers": 1, "timeout": 60, **settings})


def cluster_of(bridge: Bridge) -> RocketMQCluster:
    cluster = broker_of(bridge)._cluster
    assert isinstance(cluster, RocketMQCluster)
    return cluster


def rebalancer_of(reader: RocketMQReader) -> Rebalancer:
    rebalancer = reader._rebalancer
    assert rebalancer is not None
    return rebalancer


def take_all(rebalancer: Any) -> None:
    """Let a member take all partitions, because it knows no other member."""
    rebalancer._members = lambda *_: [rebalancer.client.client_id]


def unique(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


def new_topic(client: RemotingClient, queues: int = 1) -> str:
    """Create a topic that no other test uses, and return its name."""
    name = unique("read")
    client.call(BROKER, administration.create_topic(name, queues, "TRANSACTION"), LONG)
    while (found := client.route(name, LONG, fresh=True)) is None or len(found.readable) < queues:
        pass
    return name


def publish(client: RemotingClient, topic: str, *values: bytes, queue: int = 0, **more: Any) -> None:
    """Send messages without a transaction."""
    for value in values:
        client.call(BROKER, send(to_wire(topic, value, None, None, more.get("timestamp")), "tests", queue), LONG)


def store_half(
    client: RemotingClient, topic: str, value: bytes, *, group: str = "tests", number: int = 0, **how: Any
) -> HalfAddress:
    """Store a half as a writer does, in a transaction of its own, and return its address."""
    transaction = how.pop("transaction", None) or uuid.uuid4().hex
    mark = TransactionPlace(transaction, number)
    own = properties(mark, HalfOrigin({"at": [0], "id": "tests"}, 0))
    message = to_wire(topic, value, None, None, None, own=own, unique_key=unique_key(topic, mark))
    return half_address(topic, group, client.call(BROKER, send_half(message, group, how.get("queue", 0)), LONG))


def commit(client: RemotingClient, half: HalfAddress, times: int = 1) -> None:
    """Commit a half, several times if asked: each commit publishes it."""
    for _ in range(times):
        client.call(BROKER, end(half, HalfEnd.COMMIT, from_check=True), LONG)


class Member(Polling):
    """A reader on a bridge's broker, with its listener."""

    reader: RocketMQReader

    def __init__(self, bridge: Bridge, topics: str | tuple[str, ...], group: str | None = None, **how: Any) -> None:
        self.cluster = cluster_of(bridge)
        self.listener = Listener()
        topics = (topics,) if isinstance(topics, str) else topics
        self.reader = RocketMQReader(
            HalfEnder(self.cluster), Subscription(topics, group, **how), self.listener, Deadline(SOON)
        )

    @property
    def sharing(self) -> Rebalancer:
        return rebalancer_of(self.reader)

    @property
    def group(self) -> GroupPositions:
        group = self.reader._group
        assert group is not None
        return group

    def up_to(self, marker):
        """Return the values before the message with this value, for which it waits."""
        found: list[Any] = []
        deadline = Deadline(SOON)
        while marker not in found:
            found += [message.value for message in self.poll()]
            deadline.check("waiting for a marker")
        return found[: found.index(marker)]

    def acks(self, messages, **more):
        """Return the acks for a claim that acknowledges these messages."""
        return self.reader.ack_context().acks(by_partition(messages), Deadline(SOON), **more)

    def acknowledge(self, messages) -> LedgerClaim:
        """Commit a transaction that only acknowledges these messages."""
        return self.claim(self.acks(messages))

    def claim(self, acks, transaction: str | None = None) -> LedgerClaim:
        ledger = self.cluster.context.ledger(self.cluster.context.application, unique("writer"))
        log = ledger.begin(Deadline(SOON))
        name = transaction or uuid.uuid4().hex
        return ledger.claim(name, Decision.COMMIT, halves_as_json(()), Deadline(SOON), log=log, acks=acks)

    def close(self) -> None:
        self.reader.close(Deadline(SOON))


def member(bridge: Bridge, topics: str | tuple[str, ...], group: str | None = None, **how: Any) -> closing[Member]:
    return closing(Member(bridge, topics, group, **how))
