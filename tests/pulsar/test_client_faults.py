"""A broker that is killed or frozen: nothing is lost or doubled that need not be, and nobody hangs."""

from collections.abc import Callable, Iterator

import pytest
from txnbridge_conformance import brokers
from txnbridge_pulsar import client as wire

from tests.in_time import within
from tests.pulsar import client_kit

# A broker that was killed reads its ledgers again before it serves a topic, on a busy machine slowly.
AFTER_A_KILL = 90.0


def test_a_transaction_survives_the_broker_and_nothing_is_lost_or_doubled(client, topic, pulsar_broker):
    # A subscription keeps the broker from trimming what is not committed yet.
    consumer = client.subscribe(topic, "s", timeout=client_kit.SOON, start=wire.EARLIEST)
    producer = client.create_producer(topic, name="survivor", timeout=client_kit.SOON, transactions=True)
    producer.send(wire.Single(b"before"), timeout=client_kit.SOON).result(client_kit.SOON)
    assert client_kit.payloads(client_kit.receive(consumer, 1)) == [b"before"]
    txn, late = client_kit.begin(client, topic, ttl_ms=600_000), client.transactions.begin(3000, client_kit.SOON)
    expected = [b"%d" % number for number in range(20_000)]
    for at in range(0, len(expected), 20):
        if at == len(expected) // 2:
            pulsar_broker.restart()
        client_kit.send_for_certain(producer, client_kit.batch_of(*expected[at : at + 20]), txn, AFTER_A_KILL)
    client_kit.settle(producer, AFTER_A_KILL)
    client.transactions.end(txn, True, AFTER_A_KILL)
    assert client_kit.everything(client, topic) == [b"before", *expected]
    with pytest.raises(wire.TransactionNotFound):
        client.transactions.end(late, True, AFTER_A_KILL)
    with pytest.raises(wire.BrokerConnectionLost):
        consumer.receive(client_kit.SOON)
    consumer.reopen(AFTER_A_KILL)
    assert client_kit.payloads(client_kit.receive(consumer, 1 + len(expected))) == [b"before", *expected]


@pytest.fixture
def frozen(pulsar_broker: brokers.Pulsar) -> Iterator[Callable[[], None]]:
    """Freezes the broker, until the test ends."""
    try:
        yield pulsar_broker.pause
    finally:
        pulsar_broker.resume()


def test_a_frozen_broker_keeps_nobody_beyond_the_deadline(client, topic, frozen, pulsar_broker):
    producer = client.create_producer(topic, timeout=client_kit.SOON)
    consumer = client.subscribe(topic, "s", timeout=client_kit.SOON, start=wire.EARLIEST)
    producer.send(wire.Single(b"x"), timeout=client_kit.SOON).result(client_kit.SOON)
    (entry,) = client_kit.receive(consumer, 1)
    txn = client_kit.begin(client, topic)
    frozen()
    calls: list[Callable[[], object]] = [
        lambda: producer.send(wire.Single(b"y"), timeout=0.3).result(0.3),
        lambda: producer.flush(0.3),
        lambda: producer.reopen(0.3),
        lambda: client_kit.acknowledge(consumer, [entry.id], timeout=0.3),
        lambda: consumer.acknowledge_up_to(entry.id, timeout=0.3),
        lambda: consumer.last_message_id(0.3),
        lambda: consumer.seek(wire.EARLIEST, 0.3),
        lambda: client.partitions(topic, 0.3),
        lambda: client.topics("public/default", 0.3),
        lambda: client.create_producer(topic, timeout=0.3),
        lambda: client.subscribe(topic, "t", timeout=0.3),
        lambda: client.transactions.begin(1000, 0.3),
        lambda: client.transactions.register(txn, 0.3, [topic], [(topic, "s")]),
        lambda: client.transactions.end(txn, True, 0.3),
        lambda: client.transactions.connect(0.3),
        lambda: wire.PulsarClient(client_kit.service(pulsar_broker)).partitions(topic, 0.3),
    ]
    for call in calls:
        with within(0.3), pytest.raises(wire.PulsarError) as error:
            call()
        assert isinstance(error.value, wire.RequestTimedOut) or error.value.retriable
    with within(0.9):
        assert consumer.receive(0.3) == []
        producer.close(0.3)
        consumer.close(0.3)
        client.close()
