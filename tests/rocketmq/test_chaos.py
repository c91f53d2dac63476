"""Everything at once, for minutes, on a live broker. RocketMQ's own Java client checks the promises."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._rocketmq import fetch_rocketmq
from txnbridge_conformance.brokers.plugin import StartRocketMQ

from tests import chaos
from tests.chaos import Placed, Publishing, World, say
from tests.java_kit import ask_java

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

REQUESTS = (
    "SEND_MESSAGE_V2",
    "END_TRANSACTION",
    "CHECK_TRANSACTION_STATE",
    "PULL_MESSAGE",
    "QUERY_MESSAGE",
    "LOCK_BATCH_MQ",
    "GET_ROUTE_INFO_BY_TOPIC",
)

IMPORTS = """
org.apache.rocketmq.client.consumer.DefaultMQPullConsumer
org.apache.rocketmq.client.consumer.PullResult
org.apache.rocketmq.client.consumer.PullStatus
org.apache.rocketmq.common.message.MessageExt
org.apache.rocketmq.common.message.MessageQueue
"""
# A message: its queue, its unique key and its body.
READING = """
    DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("independent");
    BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
    consumer.setNamesrvAddr(asked.readLine());
    consumer.start();
    for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(asked.readLine())) {
        for (long next = 0, end = consumer.maxOffset(queue); next < end; ) {
            PullResult found = consumer.pull(queue, "*", next, 32);
            next = found.getNextBeginOffset();
            if (found.getPullStatus() == PullStatus.FOUND) {
                for (MessageExt message : found.getMsgFoundList()) {
                    String body = new String(message.getBody());
                    System.out.println(queue.getQueueId() + " " + message.getMsgId() + " " + body);
                }
            }
        }
    }
    System.out.flush();
    System.exit(0);
"""


def read(broker: brokers.RocketMQ, folder: Path, topic: str) -> list[Placed]:
    """Return the first copy of each message: all copies have the same unique key."""
    found: dict[str, Placed] = {}
    copies = 0
    lines = ask_java(folder, IMPORTS, READING, [broker.url.removeprefix("rocketmq://"), topic], fetch_rocketmq)
    for line in lines:
        queue, key, value = line.split(" ")
        placed = int(queue), value.encode()
        assert found.setdefault(key, placed) == placed
        copies += 1
    if copies > len(found):
        say(f"{copies - len(found)} second copies in {topic}, which our own readers have to drop")
    return [*found.values()]


@pytest.fixture
def world(start_rocketmq: StartRocketMQ, tmp_path: Path) -> Iterator[World]:
    with start_rocketmq() as broker:
        yield World(broker, lambda topic: read(broker, tmp_path, topic), REQUESTS, {"application": "chaos"})


@pytest.fixture
def chance() -> random.Random:
    return chaos.begin()


def test_copiers_lose_double_and_reorder_nothing(world: World, chance: random.Random) -> None:
    chaos.copiers_lose_double_and_reorder_nothing(world, chance, lambda: Publishing(world))


def test_all_who_end_a_token_are_told_the_same_and_it_is_whole(world: World, chance: random.Random) -> None:
    chaos.all_who_end_a_token_are_told_the_same_and_it_is_whole(world, chance)


def test_whatever_the_network_does_what_was_told_is_true(world: World, chance: random.Random) -> None:
    chaos.whatever_the_network_does_what_was_told_is_true(world, chance)
