"""Tests that the quick ways of sending keep the promises of the long one."""

import uuid
import weakref

import pytest

import txnbridge
from tests.kafka.kit import describe, producer_of, writer_of
from txnbridge.errors import InvalidOption, NotFound, TransactionAborted

# Fewer than any of these tests sends.
SMALL_BUFFER = {"queue.buffering.max.messages": "50"}


@pytest.fixture
def bridge(kafka_broker):
    with txnbridge.connect(kafka_broker.url, writers=1, kafka=SMALL_BUFFER) as bridge:
        yield bridge


def values(bridge, topic):
    return [message.value for message in bridge.read(topic, 10_000)]


def numbered(count):
    return [b"%d" % n for n in range(count)]


@pytest.mark.parametrize("kind", [list, tuple, iter, None])
def test_messages_that_do_not_fit_into_the_buffer_wait_and_are_sent_in_order(bridge, topic, kind):
    with bridge.transaction() as txn:
        for one in numbered(3000) if kind is None else []:
            txn.send(topic, one)
        if kind is not None:
            txn.send_many(topic, kind(numbered(3000)))
        assert writer_of(txn).messages == 3000
    assert values(bridge, topic) == numbered(3000)


@pytest.mark.parametrize("odd", [(), [(b"x", "text key")], [b"alone"], [(b"x", b"k", None)]])
def test_values_with_keys_that_do_not_fit_wait_in_order_too(bridge, topic, odd):
    """A chunk with an odd item is taken item by item, any other by a loop in C."""
    items = [(None if n % 7 == 0 else b"%d" % n, None if n % 5 == 0 else b"k%d" % n) for n in range(2500)]
    with bridge.transaction() as txn:
        txn.send_many(topic, [*items, *odd])
        assert writer_of(txn).messages == 2500 + len(odd)
    found = [(message.value, message.key) for message in bridge.read(topic, 10_000)]
    assert found[:2500] == items
    assert len(found) == 2500 + len(odd)


def test_keys_and_headers_among_plain_values_stay_in_order(bridge, topic):
    items = [b"0", (b"1", "key"), (b"2", None, {"kind": "new"}), None, b"4"]
    with bridge.transaction() as txn:
        txn.send_many(topic, items)
    found = list(bridge.read(topic, 10))
    assert [(m.value, m.key, dict(m.headers)) for m in found] == [
        (b"0", None, {}),
        (b"1", b"key", {}),
        (b"2", None, {"kind": "new"}),
        (None, None, {}),
        (b"4", None, {}),
    ]


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_message_too_large_among_many_is_named_and_only_abort_is_left(bridge, topic, key):
    items = [b"1", b"2", b"x" * 2_000_000, b"never"]
    with pytest.raises(TransactionAborted, match="item 2 of send_many"), bridge.transaction() as txn:
        with pytest.raises(InvalidOption, match="larger than"):
            txn.send_many(topic, items if key is None else [(item, key) for item in items])
        assert writer_of(txn).messages == 2
    assert values(bridge, topic) == []


@pytest.mark.parametrize("client", [{}, {"message.max.bytes": "20000"}])
def test_the_largest_message_is_taken_and_one_byte_more_is_refused(kafka_broker, topic, client):
    with txnbridge.connect(kafka_broker.url, kafka=client) as bridge:
        key = b"key"
        most = bridge.limits.message_bytes
        assert most is not None
        with bridge.transaction() as txn:
            txn.send(topic, b"x" * most)
            with pytest.raises(InvalidOption, match=r"message\.max\.bytes"):
                txn.send(topic, b"x" * (most + 1))
            with pytest.raises(InvalidOption, match=r"message\.max\.bytes"):
                txn.send(topic, b"x" * (most - len(key) + 1), key=key)
        assert [len(value) for value in values(bridge, topic)] == [most]


@pytest.mark.parametrize("topic_name", [7, ["a list"], "no-such-topic"])
def test_a_topic_that_is_none_is_refused_and_the_transaction_stays_usable(bridge, topic, topic_name):
    with bridge.transaction() as txn:
        txn.send(topic, b"before")
        with pytest.raises((InvalidOption, NotFound)):
            txn.send(topic_name, b"nowhere")
        txn.send(topic, b"after")
    assert values(bridge, topic) == [b"before", b"after"]


def test_a_transaction_that_was_prepared_keeps_no_client_alive(kafka_broker, topic):
    with txnbridge.connect(kafka_broker.url, transactional_id=f"id-{uuid.uuid4().hex[:12]}") as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send(topic, b"x")
            client = weakref.ref(producer_of(txn)._client)
        assert client() is None
        bridge.abort(str(txn.token))


def test_a_transaction_may_last_longer_than_its_bridge_waits(kafka_broker, topic):
    """A broker aborts what is open for longer than was said when its id was opened."""
    with txnbridge.connect(kafka_broker.url, writers=1, timeout=5) as bridge:
        with bridge.transaction(timeout=40) as txn:
            txn.send(topic, b"1")
            writer = writer_of(txn)
            assert describe(bridge, writer.id)[writer.id].timeout >= 40_000
        with bridge.transaction() as txn:
            txn.send(topic, b"2")
        with pytest.raises(InvalidOption, match=r"transaction\.max\.timeout\.ms"):
            bridge.transaction(timeout=3600)
        with bridge.transaction() as txn:
            txn.send(topic, b"3")
        assert values(bridge, topic) == [b"1", b"2", b"3"]
