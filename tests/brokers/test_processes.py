"""Tests of brokers that are processes, with a toy broker that starts in milliseconds."""

import os
import random
import signal
import socket
from contextlib import nullcontext
from functools import partial

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import _pulsar
from txnbridge_conformance.brokers._broker import HOST, free_ports, wait_until

from tests.brokers import programs
from tests.brokers.kit import TOY, Toy, answers, port_attempts, state
from txnbridge import BrokerUnavailable
from txnbridge.errors import InvalidOption
from txnbridge.testing import Child


@pytest.fixture
def broker():
    with Toy() as broker:
        yield broker


def supervisor_of(broker: Toy) -> int:
    return broker._processes._supervisor.pid


def all_end(pids: list[int]) -> bool:
    return wait_until(lambda: not any(state(pid) for pid in pids), 30)


def test_the_block_leaves_no_process_and_no_folder():
    with Toy() as broker:
        pids = broker.every_pid()
        assert all(state(pid) for pid in pids) and len(pids) == 4
        assert broker.folder.exists()
    assert all_end(pids)
    assert not broker.folder.exists()


def test_a_killed_starter_leaves_no_process_and_no_folder():
    with Child(programs.hold_a_toy) as starter:
        pids, folder = starter.told()
        assert all(state(pid) for pid in pids)
        starter.kill()
    assert all_end(pids)
    assert wait_until(lambda: not folder.exists(), 30)


