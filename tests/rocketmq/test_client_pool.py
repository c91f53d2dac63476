"""Tests of blocking connections: the calling thread reads its own responses, and no connection is used in doubt."""

import math
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_rocketmq.client import errors
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.client import _start as start_thread
from txnbridge_rocketmq.client.connection import ConnectionSettings
from txnbridge_rocketmq.client.pool import MOST_CONNECTIONS, BlockingConnection, BlockingPool
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand
from txnbridge_rocketmq.client.retry import retry_call
from txnbridge_rocketmq.client.signal_safe_locks import Slots
from txnbridge_rocketmq.client.transport import TCP_OPTIONS

from tests.in_time import within
from tests.interrupts import interrupted_at
from tests.rocketmq.kit import ANSWER, LONG, FakeBroker, Peer, becomes_true, echo, frame, our_threads
from tests.rocketmq.test_client_connection import DEEDS
from tests.rocketmq.test_client_security import authority, back, server, trusting  # noqa: F401
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline

SHORT = 0.2


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def pool(broker: FakeBroker) -> Iterator[BlockingPool]:
    pool = BlockingPool(broker.address, ConnectionSettings(), most=2)
    yield pool
    pool.close()


def ask(pool: BlockingPool, *numbers: int, timeout: float = LONG, body: bytes = b"") -> list[object]:
    return pool.begin([echo(number, body) for number in numbers or (1,)], time.monotonic() + timeout).results()


def idle_connection(pool: BlockingPool) -> BlockingConnection:
    (found,) = pool._idle
    return found


def counts(pool: BlockingPool) -> tuple[int, int, int]:
    """Return how many connections a pool may still open, how many it has, and how many of them are idle."""
    return pool._slots.left, len(pool._connections), len(pool._idle)


def client_of(broker: FakeBroker) -> RemotingClient:
    """Return a client that knows the broker by the name `b`."""
    client = RemotingClient([broker.address])
    client._masters["b"] = broker.address
    return client


def pool_of(client: RemotingClient, broker: FakeBroker) -> BlockingPool:
    return client._pools[broker.address]


def answered(pool: BlockingPool, broker: FakeBroker, peer: Peer | None = None) -> Peer:
    """Send one request, answer it on the connection on which it comes, and return the connection."""
    exchange = pool.begin([echo()], time.monotonic() + LONG)
    peer = peer or broker.peer()
    peer.answer(peer.next(), remark="fine")
    assert exchange.results() == ["fine"]
    return peer


def test_requests_that_are_sent_together_are_answered_in_any_order(pool, broker):
    exchange = pool.begin([echo(number) for number in range(5)], time.monotonic() + LONG)
    peer = broker.peer()
    asked = [peer.next() for _ in range(5)]
    for command in reversed(asked):
        if command.code == 9003:
            peer.answer(command, ResponseCode.SYSTEM_BUSY)
        else:
            peer.answer(command, remark=str(command.code))
    refused = exchange.results()[3]
    assert isinstance(refused, errors.ErrorResponse) and not refused.may_have_had_effect
    answered(pool, broker, peer)


def test_a_call_starts_no_thread_and_opens_a_connection_only_once(pool, broker):
    before = our_threads()
    peer = answered(pool, broker)
    for _ in range(3):
        answered(pool, broker, peer)
    assert len(broker.peers) == 1 and our_threads(before) == []


def test_no_more_connections_are_open_than_allowed(pool, broker):
    exchanges = [pool.begin([echo()], time.monotonic() + LONG) for _ in range(2)]
    with within(SHORT), pytest.raises(errors.ResponseTimeout, match="too many") as caught:
        ask(pool, timeout=SHORT)
    assert not caught.value.may_have_had_effect
    for exchange in exchanges:
        exchange.abandon()
        broker.peer()
    answered(pool, broker)


@pytest.mark.parametrize("end", ["hang up", "late answer", "long idle"])
def test_an_idle_connection_on_which_something_came_or_nothing_for_long_is_not_used_again(pool, broker, end):
    peer = answered(pool, broker)
    idle = idle_connection(pool)
    if end == "long idle":  # behind the first response nothing on this connection is answered
        idle.idle_since -= 3600
    else:
        peer.hang_up() if end == "hang up" else peer.send(frame(0, 4711, ANSWER))
        assert becomes_true(lambda: not idle.is_quiet())
    assert answered(pool, broker) is not peer


