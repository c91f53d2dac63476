"""The proxy before a broker of a few lines."""

import socket
import threading
import time

import pytest
from txnbridge_conformance.brokers import Route
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.faults import Proxy
from txnbridge_conformance.faults._protocols import KafkaConversation

from tests.faults.kit import END_TXN, PRODUCE, Client, Echo
from txnbridge.errors import InvalidOption, UsageError


@pytest.fixture
def echo():
    with Echo() as broker:
        yield broker


@pytest.fixture
def proxy(echo):
    with Proxy([Route(0, echo.port)], KafkaConversation) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with Client(proxy.ports[0]) as client:
        yield client


def is_gone(client: Client) -> bool:
    """Return whether the connection has ended."""
    try:
        return client.socket.recv(1) == b""
    except ConnectionResetError:
        return True


def has_nothing(client: Client) -> bool:
    """Return whether neither an answer nor the end of the connection has come."""
    client.socket.setblocking(False)
    try:
        client.socket.recv(1)
    except BlockingIOError:
        return True
    finally:
        client.socket.settimeout(30)
    return False


def ask_anew(proxy: Proxy, kind: int, body: bytes = b"") -> bytes:
    """Ask through a connection of its own, which is closed then."""
    with Client(proxy.ports[0]) as client:
        return client.ask(kind, body)


def test_the_proxy_passes_bytes_in_both_directions(client):
    body = bytes(range(256)) * 4000  # about 1 MB
    assert client.ask(PRODUCE, body) == body
    assert client.ask(END_TXN, b"two") == b"two"


def test_a_held_request_arrives_only_when_it_is_let_go(proxy, echo, client):
    hold = proxy.hold(requests="EndTxn")
    client.send(END_TXN, b"late")
    assert hold.wait().kind == END_TXN
    assert ask_anew(proxy, PRODUCE, b"marker") == b"marker"
    assert echo.arrived.get(timeout=30) == b"marker"  # and so nothing before it
    hold.release()
    assert client.receive() == (1, b"late")


def test_a_request_behind_a_held_one_on_its_connection_waits_too(proxy, echo, client):
    hold = proxy.hold(requests="EndTxn")
    client.send(END_TXN, b"first")
    client.send(PRODUCE, b"second")
    hold.wait()
    hold.release()
    assert [client.receive(), client.receive()] == [(1, b"first"), (2, b"second")]
    assert [echo.arrived.get(timeout=30) for _ in range(2)] == [b"first", b"second"]


def test_a_hold_keeps_only_as_many_requests_of_its_kind_as_asked_for(proxy, client):
    hold = proxy.hold(requests="EndTxn")
    assert client.ask(PRODUCE, b"another kind") == b"another kind"
    client.send(END_TXN, b"held")
    hold.wait()
    assert ask_anew(proxy, END_TXN, b"the second") == b"the second"


def test_all_of_a_kind_can_be_held_until_they_are_let_go(proxy, echo, client):
    proxy.hold(requests=END_TXN, count=None)
    with Client(proxy.ports[0]) as other:
        client.send(END_TXN, b"one")
        other.send(END_TXN, b"two")
        ask_anew(proxy, PRODUCE, b"marker")
        assert echo.arrived.get(timeout=30) == b"marker"
        proxy.release()
        assert client.receive() == (1, b"one") and other.receive() == (1, b"two")
    assert client.ask(END_TXN, b"not held any more") == b"not held any more"


def test_a_held_answer_was_given_and_arrives_only_when_it_is_let_go(proxy, echo, client):
    hold = proxy.hold(answers="EndTxn")
    client.send(PRODUCE, b"before")
    client.send(END_TXN, b"done")
    assert client.receive() == (1, b"before")
    request = hold.wait()
    assert (request.kind, request.correlation_id) == (END_TXN, 2)
    assert [echo.arrived.get(timeout=30) for _ in range(2)] == [b"before", b"done"]
    hold.answered()
    ask_anew(proxy, PRODUCE, b"marker")
    assert has_nothing(client)
    hold.release()
    assert client.receive() == (2, b"done")


