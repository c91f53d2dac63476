"""Tests of reading on a live broker without a group: order, real duplicates, and other clients' messages."""

import dataclasses
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from txnbridge_conformance import brokers
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.client.protocol import read_requests, send_requests

from tests.core.reading_kit import SOON, values
from tests.rocketmq.kit import BROKER, LONG, becomes_true, read_all
from tests.rocketmq.reading_kit import commit, connect_to, member, new_topic, publish, store_half, unique
from txnbridge import Bridge
from txnbridge.errors import AccessDenied, InvalidState
from txnbridge.spi import Deadline

NOW = int(time.time() * 1000)


@pytest.fixture(scope="module")
def bridge(rocketmq_broker: brokers.RocketMQ) -> Iterator[Bridge]:
    with connect_to(rocketmq_broker.url) as bridge:
        yield bridge


def test_reading_begins_at_the_latest_or_at_a_time(bridge: Bridge, client: RemotingClient, topic: str) -> None:
    publish(client, topic, b"old")
    for stamp in (NOW + 1, NOW + 2):
        publish(client, topic, b"%d" % stamp, timestamp=stamp)
    with member(bridge, topic, start="latest") as latest, member(bridge, topic, start=NOW - 1000) as since:
        publish(client, topic, b"end")
        assert latest.up_to(b"end") == []
        assert since.up_to(b"end") == [b"old", b"%d" % (NOW + 1), b"%d" % (NOW + 2)]


def test_a_seek_in_a_partition_that_is_not_there_is_refused(bridge: Bridge, topic: str) -> None:
    with member(bridge, topic) as reader, pytest.raises(InvalidState, match="is not assigned to this reader"):
        reader.seek({(topic, 7): (1,)})


def test_queues_that_are_added_are_read_from_their_beginning(bridge: Bridge, client: RemotingClient, topic: str):
    with member(bridge, topic, start="latest") as reader:
        bridge.admin.grow_topic(topic, 2)
        publish(client, topic, b"there already", queue=1)
        assert [(m.partition, m.value) for m in reader.take(1)] == [(1, b"there already")]


def test_a_closed_reader_leaves_no_thread_behind(bridge: Bridge, topic: str) -> None:
    with member(bridge, topic, unique("group")) as reader:
        reader.until(lambda: reader.positions())  # so that the bridge has opened the decision log
        before = set(threading.enumerate())
    for group in (None, unique("group")):
        with member(bridge, topic, group) as reader:
            reader.until(lambda reader=reader: reader.positions())
    assert becomes_true(lambda: set(threading.enumerate()) <= before)


def test_a_half_that_was_committed_again_and_again_is_one_message(bridge: Bridge, client: RemotingClient, topic: str):
    with member(bridge, topic) as reader:
        for number in range(5):
            commit(client, store_half(client, topic, b"%d" % number), times=3)
        publish(client, topic, b"end")
        assert reader.up_to(b"end") == [b"%d" % number for number in range(5)]
        assert set(reader.lag(Deadline(SOON)).values()) == {0}
    assert len(read_all(client, topic)) == 16


def test_a_reader_that_begins_between_a_message_and_its_repeat_does_not_see_the_repeat(bridge, client, topic):
    half, late = store_half(client, topic, b"early"), store_half(client, topic, b"late")
    commit(client, half)
    publish(client, topic, b"between")
    with member(bridge, topic, start="latest") as reader:
        reader.until(lambda: reader.positions())
        commit(client, half, times=2)
        commit(client, late)
        publish(client, topic, b"end")
        assert reader.up_to(b"end") == [b"late"]
    for start in range(1, 6):
        with member(bridge, topic) as reader:
            reader.seek({(topic, 0): (start,)})
            assert reader.up_to(b"end") == {1: [b"between", b"late"]}.get(start, [b"late"] if start < 5 else [])


