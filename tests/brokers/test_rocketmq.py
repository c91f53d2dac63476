"""Tests of starting RocketMQ. Most share one broker; two brokers, and an orderly stop, run with --full."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import _rocketmq
from txnbridge_conformance.brokers._broker import free_ports, wait_until
from txnbridge_conformance.brokers._rocketmq import answering, ask, brokers_with, is_serving
from txnbridge_conformance.brokers.plugin import rocketmq_or_skip
from txnbridge_rocketmq.client import administration, routes
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import send_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest, document, fields
from txnbridge_rocketmq.client.protocol.read_requests import pull
from txnbridge_rocketmq.client.protocol.send_requests import HalfEnd, SendResult, WireMessage, end, send, send_half

from tests.brokers import kit, programs
from tests.brokers.kit import LISTENERS, listening, name_server_pid, state
from txnbridge.testing import Child

# The first start of a version fetches it.
pytestmark = pytest.mark.timeout(600)

GET_TOPIC, GET_GROUP = 351, 352


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def put(broker: brokers.RocketMQ, topic: str, body: bytes, node: int = 1) -> SendResult:
    """Store a message in a topic's first queue."""
    return ask(port_of(broker.broker_address(node)), send(WireMessage(topic, body), "tests", 0))


def arrives(broker: brokers.RocketMQ, topic: str, body: bytes) -> bool:
    """Wait for a queue's first message, readable a moment after it was stored; return whether it has this body."""
    port = port_of(broker.broker_address())
    first = pull(topic, 0, 0, "tests")
    return wait_until(lambda: [each.body for each in ask(port, first).records] == [body], 30)


def test_a_broker_that_started_takes_a_topic_and_a_message_at_once(rocketmq_broker):
    rocketmq_broker.create_topic("at-once", queues=2, kind="TRANSACTION")
    put(rocketmq_broker, "at-once", b"first")
    assert arrives(rocketmq_broker, "at-once", b"first")
    port = port_of(rocketmq_broker.broker_address())
    described = ask(port, RpcRequest("asking for a topic", GET_TOPIC, document, fields(topic="at-once")))
    assert (described["attributes"], described["writeQueueNums"]) == ({"message.type": "TRANSACTION"}, 2)
    rocketmq_broker.create_group("readers", orderly=True)
    group = ask(port, RpcRequest("asking for a group", GET_GROUP, document, fields(group="readers")))
    assert group["consumeMessageOrderly"] is True
    socket.create_connection(("127.0.0.1", port_of(rocketmq_broker.grpc_address())), 30).close()


def test_stored_messages_survive_a_kill_and_a_restart(rocketmq_broker):
    rocketmq_broker.create_topic("survivor", queues=1)
    put(rocketmq_broker, "survivor", b"here")
    rocketmq_broker.kill()
    assert not is_serving(port_of(rocketmq_broker.broker_address()))
    assert answering(rocketmq_broker.url) == 0
    rocketmq_broker.restart()
    assert answering(rocketmq_broker.url) == 1
    assert arrives(rocketmq_broker, "survivor", b"here")


def test_a_paused_broker_keeps_what_was_sent_and_answers_it_once_resumed(rocketmq_broker):
    rocketmq_broker.create_topic("paused", queues=1)
    pid = rocketmq_broker.pid(1)
    answers: list[SendResult] = []
    rocketmq_broker.pause()
    try:
        assert wait_until(lambda: "T" in state(pid), 30)
        asking = threading.Thread(target=lambda: answers.append(put(rocketmq_broker, "paused", b"late")))
        asking.start()
        assert "T" in state(pid) and not answers
    finally:
        rocketmq_broker.resume()
    asking.join()
    assert arrives(rocketmq_broker, "paused", b"late")


@pytest.mark.skipif(not LISTENERS.exists(), reason="looks where Linux says how long a thread was busy")
def test_a_broker_that_has_ended_a_transaction_rests(rocketmq_broker):
    def busy() -> float:
        """Return the seconds of CPU of the broker's thread that writes op messages."""
        (found,) = (
            (thread / "stat").read_text().rpartition(")")[2].split()[11:13]
            for thread in Path(f"/proc/{rocketmq_broker.pid(1)}/task").iterdir()
            if "TransactionalOpBatchService".startswith((thread / "comm").read_text().strip())
        )
        return sum(map(int, found)) / os.sysconf("SC_CLK_TCK")

    rocketmq_broker.create_topic("rests", queues=1, kind="TRANSACTION")
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")]) as client:
        half = client.call("broker-1", send_half(WireMessage("rests", b"x"), "tests", 0), 30)
        client.call("broker-1", end(send_requests.half_address("rests", "tests", half), HalfEnd.COMMIT), 30)
    before = busy()
    time.sleep(1)
    assert busy() - before < 0.2


