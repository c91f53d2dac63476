"""Tests of groups on a live broker: where they begin, their positions, acknowledgements, and assignment."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import Mock

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import take
from txnbridge_rocketmq.client import groups
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import Unreachable
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand
from txnbridge_rocketmq.decision_log import RocketMQDecisionLog
from txnbridge_rocketmq.read import reader, start_positions
from txnbridge_rocketmq.read.rebalance import QueueAssignment, _SleepDetector, assign

from tests.core.reading_kit import SOON, values
from tests.failing import EACH, fail_call, raising
from tests.in_time import paused, wait_until, within
from tests.rocketmq.kit import BROKER, LONG, becomes_true, settings_for
from tests.rocketmq.reading_kit import Member, connect_to, member, new_topic, publish, take_all, unique
from txnbridge import Bridge, Outcome
from txnbridge.errors import Conflict, EvidenceLost, InvalidOption, InvalidState, OutcomeUnknown, PositionLost
from txnbridge.spi import Deadline, Subscription
from txnbridge.testing import Child, tell


@pytest.fixture(scope="module")
def bridge(rocketmq_broker: brokers.RocketMQ) -> Iterator[Bridge]:
    with connect_to(rocketmq_broker.url) as bridge:
        yield bridge


@pytest.fixture
def join(bridge: Bridge) -> Iterator[Callable[..., Member]]:
    """Return a function that opens members, which are closed after the test."""
    with ExitStack() as stack:
        yield lambda *given, **how: stack.enter_context(member(how.pop("bridge", bridge), *given, **how))


Join = Callable[..., Member]


def stands(reader: Member) -> Any:
    """Return the group's offsets in the decision log."""
    return reader.group.positions(Deadline(SOON))[0]


def test_where_a_group_begins_is_decided_before_a_message_is_handed_out(join: Join, client: RemotingClient, group: str):
    topic = new_topic(client, 2)
    publish(client, topic, b"old")
    reader = join(topic, group, start="latest")
    reader.has(2)
    assert stands(reader) == {(topic, 0): 1, (topic, 1): 0}


def test_one_of_two_members_that_begin_at_once_decides_where_the_group_starts(join, client, group, topic):
    publish(client, topic, b"0")
    readers = [join(topic, group, start=start) for start in ("earliest", "latest")]
    both = [reader.group for reader in readers]
    queues = readers[0].reader._queues
    wishes = {(topic, 0): None}
    found: list[Any] = []
    barrier = threading.Barrier(2)

    def settle(starts: Any) -> None:
        barrier.wait()
        known = starts.resolve(wishes, queues, Deadline(SOON)).known
        found.append({partition: place.next for partition, place in known.items()})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(settle, both))
    assert found[0] == found[1] == stands(readers[0])


def test_a_partition_that_was_added_since_a_group_began_is_read_from_its_beginning(join, bridge, client, group, topic):
    reader = join(topic, group, start="latest")
    reader.has(1)
    bridge.admin.grow_topic(topic, 2)
    publish(client, topic, b"there already", queue=1)
    assert values(reader.take(1)) == [b"there already"]


def test_a_group_skips_what_a_seek_passes_over(join: Join, client: RemotingClient, group: str, topic: str) -> None:
    publish(client, topic, b"0", b"1", b"2", b"3")
    reader = join(topic, group)
    reader.take(1)
    reader.seek({(topic, 0): (2,)})
    reader.acknowledge(reader.take(1))
    assert stands(reader) == {(topic, 0): 3}


def test_a_group_that_only_the_broker_knows_does_not_begin_again(join: Join, client: RemotingClient, group: str):
    topic = new_topic(client, 2)
    publish(client, topic, b"0", b"1")
    join(topic, group).has(2)
    other = unique("other")
    join(new_topic(client), other).has(1)  # so that the broker has a group of that name
    client.call(BROKER, groups.commit_offset(other, topic, 0, 1), LONG)
    reader = join(topic, other)
    with pytest.raises(PositionLost, match=r"another application.*seek"):
        reader.until(lambda: False)
    reader.seek({(topic, 0): (1,)})
    assert values(reader.take(1)) == [b"1"]
    found = stands(reader)
    assert {number: found[topic, number] for number in range(2)} == {0: 1, 1: 0}


def test_a_group_whose_log_is_gone_does_not_begin_again(join, group, monkeypatch, topic):
    reader = join(topic, group)
    fail_call(monkeypatch, reader.group._ledger, "positions", EvidenceLost("it was trimmed"), EACH)
    with pytest.raises(PositionLost, match="trimmed"):
        reader.until(lambda: False)


