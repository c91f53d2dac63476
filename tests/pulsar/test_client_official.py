"""The official client as an independent reader and writer: what either writes the other reads."""

import importlib
from typing import Any

import pytest
from txnbridge_pulsar.client import EARLIEST, Compression, PulsarClient, Single, SubscriptionType

from tests.pulsar.client_kit import SOON, acknowledge, batch_of, begin, everything, payloads, receive

MILLISECONDS = int(SOON * 1000)


def pulsar() -> Any:
    return importlib.import_module("pulsar")


def read_by(official: Any, topic: str) -> list[Any]:
    reader = official.create_reader(topic, pulsar().MessageId.earliest)
    found = []
    while reader.has_message_available():
        found.append(reader.read_next(MILLISECONDS))
    reader.close()
    return found


@pytest.mark.parametrize("kind", list(Compression), ids=lambda kind: kind.name)
def test_the_official_client_reads_what_we_write(official, client: PulsarClient, topic, kind):
    producer = client.create_producer(topic, timeout=SOON, compression=kind)
    batch = batch_of(b"plain", b"")
    batch.append(b"full", "key", [("a", "1"), ("ü", "2")], 1234)
    producer.send(batch, timeout=SOON)
    producer.send(Single(b"alone", "key", [("a", "1")], 1234), timeout=SOON)
    producer.send(Single(b"x" * 10_000, b"\xff\x00"), timeout=SOON).result(SOON)
    found = read_by(official, topic)
    assert [(m.data(), m.partition_key(), m.properties(), m.event_timestamp()) for m in found[:4]] == [
        (b"plain", "", {}, 0),
        (b"", "", {}, 0),
        (b"full", "key", {"a": "1", "ü": "2"}, 1234),
        (b"alone", "key", {"a": "1"}, 1234),
    ]
    assert found[4].data() == b"x" * 10_000
    assert {message.producer_name() for message in found} == {producer.name}


COMPRESSIONS = ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"]


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("batching", [True, False], ids=["batches", "alone"])
def test_we_read_what_the_official_client_writes(official, client, topic, kind, batching):
    compression = getattr(pulsar().CompressionType, kind)
    producer = official.create_producer(topic, compression_type=compression, batching_enabled=batching)
    for number in range(50):
        options: dict[str, Any] = {"partition_key": f"key {number}", "event_timestamp": 1000 + number}
        producer.send_async(b"%d" % number * 20, None, properties={"number": str(number)}, **options)
    producer.flush()
    producer.close()
    found = [message for entry in receive(client.read(topic, timeout=SOON), 50) for message in entry.messages()]
    assert [(m.payload, m.key, m.properties, m.event_time) for m in found] == [
        (b"%d" % number * 20, b"key %d" % number, [("number", str(number))], 1000 + number) for number in range(50)
    ]
    assert (found[0].entry.count > 1) == batching


def test_the_official_client_sees_what_is_committed_and_nothing_that_is_open_or_aborted(official, client, topic):
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    for number, commit in enumerate([True, False, True, None]):
        txn = begin(client, topic)
        producer.send(batch_of(b"%d a" % number, b"%d b" % number), txn, timeout=SOON)
        producer.send(Single(b"%d c" % number), txn, timeout=SOON).result(SOON)
        if commit is not None:
            client.transactions.end(txn, commit, SOON)
    expected = [b"0 a", b"0 b", b"0 c", b"2 a", b"2 b", b"2 c"]
    assert [message.data() for message in read_by(official, topic)] == expected
    client.transactions.end(txn, False, SOON)
    assert [message.data() for message in read_by(official, topic)] == expected == everything(client, topic)


def test_acknowledgements_of_parts_of_a_batch_are_understood_by_the_official_client(official, client, topic):
    client.create_producer(topic, timeout=SOON).send(batch_of(b"0", b"1", b"2"), timeout=SOON).result(SOON)
    consumer = client.subscribe(topic, "s", timeout=SOON, type=SubscriptionType.SHARED, start=EARLIEST)
    (entry,) = receive(consumer, 3)
    acknowledge(consumer, [entry.messages()[1].id])
    consumer.close(SOON)
    theirs = official.subscribe(topic, "s", consumer_type=pulsar().ConsumerType.Shared)
    assert [theirs.receive(MILLISECONDS).data() for _ in range(2)] == [b"0", b"2"]
    theirs.close()


def test_the_schema_of_the_official_client_is_left_readable(official, client, topic):
    schema = pulsar().schema

    class Order(schema.Record):  # type: ignore[misc,name-defined]
        id = schema.Integer()

    official.create_producer(topic, schema=schema.JsonSchema(Order)).send(Order(id=7))
    (entry,) = receive(client.read(topic, timeout=SOON), 1)
    assert payloads([entry]) == [b'{\n "id": 7\n}']
