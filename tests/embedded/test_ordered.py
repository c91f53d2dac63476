"""Groups in which each partition is with one member at a time."""

import pytest

from tests.embedded import kit
from tests.embedded.members import GROUP, Member, settle
from txnbridge.errors import Conflict, DeadlineExceeded, InvalidOption, InvalidState, PositionLost
from txnbridge.spi import Deadline

ORDERS = ("orders", 0)


def fill(broker, count, partitions=1, topic="orders"):
    """Messages "0", "1", … spread over the partitions in turn, in one transaction."""
    writer = kit.open_writer(broker)
    broker.admin.create_topic(topic, partitions, Deadline(10))
    kit.begin(writer)
    for number in range(count):
        kit.send(writer, topic, b"%d" % number, partition=number % partitions)
    writer.commit(Deadline(10))
    writer.close()


def begun(broker, join, count, taken, **how):
    """Fill the topic, and return a new member and the first messages that it takes."""
    fill(broker, count)
    member = join(**how)
    return member, member.take(taken)


def numbers(messages):
    return [int(message.value) for message in messages]


def position(broker, group=GROUP):
    ((next,),) = kit.rows(
        broker, "SELECT next FROM positions JOIN groups ON groups.id = group_id WHERE name = ?", group
    )
    return next


def test_aborted_messages_between_do_not_hold_the_position_back(broker, join):
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"0")
    token = kit.prepare(broker, "orders", b"aborted", b"aborted")
    kit.commit(writer, "orders", b"1")
    broker.abort(token, kit.NO_LEDGER, Deadline(10))
    member = join()
    member.ack(*member.take(2))
    assert position(broker) == 4
    assert member.reader.lag(Deadline(10)) == {ORDERS: 0}


def test_a_message_given_back_comes_again_at_once_with_its_deliveries_counted(broker, join):
    member, messages = begun(broker, join, 6, 4)
    member.reader.nack({ORDERS: [messages[2].position, messages[0].position]})
    assert member.reader.positions() == {ORDERS: (0,)}
    again = member.take(4)
    assert [(int(m.value), m.deliveries) for m in again] == [(0, 2), (2, 2), (4, 1), (5, 1)]
    member.reader.nack({ORDERS: [messages[2].position]})
    assert [(int(m.value), m.deliveries) for m in member.take(1)] == [(2, 3)]


def test_seeking_back_delivers_unacknowledged_messages_again(broker, join):
    member, messages = begun(broker, join, 10, 8)
    member.ack(messages[0], messages[1], messages[4])
    member.reader.seek({ORDERS: (0,)})
    assert member.reader.positions() == {ORDERS: (2,)}
    again = member.take(7)
    assert [(int(m.value), m.deliveries) for m in again] == [(2, 2), (3, 2), (5, 2), (6, 2), (7, 2), (8, 1), (9, 1)]


def test_a_message_given_back_and_then_sought_comes_once(broker, join):
    member, messages = begun(broker, join, 4, 3)
    member.reader.nack({ORDERS: [messages[1].position]})
    member.reader.rewind({ORDERS: (2,)})
    assert numbers(member.take(1)) == [1]
    member.reader.nack({ORDERS: [messages[1].position]})
    member.reader.seek({ORDERS: (1,)})
    member.reader.nack({ORDERS: [messages[2].position]})
    assert numbers(member.take(3)) == [1, 2, 3]


def test_messages_skipped_by_seeking_ahead_come_to_the_next_member(broker, join):
    member, messages = begun(broker, join, 6, 2)
    member.reader.nack({ORDERS: [messages[1].position]})
    member.reader.seek({ORDERS: (4,)})
    assert member.reader.positions() == {ORDERS: (4,)}
    member.ack(*member.take(2))
    member.close()
    assert numbers(join().take(4)) == [0, 1, 2, 3]


def test_seeking_to_a_time_leaves_acknowledged_messages_out(broker, join):
    kit.send_stamped(broker, *range(100, 106))
    member = join()
    member.ack(member.take(6)[4])
    member.reader.seek_to_time(103, Deadline(10))
    assert numbers(member.take(2)) == [103, 105]


