"""The demo's story on a real Kafka."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from txnbridge import Bridge


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "txnbridge.cli", "demo", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_claim_holds_on_a_broker_of_yours_and_its_topics_are_gone_afterwards(
    txnbridge_url: str, bridge: Bridge
) -> None:
    before = [topic.name for topic in bridge.admin.topics()]
    run = play("--url", txnbridge_url)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["held"]) == 12
    assert [topic.name for topic in bridge.admin.topics()] == before


@pytest.mark.full
def test_every_claim_holds_on_a_broker_that_is_started_for_it() -> None:
    run = play("kafka")
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["held"]) == 12


def test_a_broker_that_cannot_be_started_is_named_with_those_that_can() -> None:
    run = play("nosuch")
    assert run.returncode == 2
    assert "known: kafka" in run.stderr
