"""Tests of the client on a broker that asks who it is: tokens that expire, certificates, and the largest messages."""

import time

import pytest
from txnbridge_pulsar import client as wire

from tests.kafka.certificates import Authority
from tests.pulsar.client_kit import (
    SOON,
    acknowledge,
    batch_of,
    begin,
    connection_of,
    everything,
    fresh_topic,
    payloads,
    receive,
)
from tests.pulsar.secured_kit import PASSWORD, token


def transact(client: wire.PulsarClient) -> None:
    """A transaction that sends and acknowledges, seen by a reader."""
    topic = fresh_topic()
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    producer.send(batch_of(b"1", b"2"), timeout=SOON).result(SOON)
    consumer = client.subscribe(topic, "s", timeout=SOON, type=wire.SubscriptionType.SHARED, start=wire.EARLIEST)
    (entry,) = receive(consumer, 2)
    txn = begin(client, topic)
    client.transactions.register(txn, SOON, subscriptions=[(topic, "s")])
    producer.send(wire.Single(b"3"), txn, timeout=SOON).result(SOON)
    acknowledge(consumer, [message.id for message in entry.messages()], txn)
    client.transactions.end(txn, True, SOON)
    assert payloads(receive(consumer, 1)) == [b"3"]
    assert everything(client, topic) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    "authentication",
    [wire.token_authentication(token("user")), wire.basic_authentication("user", PASSWORD)],
    ids=["token", "password"],
)
def test_credentials_let_in_without_tls(secured, authentication):
    with wire.PulsarClient(secured.url, authentication=authentication) as client:
        transact(client)


def test_a_token_that_expires_is_replaced_on_the_living_connection(secured):
    asked = 0

    def fresh() -> str:
        nonlocal asked
        asked += 1
        return token("user", 4)

    topic = fresh_topic()
    with secured.client(wire.token_authentication(fresh)) as client:
        producer = client.create_producer(topic, timeout=SOON)
        connection, until = connection_of(producer), time.monotonic() + SOON
        while asked < 3 and time.monotonic() < until:
            producer.send(wire.Single(b"x"), timeout=SOON).result(SOON)
            time.sleep(0.1)
        assert asked >= 3
        assert connection_of(producer) is connection and not connection.closed


def test_a_token_that_is_not_replaced_ends_the_connection(secured):
    once = token("user", 3)
    with secured.client(wire.token_authentication(once)) as client:
        producer = client.create_producer(fresh_topic(), timeout=SOON)
        until = time.monotonic() + SOON
        while producer.lost is None and time.monotonic() < until:
            time.sleep(0.1)
        with pytest.raises(wire.PulsarError):
            producer.reopen(2)


def test_a_broker_with_a_certificate_of_somebody_else_is_not_talked_to(secured, tmp_path):
    tls = wire.tls_context(Authority(tmp_path, "somebody-else").certificate)
    with wire.PulsarClient(secured.url_tls, authentication=wire.token_authentication(token("user")), tls=tls) as client:
        with pytest.raises(wire.ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
            client.create_producer(fresh_topic(), timeout=1)


def test_a_broker_under_another_name_is_not_talked_to(secured):
    url = secured.url_tls.replace("127.0.0.1", "localhost")
    tls = wire.tls_context(secured.authority.certificate)
    with wire.PulsarClient(url, authentication=wire.token_authentication(token("user")), tls=tls) as client:
        with pytest.raises(wire.ConnectFailed, match=r"localhost:.*Hostname mismatch"):
            client.create_producer(fresh_topic(), timeout=1)
    tls = wire.tls_context(secured.authority.certificate, verify_hostname=False)
    with wire.PulsarClient(url, authentication=wire.token_authentication(token("user")), tls=tls) as client:
        client.create_producer(fresh_topic(), timeout=SOON).close(SOON)


# ---------------------------------------------------------------------------------------------------- chunks

# Here, because this broker's bookie takes entries of the full size, which are what the official client cuts into.


def test_a_message_of_the_official_client_in_chunks_is_read_whole(secured):
    pulsar = pytest.importorskip("pulsar")
    topic, large = fresh_topic(), bytes(range(256)) * 4096 * 12  # 12 MiB, in three chunks
    official = pulsar.Client(
        secured.url,
        authentication=pulsar.AuthenticationToken(token("user")),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    producer = official.create_producer(topic, chunking_enabled=True, batching_enabled=False)
    producer.send(b"before")
    producer.send(large, properties={"a": "1"})
    producer.send(b"after")
    official.close()
    with secured.client(wire.token_authentication(token("user"))) as client:
        consumer = client.subscribe(topic, "s", timeout=SOON, type=wire.SubscriptionType.SHARED, start=wire.EARLIEST)
        entries = receive(consumer, 3)
        assert payloads(entries) == [b"before", large, b"after"]
        whole = entries[1]
        assert whole.messages()[0].properties == [("a", "1")]
        assert len(whole.parts) == 3 and whole.parts[-1][:2] == whole.id[:2]
        acknowledge(consumer, [entries[0].id, *whole.parts])
        consumer.close(SOON)
        again = client.subscribe(topic, "s", timeout=SOON, type=wire.SubscriptionType.SHARED)
        assert payloads(receive(again, 1)) == [b"after"]


def test_a_message_of_the_largest_size_is_stored(secured):
    with secured.client(wire.token_authentication(token("user"))) as client:
        producer = client.create_producer(fresh_topic(), timeout=SOON)
        limit = connection_of(producer).max_message_size
        send = producer.send(wire.Single(bytes(limit - 100)), timeout=SOON)
        assert not send.result(SOON).duplicate
