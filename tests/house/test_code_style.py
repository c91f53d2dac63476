"""Ruff, and with --full mypy, as tests. `.ci/run` calls mypy itself."""

import subprocess
import sys

import pytest

from tests.house.rooms import ROOT


@pytest.mark.timeout(300)  # mypy without a cache on a busy machine reads all of SQLAlchemy first
@pytest.mark.parametrize(
    "command",
    ["ruff check --output-format concise", "ruff format --check", pytest.param("mypy", marks=pytest.mark.full)],
    ids=lambda command: command.split(" --")[0],
)
def test_the_code_passes(command):
    run = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if run.returncode:
        pytest.fail(f"{command}:\n{run.stdout}", pytrace=False)