def test_a_connection_that_its_server_has_closed_is_closed_before_it_is_needed_again():
    closing: list[threading.Timer] = []

    def reply(peer: Peer, command: RemotingCommand) -> None:
        peer.answer(command)
        closing.append(threading.Timer(SHORT, peer.hang_up))
        closing[-1].start()

    with FakeBroker(reply) as broker, RemotingClient([broker.address], heartbeat_seconds=600) as client:
        client._threads = [start_thread(client._send_heartbeats)]  # as of a client that has joined groups
        client.call_address(broker.address, echo(), LONG)
        pool = pool_of(client, broker)
        connection = idle_connection(pool)
        assert becomes_true(lambda: counts(pool)[1:] == (0, 0))
        assert connection._socket.fileno() == -1
        closing[0].join()


def test_a_connection_that_was_idle_for_long_is_closed_before_the_next_request_goes_over_another_one(pool, broker):
    one, other = (pool.begin([echo(number)], time.monotonic() + LONG) for number in range(2))
    heard = {command.code: (peer, command) for peer in (broker.peer(), broker.peer()) for command in (peer.next(),)}
    for code, exchange in ((9000, one), (9001, other)):
        peer, command = heard[code]
        peer.answer(command)
        assert exchange.results() == [""]
        if exchange is one:
            idle = idle_connection(pool)
            idle.idle_since = -math.inf
    answered(pool, broker, peer)
    assert (idle.is_open, *counts(pool)[1:]) == (False, 1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels neither drop packets like this nor limit silence")
def test_a_request_over_a_connection_whose_peer_vanished_fails_soon_and_is_repeated_only_if_it_may_be(monkeypatch):
    monkeypatch.setitem(TCP_OPTIONS, "TCP_USER_TIMEOUT", 500)
    with FakeBroker(back) as broker, client_of(broker) as client:
        client.call("b", echo(), LONG)
        broker.peers[0].vanish()
        with pytest.raises(errors.Disconnected) as lost:
            client.call("b", echo(), LONG)
        assert lost.value.may_have_had_effect and len(broker.peers) == 1
        client.call("b", echo(), LONG)
        broker.peers[1].vanish()
        retry_call(client, "b", echo(), "asking", Deadline(LONG))
        assert len(broker.peers) == 3


@pytest.mark.parametrize("begun", [b"", frame(0, 1, ANSWER, body=bytes(1000))[:-1]], ids=["nothing", "a part"])
def test_a_deadline_before_the_whole_response_closes_the_connection(pool, broker, begun):
    exchange = pool.begin([echo(1), echo(2)], time.monotonic() + SHORT)
    peer = broker.peer()
    peer.answer(peer.next(), remark="fine")
    peer.send(begun)
    with within(SHORT):
        fine, late = exchange.results()
    assert fine == "fine"
    assert isinstance(late, errors.ResponseTimeout) and late.may_have_had_effect and "did not answer" in str(late)
    assert answered(pool, broker) is not peer


def test_a_response_that_has_come_counts_although_its_thread_reads_it_behind_the_deadline(pool, broker):
    exchange = pool.begin([echo()], time.monotonic() + SHORT)
    peer = broker.peer()
    peer.answer(peer.next(), remark="fine")
    time.sleep(SHORT)  # as a thread that has waited for another broker
    assert exchange.results() == ["fine"]


def test_a_connection_that_fails_takes_the_idle_ones_with_it(pool, broker):
    exchanges = [pool.begin([echo()], time.monotonic() + LONG) for _ in range(2)]
    for _ in exchanges:
        peer = broker.peer()
        peer.answer(peer.next())
    assert [exchange.results() for exchange in exchanges] == [[""], [""]]
    (failed,) = ask(pool, timeout=SHORT)
    assert isinstance(failed, errors.ResponseTimeout)
    assert counts(pool)[1:] == (0, 0)


@pytest.mark.parametrize(
    ("deed", "error"),
    [(lambda peer: peer.hang_up(), errors.Disconnected), (lambda peer: peer.send(b"HTTP"), errors.ProtocolViolation)],
)
def test_a_connection_that_ends_or_speaks_something_else_fails_its_requests_alone(pool, broker, deed, error):
    one, other = (pool.begin([echo(number)], time.monotonic() + LONG) for number in (1, 2))
    heard = {command.code: (peer, command) for peer in (broker.peer(), broker.peer()) for command in (peer.next(),)}
    deed(heard[9001][0])
    (failed,) = one.results()
    assert type(failed) is error and failed.may_have_had_effect
    peer, command = heard[9002]
    peer.answer(command, remark="fine")
    assert other.results() == ["fine"]


@pytest.mark.timeout(60)
def test_a_wait_of_microseconds_for_a_slot_ends():
    assert not any(Slots(0).take(number % 20 * 1e-6 + 1e-9) for number in range(2000))


def test_an_interrupt_behind_any_call_loses_no_slot_and_no_connection():
    """A signal handler's exception comes behind a call, before its caller has what the call returns."""

    def ask(client: RemotingClient) -> list[str | errors.RemotingError]:
        return client.call_all([("b", echo())], LONG)

    with FakeBroker(back) as broker:
        number = 1
        while True:
            client = client_of(broker)
            ask(client)
            where = interrupted_at(lambda: ask(client), number, ("client/pool.py", "client/signal_safe_locks.py"))  # noqa: B023
            slots, connections, idle = counts(pool_of(client, broker))
            assert slots == MOST_CONNECTIONS, f"a slot is lost by an interrupt at {where}"
            assert connections == idle, f"a connection is lost by an interrupt at {where}"
            assert ask(client) == [""]
            client.close()
            if not where:
                break
            number += 1
    assert number > 20


def test_an_interrupt_behind_any_call_shuts_no_other_thread_out_of_a_shared_connection():
    files = ("client.py", "connection.py", "transport.py", "signal_safe_locks.py")

    def answers() -> bool:
        with suppress(errors.Disconnected):  # the interrupt has closed the connection, and its thread does not know yet
            return client.submit("b", echo(), 5.0).result() == ""
        return False

    with FakeBroker(back) as broker, client_of(broker) as client:
        number = 1
        while where := interrupted_at(lambda: client.submit("b", echo(), LONG).result(), number, files):
            assert becomes_true(answers), f"wrong after an interrupt at {where}"
            number += 1
    assert number > 20


def test_closing_a_pool_ends_waiting_requests_and_idle_connections(pool, broker):
    first = pool.begin([echo()], time.monotonic() + LONG)
    broker.peer()
    answered(pool, broker)
    (closing := threading.Timer(SHORT, pool.close)).start()
    with within(SHORT):
        (closed,) = first.results()
    closing.join()
    assert isinstance(closed, errors.Disconnected) and "was closed" in str(closed) and closed.may_have_had_effect
    assert counts(pool)[1:] == (0, 0)
    with pytest.raises(errors.Unreachable, match="closed"):
        ask(pool)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_broker_that_reads_nothing_holds_nobody_past_their_time(server, trusting, encrypted):  # noqa: F811
    with FakeBroker(tls=server if encrypted else None, reads=False) as broker:
        pool = BlockingPool(broker.address, ConnectionSettings(tls=trusting if encrypted else None))
        with within(1), pytest.raises(errors.ResponseTimeout, match="no time was left") as caught:
            pool.begin([echo(body=bytes(15 << 20))], time.monotonic() + 1)
        assert not caught.value.may_have_had_effect  # the broker never gets the whole frame
        pool.close()


def test_large_requests_and_responses_cross_encrypted(server: ssl.SSLContext, trusting: ssl.SSLContext):  # noqa: F811
    with FakeBroker(back, tls=server) as broker:
        pool = BlockingPool(broker.address, ConnectionSettings(tls=trusting))
        for _ in range(3):
            assert ask(pool, body=b"x" * (4 << 20)) == ["x" * (4 << 20)]
        assert len(broker.peers) == 1
        pool.close()


@pytest.mark.live
@given(st.lists(st.sampled_from(sorted(DEEDS)), min_size=1, max_size=8), st.integers(1, 3))
def test_every_request_ends_in_time_and_makes_room_whatever_a_broker_does(deeds, at_once):
    left = iter(deeds)

    with FakeBroker(lambda peer, command: DEEDS[next(left, "answer")](peer, command)) as broker:
        pool = BlockingPool(broker.address, ConnectionSettings(), most=1)
        for _ in range(0, len(deeds), at_once):
            results: list[object] = []
            with suppress(errors.RemotingError):  # the broker hung up before the request was sent
                results = ask(pool, *range(at_once), timeout=SHORT)
            assert all(result == "" or isinstance(result, errors.RemotingError) for result in results)
        slots, connections, idle = counts(pool)
        assert slots == 1 and connections == idle <= 1
        pool.close()
