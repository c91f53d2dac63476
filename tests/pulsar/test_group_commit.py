"""Group commit on Pulsar: each of many threads is told the true outcome of its transaction."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.plugin import topic  # noqa: F401

from tests.group_commit import (  # noqa: F401
    test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member,
    test_transactions_that_share_are_whole_while_the_broker_is_killed,
)


@pytest.fixture
def committing(pulsar_broker: brokers.Pulsar) -> tuple[brokers.Pulsar, str]:
    return pulsar_broker, "END_TXN"


def test_messages_of_transactions_that_are_alone_are_entries_of_their_own(bridge, topic):  # noqa: F811
    """Members of a group get whole entries, and transactions that share one of the broker's share entries, too."""

    def send(number: int) -> None:
        with bridge.transaction(group_commit=False) as txn:
            txn.send(topic, b"%d" % number, partition=0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(24)))
    with bridge.consumer(topic, "group", sharing="message") as consumer:
        found = [consumer.poll(1, 30)[0] for _ in range(24)]
    assert len({message.position[:2] for message in found}) == 24
