"""Conformance runs: faults of clients on the tests' broker, all faults on brokers of their own."""

import random
from contextlib import closing
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartKafka
from txnbridge_conformance.history import Recorder
from txnbridge_conformance.run.client import Client
from txnbridge_conformance.run.plan import Plan

from tests import chaos
from tests.conformance_run import assert_kept
from tests.kafka.mock_kit import MockCluster

SESSION = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "300"}


@pytest.mark.timeout(900)
def test_a_run_with_faults_of_clients_finds_nothing(kafka_broker: brokers.Broker, tmp_path: Path) -> None:
    assert_kept(kafka_broker, tmp_path, 30, ("client",))


@pytest.mark.timeout(900)
def test_a_run_through_the_plain_client_finds_nothing(kafka_broker: brokers.Broker, tmp_path: Path) -> None:
    assert_kept(kafka_broker, tmp_path, 15, (), {"committed": 20, "read": 100}, raw=True)


@pytest.mark.offline
def test_a_transaction_of_the_plain_client_has_no_token_to_publish(tmp_path: Path) -> None:
    with closing(MockCluster("orders")) as cluster:
        plan = Plan(cluster.url, "r1", 1, 60.0, str(tmp_path), raw=True, timeout=60.0)
        client = Client(plan, "write0-1", Recorder(tmp_path / "write0-1.jsonl", "write0-1", "c"), random.Random(1))
        with closing(client.recorder), client.bridge() as bridge:
            committed = client.transact(bridge, {("orders", 0): client.values(1)})
            client.publish_token(committed)
    assert committed is not None and not plan.tokens.exists()


@pytest.mark.full
@pytest.mark.timeout(chaos.SECONDS + 900)
@pytest.mark.parametrize(
    ("protocol", "nodes"), [("classic", 1), ("consumer", 1), ("classic", 3)], ids=["classic", "consumer", "three-nodes"]
)
def test_a_run_with_all_faults_finds_nothing(start_kafka: StartKafka, protocol: str, nodes: int, tmp_path: Path):
    settings = {"group_protocol": "consumer"} if protocol == "consumer" else SESSION
    assert_kept(start_kafka(nodes=nodes), tmp_path, kafka=settings)
