"""Pulsar in every run: one node, and of each kind of promise the test that would fail first."""

from collections.abc import Iterator

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import pulsar_or_skip
from txnbridge_conformance.plugin import topic  # noqa: F401

from tests.pulsar import test_traps
from tests.pulsar.kit import url_of
from tests.smoke import *  # noqa: F403

pytestmark = pytest.mark.timeout(600)  # the first start fetches Pulsar


@pytest.fixture(scope="module")
def pulsar_broker() -> Iterator[brokers.Pulsar]:
    """Gone with this module: brokers do not run beside each other."""
    with pulsar_or_skip() as broker:
        yield broker


@pytest.fixture(scope="module")
def txnbridge_url(pulsar_broker: brokers.Pulsar) -> str:
    return url_of(pulsar_broker)


def test_a_message_that_comes_late_takes_nothing_back(open_bridge, client, pulsar_broker):
    test_traps.test_ours_gives_up_rather_than_commit_while_a_message_may_still_come(open_bridge, client, pulsar_broker)
