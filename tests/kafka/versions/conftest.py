from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from txnbridge_conformance import brokers

from tests.kafka.conftest import SOON


@pytest.fixture(
    scope="session",
    params=[{"transaction_version": 1}, {"version": "3.9.2"}],
    ids=["4.3.1 with transaction.version 1", "3.9.2"],
)
def other_kafka(request: pytest.FixtureRequest) -> Iterator[brokers.Broker]:
    """Kafka as it was before transactions had an epoch each."""
    try:
        broker = brokers.kafka(**request.param)
    except brokers.ToolMissing as error:
        pytest.skip(f"needs a Kafka broker: {error}")
    with broker:
        yield broker


@pytest.fixture(scope="session")
def txnbridge_url(other_kafka: brokers.Broker) -> str:
    return f"{other_kafka.url}?{SOON}"


@pytest.fixture
def kill_broker(other_kafka: brokers.Broker) -> Callable[[], object]:
    def kill_and_start() -> None:
        other_kafka.kill()
        other_kafka.start()

    return kill_and_start
