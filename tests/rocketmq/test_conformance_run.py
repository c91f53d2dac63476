"""Conformance runs, with faults on brokers of their own: the tests' broker is slow once it has many halves to end."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartRocketMQ

from tests import chaos
from tests.conformance_run import assert_kept


@pytest.mark.timeout(900)
def test_a_run_with_faults_of_clients_finds_nothing(start_rocketmq: StartRocketMQ, tmp_path: Path) -> None:
    with start_rocketmq() as broker:
        assert_kept(broker, tmp_path, 30, ("client",))


@pytest.mark.skipif(find_spec("rocketmq") is None, reason="RocketMQ's client for Python is not installed")
@pytest.mark.timeout(900)
def test_a_run_through_the_plain_client_finds_nothing(rocketmq_broker: brokers.Broker, tmp_path: Path) -> None:
    assert_kept(rocketmq_broker, tmp_path, 15, (), {"half messages": 20, "read": 20}, raw=True)


@pytest.mark.full
@pytest.mark.timeout(chaos.SECONDS + 900)
def test_a_run_with_all_faults_finds_nothing(start_rocketmq: StartRocketMQ, tmp_path: Path) -> None:
    with start_rocketmq() as broker:
        assert_kept(broker, tmp_path)
