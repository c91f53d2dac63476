"""Everything at once, for minutes, on Kafka. librdkafka's plain client judges what was promised."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartKafka
from txnbridge_kafka.client.offsets import KafkaOffsets
from txnbridge_kafka.outcome import hanging_transactions
from txnbridge_kafka.topics import OFFSETS_TOPIC, offsets_partition

from tests import chaos
from tests.chaos import PARTITIONS, Placed, World
from tests.kafka.kit import cluster_of
from txnbridge import Bridge
from txnbridge.spi import Deadline

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SESSION = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "300"}
REQUESTS = (
    "InitProducerId",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "TxnOffsetCommit",
    "Produce",
    "EndTxn",
    "FindCoordinator",
)


def servers(broker: brokers.Broker) -> str:
    return broker.url.removeprefix("kafka://")


def read(broker: brokers.Broker, topic: str) -> list[Placed]:
    settings = {"bootstrap.servers": servers(broker), "group.id": "independent", "isolation.level": "read_committed"}
    consumer = Consumer(settings | {"enable.auto.commit": False, "enable.partition.eof": True, "log_level": 0})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: list[Placed] = []
    ends: set[int | None] = set()
    try:
        while len(ends) < PARTITIONS:
            for message in consumer.consume(10_000, 1):
                partition, value, error = message.partition(), message.value(), message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    ends.add(partition)
                elif error is None and partition is not None and value:
                    found.append((partition, value))
    finally:
        consumer.close()
    return found


class Feeder:
    """Numbers into each partition of the source, from a plain client that repeats nothing."""

    def __init__(self, broker: brokers.Broker) -> None:
        self._failed: list[object] = []
        self._producer = Producer(
            {
                "bootstrap.servers": servers(broker),
                "enable.idempotence": True,
                "log_level": 0,
                "on_delivery": lambda error, _: self._failed.append(error) if error else None,
            }
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def _feed(self) -> None:
        number = 0
        while not self._ended.wait(0.05):
            for _ in range(5):
                for partition in range(PARTITIONS):
                    self._producer.produce("source", b"%d" % number, partition=partition)
                number += 1
            self._producer.poll(0)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self._producer.flush(120) == 0 and not self._failed, self._failed


def world_of(broker: brokers.Broker) -> World:
    return World(broker, lambda topic: read(broker, topic), REQUESTS)


@pytest.fixture
def world(start_kafka: StartKafka) -> Iterator[World]:
    with start_kafka() as broker:
        yield world_of(broker)


@pytest.fixture
def chance() -> random.Random:
    return chaos.begin()


@pytest.mark.parametrize(
    ("protocol", "nodes"), [("classic", 1), ("consumer", 1), ("classic", 3)], ids=["classic", "consumer", "three-nodes"]
)
def test_copiers_lose_double_and_reorder_nothing(
    start_kafka: StartKafka, chance: random.Random, protocol: str, nodes: int
) -> None:
    broker = start_kafka(nodes=nodes)
    options = {"group_protocol": "consumer"} if protocol == "consumer" else SESSION
    chaos.copiers_lose_double_and_reorder_nothing(
        world_of(broker), chance, lambda: Feeder(broker), {"kafka": options}, who_stands_where
    )


def who_stands_where(bridge: Bridge) -> str:
    """What to know if something did not go on: who holds a partition open, and how far everybody is."""
    group = "copiers"
    cluster, deadline = cluster_of(bridge), Deadline(60)
    offsets = KafkaOffsets(cluster.requests)
    partitions = [(topic, number) for topic in ("source", "target") for number in range(PARTITIONS)]
    own = offsets_partition(group, cluster.topics.partitions(OFFSETS_TOPIC, deadline))
    held = cluster.requests.producers([*partitions, own], deadline)
    ids = {each.pid: each.id for each in cluster.requests.transactions(deadline)}
    told = cluster.requests.describe(list(ids.values()), deadline)
    found = hanging_transactions.survey(cluster, deadline)
    return "\n".join(
        [
            *(
                f"open in {at}: {one}, {ids.get(one.pid)}"
                for at, all in held.items()
                for one in all
                if one.start_offset is not None
            ),
            *(f"{each}" for each in told.values() if not each.state.startswith("Complete")),
            *(f"forgotten: {each}" for each in found.hanging),
            f"no coordinator knows: {found.unknown}",
            f"ends: {offsets.ends(partitions, deadline)}",
            f"group, decided: {offsets.committed(group, partitions[:PARTITIONS], deadline, decided=True)}",
            f"group: {offsets.committed(group, partitions[:PARTITIONS], deadline)}",
        ]
    )


def test_all_who_end_a_token_are_told_the_same_and_it_is_whole(world: World, chance: random.Random) -> None:
    chaos.all_who_end_a_token_are_told_the_same_and_it_is_whole(world, chance)


def test_whatever_the_network_does_what_was_told_is_true(world: World, chance: random.Random) -> None:
    chaos.whatever_the_network_does_what_was_told_is_true(world, chance)
