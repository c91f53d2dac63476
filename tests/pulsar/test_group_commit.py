"""Group commit on Pulsar: each of many threads is told the true outcome of its transaction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from txnbridge_conformance import brokers, faults
from txnbridge_conformance.plugin import Connect, NewTopic, topic  # noqa: F401

from tests import group_commit
from txnbridge import Bridge


def test_transactions_that_share_are_whole_while_the_broker_is_killed(
    pulsar_broker: brokers.Pulsar, connect: Connect, bridge: Bridge, new_topic: NewTopic
) -> None:
    topics = [new_topic(), new_topic()]
    group_commit.check_that_members_are_whole_while_it_is_killed(pulsar_broker, connect, bridge, topics)


def test_a_shared_commit_whose_answer_is_lost_is_known_to_each_member(
    pulsar_broker: brokers.Pulsar,
    bridge: Bridge,
    topic: str,  # noqa: F811
) -> None:
    with faults.proxy(pulsar_broker) as proxy:
        group_commit.check_that_members_are_told_what_a_lost_answer_said(proxy, "END_TXN", bridge, topic)


def test_messages_of_transactions_that_are_alone_are_entries_of_their_own(
    bridge: Bridge,
    topic: str,  # noqa: F811
) -> None:
    """Members of a group get whole entries, and transactions that share one of the broker's share entries, too."""

    def send(number: int) -> None:
        with bridge.transaction(group_commit=False) as txn:
            txn.send(topic, b"%d" % number, partition=0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(24)))
    with bridge.consumer(topic, "group", sharing="message") as consumer:
        found = [consumer.poll(1, 30)[0] for _ in range(24)]
    assert len({message.position[:2] for message in found}) == 24
