"""Tests of starting Pulsar. Most share one broker; the older version and every store run with --full."""

import functools
import subprocess
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.brokers._pulsar import STORES, VERSIONS, PulsarProcess, answering, load_coordinator, rest

from tests.brokers import kit, programs
from tests.brokers.kit import LISTENERS, answers, listening, state
from tests.brokers.pulsar_kit import PING, PONG, Client, PulsarConnection, commit_one, first_message, new_topic, port_of
from txnbridge.testing import Child

# The first start of a version fetches it.
pytestmark = pytest.mark.timeout(600)


def settings_of(broker: brokers.Pulsar) -> dict[str, str]:
    found: dict[str, str] = rest(port_of(broker.admin_url), "/admin/v2/brokers/configuration/runtime")
    return found


def version_of(port: int) -> str:
    """Return the version that a broker gives to a client."""
    with PulsarConnection(port) as connection:
        told = connection.connected[1]
        assert isinstance(told, bytes)
        return told.decode()


@pytest.fixture
def process_broker(pulsar_broker: brokers.Pulsar) -> PulsarProcess:
    if not isinstance(pulsar_broker, PulsarProcess):
        pytest.skip("looks at processes of this machine; Pulsar runs in a container here")
    return pulsar_broker


def test_a_broker_that_started_commits_at_once(pulsar_broker):
    port = port_of(pulsar_broker.url)
    assert pulsar_broker.url == f"pulsar://127.0.0.1:{port}/public/default"
    topic = new_topic("at-once")
    commit_one(port, topic, b"first")
    assert first_message(port, topic) == b"first"
    assert version_of(port) == f"Pulsar Server{pulsar_broker.version}"


def test_committed_messages_and_open_transactions_survive_a_kill_and_a_restart(pulsar_broker):
    port = port_of(pulsar_broker.url)
    committed, unfinished = new_topic("committed"), new_topic("open")
    commit_one(port, committed, b"survivor")
    with Client(port) as client:
        client.produce(unfinished)
        txn = client.begin()
        client.add_topic(txn, unfinished)
        client.put(0, b"to be ended", txn)
        client.receipt()
        pulsar_broker.kill()
        with pytest.raises(OSError, match="cannot be reached"):
            load_coordinator(port)
    pulsar_broker.restart()
    assert first_message(port, committed) == b"survivor"
    with Client(port) as client:
        client.lookup(unfinished)
        client.commit(txn)
    assert first_message(port, unfinished) == b"to be ended"


def test_a_paused_broker_keeps_what_was_sent_and_answers_it_once_resumed(process_broker):
    with Client(port_of(process_broker.url)) as client:
        process_broker.pause()
        try:
            pid = process_broker.pid(1)
            assert pid
            assert wait_until(lambda: "T" in state(pid), 30)
            client.send(PING)
            assert "T" in state(pid)
        finally:
            process_broker.resume()
        assert client.receive().kind == PONG


@pytest.mark.skipif(not LISTENERS.exists(), reason="looks where Linux says who listens")
def test_only_zookeeper_can_be_reached_from_another_machine(process_broker):
    pid = process_broker.pid(1)
    assert pid
    found = listening(pid)
    assert ("127.0.0.1", port_of(process_broker.url)) in found
    assert [port for address, port in found if address != "127.0.0.1"] == [process_broker._zookeeper]


def test_two_run_side_by_side_and_no_java_is_left_when_a_starter_is_killed(pulsar_broker):
    with Child(programs.hold_pulsar) as starter:
        pid, folder, port = starter.told(timeout=300)
        load_coordinator(port)
        assert answering(pulsar_broker.url) == 1
        starter.kill()
    assert wait_until(lambda: not state(pid), 30)
    assert wait_until(lambda: not folder.exists(), 30)
    with pytest.raises(OSError, match="cannot be reached"):
        load_coordinator(port)


def test_the_default_settings_delete_nothing_and_keep_metadata_on_disk(pulsar_broker):
    settings = settings_of(pulsar_broker)
    assert settings["defaultRetentionTimeInMinutes"] == settings["defaultRetentionSizeInMB"] == "-1"
    assert settings["brokerDeleteInactiveTopicsEnabled"] == "false"
    assert settings["brokerDeduplicationEnabled"] == "true"
    assert settings["metadataStoreUrl"].startswith("zk:")


