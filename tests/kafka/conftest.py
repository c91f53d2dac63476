from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from txnbridge_conformance import brokers, faults

pytestmark = pytest.mark.timeout(600)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first start of a version fetches it, and a broker that is killed takes seconds to come back."""
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


# Tests wait for dead members of groups to be noticed and for readers to learn of new partitions.
SOON = "session.timeout.ms=2000&heartbeat.interval.ms=300&topic.metadata.refresh.interval.ms=1000"


@pytest.fixture(scope="session")
def txnbridge_url(kafka_broker: brokers.Broker) -> str:
    return f"{kafka_broker.url}?{SOON}"


@pytest.fixture
def side_by_side() -> int:
    return 4  # each has a client with threads of its own, and the broker is small


@pytest.fixture
def kill_broker(kafka_broker: brokers.Broker) -> Callable[[], object]:
    def kill_and_start() -> None:
        kafka_broker.kill()
        kafka_broker.start()

    return kill_and_start


@pytest.fixture
def proxy(kafka_broker: brokers.Broker) -> Iterator[faults.Proxy]:
    with faults.proxy(kafka_broker) as proxy:
        yield proxy
