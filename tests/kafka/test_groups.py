"""Groups as an administrator sees and sets them, and what their members tell in the log."""

import logging
from collections.abc import Callable, Iterator

import pytest

import txnbridge
from txnbridge import Bridge, InvalidState


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
    with bridge.consumer(topic, group) as consumer:
        with bridge.transaction() as txn:
            txn.ack(next(iter(consumer)))
    return topic, group


def test_a_group_goes_on_at_either_end_or_at_a_time(bridge: Bridge, read: tuple[str, str]) -> None:
    topic, group = read
    with bridge.consumer(topic) as reader:
        first = next(iter(reader))
    assert bridge.admin.reset_group(group, "latest", topic) == {(topic, 0): (3,)}  # behind the marker
    assert bridge.admin.group(group).lag == {(topic, 0): 0}
    assert bridge.admin.reset_group(group, first.timestamp) == {(topic, 0): (0,)}
    assert bridge.admin.group(group).lag == {(topic, 0): 3}


def test_control_markers_are_no_lag(bridge: Bridge, read: tuple[str, str]) -> None:
    topic, group = read
    with bridge.transaction() as txn:
        txn.send(topic, b"3")
        txn.abort()
    with bridge.consumer(topic, group) as consumer, bridge.transaction() as txn:
        txn.ack(next(iter(consumer)))
    assert bridge.admin.group(group).lag == {(topic, 0): 0}


def test_a_group_is_not_set_while_a_prepared_transaction_holds_acknowledgements_of_it(
    bridge: Bridge, read: tuple[str, str]
) -> None:
    topic, group = read
    with bridge.consumer(topic, group) as consumer:
        with bridge.transaction(prepare=True) as txn:
            txn.ack(next(iter(consumer)))
    with pytest.raises(InvalidState, match="an open transaction has acknowledged"):
        bridge.admin.reset_group(group)
    bridge.abort(str(txn.token))
    assert bridge.admin.reset_group(group) == {(topic, 0): (0,)}


def test_a_member_tells_what_it_waits_for_and_what_it_gets(
    bridge: Bridge, read: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = read
    caplog.set_level(logging.INFO, "txnbridge.kafka")
    with bridge.consumer(topic, group) as consumer:
        next(iter(consumer))
    told = [record.getMessage() for record in caplog.records if record.name == "txnbridge.kafka"]
    assert told[0].startswith(f"group {group!r}: joining; the partitions of a dead member")
    assert f"group {group!r}: {topic}[0]: is read here, from 1 on" in told
    assert told[-1] == f"group {group!r}: left"
