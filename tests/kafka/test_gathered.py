"""Kafka keeps the contract of transactions also if each one is gathered, although it is alone."""

import pytest
from txnbridge_conformance import brokers

from tests.gathered import *  # noqa: F403
from tests.kafka.conftest import SOON


@pytest.fixture(scope="module")
def txnbridge_url(kafka_under_test: brokers.Broker) -> str:
    return f"{kafka_under_test.url}?{SOON}&group_commit=true"
