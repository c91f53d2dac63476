"""A reader that an exception from a signal handler may leave half way: behind it, it is opened anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.core.toy import ToyReader, connect_toy
from tests.interrupts import Interrupted
from txnbridge import Bridge, BrokerUnavailable, Conflict, Consumer, Message, PositionLost
from txnbridge.spi import Deadline, Partition, Position, Subscription

P = ("t", 0)


class Topic(ToyReader):
    """Readers of one topic of ten messages. The next poll of one loses what it took, if `interrupts` says so."""

    acknowledged = 0
    interrupts = False
    first = 0  # what the broker still has

    def __init__(self, subscription: Subscription, *rest: Any) -> None:
        super().__init__(subscription, *rest)
        self.feed(*range(10))
        start = subscription.start
        at = {"earliest": 0, "latest": 10}[start] if isinstance(start, str) else start
        self.next[P] = Topic.acknowledged if subscription.group else at
        self.paused: set[Partition] = set()
        if subscription.group is None:
            self.coming, self.sources[P] = [], None

    def poll(self, max_messages: int, deadline: Deadline) -> list[Message]:
        found = [] if P in self.paused else super().poll(max_messages, deadline)
        if Topic.interrupts:
            Topic.interrupts = False
            raise Interrupted
        return found

    def seek(self, positions: Mapping[Partition, Position]) -> None:
        if any(at < Topic.first for (at,) in positions.values()):
            raise PositionLost("gone")
        super().seek(positions)

    def seek_to_time(self, timestamp: int, deadline: Deadline) -> None:
        self.next[P] = timestamp

    def pause(self, partitions: Sequence[Partition]) -> None:
        self.paused.update(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        self.paused.difference_update(partitions)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bridge]:
    bridge, broker = connect_toy(timeout=5)

    def reader(subscription: Subscription, listener: Any, deadline: Deadline) -> ToyReader:
        broker.readers.append(Topic(subscription, listener))
        return broker.readers[-1]

    monkeypatch.setattr(broker, "reader", reader)
    for name, value in (("acknowledged", 0), ("interrupts", False), ("first", 0)):
        monkeypatch.setattr(Topic, name, value)
    with bridge:
        yield bridge


def poll(consumer: Consumer, count: int = 3) -> list[Any]:
    return [message.value for message in consumer.poll(count, 0)]


def interrupt(consumer: Consumer) -> None:
    Topic.interrupts = True
    with pytest.raises(Interrupted):
        consumer.poll(3, 0)


def test_without_a_group_it_goes_on_behind_what_was_handed_out(bridge: Bridge) -> None:
    consumer = bridge.consumer("t")
    assert poll(consumer) == [0, 1, 2]
    interrupt(consumer)
    assert consumer.positions() == {P: (3,)}
    interrupt(consumer)
    assert [*poll(consumer), *poll(consumer), *poll(consumer)] == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("start", "found"), [("earliest", [0]), ("latest", []), (4, [4])])
def test_nothing_comes_twice_or_from_elsewhere_if_nothing_was_handed_out(
    bridge: Bridge, start: str | int, found: list[int]
) -> None:
    consumer = bridge.consumer("t", start=start)
    interrupt(consumer)
    assert poll(consumer, 1) == found


def test_a_seek_stands(bridge: Bridge) -> None:
    consumer = bridge.consumer("t", start=4)
    interrupt(consumer)
    consumer.seek({P: (1,)})
    interrupt(consumer)
    assert poll(consumer) == [1, 2, 3]
    consumer.seek(8)
    interrupt(consumer)
    assert poll(consumer) == [8, 9]


def test_where_what_comes_next_is_gone_only_a_seek_says_where_it_goes_on(bridge: Bridge) -> None:
    consumer = bridge.consumer("t")
    poll(consumer)
    interrupt(consumer)
    Topic.first = 5
    for _ in range(2):
        with pytest.raises(PositionLost):
            consumer.poll(3, 0)
    consumer.seek({P: (5,)})
    assert poll(consumer) == [5, 6, 7]


def test_in_a_group_the_member_joins_again_and_what_it_had_comes_again(bridge: Bridge) -> None:
    consumer = bridge.consumer("t", "g")
    with bridge.transaction() as txn:
        txn.ack(consumer.poll(3, 0))
    Topic.acknowledged = 3
    old = consumer.poll(1, 0)
    interrupt(consumer)
    assert poll(consumer) == [3, 4, 5]
    with pytest.raises(Conflict), bridge.transaction() as txn:
        txn.ack(old)
    first, second = bridge._connection.broker.readers  # type: ignore[attr-defined]
    assert "close" in first.calls
    assert "close" not in second.calls


@pytest.mark.parametrize("group", [None, "g"])
def test_what_is_paused_stays_so(bridge: Bridge, group: str | None) -> None:
    consumer = bridge.consumer("t", group)
    assert poll(consumer, 1) == [0]
    Topic.acknowledged = 1
    consumer.pause([P])
    interrupt(consumer)
    assert [*poll(consumer), *poll(consumer)] == []
    consumer.resume([P])
    assert poll(consumer) == [1, 2, 3]


def test_a_broker_that_is_away_is_asked_again(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = bridge.consumer("t")
    poll(consumer)
    interrupt(consumer)
    with monkeypatch.context() as patched:

        def away(*_: Any) -> None:
            raise BrokerUnavailable("away")

        patched.setattr(consumer._reader, "_open", away)
        with pytest.raises(BrokerUnavailable):
            consumer.poll(3, 0)
    assert poll(consumer) == [3, 4, 5]


def test_columns_are_lost_no_more_than_messages(bridge: Bridge) -> None:
    def columns(count: int = 3) -> list[Any]:
        return [value for found in consumer.poll_columns(count, 0) for value in found.values]

    consumer = bridge.consumer("t")
    assert next(iter(consumer)).value == 0
    assert columns() == [1, 2, 3]  # they had come with the first message
    consumer.seek({P: (2,)})
    Topic.interrupts = True
    with pytest.raises(Interrupted):
        columns()
    assert consumer.positions() == {P: (2,)}
    assert [*columns(), *poll(consumer), *columns()] == [2, 3, 4, 5, 6, 7, 8, 9]