def test_a_group_that_cannot_go_on_behind_its_last_transaction_says_so(join, client, group, monkeypatch, topic):
    """Halves that are gone must be an error: a reader that returns no message for ever would hide it."""
    publish(client, topic, b"0", b"1")
    reader = join(topic, group)
    reader.acknowledge(reader.take(2)[:1])
    reader.close()
    with monkeypatch.context() as patch:
        patch.setattr(start_positions, "publish_decided", raising(EvidenceLost("its halves are gone")))
        reader = join(topic, group)
        with pytest.raises(EvidenceLost, match="halves are gone"):
            reader.until(lambda: False)
    assert values(reader.take(1)) == [b"1"]


def test_the_broker_is_told_where_a_group_stands(join: Join, client: RemotingClient, group: str, topic: str) -> None:
    publish(client, topic, b"0", b"1")
    reader = join(topic, group)
    reader.acknowledge(reader.take(2))
    reader.close()
    asked = groups.committed_offset(group, topic, 0)
    assert becomes_true(lambda: client.call(BROKER, asked, LONG) == 2)


@pytest.mark.offline
def test_no_call_waits_beyond_its_deadline_to_tell_an_unreachable_broker_where_a_group_stands(monkeypatch):
    queues, waits = [Queue("t", "away", number) for number in range(3)], list[float]()
    places = frozenset(("t", queue.queue) for queue in queues)

    def reach_nobody(broker: str, request: Any, timeout: float) -> None:
        if request.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            waits.append(timeout)
            time.sleep(timeout)
        raise Unreachable("away")

    rebalancer = Mock(**{"refresh.return_value": QueueAssignment(places, places), "due_in.return_value": 0.0})
    rebalancer.client.submit = reach_nobody
    monkeypatch.setattr(reader, "Rebalancer", lambda *_: rebalancer)
    cluster = Mock(settings=settings_for("rocketmq://x:1"))
    cluster.topics.queues.return_value = cluster.topics.existing_queues.return_value = queues
    ledger = cluster.context.ledger.return_value
    ledger.positions.return_value = dict.fromkeys(places, (5,)), (9,)
    ledger.holds.return_value, ledger.acknowledged.return_value = [], {}
    member = reader.RocketMQReader(Mock(cluster=cluster), Subscription(("t",), "g"), Mock(), Deadline(LONG))
    wait_until(lambda: not member.poll(1, Deadline(0)) and len(member.positions()) == 3)
    member.ack_context().acks(dict.fromkeys(places, ((5,),)), Deadline(0.2))
    member.close(Deadline(0.2))
    assert len(waits) == 6 and sum(waits) <= 0.4


def test_a_member_leaves_also_while_only_a_seek_tells_where_to_go_on(join: Join, client: RemotingClient, group: str):
    """A member that stayed would keep its connections, and no other member would read its partitions."""
    topic = new_topic(client, 2)
    publish(client, topic, b"0", queue=1)
    join(new_topic(client), group).has(1)  # so that the broker has a group of that name
    client.call(BROKER, groups.commit_offset(group, topic, 0, 1), LONG)
    reader = join(topic, group)
    with pytest.raises(PositionLost):
        reader.until(lambda: False)
    reader.reader.pause([(topic, 0)])
    reader.acknowledge(reader.take(1))
    reader.close()
    two = join(topic, group)
    with pytest.raises(PositionLost):
        two.until(lambda: False)
    assert len(two.positions()) == 2


def test_members_leave_in_time_while_the_broker_is_silent(join, client, rocketmq_broker, group):
    """A bridge closes its consumers one after another, so slow ones would leave no time for the last."""
    topic = new_topic(client, 4)
    publish(client, topic, b"0")
    members = [join(topic, group) for _ in range(4)]
    for each in members:
        each.has(1)
    with paused(rocketmq_broker):
        started = time.monotonic()
        for each in members:
            each.reader.close(Deadline(0))
        took = time.monotonic() - started
    assert took < len(members), "each waits for an answer"


def test_an_overtaken_member_learns_it_and_goes_on_behind(join: Join, client: RemotingClient, group: str, topic: str):
    members = one, two = join(topic, group), join(topic, group)
    for each in members:  # as if one of them had been asleep
        take_all(each.sharing)
    for each in members:
        each.has(1)
    publish(client, topic, b"0", b"1", b"2")
    late = one.take(2)
    two.acknowledge(two.take(1))
    with pytest.raises(Conflict, match="is not where these messages begin"):
        one.acks(late)
    one.seek({(topic, 0): late[0].position})  # as the core does after an abort
    again = one.take(2)
    assert values(again) == [b"1", b"2"]
    one.acknowledge(again)
    assert stands(one) == {(topic, 0): 3}


