"""A dead process's transaction that its coordinator has forgotten does not hold readers back for good."""

import time
from collections.abc import Callable

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import send, take, values
from txnbridge_pulsar.client import PulsarClient, PulsarProducer, Single, Transactions, TxnId
from txnbridge_pulsar.client.deadline import ClientDeadline
from txnbridge_pulsar.outcome.forgotten_transactions import oldest_open, release

from tests.pulsar.client_kit import begin, everything
from tests.pulsar.kit import SOON
from tests.pulsar.writing_kit import Connect, cluster_of, concrete, connect_to, flush, new_topic, read_all
from txnbridge import Bridge
from txnbridge.spi import Deadline
from txnbridge.testing import Child, tell

Die = Callable[[str, str, str], None]


def send_late(url: str, admin_url: str, topic: str) -> None:
    """Stand still before the first message of a transaction until its time is over, send the message, and wait."""
    write = PulsarProducer._write

    def write_late(producer: PulsarProducer, connection: object, send: object, deadline: object) -> None:
        is_first = producer.topic == concrete(topic)
        time.sleep(2 * is_first)
        write(producer, connection, send, ClientDeadline(SOON))  # type: ignore[arg-type]
        if is_first:
            tell(send.result(SOON) is not None)  # type: ignore[attr-defined]
            time.sleep(600)  # it is killed long before

    PulsarProducer._write = write_late  # type: ignore[assignment]
    txn = connect_to(url, admin_url).transaction(timeout=1)
    txn.send(topic, b"late")
    flush(txn)


def commit_unheard(url: str, admin_url: str, topic: str) -> None:
    """Commit a transaction whose end does not reach a topic, as if the topic was being unloaded, and wait."""
    register = Transactions.register

    def register_others(own: Transactions, txn: object, timeout: float, topics: list[str], groups: object = ()) -> None:
        register(own, txn, timeout, [each for each in topics if each != concrete(topic)], groups)  # type: ignore[arg-type]

    Transactions.register = register_others  # type: ignore[assignment, method-assign]
    with connect_to(url, admin_url).transaction() as txn:
        txn.send(topic, b"committed")
    tell(True)
    time.sleep(600)


WAYS: dict[Die, list[bytes]] = {send_late: [b"behind"], commit_unheard: [b"committed", b"behind"]}


@pytest.fixture(params=WAYS, ids=lambda die: die.__name__)
def die(request: pytest.FixtureRequest) -> Die:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def held(pulsar_broker: brokers.Pulsar, open_bridge: Connect, die: Die) -> tuple[Bridge, str]:
    """A bridge, and a topic that a dead process holds back, with a message behind that."""
    bridge = open_bridge()
    topic = new_topic(bridge)
    with Child(die, pulsar_broker.url, pulsar_broker.admin_url, topic) as child:
        assert child.told()
        child.kill()
    with bridge.publisher() as publisher:
        publisher.send(topic, b"behind")
    return bridge, topic


def test_a_reader_that_waits_gets_what_was_committed(held, die, open_bridge, with_timing):
    bridge, topic = held
    with bridge.consumer(topic) as impatient:
        assert not impatient.poll(1, timeout=1)
    with with_timing(idle_check_seconds=0.2):
        patient = open_bridge()
    with patient.consumer(topic) as consumer:
        assert values(take(consumer, len(WAYS[die]))) == WAYS[die]
        assert not consumer.poll(1, timeout=1)


def test_a_repair_ends_a_transaction_as_its_proof_topic_says(held: tuple[Bridge, str], die: Die) -> None:
    bridge, topic = held
    cluster = cluster_of(bridge)
    txn = oldest_open(cluster.rest, concrete(topic), Deadline(SOON))
    decision = "aborted" if die is send_late else "committed"
    done = bridge.admin.repair(str(txn))
    assert done == f"{decision} {txn} on {topic}-partition-0: its proof topic says so, so it was {decision} before"
    with bridge.consumer(topic) as consumer:
        assert values(take(consumer, len(WAYS[die]))) == WAYS[die]


def send_after_abort(client: PulsarClient, topic: str) -> TxnId:
    """Send the first message of a transaction on a topic after its abort, without the name of a proof topic."""
    txn = begin(client, topic)
    client.transactions.end(txn, False, SOON)
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    producer.send(Single(b"late"), txn, timeout=SOON).result(SOON)
    producer.close(SOON)
    return txn


def test_a_transaction_that_names_no_proof_topic_is_left_alone(open_bridge: Connect, client: PulsarClient) -> None:
    bridge = open_bridge()
    topic, cluster = concrete(new_topic(bridge)), cluster_of(bridge)
    txn = send_after_abort(client, topic)
    release(cluster, topic, Deadline(SOON))
    assert oldest_open(cluster.rest, topic, Deadline(SOON)) == txn
    client.transactions.end_on_partition(txn, topic, False, SOON)


def test_a_topic_where_a_transaction_has_ended_before_is_not_held_back(open_bridge: Connect, client: PulsarClient):
    bridge = open_bridge()
    topic = new_topic(bridge)
    send(bridge, topic, b"1")
    send_after_abort(client, concrete(topic))
    assert read_all(client, concrete(topic)) == [b"1"]


def test_a_transaction_that_its_coordinator_knows_is_left_alone(open_bridge: Connect, client: PulsarClient) -> None:
    bridge = open_bridge()
    topic, cluster = new_topic(bridge), cluster_of(bridge)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
        number = flush(txn)
        release(cluster, concrete(topic), Deadline(SOON))
        assert oldest_open(cluster.rest, concrete(topic), Deadline(SOON)) == number
    assert everything(client, concrete(topic)) == [b"1"]
