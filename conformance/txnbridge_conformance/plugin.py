"""The pytest plug-in of the conformance suite.

A backend runs the suite with three short files: a `conftest.py` with
`pytest_plugins = ["txnbridge_conformance.plugin"]`, a test module with `from txnbridge_conformance.suite import *`, and
the broker's URL in the pytest settings: `txnbridge_url = kafka://localhost:9092`. (PYTEST_DONT_REWRITE: this module may
be imported before pytest loads it.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

import txnbridge
from txnbridge import Bridge, Capabilities, Capability, TxnBridgeError
from txnbridge.testing import Child, Unvisited


def proves(*capabilities: Capability, chance: bool = False) -> pytest.MarkDecorator:
    """Mark a test that fails on a broker without one of these capabilities.

    If a backend declares a capability absent, the test runs and is expected to fail: a pass shows that the declaration
    is out of date. A test with `chance` may pass by luck without the capability, so it is skipped instead.
    """
    return pytest.mark.proves(*capabilities, chance=chance)


def needs(*capabilities: Capability) -> pytest.MarkDecorator:
    """Mark a test that uses these capabilities to prove something else; without one of them it is skipped."""
    return pytest.mark.needs(*capabilities)


pytest.register_assert_rewrite("txnbridge_conformance.suite", "txnbridge_conformance.observing")


# The fixture `connect` calls `txnbridge.connect` for the broker under test, and closes the bridges at the end.
Connect = Callable[..., Bridge]
# The fixture `much` makes a list of values from a text: more bytes than a client buffers.
Much = Callable[[bytes], list[bytes]]


class NewTopic(Protocol):
    """The fixture `new_topic` creates a topic that no other test uses, and returns its name."""

    def __call__(self, partitions: int = 1) -> str: ...


class RunChild(Protocol):
    """The fixture `run` starts a `Child`, and kills it after the test."""

    def __call__(
        self,
        function: Callable[..., Any],
        *args: object,
        kill: str | Unvisited | None = None,
        pause: str | Unvisited | None = None,
    ) -> Child: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("txnbridge_url", "the broker that the suite runs against; {tmp} stands for a fresh folder")
    parser.addoption("--txnbridge-url", help="the broker's URL, instead of the setting txnbridge_url")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(*capabilities, chance): capabilities without which a test fails")
    config.addinivalue_line("markers", "needs(*capabilities): capabilities that a test uses, but does not prove")


@pytest.fixture(autouse=True)
def _declared(request: pytest.FixtureRequest) -> None:
    """Skip a test, or expect its failure, if its marks name capabilities that the backend declares absent."""
    proved = [(c, mark.kwargs["chance"]) for mark in request.node.iter_markers("proves") for c in mark.args]
    needed = [c for mark in request.node.iter_markers("needs") for c in mark.args]
    if not proved and not needed:
        return
    capabilities: Capabilities = request.getfixturevalue("capabilities")
    for capability in needed + [c for c, chance in proved if chance]:
        if not capabilities[capability]:
            pytest.skip(f"needs {capability.value}, which is absent: {capabilities[capability].note}")
    for capability, _ in proved:
        if not capabilities[capability]:
            absent = f"{capability.value} is declared absent ({capabilities[capability].note})"
            reason = f"{absent}; if this passes, the declaration is out of date"
            failures = AssertionError, pytest.fail.Exception, TxnBridgeError
            request.applymarker(pytest.mark.xfail(raises=failures, reason=reason, strict=True))


# --- the broker -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def txnbridge_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the broker's URL: `--txnbridge-url`, else `txnbridge_url` in the pytest settings. May be overridden."""
    url: str = request.config.getoption("--txnbridge-url") or request.config.getini("txnbridge_url")
    if not url:
        raise pytest.UsageError("no broker is given: set txnbridge_url in the pytest settings, or --txnbridge-url")
    return url.replace("{tmp}", str(tmp_path_factory.mktemp("broker"))) if "{tmp}" in url else url


@pytest.fixture
def capabilities(txnbridge_url: str) -> Capabilities:
    """Return the capabilities that the backend of the broker under test declares."""
    return _declared_by(txnbridge_url)


@functools.cache  # cached by URL instead of by session: one pytest run may test several brokers
def _declared_by(url: str) -> Capabilities:
    with txnbridge.connect(url) as bridge:
        return bridge.capabilities


@pytest.fixture
def kill_broker() -> Callable[[], object]:
    """Return a function that kills the broker with SIGKILL and starts it again. Each backend overrides this fixture."""
    pytest.skip("this broker cannot be killed: override the fixture kill_broker with a way to kill and restart it")


@pytest.fixture
def side_by_side() -> int:
    """Return how many processes the kill walk (`suite.kill_walks`) runs at once. Override it for a slower broker."""
    return 10  # some processes only wait until a dead process's lease expires


@pytest.fixture
def much() -> Much:
    """Return a function that makes 12 MB of values, more than a client buffers, so that most reach the broker.

    Override this fixture for a client that buffers less, if each message of an open transaction costs the broker time.
    """
    return lambda text: [text * (80_000 // len(text))] * 150


@pytest.fixture
def connect(txnbridge_url: str) -> Iterator[Connect]:
    """Return a function that opens bridges to the broker under test; they are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(txnbridge.connect(txnbridge_url, **settings))


@pytest.fixture
def bridge(connect: Connect) -> Bridge:
    """Return a bridge to the broker under test, without a transactional id."""
    return connect()


# --- names that no other test uses ------------------------------------------------------------------------------------

_numbers = itertools.count(1)
RUN = secrets.token_hex(3)  # a part of all names, so that several test runs against one broker use different ones


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Return a function that makes unique names for groups, transactional ids, publishers and decision logs."""
    return lambda prefix: f"{prefix}-{RUN}-{next(_numbers)}"


@pytest.fixture
def new_topic(unique: Callable[[str], str], bridge: Bridge) -> NewTopic:
    """Return a function that creates a topic through the bridge. Override this fixture for another way."""

    def create(partitions: int = 1) -> str:
        name = unique("conformance")
        bridge.admin.create_topic(name, partitions)
        return name

    return create


@pytest.fixture
def topic(new_topic: NewTopic) -> str:
    """Create a topic with one partition, and return its name."""
    return new_topic()


@pytest.fixture
def group(unique: Callable[[str], str]) -> str:
    """Return the name of a group that has never read."""
    return unique("group")


@pytest.fixture
def owner(unique: Callable[[str], str]) -> str:
    """Return a transactional id that was never opened; a bridge that opens it becomes the id's owner."""
    return unique("owner")


@pytest.fixture
def run() -> Iterator[RunChild]:
    """Return a function that starts `Child(function, *args, kill=…, pause=…)`, which is killed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda function, *args, **when: stack.enter_context(Child(function, *args, **when))
