"""Groups as an administrator sees and sets them, and what their members tell in the log."""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import TopicPartition
from txnbridge_conformance.observing import send, take
from txnbridge_kafka.client.requests import Requests

import txnbridge
from tests.kafka.kit import plain_admin
from tests.renewed_topics import delete_at_first
from txnbridge import Bridge, PositionLost


@pytest.fixture
def bridge(txnbridge_url: str) -> Iterator[Bridge]:
    with txnbridge.connect(txnbridge_url, create_topics=1) as bridge:
        yield bridge


@pytest.fixture
def read(bridge: Bridge, unique: Callable[[str], str]) -> tuple[str, str]:
    """A topic of two messages, and a group that has acknowledged one of them."""
    topic, group = unique("orders"), unique("shipping")
    with bridge.transaction() as txn:
        txn.send_many(topic, [b"1", b"2"])
    read_up_to(bridge, topic, group, 1)
    return topic, group


def read_up_to(bridge: Bridge, topic: str, group: str, count: int) -> None:
    with bridge.consumer(topic, group) as consumer:
        while count:
            batch = consumer.poll(count, 60)
            with bridge.transaction() as txn:
                txn.ack(batch)
            count -= len(batch)


def test_a_group_goes_on_at_either_end_or_at_a_time(bridge: Bridge, read: tuple[str, str]) -> None:
    topic, group = read
    with bridge.consumer(topic) as reader:
        first = next(iter(reader))
    assert bridge.admin.reset_group(group, "latest", topic) == {(topic, 0): (3,)}  # behind the marker
    assert bridge.admin.group(group).lag == {(topic, 0): 0}
    assert bridge.admin.reset_group(group, first.timestamp) == {(topic, 0): (0,)}
    assert bridge.admin.group(group).lag == {(topic, 0): 3}


def test_control_markers_are_no_lag_for_any_group(bridge: Bridge, unique: Callable[[str], str]) -> None:
    topic, counts = unique("orders"), {unique("group"): count for count in (2, 2, 1, 200, 300)}
    for abort in (False, True):
        with bridge.transaction() as txn:
            txn.send_many(topic, [b"x"] * 300)
            if abort:
                txn.abort()
    for group, count in counts.items():
        read_up_to(bridge, topic, group, count)
    admin = plain_admin(bridge.url)
    assert [each.result() for each in admin.delete_records([TopicPartition(topic, 0, 2)]).values()]
    found = bridge.admin.describe_groups([*counts, unique("nobody")])
    lags = {name: group.lag[topic, 0] for name, group in found.items()}
    assert lags == {name: 602 - count if count < 300 else 0 for name, count in counts.items()}


def test_a_topic_that_is_deleted_meanwhile_hides_no_lag_in_others(
    bridge: Bridge, read: tuple[str, str], unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (topic, group), gone = read, unique("gone")
    with bridge.transaction() as txn:
        txn.send(gone, b"1")
    for name in (group, gone):
        read_up_to(bridge, gone, name, 1)
    delete_at_first(monkeypatch, Requests, "ends", bridge, gone)
    found = bridge.admin.describe_groups([group, gone])
    assert {name: each.lag for name, each in found.items()} == {group: {(topic, 0): 2}}  # with the marker
    assert bridge.admin.group(group).lag == {(topic, 0): 2}


def test_a_member_tells_what_it_waits_for_and_what_it_gets(bridge, read, caplog):
    topic, group = read
    caplog.set_level(logging.INFO, "txnbridge.kafka")
    with bridge.consumer(topic, group) as consumer:
        next(iter(consumer))
    told = [record.getMessage() for record in caplog.records if record.name == "txnbridge.kafka"]
    assert told[0].startswith(f"group {group!r}: joining; the partitions of a dead member")
    assert f"group {group!r}: {topic}[0]: is read here, from 1 on" in told
    assert told[-1] == f"group {group!r}: left"


@pytest.mark.parametrize(
    "kind", [{}, {"assignment": "range"}, {"group_protocol": "consumer"}], ids=["cooperative", "eager", "consumer"]
)
@pytest.mark.parametrize("late", ["requests", "answers"])
def test_a_late_first_position_does_not_move_a_group_back(proxy, bridge, unique, kind, late):
    topic, group = unique("orders"), unique("shipping")
    with bridge.transaction() as txn:
        txn.send_many(topic, [b"1", b"2"])
    hold = proxy.hold(**{late: "OffsetCommit"})
    with txnbridge.connect(proxy.url, kafka=kind) as through, through.consumer(topic, group) as consumer:
        cutting = threading.Thread(target=lambda: (hold.wait(), proxy.cut()))
        cutting.start()
        (first,) = consumer.poll(1, 60)
        cutting.join()
        with through.transaction() as txn:
            txn.ack(first)
        hold.release()
        hold.answered()
    with bridge.consumer(topic, group) as consumer:
        assert [each.value for each in consumer.poll(1, 60)] == [b"2"]


def test_a_log_that_was_truncated_and_has_grown_again_while_its_group_was_away_is_told(start_kafka, unique):
    broker, topic, group = start_kafka(container=False), unique("orders"), unique("shipping")
    with txnbridge.connect(broker.url, create_topics=1) as bridge:
        send(bridge, topic, *[b"lost"] * 10)
        read_up_to(bridge, topic, group, 10)
    broker.stop()
    shutil.rmtree(broker.folder / "node-1" / f"{topic}-0")
    broker.start()
    with txnbridge.connect(broker.url) as bridge:
        send(bridge, topic, *[b"new"] * 30)
        with bridge.consumer(topic, group) as consumer:
            with pytest.raises(PositionLost, match=r"is 10 in .*truncated"):
                consumer.poll(1, 60)
            consumer.seek({(topic, 0): (0,)})
            assert len(take(consumer, 30)) == 30
