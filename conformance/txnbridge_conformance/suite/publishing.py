"""Tests of publishers, which send without a transaction: in order, once each, and by sequence across crashes."""

from __future__ import annotations

from contextlib import suppress

import pytest

from txnbridge import Bridge, Capability, InvalidState, TxnBridgeError
from txnbridge_conformance.observing import seen, values
from txnbridge_conformance.plugin import Connect, NewTopic, proves


@proves(Capability.IDEMPOTENT_SEND)
def test_messages_that_a_publisher_flushed_are_there_once_and_in_order(bridge: Bridge, topic: str) -> None:
    expected = [b"%d" % number for number in range(500)]
    with bridge.publisher() as publisher:
        for value in expected:
            publisher.send(topic, value)
        publisher.flush()
        assert values(seen(bridge, topic)) == expected


@proves(Capability.IDEMPOTENT_SEND)
def test_closing_a_publisher_flushes_it(bridge: Bridge, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=4)
    with bridge.publisher() as publisher:
        for number in range(4):
            publisher.send(topic, b"%d" % number, key="key", headers={"kind": "new"}, partition=number)
    found = sorted((m.partition, m.value, m.key, dict(m.headers)) for m in seen(bridge, topic))
    assert found == [(number, b"%d" % number, b"key", {"kind": "new"}) for number in range(4)]
    with pytest.raises(InvalidState, match="closed"):
        publisher.send(topic, b"2")


@proves(Capability.IDEMPOTENT_SEND)
def test_a_publisher_does_not_wait_for_a_transaction(bridge: Bridge, topic: str) -> None:
    with bridge.transaction() as txn:
        txn.send(topic, b"never")
        with bridge.publisher() as publisher:
            publisher.send(topic, b"1")
        txn.abort()
    assert values(seen(bridge, topic)) == [b"1"]


@proves(Capability.RESUME_SEQUENCE)
def test_a_sequence_that_is_stored_is_not_stored_again(connect: Connect, topic: str, owner: str) -> None:
    for contents in ([b"0", b"1", b"2"], [b"again", b"again", b"again", b"3"]):
        bridge = connect()
        with bridge.publisher(owner) as publisher:
            for number, value in enumerate(contents):
                publisher.send(topic, value, sequence=number)
    older = connect(timeout=5).publisher(owner)
    older.send(topic, b"4", sequence=4)
    older.flush()
    for newer in (True, False):
        with suppress(TxnBridgeError):  # on some brokers the older publisher of a name goes on, on others the newer
            publisher = connect(timeout=5).publisher(owner) if newer else older
            publisher.send(topic, b"5", sequence=5)
            publisher.flush()
    assert values(seen(bridge, topic)) == [b"0", b"1", b"2", b"3", b"4", b"5"]


@proves(Capability.RESUME_SEQUENCE)
def test_a_publisher_knows_its_last_sequence(connect: Connect, bridge: Bridge, topic: str, owner: str) -> None:
    with bridge.publisher(owner) as publisher:
        assert publisher.last_sequence(topic) is None
        for number in (3, 4, 8):
            publisher.send(topic, b"%d" % number, sequence=number)
            publisher.flush()
        assert publisher.last_sequence(topic) == 8
    with connect().publisher(owner) as publisher:
        assert publisher.last_sequence(topic) == 8


@proves(Capability.RESUME_SEQUENCE)
def test_sequences_of_one_name_or_topic_are_not_those_of_another(bridge: Bridge, topic: str, owner: str) -> None:
    for name in (owner, f"{owner}-too"):
        with bridge.publisher(name) as publisher:
            publisher.send(topic, name.encode(), sequence=7)
    assert values(seen(bridge, topic)) == [owner.encode(), f"{owner}-too".encode()]
