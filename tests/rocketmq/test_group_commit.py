"""Group commit on RocketMQ: each of many threads is told the true outcome of its transaction."""

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.plugin import topic  # noqa: F401

from tests.group_commit import (  # noqa: F401
    test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member,
    test_transactions_that_share_are_whole_while_the_broker_is_killed,
)


@pytest.fixture
def committing(rocketmq_broker: brokers.RocketMQ) -> tuple[brokers.RocketMQ, str]:
    return rocketmq_broker, "END_TRANSACTION"
