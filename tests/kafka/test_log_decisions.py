"""Decisions on a log of Kafka."""

import uuid

import pytest

from tests.kafka.test_decision_log import open_log
from tests.log_decisions import *  # noqa: F403
from tests.log_decisions import Numbered


@pytest.fixture
def mirror(kafka_broker):
    return lambda origin=None: Numbered(lambda: open_log(kafka_broker.url, uuid.uuid4().hex[:12]), origin)