def test_two_prepared_transactions_aborted_between_two_looks_come_again_once_each(broker, join):
    member, messages = begun(broker, join, 6, 6)
    for token in [member.reserve(messages[0]), member.reserve(messages[3], messages[4])]:
        broker.abort(token, kit.NO_LEDGER, Deadline(10))
    assert numbers(member.take(3)) == [0, 3, 4]
    member.ack(*messages[1:3], messages[5], messages[0], *messages[3:5])
    fill(broker, 1)
    assert numbers(member.take(1)) == [0]  # the new one, and nothing before it


def test_an_expired_prepared_transaction_gives_its_messages_back(broker, join, clock):
    member, messages = begun(broker, join, 3, 3)
    writer = kit.open_preparing(broker)
    kit.begin(writer, timeout=60, hold=0.001, prepare=True)
    member.tell(writer, *messages)
    writer.prepare(Deadline(10))
    clock.ahead = 3_600_000
    assert numbers(member.take(3)) == [0, 1, 2]


def test_a_group_that_starts_at_the_latest_misses_nothing_from_its_first_member_on(broker, join):
    fill(broker, 3)
    join(start="latest").close()
    fill(broker, 1)
    assert numbers(join(start="latest").take(1)) == [0]


def test_a_group_starts_where_its_first_member_said_whatever_later_ones_say(broker, join):
    fill(broker, 3)
    join(start="earliest").close()
    assert numbers(join(start="latest").take(3)) == [0, 1, 2]


def test_a_group_reads_new_partitions_of_its_topic_from_their_beginning(broker, join):
    fill(broker, 2)
    member = join(start="latest")
    broker.admin.grow_topic("orders", 2, Deadline(10))
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"new", partition=1)
    assert member.take_values(1) == [b"new"]


def test_a_topic_made_anew_is_read_from_its_beginning(broker, join):
    member, messages = begun(broker, join, 2, 2)
    broker.admin.delete_topic("orders", Deadline(10))
    fill(broker, 3)
    assert numbers(member.take(3)) == [0, 1, 2]
    with pytest.raises(Conflict, match="revoked from this reader"):
        member.ack(messages[0])
    assert member.told == [("assigned", ORDERS), ("lost", ORDERS), ("assigned", ORDERS)]


def test_a_group_that_retention_overtakes_is_told_until_it_accepts_the_loss(broker, join):
    fill(broker, 10)
    first = join()
    first.ack(*first.take(2))
    first.close()
    kit.trim(broker, 5)
    for _ in range(2):
        member = join()
        with pytest.raises(PositionLost, match=r"'shipping' is 2 in orders\[0\].*before 5"):
            member.poll()
        member.close()
    member = join()
    with pytest.raises(PositionLost):
        member.poll()
    with pytest.raises(PositionLost, match="before 5"):
        member.reader.seek({ORDERS: (4,)})
    member.reader.seek({ORDERS: (6,)})
    assert numbers(member.take(4)) == [6, 7, 8, 9]
    member.close()
    assert numbers(join().take(5)) == [5, 6, 7, 8, 9]


def test_a_message_that_was_given_back_and_is_gone_raises_position_lost(broker, join):
    fill(broker, 10)
    member = join()
    member.take(6)
    kit.trim(broker, 5)
    member.reader.nack({ORDERS: [(3,)]})
    with pytest.raises(PositionLost, match="is 3"):
        member.poll()


def test_a_partition_leaves_only_after_its_owner_was_asked(broker, join):
    fill(broker, 8, partitions=2)
    elsewhere: list[int] = []

    def check(partitions):
        """The other one has nothing yet, and what is acknowledged now still counts."""
        second.reader.poll(0, Deadline(0.01))
        elsewhere.extend(second.partitions)
        first.ack(*messages)

    first = join(on_revoking=check)
    messages = first.take(8)
    second = join()
    settle(first, second, until=lambda: len(second.partitions) == 1)
    assert elsewhere == []
    assert [told for told, _ in first.told] == ["assigned", "assigned", "revoking"]
    fill(broker, 2, partitions=2)
    assert numbers(first.take(1) + second.take(1)) in ([0, 1], [1, 0])


