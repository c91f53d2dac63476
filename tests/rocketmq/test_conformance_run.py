"""Conformance runs: faults of clients on the tests' broker, all faults on one that the run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from txnbridge_conformance import brokers

from tests.conformance_run import SECONDS, assert_kept


def test_a_run_with_faults_of_clients_finds_nothing(rocketmq_broker: brokers.Broker, tmp_path: Path) -> None:
    assert_kept(rocketmq_broker.url, tmp_path, 15)


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 900)
def test_a_run_with_all_faults_finds_nothing(tmp_path: Path) -> None:
    assert_kept("rocketmq", tmp_path, SECONDS)
