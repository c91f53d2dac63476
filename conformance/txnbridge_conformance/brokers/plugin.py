"""Fixtures that start real brokers: `pytest_plugins = ["txnbridge_conformance.brokers.plugin"]` in a `conftest.py`.

Tests that use them are skipped, with the reason, where something that a broker needs is not installed. The first start
of a version fetches it, which a time limit for tests has to allow for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from txnbridge_conformance import brokers


class StartKafka(Protocol):
    """The fixture `start_kafka`: as `brokers.kafka`; what it starts is killed after the test."""

    def __call__(self, **options: Any) -> brokers.Broker: ...


def kafka_or_skip(**options: Any) -> brokers.Broker:
    try:
        return brokers.kafka(**options)
    except brokers.ToolMissing as error:
        pytest.skip(f"needs a Kafka broker: {error}")


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[brokers.Broker]:
    """One node of Kafka for all tests of the run. Whoever kills or pauses it brings it back."""
    with kafka_or_skip() as broker:
        yield broker


@pytest.fixture
def start_kafka() -> Iterator[StartKafka]:
    """Kafka as a test wants it, for that test alone."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> brokers.Broker:
            return stack.enter_context(kafka_or_skip(**options))

        yield start
