"""Tests of the client with a real broker: each request does what the client's docstring says."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from txnbridge_conformance.brokers import RocketMQ
from txnbridge_rocketmq.client import administration, groups
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError
from txnbridge_rocketmq.client.groups import Membership, Queue
from txnbridge_rocketmq.client.protocol import read_requests, send_requests
from txnbridge_rocketmq.client.protocol.codes import HALF_TOPIC, Property, ResponseCode
from txnbridge_rocketmq.client.protocol.read_requests import PullStatus
from txnbridge_rocketmq.client.protocol.records import unwrap
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack, HalfAddress, HalfEnd, WireMessage, end, send

from tests.rocketmq.kit import BROKER, LONG, batched, becomes_true, bodies, pairs, read_all

SHORT = 0.5
# A producer group without members, so that the check-backs of its halves get no response.
ALONE = "alone"


def new_client(broker: RocketMQ, **options) -> RemotingClient:
    return RemotingClient([broker.url.removeprefix("rocketmq://")], **options)


def put_half(client, topic, group=ALONE, immunity: int | None = None, born_time: int | None = None) -> HalfAddress:
    message = WireMessage(topic, b"half", born_time=born_time)
    stored = client.call(BROKER, send_requests.send_half(message, group, 0, immunity), LONG)
    return send_requests.half_address(topic, group, stored)


@pytest.fixture
def half(client, topic) -> Iterator[HalfAddress]:
    """Store an open half, which is ended after the test: the broker would write it again in each round."""
    half = put_half(client, topic)
    yield half
    close(client, half)


def test_a_batch_that_a_java_client_stored_as_one_is_taken_apart(client):
    topic = f"batched-{uuid.uuid4().hex}"
    client.call(BROKER, administration.create_topic(topic, 1, attributes={"queue.type": "BatchCQ"}), LONG)
    assert becomes_true(lambda: client.route(topic, LONG, fresh=True) is not None)
    inner = batched(b"one", pairs(KEYS="a")) + batched(b"two", pairs(KEYS="b"))
    request = send(WireMessage(topic, inner), ALONE, 0)
    send_batch = 320
    request = replace(request, code=send_batch, fields={**request.fields, "m": "true"})
    for _ in range(2):
        client.call(BROKER, request, LONG)
    assert becomes_true(lambda: client.call(BROKER, read_requests.max_offset(topic, 0), LONG) == 4)
    records = client.call(BROKER, read_requests.pull(topic, 0, 0, ALONE), LONG).records
    assert all(record.holds_several for record in records)
    found = [(one.queue_offset, one.payload(), one.properties["KEYS"]) for record in records for one in unwrap(record)]
    assert found == [(0, b"one", "a"), (1, b"two", "b"), (2, b"one", "a"), (3, b"two", "b")]


def test_messages_that_are_sent_together_get_offsets_of_their_own(client, topic):
    client.call(BROKER, send(WireMessage(topic, b"before"), ALONE, 0), LONG)
    messages = [WireMessage(topic, b"%d" % number, {"own": str(number)}) for number in range(40)]
    assert client.call(BROKER, send_requests.send_together(messages, ALONE, 0), LONG) == 1
    found = read_all(client, topic)[1:]
    assert [(each.queue_offset, each.body) for each in found] == [(1 + number, b"%d" % number) for number in range(40)]
    assert [each.properties["own"] for each in found] == [str(number) for number in range(40)]


def test_queues_have_bounds_and_are_searched_by_time(client, topic):
    assert client.call(BROKER, read_requests.max_offset(topic, 0), LONG) == 0
    for number in range(3):
        client.call(BROKER, send(WireMessage(topic, b"%d" % number), ALONE, 0), LONG)
    assert client.call(BROKER, read_requests.min_offset(topic, 0), LONG) == 0
    assert becomes_true(lambda: client.call(BROKER, read_requests.max_offset(topic, 0), LONG) == 3)  # a moment later
    at = [record.stored_time for record in read_all(client, topic)]
    assert client.call(BROKER, read_requests.offset_at(topic, 0, at[0] - 1), LONG) == 0
    assert client.call(BROKER, read_requests.offset_at(topic, 0, at[2]), LONG) <= 2
    assert client.call(BROKER, read_requests.offset_at(topic, 0, at[2] + 60_000), LONG) == 4  # after the marker message


def test_a_pull_beyond_the_end_says_where_to_go_on(client, topic):
    client.call(BROKER, send(WireMessage(topic, b"x"), ALONE, 0), LONG)
    assert becomes_true(lambda: client.call(BROKER, read_requests.max_offset(topic, 0), LONG) == 1)  # a moment later
    at_end = client.call(BROKER, read_requests.pull(topic, 0, 1, ALONE), LONG)
    assert (at_end.status, at_end.next_offset, at_end.records) == (PullStatus.NOTHING_NEW, 1, [])
    beyond = client.call(BROKER, read_requests.pull(topic, 0, 99, ALONE), LONG)
    assert (beyond.status, beyond.next_offset, beyond.max_offset) == (PullStatus.OUT_OF_RANGE, 1, 1)


def test_a_queue_tells_where_a_message_lies_in_the_commit_log(client, topic):
    def told(offset):
        return client.call(BROKER, read_requests.log_offset_at(topic, 0, offset), LONG)

    assert told(0) is None  # the queue never had a message
    for number in range(3):
        client.call(BROKER, send(WireMessage(topic, b"%d" % number), ALONE, 0), LONG)
    records = read_all(client, topic)
    assert [told(each.queue_offset) for each in records] == [each.log_offset for each in records]
    assert told(99) is None


def test_a_pull_that_waits_is_answered_when_a_message_comes(client, topic):
    waiting = client.submit(BROKER, read_requests.pull(topic, 0, 0, ALONE, wait=15), LONG)
    client.call(BROKER, send(WireMessage(topic, b"x"), ALONE, 0), LONG)
    pulled = waiting.result()
    while pulled.status is PullStatus.NOTHING_NEW:  # the message was stored, and is not readable yet
        pulled = client.call(BROKER, read_requests.pull(topic, 0, 0, ALONE, wait=15), LONG)
    assert [record.body for record in pulled.records] == [b"x"]


def test_a_message_is_found_by_its_key(client, topic):
    stored = client.call(BROKER, send(WireMessage(topic, b"x"), ALONE, 0), LONG)

    def found(request) -> list[bytes]:
        return [record.body for record in client.call(BROKER, request, LONG)]

    # The index is written a moment after the message.
    assert becomes_true(lambda: found(read_requests.by_unique_key(topic, stored.unique_key)) == [b"x"])
    assert found(read_requests.by_unique_key(topic, "no such key")) == []
    assert found(read_requests.by_unique_key(HALF_TOPIC, stored.unique_key)) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"topic": "no-such-topic"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queue": 77}, ResponseCode.INVALID_PARAMETER),
        ({"body": bytes((4 << 20) + 1)}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"own": "x" * 33_000}}, ResponseCode.MESSAGE_ILLEGAL),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) else "",
)
def test_a_message_that_the_broker_does_not_take_is_refused_without_effect(client, topic, change, code):
    options = {"topic": topic, "queue": 0, "body": b"x", "properties": {}, **change}
    message = WireMessage(options["topic"], options["body"], options["properties"])
    with pytest.raises(ErrorResponse) as caught:
        client.call(BROKER, send(message, ALONE, options["queue"]), LONG)
    assert caught.value.code == code
    assert not caught.value.may_have_had_effect
    assert bodies(client, topic) == []


@pytest.mark.parametrize(
    ("ends", "copies"),
    [("CC", 2), ("CA", 1), ("AC", 1), ("AA", 0)],
    ids=["commit twice", "abort after commit", "commit after abort", "abort twice"],
)
def test_the_broker_remembers_no_outcome(client, topic, ends, copies):
    """A process that ends a half twice must know its outcome from elsewhere."""
    half = put_half(client, topic)
    for how in ends:
        client.call(BROKER, end(half, HalfEnd.COMMIT if how == "C" else HalfEnd.ABORT), LONG)
    assert bodies(client, topic) == [b"half"] * copies


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group": "other"}, "producer group wrong"),
        ({"queue_offset": 10**6}, "state table offset wrong"),
        ({"log_offset": 10**12}, "Find prepared transaction message failed"),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) else "",
)
def test_a_half_is_ended_only_by_its_true_address(client, topic, half, change, words):
    with pytest.raises(ErrorResponse, match=words):
        client.call(BROKER, end(replace(half, **change), HalfEnd.COMMIT), LONG)
    assert bodies(client, topic) == []


def test_an_end_behind_the_immunity_is_refused_unless_the_broker_had_asked(client, topic):
    half = put_half(client, topic, immunity=2)
    assert becomes_true(lambda: is_refused(client, half))
    with pytest.raises(ErrorResponse) as caught:
        client.call(BROKER, end(half, HalfEnd.COMMIT), LONG)
    assert caught.value.code == ResponseCode.ILLEGAL_OPERATION
    assert not caught.value.may_have_had_effect
    assert bodies(client, topic) == []
    client.call(BROKER, end(half, HalfEnd.COMMIT, from_check=True), LONG)
    assert bodies(client, topic) == [b"half"]
    close(client, half)


def is_refused(client: RemotingClient, half: HalfAddress) -> bool:
    """Return whether the broker refuses an END because the immunity time is over. The END names another group."""
    try:
        client.call(BROKER, end(replace(half, group="other"), HalfEnd.ABORT), LONG)
    except ErrorResponse as error:
        return error.code == ResponseCode.ILLEGAL_OPERATION
    raise AssertionError("the wrong group was taken")


def close(client: RemotingClient, half: HalfAddress) -> None:
    """End every copy of a half that the broker may have made."""
    for copy in client.call(BROKER, read_requests.by_unique_key(HALF_TOPIC, half.unique_key), LONG):
        newest = replace(half, queue_offset=copy.queue_offset, log_offset=copy.log_offset)
        client.call(BROKER, end(newest, HalfEnd.ABORT, from_check=True), LONG)


class Asked:
    """Records check-backs, and answers them if the test gives an answer."""

    def __init__(self) -> None:
        self.checks: list[CheckBack] = []
        self.answer: Callable[[CheckBack], None] | None = None

    def __call__(self, checks: Sequence[CheckBack]) -> None:
        for check in checks:
            self.checks.append(check)
            if self.answer is not None:
                self.answer(check)

    def about(self, half: HalfAddress) -> list[CheckBack]:
        return [check for check in self.checks if check.half.unique_key == half.unique_key]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def shop(rocketmq_broker, asked) -> Iterator[RemotingClient]:
    """Return a client that is a member of the producer group "shop"."""
    with new_client(rocketmq_broker, on_checks=asked) as client:
        client.join(Membership(frozenset({"shop"})), LONG)
        yield client


def test_the_broker_asks_a_member_of_the_group_and_takes_its_answer(client, shop, asked, topic):
    half = put_half(client, topic, group="shop")
    assert becomes_true(lambda: len(asked.about(half)) >= 2)
    first, second = asked.about(half)[:2]
    assert [check.record.properties[Property.CHECKS] for check in (first, second)] == ["1", "2"]
    assert (first.half.topic, first.half.group, first.broker) == (topic, "shop", BROKER)
    assert first.record.payload() == b"half"
    # Each round has written another copy, which the request must name.
    assert half.log_offset < first.half.log_offset < second.half.log_offset
    asked.answer = lambda check: client.call(BROKER, end(check.half, HalfEnd.COMMIT, from_check=True), LONG)
    assert becomes_true(lambda: bodies(client, topic) == [b"half"])


@pytest.mark.parametrize("ahead", [-1, 0, 4], ids=lambda ahead: f"the sender's clock is {ahead} s ahead")
def test_the_broker_sends_no_check_back_as_long_as_it_takes_a_direct_end(client, shop, asked, topic, ahead):
    half = put_half(client, topic, "shop", immunity=2, born_time=int((time.time() + ahead) * 1000))
    times = 0
    while True:
        asked_before = len(asked.about(half))
        if is_refused(client, half):
            break
        assert asked_before == 0
        times += 1
    assert times > 10
    assert becomes_true(lambda: len(asked.about(half)) > 0)
    close(client, half)


def test_copies_of_a_half_are_found_by_its_key(client, shop, asked, topic):
    half = put_half(client, topic, group="shop")
    assert becomes_true(lambda: len(asked.about(half)) >= 2)
    known = {half.log_offset, *(check.half.log_offset for check in asked.about(half)[:2])}

    def found() -> list[int]:
        copies = client.call(BROKER, read_requests.by_unique_key(HALF_TOPIC, half.unique_key), LONG)
        return [copy.log_offset for copy in copies]

    assert becomes_true(lambda: known <= set(found()))  # the index is written a moment after the copy
    assert found() == sorted(found())
    asked.answer = lambda check: client.call(BROKER, end(check.half, HalfEnd.ABORT, from_check=True), LONG)
    answered = len(asked.about(half))
    assert becomes_true(lambda: len(asked.about(half)) > answered)
    assert bodies(client, topic) == []


def test_a_broker_that_was_killed_asks_again_when_it_is_back(rocketmq_broker, client, shop, asked, topic):
    half = put_half(client, topic, group="shop")
    rocketmq_broker.restart()
    asked.answer = lambda check: shop.call(BROKER, end(check.half, HalfEnd.ABORT, from_check=True), LONG)
    assert becomes_true(lambda: len(asked.about(half)) >= 1)


def members(client):
    return [member.client_id for member in client.call(BROKER, administration.producers("pair"), LONG)]


def test_when_a_member_leaves_the_others_are_asked(rocketmq_broker, client, topic):
    stays, leaves = Asked(), Asked()
    with new_client(rocketmq_broker, on_checks=stays) as one, new_client(rocketmq_broker, on_checks=leaves) as other:
        for member in (one, other):
            member.join(Membership(frozenset({"pair"})), LONG)
        assert members(client) == sorted([one.client_id, other.client_id])
        other.close()
        assert members(client) == [one.client_id]
        halves = [put_half(client, topic, group="pair") for _ in range(4)]
        stays.answer = lambda check: one.call(BROKER, end(check.half, HalfEnd.ABORT, from_check=True), LONG)
        assert becomes_true(lambda: all(stays.about(half) for half in halves))
        assert leaves.checks == []
    assert members(client) == []


def test_a_group_remembers_where_it_is_the_last_word_counts(client, topic, group):
    assert client.call(BROKER, groups.committed_offset(group, topic, 0), LONG) is None
    for offset in (5, 1):
        client.call(BROKER, groups.commit_offset(group, topic, 0, offset), LONG)
        assert client.call(BROKER, groups.committed_offset(group, topic, 0), LONG) == offset


def test_members_of_a_group_are_listed_and_told_of_each_other(rocketmq_broker, client, topic, group):
    membership = Membership(consumers={group: frozenset({topic})})
    told: list[str] = []
    assert client.call(BROKER, groups.members(group), LONG) == []
    with new_client(rocketmq_broker, on_members=told.append) as one, new_client(rocketmq_broker) as other:
        one.join(membership, LONG)
        assert client.call(BROKER, groups.members(group), LONG) == [one.client_id]
        before = len(told)
        other.join(membership, LONG)
        assert client.call(BROKER, groups.members(group), LONG) == sorted([one.client_id, other.client_id])
        assert becomes_true(lambda: len(told) > before)
        before = len(told)
        other.close()
        assert becomes_true(lambda: len(told) > before)
        assert set(told) == {group}
        assert client.call(BROKER, groups.members(group), LONG) == [one.client_id]


def test_a_queue_is_locked_for_one_member_at_a_time(client, topic, group):
    wanted = [Queue(topic, BROKER, 0)]
    assert client.call(BROKER, groups.lock(group, "a", wanted), LONG) == set(wanted)
    assert client.call(BROKER, groups.lock(group, "b", wanted), LONG) == set()
    assert client.call(BROKER, groups.lock(group, "a", wanted), LONG) == set(wanted)
    client.call(BROKER, groups.unlock(group, "a", wanted), LONG)
    assert client.call(BROKER, groups.lock(group, "b", wanted), LONG) == set(wanted)


def test_calls_go_on_when_a_killed_broker_is_back_and_what_is_said_of_lost_ones_is_true(rocketmq_broker, client, topic):
    stop = threading.Event()
    stored: list[bytes] = []
    never_stored: list[bytes] = []

    def keep_sending(thread: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            body = b"%d-%d" % (thread, number)
            try:
                client.call(BROKER, send(WireMessage(topic, body), ALONE, 0), SHORT)
            except RemotingError as error:
                if not error.may_have_had_effect:
                    never_stored.append(body)
                stop.wait(0.02)
            else:
                stored.append(body)

    threads = [threading.Thread(target=keep_sending, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert becomes_true(lambda: len(stored) > 10)
        rocketmq_broker.restart()
        before = len(stored)
        assert becomes_true(lambda: len(stored) > before + 10)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    found = bodies(client, topic)
    assert len(found) == len(set(found))
    assert set(stored) <= set(found)
    assert never_stored
    assert set(never_stored) & set(found) == set()
