"""The same key goes to the same partition as with Kafka's own Java client."""

import base64
from pathlib import Path
from random import Random

import pytest
from txnbridge_conformance import brokers

import txnbridge
from tests.java_kit import ask_java

PARTITIONS = 7
KEYS = 200

PARTITIONS_OF_JAVA = """
var in = new BufferedReader(new InputStreamReader(System.in));
for (String line; (line = in.readLine()) != null; ) System.out.println(
    BuiltInPartitioner.partitionForKey(Base64.getDecoder().decode(line), %d));
"""


def partitions_of_java(folder: Path, keys: list[bytes]) -> list[int]:
    imports = "org.apache.kafka.clients.producer.internals.BuiltInPartitioner"
    sent = [base64.b64encode(key).decode() for key in keys]
    return [int(answer) for answer in ask_java(folder, imports, PARTITIONS_OF_JAVA % PARTITIONS, sent)]


@pytest.fixture
def keys() -> list[bytes]:
    """Return keys of every length that the hash treats differently, text and bytes, and the empty key."""
    random = Random("keys")
    texts = [f"order-{number}".encode() for number in range(KEYS // 2)]
    found = [b"", "schlüssel-ß-✓".encode(), *texts]
    return [*found, *(random.randbytes(1 + number % 40) for number in range(KEYS - len(found)))]


@pytest.mark.parametrize("way", ["transaction", "send_many", "publisher"])
def test_a_key_goes_where_kafkas_java_client_would_send_it(kafka_broker: brokers.Broker, tmp_path, keys, way):
    expected = partitions_of_java(tmp_path, keys)
    assert set(expected) == set(range(PARTITIONS))  # or the comparison would say little
    topic = f"keys-{way}"
    with txnbridge.connect(kafka_broker.url, create_topics=PARTITIONS) as bridge:
        if way == "publisher":
            with bridge.publisher() as publisher:
                for number, key in enumerate(keys):
                    publisher.send(topic, b"%d" % number, key=key)
        else:
            with bridge.transaction() as txn:
                if way == "transaction":
                    for number, key in enumerate(keys):
                        txn.send(topic, b"%d" % number, key=key)
                else:
                    txn.send_many(topic, [(b"%d" % number, key) for number, key in enumerate(keys)])
        found = {}
        for message in bridge.consumer(topic):
            found[int(message.value)] = (message.key, message.partition)
            if len(found) == len(keys):
                break
    assert found == {number: (key, expected[number]) for number, key in enumerate(keys)}
