"""The backend that the core loads for `kafka://` URLs: opens a bridge's connection, with its options and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txnbridge.spi import Backend, Broker, Context, Deadline, Limits, Url
from txnbridge_kafka.capabilities import CAPABILITIES, DEFAULT_LONGEST_MS, message_bytes
from txnbridge_kafka.settings import OPTIONS, read


class KafkaBackend(Backend):
    """The backend for Apache Kafka 3.0 and later."""

    name = "kafka"
    schemes = ("kafka",)
    capabilities = CAPABILITIES
    limits = Limits(message_bytes=message_bytes({}), prepared_seconds=DEFAULT_LONGEST_MS / 1000)
    options = OPTIONS
    libraries = ("confluent_kafka",)

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        from txnbridge_kafka.broker import KafkaBroker

        return KafkaBroker(read(url, options, context), context, deadline)
