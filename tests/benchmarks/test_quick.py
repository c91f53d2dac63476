"""Each benchmark still runs. Its figures are not judged here: a machine that runs tests is no quiet one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import NAMES
from tests.house.rooms import ROOT

# The figures that have a target: a benchmark that no longer measures its own is rotten, too.
TARGETS = {
    "send": 2,
    "imports": 1,
    "write": 6,
    "read": 4,
    "commit": 0,
    "writers": 6,
    "wakeup": 4,
    "memory": 4,
    "large_file": 5,
    "kafka_write": 8,
    "kafka_read": 2,
    "kafka_token": 1,
    "kafka_process": 1,
}


def test_every_benchmark_is_in_the_list():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert scripts == set(NAMES) == set(TARGETS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.live) if "kafka" in name else name for name in NAMES],
)
def test_a_benchmark_runs_and_leaves_nothing(name, tmp_path, request):
    env = dict(os.environ)
    if "kafka" in name:
        env["TXNBRIDGE_URL"] = request.getfixturevalue("kafka_broker").url
    command = [sys.executable, "-W", "error", "-m", f"benchmarks.{name}", "--quick", "--folder", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    rows = [line.split("|") for line in run.stdout.splitlines() if line.startswith("| ") and "median" not in line]
    assert sum(bool(row[4].strip()) for row in rows) == TARGETS[name]
    assert list(tmp_path.iterdir()) == []
