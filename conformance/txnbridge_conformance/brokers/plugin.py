"""Fixtures that start real brokers: `pytest_plugins = ["txnbridge_conformance.brokers.plugin"]` in a `conftest.py`.

A test that uses them is skipped, with a reason, if a tool that the broker needs is not installed. The first start of a
version fetches its files, so a time limit for tests must allow for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import pytest

from txnbridge_conformance import brokers

_Broker = TypeVar("_Broker", bound=brokers.Broker)

# These settings are for tests without load. With an interval for op messages, the thread of a 5.5.0 broker that writes
# them spins once no END_TRANSACTION has come for that interval. With these settings each end becomes an op message at
# once, and an idle broker is idle. They are bad under load: once 20,000 ends wait, the broker takes 120 a second, not
# thousands. No value fits both, because ends share an op message only if they wait for others or for the interval.
IDLE_ROCKETMQ = {"transactionOpMsgMaxSize": "1", "transactionOpBatchInterval": "2147483647"}


class StartKafka(Protocol):
    """The fixture `start_kafka` calls `brokers.kafka`, and kills the broker after the test."""

    def __call__(self, **options: Any) -> brokers.Broker: ...


class StartPulsar(Protocol):
    """The fixture `start_pulsar` calls `brokers.pulsar`, and kills the broker after the test."""

    def __call__(self, **options: Any) -> brokers.Pulsar: ...


class StartRocketMQ(Protocol):
    """The fixture `start_rocketmq` calls `brokers.rocketmq`, and kills the broker after the test."""

    def __call__(self, **options: Any) -> brokers.RocketMQ: ...


def kafka_or_skip(**options: Any) -> brokers.Broker:
    """Call `brokers.kafka` in a fixture. Skip the test, with the reason, if a tool is not installed."""
    return _or_skip("Kafka", brokers.kafka, options)


def pulsar_or_skip(**options: Any) -> brokers.Pulsar:
    """Call `brokers.pulsar` in a fixture. Skip the test, with the reason, if a tool is not installed."""
    return _or_skip("Pulsar", brokers.pulsar, options)


def rocketmq_or_skip(**options: Any) -> brokers.RocketMQ:
    """Call `brokers.rocketmq` in a fixture. Skip the test, with the reason, if a tool is not installed."""
    return _or_skip("RocketMQ", brokers.rocketmq, options)


def _or_skip(name: str, start: Callable[..., _Broker], options: dict[str, Any]) -> _Broker:
    try:
        return start(**options)
    except brokers.ToolMissing as error:
        pytest.skip(f"needs a {name} broker: {error}")


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[brokers.Broker]:
    """Start one node of Kafka for all tests of the run. A test that kills or pauses the node brings it back."""
    with kafka_or_skip() as broker:
        yield broker


@pytest.fixture(scope="session")
def pulsar_broker() -> Iterator[brokers.Pulsar]:
    """Start Pulsar for all tests of the run. A test that kills or pauses the broker brings it back.

    The broker drops clients that have been silent for 10 seconds; Pulsar's default is a minute.
    """
    with pulsar_or_skip(settings={"keepAliveIntervalSeconds": "5"}) as broker:
        yield broker


@pytest.fixture(scope="session")
def rocketmq_broker() -> Iterator[brokers.RocketMQ]:
    """Start one node of RocketMQ for all tests of the run. A test that kills or pauses the node brings it back.

    The node is for tests without load, because the tests share their processors with it.
    """
    with rocketmq_or_skip(settings=IDLE_ROCKETMQ) as broker:
        yield broker


@pytest.fixture
def start_kafka() -> Iterator[StartKafka]:
    """Start Kafka with a test's own options, for that test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(kafka_or_skip(**options))


@pytest.fixture
def start_pulsar() -> Iterator[StartPulsar]:
    """Start Pulsar with a test's own options, for that test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(pulsar_or_skip(**options))


@pytest.fixture
def start_rocketmq() -> Iterator[StartRocketMQ]:
    """Start RocketMQ with a test's own options, for that test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(rocketmq_or_skip(**options))