def test_a_killed_starter_whose_fork_lives_on_leaves_no_process_and_no_folder():
    with Child(programs.hold_a_toy_and_fork) as starter:
        pids, folder, fork = starter.told()
        starter.kill()
    try:
        assert all_end(pids)
        assert wait_until(lambda: not folder.exists(), 30)
        assert state(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_the_supervisor_is_in_no_process_group_of_the_starter(broker):
    supervisor = os.getsid(supervisor_of(broker))
    assert supervisor != os.getsid(0)
    assert {os.getpgid(pid) for pid in broker.every_pid()}.isdisjoint({os.getpgid(0), supervisor})


def test_an_orderly_end_of_the_supervisor_leaves_nothing_either(broker):
    pids = broker.every_pid()
    os.kill(supervisor_of(broker), signal.SIGTERM)
    assert all_end(pids)
    with pytest.raises(BrokerUnavailable, match="supervisor of this broker has ended"):
        broker.pid(1)


def test_one_node_is_killed_and_started_again_on_its_port(broker):
    first, second = broker.pid(1), broker.pid(2)
    broker.kill(1)
    assert broker.pid(1) is None and not answers(broker)
    assert broker.pid(2) == second and answers(broker, 2)
    broker.start()
    assert answers(broker)
    assert broker.pid(1) not in (None, first) and broker.pid(2) == second


def test_restart_starts_all_anew(broker):
    before = [broker.pid(node) for node in broker.nodes]
    broker.restart()
    assert {broker.pid(node) for node in broker.nodes}.isdisjoint({*before, None})
    assert all(answers(broker, node) for node in broker.nodes)


def test_a_paused_node_stands_still_until_it_is_resumed(broker):
    pid = broker.pid(1)
    assert pid
    broker.pause(1)
    assert "T" in state(pid)
    broker.pause(1)
    broker.resume(1)
    assert wait_until(lambda: "T" not in state(pid), 30)
    assert answers(broker)


def test_a_paused_node_can_be_killed_and_stopped(broker):
    broker.pause()
    broker.kill(1)
    broker.stop(2)
    assert [broker.pid(node) for node in broker.nodes] == [None, None]


def test_killing_pausing_and_stopping_a_broker_that_does_not_run_does_nothing(broker):
    broker.kill()
    for again in (broker.kill, broker.pause, broker.resume, broker.stop):
        again()
    broker.start()
    assert answers(broker)


def test_a_node_that_ignores_the_request_to_stop_is_killed():
    deaf = Toy(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{TOY}", stop_timeout=0.1)
    with deaf as broker:
        broker.stop()
        assert broker.pid(1) is None


def test_a_node_that_does_not_exist_is_named(broker):
    with pytest.raises(InvalidOption, match="no node 3; nodes are 1, 2"):
        broker.kill(3)


def test_a_broker_may_be_closed_twice_and_not_be_used_then():
    with Toy() as broker:
        broker.close()
    with pytest.raises(BrokerUnavailable, match="closed"):
        broker.start()


def test_a_node_that_ends_instead_of_starting_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(brokers.CannotStart, match=r"node 1 ended .*its log ends: out of luck$"):
        Toy("print('out of luck'); raise SystemExit(1)", folder=tmp_path / "broker")
    assert not (tmp_path / "broker").exists()


def test_a_node_that_never_answers_is_waited_for_no_longer_than_asked():
    with pytest.raises(brokers.CannotStart, match=r"did not answer within 0\.2 s; it wrote no log"):
        Toy("import time; time.sleep(1000)", start_timeout=0.2)


def test_a_taken_port_is_told_apart():
    with pytest.raises(brokers.PortTaken):
        Toy("raise SystemExit('OSError: Address already in use')")


class Missing(Toy):
    def _command(self, node: int) -> list[str]:
        return ["/no/such/program"]


def test_a_program_that_is_not_there_cannot_start():
    with pytest.raises(brokers.CannotStart, match="No such file"):
        Missing()


def test_free_ports_are_different_and_free():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.create_server((HOST, ports[0])):
        pass


def test_a_port_that_somebody_listens_on_is_not_free():
    random.seed(1)
    (taken,) = free_ports(1)
    random.seed(1)  # so that it is drawn again
    with socket.create_server((HOST, taken)):
        assert free_ports(1) != [taken]


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        (brokers.kafka, {"nodes": 2}, "nodes is 2; known: 1, 3"),
        (brokers.kafka, {"version": "1.0"}, r"version is '1\.0'; known: 4\.4\.0, 4\.3\.1, 3\.9\.2"),
        (brokers.kafka, {"transaction_version": 3}, "transaction_version is 3; known: 2, 1"),
        (brokers.kafka, {"version": "3.9.2", "transaction_version": 1}, "none for this version"),
        (brokers.kafka, {"nodes": 3, "container": True}, "a container runs one node"),
        (brokers.pulsar, {"version": "1.0"}, r"version is '1\.0'; known: 4\.2\.4, 4\.0\.8"),
        (brokers.pulsar, {"store": "etcd"}, "store is 'etcd'; known: zookeeper, rocksdb"),
        (brokers.pulsar, {"nodes": 3}, "nodes is 3; known: 1, 2"),
        (brokers.pulsar, {"nodes": 2, "store": "rocksdb"}, "several nodes of Pulsar share a store: it is zookeeper"),
        (brokers.pulsar, {"nodes": 2, "container": True}, "a container runs one node of Pulsar"),
        (brokers.rocketmq, {"nodes": 3}, "nodes is 3; known: 1, 2"),
        (brokers.rocketmq, {"version": "4.9"}, r"version is '4\.9'; known: 5\.5\.0"),
    ],
)
def test_a_broker_that_cannot_be_started_is_refused_with_the_possible_options(start, options, message):
    with pytest.raises(InvalidOption, match=message):
        start(**options)


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize(
    ("start", "module", "name"),
    [
        (partial(brokers.kafka, container=False), brokers, "KafkaProcess"),
        (partial(brokers.pulsar, container=False), _pulsar, "PulsarProcess"),
        (brokers.rocketmq, brokers, "RocketMQ"),
    ],
)
def test_other_ports_are_tried_when_one_is_taken(monkeypatch, start, module, name, failures):
    attempts = port_attempts(monkeypatch, module, name, failures)
    with pytest.raises(brokers.PortTaken) if failures == 3 else nullcontext():
        assert str(start()) == "started"
    assert attempts == [None] * min(failures + 1, 3)
    attempts.clear()
    with pytest.raises(brokers.PortTaken):
        start(port=9092)
    assert attempts == [9092]
