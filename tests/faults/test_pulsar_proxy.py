"""The proxy before a real Pulsar."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers._pulsar import VERSIONS, load_coordinator, rest

from tests.brokers import pulsar_kit

pytestmark = pytest.mark.timeout(600)  # the first start fetches Pulsar


@pytest.fixture
def proxy(pulsar_broker: brokers.Pulsar) -> Iterator[faults.Proxy]:
    with faults.proxy(pulsar_broker) as proxy:
        yield proxy


@pytest.fixture
def direct(pulsar_broker: brokers.Pulsar) -> Iterator[pulsar_kit.Client]:
    with pulsar_kit.Client(pulsar_kit.port_of(pulsar_broker.url)) as client:
        yield client


@pytest.fixture
def client(proxy: faults.Proxy) -> Iterator[pulsar_kit.Client]:
    with pulsar_kit.Client(proxy.ports[0]) as client:
        yield client


def test_a_client_that_connects_through_the_proxy_stays_with_it(pulsar_broker, proxy, client, direct):
    assert proxy.url == f"pulsar://127.0.0.1:{proxy.ports[0]}/public/default"
    topic = pulsar_kit.new_topic("lookup")
    assert client.lookup(topic) == proxy.url.removesuffix("/public/default").encode()
    assert direct.lookup(topic) == pulsar_broker.url.removesuffix("/public/default").encode()
    load_coordinator(proxy.ports[0])


def state_of(txn: int, broker: brokers.Pulsar) -> str:
    metadata = rest(pulsar_kit.port_of(broker.admin_url), f"/admin/v3/transactions/transactionMetadata/0/{txn}")
    return str(metadata["status"])


def test_a_late_end_of_a_transaction_ends_it_after_its_client_is_gone(pulsar_broker, proxy, direct):
    topic = pulsar_kit.new_topic("late-end")
    with pulsar_kit.Client(proxy.ports[0]) as client:
        client.produce(topic)
        txn = client.begin()
        client.add_topic(txn, topic)
        client.put(0, b"late", txn)
        client.receipt()
        hold = proxy.hold(requests="END_TXN")
        client.ask_to_commit(txn)
        assert hold.wait().kind == pulsar_kit.END_TXN
        assert state_of(txn, pulsar_broker) == "OPEN"
        proxy.cut()
    hold.release()
    hold.answered()
    assert pulsar_kit.first_message(pulsar_kit.port_of(pulsar_broker.url), topic) == b"late"


def test_a_late_message_of_a_transaction_arrives_behind_what_was_sent_later(pulsar_broker, proxy, direct):
    topic = pulsar_kit.new_topic("late-send")
    direct.produce(topic)
    with pulsar_kit.Client(proxy.ports[0]) as client:
        client.produce(topic)
        hold = proxy.hold(requests="SEND")
        client.put(7, b"late")
        assert hold.wait().correlation_id == 7
        proxy.cut()
    direct.put(0, b"sent later")
    direct.receipt()
    hold.release()
    hold.answered()
    direct.subscribe(topic)
    assert [direct.message()[0], direct.message()[0]] == [b"sent later", b"late"]


def test_a_held_receipt_is_about_a_message_that_is_stored(pulsar_broker, proxy, client):
    topic = pulsar_kit.new_topic("held-receipt")
    client.produce(topic)
    hold = proxy.hold(answers="SEND")
    client.put(3, b"stored")
    hold.answered()
    assert pulsar_kit.first_message(pulsar_kit.port_of(pulsar_broker.url), topic) == b"stored"
    hold.release()
    assert client.receipt() == 3


def test_an_ack_of_a_transaction_is_held_and_then_answered(pulsar_broker, proxy, client):
    topic = pulsar_kit.new_topic("held-ack")
    pulsar_kit.commit_one(pulsar_kit.port_of(pulsar_broker.url), topic, b"one")
    client.subscribe(topic)
    _, id = client.message()
    txn = client.begin()
    client.add_subscription(txn, topic)
    hold = proxy.hold(requests="ACK")
    client.ask_to_ack(id, txn)
    hold.wait()
    hold.release()
    hold.answered()
    while (command := client.receive()).kind != pulsar_kit.ACK_RESPONSE:
        pass
    assert 4 not in command.fields  # no error
    client.commit(txn)


@pytest.mark.parametrize("name", ["NEW_TXN", "ADD_PARTITION_TO_TXN", "PRODUCER", "LOOKUP"])
def test_an_answer_is_picked_by_the_name_of_its_request(proxy, client, name):
    topic = pulsar_kit.new_topic("named")
    hold = proxy.hold(answers=name)
    with ThreadPoolExecutor(1) as other:

        def use() -> None:
            client.produce(topic)
            client.add_topic(client.begin(), topic)

        used = other.submit(use)
        hold.answered()
        assert not used.done()
        hold.release()
        used.result(timeout=30)


def test_a_message_that_the_broker_pushes_is_held_too(pulsar_broker, proxy, client):
    topic = pulsar_kit.new_topic("held-message")
    pulsar_kit.commit_one(pulsar_kit.port_of(pulsar_broker.url), topic, b"pushed")
    hold = proxy.hold(answers="MESSAGE")
    client.subscribe(topic)
    assert hold.wait().kind == pulsar_kit.MESSAGE
    hold.release()
    assert client.message()[0] == b"pushed"


def test_a_cut_connection_is_replaced_by_the_next(proxy, client):
    client.ask(pulsar_kit.PONG, pulsar_kit.PING)
    proxy.cut()
    with pytest.raises(OSError, match=r"hung up|reset"):
        client.receive()
    with pulsar_kit.Client(proxy.ports[0]) as another:
        another.ask(pulsar_kit.PONG, pulsar_kit.PING)


@pytest.mark.full
def test_the_older_version_keeps_its_clients_behind_the_proxy_too(start_pulsar):
    broker = start_pulsar(version=VERSIONS[-1], store="rocksdb")
    with faults.proxy(broker) as proxy, pulsar_kit.Client(proxy.ports[0]) as client:
        topic = pulsar_kit.new_topic("older")
        assert client.lookup(topic) == f"pulsar://127.0.0.1:{proxy.ports[0]}".encode()
        hold = proxy.hold(answers="SEND")
        client.produce(topic)
        client.put(0, b"older")
        hold.answered()
        hold.release()
        assert client.receipt() == 0
