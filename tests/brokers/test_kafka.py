"""Tests of starting Kafka. Most share a node; three nodes and the older version run with --full."""

import socket
import struct
from functools import partial

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.brokers._kafka import TRANSACTION_VERSIONS, VERSIONS, ask, cluster
from txnbridge_kafka.client.connection import api_versions

from tests.brokers import programs
from tests.brokers.kit import answering, create_topic, port_of, state, topic_appears
from txnbridge.testing import Child

# The first start of a version fetches it.
pytestmark = pytest.mark.timeout(600)

API_VERSIONS = 18


def finalized_features(port: int) -> dict[str, int]:
    return {each.name: each.max_version_level for each in ask(port, api_versions()).finalized_features}


def sees(port: int, nodes: int) -> bool:
    return cluster(port)[1] == nodes


@pytest.fixture
def process_broker(kafka_broker) -> brokers.ProcessBroker:
    if not isinstance(kafka_broker, brokers.ProcessBroker):
        pytest.skip("looks at processes of this machine; Kafka runs in a container here")
    return kafka_broker


def test_a_broker_that_started_takes_a_topic_at_once(kafka_broker):
    port = port_of(kafka_broker)
    assert kafka_broker.url == f"kafka://127.0.0.1:{port}"
    assert create_topic(port, "at-once") == 0
    assert topic_appears(port, "at-once")


def test_committed_data_is_there_after_kill_and_restart(kafka_broker):
    port = port_of(kafka_broker)
    assert create_topic(port, "survivor") == 0
    kafka_broker.kill()
    with pytest.raises(OSError, match="refused"):
        cluster(port)
    kafka_broker.restart()
    assert topic_appears(port, "survivor")


def test_a_broker_that_was_stopped_starts_again(kafka_broker):
    port = port_of(kafka_broker)
    before = cluster(port)
    kafka_broker.stop()
    with pytest.raises(OSError, match="refused"):
        cluster(port)
    kafka_broker.start()
    assert cluster(port) == before


def test_a_paused_broker_keeps_what_was_sent_and_answers_it_once_resumed(process_broker):
    with socket.create_connection(("127.0.0.1", port_of(process_broker)), 30) as connection:
        process_broker.pause()
        try:
            pid = process_broker.pid(1)
            assert pid
            assert wait_until(lambda: "T" in state(pid), 30)
            connection.sendall(struct.pack(">ihhih", 10, API_VERSIONS, 0, 77, -1))
            assert "T" in state(pid)
        finally:
            process_broker.resume()
        assert struct.unpack(">ii", connection.recv(8))[1] == 77


def test_the_broker_cannot_be_reached_from_another_machine(process_broker):
    lines = (process_broker.folder / "node-1.properties").read_text().splitlines()
    (listeners,) = (line.partition("=")[2].split(",") for line in lines if line.startswith("listeners="))
    assert len(listeners) == 3
    assert all("://127.0.0.1:" in listener for listener in listeners)


def test_no_java_is_left_when_the_starter_is_killed():
    with Child(programs.hold_kafka) as starter:
        pid, folder, port = starter.told(timeout=300)
        cluster(port)
        starter.kill()
    assert wait_until(lambda: not state(pid), 30)
    assert wait_until(lambda: not folder.exists(), 30)
    with pytest.raises(OSError, match="refused"):
        cluster(port)


def test_another_transaction_version_and_settings_can_be_asked_for(start_kafka):
    with start_kafka(container=False, transaction_version=1, settings={"auto.create.topics.enable": "true"}) as broker:
        assert finalized_features(port_of(broker))["transaction.version"] == 1
        assert "auto.create.topics.enable=true\n" in (broker.folder / "node-1.properties").read_text()


def test_the_newest_transaction_version_is_the_default(kafka_broker):
    assert finalized_features(port_of(kafka_broker))["transaction.version"] == TRANSACTION_VERSIONS[VERSIONS[0]][0]


@pytest.mark.full
def test_the_older_version_starts_and_starts_again(start_kafka):
    broker = start_kafka(version="3.9.2")
    assert create_topic(port_of(broker), "older") == 0
    broker.restart()
    assert topic_appears(port_of(broker), "older")


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_three_nodes_do_without_any_one_of_them(start_kafka, version):
    broker = start_kafka(nodes=3, version=version)
    ports = [port_of(broker, node) for node in broker.nodes]
    assert [cluster(port)[1] for port in ports] == [3, 3, 3]
    for node in broker.nodes:
        broker.kill(node)
        alive = ports[node % 3]  # of the next node
        assert wait_until(partial(sees, alive, 2), 60)
        assert create_topic(alive, f"without-{node}", replicas=2) == 0
        broker.start(node)
        assert wait_until(partial(sees, ports[node - 1], 3), 60)
    assert all(topic_appears(ports[0], f"without-{node}") for node in broker.nodes)


def test_an_answer_that_is_not_kafkas_is_an_error():
    texts = b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x08" + b"\xff" * 8, b"\0\0"
    with answering(*texts) as port:
        for _ in texts:
            with pytest.raises(OSError, match=r"cannot be read|closed the connection"):
                cluster(port)
