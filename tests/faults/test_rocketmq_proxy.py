"""The proxy before RocketMQ: what it makes of headers, and how a real one and its clients stay with it."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers import Route
from txnbridge_conformance.faults._protocols import RocketMQConversation
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import Disconnected, ResponseTimeout
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.client.protocol import read_requests, send_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest, document
from txnbridge_rocketmq.client.protocol.send_requests import HalfEnd, WireMessage, end, half_address, send, send_half

from tests.rocketmq.kit import ANSWER, BROKER, ONE_WAY, FakeBroker, Peer, becomes_true, binary_frame, bodies, frame
from txnbridge.errors import InvalidOption

LONG = 30.0
SHORT = 0.5


def head(code: int, opaque: int, flag: int = 0) -> bytes:
    data = frame(code, opaque, flag)
    return data[4 : 8 + int.from_bytes(data[4:8], "big")]


def test_answers_belong_to_their_requests_in_any_order():
    conversation = RocketMQConversation()
    first, second = conversation.request(head(310, 1)), conversation.request(head(37, 2))
    assert (first.kind, first.correlation_id) == (310, 1)
    assert conversation.answer(head(0, 2, ANSWER)) is second
    assert second.answered.is_set() and not first.answered.is_set()
    assert conversation.answer(head(17, 1, ANSWER)) is first
    assert conversation.answer(head(0, 1, ANSWER)) is None


def test_a_request_by_the_broker_is_known_by_its_own_code():
    conversation = RocketMQConversation()
    conversation.request(head(310, 7))
    asked = conversation.answer(head(39, 7, ONE_WAY))
    assert asked is not None and asked.kind == 39 and asked.answered.is_set()
    # A client's answer to it is nothing that can be picked, and is not waited for.
    assert conversation.request(head(0, 7, ANSWER)).kind == -1


def test_a_request_that_wants_no_answer_is_not_waited_for():
    conversation = RocketMQConversation()
    conversation.request(head(37, 3, ONE_WAY))
    assert conversation.answer(head(0, 3, ANSWER)) is None


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=60))))
def test_no_heads_in_any_order_are_an_error(heads):
    conversation = RocketMQConversation()
    for is_request, content in heads:
        data = struct.pack(">i", len(content)) + content
        if is_request:
            conversation.request(data)
        else:
            conversation.answer(data)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"code":1e999,"opaque":1,"flag":0}', b'{"code":"x"}', b"{}"])
def test_a_malformed_header_is_no_kind_of_request(content):
    assert RocketMQConversation().request(struct.pack(">i", len(content)) + content).kind == -1


@pytest.mark.parametrize("cut", [1, 9, 100, None], ids=str)
def test_addresses_in_an_answer_become_the_proxys_however_it_is_cut(cut):
    told: list[bytes] = []

    def reply(peer: Peer, command) -> None:
        (body,) = told
        data = frame(0, command.opaque, ANSWER, body=body)
        for begin in range(0, len(data), cut or len(data)):
            peer.send(data[begin : begin + (cut or len(data))])

    with FakeBroker(reply) as broker:
        port = int(broker.address.rpartition(":")[2])
        routes = [Route(0, port), Route(0, 20_001)]
        with faults.Proxy(routes, RocketMQConversation, "rocketmq://127.0.0.1:1") as proxy:
            mine, other = (f"127.0.0.1:{port}" for port in proxy.ports)
            # Neither a longer number nor another host is ours.
            foreign = ["127.0.0.1:200011", "127.0.0.10:20001", "h:20001"]
            told.append(json.dumps({"brokers": [broker.address, "127.0.0.1:20001", *foreign]}).encode())
            with RemotingClient([mine]) as client:
                request = RpcRequest("asking", 105, document)
                assert client.ask_name_server(request, LONG) == {"brokers": [mine, other, *foreign]}
                assert client.ask_name_server(RpcRequest("asking", 206, document), LONG) == json.loads(told[0])


@contextmanager
def behind_a_proxy(reply: Any) -> Iterator[RemotingClient]:
    """A client that speaks through a proxy to a broker that replies so."""
    with FakeBroker(reply) as broker:
        routes = [Route(0, int(broker.address.rpartition(":")[2]))]
        with faults.Proxy(routes, RocketMQConversation) as proxy:
            with RemotingClient([f"127.0.0.1:{proxy.ports[0]}"]) as client:
                yield client


def test_an_answer_with_addresses_that_breaks_off_arrives_as_far_as_it_came():
    def reply(peer: Peer, command) -> None:
        peer.send(frame(0, command.opaque, ANSWER, body=b"x" * 100)[:-50])
        peer.hang_up()

    with behind_a_proxy(reply) as client, pytest.raises(Disconnected):
        client.route("orders", LONG)


def test_headers_that_are_not_json_pass_untouched():
    def reply(peer: Peer, command) -> None:
        peer.send(binary_frame(0, command.opaque, ANSWER, {}, b'{"brokerAddrTable":{}}'))

    with behind_a_proxy(reply) as client:
        assert client.brokers(LONG) == {}


real = pytest.mark.timeout(600)  # the first start fetches RocketMQ


@pytest.fixture
def proxy(rocketmq_broker: brokers.RocketMQ) -> Iterator[faults.Proxy]:
    with faults.proxy(rocketmq_broker) as proxy:
        yield proxy


@pytest.fixture
def direct(rocketmq_broker: brokers.RocketMQ) -> Iterator[RemotingClient]:
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")]) as client:
        yield client


@pytest.fixture
def client(proxy: faults.Proxy) -> Iterator[RemotingClient]:
    with RemotingClient([proxy.url.removeprefix("rocketmq://")]) as client:
        yield client


@pytest.fixture
def topic(rocketmq_broker: brokers.RocketMQ, request: pytest.FixtureRequest) -> str:
    """A new topic with one queue, named as the test."""
    name = str(request.node.name)
    rocketmq_broker.create_topic(name, queues=1)
    return name


@real
def test_a_client_that_connects_through_the_proxy_stays_with_it(rocketmq_broker, proxy, client, direct, topic):
    assert proxy.url == f"rocketmq://127.0.0.1:{proxy.ports[0]}"
    assert client.brokers(LONG) == {BROKER: f"127.0.0.1:{proxy.ports[1]}"}
    assert direct.brokers(LONG) == {BROKER: rocketmq_broker.broker_address()}
    found = client.route(topic, LONG)
    assert found is not None and found.masters == client.brokers(LONG)
    client.call(BROKER, send(WireMessage(topic, b"x"), "shop", 0), LONG)
    assert bodies(direct, topic) == [b"x"]


@real
def test_a_late_commit_arrives_after_its_client_is_gone(proxy, client, direct, topic):
    half = half_address(topic, "shop", client.call(BROKER, send_half(WireMessage(topic, b"half"), "shop", 0), LONG))
    hold = proxy.hold(requests="END_TRANSACTION")
    with pytest.raises(ResponseTimeout) as caught:
        client.call(BROKER, end(half, HalfEnd.COMMIT), SHORT)
    assert caught.value.may_have_had_effect
    assert hold.wait().kind == 37
    proxy.cut()
    assert bodies(direct, topic) == []
    hold.release()
    hold.answered()
    assert bodies(direct, topic) == [b"half"]


@real
def test_a_held_answer_is_about_something_that_happened(proxy, client, direct, topic):
    hold = proxy.hold(answers="SEND_MESSAGE_V2")
    call = client.submit(BROKER, send(WireMessage(topic, b"x"), "shop", 0), LONG)
    hold.answered()
    assert not call.done()
    assert bodies(direct, topic) == [b"x"]
    hold.release()
    assert call.result().queue_offset == 0


@real
def test_only_the_picked_one_of_many_requests_in_flight_is_held(proxy, client, direct, topic):
    half = half_address(topic, "shop", client.call(BROKER, send_half(WireMessage(topic, b"half"), "shop", 0), LONG))
    before = client.submit(BROKER, send(WireMessage(topic, b"before"), "shop", 0), LONG)
    assert before.result().queue_offset == 0
    hold = proxy.hold(requests="END_TRANSACTION")
    late = client.submit(BROKER, end(half, HalfEnd.COMMIT), LONG)
    hold.wait()
    direct.call(BROKER, send(WireMessage(topic, b"after"), "shop", 0), LONG)
    hold.release()
    late.result()
    assert bodies(direct, topic) == [b"before", b"after", b"half"]


@real
def test_a_question_of_the_brokers_can_be_held(rocketmq_broker, proxy, direct, topic):
    checks: list[send_requests.CheckBack] = []
    hold = proxy.hold(answers="CHECK_TRANSACTION_STATE")
    with RemotingClient([proxy.url.removeprefix("rocketmq://")], on_checks=checks.extend) as client:
        client.join(Membership(frozenset({"proxied"})), LONG)
        client.call(BROKER, send_half(WireMessage(topic, b"half"), "proxied", 0), LONG)
        hold.wait()
        assert checks == []
        hold.release()
        assert becomes_true(lambda: checks != [])
        direct.call(BROKER, end(checks[-1].half, HalfEnd.ABORT, from_check=True), LONG)


@real
def test_a_cut_connection_is_replaced_by_the_next_and_its_calls_may_have_had_effect(proxy, client, topic):
    hold = proxy.hold(answers="GET_MAX_OFFSET")
    call = client.submit(BROKER, read_requests.max_offset(topic, 0), LONG)
    hold.wait()
    proxy.cut()
    with pytest.raises(Disconnected) as caught:
        call.result()
    assert caught.value.may_have_had_effect
    assert client.call(BROKER, read_requests.max_offset(topic, 0), LONG) == 0


@real
def test_an_unknown_kind_of_request_is_refused(proxy):
    with pytest.raises(InvalidOption, match="END_TRANSACTION"):
        proxy.hold(requests="EndTxn")
