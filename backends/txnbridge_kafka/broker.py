"""One bridge's connection to a Kafka cluster."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from txnbridge.errors import InvalidOption, TxnBridgeError
from txnbridge.spi import (
    Admin,
    Broker,
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
    Writer,
)
from txnbridge_kafka.admin import KafkaAdmin
from txnbridge_kafka.cluster import Cluster
from txnbridge_kafka.endings import end_prepared, plain_status, prepared_status
from txnbridge_kafka.limits import longest_transaction_ms
from txnbridge_kafka.log import KafkaLog
from txnbridge_kafka.opening import open_id
from txnbridge_kafka.owner import Owner
from txnbridge_kafka.prepared import Pool
from txnbridge_kafka.publisher import KafkaPublisher
from txnbridge_kafka.reader import KafkaReader
from txnbridge_kafka.requests import Requests
from txnbridge_kafka.settings import Settings
from txnbridge_kafka.topics import Topics
from txnbridge_kafka.writer import KafkaWriter

if TYPE_CHECKING:
    from txnbridge_kafka.backend import KafkaBackend


_log = logging.getLogger("txnbridge")


class KafkaBroker(Broker):
    """Opened by `KafkaBackend.open`."""

    def __init__(self, settings: Settings, context: Context, backend: KafkaBackend, deadline: Deadline) -> None:
        self._settings = settings
        self._context = context
        self._cluster = Cluster(settings, Requests(settings), Topics(settings), context.events)
        try:
            self.cluster = self._cluster.requests.cluster_id(deadline)
            self._longest_ms = longest_transaction_ms(self._cluster.topics, deadline)
            self._check_times()
        except BaseException:
            self._cluster.requests.close()
            raise
        self.capabilities = backend.capabilities
        self.limits = replace(backend.limits, prepared_seconds=self._longest_ms / 1000)
        self._owner: Owner | None = None
        self._pool: Pool | None = None
        self._publishers: WeakSet[KafkaPublisher] = WeakSet()

    def _check_times(self) -> None:
        longest, settings = self._longest_ms / 1000, self._settings
        if settings.timeout + (settings.hold or 0) > longest:
            raise InvalidOption(
                f"timeout and hold are {settings.timeout + (settings.hold or 0):g} s together; this cluster lets a"
                f" transaction live {longest:g} s (transaction.max.timeout.ms)"
            )

    def _owner_of(self, identity: Identity, ledger: Ledger) -> Owner:
        if self._owner is None:
            self._owner = Owner(identity, ledger, self._settings.prepared_ids)
        return self._owner

    # --- writing --------------------------------------------------------------------------------------------------

    def open_writers(self, identity: Identity, count: int, ledger: Ledger, deadline: Deadline) -> list[Writer]:
        owner = self._owner_of(identity, ledger)
        writers = [
            KafkaWriter(self._cluster, owner, f"{identity.name}.{number}", int(self._settings.timeout * 1000))
            for number in range(count)
        ]
        if identity.owned:
            open_id(self._cluster, owner, writers, deadline)
        # Without an id of its own nobody has to be fenced, and each is opened when it is first used.
        return list(writers)

    def prepare_writer(self, identity: Identity, ledger: Ledger, deadline: Deadline) -> Writer:
        owner = self._owner_of(identity, ledger)
        if self._pool is None:
            self._pool = Pool(self._cluster, owner, self._prepared_ms(), self._longest_ms)
        return self._pool.take(deadline)

    def _prepared_ms(self) -> int:
        if self._settings.hold is None:
            return self._longest_ms
        return int((self._settings.timeout + self._settings.hold) * 1000)

    def publisher(self, name: str | None, deadline: Deadline) -> Publisher:
        publisher = KafkaPublisher(self._settings, self._cluster.topics, deadline, self._context.events)
        self._publishers.add(publisher)
        return publisher

    # --- reading --------------------------------------------------------------------------------------------------

    def reader(self, subscription: Subscription, listener: ReaderListener, deadline: Deadline) -> Reader:
        return KafkaReader(self._settings, subscription, listener, self._context, self._cluster.topics, deadline)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def commit(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return end_prepared(self._cluster, token, True, ledger, deadline)

    def abort(self, token: Token, ledger: Ledger, deadline: Deadline) -> Outcome:
        return end_prepared(self._cluster, token, False, ledger, deadline)

    def status(self, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
        if token.prepared:
            return prepared_status(self._cluster, token, ledger, deadline)
        return plain_status(self._cluster.requests, ledger, token.how, deadline)

    # --- the rest -------------------------------------------------------------------------------------------------

    @property
    def admin(self) -> Admin:
        return KafkaAdmin(self._settings, self._cluster.requests, self._context)

    def decision_log(self, name: str, deadline: Deadline) -> DecisionLog:
        return KafkaLog(self._settings, name, deadline, self._context.events, self._cluster.topics)

    def close(self, deadline: Deadline) -> None:
        for publisher in list(self._publishers):
            try:
                publisher.close(deadline)
            except TxnBridgeError as error:
                _log.warning("closing a publisher: %s", error)
        if self._pool is not None:
            self._pool.close(deadline)
        self._cluster.requests.close()
