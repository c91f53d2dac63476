"""Headers as the client reads them. Its producer sends text only, other clients send any bytes."""

import time

import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from txnbridge_kafka.client.librdkafka import headers_of

from tests.kafka.mock_kit import MockCluster, produce

pytestmark = pytest.mark.offline


def test_bytes_of_a_header_name_that_are_not_utf_8_are_replaced() -> None:
    cluster = MockCluster("topic")
    servers = cluster.url.removeprefix("kafka://")
    produce(servers, "topic", (b"good", b"1"))
    produce(servers, "topic", (b"\xfffirst", b"2"), (b"good", b"3"), (b"\xfflast", b"4"))
    produce(servers, "topic")
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "g", "log_level": 0})
    consumer.assign([TopicPartition("topic", 0, 0)])
    messages: list[Message] = []
    until = time.monotonic() + 60
    while len(messages) < 3 and time.monotonic() < until:
        messages += consumer.consume(3, 0.1)
    consumer.close()
    second = [("\ufffdfirst", b"2"), ("good", b"3"), ("\ufffd", b"4")]
    assert headers_of(messages) == ([[("good", b"1")], second, None], [1])
    cluster.close()
