from __future__ import annotations

from collections.abc import Callable

import pytest

# Short leases, because tests wait for them to lapse; long enough for a process that is held up by a busy machine.
URL = "embedded:{folder}/broker.db?lease_seconds=2"


@pytest.fixture(scope="session")
def txnbridge_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    url: str = request.config.getoption("--txnbridge-url") or URL
    return url.replace("{folder}", str(tmp_path_factory.mktemp("broker")))


@pytest.fixture
def kill_broker() -> Callable[[], object]:
    """There is no broker but in the processes that use it, and the tests kill those."""
    return lambda: None
