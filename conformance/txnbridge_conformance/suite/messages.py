"""Tests of messages: every part of a message arrives as it was sent, in its partition and in order."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from txnbridge import Bridge, Capability, Topic, codecs
from txnbridge_conformance.observing import seen, send, take, values
from txnbridge_conformance.plugin import Connect, NewTopic, needs, proves

EVERY_BYTE = bytes(range(256))


def test_a_large_value_arrives_whole(bridge: Bridge, topic: str) -> None:
    large = EVERY_BYTE * 2_000  # half a megabyte; most brokers take up to one by default
    send(bridge, topic, large)
    assert values(seen(bridge, topic)) == [large]


@proves(Capability.EMPTY_VALUE)
def test_an_empty_value_arrives_empty(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"")
    assert values(seen(bridge, topic)) == [b""]


@proves(Capability.TOMBSTONES)
def test_a_message_without_a_value_arrives_without_one(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, None, key="gone")
    assert [(m.key, m.value) for m in seen(bridge, topic)] == [(b"gone", None)]


def test_keys_arrive_as_bytes_and_no_key_as_none(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"1", key=EVERY_BYTE)
        txn.send(topic, b"2", key="käse")
        txn.send(topic, b"3")
    assert sorted((m.value, m.key) for m in seen(bridge, topic)) == [
        (b"1", EVERY_BYTE),
        (b"2", "käse".encode()),
        (b"3", None),
    ]


def test_headers_arrive(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"1", headers={"kind": "new", "from": "Köln", "empty": ""})
    (message,) = seen(bridge, topic)
    assert dict(message.headers) == {"kind": "new", "from": "Köln", "empty": ""}


@proves(Capability.BINARY_HEADERS)
def test_a_header_of_any_bytes_arrives(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"1", headers={"raw": EVERY_BYTE})
    (message,) = seen(bridge, topic)
    assert message.headers["raw"].encode("utf-8", "surrogateescape") == EVERY_BYTE


@proves(Capability.REPEATED_HEADERS)
def test_a_repeated_header_arrives_as_often_and_in_order(bridge: Bridge, topic: str) -> None:
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "1")]
    with bridge.transaction() as txn:
        txn.send(topic, b"1", headers=pairs)
    (message,) = seen(bridge, topic)
    assert message.headers.items_all() == pairs
    assert message.headers.all("a") == ["1", "3", "1"]


@proves(Capability.BARE_HEADERS)
def test_a_header_without_a_value_or_a_name_arrives(bridge: Bridge, topic: str) -> None:
    pairs = [("nothing", None), ("", "unnamed"), ("empty", "")]
    with bridge.transaction() as txn:
        txn.send(topic, b"1", headers=pairs)
    (message,) = seen(bridge, topic)
    assert message.headers.items_all() == pairs


@proves(Capability.TIMESTAMPS)
def test_a_timestamp_arrives_as_it_was_set(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"1", timestamp=1_234_567_890_123)
    assert [m.timestamp for m in seen(bridge, topic)] == [1_234_567_890_123]


def test_a_message_without_a_timestamp_gets_the_present_one(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"1")
    (message,) = seen(bridge, topic)
    # The broker's clock may differ from this machine's by minutes; a timestamp that is not set differs by decades.
    assert abs(message.timestamp - time.time() * 1000) < 3_600_000


def test_a_codec_reads_what_it_wrote(bridge: Bridge, topic: str) -> None:
    orders = Topic(topic, codecs.json, key=codecs.str)
    with bridge.transaction() as txn:
        txn.send(orders, {"id": 42, "name": "Zoë"}, key="42")
    with bridge.consumer(orders) as consumer:
        (message,) = take(consumer, 1)
    assert (message.key, message.value) == ("42", {"id": 42, "name": "Zoë"})


def test_send_many_sends_what_send_does(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send_many(topic, [b"1", (b"2", "key"), (b"3", b"key", {"h": "x"})])
    assert [(m.value, m.key, dict(m.headers)) for m in sorted(seen(bridge, topic), key=lambda m: m.value)] == [
        (b"1", None, {}),
        (b"2", b"key", {}),
        (b"3", b"key", {"h": "x"}),
    ]


# --- partitions and order -------------------------------------------------------------------------------------------


@needs(Capability.CHOOSE_PARTITION)
def test_the_same_key_goes_to_the_same_partition(connect: Connect, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=5)
    keys = [b"key %d" % number for number in range(40)]
    for bridge in (connect(), connect()):
        for _ in range(2):
            with bridge.transaction() as txn:
                for key in keys:
                    txn.send(topic, b"single", key=key)
                txn.send_many(topic, [(b"many", key) for key in keys])
    homes = defaultdict(set)
    messages = seen(bridge, topic)
    for message in messages:
        homes[message.key].add(message.partition)
    assert len(messages) == 8 * len(keys)
    assert {key: len(partitions) for key, partitions in homes.items()} == dict.fromkeys(keys, 1)


@proves(Capability.CHOOSE_PARTITION)
def test_a_message_goes_to_the_partition_that_its_sender_chose(bridge: Bridge, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=4)
    with bridge.transaction() as txn:
        for number in range(4):
            txn.send(topic, b"%d" % number, partition=number, key="the same")
    assert sorted((m.partition, m.value) for m in seen(bridge, topic)) == [(n, b"%d" % n) for n in range(4)]


@proves(Capability.PARTITION_ORDER)
def test_a_partition_is_read_in_the_order_in_which_it_was_written(bridge: Bridge, topic: str) -> None:
    expected = [b"%d" % number for number in range(1_500)]
    for begin in range(0, 1_500, 500):
        with bridge.transaction() as txn:
            txn.send_many(topic, expected[begin : begin + 250])
            for value in expected[begin + 250 : begin + 500]:
                txn.send(topic, value)
    messages = seen(bridge, topic)
    assert len(messages) == len(expected)
    assert [(m.position, m.value) for m, value in zip(messages, expected, strict=True) if m.value != value][:5] == []
    positions = [m.position for m in messages]
    assert positions == sorted(set(positions))


@proves(Capability.PARTITION_ORDER)
def test_every_reader_reads_a_partition_in_the_same_order(connect: Connect, topic: str) -> None:
    writers = [connect(), connect()]

    def write(bridge: Bridge, name: bytes) -> None:
        for number in range(30):
            send(bridge, topic, b"%s%d" % (name, number))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, writers, [b"0/", b"1/"]))
    one, two = (seen(bridge, topic) for bridge in writers)
    assert len(one) == 60
    assert [(m.position, m.value) for m in one] == [(m.position, m.value) for m in two]
    for name in (b"0/", b"1/"):
        assert [m.value for m in one if m.value.startswith(name)] == [b"%s%d" % (name, n) for n in range(30)]
