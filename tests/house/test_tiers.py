"""The gate, `--live` and `--full`: what starts brokers or takes minutes runs only when asked for."""

import os
import re
import subprocess
import sys

import pytest

from tests.house.rooms import ROOT

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.offline
def test_here():
    pass

@pytest.mark.live
def test_on_a_broker():
    pass

@pytest.mark.full
def test_long():
    pass
"""


@pytest.mark.parametrize(("arguments", "passed"), [([], 2), (["--live"], 3), (["--full"], 4)])
def test_marked_tests_run_when_asked_for(pytester, arguments, passed):
    pytester.makeini("[pytest]\nmarkers =\n    live\n    full\n    offline\n    xdist_group")
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    pytester.runpytest(*arguments).assert_outcomes(passed=passed, deselected=4 - passed)


def test_a_noted_run_replaces_the_last_one_with_the_same_arguments(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    live\n    full\n    offline\n    xdist_group")
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(TESTS + "\ndef test_that_fails():\n    assert False")
    page = pytester.mkdir("tests") / "last-runs.md"
    others = "| arguments |\n| `pytest --live -k 'quick or other'` | 1 |\n"
    page.write_text(others)
    for _ in range(2):
        pytester.runpytest("--live", "--note", "-k", "quick or fails", "--basetemp=temporary")
    row = page.read_text().removeprefix(others)
    command = "pytest --live -k 'quick or fails' --basetemp=temporary"
    assert re.fullmatch(rf"\| `{command}` \| 1 \| 1 \| 0 \| \d+ \| \d{{4}}-\d\d-\d\d \|\n", row)


def test_the_gate_runs_the_smoke_tests_first_and_the_offline_tests_of_rooms_with_brokers():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/house", "tests/kafka"]
    with_plugins = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    ran = subprocess.run(command, cwd=ROOT, env=with_plugins, capture_output=True, text=True, check=True)
    files = list(dict.fromkeys(line.split("::")[0] for line in ran.stdout.splitlines() if "::" in line))
    offline = [file for file in files if "house" not in file and "pytest.mark.offline" in (ROOT / file).read_text()]
    assert "tests/house/test_tiers.py" in files and "tests/kafka/test_settings.py" in offline
    assert [file for file in files if "house" not in file] == ["tests/kafka/test_smoke.py", *offline]
    assert files[0] == "tests/kafka/test_smoke.py"
