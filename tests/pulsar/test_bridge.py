"""A bridge to Pulsar through the front door, and what the official client sees of it."""

import importlib
from typing import Any

import pytest
from txnbridge_conformance import brokers, plugin
from txnbridge_conformance.observing import send, take, values

from tests.pulsar.client_kit import SOON, admin
from tests.pulsar.writing_kit import Connect, unique
from txnbridge import DeliveryFailed, NotSupported, Outcome
from txnbridge.capabilities import Capability

MILLISECONDS = int(SOON * 1000)
topic = plugin.topic  # the wire client's tests have another one


def read_by(official: Any, name: str) -> list[tuple[bytes, str, dict[str, str]]]:
    """Read by one reader a partition, as long as the official client says that there are messages."""
    pulsar = importlib.import_module("pulsar")
    found = []
    for partition in official.get_topic_partitions(name):
        reader = official.create_reader(partition, pulsar.MessageId.earliest)
        while reader.has_message_available():
            message = reader.read_next(MILLISECONDS)
            found.append((message.data(), message.partition_key(), message.properties()))
        reader.close()
    return found


def test_a_transaction_over_two_topics_is_seen_by_the_official_client_once_it_is_committed(bridge, new_topic, official):
    orders, audit = new_topic(partitions=3), new_topic()
    with bridge.transaction() as txn:
        for number in range(10):
            txn.send(orders, b"%d" % number, key=f"k{number}", headers={"kind": "new"})
        txn.send(audit, b"all")
        assert read_by(official, orders) == read_by(official, audit) == []
    assert txn.outcome is Outcome.COMMITTED
    expected = {(b"%d" % number, f"k{number}", (("kind", "new"),)) for number in range(10)}
    found = read_by(official, orders)
    assert len(found) == 10
    assert {(value, key, tuple(properties.items())) for value, key, properties in found} == expected
    assert [value for value, _, _ in read_by(official, audit)] == [b"all"]


def test_an_official_consumer_with_a_schema_reads_what_is_written_in_its_encoding(bridge, topic, official):
    """The schema of the topic came with an official producer; a transaction's messages carry none of their own."""
    schema = importlib.import_module("pulsar").schema

    class Order(schema.Record):  # type: ignore[misc,name-defined]
        id = schema.Integer()

    theirs = official.subscribe(topic, "with-a-schema", schema=schema.JsonSchema(Order))
    producer = official.create_producer(topic, schema=schema.JsonSchema(Order))
    producer.send(Order(id=1))
    producer.close()
    send(bridge, topic, b'{"id": 2}')
    found = []
    for _ in range(2):
        message = theirs.receive(MILLISECONDS)
        found.append(message.value().id)
        theirs.acknowledge(message)
    theirs.close()
    assert sorted(found) == [1, 2]


def test_where_a_schema_is_enforced_a_transaction_is_refused_at_once(pulsar_broker, connect, official):
    schema, namespace = importlib.import_module("pulsar").schema, f"public/{unique('schema')}"
    admin(pulsar_broker, "PUT", f"namespaces/{namespace}")
    admin(pulsar_broker, "POST", f"namespaces/{namespace}/schemaValidationEnforced", True)
    topic = f"persistent://{namespace}/orders"
    official.create_producer(topic, schema=schema.StringSchema()).close()
    bridge = connect()
    with pytest.raises(DeliveryFailed, match="switch isSchemaValidationEnforced off"), bridge.transaction() as txn:
        txn.send(topic, b"no schema")


def test_messages_of_one_entry_go_to_one_member_together_and_others_to_another(connect, topic, group):
    """The broker hands out whole entries: what was sent together without keys, or with one key, is one."""
    one, two = connect(), connect()
    with one.consumer(topic, group, sharing="message") as first, two.consumer(topic, group, sharing="message") as other:
        with one.transaction() as txn:
            txn.send_many(topic, [b"1", b"2"])
            txn.send_many(topic, [(b"3", "key"), (b"4", "key"), (b"5", "another")])
        assert values(take(first, 1)) == [b"1"]
        assert values(take(other, 1)) == [b"3"]
        assert values(take(first, 1)) == [b"2"]
        assert values(take(other, 2)) == [b"4", b"5"]


def test_no_sequences_are_promised_where_duplicates_stay(pulsar_broker: brokers.Pulsar, open_bridge: Connect) -> None:
    assert open_bridge().capabilities[Capability.RESUME_SEQUENCE]
    namespace = unique("doubling")
    admin(pulsar_broker, "PUT", f"namespaces/public/{namespace}")
    admin(pulsar_broker, "POST", f"namespaces/public/{namespace}/deduplication", False)
    bridge = open_bridge(pulsar_broker.url.replace("/default", f"/{namespace}"))
    assert not bridge.capabilities[Capability.RESUME_SEQUENCE]
    with pytest.raises(NotSupported, match="set-deduplication --enable"):
        bridge.publisher("name")