def test_a_held_request_arrives_after_its_client_hung_up(proxy, echo):
    hold = proxy.hold(requests="EndTxn")
    with Client(proxy.ports[0]) as client:
        client.send(END_TXN, b"late")
        hold.wait()
    ask_anew(proxy, PRODUCE, b"meanwhile")
    hold.release()
    hold.answered()
    assert [echo.arrived.get(timeout=30) for _ in range(2)] == [b"meanwhile", b"late"]


def test_a_held_request_arrives_after_a_cut(proxy, echo, client):
    hold = proxy.hold(requests="EndTxn")
    client.send(END_TXN, b"late")
    hold.wait()
    proxy.cut()
    assert is_gone(client)
    hold.release()
    hold.answered()
    assert echo.arrived.get(timeout=30) == b"late"
    assert echo.ended.empty()
    proxy.cut()
    assert echo.ended.get(timeout=30)


def test_a_dropped_request_never_arrives(proxy, echo, client):
    hold = proxy.hold(requests="EndTxn")
    client.send(END_TXN, b"lost")
    hold.wait()
    hold.drop()
    client.send(PRODUCE, b"marker")  # on the same connection, behind it
    assert client.receive() == (2, b"marker")
    assert echo.arrived.get(timeout=30) == b"marker"


def test_waiting_for_a_request_that_does_not_come_fails(proxy, client):
    hold = proxy.hold(requests="EndTxn")
    for wait in (hold.wait, hold.answered):
        with pytest.raises(AssertionError, match=r"nothing of the kind 26 came within 0\.1 s"):
            wait(0.1)
    client.send(END_TXN)
    hold.wait()
    with pytest.raises(AssertionError, match=r"was not answered within 0\.1 s"):
        hold.answered(0.1)


def test_a_cut_ends_what_is_open_and_serves_what_comes_later(proxy, echo, client):
    client.ask(PRODUCE)
    proxy.cut()
    assert is_gone(client)
    assert echo.ended.get(timeout=30)
    assert ask_anew(proxy, PRODUCE, b"again") == b"again"


@pytest.mark.parametrize("size", [0, 1, 9, 13, 14])
def test_a_cut_after_some_bytes_of_a_request_lets_just_these_pass(proxy, echo, client, size):
    proxy.cut_after(requests=size)
    client.send(PRODUCE)  # 14 bytes
    assert is_gone(client) or size == 14  # its answer may be quicker than the cut
    assert echo.ended.get(timeout=30)
    assert echo.arrived.qsize() == (size == 14)
    assert ask_anew(proxy, PRODUCE, b"once only") == b"once only"


def test_a_cut_after_some_bytes_of_an_answer_lets_just_these_pass(proxy, echo, client):
    proxy.cut_after(answers=6)
    client.send(END_TXN, b"done")
    assert echo.arrived.get(timeout=30) == b"done"
    assert client.exactly(6) == b"\0\0\0\x08\0\0"
    assert is_gone(client)


def test_a_delay_holds_for_both_directions_and_can_be_undone(proxy, client):
    proxy.delay(0.2)
    begin = time.monotonic()
    assert client.ask(PRODUCE, b"slow") == b"slow"
    assert time.monotonic() - begin >= 0.4
    proxy.delay(0)
    assert client.ask(PRODUCE, b"quick") == b"quick"


def test_the_parts_of_a_burst_are_late_by_one_delay_and_not_by_many(proxy, client):
    proxy.delay(0.5)
    begin = time.monotonic()
    for _ in range(120):
        client.send(PRODUCE)
        time.sleep(0.01)  # so that they come one by one
    for _ in range(120):
        client.receive()
    assert 1 <= time.monotonic() - begin < 30  # 120 delays would be a minute