def test_an_undecided_transaction_is_not_passed_over(join: Join, client: RemotingClient, group: str, topic: str):
    publish(client, topic, b"0", b"1", b"2")
    reader = join(topic, group)
    first, rest = reader.take(1), reader.take(2)
    prepared = reader.acks(first)
    with pytest.raises(Conflict, match="undecided"):
        reader.acks(rest)
    reader.seek({(topic, 0): rest[0].position})
    assert values(reader.take(3)) == [b"0", b"1", b"2"]  # the transaction may never be committed
    reader.seek({(topic, 0): rest[0].position})
    rest = reader.take(2)
    reader.claim(prepared)
    reader.acknowledge(rest)
    assert stands(reader) == {(topic, 0): 3}


def test_several_acknowledgements_of_one_transaction_are_one(join: Join, client: RemotingClient, group: str) -> None:
    topic = new_topic(client, 2)
    publish(client, topic, b"0", b"1", b"2")
    publish(client, topic, b"a", queue=1)
    reader = join(topic, group)
    messages = sorted(reader.take(4), key=lambda message: (message.partition, message.position))
    acks = reader.acks(messages[:1])
    acks = reader.acks(messages[1:3], so_far=acks)
    acks = reader.acks(messages[3:], so_far=acks)
    reader.claim(acks)
    assert stands(reader) == {(topic, 0): 3, (topic, 1): 1}


def test_messages_of_a_partition_that_left_cannot_be_acknowledged(join: Join, client: RemotingClient, group: str):
    topic = new_topic(client, 2)
    for queue in range(2):
        publish(client, topic, b"0", queue=queue)
    one = join(topic, group)
    messages = one.take(2)
    two = join(topic, group)
    one.has(1)
    two.has(1)
    left = [message for message in messages if (message.topic, message.partition) not in one.positions()]
    with pytest.raises(Conflict, match="is no longer assigned to this reader"):
        one.acks(left)
    with pytest.raises(InvalidState, match="without a group"):
        join(topic).ack_context()


