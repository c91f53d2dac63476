"""Processors whose partitions come and go: every message is passed on once, whatever protocol the group has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.looking import eventually, mark, seen, send, take, up_to, values
from txnbridge_conformance.plugin import NewTopic

import txnbridge
from txnbridge import Bridge, Processor

MESSAGES = 600
PARTITIONS = 4
PROTOCOLS = {
    "cooperative": {"assignment": "cooperative-sticky"},
    "eager": {"assignment": "range"},
    "by the broker": {"group_protocol": "consumer"},
}


@pytest.mark.parametrize("how", PROTOCOLS)
def test_every_message_is_passed_on_once_while_members_come_and_go(
    kafka_broker: brokers.Broker, bridge: Bridge, new_topic: NewTopic, group: str, how: str
) -> None:
    source, target = new_topic(PARTITIONS), new_topic()

    @contextmanager
    def member() -> Iterator[Processor]:
        with txnbridge.connect(kafka_broker.url, writers=1, kafka=PROTOCOLS[how]) as own:
            with own.processor(
                source, group=group, each=lambda m, txn: txn.send(target, m.value), max_messages=10, max_wait=0.05
            ) as processor:
                yield processor

    with member():
        for number in range(3):
            with bridge.transaction() as txn:
                for each in range(number * MESSAGES // 3, (number + 1) * MESSAGES // 3):
                    txn.send(source, b"%d" % each, partition=each % PARTITIONS)
            with member():
                time.sleep(1)  # long enough to join, and to have something in hand when it leaves
        expected = {b"%d" % number for number in range(MESSAGES)}
        eventually(lambda: {m.value for m in bridge.read(target, 10 * MESSAGES)} == expected, "all are passed on")
    assert sorted(m.value for m in seen(bridge, target)) == sorted(expected)


def test_what_stood_behind_a_message_given_back_comes_again_and_is_acknowledged_in_order(
    bridge: Bridge, topic: str, group: str
) -> None:
    send(bridge, topic, b"1", b"2", b"3")
    with bridge.consumer(topic, group) as consumer:
        first = take(consumer, 3)
        consumer.nack(first[1])
        again = take(consumer, 2)
        assert values(again) == [b"2", b"3"]
        with bridge.transaction() as txn:
            txn.ack([first[0], *again])
    markers = mark(bridge, topic)
    with bridge.consumer(topic, group) as consumer:
        assert up_to(consumer, markers) == []
