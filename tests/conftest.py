from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Here and not in tests/conformance, because pytest takes plug-ins from the top conftest.py only.
pytest_plugins = ["txnbridge_conformance.plugin", "txnbridge_conformance.brokers.plugin"]

# How fast examples are made and run says how busy the machine is, nothing about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


# The folders of tests that start real brokers.
BROKERS = ("tests/brokers/", "tests/faults/", "tests/kafka/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The one skip for time: tests marked `full` run with --full. And where several processes share the tests (`-n`),
    one of them has all that start real brokers: a machine carries few of those at a time.
    """
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with --full"))
        if item.nodeid.startswith(BROKERS):
            item.add_marker(pytest.mark.xdist_group("brokers"))
