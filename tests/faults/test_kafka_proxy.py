"""The proxy before a real Kafka."""

import struct

import pytest
from txnbridge_conformance import faults
from txnbridge_conformance.brokers._kafka import ask, cluster, metadata
from txnbridge_kafka.client import wire

from tests.brokers.kit import create_topic, port_of, topic_appears, topics
from tests.faults.kit import API_VERSIONS, Client

pytestmark = pytest.mark.timeout(600)  # the first start fetches Kafka

CREATE_TOPICS, FIND_COORDINATOR, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN = 19, 10, 22, 24, 26


@pytest.fixture
def proxy(kafka_broker):
    with faults.proxy(kafka_broker) as proxy:
        yield proxy


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def told_ports(port: int) -> list[int]:
    """The ports that a broker tells to those who ask at this one."""
    return [each.port for each in ask(port, metadata([])).brokers]


def test_a_client_that_connects_through_the_proxy_stays_with_it(kafka_broker, proxy):
    assert proxy.url == f"kafka://127.0.0.1:{proxy.ports[0]}"
    assert told_ports(proxy.ports[0]) == list(proxy.ports)
    assert told_ports(port_of(kafka_broker)) == [port_of(kafka_broker)]
    assert cluster(proxy.ports[0]) == cluster(port_of(kafka_broker))


def test_a_request_of_one_kind_is_held_while_others_pass(kafka_broker, proxy):
    hold = proxy.hold(requests="CreateTopics")
    with Client(proxy.ports[0]) as late:
        name = "held-request"
        topic = text(name) + struct.pack(">ihii", 1, 1, 0, 0)
        late.send(CREATE_TOPICS, struct.pack(">i", 1) + topic + struct.pack(">i?", 10_000, False), version=2)
        hold.wait()
        assert name not in topics(proxy.ports[0])
        proxy.cut()
    hold.release()
    hold.answered()
    assert topic_appears(port_of(kafka_broker), name)


def test_a_held_answer_is_about_something_that_happened(kafka_broker, proxy):
    hold = proxy.hold(answers="CreateTopics")
    with Client(proxy.ports[0]) as client:
        topic = text("held-answer") + struct.pack(">ihii", 1, 1, 0, 0)
        client.send(CREATE_TOPICS, struct.pack(">i", 1) + topic + struct.pack(">i?", 10_000, False), version=2)
        hold.answered()
        assert topic_appears(port_of(kafka_broker), "held-answer")
        hold.release()
        assert client.receive()[0] == 1


def producer_of(client: Client, transactional_id: str) -> tuple[int, int]:
    """Open a transactional id, asking again as long as its coordinator is not there yet."""
    coordinator_not_available, not_coordinator, loading = 15, 16, 14
    again = {coordinator_not_available, not_coordinator, loading}
    for _ in range(1000):
        client.ask(FIND_COORDINATOR, text(transactional_id) + b"\1", version=1)  # makes the internal topic
        answer = client.ask(INIT_PRODUCER_ID, text(transactional_id) + struct.pack(">i", 60_000), version=1)
        _throttled, error, producer, epoch = struct.unpack(">ihqh", answer)
        if error not in again:
            break
    assert error == 0
    return producer, epoch


def test_a_late_end_of_a_transaction_ends_it_after_its_client_is_gone(kafka_broker, proxy):
    port = proxy.ports[0]
    assert create_topic(port, "late-end") == 0
    with Client(port) as client:
        transactional_id = text("late-end")
        producer, epoch = producer_of(client, "late-end")
        who = transactional_id + struct.pack(">qh", producer, epoch)
        partition = struct.pack(">i", 1) + text("late-end") + struct.pack(">ii", 1, 0)
        assert client.ask(ADD_PARTITIONS, who + partition, version=0)[-2:] == b"\0\0"  # no error
        hold = proxy.hold(requests="EndTxn")
        client.send(END_TXN, who + b"\1", version=0)
        assert hold.wait().correlation_id > 0
        assert state_of("late-end", port_of(kafka_broker)) == "Ongoing"
    hold.release()
    hold.answered()
    assert state_of("late-end", port_of(kafka_broker)) in {"PrepareCommit", "CompleteCommit"}


def state_of(transactional_id: str, port: int) -> str:
    (told,) = ask(port, wire.DESCRIBE_TRANSACTIONS(transactional_ids=[transactional_id])).transaction_states
    state: str = told.transaction_state
    return state


def test_a_cut_connection_is_replaced_by_the_next(proxy):
    with Client(proxy.ports[0]) as client:
        client.ask(API_VERSIONS)
        proxy.cut()
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
    with Client(proxy.ports[0]) as client:
        assert client.ask(API_VERSIONS)[:2] == b"\0\0"


@pytest.mark.full
def test_every_one_of_three_nodes_is_behind_the_proxy(start_kafka):
    broker = start_kafka(nodes=3)
    with faults.proxy(broker) as proxy:
        assert len(set(proxy.ports)) == 3
        for port in proxy.ports:
            assert sorted(told_ports(port)) == sorted(proxy.ports)
