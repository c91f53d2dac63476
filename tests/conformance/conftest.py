from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.conformance.broken import BROKEN, Broken

# Tests wait for leases and pauses to end, so these are short, but longer than a busy machine delays a process.
URL = "embedded:{folder}/broker.db?lease_seconds=2&half_check_seconds=0.5"

# Walks that only --full has: the longest, and those whose events another walk has, too.
LONG_WALKS = {
    "test_opening_an_id_clears_what_is_left_and_spares_what_is_prepared_wherever_it_dies",
    "test_a_prepared_transaction_ends_as_decided_wherever_its_process_dies[abort]",
    "test_a_message_is_passed_on_once_wherever_its_process_dies[by hand]",
}

# The errors of a test that has found a broken promise. If a broken broker is found by another error of ours, its
# `breaks_with` names that error: any other may be the fault of a busy machine.
FAILURES: tuple[Any, ...] = (AssertionError, LookupError, ValueError, pytest.fail.Exception)


@pytest.fixture(scope="session")
def txnbridge_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    url: str = request.config.getoption("--txnbridge-url") or URL
    return url.replace("{folder}", str(tmp_path_factory.mktemp("broker")))


@pytest.fixture
def kill_broker() -> Callable[[], object]:
    """Do nothing: the embedded broker is only in the processes that use it, and the tests kill those."""
    return lambda: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the suite that must fail on a broken broker, and choose those that run.

    Every run has one such test of each broken broker; --live adds the others, and --full the tests that may pass and
    the long walks.
    """
    full = config.getoption("--full")
    live = full or config.getoption("--live")
    left_out = set()
    for item in items:
        broker = broker_of(item)
        if broker and must_fail(item, broker.caught_by):
            failures = (*FAILURES, *broker.breaks_with)
            item.add_marker(pytest.mark.xfail(raises=failures, reason=f"{broker.__name__} must not pass", strict=True))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))  # a failed test leaves things open
        if item.name in LONG_WALKS and not full:
            left_out.add(item)
        if broker and not (full or must_fail(item, broker.caught_by if live else broker.caught_by[:1])):
            left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def broker_of(item: pytest.Item) -> type[Broken] | None:
    """Return the broken broker on which an item runs, or None."""
    callspec = getattr(item, "callspec", None)
    broker = callspec.params.get("txnbridge_url") if callspec else None
    return broker if isinstance(broker, type) else None


def must_fail(item: pytest.Item, tests: Iterable[str]) -> bool:
    """Return whether an item on a broken broker is among `tests`, by its name with or without its own parameters."""
    name, _, values = item.name.rstrip("]").partition("[")
    brokers = {broker.__name__ for broker in BROKEN}
    own = "-".join(part for part in values.split("-") if part not in brokers)
    return not {name, f"{name}[{own}]"}.isdisjoint(tests)