def test_two_halves_of_one_message_are_one_message(bridge: Bridge, client: RemotingClient, topic: str) -> None:
    transaction = unique("transaction")
    halves = [store_half(client, topic, b"once", transaction=transaction, number=7) for _ in range(2)]
    halves += [store_half(client, topic, b"the next", transaction=transaction, number=8)]
    for half in halves:
        commit(client, half)
    publish(client, topic, b"end")
    with member(bridge, topic) as reader:
        assert reader.up_to(b"end") == [b"once", b"the next"]


def test_a_commit_behind_an_abort_and_a_copy_that_a_check_made_are_still_one_message(bridge, rocketmq_broker):
    checked: list[send_requests.CheckBack] = []
    group = unique("producers")

    def publish_again(checks: Sequence[send_requests.CheckBack]) -> None:
        for check in checks:
            threading.Thread(
                target=client.call,
                args=(BROKER, send_requests.end(check.half, send_requests.HalfEnd.COMMIT, True), LONG),
            ).start()
        checked.extend(checks)

    address = rocketmq_broker.url.removeprefix("rocketmq://")
    with RemotingClient([address], on_checks=publish_again) as client:
        client.join(Membership(producers=frozenset({group})), LONG)
        topic = new_topic(client)
        half = store_half(client, topic, b"once", group=group)
        assert becomes_true(lambda: bool(checked))  # the broker has written the half again, and publishes the copy
        client.call(BROKER, send_requests.end(half, send_requests.HalfEnd.ABORT, True), LONG)
        commit(client, half)
        with member(bridge, topic) as reader:
            found = reader.take(1)
            assert becomes_true(lambda: client.call(BROKER, read_requests.max_offset(topic, 0), LONG) >= 2)
            publish(client, topic, b"end")
            assert values(found) + reader.up_to(b"end") == [b"once"]
        for start in (1, 2):
            with member(bridge, topic) as reader:
                reader.seek({(topic, 0): (start,)})
                assert reader.up_to(b"end") == []


def test_a_reader_goes_on_once_it_may_read_again(bridge: Bridge, client: RemotingClient, topic: str) -> None:
    change = administration.create_topic(topic, 1)

    def set_permission(bits: int) -> None:
        client.call(BROKER, dataclasses.replace(change, fields={**change.fields, "perm": str(bits)}), LONG)

    with member(bridge, topic) as reader:
        publish(client, topic, b"1")
        reader.take(1)
        set_permission(2)  # to write
        publish(client, topic, b"2")
        with pytest.raises(AccessDenied, match="forbidden"):
            reader.take(1)
        set_permission(6)
        found: list[bytes] = []
        deadline = Deadline(SOON)
        while not found:
            deadline.check("reading on")
            with suppress(AccessDenied):  # of a request from before
                found = values(reader.poll())
    assert found == [b"2"]


def test_a_compressed_body_of_a_foreign_producer_is_unpacked(bridge: Bridge, client: RemotingClient, topic: str):
    plain = send_requests.send(send_requests.WireMessage(topic, b"?", {"colour": "red"}, ["k1"], "tag"), "others", 0)
    zipped = dataclasses.replace(plain, fields={**plain.fields, "f": "1"}, body=zlib.compress(b"long" * 2000))
    client.call(BROKER, zipped, LONG)
    with member(bridge, topic) as reader:
        (message,) = reader.take(1)
    assert message.value == b"long" * 2000
    assert (message.key, message.headers["colour"]) == (b"k1", "red")


def test_foreign_halves_with_one_id_are_different_messages(bridge: Bridge, client: RemotingClient, topic: str) -> None:
    for body in (b"one", b"two"):  # forked processes of the official client generate the same unique keys
        message = send_requests.WireMessage(topic, body, unique_key="0" * 32)
        stored = client.call(BROKER, send_requests.send_half(message, "others", 0), LONG)
        commit(client, send_requests.half_address(topic, "others", stored))
    with member(bridge, topic) as reader:
        assert values(reader.take(2)) == [b"one", b"two"]
