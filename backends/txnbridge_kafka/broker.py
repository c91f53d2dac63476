"""One bridge's connection to a Kafka cluster."""

from __future__ import annotations

import threading
from weakref import WeakSet

from txnbridge.errors import AccessDenied, InvalidOption, NotSupported
from txnbridge.spi import (
    Admin,
    Broker,
    Context,
    Deadline,
    DecisionLog,
    Identity,
    Ledger,
    Limits,
    Outcome,
    Publisher,
    Reader,
    ReaderListener,
    Status,
    Subscription,
    Token,
    TokenState,
    TopicRules,
    Writer,
)
from txnbridge_kafka.admin.admin import KafkaAdmin
from txnbridge_kafka.admin.doctor import preflight
from txnbridge_kafka.capabilities import CAPABILITIES, WITHOUT_LISTS, message_bytes, without_log
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.decision_log import KafkaDecisionLog
from txnbridge_kafka.outcome.hanging_transactions import HangingTransactionMonitor
from txnbridge_kafka.outcome.outcome import end_prepared, plain_status, prepared_status
from txnbridge_kafka.outcome.transaction_state_log import STATE_TOPIC
from txnbridge_kafka.read.reader import KafkaReader
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import KafkaTopics, longest_transaction_ms
from txnbridge_kafka.write.opening import open_id
from txnbridge_kafka.write.owner import KafkaOwner
from txnbridge_kafka.write.prepared import PreparedIdPool
from txnbridge_kafka.write.publisher import KafkaPublisher
from txnbridge_kafka.write.writer import KafkaWriter

# If nothing listens at the URL for this time, connecting fails, long before the deadline: the port may be mistyped.
_NO_LISTENER_SECONDS = 1.0


class KafkaBroker(Broker):
    """A bridge's connection to a Kafka cluster. It makes the bridge's writers, readers and publishers."""

    group_commit = True
    notices_renewed_topics_late = True

    def __init__(self, settings: KafkaSettings, context: Context, deadline: Deadline) -> None:
        self._settings = settings
        self._context = context
        self.half_check_seconds, self.half_checks = settings.half_check_seconds, settings.half_checks
        self._log = settings.log_topic(context.application)
        requests = Requests(settings)
        self._cluster = KafkaCluster(settings, requests, KafkaTopics(settings, requests), context.events)
        try:
            self.cluster = self._cluster.requests.cluster_id(deadline, no_listener_for=_NO_LISTENER_SECONDS)
            overview = self._cluster.topics.overview(deadline)
            self._longest_ms = longest_transaction_ms(self._cluster.topics, overview.brokers, deadline)
            self._check_times()
            self._unwritable = preflight(self._cluster, self._log, overview, deadline)
            lists = self._cluster.requests.lists_transactions(deadline)
        except BaseException:
            self._cluster.requests.close()
            raise
        self.capabilities = CAPABILITIES if lists else CAPABILITIES.but(WITHOUT_LISTS)
        self.limits = Limits(
            message_bytes=message_bytes(settings.client),
            prepared_seconds=self._longest_ms / 1000,
            prepared_transactions=settings.prepared_ids,
        )
        self._monitor = HangingTransactionMonitor(self._cluster)
        self._owners: dict[str, KafkaOwner] = {}  # the newest of each transactional id
        self._pool: PreparedIdPool | None = None
        self._guard = threading.Lock()
        self._publishers: WeakSet[KafkaPublisher] = WeakSet()

    def _check_times(self) -> None:
        longest, settings = self._longest_ms / 1000, self._settings
        if settings.timeout + (settings.hold or 0) > longest:
            raise InvalidOption(
                f"timeout and hold are {settings.timeout + (settings.hold or 0):g} s together; this cluster lets a"
                f" transaction live {longest:g} s (transaction.max.timeout.ms)"
            )

    def _check_topics(self, *needed: str) -> None:
        for name in needed:
            if name in self._unwritable:
                advice = self._unwritable[name]
                raise NotSupported(f"this cluster can store no transaction: {name} {advice.text}; {advice.remedy}")

    def _owner_of(self, identity: Identity, ledger: Ledger) -> KafkaOwner:
        self._monitor.start()
        if identity.name not in self._owners:
            self._owners[identity.name] = KafkaOwner(identity, ledger, self._settings.prepared_ids)
        return self._owners[identity.name]

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        self._check_topics(STATE_TOPIC, *([self._log] if identity.owned else []))
        self._owners.pop(identity.name, None)  # an owner that opens its id again must not fence itself
        owner = self._owner_of(identity, ledger)
        writers = [
            KafkaWriter(self._cluster, owner, f"{identity.name}.{number}", int(self._settings.timeout * 1000))
            for number in range(count)
        ]
        if identity.owned:
            open_id(self._cluster, owner, writers, deadline)
            if owner.denied:
                self.capabilities = self.capabilities.but(without_log(owner.denied))
        # No other process uses a transactional id that the bridge generated, so a writer opens it at its first use.
        return list(writers)

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        with self._guard:  # two pools would use the same ids
            if self._pool is None:
                owner = self._owner_of(identity, ledger)
                timeout, hold = self._settings.timeout, self._settings.hold
                prepared_ms = self._longest_ms if hold is None else int((timeout + hold) * 1000)
                self._pool = PreparedIdPool(self._cluster, owner, prepared_ms, self._longest_ms)
        return self._pool.take(deadline)

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        publisher = KafkaPublisher(self._settings, self._cluster.topics)
        self._publishers.add(publisher)
        return publisher

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        self._monitor.start()
        return KafkaReader(subscription, listener, self._context, self._cluster, deadline)

    def require_topic(self, topic: str, deadline: Deadline) -> TopicRules:
        self._cluster.topics.require(topic, None, deadline)
        return self._cluster.topics.rules(topic, deadline)

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return end_prepared(self._cluster, token, True, ledger, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return end_prepared(self._cluster, token, False, ledger, deadline)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        try:
            if token.prepared:
                return prepared_status(self._cluster, token, ledger, deadline)
            return plain_status(self._cluster, ledger, token.how, deadline)
        except AccessDenied as error:
            return Status(TokenState.UNKNOWN, reason=f"only the decision log may have the outcome: {error}")

    @property
    def admin(self) -> Admin:
        return KafkaAdmin(self._cluster, self._context)

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        return KafkaDecisionLog(self._settings, name, deadline, self._context.events, self._cluster.topics)

    def close(self, deadline: Deadline) -> None:
        self._monitor.close()
        self._close_publishers(self._publishers, deadline)
        if self._pool is not None:
            self._pool.close(deadline)
        self._cluster.requests.close()
