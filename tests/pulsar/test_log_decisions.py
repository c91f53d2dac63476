"""Decisions on a log of Pulsar. Its brokers drop whole ledgers, which are numbered throughout a cluster."""

import uuid

import pytest

from tests.log_decisions import *  # noqa: F403
from tests.log_decisions import Anywhere
from tests.pulsar.test_decision_log import OpenLog


@pytest.fixture
def mirror(pulsar_broker):
    return lambda origin=None: Anywhere(lambda: OpenLog(pulsar_broker.url, uuid.uuid4().hex[:12]), origin)
