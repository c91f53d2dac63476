"""Group commit on Kafka: each of many threads is told the true outcome of its transaction."""

from __future__ import annotations

from txnbridge_conformance import brokers, faults
from txnbridge_conformance.plugin import Connect, NewTopic

from tests import group_commit
from txnbridge import Bridge


def test_transactions_that_share_are_whole_while_the_broker_is_killed(
    kafka_broker: brokers.Broker, connect: Connect, bridge: Bridge, new_topic: NewTopic
) -> None:
    topics = [new_topic(), new_topic()]
    group_commit.check_that_members_are_whole_while_it_is_killed(kafka_broker, connect, bridge, topics)


def test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member(
    proxy: faults.Proxy, bridge: Bridge, topic: str
) -> None:
    group_commit.check_that_members_are_told_what_a_lost_answer_said(proxy, "EndTxn", bridge, topic)
