"""One bridge's connection to a RocketMQ cluster."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from txnbridge.errors import InvalidOption, TxnBridgeError
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
    Writer,
)
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.backend import WITH_ROCKSDB, WITHOUT_TRANSACTIONS
from txnbridge_rocketmq.cluster import Cluster
from txnbridge_rocketmq.decision_log import RocketMQLog
from txnbridge_rocketmq.naming import name_of, noted_brokers
from txnbridge_rocketmq.outcome.check_back import Checks
from txnbridge_rocketmq.outcome.end_transaction import Ender
from txnbridge_rocketmq.outcome.producer_groups import Members, Questions
from txnbridge_rocketmq.settings import Settings
from txnbridge_rocketmq.settings.broker_config import Brokers
from txnbridge_rocketmq.topics import Topics

if TYPE_CHECKING:
    from txnbridge_rocketmq.backend import RocketMQBackend
    from txnbridge_rocketmq.half_store import RocketMQHalves
    from txnbridge_rocketmq.write.owner import Owner
    from txnbridge_rocketmq.write.publisher import RocketMQPublisher


_log = logging.getLogger("txnbridge")


class RocketMQBroker(Broker):
    """Opened by `RocketMQBackend.open`."""

    def __init__(self, settings: Settings, context: Context, backend: RocketMQBackend, deadline: Deadline) -> None:
        self._settings = settings
        self._cluster = open_cluster(settings, context, deadline)
        self.cluster = self._cluster.id
        self.capabilities = backend.capabilities
        self._publishers: WeakSet[RocketMQPublisher] = WeakSet()
        self._ender = Ender(self._cluster)
        self._checks = Checks(self._ender)
        self._owner: Owner | None = None
        self._halves: RocketMQHalves | None = None
        self._lock = threading.Lock()
        try:
            home = self._cluster.brokers.known(self._cluster.topics.home, deadline)
            self._checks.start(deadline)
        except BaseException:
            self._cluster.client.close()
            raise
        if home.half_topic == remoting.ROCKSDB_HALF_TOPIC:
            self.capabilities = self.capabilities.but(WITH_ROCKSDB)
        if home.is_on("rejectTransactionMessage"):
            self.capabilities = self.capabilities.but(WITHOUT_TRANSACTIONS)
        self.limits = replace(
            backend.limits, message_bytes=home.message_bytes, prepared_seconds=min(home.longest, home.kept)
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        self.capabilities.require(Capability.ATOMIC_TOPICS)
        return list(self._owner_of(identity, ledger).open_writers(count, deadline))

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        self.capabilities.require(Capability.PREPARE)
        return self._owner_of(identity, ledger).prepare_writer(deadline)

    def _owner_of(self, identity: Identity, ledger: Ledger) -> Owner:
        from txnbridge_rocketmq.write.owner import Owner

        with self._lock:
            if self._owner is None:
                self._owner = Owner(self._cluster, identity, ledger, self._ender)
            return self._owner

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        from txnbridge_rocketmq.write.publisher import RocketMQPublisher

        publisher = RocketMQPublisher(self._cluster)
        self._publishers.add(publisher)
        return publisher

    # --- reading ------------------------------------------------------------------------------------------------------

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        from txnbridge_rocketmq.read.reader import RocketMQReader

        return RocketMQReader(self._ender, subscription, listener, deadline)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        from txnbridge_rocketmq.outcome.outcome import end_prepared

        return end_prepared(self._ender, token, Decision.COMMIT, ledger, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        from txnbridge_rocketmq.outcome.outcome import end_prepared

        return end_prepared(self._ender, token, Decision.ABORT, ledger, deadline)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        from txnbridge_rocketmq.outcome.outcome import status_of

        return status_of(self._ender, token, ledger, deadline)

    # --- the rest -----------------------------------------------------------------------------------------------------

    @property
    def admin(self) -> Admin:
        from txnbridge_rocketmq.admin.admin import RocketMQAdmin

        return RocketMQAdmin(self._ender)

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        topic = self._settings.log_topic(name)
        with self._cluster.context.events.step("step:log", log=name):
            queue = self._cluster.topics.internal(topic, deadline)
        return RocketMQLog(self._cluster.client, queue, self._cluster.brokers.known(queue.broker, deadline).kept)

    def half_store(self) -> HalfStore | None:
        from txnbridge_rocketmq.half_store import RocketMQHalves

        with self._lock:
            if self._halves is None:
                self._halves = RocketMQHalves(self._ender)
            return self._halves

    def close(self, deadline: Deadline) -> None:
        self._checks.close()
        for publisher in list(self._publishers):
            try:
                publisher.close(deadline)
            except TxnBridgeError as error:
                _log.warning("closing a publisher: %s", error)
        self._cluster.client.close(deadline.left())


def open_cluster(settings: Settings, context: Context, deadline: Deadline) -> Cluster:
    """Connect. Raises `InvalidOption`, `BrokerUnavailable`, `AccessDenied`."""
    questions = Questions()
    try:
        client = remoting.Client(
            settings.name_servers,
            credentials=settings.credentials(),
            tls=settings.tls_context(),
            on_checks=questions.ask,
        )
    except ValueError as error:
        raise InvalidOption(str(error)) from error
    try:
        named = name_of(settings, client, deadline)
        noted = noted_brokers(settings, client, named.home, deadline)
    except BaseException:
        client.close()
        raise
    topics = Topics(settings, client, named.home, noted)
    return Cluster(named.id, settings, client, topics, Brokers(client), Members(client, questions), context)
