"""Tests of consumers: where groups start, which member gets a message, acknowledgement, redelivery, and seeks."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest

from txnbridge import (
    Bridge,
    Capability,
    Conflict,
    Consumer,
    InvalidState,
    Message,
    Outcome,
    OutcomeUnknown,
    Poison,
    PositionLost,
    Transaction,
)
from txnbridge.testing import next_commit
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import ack, eventually, mark, poll_until, seen, send, take, up_to, values
from txnbridge_conformance.plugin import Connect, NewTopic, RunChild, needs, proves


def next_of(bridge: Bridge, topic: str, group: str) -> object:
    """Join a group as a new member, and return the value of the first message that it gets."""
    with bridge.consumer(topic, group) as consumer:
        return take(consumer, 1)[0].value


# --- where a group starts and resumes -------------------------------------------------------------------------------


def test_a_new_group_may_start_behind_the_latest_message(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"old")
    with bridge.consumer(topic, group, start="latest") as consumer:
        messages = poll_until(consumer, lambda _: consumer.assignment, "it has the partition")
        send(bridge, topic, b"new")
        assert values(messages + take(consumer, 1)) == [b"new"]


@proves(Capability.RENEWED_TOPICS)
@needs(Capability.TOPIC_ADMIN)
@pytest.mark.parametrize(
    ("grouped", "asleep"), [(True, True), (True, False), (False, True)], ids=["member", "next member", "alone"]
)
def test_a_reader_of_a_recreated_topic_skips_no_message_silently(
    bridge: Bridge, topic: str, group: str, grouped: bool, asleep: bool
) -> None:
    send(bridge, topic, *[b"old %d" % number for number in range(10)])
    with bridge.consumer(topic, group if grouped else None) as consumer:
        read = take(consumer, 5)
        if grouped:
            ack(bridge, read)
        if asleep:
            _renew(bridge, topic)
            _expect_all_or_an_error(consumer)
    if not asleep:
        _renew(bridge, topic)
        with suppress(PositionLost), bridge.consumer(topic, group) as consumer:
            _expect_all_or_an_error(consumer)


_OF_THE_NEW_ONE = [b"new %d" % number for number in range(60)]


def _renew(bridge: Bridge, topic: str) -> None:
    bridge.admin.delete_topic(topic)
    eventually(lambda: topic not in [each.name for each in bridge.admin.topics()], "the topic is gone")
    bridge.admin.create_topic(topic)
    send(bridge, topic, *_OF_THE_NEW_ONE)


def _expect_all_or_an_error(consumer: Consumer) -> None:
    try:
        messages = take(consumer, 1)
        while messages[0].value not in _OF_THE_NEW_ONE:  # perhaps the old topic's messages come before
            messages = take(consumer, 1)
    except PositionLost:
        with pytest.raises(PositionLost):  # until the consumer seeks
            take(consumer, 1)
    else:
        assert values(messages + take(consumer, len(_OF_THE_NEW_ONE) - len(messages))) == _OF_THE_NEW_ONE


@proves(Capability.START_BY_TIME)
@needs(Capability.TIMESTAMPS)
def test_a_new_group_may_start_at_a_time(bridge: Bridge, topic: str, group: str) -> None:
    with bridge.transaction() as txn:
        for number in (1, 2, 3):
            txn.send(topic, b"%d" % number, timestamp=1_600_000_000_000 + number)
    with bridge.consumer(topic, group, start=1_600_000_000_002) as consumer:
        assert values(take(consumer, 2)) == [b"2", b"3"]


def test_every_group_gets_every_message(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2")
    for name in (group, f"{group}-too"):
        with bridge.consumer(topic, name) as consumer, bridge.transaction() as txn:
            messages = take(consumer, 2)
            txn.ack(messages)
            assert values(messages) == [b"1", b"2"]


def test_a_consumer_may_read_many_topics(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    topics = [new_topic(), new_topic(partitions=2)]
    with bridge.transaction() as txn:
        for topic in topics:
            txn.send(topic, topic.encode())
    with bridge.consumer(topics, group) as consumer:
        assert sorted((m.topic, m.value) for m in take(consumer, 2)) == sorted((t, t.encode()) for t in topics)


def test_a_group_goes_on_where_its_last_member_stopped(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2", b"3")
    with bridge.consumer(topic, group) as consumer:
        ack(bridge, take(consumer, 2))
    assert next_of(bridge, topic, group) == b"3"


def test_an_unacknowledged_message_comes_again_to_the_next_member(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2")
    assert [next_of(bridge, topic, group), next_of(bridge, topic, group)] == [b"1", b"1"]


def test_a_message_that_a_killed_member_held_comes_again(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, group: str
) -> None:
    send(bridge, topic, b"1")
    member = run(programs.join_and_wait, txnbridge_url, topic, group)
    assert member.told() == b"1"
    member.kill()
    assert next_of(bridge, topic, group) == b"1"


# --- acknowledging --------------------------------------------------------------------------------------------------


@proves(Capability.ATOMIC_ACK)
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_group_moves_on_with_the_messages_of_its_transaction(
    bridge: Bridge, new_topic: NewTopic, group: str, end: str
) -> None:
    source, target = new_topic(), new_topic()
    send(bridge, source, b"1", b"2")
    with bridge.consumer(source, group) as consumer:
        with bridge.transaction() as txn:
            (message,) = take(consumer, 1)
            txn.send(target, message.value)
            txn.ack(message)
            if end == "abort":
                txn.abort()
    assert next_of(bridge, source, group) == (b"2" if end == "commit" else b"1")
    assert values(seen(bridge, target)) == ([b"1"] if end == "commit" else [])


def test_after_an_abort_its_messages_come_again_next_and_in_order(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2", b"3", b"4")
    with bridge.consumer(topic, group) as consumer:
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 3))
            txn.abort()
        assert values(take(consumer, 4)) == [b"1", b"2", b"3", b"4"]


@proves(Capability.GROUP_ORDER, chance=True)
def test_a_group_that_goes_back_again_and_again_skips_nothing(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, *(b"%d" % number for number in range(200)))
    at, commits = 0, itertools.cycle((False, False, True))
    with bridge.consumer(topic, group) as consumer:
        while at < 200:
            messages = take(consumer, 10)
            assert values(messages) == [b"%d" % number for number in range(at, at + 10)]
            with bridge.transaction() as txn:
                txn.ack(messages)
                if next(commits):
                    at += 10
                else:
                    txn.abort()


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.ATOMIC_ACK)
@pytest.mark.parametrize("sharing", ["partition", pytest.param("message", marks=needs(Capability.SHARE_MESSAGE))])
@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_acknowledgements_of_a_prepared_transaction_follow_its_token(
    connect: Connect, bridge: Bridge, topic: str, group: str, decision: str, sharing: str
) -> None:
    send(bridge, topic, b"1", b"2")
    member = connect()
    with member.consumer(topic, group, sharing=sharing) as consumer:
        with member.transaction(prepare=True) as txn:
            txn.ack(acked := take(consumer, 1))
    member.close()
    if bridge.capabilities[Capability.GROUP_ADMIN]:
        eventually(lambda: bridge.admin.group(group).members == (), "the member has left")
        with pytest.raises(InvalidState):
            bridge.admin.reset_group(group)
    (bridge.commit if decision == "commit" else bridge.abort)(str(txn.token))
    left = {b"1", b"2"} - {m.value for m in acked if decision == "commit"}
    with bridge.consumer(topic, group, sharing=sharing) as consumer:
        assert {m.value for m in take(consumer, len(left))} == left


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.ATOMIC_ACK)
@pytest.mark.parametrize("reader", ["same", "other"])
@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_a_message_acknowledged_in_a_prepared_transaction_stays_reserved_until_its_end(
    connect: Connect, bridge: Bridge, topic: str, group: str, decision: str, reader: str
) -> None:
    send(bridge, topic, b"1", b"2")
    member = connect()
    consumer = member.consumer(topic, group)
    with member.transaction(prepare=True) as txn:
        txn.ack(take(consumer, 1))
    if reader == "other":
        member.close()
        member = connect()
        consumer = member.consumer(topic, group)
    with consumer:
        early = consumer.poll(timeout=3)  # on some brokers what is behind it
        with member.transaction() as following:
            following.ack(early)
        assert values(early) in ([], [b"2"])
        outcome = (bridge.commit if decision == "commit" else bridge.abort)(str(txn.token))
        assert outcome is (Outcome.COMMITTED if decision == "commit" else Outcome.ABORTED)
        left = [b"1", b"2"][decision == "commit" : 1 if early else 2]
        if left:
            assert values(take(consumer, len(left))) == left
        assert values(consumer.poll(timeout=1)) == []


@needs(Capability.STATUS_LOOKUP, Capability.ATOMIC_ACK)
@pytest.mark.parametrize("happened", [True, False], ids=["committed", "aborted"])
def test_after_a_lost_answer_a_consumer_goes_on_where_the_truth_is(
    bridge: Bridge, topic: str, group: str, happened: bool
) -> None:
    send(bridge, topic, b"1", b"2")
    with bridge.consumer(topic, group) as consumer:
        with next_commit(bridge, Outcome.UNKNOWN, happened=happened), pytest.raises(OutcomeUnknown):
            ack(bridge, take(consumer, 1))
        assert values(take(consumer, 1)) == [b"2" if happened else b"1"]


def test_an_acknowledgement_covers_all_of_a_batch(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    topic = new_topic(partitions=3)
    with bridge.transaction() as txn:
        for number in range(9):
            txn.send(topic, b"%d" % number, key=b"%d" % number)
    with bridge.consumer(topic, group) as consumer:
        ack(bridge, take(consumer, 9))
    markers = mark(bridge, topic)
    with bridge.consumer(topic, group) as consumer:
        assert up_to(consumer, markers) == []


def test_acknowledging_up_to_a_message_covers_those_before_it(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2", b"3", b"4")
    with bridge.consumer(topic, group) as consumer:
        with bridge.transaction() as txn:
            txn.ack_up_to(take(consumer, 4)[2])
    assert next_of(bridge, topic, group) == b"4"


@proves(Capability.INDIVIDUAL_ACK)
def test_one_message_is_acknowledged_and_its_neighbours_come_again(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2", b"3")
    with bridge.consumer(topic, group) as consumer:
        ack(bridge, take(consumer, 3)[1])
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 2)) == [b"1", b"3"]


@proves(Capability.INDIVIDUAL_ACK)
def test_messages_are_acknowledged_in_any_order(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, *[b"%d" % number for number in range(6)])
    with bridge.consumer(topic, group) as consumer:
        messages = take(consumer, 6)
        for number in (4, 1, 5, 0, 2, 3):
            ack(bridge, messages[number])
    markers = mark(bridge, topic)
    with bridge.consumer(topic, group) as consumer:
        assert up_to(consumer, markers) == []


def test_acknowledging_twice_is_refused(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1")
    with bridge.consumer(topic, group) as consumer:
        (message,) = take(consumer, 1)
        with bridge.transaction() as txn:
            txn.ack(message)
            with pytest.raises(InvalidState, match="already"):
                txn.ack(message)
        with bridge.transaction() as txn:
            with pytest.raises(InvalidState, match="already"):
                txn.ack(message)
        assert up_to(consumer, mark(bridge, topic)) == []


def test_acknowledging_what_was_read_without_a_group_is_refused(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"1")
    (message,) = seen(bridge, topic)
    with bridge.transaction() as txn:
        with pytest.raises(InvalidState, match="group"):
            txn.ack(message)


def test_acknowledging_through_another_bridge_is_refused(
    connect: Connect, bridge: Bridge, topic: str, group: str
) -> None:
    send(bridge, topic, b"1")
    with bridge.consumer(topic, group) as consumer:
        (message,) = take(consumer, 1)
        with connect().transaction() as txn:
            with pytest.raises(InvalidState, match="another bridge"):
                txn.ack(message)
        assert up_to(consumer, mark(bridge, topic)) == []


@proves(Capability.CONFLICT)
@needs(Capability.ATOMIC_ACK)
@pytest.mark.parametrize("moment", ["transaction.begin/before", "ack/before", "commit/before"])
def test_a_member_that_was_replaced_while_it_slept_commits_nothing(
    run: RunChild, txnbridge_url: str, bridge: Bridge, new_topic: NewTopic, group: str, moment: str
) -> None:
    source, target = new_topic(), new_topic()
    send(bridge, source, b"1")
    sleeper = run(programs.consume_and_commit, txnbridge_url, source, group, target, pause=moment)
    sleeper.stopped()
    assert run(programs.consume_and_commit, txnbridge_url, source, group, target).result() == "committed"
    sleeper.resume()
    assert sleeper.result() == "Conflict"
    assert values(seen(bridge, target)) == [b"1"]


# --- processors -----------------------------------------------------------------------------------------------------


@proves(Capability.ATOMIC_ACK)
def test_a_processor_passes_every_message_on_once(connect: Connect, new_topic: NewTopic, group: str) -> None:
    source, target = new_topic(partitions=3), new_topic()
    bridge = connect()
    for number in range(0, 40, 20):
        with bridge.transaction() as txn:
            for each in range(number, number + 20):
                txn.send(source, b"%d" % each, partition=each % 3)
        processor = bridge.processor(source, group=group, each=lambda m, txn: txn.send(target, m.value), max_wait=0)
        processor.run(until_idle=True)
    assert sorted(m.value for m in seen(bridge, target)) == sorted(b"%d" % number for number in range(40))


@proves(Capability.ATOMIC_ACK)
def test_a_processor_sets_poison_aside_with_its_reason(bridge: Bridge, new_topic: NewTopic, group: str) -> None:
    source, target, dead = new_topic(), new_topic(), new_topic()
    send(bridge, source, b"1", b"bad", b"2")

    def each(message: Message, txn: Transaction) -> None:
        if message.value == b"bad":
            raise Poison("it is bad")
        txn.send(target, message.value)

    bridge.processor(source, group=group, each=each, dead_letter=dead, max_wait=0).run(until_idle=True)
    assert values(seen(bridge, target)) == [b"1", b"2"]
    (letter,) = seen(bridge, dead)
    assert letter.value == b"bad"
    assert "it is bad" in letter.headers.values()


# --- members of a group ---------------------------------------------------------------------------------------------


def test_members_share_the_partitions_and_take_over_from_those_who_leave(
    connect: Connect, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=4)
    everything = [(topic, number) for number in range(4)]
    one, two = (connect().consumer(topic, group) for _ in range(2))

    def shared() -> bool:
        for member in (one, two):
            member.poll(timeout=0.05)
        return bool(one.assignment and two.assignment) and sorted(one.assignment + two.assignment) == everything

    eventually(shared, "two members share four partitions, each with one of them")
    one.close()
    eventually(lambda: two.poll(timeout=0.05) or two.assignment == everything, "the one that stays has all")
    two.close()


@needs(Capability.CHOOSE_PARTITION)
def test_a_message_is_processed_once_while_members_come_and_go(
    connect: Connect, bridge: Bridge, new_topic: NewTopic, group: str
) -> None:
    source, target = new_topic(partitions=4), new_topic()
    expected = sorted(b"%d" % number for number in range(80))
    with bridge.transaction() as txn:
        for number in range(80):
            txn.send(source, b"%d" % number, partition=number % 4)
    staying = connect()
    with staying.consumer(source, group) as member:
        for _ in range(3):
            visiting = connect()
            with visiting.consumer(source, group) as visitor:
                for each, consumer in [(staying, member), (visiting, visitor)] * 3:
                    _pass_on(each, consumer, target)

        def all_done() -> bool:
            _pass_on(staying, member, target)
            return len(member.assignment) == 4 and not any(member.lag().values())

        eventually(all_done, "everything is processed")
    assert sorted(m.value for m in seen(bridge, target)) == expected


def _pass_on(bridge: Bridge, consumer: Consumer, target: str) -> None:
    batch = consumer.poll(7, timeout=0.1)
    if batch:
        # During a rebalance another member may get the partition. Then its messages are delivered again.
        with suppress(Conflict), bridge.transaction() as txn:
            for message in batch:
                txn.send(target, message.value)
            txn.ack(batch)


@proves(Capability.SHARE_MESSAGE)
def test_members_share_one_partition_message_by_message(connect: Connect, topic: str, group: str) -> None:
    one, two = connect(), connect()
    for value in (b"1", b"2"):  # in separate transactions: some brokers deliver a batch as one unit
        send(one, topic, value)
    with one.consumer(topic, group, sharing="message") as first, two.consumer(topic, group, sharing="message") as other:
        (mine,), (theirs,) = take(first, 1), take(other, 1)
        assert {mine.value, theirs.value} == {b"1", b"2"}
        for bridge, message in ((two, theirs), (one, mine)):
            ack(bridge, message)
        markers = mark(one, topic)
        assert up_to(first, markers) == []


@proves(Capability.SHARE_MESSAGE)
@needs(Capability.REDELIVERY)
def test_a_message_that_one_member_gives_back_goes_to_another(connect: Connect, topic: str, group: str) -> None:
    one, two = connect(), connect()
    send(one, topic, b"1")
    with one.consumer(topic, group, sharing="message") as first, two.consumer(topic, group, sharing="message") as other:
        (message,) = take(first, 1)
        first.nack(message)
        (again,) = take(other, 1)
        assert (again.value, again.deliveries > message.deliveries) == (b"1", True)


@proves(Capability.SHARE_KEY)
def test_members_share_one_partition_key_by_key(connect: Connect, topic: str, group: str) -> None:
    one, two = connect(), connect()
    keys = [b"%d" % number for number in range(20)]
    with one.consumer(topic, group, sharing="key") as first, two.consumer(topic, group, sharing="key") as other:
        with one.transaction() as txn:
            for _ in range(2):
                txn.send_many(topic, [(b"1", key) for key in keys])
        members_of: dict[object, set[int]] = {}
        count = 0
        while count < 40:
            for number, consumer in enumerate((first, other)):
                batch = consumer.poll(timeout=0.2)
                count += len(batch)
                for message in batch:
                    members_of.setdefault(message.key, set()).add(number)
    assert {len(members) for members in members_of.values()} == {1}
    assert {number for members in members_of.values() for number in members} == {0, 1}


# --- redelivery and seeks -------------------------------------------------------------------------------------------


@proves(Capability.REDELIVERY)
def test_a_message_given_back_comes_again(bridge: Bridge, topic: str, group: str) -> None:
    for value in (b"1", b"2"):  # in separate transactions: some brokers deliver a batch as one unit
        send(bridge, topic, value)
    with bridge.consumer(topic, group) as consumer:
        batch = take(consumer, 2)
        ack(bridge, batch[0])
        with pytest.raises(InvalidState):  # of the first one; the other one is given back all the same
            consumer.nack(batch)
        (again,) = take(consumer, 1)
        assert (again.value, again.deliveries > batch[1].deliveries) == (b"2", True)
        ack(bridge, again)


@needs(Capability.REDELIVERY, Capability.INDIVIDUAL_ACK)
def test_a_message_given_back_comes_again_behind_a_later_abort(bridge: Bridge, topic: str, group: str) -> None:
    for value in (b"1", b"2"):  # in separate transactions: some brokers deliver a batch as one unit
        send(bridge, topic, value)
    with bridge.consumer(topic, group) as consumer:
        first, second = take(consumer, 2)
        consumer.nack(first)
        with bridge.transaction() as txn:
            txn.ack(second)
            txn.abort()
        poll_until(consumer, lambda messages: {*values(messages)} == {b"1", b"2"}, "both come again")


@proves(Capability.REPLAY)
def test_reading_goes_on_from_an_earlier_position(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"1", b"2", b"3")
    with bridge.consumer(topic) as consumer:
        messages = take(consumer, 2)
        positions = consumer.positions()
        take(consumer, 1)
        consumer.seek({(topic, 0): messages[1].position})
        assert values(take(consumer, 2)) == [b"2", b"3"]
    with bridge.consumer(topic) as another:
        another.seek(positions)
        assert values(take(another, 1)) == [b"3"]


@proves(Capability.REPLAY)
def test_a_message_that_a_group_acknowledged_is_not_read_again_by_seeking(
    bridge: Bridge, topic: str, group: str
) -> None:
    send(bridge, topic, b"1", b"2", b"3")
    with bridge.consumer(topic, group) as consumer:
        messages = take(consumer, 3)
        ack(bridge, messages[0])
        consumer.seek({(topic, 0): messages[0].position})
        assert values(take(consumer, 2)) == [b"2", b"3"]


@proves(Capability.START_BY_TIME, Capability.REPLAY)
@needs(Capability.TIMESTAMPS)
def test_reading_goes_on_from_a_point_in_time(bridge: Bridge, topic: str, group: str) -> None:
    with bridge.transaction() as txn:
        for number in (1, 2, 3):
            txn.send(topic, b"%d" % number, timestamp=1_600_000_000_000 + number)
    for name in (None, group):
        with bridge.consumer(topic, name) as consumer:
            take(consumer, 3)
            consumer.seek(1_600_000_000_002)
            assert values(take(consumer, 2)) == [b"2", b"3"]


def test_a_paused_partition_delivers_nothing_until_it_is_resumed(bridge: Bridge, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    with bridge.consumer(topic) as consumer:
        eventually(lambda: consumer.poll(timeout=0.05) or len(consumer.assignment) == 2, "it has both partitions")
        consumer.pause([(topic, 0)])
        for number in range(3):
            with bridge.transaction() as txn:
                for partition in range(2):
                    txn.send(topic, b"%d" % number, partition=partition)
            assert [(m.partition, m.value) for m in take(consumer, 1)] == [(1, b"%d" % number)]
        consumer.resume([(topic, 0)])
        assert [(m.partition, m.value) for m in take(consumer, 3)] == [(0, b"0"), (0, b"1"), (0, b"2")]


def test_lag_is_what_a_group_has_before_it(bridge: Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2")
    with bridge.consumer(topic, group) as consumer:
        messages = take(consumer, 2)
        before = consumer.lag()[topic, 0]
        assert before > 0
        ack(bridge, messages[0])
        eventually(lambda: before > consumer.lag()[topic, 0] > 0, "one is left")
        ack(bridge, messages[1])
        eventually(lambda: consumer.lag()[topic, 0] == 0, "nothing is left")


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE, Capability.ISOLATION)
def test_an_aborted_message_before_an_undecided_one_is_no_lag(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"1")
    with bridge.transaction(prepare=True) as aborted:
        aborted.send(topic, b"aborted")
    with bridge.transaction(prepare=True) as undecided:
        undecided.send(topic, b"undecided")
    with bridge.consumer(topic) as consumer:
        assert values(take(consumer, 1)) == [b"1"]
        _, held = bridge.admin.bounds(topic)[topic, 0]
        bridge.abort(str(aborted.token))
        eventually(lambda: bridge.admin.bounds(topic)[topic, 0][1] > held, "readers may come further")
        assert poll_until(consumer, lambda _: not consumer.lag()[topic, 0], "nothing is left to read") == []
    bridge.abort(str(undecided.token))
