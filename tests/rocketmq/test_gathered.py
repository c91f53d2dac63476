"""RocketMQ keeps the contract of transactions also if each one is gathered, although it is alone."""

import pytest
from txnbridge_conformance import brokers

from tests.gathered import *  # noqa: F403


@pytest.fixture(scope="module")
def txnbridge_url(rocketmq_broker: brokers.RocketMQ) -> str:
    return f"{rocketmq_broker.url}?group_commit=true"
