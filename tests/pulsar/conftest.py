import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_pulsar import settings
from txnbridge_pulsar.client import PulsarClient
from txnbridge_pulsar.settings import Timing

from tests.keeping import keeping
from tests.pulsar.client_kit import fresh_topic, service
from tests.pulsar.kit import url_of
from tests.pulsar.reading_kit import Member
from tests.pulsar.writing_kit import Connect, WithTiming, connect_to

PRESENCE = Path(__file__).parent

# Of the suite: kill walks take minutes, because each step starts clients anew, and one test waits until the timeout of
# a transaction is over, which test_writing.py asks of a short one.
SLOW = re.compile(r"wherever|slept_commits_nothing\[commit/before")
# Of the decision log: hundreds of random worlds, and many thousand decisions.
MANY = re.compile(r"that_does_not_count\[200|reads_stay_short")


@pytest.hookimpl(tryfirst=True)  # before those marked `full` are skipped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(PRESENCE):
            rare = {"test_suite.py": SLOW, "test_log_decisions.py": MANY}.get(item.path.name)
            if rare and rare.search(item.name):
                item.add_marker(pytest.mark.full)


@pytest.fixture
def client(pulsar_broker: brokers.Pulsar) -> Iterator[PulsarClient]:
    """A wire client of the broker that all tests share."""
    with PulsarClient(service(pulsar_broker)) as client:
        yield client


@pytest.fixture(scope="module")
def official(pulsar_broker: brokers.Pulsar) -> Iterator[Any]:
    """Return the official client."""
    pulsar = pytest.importorskip("pulsar")
    client = pulsar.Client(service(pulsar_broker), logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    """The full name of a topic that nobody else uses."""
    return fresh_topic()


@pytest.fixture
def open_bridge(pulsar_broker: brokers.Pulsar) -> Iterator[Connect]:
    """Open bridges by the backend itself, each with one writer unless told otherwise; they are closed in the end."""
    with ExitStack() as stack:
        yield lambda url=pulsar_broker.url, **settings: stack.enter_context(
            connect_to(url, pulsar_broker.admin_url, **settings)
        )


@pytest.fixture
def member(pulsar_broker: brokers.Pulsar) -> Iterator[Callable[..., Member]]:
    """Make readers in a group, which leave in the end."""
    yield from keeping(
        lambda topics, group="group", **given: Member(pulsar_broker.url, topics, group, **given), Member.leave
    )


@pytest.fixture
def with_timing(monkeypatch: pytest.MonkeyPatch) -> WithTiming:
    """Give the bridges that are opened inside a block other durations and limits than a user's bridges have."""

    @contextmanager
    def change(**changed: float) -> Iterator[None]:
        made = partial(settings.PulsarSettings, timing=Timing(**changed))  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(settings, "PulsarSettings", made)
            yield

    return change


@pytest.fixture(scope="session")
def pulsar_under_test(pulsar_broker: brokers.Pulsar) -> brokers.Pulsar:
    """The broker of `txnbridge_url` and `kill_broker`; a folder of tests may override it."""
    return pulsar_broker


@pytest.fixture(scope="session")
def txnbridge_url(pulsar_under_test: brokers.Pulsar) -> str:
    return url_of(pulsar_under_test, half_check_seconds=0.5)


@pytest.fixture
def side_by_side() -> int:
    return 4  # the broker is small, and each process waits for it


@pytest.fixture
def kill_broker(pulsar_under_test: brokers.Pulsar) -> Callable[[], object]:
    return pulsar_under_test.restart
