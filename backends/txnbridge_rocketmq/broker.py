"""One bridge's connection to a RocketMQ cluster."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from txnbridge.spi import (
    Admin,
    Broker,
    Capability,
    Context,
    Deadline,
    Decision,
    DecisionLog,
    HalfStore,
    Identity,
    Ledger,
    Outcome,
    Publisher,
    Reader,
    ReaderListener,
    Status,
    Subscription,
    Token,
    TopicRules,
    Writer,
)
from txnbridge_rocketmq.capabilities import CAPABILITIES, LIMITS, REJECTED, WITH_ROCKSDB
from txnbridge_rocketmq.client.protocol.codes import ROCKSDB_HALF_TOPIC
from txnbridge_rocketmq.cluster import open_cluster
from txnbridge_rocketmq.decision_log import RocketMQDecisionLog
from txnbridge_rocketmq.outcome.check_back import CheckBackHandler
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.outcome.outcome import end_prepared, status_of
from txnbridge_rocketmq.settings import RocketMQSettings

if TYPE_CHECKING:
    from txnbridge_rocketmq.half_store import RocketMQHalfStore
    from txnbridge_rocketmq.write.owner import RocketMQOwner
    from txnbridge_rocketmq.write.publisher import RocketMQPublisher


class RocketMQBroker(Broker):
    """The open connection of a bridge: creates its writers, readers and logs, and ends transactions by token."""

    group_commit = True

    def __init__(self, settings: RocketMQSettings, context: Context, deadline: Deadline) -> None:
        self._settings = settings
        self._cluster = open_cluster(settings, context, deadline)
        self.cluster = self._cluster.id
        self.capabilities = CAPABILITIES
        self._publishers: WeakSet[RocketMQPublisher] = WeakSet()
        self._ender = HalfEnder(self._cluster)
        self._checks = CheckBackHandler(self._ender)
        self._owner: RocketMQOwner | None = None
        self._halves: RocketMQHalfStore | None = None
        self._lock = threading.Lock()
        try:
            home = self._cluster.brokers.config(self._cluster.topics.home, deadline)
            self._checks.start(deadline)
        except BaseException:
            self._cluster.client.close()
            raise
        if home.half_topic == ROCKSDB_HALF_TOPIC:
            self.capabilities = self.capabilities.but(WITH_ROCKSDB)
        if home.is_on("rejectTransactionMessage"):
            self.capabilities = self.capabilities.without_transactions(REJECTED)
        self.limits = replace(
            LIMITS, message_bytes=home.message_bytes, prepared_seconds=min(home.longest_transaction, home.retention)
        )

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        self.capabilities.require(Capability.ATOMIC_TOPICS)
        return list(self._owner_of(identity, ledger).open_writers(count, deadline))

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        return self._owner_of(identity, ledger).prepare_writer(deadline)

    def _owner_of(self, identity: Identity, ledger: Ledger) -> RocketMQOwner:
        from txnbridge_rocketmq.write.owner import RocketMQOwner

        with self._lock:
            if self._owner is None:
                self._owner = RocketMQOwner(self._cluster, identity, ledger, self._ender)
            return self._owner

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        from txnbridge_rocketmq.write.publisher import RocketMQPublisher

        publisher = RocketMQPublisher(self._cluster)
        self._publishers.add(publisher)
        return publisher

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        from txnbridge_rocketmq.read.reader import RocketMQReader

        return RocketMQReader(self._ender, subscription, listener, deadline)

    def require_topic(self, topic: str, deadline: Deadline) -> TopicRules:
        self._cluster.topics.require(topic, None, deadline)
        return TopicRules()

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return end_prepared(self._ender, token, Decision.COMMIT, ledger, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return end_prepared(self._ender, token, Decision.ABORT, ledger, deadline)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        return status_of(self._ender, token, ledger, deadline)

    @property
    def admin(self) -> Admin:
        from txnbridge_rocketmq.admin.admin import RocketMQAdmin

        return RocketMQAdmin(self._ender)

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        topic = self._settings.log_topic(name)
        with self._cluster.context.events.step("step:log", log=name):
            queue = self._cluster.topics.internal(topic, deadline)
        return RocketMQDecisionLog(
            self._cluster.client, queue, self._cluster.brokers.config(queue.broker, deadline).retention
        )

    def half_store(self) -> HalfStore | None:
        from txnbridge_rocketmq.half_store import RocketMQHalfStore

        with self._lock:
            if self._halves is None:
                self._halves = RocketMQHalfStore(self._ender)
            return self._halves

    def close(self, deadline: Deadline) -> None:
        self._checks.close()
        self._close_publishers(self._publishers, deadline)
        self._cluster.client.close(deadline.left())
