"""Tests of the publisher on a live broker: each message is stored once and in order, also under faults."""

import uuid
from contextlib import suppress
from dataclasses import replace
from threading import Barrier, BrokenBarrierError, Thread
from unittest.mock import Mock

import pytest
from txnbridge_conformance import faults
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import Disconnected, ErrorResponse, Unreachable
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.write.message_format import partition_of
from txnbridge_rocketmq.write.publisher import RocketMQPublisher

from tests.failing import fail_call
from tests.in_time import paused, wait_until, within
from tests.interrupts import Interrupted, interrupted_everywhere
from tests.rocketmq.kit import LONG, bodies, cluster_for, read_all
from tests.rocketmq.writing_kit import numbered
from txnbridge import errors
from txnbridge.spi import Deadline


@pytest.fixture
def publisher(rocketmq_broker):
    """Return a function that opens publishers; they are closed after the test, with their connections."""
    clusters, publishers = [], []

    def opened(url=None, client=lambda client: client, **given):
        clusters.append(cluster_for(url or rocketmq_broker.url, **given))
        publishers.append(RocketMQPublisher(replace(clusters[-1], client=client(clusters[-1].client))))
        return publishers[-1]

    yield opened
    for publisher in publishers:
        with suppress(errors.TxnBridgeError):  # some have failed
            publisher.close(Deadline(1))
    for cluster in clusters:
        cluster.client.close()


@pytest.fixture
def wide(rocketmq_broker):
    """Create a topic with several queues, and return its name."""
    name = f"published-{uuid.uuid4().hex[:12]}"
    rocketmq_broker.create_topic(name, queues=4)
    return name


def send(publisher, topic, value, *, key=None, partition=None, sequence=None, seconds=LONG):
    publisher.send(topic, value, key, None, partition, None, sequence, Deadline(seconds))


def send_all(publisher, topic, values):
    for value in values:
        send(publisher, topic, value)
    publisher.flush(Deadline(LONG))


@pytest.fixture
def cluster():
    """Return the stand-in of a cluster, which stores each message."""
    known = {"topics.require.return_value": [Queue("t", "a", 0)], "brokers.config.return_value.message_bytes": 9}
    return Mock(**known)


@pytest.mark.offline
def test_an_error_that_nobody_expects_is_raised_by_later_calls(cluster):
    cluster.client.submit.side_effect = MemoryError("none is left")
    send(plain := RocketMQPublisher(cluster), "t", b"1")
    for call in (plain.flush, plain.close):
        with pytest.raises(errors.DeliveryFailed, match="none is left"):
            call(Deadline(LONG))


@pytest.mark.offline
def test_a_broker_that_is_away_holds_up_no_messages_to_another_one(cluster):
    lost = Mock(**{"result.side_effect": Disconnected("lost", may_have_had_effect=True)})
    cluster.topics.require.side_effect = lambda topic, *_: [Queue("t", topic, 0)]
    cluster.client.submit.side_effect = lambda broker, *_: lost if broker == "away" else Mock()
    cluster.client.call.side_effect = Unreachable("away")
    send(plain := RocketMQPublisher(cluster), "away", b"1")
    wait_until(lambda: cluster.client.call.called)  # to look for the message
    send(plain, "here", b"2")
    wait_until(lambda: cluster.client.submit.call_args[0][0] == "here")
    with pytest.raises(errors.DeadlineExceeded):
        plain.close(Deadline(0.1))


@pytest.mark.offline
def test_a_flush_waits_also_for_the_message_of_an_interrupted_send(cluster):
    plain = RocketMQPublisher(cluster)
    assert interrupted_everywhere(lambda: send(plain, "t", b"1"), lambda: plain.flush(Deadline(LONG)), ["publisher.py"])
    plain.close(Deadline(LONG))


@pytest.mark.offline
def test_a_thread_that_could_not_be_started_is_started_by_the_next_message(cluster, no_threads):
    no_threads(0)
    plain = RocketMQPublisher(cluster)
    with pytest.raises(RuntimeError):
        send(plain, "t", b"refused")
    send(plain, "t", b"1")
    plain.close(Deadline(LONG))
    assert cluster.client.submit.call_count == 1


@pytest.mark.offline
def test_no_second_thread_sends_after_an_exception_of_a_signal_handler_while_the_first_one_started(
    cluster, monkeypatch
):
    plain, both = RocketMQPublisher(cluster), Barrier(2)

    def meet(*_: object) -> Mock:
        with suppress(BrokenBarrierError):
            both.wait(0.5)
        return Mock()

    cluster.client.submit.side_effect = meet
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        fail_call(patch, Thread, "start", Interrupted, happens=True)
        send(plain, "t", b"refused")
    send(plain, "t", b"1")
    plain.close(Deadline(LONG))
    assert cluster.client.submit.call_count == 1


def test_a_message_is_stored_also_if_nobody_waits_for_it(publisher, topic, client):
    plain = publisher()
    for value in numbered(3):
        send(plain, topic, value)
    wait_until(lambda: bodies(client, topic) == numbered(3))


def test_a_key_has_its_partition_and_messages_without_one_are_spread(publisher, wide, client):
    plain = publisher()
    for number in range(40):
        send(plain, wide, b"%d" % number, key=b"key-%d" % (number % 7))
    for number in range(8):
        send(plain, wide, b"spread-%d" % number)
    send(plain, wide, b"chosen", partition=3)
    plain.flush(Deadline(LONG))
    found: dict[int, list[bytes]] = {}
    for queue in range(4):
        found[queue] = [record.payload() for record in read_all(client, wide, queue=queue)]
    for number in range(40):
        assert b"%d" % number in found[partition_of(b"key-%d" % (number % 7), 4)]
    assert [sum(body.startswith(b"spread") for body in found[queue]) for queue in range(4)] == [2, 2, 2, 2]
    assert b"chosen" in found[3]


