"""Fixtures that start real brokers: `pytest_plugins = ["txnbridge_conformance.brokers.plugin"]` in a `conftest.py`.

Tests that use them are skipped, with the reason, where something that a broker needs is not installed. The first start
of a version fetches it, which a time limit for tests has to allow for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import pytest

from txnbridge_conformance import brokers

_Broker = TypeVar("_Broker", bound=brokers.Broker)

# A 5.5.0 broker that notes ends at intervals keeps a processor busy whenever none has come for so long: the thread that
# notes them no longer waits. With these it notes each end by itself and at once, and an idle broker is idle. They are
# nothing for load: once 20,000 ends wait to be noted a broker takes 120 a second instead of thousands. No value is good
# for both: a note has room for several ends only where the first ones wait for others, or for the interval.
IDLE_ROCKETMQ = {"transactionOpMsgMaxSize": "1", "transactionOpBatchInterval": "2147483647"}


class StartKafka(Protocol):
    """The fixture `start_kafka`: as `brokers.kafka`; what it starts is killed after the test."""

    def __call__(self, **options: Any) -> brokers.Broker: ...


class StartPulsar(Protocol):
    """The fixture `start_pulsar`: as `brokers.pulsar`; what it starts is killed after the test."""

    def __call__(self, **options: Any) -> brokers.Pulsar: ...


class StartRocketMQ(Protocol):
    """The fixture `start_rocketmq`: as `brokers.rocketmq`; what it starts is killed after the test."""

    def __call__(self, **options: Any) -> brokers.RocketMQ: ...


def kafka_or_skip(**options: Any) -> brokers.Broker:
    """As `brokers.kafka`, for fixtures: where something that it needs is not installed, the test is skipped with the
    reason."""
    return _or_skip("Kafka", brokers.kafka, options)


def pulsar_or_skip(**options: Any) -> brokers.Pulsar:
    """As `brokers.pulsar`, for fixtures; for the rest as `kafka_or_skip`."""
    return _or_skip("Pulsar", brokers.pulsar, options)


def rocketmq_or_skip(**options: Any) -> brokers.RocketMQ:
    """As `brokers.rocketmq`, for fixtures; for the rest as `kafka_or_skip`."""
    return _or_skip("RocketMQ", brokers.rocketmq, options)


def _or_skip(name: str, start: Callable[..., _Broker], options: dict[str, Any]) -> _Broker:
    try:
        return start(**options)
    except brokers.ToolMissing as error:
        pytest.skip(f"needs a {name} broker: {error}")


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[brokers.Broker]:
    """One node of Kafka for all tests of the run. A test that kills or pauses it brings it back."""
    with kafka_or_skip() as broker:
        yield broker


@pytest.fixture(scope="session")
def pulsar_broker() -> Iterator[brokers.Pulsar]:
    """Pulsar for all tests of the run. A test that kills or pauses it brings it back.

    It takes clients for gone that have been silent for 10 seconds; Pulsar as it comes waits for a minute.
    """
    with pulsar_or_skip(settings={"keepAliveIntervalSeconds": "5"}) as broker:
        yield broker


@pytest.fixture(scope="session")
def rocketmq_broker() -> Iterator[brokers.RocketMQ]:
    """One node of RocketMQ for all tests of the run. A test that kills or pauses it brings it back.

    It is for tests without load, which share their processors with it.
    """
    with rocketmq_or_skip(settings=IDLE_ROCKETMQ) as broker:
        yield broker


@pytest.fixture
def start_kafka() -> Iterator[StartKafka]:
    """Kafka as a test wants it, for that test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(kafka_or_skip(**options))


@pytest.fixture
def start_pulsar() -> Iterator[StartPulsar]:
    """Pulsar as a test wants it, for that test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(pulsar_or_skip(**options))


@pytest.fixture
def start_rocketmq() -> Iterator[StartRocketMQ]:
    """RocketMQ as a test wants it, for that test alone."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(rocketmq_or_skip(**options))
