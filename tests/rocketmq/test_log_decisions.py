"""Tests of decisions in a log on RocketMQ, whose brokers drop records by age at any time."""

import uuid

import pytest

from tests.log_decisions import *  # noqa: F403
from tests.log_decisions import Anywhere
from tests.rocketmq.test_decision_log import OpenLog
from txnbridge import PositionLost


class Dropping(Anywhere):
    """A log that raises `PositionLost` for a record that the broker has dropped, as on RocketMQ."""

    def read(self, first, last, deadline=None):
        if first is not None and first < (self.next,) and all(first != position for position, _ in self.records):
            raise PositionLost("it was dropped")
        yield from super().read(first, last, deadline)


@pytest.fixture
def mirror(rocketmq_broker):
    new = lambda: OpenLog(rocketmq_broker.url, uuid.uuid4().hex[:12])  # noqa: E731
    return lambda origin=None: Dropping(new, origin, beyond=(1 << 60,))
