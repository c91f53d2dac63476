"""Everything at once, for minutes, on Pulsar. The official client judges what was promised."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartPulsar

from tests import chaos
from tests.chaos import Batching, Placed, World

pytest.importorskip("pulsar", reason="needs the official client: pip install pulsar-client")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).with_name("official.py")
REQUESTS = (
    "PRODUCER",
    "SEND",
    "ACK",
    "LOOKUP",
    "NEW_TXN",
    "ADD_PARTITION_TO_TXN",
    "ADD_SUBSCRIPTION_TO_TXN",
    "END_TXN",
)


def read(broker: brokers.Pulsar, topic: str) -> list[Placed]:
    address = broker.url.removesuffix("/public/default")
    command = [sys.executable, str(PROGRAM), address, "see_committed", f"persistent://public/default/{topic}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [(partition, value.encode()) for partition, value in map(json.loads, done.stdout.splitlines())]


@pytest.fixture
def world(start_pulsar: StartPulsar) -> Iterator[World]:
    with start_pulsar(settings={"keepAliveIntervalSeconds": "5"}) as broker:
        options = {"pulsar": {"admin_url": broker.admin_url}}
        yield World(broker, lambda topic: read(broker, topic), REQUESTS, options)


@pytest.fixture
def chance() -> random.Random:
    return chaos.begin()


def test_copiers_lose_double_and_reorder_nothing(world: World, chance: random.Random) -> None:
    chaos.copiers_lose_double_and_reorder_nothing(world, chance, lambda: Batching(world))


def test_all_who_end_a_token_are_told_the_same_and_it_is_whole(world: World, chance: random.Random) -> None:
    chaos.all_who_end_a_token_are_told_the_same_and_it_is_whole(world, chance)


def test_whatever_the_network_does_what_was_told_is_true(world: World, chance: random.Random) -> None:
    chaos.whatever_the_network_does_what_was_told_is_true(world, chance)
