"""The settings and clients for one Kafka cluster, shared by a bridge's writers, readers and administration."""

from __future__ import annotations

from dataclasses import dataclass, field

from txnbridge.spi import Emitter, Partition
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import KafkaTopics


@dataclass(frozen=True)
class KafkaCluster:
    """The settings for one cluster, and the clients that all parts of a bridge use to send requests to it."""

    settings: KafkaSettings
    requests: Requests
    topics: KafkaTopics
    events: Emitter
    # The partitions that this bridge writes and reads: `HangingTransactionMonitor` checks them.
    watched_partitions: set[Partition] = field(default_factory=set)
