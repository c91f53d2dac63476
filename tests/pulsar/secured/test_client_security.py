"""Tests of the client on a broker that asks who it is: tokens that expire, certificates, and the largest messages."""

import time

import pytest
from txnbridge_pulsar import client as wire

from tests.kafka.certificates import Authority
from tests.pulsar import client_kit
from tests.pulsar.secured_kit import PASSWORD, token


def transact(client: wire.PulsarClient) -> None:
    """A transaction that sends and acknowledges, seen by a reader."""
    topic = client_kit.fresh_topic()
    producer = client.create_producer(topic, timeout=client_kit.SOON, transactions=True)
    producer.send(client_kit.batch_of(b"1", b"2"), timeout=client_kit.SOON).result(client_kit.SOON)
    consumer = client.subscribe(
        topic, "s", timeout=client_kit.SOON, type=wire.SubscriptionType.SHARED, start=wire.EARLIEST
    )
    (entry,) = client_kit.receive(consumer, 2)
    txn = client_kit.begin(client, topic)
    client.transactions.register(txn, client_kit.SOON, subscriptions=[(topic, "s")])
    producer.send(wire.Single(b"3"), txn, timeout=client_kit.SOON).result(client_kit.SOON)
    client_kit.acknowledge(consumer, [message.id for message in entry.messages()], txn)
    client.transactions.end(txn, True, client_kit.SOON)
    assert client_kit.payloads(client_kit.receive(consumer, 1)) == [b"3"]
    assert client_kit.everything(client, topic) == [b"1", b"2", b"3"]


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

    topic = client_kit.fresh_topic()
    with secured.client(wire.token_authentication(fresh)) as client:
        producer = client.create_producer(topic, timeout=client_kit.SOON)
        connection, until = client_kit.connection_of(producer), time.monotonic() + client_kit.SOON
        while asked < 3 and time.monotonic() < until:
            producer.send(wire.Single(b"x"), timeout=client_kit.SOON).result(client_kit.SOON)
            time.sleep(0.1)
        assert asked >= 3
        assert client_kit.connection_of(producer) is connection and not connection.closed


def test_a_token_that_is_not_replaced_ends_the_connection(secured):
    once = token("user", 3)
    with secured.client(wire.token_authentication(once)) as client:
        producer = client.create_producer(client_kit.fresh_topic(), timeout=client_kit.SOON)
        until = time.monotonic() + client_kit.SOON
        while producer.lost is None and time.monotonic() < until:
            time.sleep(0.1)
        with pytest.raises(wire.PulsarError):
            producer.reopen(2)


def test_a_broker_with_a_certificate_of_somebody_else_is_not_talked_to(secured, tmp_path):
    tls = wire.tls_context(Authority(tmp_path, "somebody-else").certificate)
    with wire.PulsarClient(secured.url_tls, authentication=wire.token_authentication(token("user")), tls=tls) as client:
        with pytest.raises(wire.ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
            client.create_producer(client_kit.fresh_topic(), timeout=1)


def test_a_broker_under_another_name_is_not_talked_to(secured):
    url = secured.url_tls.replace("127.0.0.1", "localhost")
    tls = wire.tls_context(secured.authority.certificate)
    with wire.PulsarClient(url, authentication=wire.token_authentication(token("user")), tls=tls) as client:
        with pytest.raises(wire.ConnectFailed, match=r"localhost:.*Hostname mismatch"):
            client.create_producer(client_kit.fresh_topic(), timeout=1)
    tls = wire.tls_context(secured.authority.certificate, verify_hostname=False)
    with wire.PulsarClient(url, authentication=wire.token_authentication(token("user")), tls=tls) as client:
        client.create_producer(client_kit.fresh_topic(), timeout=client_kit.SOON).close(client_kit.SOON)


# Here, because this broker's bookie takes entries of the full size, which are what the official client cuts into.


def test_a_message_of_the_official_client_in_chunks_is_read_whole(secured):
    pulsar = pytest.importorskip("pulsar")
    topic, large = client_kit.fresh_topic(), bytes(range(256)) * 4096 * 12  # 12 MiB, in three chunks
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
        consumer = client.subscribe(
            topic, "s", timeout=client_kit.SOON, type=wire.SubscriptionType.SHARED, start=wire.EARLIEST
        )
        entries = client_kit.receive(consumer, 3)
        assert client_kit.payloads(entries) == [b"before", large, b"after"]
        whole = entries[1]
        assert whole.messages()[0].properties == [("a", "1")]
        assert len(whole.parts) == 3 and whole.parts[-1][:2] == whole.id[:2]
        client_kit.acknowledge(consumer, [entries[0].id, *whole.parts])
        consumer.close(client_kit.SOON)
        again = client.subscribe(topic, "s", timeout=client_kit.SOON, type=wire.SubscriptionType.SHARED)
        assert client_kit.payloads(client_kit.receive(again, 1)) == [b"after"]


def test_a_message_of_the_largest_size_is_stored(secured):
    with secured.client(wire.token_authentication(token("user"))) as client:
        producer = client.create_producer(client_kit.fresh_topic(), timeout=client_kit.SOON)
        limit = client_kit.connection_of(producer).max_message_size
        send = producer.send(wire.Single(bytes(limit - 100)), timeout=client_kit.SOON)
        assert not send.result(client_kit.SOON).duplicate