def test_a_consumer_goes_on_when_its_acknowledgement_never_came_to_the_log(
    rocketmq_broker: brokers.RocketMQ, client: RemotingClient, group: str, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    publish(client, topic, b"1", b"2")

    def values_read() -> list[object]:
        try:
            found: list[object] = values(consumer.poll(timeout=1))
        except OutcomeUnknown:
            return []
        return found

    with connect_to(rocketmq_broker.url) as bridge, bridge.consumer(topic, group) as consumer:
        (message,) = take(consumer, 1)
        with monkeypatch.context() as patched, pytest.raises(OutcomeUnknown), bridge.transaction(timeout=1) as txn:
            txn.ack(message)  # only an ack: without halves, no check-back follows
            patched.setattr(RocketMQDecisionLog, "append", raising(OutcomeUnknown("no answer")))
        assert txn.outcome is Outcome.UNKNOWN
        assert becomes_true(lambda: values_read() == [b"1", b"2"])


def test_partitions_are_shared_out_evenly_and_all_of_them() -> None:
    queues = [Queue("orders", BROKER, number) for number in range(10)]
    for count in (1, 2, 3, 7, 12):
        readers = [f"m{number:02}" for number in range(count)]
        found = assign(queues, readers)
        assert sorted(each.queue for mine in found.values() for each in mine) == list(range(10))
        sizes = [len(found.get(each, ())) for each in readers]
        assert max(sizes) - min(sizes) <= 1


def test_members_that_have_left_are_forgotten() -> None:
    class Client:
        client_id = "a"

        def submit(self, *request: Any) -> None:
            raise Unreachable("away")

    detector = _SleepDetector(cast(Any, Client()), "group")
    for each in ("b", "c", "d"):
        detector.asleep(BROKER, ["a", each])
    assert [*detector._ask_at] == ["d"]


def test_the_member_before_sleeping_ones_reads_their_queues() -> None:
    queues = [Queue("orders", BROKER, number) for number in range(4)]
    readers = ["a", "b", "c", "d"]
    awake, asleep = assign(queues, readers), assign(queues, readers, {"c", "d"})
    assert asleep["a"] == awake["a"]
    assert sorted(map(str, asleep["b"])) == sorted(map(str, awake["b"] + awake["c"] + awake["d"]))
    assert assign(queues, readers, set(readers)) == {}


def test_a_member_keeps_its_partitions_until_its_transaction_ends(join: Join, client: RemotingClient, group: str):
    topic = new_topic(client, 2)
    one = join(topic, group)
    one.has(2)
    two = join(topic, group)
    two.until(lambda: bool(two.sharing._waits))  # it has its assignment, and waits for the lock
    assert two.positions() == {}
    one.has(1)
    two.has(1)
    assert [how for how, _ in one.listener.told] == ["assigned", "assigned", "revoking"]


def test_members_of_other_topics_in_the_same_group_share_nothing(join: Join, client: RemotingClient, group: str):
    topics = new_topic(client), new_topic(client)
    one, two = (join(topic, group) for topic in topics)
    one.has(1)
    two.has(1)


def test_another_application_in_the_same_group_is_refused(rocketmq_broker, join, group, topic):
    join(topic, group).has(1)
    with connect_to(rocketmq_broker.url, application="another") as bridge:
        with pytest.raises(InvalidOption, match="application="):
            join(topic, group, bridge=bridge).until(lambda: False)


def hold(url: str, topic: str, group: str) -> None:
    """Be a member with all partitions until the process is killed."""
    with connect_to(url) as bridge, member(bridge, topic, group) as reader:
        reader.until(reader.positions)
        tell(sorted(reader.positions()))
        reader.until(lambda: False, 600)


def test_a_new_member_does_not_wait_for_the_locks_of_dead_ones(rocketmq_broker, join, client, group):
    topic = new_topic(client, 2)
    with Child(hold, rocketmq_broker.url, topic, group) as other:
        assert len(other.told()) == 2
        other.kill()
    reader = join(topic, group)
    reader.has(2)
    queues = {Queue(topic, BROKER, number) for number in range(2)}
    assert client.call(BROKER, groups.lock(group, reader.sharing.client.client_id, queues), LONG) == set()


def test_the_partitions_of_a_killed_member_are_taken_over_at_once(rocketmq_broker, client, group, with_timing):
    with_timing(lock_timeout=600.0)
    topic = new_topic(client, 2)
    with connect_to(rocketmq_broker.url) as bridge, member(bridge, topic, group) as reader:
        reader.has(2)
        with Child(hold, rocketmq_broker.url, topic, group) as other:
            reader.has(1)
            assert len(other.told()) == 1
            other.kill()
            with within(0):  # the lock of the dead member would last a minute; `reader` has unlocked it
                reader.has(2)


def pass_one_on(url: str, source: str, target: str, group: str, application: str) -> None:
    with connect_to(url, application=application) as bridge, bridge.consumer(source, group) as consumer:
        message = next(iter(consumer))
        with bridge.transaction() as txn:
            txn.send(target, message.value)
            txn.ack(message)


def test_a_killed_members_decision_is_published_before_the_next_member_reads_on(rocketmq_broker, join, client, group):
    source, target = new_topic(client), new_topic(client)
    publish(client, source, b"1", b"2")
    url, application = rocketmq_broker.url, unique("own")  # an application of its own gets no other tests' check-backs
    with Child(pass_one_on, url, source, target, group, application, kill="step:publish/before") as child:
        child.stopped()
    with connect_to(url, application=application) as bridge, member(bridge, source, group) as reader:
        assert values(reader.take(1)) == [b"2"]
    publish(client, target, b"end")
    assert join(target).up_to(b"end") == [b"1"]


@pytest.mark.full
def test_a_lock_that_nobody_gives_up_holds_a_member_up_for_seconds_only(join: Join, client: RemotingClient, group: str):
    topic = new_topic(client, 2)
    one = join(topic, group)
    one.has(2)
    queues = [Queue(topic, BROKER, number) for number in range(2)]
    one.sharing.release(queues)
    assert becomes_true(lambda: len(client.call(BROKER, groups.lock(group, "a ghost", queues), LONG)) == 2)
    two = join(topic, group)
    two.has(1)


@pytest.mark.full
def test_the_partitions_of_a_sleeping_member_are_taken_over_and_given_back(rocketmq_broker, join, client, group):
    topic = new_topic(client, 2)
    with Child(hold, rocketmq_broker.url, topic, group) as other:
        other.told()
        one = join(topic, group)
        one.has(1)
        os.kill(other.pid, signal.SIGSTOP)
        one.has(2)  # within a minute: brokers drop silent clients after two
        os.kill(other.pid, signal.SIGCONT)
        one.has(1)


def test_only_a_member_that_is_connected_and_does_not_answer_is_asleep(join: Join, client: RemotingClient, group: str):
    reader = join(new_topic(client), group)
    for name in (reader.sharing.client.client_id, "nobody"):
        assert client.call(BROKER, groups.is_asleep(group, name), LONG) is False
    assert groups.is_asleep(group, "somebody").result(RemotingCommand(ResponseCode.CONSUME_MSG_TIMEOUT)) is True


def test_locks_of_a_member_that_is_gone_are_given_up_for_it(join: Join, client: RemotingClient, group: str) -> None:
    topic = new_topic(client, 2)
    queues = {Queue(topic, BROKER, number) for number in range(2)}
    one, two = join(topic, group), join(topic, group)
    one.has(1)
    two.has(1)
    name = two.sharing.client.client_id
    two.sharing.client.close()  # as if it had died: it unlocks nothing
    one.has(2)
    assert client.call(BROKER, groups.lock(group, one.sharing.client.client_id, queues), LONG) == queues
    assert client.call(BROKER, groups.lock(group, name, queues), LONG) == set()
