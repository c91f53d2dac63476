"""`PulsarBroker`: one bridge's connection to a Pulsar cluster."""

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
    DecisionLog,
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
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest
from txnbridge_pulsar.capabilities import (
    CAPABILITIES,
    LIMITS,
    TRANSACTIONS_ARE_OFF,
    WITHOUT_DEDUPLICATION,
    WITHOUT_REST,
)
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.decision_log import PulsarLog, cluster_id
from txnbridge_pulsar.errors import needing, retry_translated
from txnbridge_pulsar.settings import PulsarSettings
from txnbridge_pulsar.topics import PulsarTopics

if TYPE_CHECKING:
    from txnbridge_pulsar.write.owner import PulsarOwner
    from txnbridge_pulsar.write.publisher import PulsarPublisher

_log = logging.getLogger("txnbridge")

# Seconds that connecting waits for the deduplication status; each topic is checked before a sequence is sent to it.
_DEDUPLICATION_SECONDS = 1.0
# Seconds that connecting waits for transaction coordinators while others serve already.
_ALL_COORDINATORS_SECONDS = 3.0
# The namespace in whose rights clients look up transaction coordinators, as if each were a partition of a topic.
COORDINATORS = "pulsar/system"


class PulsarBroker(Broker):
    """The open connection of a bridge: makes its owner, readers and logs, and ends transactions by token."""

    group_commit = True

    def __init__(self, settings: PulsarSettings, context: Context, deadline: Deadline) -> None:
        self._settings = settings
        self._context = context
        self.half_check_seconds, self.half_checks = settings.half_check_seconds, settings.half_checks
        self._client = open_client(settings)
        self.capabilities = CAPABILITIES
        seconds, ids = settings.longest_transaction, settings.prepared_ids
        self.limits = replace(LIMITS, prepared_seconds=seconds, prepared_transactions=ids)
        try:
            rest = Rest(settings)
            topics = PulsarTopics(settings, self._client, rest)
            self._load_coordinators(deadline)
            self.cluster = cluster_id(settings, self._client, topics, deadline)
            keeps_no_sequences = bool(rest) and _is_deduplication_off(settings, topics, deadline)
        except BaseException:
            self._client.close()
            raise
        if not rest:
            self.capabilities = self.capabilities.but(WITHOUT_REST)
        if keeps_no_sequences:
            self.capabilities = self.capabilities.but(WITHOUT_DEDUPLICATION)
        self._cluster = ClusterAccess(self.cluster, settings, self._client, topics, rest, context.events)
        self._keepalive = CoordinatorKeepalive(self._client) if self.capabilities[Capability.ATOMIC_TOPICS] else None
        self._owners: dict[str, PulsarOwner] = {}  # the newest of each transactional id
        self._publishers: WeakSet[PulsarPublisher] = WeakSet()

    def _load_coordinators(self, deadline: Deadline) -> None:
        """Connect to the coordinators: after a restart, they time out transactions only once a client has connected.

        An absent one is needed only for its own transactions; the keepalive goes on connecting to it.
        """

        def load() -> None:
            try:
                with needing("consume", COORDINATORS):
                    self._client.transactions.connect(deadline.left(), _ALL_COORDINATORS_SECONDS)
            except wire.NotAllowed:
                self.capabilities = self.capabilities.without_transactions(TRANSACTIONS_ARE_OFF)

        retry_translated(load, f"connecting to {self._settings.service}", deadline)

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        self.capabilities.require(Capability.ATOMIC_TOPICS)
        if identity.owned and (before := self._owners.pop(identity.name, None)) is not None:
            before.close(deadline)  # an owner that opens its id again must not fence itself
        return list(self._owner_of(identity).open_writers(count, deadline))

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        return self._owner_of(identity).prepare_writer(deadline)

    def _owner_of(self, identity: Identity) -> PulsarOwner:
        from txnbridge_pulsar.write.owner import PulsarOwner

        if identity.name not in self._owners:
            ledger = self._context.ledger(identity.application, f"fence/{self.cluster}/{identity.name}")
            self._owners.setdefault(identity.name, PulsarOwner(self._cluster, identity, ledger))
        return self._owners[identity.name]

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        from txnbridge_pulsar.write.publisher import PulsarPublisher

        application = self._context.application
        publisher = PulsarPublisher(self._cluster, name, lambda id: self._context.ledger(application, id))
        self._publishers.add(publisher)
        return publisher

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        from txnbridge_pulsar.read.reader import PulsarReader

        return PulsarReader(self._cluster, subscription, listener, self._context, deadline)

    def require_topic(self, topic: str, deadline: Deadline) -> TopicRules:
        concrete, *_ = self._cluster.topics.require(topic, None, deadline)
        self._cluster.topics.check_may_send(concrete, deadline)
        return TopicRules()

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        from txnbridge_pulsar.outcome.outcome import end_prepared

        return end_prepared(self._cluster, token, True, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        from txnbridge_pulsar.outcome.outcome import end_prepared

        return end_prepared(self._cluster, token, False, deadline)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        from txnbridge_pulsar.outcome.outcome import status_of

        return status_of(self._cluster, token, deadline)

    @property
    def admin(self) -> Admin:
        from txnbridge_pulsar.admin.admin import PulsarAdmin

        return PulsarAdmin(self._cluster)

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        topic = self._settings.log_topic(name)
        return PulsarLog(self._client, self._cluster.topics, topic, deadline, self._context.events)

    def close(self, deadline: Deadline) -> None:
        self._close_publishers(self._publishers, deadline)
        for owner in self._owners.values():
            owner.close(deadline)
        if self._keepalive is not None:
            self._keepalive.close()
        self._client.close()


def _is_deduplication_off(settings: PulsarSettings, topics: PulsarTopics, deadline: Deadline) -> bool:
    """Return whether brokers are known to store duplicates, by the status of an internal topic.

    Reading the status of other topics might need more rights.
    """
    topic = settings.namespace.full_name(settings.cluster_topic)
    try:
        return topics.deduplication(topic, Deadline(min(_DEDUPLICATION_SECONDS, deadline.left()))) == "Disabled"
    except TxnBridgeError as error:
        _log.debug("whether %s removes duplicates is not known: %s", settings.namespace, error)
        return False


def open_client(settings: PulsarSettings) -> wire.PulsarClient:
    """Return a protocol client that has not connected yet. Raise `InvalidOption` for an invalid address."""
    try:
        return wire.PulsarClient(
            settings.service,
            authentication=settings.authentication(),
            tls=settings.tls_context() if settings.tls else None,
            listener=settings.listener or None,
        )
    except ValueError as error:
        raise InvalidOption(str(error)) from error


# After a restart readers wait up to these seconds longer. A connect is two small requests to each coordinator.
CONNECT_EVERY_SECONDS = 10.0
_CONNECT_SECONDS = 10.0


class CoordinatorKeepalive:
    """Connects to the transaction coordinators regularly, so that they abort transactions whose timeouts have passed.

    After a restart of the brokers no transaction times out until a client has connected to its coordinator. A
    transaction that a dead process left open would hold readers back for ever. So each open bridge connects to all
    coordinators regularly, on a thread (hazard H53).
    """

    def __init__(self, client: wire.PulsarClient) -> None:
        self._client = client
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="txnbridge-pulsar-coordinators", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(CONNECT_EVERY_SECONDS):
            try:
                self._client.transactions.connect(_CONNECT_SECONDS)
            except wire.PulsarError as error:
                _log.debug("the transaction coordinators do not answer: %s", error)

    def close(self) -> None:
        """Tell the thread to stop. A running request ends when the client is closed."""
        self._stop.set()
