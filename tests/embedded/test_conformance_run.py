"""A conformance run for minutes, with faults of its processes."""

from pathlib import Path

import pytest

from tests import chaos
from tests.conformance_run import assert_kept


@pytest.mark.full
@pytest.mark.timeout(chaos.SECONDS + 900)
def test_a_run_with_faults_of_clients_finds_nothing(tmp_path: Path) -> None:
    assert_kept(f"embedded:{tmp_path / 'broker.db'}", tmp_path, chaos.SECONDS)
