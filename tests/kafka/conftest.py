import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers.plugin import kafka_or_skip
from txnbridge_kafka import backend
from txnbridge_kafka.settings import Timing, read

from tests.kafka.kit import plain_admin

HERE = Path(__file__).parent


# The one walk of the suite that needs no --full; here each takes minutes, because each step starts clients anew.
WALK = "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[commit]"

# Readers are tested with one way to share partitions, processors, and all readers with --full, with each.
OTHER_PROTOCOLS = re.compile(r"\b(eager|consumer)\b")


@pytest.hookimpl(tryfirst=True)  # before those marked `full` are skipped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            other_protocol = item.path.name == "test_reader.py" and OTHER_PROTOCOLS.search(item.name)
            if other_protocol or ("wherever" in item.name and item.name != WALK):
                item.add_marker(pytest.mark.full)


# Tests wait for dead members of groups to be noticed and for readers to learn of new partitions.
SOON = (
    "half_check_seconds=0.5&session.timeout.ms=6000&heartbeat.interval.ms=300&topic.metadata.refresh.interval.ms=1000"
)


@pytest.fixture(scope="module", autouse=True)
def topics_go_with_their_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """A broker of thousands of topics takes ten times as long to come back, and on a busy machine is away now and then
    until it has worked them all through.
    """
    of_module = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path
    ]
    if not any("kafka_broker" in item.fixturenames for item in of_module):
        yield
        return
    broker: brokers.Broker = request.getfixturevalue("kafka_broker")
    yield
    admin = plain_admin(broker)
    topics = [topic for topic in admin.list_topics(timeout=30).topics if not topic.startswith("__")]
    if topics:
        for deleted in admin.delete_topics(topics, request_timeout=60).values():
            deleted.result()


@pytest.fixture
def admin(kafka_broker: brokers.Broker) -> AdminClient:
    return plain_admin(kafka_broker)


@pytest.fixture
def with_timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the bridges that are opened from now on have other durations and sizes, such as `monitor_interval=0.1`."""

    def change(**timing: float) -> None:
        changed = Timing(**timing)  # type: ignore[arg-type]
        monkeypatch.setattr(backend, "read", lambda *given: replace(read(*given), timing=changed))

    return change


@pytest.fixture(scope="session")
def kafka_under_test(kafka_broker: brokers.Broker) -> brokers.Broker:
    """The broker of `txnbridge_url` and `kill_broker`; a folder of tests may override it."""
    return kafka_broker


@pytest.fixture(scope="session")
def txnbridge_url(kafka_under_test: brokers.Broker) -> str:
    return f"{kafka_under_test.url}?{SOON}"


@pytest.fixture
def side_by_side() -> int:
    return 4  # each has a client with threads of its own, and the broker is small


@pytest.fixture
def kill_broker(kafka_under_test: brokers.Broker) -> Callable[[], object]:
    return kafka_under_test.restart


@pytest.fixture
def proxy(kafka_broker: brokers.Broker) -> Iterator[faults.Proxy]:
    with faults.proxy(kafka_broker) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def unverified() -> Iterator[brokers.Broker]:
    """A broker that takes a message of a transaction that has ended: so what a forgotten marker leaves can be made."""
    with kafka_or_skip(container=False, settings={"transaction.partition.verification.enable": "false"}) as broker:
        yield broker
