from collections.abc import Iterator

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import kafka_or_skip


@pytest.fixture(
    scope="session",
    params=[{"transaction_version": 1}, {"version": "4.3.1"}, {"version": "3.9.2"}],
    ids=["4.4.0 with transaction.version 1", "4.3.1", "3.9.2"],
)
def kafka_under_test(request: pytest.FixtureRequest) -> Iterator[brokers.Broker]:
    """Kafka as it was before: since 4.0 each transaction has an epoch of its own, unless that is switched off."""
    with kafka_or_skip(**request.param) as broker:
        yield broker
