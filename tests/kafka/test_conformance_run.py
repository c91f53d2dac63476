"""Conformance runs: faults of clients on the tests' broker, all faults on brokers of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartKafka

from tests import chaos
from tests.conformance_run import assert_kept

SESSION = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "300"}


def test_a_run_with_faults_of_clients_finds_nothing(kafka_broker: brokers.Broker, tmp_path: Path) -> None:
    assert_kept(kafka_broker, tmp_path, 15, ("client",))


def test_a_run_through_the_plain_client_finds_nothing(kafka_broker: brokers.Broker, tmp_path: Path) -> None:
    assert_kept(kafka_broker, tmp_path, 15, (), {"committed": 20, "read": 100}, raw=True)


@pytest.mark.full
@pytest.mark.timeout(chaos.SECONDS + 900)
@pytest.mark.parametrize(
    ("protocol", "nodes"), [("classic", 1), ("consumer", 1), ("classic", 3)], ids=["classic", "consumer", "three-nodes"]
)
def test_a_run_with_all_faults_finds_nothing(
    start_kafka: StartKafka, protocol: str, nodes: int, tmp_path: Path
) -> None:
    settings = {"group_protocol": "consumer"} if protocol == "consumer" else SESSION
    assert_kept(start_kafka(nodes=nodes), tmp_path, kafka=settings)
