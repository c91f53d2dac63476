"""Group commit on Kafka: each of many threads is told the true outcome of its transaction."""

import pytest
from txnbridge_conformance import brokers

from tests.group_commit import (  # noqa: F401
    test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member,
    test_transactions_that_share_are_whole_while_the_broker_is_killed,
)


@pytest.fixture
def committing(kafka_broker: brokers.Broker) -> tuple[brokers.Broker, str]:
    return kafka_broker, "EndTxn"
