"""Pulsar keeps the contract of transactions also if each one is gathered, although it is alone."""

import pytest
from txnbridge_conformance import brokers

from tests.gathered import *  # noqa: F403
from tests.pulsar.kit import url_of


@pytest.fixture(scope="module")
def txnbridge_url(pulsar_under_test: brokers.Pulsar) -> str:
    return url_of(pulsar_under_test, half_check_seconds=0.5, group_commit="true")
