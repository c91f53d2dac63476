"""The gate, `--live` and `--full`: what starts brokers or takes minutes runs only when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.rooms import ROOT

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.live
def test_on_a_broker():
    pass

@pytest.mark.full
def test_long():
    pass
"""


@pytest.mark.parametrize(("arguments", "passed"), [([], 1), (["--live"], 2), (["--full"], 3)])
def test_marked_tests_run_when_asked_for(pytester, arguments, passed):
    pytester.makeini("[pytest]\nmarkers =\n    live\n    full\n    xdist_group")
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    pytester.runpytest(*arguments).assert_outcomes(passed=passed, deselected=3 - passed)


def test_of_the_folders_with_brokers_the_gate_takes_the_smoke_tests_and_those_last():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/house", "tests/kafka"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = list(dict.fromkeys(line.split("::")[0] for line in ran.stdout.splitlines() if "::" in line))
    assert "tests/house/test_tiers.py" in files
    assert [file for file in files if "house" not in file] == files[-1:] == ["tests/kafka/test_smoke.py"]
