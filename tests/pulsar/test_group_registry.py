"""A group whose subscription is gone is told so, and neither skips nor repeats anything."""

import pytest
from txnbridge_conformance import plugin
from txnbridge_conformance.observing import eventually, mark, send, take, up_to, values

from tests.pulsar.client_kit import admin
from txnbridge import Consumer, NotFound, PositionLost

topic = plugin.topic  # the wire client's tests have another one


@pytest.fixture
def subscription(pulsar_broker, topic, group):
    """Ask for the group's subscription by REST."""

    def ask(method, options="", body=None):
        path = f"persistent/public/default/{topic}-partition-0/subscription/{group}{options}"
        return admin(pulsar_broker, method, path, body)

    return ask


def pass_on(bridge, consumer, count):
    with bridge.transaction() as txn:
        messages = take(consumer, count)
        txn.ack(messages)
    return values(messages)


@pytest.fixture
def begun(bridge, topic, group):
    """The group has read the first of two messages, and has no members."""
    for value in (b"1", b"2"):
        send(bridge, topic, value)
    with bridge.consumer(topic, group) as consumer:
        assert pass_on(bridge, consumer, 1) == [b"1"]


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("sharing", ["partition", "message", "key"])
def test_a_group_whose_subscription_was_deleted_is_told_so_until_somebody_says_where_it_goes_on(
    connect, topic, group, subscription, sharing
):
    subscription("DELETE")
    for _ in range(2):  # being told makes no new one
        with pytest.raises(PositionLost, match=f"--subscription {group}"):
            connect().consumer(topic, group, sharing=sharing)
    subscription("PUT", body={"ledgerId": -1, "entryId": -1})  # from the earliest on
    with connect().consumer(topic, group, sharing=sharing) as consumer:
        assert values(take(consumer, 2)) == [b"1", b"2"]


@pytest.mark.usefixtures("begun")
def test_a_member_whose_subscription_is_deleted_reads_nothing_again(connect, topic, group, subscription):
    bridge = connect()
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 1)) == [b"2"]
        subscription("DELETE", "?force=true")
        eventually(lambda: is_lost(consumer), "it is told")
        subscription("PUT", body={"ledgerId": -1, "entryId": -1})
        assert pass_on(bridge, consumer, 2) == [b"1", b"2"]


@pytest.mark.usefixtures("begun")
def test_a_member_whose_topic_is_being_deleted_has_lost_no_position(connect, topic, group, subscription):
    with connect().consumer(topic, group) as consumer:
        assert values(take(consumer, 1)) == [b"2"]
        subscription("DELETE", "?force=true")  # with which a deletion begins
        connect().admin.delete_topic(topic)
        with pytest.raises(NotFound):
            take(consumer, 1)


def is_lost(consumer: Consumer):
    try:
        assert values(consumer.poll(timeout=0.05)) == []
    except PositionLost:
        return True
    return False


@pytest.mark.usefixtures("begun")
def test_a_group_goes_on_where_its_administrator_moved_it(connect, topic, group, subscription):
    subscription("POST", "/resetcursor", {"ledgerId": -1, "entryId": -1})
    with connect().consumer(topic, group) as consumer:
        assert values(take(consumer, 2)) == [b"1", b"2"]


@pytest.mark.usefixtures("begun")
def test_partitions_that_were_added_since_are_begun(connect, bridge, topic, group):
    bridge.admin.grow_topic(topic, 2)
    with bridge.transaction() as txn:
        txn.send(topic, b"3", partition=1)
    for _ in range(2):
        with connect().consumer(topic, group) as consumer:
            assert {*values(take(consumer, 2))} == {b"2", b"3"}


@pytest.mark.usefixtures("begun")
def test_without_rest_a_group_whose_subscription_is_gone_is_a_new_one(open_bridge, bridge, topic, group, subscription):
    """Every other client of Pulsar behaves in this way."""
    subscription("DELETE")
    markers = mark(bridge, topic)
    with open_bridge(pulsar={"admin_url": ""}).consumer(topic, group) as consumer:
        assert values(up_to(consumer, markers)) == [b"1", b"2"]
