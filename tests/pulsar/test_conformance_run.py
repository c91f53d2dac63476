"""Conformance runs, with faults on brokers of their own: the tests' broker has much else to do."""

from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartPulsar

from tests import chaos
from tests.conformance_run import assert_kept


@pytest.mark.timeout(900)
def test_a_run_with_faults_of_clients_finds_nothing(start_pulsar: StartPulsar, tmp_path: Path) -> None:
    with start_pulsar() as broker:
        assert_kept(broker, tmp_path, 30, ("client",), pulsar={"admin_url": broker.admin_url})


@pytest.mark.timeout(900)
def test_a_run_through_the_plain_client_finds_nothing(pulsar_broker: brokers.Broker, tmp_path: Path) -> None:
    settings = {"admin_url": pulsar_broker.admin_url}
    assert_kept(pulsar_broker, tmp_path, 15, (), {"committed": 20, "read": 100}, raw=True, pulsar=settings)


@pytest.mark.full
@pytest.mark.timeout(chaos.SECONDS + 900)
def test_a_run_with_all_faults_finds_nothing(start_pulsar: StartPulsar, tmp_path: Path) -> None:
    with start_pulsar(settings={"keepAliveIntervalSeconds": "5"}) as broker:
        assert_kept(broker, tmp_path, pulsar={"admin_url": broker.admin_url})
