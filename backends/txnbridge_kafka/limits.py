"""What a cluster's own settings allow."""

from __future__ import annotations

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from txnbridge.spi import Deadline
from txnbridge_kafka.errors import translate
from txnbridge_kafka.producer import Watch
from txnbridge_kafka.settings import Settings

_LONGEST = "transaction.max.timeout.ms"
_BROKER_DEFAULT_MS = 900_000


def longest_transaction_ms(settings: Settings, deadline: Deadline) -> int:
    """How long a transaction may live; Kafka's own default where this user may not read a broker's settings."""
    admin = AdminClient({**settings.client, "logger": Watch()})
    try:
        brokers = admin.list_topics(timeout=max(deadline.left(), 0.01)).brokers
        resources = [ConfigResource(ResourceType.BROKER, str(number)) for number in brokers]
        answers = admin.describe_configs(resources, request_timeout=max(deadline.left(), 0.01))
        return min(_read(answer) for answer in answers.values())
    except KafkaException as error:
        raise translate(error, "asking the cluster for its settings") from error


def _read(answer: object) -> int:
    try:
        return int(answer.result()[_LONGEST].value)  # type: ignore[attr-defined]
    except (KafkaException, KeyError, TypeError, ValueError):
        return _BROKER_DEFAULT_MS
