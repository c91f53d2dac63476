"""Fixtures that start real brokers: `pytest_plugins = ["txnbridge_conformance.brokers.plugin"]` in a `conftest.py`.

A test that uses them is skipped, with a reason, if a tool that the broker needs is not installed. The first start of a
version fetches its files, so a time limit for tests must allow for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from txnbridge_conformance import brokers

_Broker = TypeVar("_Broker", bound=brokers.Broker)

# RocketMQ's settings for tests without load. With a short interval for op messages, the broker's thread that writes
# them (5.5.0) uses a whole CPU when no END_TRANSACTION has come for the interval. With these settings each end is
# written as an op message at once, and an idle broker uses no CPU. They are bad under load: once 20,000 ends wait, the
# broker handles 120 a second instead of thousands. No value fits both cases. A flush of the timer (by default one a
# second) takes a quarter of a second of CPU.
IDLE_ROCKETMQ = {
    "transactionOpMsgMaxSize": "1",
    "transactionOpBatchInterval": "2147483647",
    "timerFlushIntervalMs": "60000",
}


# The fixtures `start_kafka`, `start_pulsar` and `start_rocketmq`, which take the options of `brokers.kafka` and so on.
StartKafka = Callable[..., brokers.Broker]
StartPulsar = Callable[..., brokers.Pulsar]
StartRocketMQ = Callable[..., brokers.RocketMQ]


def _or_skip(name: str, start: Callable[..., _Broker]) -> Callable[..., _Broker]:
    """Return `start` for a fixture: the test is skipped, with the reason, if a tool is not installed."""

    def start_or_skip(**options: Any) -> _Broker:
        try:
            return start(**options)
        except brokers.ToolMissing as error:
            pytest.skip(f"needs a {name} broker: {error}")

    return start_or_skip


kafka_or_skip = _or_skip("Kafka", brokers.kafka)
pulsar_or_skip = _or_skip("Pulsar", brokers.pulsar)
rocketmq_or_skip = _or_skip("RocketMQ", brokers.rocketmq)


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[brokers.Broker]:
    """Start one node of Kafka for all tests of the session. A test that kills or pauses the node restores it."""
    with kafka_or_skip() as broker:
        yield broker


@pytest.fixture(scope="session")
def pulsar_broker() -> Iterator[brokers.Pulsar]:
    """Start Pulsar for all tests of the session. A test that kills or pauses the broker restores it.

    The broker drops clients that have been silent for 10 seconds; Pulsar's default is a minute.
    """
    with pulsar_or_skip(settings={"keepAliveIntervalSeconds": "5"}) as broker:
        yield broker


@pytest.fixture(scope="session")
def rocketmq_broker() -> Iterator[brokers.RocketMQ]:
    """Start one node of RocketMQ for all tests of the session. A test that kills or pauses the node restores it.

    The node has settings for tests without load, with which it uses no CPU when idle.
    """
    with rocketmq_or_skip(settings=IDLE_ROCKETMQ) as broker:
        yield broker


def _starter(start: Callable[..., brokers.Broker]) -> Any:
    @pytest.fixture
    def fixture() -> Iterator[Callable[..., brokers.Broker]]:
        """Return a function that starts a broker with the test's own options; the broker ends with the test."""
        with contextlib.ExitStack() as stack:
            yield lambda **options: stack.enter_context(start(**options))

    return fixture


start_kafka = _starter(kafka_or_skip)
start_pulsar = _starter(pulsar_or_skip)
start_rocketmq = _starter(rocketmq_or_skip)
