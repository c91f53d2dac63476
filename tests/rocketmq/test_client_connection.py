"""Tests of a connection: every call ends in time, and says whether the request may have had effect."""

import contextlib
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_rocketmq.client import errors
from txnbridge_rocketmq.client.connection import Call, ConnectionSettings, RemotingConnection
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand
from txnbridge_rocketmq.client.transport import TCP_OPTIONS

from tests.failing import answer_calls
from tests.in_time import GRACE, within
from tests.rocketmq.kit import ANSWER, LONG, ONE_WAY, FakeBroker, Peer, becomes_true, echo, frame, our_threads

SHORT = 0.2


@pytest.fixture
def broker():
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def connection(broker):
    connection = RemotingConnection(broker.address, LONG)
    yield connection
    connection.close()


@pytest.fixture
def peer(broker, connection):
    return broker.peer()


def test_an_address_of_a_family_that_the_host_lacks_is_passed_over(broker, monkeypatch):
    host, port = broker.address.split(":")
    lacking = (250, socket.SOCK_STREAM, 0, "", ("::1", 1))  # as IPv6 on a host without it
    found = [lacking, *socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    answer_calls(monkeypatch, socket, "getaddrinfo", found)
    RemotingConnection(broker.address, LONG).close()
    del found[1:]
    with pytest.raises(errors.Unreachable, match="not supported"):
        RemotingConnection(broker.address, LONG)


def test_a_connection_without_a_thread_is_closed_and_counts_as_unreachable(broker, no_threads):
    no_threads(0, when=lambda thread: thread.name.startswith("rocketmq"))
    with pytest.raises(errors.Unreachable, match="can't start new thread"):
        RemotingConnection(broker.address, LONG)
    with pytest.raises(EOFError):
        broker.peer().next()


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not drop packets like this")
def test_a_connection_whose_peer_vanished_ends_while_it_waits_for_an_answer(broker, monkeypatch):
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_USER_TIMEOUT", 500)):
        monkeypatch.setitem(TCP_OPTIONS, option, value)
    with contextlib.closing(RemotingConnection(broker.address, LONG)) as connection:
        call, peer = connection.submit(echo(), LONG), broker.peer()
        peer.next()  # so there is nothing that the peer would have to acknowledge
        peer.vanish()
        with pytest.raises(errors.Disconnected) as lost:
            call.result()
        assert lost.value.may_have_had_effect and not connection.is_open


def test_answers_belong_to_their_requests_in_any_order(connection, peer):
    calls = [connection.submit(echo(number), LONG) for number in range(5)]
    asked = [peer.next() for _ in calls]
    for command in reversed(asked):
        peer.answer(command, remark=str(command.code))
    assert [call.result() for call in calls] == ["9000", "9001", "9002", "9003", "9004"]


def test_many_threads_share_a_connection():
    with FakeBroker(lambda peer, command: peer.answer(command, body=command.body)) as broker:
        connection = RemotingConnection(broker.address, LONG)
        wrong = []

        def ask(thread: int) -> None:
            for number in range(200):
                said = f"{thread}-{number}" * 50
                if connection.call(echo(body=said.encode()), LONG) != said:
                    wrong.append(said)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        connection.close()
    assert wrong == []


def test_a_refusal_carries_code_remark_and_what_was_asked(connection, peer):
    call = connection.submit(echo(), LONG)
    peer.answer(peer.next(), ResponseCode.TOPIC_NOT_EXIST, remark="topic[x] not exist")
    with pytest.raises(errors.ErrorResponse, match=r"echo 1: TOPIC_NOT_EXIST \(17\), topic\[x\] not exist") as caught:
        call.result()
    assert (caught.value.code, caught.value.remark) == (17, "topic[x] not exist")
    assert not caught.value.may_have_had_effect


WITHOUT_EFFECT = ResponseCode.SYSTEM_BUSY, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.ILLEGAL_OPERATION
STORED = ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT


@pytest.mark.parametrize("code", [*WITHOUT_EFFECT, *STORED, ResponseCode.SYSTEM_ERROR, 4242])
def test_a_refusal_says_whether_it_may_have_had_effect(connection, peer, code):
    call = connection.submit(echo(), LONG)
    peer.answer(peer.next(), code)
    with pytest.raises(errors.ErrorResponse) as caught:
        call.result()
    assert caught.value.may_have_had_effect is (code not in WITHOUT_EFFECT)


OF_BROKERS = errors.ErrorResponse(17, "no", "asking"), errors.NotDurable(10, "slow", "sending", "AB")
OF_CLIENTS = errors.RemotingError("x", may_have_had_effect=True), errors.ResponseTimeout("late")


@pytest.mark.parametrize("error", [*OF_BROKERS, *OF_CLIENTS], ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.__dict__ == error.__dict__


def test_a_call_ends_by_its_time_and_may_have_had_effect(connection, peer):
    with within(SHORT), pytest.raises(errors.ResponseTimeout, match="did not answer") as caught:
        connection.call(echo(), SHORT)
    assert caught.value.may_have_had_effect
    assert connection.is_open


def test_a_call_that_nobody_waits_for_ends_by_its_time_too(connection, peer):
    ended = threading.Event()
    call = connection.submit(echo(), SHORT)
    call.when_done(lambda _: ended.set())
    assert ended.wait(SHORT + GRACE)
    with pytest.raises(errors.ResponseTimeout):
        call.result()


def test_an_answer_that_comes_late_is_nobodys(connection, peer):
    with pytest.raises(errors.ResponseTimeout):
        connection.call(echo(1), SHORT)
    call = connection.submit(echo(2), LONG)
    peer.answer(peer.next(), remark="late")
    peer.answer(peer.next(), remark="mine")
    assert call.result() == "mine"


def test_no_more_requests_are_in_flight_than_allowed(broker):
    connection = RemotingConnection(broker.address, LONG, ConnectionSettings(most_in_flight=3))
    peer = broker.peer()
    calls = [connection.submit(echo(number), LONG) for number in range(3)]
    with pytest.raises(errors.ResponseTimeout, match="too many") as caught:
        connection.submit(echo(), SHORT)
    assert not caught.value.may_have_had_effect
    peer.answer(peer.next(), remark="done")
    assert calls[0].result() == "done"
    calls.append(connection.submit(echo(), LONG))
    connection.close()


def test_a_request_that_is_too_large_makes_room_for_the_next(broker):
    connection = RemotingConnection(broker.address, LONG, ConnectionSettings(most_in_flight=1))
    peer = broker.peer()
    with pytest.raises(ValueError, match="more than"):
        connection.submit(echo(body=bytes(17 << 20)), LONG)
    call = connection.submit(echo(), LONG)
    peer.answer(peer.next(), remark="last")
    assert call.result() == "last"
    connection.close()


def test_a_connection_that_has_fallen_silent_is_given_up(broker):
    connection = RemotingConnection(broker.address, LONG, ConnectionSettings(silence_seconds=SHORT))
    other = connection.submit(echo(), LONG)
    with pytest.raises(errors.ResponseTimeout):
        connection.call(echo(), SHORT)
    with pytest.raises(errors.Disconnected, match="no longer sends anything") as caught:
        other.result()
    assert caught.value.may_have_had_effect
    connection.close()


def test_an_address_where_nobody_listens_is_unreachable():
    with FakeBroker() as gone:
        pass
    with pytest.raises(errors.Unreachable, match=gone.address) as caught:
        RemotingConnection(gone.address, LONG)
    assert not caught.value.may_have_had_effect


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:65536", "host:-1"])
def test_an_address_that_is_none_is_unreachable(address):
    with pytest.raises(errors.Unreachable, match="host:port"):
        RemotingConnection(address, LONG)


@pytest.mark.parametrize("end", [0, -1], ids=["no answer", "an answer that breaks off"])
def test_a_lost_connection_ends_every_call_and_may_have_had_effect(connection, peer, end):
    calls = [connection.submit(echo(number), LONG) for number in range(3)]
    peer.send(frame(0, peer.next().opaque, ANSWER, body=bytes(1000))[:end])
    peer.hang_up()
    for call in calls:
        with pytest.raises(errors.Disconnected) as caught:
            call.result()
        assert caught.value.may_have_had_effect
    with pytest.raises(errors.Disconnected) as caught:
        connection.submit(echo(), LONG)
    assert not caught.value.may_have_had_effect


def test_closing_a_connection_ends_every_call_and_its_thread(broker):
    before = our_threads()
    connection = RemotingConnection(broker.address, LONG)
    broker.peer()
    call = connection.submit(echo(), LONG)
    assert len(our_threads(before)) == 1
    connection.close()
    connection.close()
    with pytest.raises(errors.Disconnected, match="was closed"):
        call.result()
    assert our_threads(before) == []


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack(">ii", 6, 2) + b"[]", struct.pack(">i", 2**31 - 1)]
)
def test_garbage_ends_the_connection_and_every_call(connection, peer, garbage):
    call = connection.submit(echo(), LONG)
    peer.send(garbage)
    with pytest.raises(errors.ProtocolViolation) as caught:
        call.result()
    assert caught.value.may_have_had_effect
    assert becomes_true(lambda: not connection.is_open)


