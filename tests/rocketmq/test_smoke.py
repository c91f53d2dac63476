"""RocketMQ in every run: one node, and for each kind of promise the test that would fail first."""

from collections.abc import Iterator

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import IDLE_ROCKETMQ, rocketmq_or_skip
from txnbridge_conformance.plugin import topic  # noqa: F401

from tests.rocketmq import test_writing
from tests.rocketmq.reading_kit import new_topic
from tests.smoke import *  # noqa: F403

pytestmark = pytest.mark.timeout(600)  # the first start fetches RocketMQ


@pytest.fixture(scope="module")
def rocketmq_broker() -> Iterator[brokers.RocketMQ]:
    """Start a broker for this module only: brokers must not run at the same time."""
    with rocketmq_or_skip(settings=IDLE_ROCKETMQ) as broker:
        yield broker


@pytest.fixture(scope="module")
def txnbridge_url(rocketmq_broker: brokers.RocketMQ) -> str:
    return rocketmq_broker.url


def test_ends_that_come_late_publish_nothing_again(rocketmq_broker, open_bridge, client):
    test_writing.test_an_owner_that_slept_until_others_published_adds_nothing_when_it_wakes(
        rocketmq_broker, open_bridge(), client, new_topic(client)
    )
