"""Retries on Pulsar, judged by the official client."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.plugin import NewTopic

from tests.pulsar.client_kit import service
from tests.retry_live import assert_a_missing_dead_letter_topic_is_told_at_the_start, assert_each_has_its_effect_once
from txnbridge import Bridge

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pulsar") is None, reason="needs the official client: pip install pulsar-client"
)
PROGRAM = Path(__file__).with_name("official.py")


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.timeout(300)
def test_each_message_has_its_effect_once_though_processors_are_killed(
    pulsar_broker: brokers.Pulsar, txnbridge_url: str, bridge: Bridge, keep_order: bool
) -> None:
    def read(topic: str) -> list[bytes]:
        command = [sys.executable, str(PROGRAM), service(pulsar_broker), "see_committed", topic]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return [json.loads(line)[1].encode() for line in done.stdout.splitlines()]

    assert_each_has_its_effect_once(txnbridge_url, bridge, read, keep_order)


@pytest.mark.timeout(120)
def test_a_missing_dead_letter_topic_is_told_at_the_start(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    assert_a_missing_dead_letter_topic_is_told_at_the_start(bridge, new_topic(), group)
