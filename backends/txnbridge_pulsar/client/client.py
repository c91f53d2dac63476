"""The way in: a client of one cluster, and from it producers, consumers, readers and transactions."""

from __future__ import annotations

import itertools
import ssl
import threading
import uuid

from .address import full_topic_name, service_url
from .authentication import Authentication, NoAuthentication, tls_context
from .clock import ClientDeadline
from .compression import Compression
from .connection import QUIET_SECONDS, ConnectionOptions
from .consumer import ConsumerOptions, PulsarConsumer, SubscriptionType
from .ids import EARLIEST, LATEST, MessageId
from .inbox import Inbox
from .lookup import Lookup
from .pool import ConnectionPool
from .producer import AccessMode, ProducerOptions, PulsarProducer
from .sending import Budget
from .transactions import Transactions

# Frames without a receipt, over all producers: some seconds of a slow broker, and little beside what batches take.
DEFAULT_UNCONFIRMED_BYTES = 64 * 1024 * 1024
DEFAULT_PERMITS = 5000


class PulsarClient:
    """Connections to one cluster, made when needed. All methods from any thread; every wait ends with its timeout.

    A `lane` is a name: what is opened in one lane never shares a connection with another lane's. A producer that may
    be fenced needs its own, because the broker then cuts its whole connection.
    """

    def __init__(
        self,
        url: str,
        *,
        authentication: Authentication | None = None,
        tls: ssl.SSLContext | None = None,
        listener: str | None = None,
        quiet_seconds: float = QUIET_SECONDS,
        unconfirmed_bytes: int = DEFAULT_UNCONFIRMED_BYTES,
    ) -> None:
        """`url` names one or more brokers: `pulsar://host:6650,host2:6650`, or `pulsar+ssl://`, which takes `tls` or
        the system's authorities. `listener` is the advertised listener to ask for. Nothing is connected yet.
        """
        service = service_url(url)
        if service.tls:
            tls = tls or tls_context()
        elif tls is not None:
            raise ValueError("TLS needs a service URL that begins with pulsar+ssl://")
        options = ConnectionOptions(authentication or NoAuthentication(), tls, quiet_seconds)
        self._pool = ConnectionPool(options)
        self._lookup = Lookup(self._pool, service, listener)
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
        """How many partitions a topic has now, 0 if it has none. The number can grow: ask again.

        Raises `TopicNotFound`; asking makes no topic.
        """
        return self._lookup.partitions(topic, ClientDeadline(timeout))

    def topics(self, namespace: str, timeout: float) -> list[str]:
        """The full names of a namespace's persistent topics, each partition by itself."""
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
        properties: tuple[tuple[str, str], ...] = (),
        connection_key: str = "",
    ) -> PulsarProducer:
        """A producer on a topic or one partition of it (`partition_name`).

        `name` identifies it for the broker's deduplication, by default one that nobody else has. `transactions` waits
        until the topic can take transactional sends. Raises `ProducerBusy` if the name is in use, `ProducerFenced` if
        another one has the topic, `MissingLibrary`, `NotAuthorized`, and whatever else the broker answers; what may
        pass is tried again until the timeout.
        """
        options = ProducerOptions(name, access, compression, transactions, properties, connection_key)
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
        priority: int = 0,
        read_compacted: bool = False,
        properties: tuple[tuple[str, str], ...] = (),
        hash_ranges: tuple[tuple[int, int], ...] = (),
        connection_key: str = "",
        create: bool = True,
    ) -> PulsarConsumer:
        """A consumer on a topic or one partition of it.

        `start` counts where a subscription begins: `EARLIEST` or `LATEST`; without `durable` also behind a message.
        `inbox` is one to share with other consumers; `permits` how many messages at most wait there for this one,
        fewer where they are large; with 0 none but what it is told to `allow`. `hash_ranges` are what a key-shared
        consumer takes, by default what the broker gives it. Without `create` a missing topic is `TopicNotFound` also
        where brokers make topics by themselves.

        Raises `ConsumerBusy`, `NotAuthorized`, `TopicNotFound`, and whatever else the broker answers; what may pass is
        tried again until the timeout.
        """
        if durable and start not in (EARLIEST, LATEST):
            raise ValueError("a durable subscription begins at EARLIEST or LATEST; seek from there")
        options = ConsumerOptions(
            subscription,
            type,
            start,
            durable,
            name,
            permits,
            priority,
            read_compacted,
            properties,
            hash_ranges,
            connection_key,
            create,
        )
        consumer = PulsarConsumer(self._lookup, self._next_id, full_topic_name(topic), options, inbox)
        consumer.reopen(timeout)
        return consumer

    def read(
        self,
        topic: str,
        *,
        timeout: float,
        start: MessageId = EARLIEST,
        inbox: Inbox | None = None,
        read_compacted: bool = False,
        connection_key: str = "",
        create: bool = True,
    ) -> PulsarConsumer:
        """A reader: a consumer that leaves no subscription behind, from the start or behind a message. `create` as in
        `subscribe`.
        """
        return self.subscribe(
            topic,
            f"reader-{uuid.uuid4().hex[:12]}",
            timeout=timeout,
            start=start,
            durable=False,
            inbox=inbox,
            read_compacted=read_compacted,
            connection_key=connection_key,
            create=create,
        )

    def hang_up(self, connection_key: str) -> None:
        """Close the connections of one lane at once. What was opened in it is lost, and may be reopened.

        What was written before may still reach the broker, nothing else does.
        """
        self._pool.hang_up(connection_key)

    def close(self) -> None:
        """Hang up everywhere at once: flush and close producers first. Repeating it is harmless."""
        self._pool.close()
