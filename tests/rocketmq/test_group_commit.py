"""Group commit on RocketMQ: each of many threads is told the true outcome of its transaction."""

from __future__ import annotations

from txnbridge_conformance import brokers, faults
from txnbridge_conformance.plugin import Connect, NewTopic, topic  # noqa: F401

from tests import group_commit
from txnbridge import Bridge


def test_transactions_that_share_are_whole_while_the_broker_is_killed(
    rocketmq_broker: brokers.RocketMQ, connect: Connect, bridge: Bridge, new_topic: NewTopic
) -> None:
    topics = [new_topic(), new_topic()]
    group_commit.check_that_members_are_whole_while_it_is_killed(rocketmq_broker, connect, bridge, topics)


def test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member(
    rocketmq_broker: brokers.RocketMQ,
    bridge: Bridge,
    topic: str,  # noqa: F811
) -> None:
    with faults.proxy(rocketmq_broker) as proxy:
        group_commit.check_that_members_are_told_what_a_lost_answer_said(proxy, "END_TRANSACTION", bridge, topic)