def lose_second_answer(proxy, plain, topic):
    """Send two messages through a proxy, and lose the answer to the second."""
    send_all(plain, topic, [b"0"])
    hold = proxy.hold(answers="SEND_MESSAGE_V2")
    send(plain, topic, b"1")
    hold.answered()
    proxy.cut()
    hold.drop()


def test_a_lost_answer_makes_no_copy(rocketmq_broker, publisher, topic, client):
    with faults.proxy(rocketmq_broker) as proxy:
        plain = publisher(proxy.url)
        lose_second_answer(proxy, plain, topic)
        send_all(plain, topic, [b"2"])
    assert bodies(client, topic) == [b"0", b"1", b"2"]


def test_a_message_that_may_come_late_is_a_failure_and_not_sent_again(rocketmq_broker, publisher, topic, client):
    with faults.proxy(rocketmq_broker) as proxy:
        plain = publisher(proxy.url)
        send_all(plain, topic, [b"0"])
        hold = proxy.hold(requests="SEND_MESSAGE_V2")
        send(plain, topic, b"1")
        hold.wait()
        send(plain, topic, b"2")  # after it
        proxy.cut()
        for _ in range(2):
            with pytest.raises(errors.DeliveryFailed, match="did not find"):
                plain.flush(Deadline(LONG))
        with pytest.raises(errors.DeliveryFailed):
            send(plain, topic, b"3")
        hold.release()
        hold.answered()
        with pytest.raises(errors.DeliveryFailed):
            plain.close(Deadline(LONG))
    assert bodies(client, topic) == [b"0", b"1"]


class MayNotLook:
    """The client of a user who may send messages, but not look them up."""

    def __init__(self, client):
        self.submit = client.submit

    def call(self, broker, request, timeout):
        raise ErrorResponse(ResponseCode.NO_PERMISSION, "no right to Sub", request.action)


def test_a_publisher_that_may_not_look_for_a_lost_answer_raises_access_denied(rocketmq_broker, publisher, topic):
    with faults.proxy(rocketmq_broker) as proxy:
        plain = publisher(proxy.url, client=MayNotLook)
        lose_second_answer(proxy, plain, topic)
        with pytest.raises(errors.AccessDenied, match=r"did not respond for a message.*no right to Sub"):
            plain.flush(Deadline(5))


def test_a_message_that_is_not_as_safe_as_it_should_be_is_a_failure(publisher, topic, settings):
    plain = publisher()
    settings(brokerRole="SYNC_MASTER", inSyncReplicas=2, minInSyncReplicas=1, slaveTimeout=200)
    send(plain, topic, b"1")
    with pytest.raises(errors.DeliveryFailed, match="not flushed or replicated"):
        plain.flush(Deadline(LONG))


def test_no_call_hangs_while_the_broker_does(rocketmq_broker, publisher, topic, client):
    plain = publisher()
    send_all(plain, topic, [b"0"])
    with paused(rocketmq_broker):
        send(plain, topic, b"1")
        for call in (plain.flush, plain.close):
            with within(0.5), pytest.raises(errors.DeadlineExceeded, match="1 messages"):
                call(Deadline(0.5))
        with pytest.raises(errors.InvalidState):
            plain.flush(Deadline(1))


@pytest.mark.full
def test_messages_wait_for_a_broker_that_is_away(start_rocketmq, publisher):
    broker = start_rocketmq()
    broker.create_topic("kept", queues=1)
    plain = publisher(broker.url)
    send_all(plain, "kept", [b"0"])
    broker.kill()
    send(plain, "kept", b"1")
    with pytest.raises(errors.DeadlineExceeded):
        plain.flush(Deadline(0.5))
    broker.start()
    plain.flush(Deadline(90))
    with RemotingClient([broker.url.removeprefix("rocketmq://")]) as client:
        assert bodies(client, "kept") == [b"0", b"1"]


def test_a_publisher_has_room_for_a_bounded_number_of_messages(rocketmq_broker, publisher, topic):
    plain = publisher()
    send_all(plain, topic, [b"0"])
    with paused(rocketmq_broker):
        with pytest.raises(errors.DeadlineExceeded, match="room"):
            for number in range(3000):
                send(plain, topic, b"%d" % number, seconds=0.3)
        assert 500 < number < 3000
    plain.flush(Deadline(60))


def test_a_missing_topic_or_partition_is_named(publisher, topic):
    plain = publisher()
    with pytest.raises(errors.NotFound, match="nowhere"):
        send(plain, "nowhere", b"0")
    with pytest.raises(errors.NotFound, match="partition 1"):
        send(plain, topic, b"0", partition=1)
    with pytest.raises(errors.NotFound, match="from 0"):
        send(plain, topic, b"0", partition=-1)
    send_all(plain, topic, [b"0"])


def test_a_missing_topic_is_created_where_that_is_allowed(publisher, client):
    name = f"published-{uuid.uuid4().hex[:12]}"
    plain = publisher(create_topics=3)
    send_all(plain, name, numbered(6))
    assert len(client.route(name, LONG, fresh=True).readable) == 3


def test_a_message_that_is_too_large_leaves_the_publisher_as_it_was(publisher, topic, client):
    plain = publisher()
    with pytest.raises(errors.InvalidOption, match="the broker takes 4194304"):
        send(plain, topic, b"x" * (4194304 + 1))
    largest = b"x" * 4194304
    send_all(plain, topic, [largest])
    assert bodies(client, topic) == [largest]
