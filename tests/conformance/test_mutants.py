"""A conformance run finds each mutant of a backend under a right name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conformance.mutants import VARIABLE
from tests.conformance.mutants.kafka import KAFKA
from tests.conformance.mutants.rocketmq import ROCKETMQ

ROOT = Path(__file__).parents[2]

# A run has a dozen processes, so that two at once would only slow each other down.
pytestmark = [pytest.mark.xdist_group("conformance-runs")]


def findings(url: str, folder: Path, *more: str, **environment: str) -> set[str]:
    """Run the hunt, and return the names of its findings."""
    command = [sys.executable, "-m", "txnbridge.cli", "conformance", "run", url, "--out", str(folder), *more]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=given)
    assert done.returncode in (0, 1, 2), done.stderr + done.stdout
    report = json.loads((folder / "report.json").read_text())
    return {finding["name"] for finding in report["findings"]}


LIVE = {"kafka": KAFKA, "rocketmq": ROCKETMQ}


@pytest.mark.full
@pytest.mark.live
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, mutants in LIVE.items() for name in mutants.by_name]
)
def test_a_mutant_is_found_under_a_right_name(backend: str, name: str, tmp_path: Path) -> None:
    mutant = LIVE[backend].by_name[name]
    plugin = ("--plugin", f"tests.conformance.mutants.{backend}")
    found: Mapping[int, set[str]] = {}
    for seed in mutant.seeds:
        more = ("--time", str(mutant.seconds), "--seed", str(seed), *plugin)
        names = findings(backend, tmp_path / str(seed), *more, **{VARIABLE: name})
        if names & mutant.finds:
            return
        found = {**found, seed: names}
    pytest.fail(f"no run found one of {sorted(mutant.finds)}: {found}")