DEEDS: dict[str, Callable[[Peer, RemotingCommand], object]] = {
    "answer": lambda peer, command: peer.answer(command),
    "answer twice": lambda peer, command: list(map(peer.answer, [command] * 2)),
    "never answer": lambda peer, command: None,
    "answer another": lambda peer, command: peer.send(frame(0, command.opaque + 1000, ANSWER)),
    "refuse": lambda peer, command: peer.answer(command, 1),
    "ask": lambda peer, command: peer.send(frame(39, command.opaque, ONE_WAY)),
    "hang up": lambda peer, command: peer.hang_up(),
    "garbage": lambda peer, command: peer.send(b"\xff" * 8),
}


@given(st.lists(st.sampled_from(sorted(DEEDS)), min_size=1, max_size=8))
def test_every_call_ends_once_and_makes_room_whatever_a_broker_does(deeds):
    left = iter(deeds)
    with FakeBroker(lambda peer, command: DEEDS[next(left)](peer, command)) as broker:
        connection = RemotingConnection(broker.address, LONG, ConnectionSettings(most_in_flight=2))
        calls: list[Call[str]] = []
        ended: list[Call[str]] = []
        for _ in deeds:
            # No slot is free, or the connection is closed.
            with contextlib.suppress(errors.ResponseTimeout, errors.Disconnected):
                calls.append(connection.submit(echo(), SHORT))
                calls[-1].when_done(ended.append)
        for call in calls:
            with contextlib.suppress(errors.RemotingError):
                call.result()
        assert becomes_true(lambda: sorted(map(id, ended)) == sorted(map(id, calls)))
        assert connection._waiting == {}
        assert connection._slots.left == 2
        connection.close()


