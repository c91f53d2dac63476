import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartRocketMQ, rocketmq_or_skip
from txnbridge_conformance.observing import eventually
from txnbridge_conformance.plugin import Much
from txnbridge_rocketmq import backend
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol.frames import RpcRequest, nothing
from txnbridge_rocketmq.settings import RocketMQSettings, RocketMQTiming, parse_settings

import txnbridge
from tests.rocketmq import writing_kit
from tests.rocketmq.kit import LONG
from tests.rocketmq.reading_kit import new_topic
from txnbridge import Bridge
from txnbridge.errors import TxnBridgeError

HERE = Path(__file__).parent
_UPDATE_BROKER_CONFIG = 25  # a request code that only tests need
# Only with --full: all but one of the suite's kill walks, most random runs, and tests that take half a minute.
WALK = "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[commit]"
RARE = re.compile(r"test_demo\.py|whatever_is_lost.*\[([89]|\d\d)\]|that_does_not_count\[200|reads_stay_short")

_numbers = count(1)


@pytest.hookimpl(tryfirst=True)  # before the tests marked `full` are skipped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rare = RARE.search(item.nodeid) or ("wherever" in item.name and item.name != WALK)
        if rare and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module")
def start_shared() -> Iterator[StartRocketMQ]:
    """Return a function that starts RocketMQ for all tests of a module."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(rocketmq_or_skip(**options))


@pytest.fixture
def client(rocketmq_broker: brokers.RocketMQ) -> Iterator[RemotingClient]:
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")]) as client:
        yield client


@pytest.fixture
def topic(client: RemotingClient) -> str:
    """Create a topic with one queue that no other test uses, and return its name."""
    return new_topic(client)


@pytest.fixture
def group(rocketmq_broker: brokers.RocketMQ) -> str:
    """Create a consumer group, and return its name."""
    name = f"group-{next(_numbers)}"
    rocketmq_broker.create_group(name)
    return name


@pytest.fixture
def settings(client: RemotingClient) -> Iterator[Callable[..., None]]:
    """Return a function that changes the broker's settings until the end of the test."""
    before: dict[str, str] = {}

    def change(**wanted: object) -> None:
        now = client.call("broker-1", administration.broker_settings(), LONG)
        for name in wanted:
            before.setdefault(name, now[name])
        _change_settings(client, wanted)

    yield change
    if before:
        _change_settings(client, before)


def _change_settings(client: RemotingClient, wanted: Mapping[str, object]) -> None:
    lines = "".join(f"{name}={value}\n" for name, value in wanted.items()).encode()
    client.call("broker-1", RpcRequest("changing settings", _UPDATE_BROKER_CONFIG, nothing, body=lines), LONG)


@pytest.fixture
def open_bridge(rocketmq_broker: brokers.RocketMQ) -> Iterator[Callable[..., Bridge]]:
    """Return a function that opens bridges of the writing tests' application; they are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda url=rocketmq_broker.url, **settings: stack.enter_context(writing_kit.open_bridge(url, **settings))


@pytest.fixture
def with_timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives other durations and limits to the bridges that are opened from then on."""

    def give(**timing: float) -> None:
        def parse(*given: Any) -> RocketMQSettings:
            return replace(parse_settings(*given), timing=RocketMQTiming(**cast(Any, timing)))

        monkeypatch.setattr(backend, "parse_settings", parse)

    return give


@pytest.fixture(scope="session")
def txnbridge_url(rocketmq_broker: brokers.RocketMQ) -> str:
    return rocketmq_broker.url


@pytest.fixture
def side_by_side() -> int:
    return 4  # more processes would only wait for the small broker


@pytest.fixture
def much() -> Much:
    """Return a function that makes a little more than the 1 MiB that a writer buffers.

    Not more: the broker writes each open half again in every round of check-backs, each second.
    """
    return lambda text: [text * (40_000 // len(text))] * 30


@pytest.fixture
def kill_broker(rocketmq_broker: brokers.RocketMQ) -> Callable[[], object]:
    return rocketmq_broker.restart


@pytest.fixture(scope="session")
def administrator(txnbridge_url: str) -> Iterator[Bridge]:
    with txnbridge.connect(txnbridge_url, application="administrators") as bridge:
        yield bridge


@pytest.fixture(autouse=True)
def _nothing_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what the suite's killed programs left open: the broker writes open halves again in each round, for ever."""
    if request.path.name != "test_suite.py":
        yield
        return
    admin, url = request.getfixturevalue("administrator").admin, request.getfixturevalue("txnbridge_url")
    yield
    if admin.transactions():
        with txnbridge.connect(url, application="default"):  # answers for what its application has decided
            for left in admin.transactions():
                if left.state != "ending":
                    with contextlib.suppress(TxnBridgeError):  # another process has ended it meanwhile
                        admin.abort(left.transaction)
            eventually(lambda: "default" not in {each.owner for each in admin.transactions()}, "nothing is open")
