"""Retries on Kafka, judged by the librdkafka client itself."""

import time

import pytest
from confluent_kafka import Consumer
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import eventually, send
from txnbridge_conformance.plugin import NewTopic

import txnbridge
from tests import retry_live
from tests.failing import raising
from tests.kafka.kit import bootstrap_of
from txnbridge import Abort, Bridge, Message, Transaction
from txnbridge.testing import recorded


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.timeout(300)
def test_each_message_has_its_effect_once_though_processors_are_killed(kafka_broker, txnbridge_url, bridge, keep_order):
    def read(topic: str) -> list[bytes]:
        settings = {"bootstrap.servers": bootstrap_of(kafka_broker), "group.id": f"{topic}-judge"}
        consumer = Consumer({**settings, "auto.offset.reset": "earliest", "isolation.level": "read_committed"})
        consumer.subscribe([topic])
        found: list[bytes] = []
        while retry_live.END not in found:
            message = consumer.poll(60)
            assert message is not None, f"no message comes after {len(found)}"
            if message.error() is None:
                found.append(message.value() or b"")
        consumer.close()
        return found

    retry_live.assert_each_has_its_effect_once(txnbridge_url, bridge, read, keep_order)


@pytest.mark.timeout(120)
def test_a_wait_that_is_longer_than_a_member_may_take_between_polls_costs_no_partition(
    kafka_broker: brokers.Broker, bridge: Bridge, new_topic: NewTopic, group: str
) -> None:
    source, target = new_topic(), new_topic()
    bridge.ensure_topics(f"{group}-retry-9s")
    send(bridge, source, b"1")
    tried: list[Message] = []

    def fail_once(message: Message, txn: Transaction) -> None:
        tried.append(message)
        if len(tried) == 1:
            raise ValueError
        txn.send(target, message.value)

    url = f"{kafka_broker.url}?session.timeout.ms=6000&heartbeat.interval.ms=300&max.poll.interval.ms=6000"
    with recorded() as events, txnbridge.connect(url) as own:
        with own.processor(source, group=group, each=fail_once, retry=[9]):
            eventually(lambda: bridge.read(target, 10), "it is not tried again")
            moved = [event.name for event in events if event.name in ("reader.revoke", "reader.lost")]
    assert moved == []
    assert tried[0][:7] == tried[1][:7]


@pytest.mark.timeout(120)
def test_while_a_message_fails_in_place_the_member_stays_in_the_group_of_its_retry_topics(
    kafka_broker: brokers.Broker, bridge: Bridge, new_topic: NewTopic, group: str
) -> None:
    source = new_topic()
    bridge.ensure_topics(f"{group}-retry-60s")
    send(bridge, source, b"1")
    began = time.monotonic()

    url = f"{kafka_broker.url}?session.timeout.ms=6000&heartbeat.interval.ms=300&max.poll.interval.ms=6000"
    with recorded() as events, txnbridge.connect(url) as own:
        with own.processor(source, group=group, each=raising(Abort), retry=[60], backoff=(0.1, 1)):
            eventually(lambda: time.monotonic() > began + 20, "this is three times as long as a member may take")
            moved = [event.name for event in events if event.name in ("reader.revoke", "reader.lost")]
    assert moved == []


@pytest.mark.timeout(120)
def test_a_missing_dead_letter_topic_is_told_at_the_start(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    retry_live.assert_a_missing_dead_letter_topic_is_told_at_the_start(bridge, new_topic(), group)
