"""Half messages in lanes on a real broker: what it refuses and loses, large ones and many."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from txnbridge_conformance.observing import eventually, seen, values

from tests.core.half.test_half_lanes import check_wherever_a_seller_dies, lanes
from tests.kafka.kit import configure
from tests.kill_walk import KillWalk
from txnbridge import Decision, HalfTransaction, InvalidOption, Outcome, OutcomeUnknown, connect
from txnbridge._base.connection import Connection

COMMIT, UNDECIDED = Decision.COMMIT, Decision.UNDECIDED


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(Connection.timing, lane_beat=0.5, lane_look=0.2, lane_takeover=3.0)
    monkeypatch.setattr(Connection, "timing", quick)


def obey(txn: HalfTransaction, decision: Decision) -> Decision:
    return decision


def says(decision: Decision) -> Callable[..., Decision]:
    return lambda *_: decision


def test_a_half_message_that_its_topic_refuses_is_parked_while_others_go_on(bridge, topic, new_topic, group, admin):
    small = new_topic()
    with bridge.half_messages(group, execute=obey, check=says(COMMIT)) as sales:
        with sales.transaction(COMMIT) as first:
            first.send(small, b"x")
        configure(admin, small, "max.message.bytes", "1000")  # which a process learns within a minute
        with pytest.raises(OutcomeUnknown), sales.transaction(COMMIT, timeout=3) as txn:
            txn.send(small, b"x" * 5000)
        with sales.transaction(COMMIT) as other:
            other.send(topic, b"1")
        assert values(seen(bridge, topic)) == [b"1"]
        eventually(lambda: [half.transaction for half in bridge.admin.parked(group)] == [txn.id], "it is parked")
        configure(admin, small, "max.message.bytes", "100000")
        bridge.admin.resume(group, txn.id)
        eventually(lambda: len(seen(bridge, small)) == 2, "it is published")


def test_a_half_message_that_its_topic_would_refuse_is_refused_before_the_work(bridge, new_topic, group, admin):
    small, compacted, works = new_topic(), new_topic(), list[str]()

    def work(txn: HalfTransaction, _: object) -> Decision:
        works.append(txn.id)
        return COMMIT

    configure(admin, small, "max.message.bytes", "1000")
    configure(admin, compacted, "cleanup.policy", "compact")
    with bridge.half_messages(group, execute=work, check=says(COMMIT)) as sales:
        with pytest.raises(InvalidOption, match="takes 1000"), sales.transaction() as large:
            large.send(small, b"x" * 900, key=b"k" * 200)
        with pytest.raises(InvalidOption, match="needs a key"), sales.transaction() as unkeyed:
            unkeyed.send(compacted, b"x")
        with sales.transaction() as fine:
            fine.send(compacted, None, key="k")
            fine.send(small, b"x" * 900)
    assert works == [fine.id]


@pytest.mark.parametrize(("name", "value"), [("retention.ms", "1000"), ("cleanup.policy", "compact")])
def test_a_lane_whose_topic_would_lose_records_is_not_opened(txnbridge_url, bridge, topic, group, admin, name, value):
    with bridge.half_messages(group, execute=obey, check=says(COMMIT)) as sales, sales.transaction(COMMIT) as txn:
        txn.send(topic, b"1")
    configure(admin, lanes(bridge, group).topic(0), name, value)
    with connect(txnbridge_url) as other, pytest.raises(InvalidOption, match=name):
        other.half_messages(group, execute=obey, check=says(COMMIT))


def test_only_the_half_message_whose_records_were_deleted_is_lost(txnbridge_url, bridge, topic, group, admin):
    with connect(txnbridge_url) as dead:
        sales = dead.half_messages(group, execute=obey, check=says(UNDECIDED))
        sales.close()
        for number in range(3):
            with sales.transaction(UNDECIDED) as txn:
                txn.send(topic, b"first %d" % number)
                txn.send(topic, b"second %d" % number)
        lane = lanes(dead, group).topic(0)
    second = next(message.position[0] for message in bridge.read(lane, 10) if message.value == b"second 0")
    admin.delete_records([TopicPartition(lane, 0, second)])[TopicPartition(lane, 0)].result()
    with connect(txnbridge_url) as other, other.resolver(group, check=says(COMMIT)):
        eventually(lambda: len(seen(bridge, topic)) == 4, "the others are published")
        eventually(lambda: len(bridge.admin.parked(group)) == 1, "the lost one is parked")
    assert set(values(seen(bridge, topic))) == {b"first 1", b"second 1", b"first 2", b"second 2"}


def test_large_half_messages_of_two_threads_and_one_of_many_messages_are_published_once(bridge, new_topic, group):
    big, many, after = new_topic(), new_topic(), new_topic()
    outcomes: list[Any] = []
    with bridge.half_messages(group, execute=obey, check=says(UNDECIDED)) as sales:

        def sell(topic: str, value: bytes, count: int) -> None:
            with sales.transaction(COMMIT) as txn:
                txn.send_many(topic, [value] * count)
            outcomes.append(txn.outcome)

        with ThreadPoolExecutor(2) as threads:
            for _ in range(2):
                threads.submit(sell, big, b"x" * 900_000, 40)
        sell(many, b"x" * 100, 50_000)
        sell(after, b"1", 1)
    assert outcomes == [Outcome.COMMITTED] * 4
    assert all(bridge.admin.bounds(name)[name, 0][1] >= (count,) for name, count in ((big, 80), (many, 50_000)))
    assert len(bridge.read(big, 100)) == 80


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_database_and_topics_agree_wherever_a_seller_dies(txnbridge_url: str, tmp_path: Path, kill_walk: KillWalk):
    check_wherever_a_seller_dies(txnbridge_url, tmp_path, kill_walk)
