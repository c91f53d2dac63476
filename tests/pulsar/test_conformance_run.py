"""Conformance runs: faults of clients on the tests' broker, all faults on one that the run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from txnbridge_conformance import brokers

from tests.conformance_run import SECONDS, assert_kept
from tests.pulsar.kit import url_of


def test_a_run_with_faults_of_clients_finds_nothing(pulsar_broker: brokers.Pulsar, tmp_path: Path) -> None:
    assert_kept(url_of(pulsar_broker), tmp_path, 15)


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 900)
def test_a_run_with_all_faults_finds_nothing(tmp_path: Path) -> None:
    assert_kept("pulsar", tmp_path, SECONDS)
