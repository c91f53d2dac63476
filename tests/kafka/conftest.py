from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers, faults

HERE = Path(__file__).parent


# The walk of the suite that every run takes; here each takes minutes, because each step starts clients anew.
WALK = "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[commit]"

# Readers are tested with one way to share partitions in every run; processors, and all readers with --full, with each.
OTHER_PROTOCOLS = re.compile(r"\b(eager|consumer)\b")


@pytest.hookimpl(tryfirst=True)  # before those marked `full` are skipped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            other_protocol = item.path.name == "test_reader.py" and OTHER_PROTOCOLS.search(item.name)
            if other_protocol or ("wherever" in item.name and item.name != WALK):
                item.add_marker(pytest.mark.full)


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
