"""`PulsarClient`: opens producers, consumers and readers of one cluster, and gives access to its transactions."""

from __future__ import annotations

import itertools
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from txnbridge_pulsar.client.connecting.address import full_topic_name, service_url
from txnbridge_pulsar.client.connecting.authentication import NO_AUTHENTICATION, Authentication, tls_context
from txnbridge_pulsar.client.connecting.connection import ConnectionOptions
from txnbridge_pulsar.client.connecting.lookup import ConnectionPool, Lookup
from txnbridge_pulsar.client.format.compression import Compression
from txnbridge_pulsar.client.format.ids import EARLIEST, LATEST, MessageId

from .consumer import ConsumerOptions, PulsarConsumer, SubscriptionType
from .deadline import ClientDeadline
from .inbox import Inbox
from .pending_sends import Budget
from .producer import AccessMode, ProducerOptions, PulsarProducer
from .transactions import Transactions

# Limit on the bytes without a receipt over all producers: a slow broker stores as much in some seconds.
DEFAULT_UNCONFIRMED_BYTES = 64 * 1024 * 1024
DEFAULT_PERMITS = 5000
# Seconds for one attempt to open a producer or consumer. A broker that was cut off from the cluster may never answer
# for a topic that another broker serves by then. A healthy broker loads a topic in less time; if not, the next attempt
# waits for the same loading.
OPENING_ATTEMPT_SECONDS = 15.0

Opened = TypeVar("Opened", PulsarConsumer, PulsarProducer)


@contextmanager
def closing(opened: Opened, left: Callable[[], float]) -> Iterator[Opened]:
    """Close a producer or consumer at the end of the block, which may take `left()` seconds then."""
    try:
        yield opened
    finally:
        opened.close(left())


class PulsarClient:
    """Client of one cluster. Connections are made when needed. Thread-safe; every call returns within its timeout.

    Producers and consumers with different `connection_key`s share no connection. A producer that may be fenced needs a
    key of its own, because the broker closes the whole connection of a fenced producer.
    """

    def __init__(
        self,
        url: str,
        *,
        authentication: Authentication = NO_AUTHENTICATION,
        tls: ssl.SSLContext | None = None,
        listener: str | None = None,
        unconfirmed_bytes: int = DEFAULT_UNCONFIRMED_BYTES,
        opening_attempt_seconds: float = OPENING_ATTEMPT_SECONDS,
    ) -> None:
        """Make a client without connecting. `url` names one or more brokers: `pulsar://host:6650,host2:6650`, or the
        same with `pulsar+ssl://`. `tls` is the context for `pulsar+ssl://`; by default the system's certificate
        authorities are trusted. `listener` is the advertised listener to ask brokers for.
        """
        service = service_url(url)
        if service.tls:
            tls = tls or tls_context()
        elif tls is not None:
            raise ValueError("TLS needs a service URL that begins with pulsar+ssl://")
        self._pool = ConnectionPool(ConnectionOptions(authentication, tls))
        self._lookup = Lookup(self._pool, service, listener, opening_attempt_seconds)
        self._budget = Budget(unconfirmed_bytes)
        self._ids = itertools.count()
        self._ids_lock = threading.Lock()
        self.transactions = Transactions(self._lookup)

    def __enter__(self) -> PulsarClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next_id(self) -> int:
        with self._ids_lock:
            return next(self._ids)

    def partitions(self, topic: str, timeout: float) -> int:
        """Return how many partitions a topic has now; 0 for a topic without partitions. Partitions may be added later.

        Raise `TopicNotFound` if the topic does not exist; this request creates no topic.
        """
        return self._lookup.partitions(topic, ClientDeadline(timeout))

    def topics(self, namespace: str, timeout: float) -> list[str]:
        """Return the full names of the persistent topics in a namespace. Each partition is listed as a topic."""
        return self._lookup.topics(namespace, ClientDeadline(timeout))

    def create_producer(
        self,
        topic: str,
        *,
        timeout: float,
        name: str | None = None,
        access: AccessMode = AccessMode.SHARED,
        compression: Compression = Compression.NONE,
        transactions: bool = False,
        connection_key: str = "",
    ) -> PulsarProducer:
        """Open a producer on a topic or on one partition (`partition_name`).

        The broker deduplicates by the producer's `name`; by default the broker chooses a unique one. With
        `transactions`, wait until the topic accepts transactional sends. Temporary errors are retried until the
        timeout. Raise `ProducerBusy` if the name is in use, `ProducerFenced` if another producer holds the topic,
        `MissingLibrary`, `NotAuthorized`, and others.
        """
        options = ProducerOptions(name, access, compression, transactions, connection_key)
        producer = PulsarProducer(self._lookup, self._budget, self._next_id(), full_topic_name(topic), options)
        producer.reopen(timeout)
        return producer

    def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        timeout: float,
        type: SubscriptionType = SubscriptionType.EXCLUSIVE,
        start: MessageId = LATEST,
        durable: bool = True,
        name: str | None = None,
        inbox: Inbox | None = None,
        permits: int = DEFAULT_PERMITS,
        connection_key: str = "",
        create: bool = True,
    ) -> PulsarConsumer:
        """Open a consumer on a topic or on one partition.

        A new subscription begins at `start`: `EARLIEST` or `LATEST`, or after a message if the subscription is not
        `durable`. `inbox` is the queue for received entries, which may be shared with other consumers. At most
        `permits` messages of this consumer wait in the inbox, fewer if they are large. With 0 permits the broker sends
        only the messages that `PulsarConsumer.request_messages` has requested. Without `create` a missing topic is
        `TopicNotFound`, even where brokers create topics automatically.

        Temporary errors are retried until the timeout. Raise `ConsumerBusy` if other consumers have the subscription
        exclusively or with another type, `NotAuthorized`, `TopicNotFound`, and others.
        """
        if durable and start not in (EARLIEST, LATEST):
            raise ValueError("a durable subscription begins at EARLIEST or LATEST; seek from there")
        options = ConsumerOptions(subscription, type, start, durable, name, permits, connection_key, create)
        consumer = PulsarConsumer(self._lookup, self._next_id, full_topic_name(topic), options, inbox)
        consumer.reopen(timeout)
        return consumer

    def read(self, topic: str, *, timeout: float, start: MessageId = EARLIEST, **options: Any) -> PulsarConsumer:
        """Open a reader: a consumer from `start` on, with a temporary subscription and these options of `subscribe`."""
        name = f"reader-{uuid.uuid4().hex[:12]}"
        return self.subscribe(topic, name, timeout=timeout, start=start, durable=False, **options)

    def hang_up(self, connection_key: str) -> None:
        """Close the connections with one key at once: their producers and consumers are lost, and send nothing more.

        Frames that were already written may still arrive at the broker.
        """
        self._pool.hang_up(connection_key)

    def close(self) -> None:
        """Close all connections at once. Flush and close the producers before. Calls may be repeated."""
        self._pool.close()