@pytest.mark.full
def test_another_store_and_the_retention_that_pulsar_comes_with_can_be_asked_for(start_pulsar):
    broker = start_pulsar(store="rocksdb", delete_unused=True, settings={"brokerDeduplicationEnabled": "false"})
    settings = settings_of(broker)
    assert settings["defaultRetentionTimeInMinutes"] == settings["defaultRetentionSizeInMB"] == "0"
    assert settings["brokerDeleteInactiveTopicsEnabled"] == "true"
    assert settings["brokerDeduplicationEnabled"] == "false"
    assert settings["metadataStoreUrl"].startswith("rocksdb:")
    if isinstance(broker, PulsarProcess) and LISTENERS.exists():
        pid = broker.pid(1)
        assert pid and {address for address, _ in listening(pid)} == {"127.0.0.1"}
    commit_one(port_of(broker.url), new_topic("rocksdb"), b"one")


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_brokers_of_a_cluster_take_over_from_each_other_and_come_back(start_pulsar, version):
    broker = start_pulsar(nodes=2, version=version)
    ports = [int(broker.address(node).rpartition(":")[2]) for node in broker.nodes]
    assert answering(broker.url) == 2
    for node, port in zip(broker.nodes, ports, strict=True):
        broker.kill(node)
        assert broker.pid(node) is None
        with pytest.raises(OSError, match="cannot be reached"):
            load_coordinator(port)
        assert wait_until(functools.partial(_loads_all, broker, ports[2 - node]), 60)
        broker.start(node)
        assert version_of(port) == f"Pulsar Server{version}"
        assert _loads_all(broker, port)
    assert answering(broker.url) == 2
    broker.restart()
    assert answering(broker.url) == 2
    if LISTENERS.exists():
        assert {address for node in broker.nodes for address, _ in listening(broker.pid(node))} == {"127.0.0.1"}


def _loads_all(broker: brokers.PulsarCluster, port: int) -> bool:
    try:
        for number in range(broker.coordinators):
            load_coordinator(port, number)
    except OSError:
        return False
    return True


@pytest.mark.full
def test_no_java_of_a_cluster_is_left_when_its_starter_is_killed():
    with Child(programs.hold_pulsar_cluster) as starter:
        pid, folder = starter.told(timeout=300)
        starter.kill()
    assert wait_until(lambda: not state(pid), 30)
    assert wait_until(lambda: not folder.exists(), 30)
    assert str(folder) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("store", STORES)
def test_every_version_with_every_store_can_be_stopped_and_starts_again(start_pulsar, version, store):
    broker = start_pulsar(version=version, store=store)
    port, topic = port_of(broker.url), new_topic("again")
    assert version_of(port) == f"Pulsar Server{version}"
    commit_one(port, topic, b"one")
    broker.stop()
    assert answering(broker.url) == 0
    broker.start()
    assert first_message(port, topic) == b"one"


@pytest.mark.full
@pytest.mark.timeout(1800)  # a start takes from ten seconds to more than a minute on a busy machine
@pytest.mark.parametrize("version", VERSIONS)
def test_with_zookeeper_ten_kills_in_a_row_lose_nothing(start_pulsar, version):
    broker = start_pulsar(version=version)
    port = port_of(broker.url)
    for number in range(10):
        topic = new_topic("kill")
        commit_one(port, topic, b"%d" % number)
        broker.restart()
        assert first_message(port, topic) == b"%d" % number


def test_another_broker_on_a_brokers_ports_is_not_taken_for_that_broker(process_broker, monkeypatch):
    assert answers(process_broker)
    monkeypatch.setattr(process_broker, "folder", Path("/another"))
    assert not answers(process_broker)


def test_an_answer_that_is_not_pulsars_is_an_error():
    texts = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x08\0\0\0\x04" + b"\xff" * 4, b"\0\0", b"\xff" * 100]
    with kit.answering(*texts) as port:
        for _ in texts:
            with pytest.raises(OSError, match=r"does not speak Pulsar's protocol|hung up"):
                PulsarConnection(port)
