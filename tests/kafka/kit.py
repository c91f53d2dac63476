"""Helpers that look behind the public interface."""

import logging
from collections.abc import Collection
from threading import Thread
from typing import Any
from weakref import finalize

import pytest
from confluent_kafka import Producer
from confluent_kafka import admin as kafka
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.protocol_types import TransactionDescription
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import KafkaTopics
from txnbridge_kafka.write.prepared import PreparedIdPool
from txnbridge_kafka.write.producer import TransactionalProducer
from txnbridge_kafka.write.writer import KafkaWriter

from tests import inside
from tests.brokers.kit import state
from tests.failing import answer_calls
from txnbridge import Bridge, Transaction
from txnbridge.spi import Deadline

LONG = 30.0
Server = brokers.Broker | faults.Proxy | str  # or its URL
# A broker with these settings forgets an id that was not used for three seconds.
FORGETFUL = {"transactional.id.expiration.ms": "3000"}
FORGETFUL |= {"transaction.remove.expired.transaction.cleanup.interval.ms": "500"}
kafka_names: Any = kafka  # which has names that its types do not know
silent = logging.getLogger("tests.kafka.librdkafka")
silent.addHandler(logging.NullHandler())
silent.propagate = False


class Lines(list[str]):
    """A logger of the plain client that keeps the lines."""

    def log(self, level: int, text: str, *parts: object) -> None:
        self.append(text % parts)


def bootstrap_of(server: Server) -> str:
    url = server if isinstance(server, str) else server.url
    return url.removeprefix("kafka://").partition("?")[0]


def plain_producer(server: Server, id: str, timeout_ms: int = 60_000, **more: Any) -> Producer:
    """Return a producer of the plain client whose id is open."""
    settings = {"bootstrap.servers": bootstrap_of(server), "transactional.id": id, "transaction.timeout.ms": timeout_ms}
    producer = Producer({**settings, **more}, logger=silent)
    producer.init_transactions(LONG)
    return producer


def write(producer: Producer, topic: str, *values: bytes) -> None:
    """Begin a transaction and store messages in it."""
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(LONG) == 0


def plain_admin(server: Server) -> kafka.AdminClient:
    return kafka.AdminClient({"bootstrap.servers": bootstrap_of(server)}, logger=silent)


def configure(admin: kafka.AdminClient, topic: str, name: str, value: str) -> None:
    entry = kafka_names.ConfigEntry(name, value, incremental_operation=kafka_names.AlterConfigOpType.SET)
    resource = kafka_names.ConfigResource(kafka_names.ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result()


def right(user: str, kind: str, name: str, operation: str, pattern: str = "LITERAL") -> Any:
    """Return what allows a user an operation, by names such as `topic` and `DESCRIBE`."""
    which = kafka_names.ResourceType[kind.upper()], name, kafka_names.ResourcePatternType[pattern]
    return kafka_names.AclBinding(
        *which, f"User:{user}", "*", kafka_names.AclOperation[operation], kafka_names.AclPermissionType.ALLOW
    )


def writer_of(txn: Transaction) -> KafkaWriter:
    writer = inside.writer_of(txn)
    assert isinstance(writer, KafkaWriter)
    return writer


def producer_of(txn: Transaction) -> TransactionalProducer:
    producer = writer_of(txn).session.producer
    assert producer is not None
    return producer


def flush(txn: Transaction) -> None:
    """Let the broker have all of it, and the transaction stay open."""
    writer_of(txn).flush(Deadline(60))


def cluster_of(bridge: Bridge) -> KafkaCluster:
    cluster = inside.broker_of(bridge)._cluster
    assert isinstance(cluster, KafkaCluster)
    return cluster


def opened_ahead(pool: PreparedIdPool) -> Collection[Thread]:
    """Return the threads that open ids ahead of their use."""
    return pool._ahead


def requests_of(bridge: Bridge) -> Requests:
    return cluster_of(bridge).requests


def topics_of(settings: KafkaSettings) -> KafkaTopics:
    """Return the topics of a cluster. Their connections are closed when nobody uses them any more."""
    topics = KafkaTopics(settings, requests := Requests(settings))
    finalize(topics, requests.close)
    return topics


def without_epoch_bumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let EndTxn be sent in the version that leaves the epoch as it is, as to an older cluster."""
    answer_calls(monkeypatch, Connections, "bumps_epochs", False)


def describe(bridge: Bridge, *ids: str) -> dict[str, TransactionDescription]:
    """Return the coordinator's descriptions of Kafka's own ids; unknown ids are absent."""
    return requests_of(bridge).describe(ids, Deadline(30))


def stand_still(broker: brokers.Broker) -> None:
    """Pause it, and return when it has stopped: threads that are at work may answer once more."""
    broker.pause()
    pid = broker.pid(1) if isinstance(broker, brokers.ProcessBroker) else None
    assert pid is None or wait_until(lambda: "T" in state(pid), 30.0)
