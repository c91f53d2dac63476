"""Helpers that look behind the public interface."""

from collections.abc import Collection
from threading import Thread
from weakref import finalize

import pytest
from txnbridge_conformance import brokers
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