def test_an_owner_that_does_not_poll_is_overruled_after_the_time_of_a_lease(opened, join):
    broker = opened(lease_seconds=0.3)
    fill(broker, 4, partitions=2)
    first = join(broker=broker)
    messages = {message.partition: message for message in first.take(4)}
    second = join(broker=broker)
    settle(second, until=lambda: len(second.partitions) == 1)
    (left,) = second.partitions
    second.ack(*second.take(2))
    with pytest.raises(Conflict):
        first.ack(messages[left])
    first.ack(messages[1 - left])
    settle(first, until=lambda: ("lost", ("orders", left)) in first.told)
    assert ("revoking", ("orders", left)) not in first.told


def test_members_of_different_topics_share_what_they_have_in_common(broker, join):
    fill(broker, 0, partitions=2, topic="orders")
    fill(broker, 0, partitions=2, topic="payments")
    both = join("orders", "payments")
    one = join("payments")
    settle(both, one, until=lambda: len(one.reader.positions()) == 2)
    assert sorted(both.reader.positions()) == [("orders", 0), ("orders", 1)]
    assert sorted(one.reader.positions()) == [("payments", 0), ("payments", 1)]


def test_leaving_hands_over_at_once(broker, join):
    fill(broker, 0, partitions=2)
    first, second = join(), join()
    settle(first, second, until=lambda: len(first.partitions) == len(second.partitions) == 1)
    first.close()
    second.reader.poll(0, Deadline(0.001))
    assert second.partitions == [0, 1]  # with one look: no lease had to run out


def test_leaving_while_the_file_is_locked_ends_in_time_and_leaves_the_lease_to_run_out(opened, join):
    broker, other = opened(lease_seconds=0.3), opened()
    fill(broker, 1)
    first, second = Member(broker), join(broker=broker)
    with kit.busy(other), pytest.raises(DeadlineExceeded):
        first.reader.close(Deadline(0.2))
    first.close()  # which changes nothing any more
    assert numbers(second.take(1)) == [0]


def test_a_reader_that_was_taken_for_dead_joins_again_as_another_member(broker, join):
    member, messages = begun(broker, join, 3, 3)
    kit.execute(broker, "UPDATE members SET expires_at = 0")
    other = join()
    assert other.partitions == [0]
    settle(member, until=lambda: ("lost", ORDERS) in member.told)
    with pytest.raises(Conflict):
        member.ack(messages[0])
    other.close()
    assert numbers(member.take(3)) == [0, 1, 2]


def test_a_group_keeps_the_sharing_it_was_made_with(broker, join):
    join()
    with pytest.raises(InvalidOption, match="created with sharing='partition'"):
        join(sharing="message")


def test_a_partition_that_is_elsewhere_cannot_be_sought_or_paused(broker, join):
    fill(broker, 1)
    join()
    other = join()
    for call in (lambda: other.reader.seek({ORDERS: (0,)}), lambda: other.reader.pause([ORDERS])):
        with pytest.raises(InvalidState, match="not assigned to this reader"):
            call()
    other.reader.nack({ORDERS: [(0,)]})  # it comes again where the partition is


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_lag_counts_messages_neither_acknowledged_nor_reserved(broker, join, sharing):
    member, messages = begun(broker, join, 10, 5, sharing=sharing)
    assert member.reader.lag(Deadline(10)) == {ORDERS: 10}
    member.ack(messages[0], messages[3])
    member.reserve(messages[4])
    assert member.reader.lag(Deadline(10)) == {ORDERS: 7}


def test_a_member_follows_its_group_although_another_process_keeps_the_file_locked(broker, opened, join):
    fill(broker, 4, partitions=2)
    first, second = join(), join()
    settle(first, second, until=lambda: len(second.partitions) == 1)
    other = opened()
    with kit.busy(other):
        assert len(first.take(2) + second.take(2)) == 4