def test_a_broker_hears_that_its_client_hung_up(proxy, echo):
    ask_anew(proxy, PRODUCE)
    assert echo.ended.get(timeout=30)


def test_a_client_hears_that_its_broker_hung_up(echo, client):
    client.ask(PRODUCE)
    echo.hang_up()
    assert is_gone(client)


def knows_of_hang_up(proxy):
    return proxy._connections[0]._open_directions == 1


def test_half_open_a_broker_does_not_hear_that_its_client_hung_up(proxy, echo):
    proxy.half_open()
    ask_anew(proxy, PRODUCE, b"last words")
    assert wait_until(lambda: knows_of_hang_up(proxy), 30)
    proxy.half_open(False)
    ask_anew(proxy, PRODUCE)
    assert echo.ended.get(timeout=30)  # the marker's, which hung up later
    assert echo.ended.empty()
    proxy.cut()
    assert echo.ended.get(timeout=30)


def test_half_open_a_client_does_not_hear_that_its_broker_hung_up(proxy, echo, client):
    client.ask(PRODUCE)
    proxy.half_open()
    echo.hang_up()
    assert echo.ended.get(timeout=30)
    assert wait_until(lambda: knows_of_hang_up(proxy), 30)
    assert has_nothing(client)
    proxy.cut()
    assert is_gone(client)


def test_a_broker_that_is_away_is_a_client_that_is_hung_up_on(proxy, echo, client):
    client.ask(PRODUCE)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with Proxy([Route(0, port)]) as before_nobody, Client(before_nobody.ports[0]) as lonely:
        assert is_gone(lonely)


def test_garbage_passes_and_harms_no_one(proxy, client):
    with Client(proxy.ports[0]) as wild:
        wild.socket.sendall(b"\xff" * 100_000)
        assert client.ask(PRODUCE, b"well") == b"well"


def test_the_end_of_the_proxy_ends_all_and_leaves_no_thread(echo):
    with Proxy([Route(0, echo.port)], KafkaConversation) as proxy:
        hold = proxy.hold(requests="EndTxn")
        with Client(proxy.ports[0]) as client, Client(proxy.ports[0]) as held:
            client.ask(PRODUCE)
            held.send(END_TXN)
            hold.wait()
            proxy.delay(1000)
            client.send(PRODUCE)
            proxy.close()
            assert is_gone(client) and is_gone(held)
    assert "txnbridge-proxy" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConnectionRefusedError):
        Client(proxy.ports[0])


def test_a_reader_that_does_not_read_stops_the_writer_and_not_the_end(echo):
    with Proxy([Route(0, echo.port)], KafkaConversation) as proxy:
        proxy.hold(requests="EndTxn")
        with Client(proxy.ports[0]) as client:
            client.send(END_TXN)
            client.socket.settimeout(1)
            with pytest.raises(TimeoutError):  # 64 MB wait in the proxy, the rest in the client
                for _ in range(4000):
                    client.socket.sendall(bytes(1 << 16))


def test_two_proxies_do_not_share_a_port(proxy):
    with pytest.raises(UsageError, match="cannot listen on port"):
        Proxy([Route(proxy.ports[0], 1)])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({}, "either requests"),
        ({"requests": "EndTxn", "answers": "EndTxn"}, "either requests"),
        ({"requests": "Commit"}, "'Commit' is not a kind of request; known: Produce, Fetch"),
    ],
)
def test_a_hold_of_no_clear_kind_of_request_or_answer_is_refused(proxy, what, message):
    with pytest.raises(InvalidOption, match=message):
        proxy.hold(**what)


def test_a_proxy_that_knows_no_protocol_refuses_to_hold_a_request(echo):
    with Proxy([Route(0, echo.port)]) as plain:
        with pytest.raises(InvalidOption, match="knows no protocol"):
            plain.hold(requests=1)
        with Client(plain.ports[0]) as client:
            assert client.ask(PRODUCE, b"still passes") == b"still passes"
