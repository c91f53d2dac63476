"""Tests of topics that are deleted and created again: a position in the old topic is no position in the new."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartRocketMQ
from txnbridge_conformance.observing import eventually, send, take, values
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest, fields, nothing
from txnbridge_rocketmq.client.protocol.records import MessageExt

from tests.core.reading_kit import SOON
from tests.renewed_topics import *  # noqa: F403
from tests.renewed_topics import FEW, MORE, made_anew_again_and_again, read_on_where_told
from tests.rocketmq.kit import BROKER, LONG, read_all
from tests.rocketmq.reading_kit import connect_to, new_topic, publish, unique
from txnbridge import Bridge, Consumer, NotFound, Outcome, PositionLost
from txnbridge.spi import Deadline

Renew = Callable[[str], None]


@pytest.fixture(scope="module")
def bridge(rocketmq_broker: brokers.RocketMQ) -> Iterator[Bridge]:
    with connect_to(rocketmq_broker.url, writers=2) as bridge:
        yield bridge


@pytest.fixture
def topic(bridge: Bridge) -> str:
    name = unique("renewed")
    bridge.admin.create_topic(name, 1)
    return name


def is_told(consumer: Consumer, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(PositionLost, match="created again"):
            take(consumer, 1)


@pytest.mark.parametrize("grouped", [True, False], ids=["in a group", "alone"])
def test_a_reader_does_not_read_on_in_a_topic_that_was_made_anew_until_it_is_told_where(
    bridge: Bridge, topic: str, group: str, renew: Renew, grouped: bool
) -> None:
    new = read_on_where_told(bridge, topic, group if grouped else None, renew)
    assert [message.deliveries for message in new] == [1] * len(MORE)


def test_a_reader_that_waits_for_what_comes_next_is_told_too(bridge: Bridge, topic: str, renew: Renew) -> None:
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, start="latest") as consumer:
        assert not consumer.poll(timeout=0.5)
        renew(topic)
        is_told(consumer)


def test_a_reader_of_a_topic_that_is_missing_is_told_what_it_is_when_it_is_there_again(bridge: Bridge, topic: str):
    send(bridge, topic, *FEW)
    with bridge.consumer(topic) as consumer:
        take(consumer, 10)
        bridge.admin.delete_topic(topic)
        with pytest.raises(NotFound):
            consumer.poll(timeout=SOON)
        bridge.admin.create_topic(topic, 1)
        send(bridge, topic, *MORE)
        is_told(consumer)


def test_a_group_that_comes_back_does_not_read_on_in_a_topic_that_was_made_anew(bridge, topic, group, renew):
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer, bridge.transaction() as txn:
        txn.ack(take(consumer, 5))
    renew(topic)
    with bridge.consumer(topic, group) as consumer:
        is_told(consumer, times=2)
        consumer.seek({(topic, 0): (2,)})
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 3))
    with bridge.consumer(topic, group) as consumer:
        assert values(take(consumer, 55)) == MORE[5:]


def test_a_group_that_began_at_the_end_of_a_topic_does_not_begin_so_far_on_in_the_next_one(bridge, topic, group, renew):
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group, start="latest") as consumer:
        assert not consumer.poll(timeout=1)
        eventually(lambda: consumer.assignment, "the partition has come")
    renew(topic)
    with bridge.consumer(topic, group, start="latest") as consumer:
        is_told(consumer)


def test_messages_read_before_a_topic_was_recreated_move_no_position_in_the_new_one(bridge, topic, group, renew):
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer:
        old = take(consumer, 10)
        renew(topic)
        with bridge.transaction() as txn:
            txn.ack(old)
        assert txn.outcome is Outcome.COMMITTED  # the transaction has read the messages
        is_told(consumer)
    with bridge.consumer(topic, group) as consumer:
        is_told(consumer)
        consumer.seek({(topic, 0): (0,)})
        assert values(take(consumer, len(MORE))) == MORE


def test_an_abort_goes_back_to_nothing_in_a_renewed_topic(bridge: Bridge, topic: str, group: str, renew: Renew) -> None:
    send(bridge, topic, *FEW)
    with bridge.consumer(topic, group) as consumer:
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 5))
        with pytest.raises(ZeroDivisionError), bridge.transaction() as txn:
            txn.ack(take(consumer, 5))
            renew(topic)
            raise ZeroDivisionError
        is_told(consumer)


_DELETE_EXPIRED = 329
_FILE_BYTES = 1 << 20


def test_a_group_goes_on_behind_a_message_that_is_dropped(start_rocketmq: StartRocketMQ, tmp_path: Path, group: str):
    """The reference record is dropped, and the message at the position is the first that is left."""
    kept = {"mappedFileSizeCommitLog": str(_FILE_BYTES), "fileReservedTime": "0", "deleteWhen": "30"}
    broker = start_rocketmq(settings=kept)
    contents = [b"%d" % number + bytes(100_000) for number in range(40)]
    with (
        connect_to(broker.url, application="keeper", decision_log=f"sqlite:///{tmp_path}/log.db") as bridge,
        RemotingClient([broker.url.removeprefix("rocketmq://")]) as client,
    ):
        # Without a transaction: a busy broker would write halves again behind the messages, in more files, and then
        # drop the file of the last messages, too. The reader's decisions are in SQLite: nothing more is stored here.
        publish(client, topic := new_topic(client), *contents)
        first = first_of_the_last_file(read_all(client, topic))
        with bridge.consumer(topic, group) as consumer:
            read = take(consumer, first)
            with bridge.transaction() as txn:
                txn.ack(read)
        expire = RpcRequest("dropping old files", _DELETE_EXPIRED, nothing, fields())
        client.call(BROKER, expire, LONG)
        deadline = Deadline(4 * LONG)  # a broker first looks for old files a minute after its start
        while (begin := client.call(BROKER, read_requests.min_offset(topic, 0), LONG)) < first:
            deadline.check("waiting for old files to be dropped")
            time.sleep(0.1)
        assert begin == first, "the last file is kept"
        with bridge.consumer(topic, group) as consumer:
            assert values(take(consumer, 40 - first)) == contents[first:]


def first_of_the_last_file(records: list[MessageExt]) -> int:
    last = records[-1].log_offset // _FILE_BYTES
    return next(each.queue_offset for each in records if each.log_offset // _FILE_BYTES == last)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_whenever_a_topic_is_made_anew_nothing_of_the_new_one_is_skipped_or_doubled(
    bridge: Bridge, topic: str, group: str, rocketmq_broker: brokers.RocketMQ
) -> None:
    target = unique("target")
    made_anew_again_and_again(bridge, topic, target, group, rocketmq_broker.url)
