"""Retries on Kafka, judged by the librdkafka client itself."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer
from txnbridge_conformance import brokers

from tests.retry_live import END, assert_each_has_its_effect_once
from txnbridge import Bridge


@pytest.mark.timeout(300)
def test_each_message_has_its_effect_once_though_processors_are_killed(
    kafka_broker: brokers.Broker, txnbridge_url: str, bridge: Bridge
) -> None:
    def read(topic: str) -> list[bytes]:
        consumer = Consumer(
            {
                "bootstrap.servers": kafka_broker.url.removeprefix("kafka://"),
                "group.id": f"{topic}-judge",
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe([topic])
        found: list[bytes] = []
        while END not in found:
            message = consumer.poll(60)
            assert message is not None, f"no message comes after {len(found)}"
            if message.error() is None:
                found.append(message.value() or b"")
        consumer.close()
        return found

    assert_each_has_its_effect_once(txnbridge_url, bridge, read)