def test_callbacks_are_called_once_whenever_they_are_added(connection, peer):
    seen: list[str] = []

    def note(call: Call[str]) -> None:
        assert call.done()
        seen.append(call.result())

    call = connection.submit(echo(), LONG)
    call.when_done(note)
    peer.answer(peer.next(), remark="x")
    assert call.result() == "x"
    call.when_done(note)
    assert becomes_true(lambda: seen == ["x", "x"])


def test_a_callback_that_fails_is_logged_and_harms_nobody(connection, peer, caplog):
    call, other = connection.submit(echo(1), LONG), connection.submit(echo(2), LONG)
    call.when_done(lambda _: 1 / 0)
    peer.answer(peer.next())
    peer.answer(peer.next(), remark="fine")
    assert other.result() == "fine"
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_not_send(connection, peer):
    caught: list[BaseException] = []

    def send(_: Call[str]) -> None:
        try:
            connection.submit(echo(), LONG)
        except RuntimeError as error:
            caught.append(error)

    call = connection.submit(echo(), LONG)
    call.when_done(send)
    peer.answer(peer.next())
    call.result()
    assert becomes_true(lambda: len(caught) == 1)


def test_a_request_of_the_broker_is_handed_on_and_can_be_answered(broker):
    asked: list[RemotingCommand] = []

    def on_request(connection: RemotingConnection, command: RemotingCommand) -> None:
        asked.append(command)
        connection.answer(command, 3, "never heard of it")

    connection = RemotingConnection(broker.address, LONG, on_request=on_request)
    peer = broker.peer()
    peer.send(frame(40, 1, ONE_WAY))
    peer.send(frame(307, 2, 0, {"a": "b"}))
    answer = peer.next()
    assert (answer.code, answer.opaque, answer.flag) == (3, 2, ANSWER)
    assert [(command.code, command.fields) for command in asked] == [(40, {}), (307, {"a": "b"})]
    connection.close()


def test_errors_and_reprs_show_no_body_and_no_field(connection, peer):
    call = connection.submit(echo(body=b"s3cret"), SHORT)
    with pytest.raises(errors.ResponseTimeout) as caught:
        call.result()
    command = RemotingCommand(1, fields={"a": "s3cret"}, body=b"s3cret")
    assert "s3cret" not in f"{call.request!r} {caught.value!r} {command!r}"
