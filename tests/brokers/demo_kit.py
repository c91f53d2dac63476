"""Runs `txnbridge demo` as a command, on any broker."""

from __future__ import annotations

import json
import subprocess
import sys

CLAIMS = 18


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "txnbridge.cli", "demo", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check_every_claim(*arguments: str) -> None:
    run = play(*arguments)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["held"]) == CLAIMS
