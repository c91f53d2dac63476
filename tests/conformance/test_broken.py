"""Tests that each test of the suite can fail: it does so on a deliberately broken broker (see conftest.py).

With --full no test fails on a sound broker that is made the same way, and tests that must fail wait longer.
"""

from collections.abc import Iterator

import pytest
from txnbridge_conformance import suite
from txnbridge_conformance.suite import *  # noqa: F403

from tests.conformance import broken
from tests.conformance.broken import BROKEN, Broken, Sound, scheme_of
from tests.conformance.conftest import FAILURES
from txnbridge import Capabilities, connect, plugins

# Every test of the suite by its name.
TESTS = {name for name in vars(suite) if name.startswith("test_")}


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> Iterator[None]:
    with plugins.registered(broken):
        yield


@pytest.fixture(scope="module")
def txnbridge_url(request: pytest.FixtureRequest, _plugin: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    broker: type[Broken] = request.param
    # If every test must fail, it does no harm that a living member counts as dead.
    lease = 2 if request.config.getoption("--full") else 1
    options = f"lease_seconds={lease}&half_check_seconds=0.5"
    return f"{scheme_of(broker)}:{tmp_path_factory.mktemp('broken')}/broker.db?{options}"


@pytest.fixture(scope="module")
def capabilities(txnbridge_url: str) -> Capabilities:
    with connect(txnbridge_url) as bridge:
        return bridge.capabilities


@pytest.fixture(autouse=True)
def _short_patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for events that a broken broker never lets come."""
    if any({*FAILURES} <= {*mark.kwargs["raises"]} for mark in request.node.iter_markers("xfail")):
        # Longer than a lease.
        monkeypatch.setenv("TXNBRIDGE_PATIENCE", "5" if request.config.getoption("--full") else "2.5")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__name__ in TESTS:
        brokers = [broker for broker in BROKEN if _names(broker, metafunc)]
        metafunc.parametrize(
            "txnbridge_url", [*brokers, Sound], ids=lambda broker: broker.__name__, indirect=True, scope="module"
        )


def _names(broker: type[Broken], metafunc: pytest.Metafunc) -> bool:
    return metafunc.function.__name__ in {name.partition("[")[0] for name in broker.caught_by}


def test_every_test_of_the_suite_fails_on_some_broken_broker():
    caught = {name.partition("[")[0] for broker in BROKEN for name in broker.caught_by}
    # The sound broker declares share-key absent, which is enough for this test.
    caught.add("test_members_share_one_partition_key_by_key")
    assert (sorted(TESTS - caught), sorted(caught - TESTS)) == ([], [])


def test_every_broken_broker_is_caught():
    assert [broker.__name__ for broker in BROKEN if not broker.caught_by] == []
