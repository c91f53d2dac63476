from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.broken import Broken
from txnbridge import TxnBridgeError

# Short leases, because tests wait for them to lapse; long enough for a process that is held up by a busy machine.
URL = "embedded:{folder}/broker.db?lease_seconds=2"

# What a test fails with, and not by a bug of its own: something else came than was promised, or nothing came.
FAILURES = (AssertionError, LookupError, ValueError, pytest.fail.Exception, TxnBridgeError)


@pytest.fixture(scope="session")
def txnbridge_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    url: str = request.config.getoption("--txnbridge-url") or URL
    return url.replace("{folder}", str(tmp_path_factory.mktemp("broker")))


@pytest.fixture
def kill_broker() -> Callable[[], object]:
    """There is no broker but in the processes that use it, and the tests kill those."""
    return lambda: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the suite on broken brokers: what must fail is marked so; all the rest runs with --full only."""
    passing = [item for item in items if not _expect_failure(item) and broker_of(item)]
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=passing)
        items[:] = [item for item in items if item not in set(passing)]


def broker_of(item: pytest.Item) -> type[Broken] | None:
    """The broken broker that an item runs on, if it does on one."""
    callspec = getattr(item, "callspec", None)
    broker = callspec.params.get("txnbridge_url") if callspec else None
    return broker if isinstance(broker, type) else None


def _expect_failure(item: pytest.Item) -> bool:
    """Mark a test that must fail: its broker names it, alone or with the values of its own parameters."""
    broker = broker_of(item)
    if broker is None:
        return False
    name, _, values = item.name.rstrip("]").partition("[")
    own = "-".join(part for part in values.split("-") if part != broker.__name__)
    if not {name, f"{name}[{own}]"} & broker.caught_by:
        return False
    item.add_marker(pytest.mark.xfail(raises=FAILURES, reason=f"{broker.__name__} must not pass", strict=True))
    item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))  # a failed test leaves things open
    return True
