"""Groups whose members take messages one by one from the same partitions."""

from functools import partial

import pytest

from tests.embedded import kit
from tests.embedded.members import settle
from tests.embedded.test_ordered import begun, fill, numbers, position
from txnbridge.errors import Conflict, NotSupported, PositionLost
from txnbridge.spi import Deadline

ORDERS = ("orders", 0)


@pytest.fixture
def join(join):
    return partial(join, sharing="message")


def test_a_message_given_back_comes_to_the_next_poll_with_its_deliveries_counted(broker, join):
    fill(broker, 4)
    first, second = join(), join()
    messages = first.take(4)
    first.reader.nack({ORDERS: [messages[1].position, messages[3].position]})
    again = second.take(2)
    assert [(int(m.value), m.deliveries) for m in again] == [(1, 2), (3, 2)]
    second.reader.nack({ORDERS: [again[0].position]})
    first.reader.nack({ORDERS: [again[1].position]})  # not its own any more: it stays where it is
    assert [(int(m.value), m.deliveries) for m in first.take(1)] == [(1, 3)]
    assert first.poll() == []


def test_a_message_neither_acknowledged_nor_given_back_is_redelivered_after_a_time(opened, join):
    broker = opened(redeliver_seconds=0.3)
    fill(broker, 3)
    first, second = join(broker=broker), join(broker=broker)
    messages = first.take(3)
    first.ack(messages[1])
    again = second.take(2)
    assert [(int(m.value), m.deliveries) for m in again] == [(0, 2), (2, 2)]
    with pytest.raises(Conflict, match="to another reader"):
        first.ack(messages[0])
    second.ack(*again)
    assert position(broker) == 3


def test_leaving_gives_everything_back_at_once(broker, join):
    fill(broker, 3)
    first, second = join(), join()
    messages = first.take(3)
    first.ack(messages[0])
    first.close()
    assert [(int(m.value), m.deliveries) for m in second.take(2)] == [(1, 2), (2, 2)]
    with pytest.raises(Conflict):
        first.ack(messages[1])


def test_a_member_that_is_taken_for_dead_gives_everything_back(broker, join):
    first, messages = begun(broker, join, 3, 3)
    kit.execute(broker, "UPDATE members SET expires_at = 0")
    second = join()
    assert numbers(second.take(3)) == [0, 1, 2]
    with pytest.raises(Conflict):
        first.ack(messages[0])
    settle(first, until=lambda: ("lost", ORDERS) in first.told)
    second.close()
    again = first.take(3)
    first.ack(*again)
    assert [message.deliveries for message in again] == [3, 3, 3]


def test_several_partitions_and_new_ones_are_shared(broker, join):
    fill(broker, 4, partitions=2)
    first, second = join(), join()
    assert len(first.take(3)) == 3
    assert len(second.take(1)) == 1
    broker.admin.grow_topic("orders", 3, Deadline(10))
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"new", partition=2)
    assert second.take_values(1) == [b"new"]


def test_an_undecided_message_holds_back_what_came_after_it(broker, join):
    fill(broker, 1)
    token = kit.prepare(broker, "orders", b"1")
    fill(broker, 1)
    fill(broker, 1, topic="marker")
    member = join("orders", "marker")
    assert sorted((m.topic, int(m.value)) for m in member.take(2)) == [("marker", 0), ("orders", 0)]
    broker.abort(token, kit.NO_LEDGER, Deadline(10))
    (message,) = member.take(1)
    assert message.position == (2,)


def test_a_paused_partition_is_left_to_others(broker, join):
    fill(broker, 2)
    first, second = join(), join()
    first.reader.pause([ORDERS])
    assert first.poll() == []
    assert numbers(second.take(1)) == [0]
    first.reader.resume([ORDERS])
    assert numbers(first.take(1)) == [1]


def test_a_shared_group_has_no_position_to_seek(broker, join):
    member = join()
    for call in (lambda: member.reader.seek({ORDERS: (0,)}), lambda: member.reader.seek_to_time(0, Deadline(1))):
        with pytest.raises(NotSupported, match="have no position to seek"):
            call()


def test_a_group_that_retention_overtakes_is_told_until_it_accepts_the_loss(broker, join):
    fill(broker, 10)
    first = join()
    first.ack(*first.take(2))
    first.take(2)
    first.close()
    kit.trim(broker, 5)
    member = join()
    for _ in range(2):
        with pytest.raises(PositionLost, match=r"is 2 in orders\[0\].*before 5"):
            member.poll()
    member.reader.seek({ORDERS: (5,)})
    messages = member.take(5)
    assert numbers(messages) == [5, 6, 7, 8, 9]
    member.ack(*messages)
    assert position(broker) == 10


def test_a_group_whose_messages_retention_removed_all_raises_position_lost_behind_those_of_other_partitions(
    broker, join
):
    fill(broker, 6, partitions=2)
    join().close()
    kit.trim(broker, 3)
    member = join()
    assert sorted(numbers(member.take(3))) == [1, 3, 5]
    with pytest.raises(PositionLost, match=r"is 0 in orders\[0\].*before 3"):
        member.poll()


def test_a_message_removed_by_retention_while_it_is_processed_can_be_acknowledged(broker, join):
    member, messages = begun(broker, join, 6, 4)
    kit.trim(broker, 3)
    member.ack(*messages[:3])
    assert numbers(member.take(2)) == [4, 5]
    assert position(broker) == 3


def test_large_messages_are_lent_in_portions(broker, join):
    size = 4 << 20
    writer = kit.open_writer(broker)
    for number in range(12):
        kit.commit(writer, "orders", bytes([number]) * size)
    first, second = join(), join()
    one = first.poll()
    assert 1 <= len(one) <= 9
    assert len(second.take(12 - len(one))) == 12 - len(one)
