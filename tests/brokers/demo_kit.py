"""Runs `txnbridge demo` as a command, on any broker."""

import json
import subprocess
import sys

from txnbridge import Bridge

CLAIMS = 12


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "txnbridge.cli", "demo", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check_every_claim(*arguments: str) -> None:
    run = play(*arguments)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["held"]) == CLAIMS


def test_every_claim_holds_on_a_broker_of_yours_and_its_topics_are_gone_afterwards(txnbridge_url: str, bridge: Bridge):
    """A room of tests imports this test for its broker."""
    before = [topic.name for topic in bridge.admin.topics()]
    check_every_claim("--url", txnbridge_url)
    assert [topic.name for topic in bridge.admin.topics()] == before