@pytest.mark.skipif(not LISTENERS.exists(), reason="looks where Linux says who listens")
def test_only_the_ports_that_cannot_be_told_to_can_be_reached_from_another_machine(rocketmq_broker):
    pids = rocketmq_broker.pid(1), name_server_pid(rocketmq_broker)
    assert all(pids)
    found = {place for pid in pids for place in listening(pid)}
    own = {port_of(address) for address in (rocketmq_broker.url, rocketmq_broker.broker_address())}
    assert {("127.0.0.1", port) for port in own} <= found
    others = [rocketmq_broker._grpc, rocketmq_broker._replication, rocketmq_broker._proxy_remoting]
    assert {port for address, port in found if address != "127.0.0.1"} == {ports[1] for ports in others}


def test_a_topic_that_is_missing_is_not_made(rocketmq_broker):
    with pytest.raises(OSError, match="TOPIC_NOT_EXIST"):
        put(rocketmq_broker, "missing", b"x")
    assert brokers_with(port_of(rocketmq_broker.url), "missing") == 0


@pytest.fixture(scope="module")
def another() -> Iterator[brokers.RocketMQ]:
    """Start a broker with other settings."""
    with rocketmq_or_skip(
        port=free_ports(1)[0],
        # A broker registers with the name server every half minute.
        settings={"transactionTimeOut": "7777", "registerNameServerPeriod": "10000"},
        system_properties={"user.home": "/nowhere"},
    ) as broker:
        yield broker


def test_the_name_server_can_be_killed_and_hears_of_the_brokers_again(another):
    another.kill_name_server()
    assert answering(another.url) == 0
    assert is_serving(port_of(another.broker_address()))
    another.start_name_server()
    assert wait_until(lambda: answering(another.url) == 1, 60)
    assert ask(port_of(another.url), routes.masters()) == {"broker-1": another.broker_address()}


def test_settings_and_javas_properties_win_over_ours(another):
    settings = ask(port_of(another.broker_address()), administration.broker_settings())
    wanted = {"transactionTimeOut": "7777", "transactionOpBatchInterval": "100", "transactionOpMsgMaxSize": "4096"}
    assert wanted.items() <= settings.items()
    assert "-Duser.home=/nowhere" in another._command(1)


def test_a_port_that_somebody_has_is_told(start_rocketmq):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(brokers.PortTaken):
        start_rocketmq(port=taken.getsockname()[1])


def test_no_java_is_left_when_the_starter_is_killed():
    with Child(programs.hold_rocketmq) as starter:
        pids, folder, url = starter.told(timeout=300)
        assert all(map(state, pids)) and len(pids) == 2
        starter.kill()
    assert wait_until(lambda: not any(map(state, pids)), 30)
    assert wait_until(lambda: not folder.exists(), 30)
    assert answering(url) == 0


@pytest.mark.full
def test_a_broker_that_was_stopped_in_order_starts_again(start_rocketmq):
    broker = start_rocketmq()
    broker.create_topic("stopped", queues=1)
    put(broker, "stopped", b"here")
    broker.stop()
    assert answering(broker.url) == 0
    broker.start()
    assert arrives(broker, "stopped", b"here")


@pytest.mark.full
def test_a_topic_is_on_both_nodes_and_one_node_may_be_away(start_rocketmq):
    broker = start_rocketmq(nodes=2)
    broker.create_topic("both", queues=1)
    assert brokers_with(port_of(broker.url), "both") == 2
    for node in (1, 2):
        put(broker, "both", b"x", node)
    broker.kill(1)
    put(broker, "both", b"x", 2)
    assert answering(broker.url) == 1
    broker.start(1)
    assert answering(broker.url) == 2


GARBAGE = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x08\0\0\0\x02[]xx", b"\0\0\0\x06\0\0\0\x02{}", b"\0\0\0\x04"]


def test_an_answer_that_is_not_rocketmqs_is_an_error():
    with kit.answering(*GARBAGE) as port:
        for _ in GARBAGE:
            with pytest.raises(OSError, match=f"port {port}"):
                ask(port, routes.masters())
    assert not is_serving(port)
    assert _rocketmq.answering(f"rocketmq://127.0.0.1:{port}") == 0
