"""Apache Kafka: confluent-kafka for data, kafka-python for the requests that it lacks."""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_kafka.backend import KafkaBackend

    return [KafkaBackend()]
