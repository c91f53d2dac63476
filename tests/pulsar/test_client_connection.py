"""Connections: what they ask and answer, and that nothing hangs whatever the other side does or does not."""

import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client.connecting.address import Address, full_topic_name, partition_name, service_url
from txnbridge_pulsar.client.connecting.connection import BrokerConnection, ConnectionOptions, answer_to
from txnbridge_pulsar.client.connecting.transport import Transport
from txnbridge_pulsar.client.deadline import ClientDeadline, backoff_pauses
from txnbridge_pulsar.client.format.codec import encode
from txnbridge_pulsar.client.format.frames import command, parse, send_command
from txnbridge_pulsar.client.pending_sends import Budget

from tests.failing import fail_call, note_calls, raising
from tests.in_time import wait_until, within
from tests.interrupts import interrupted_at
from tests.kafka.certificates import Authority
from tests.pulsar.client_kit import acknowledge, connection_of, cut
from tests.pulsar.fake import FakeBroker, Peer, connected, fake_broker, owns_everything, replies, served
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline

# Far more than anything here takes.
SOON = 60.0


REQUESTS: dict[str, dict[str, Any]] = {
    "producer": {"topic": "t", "producer_id": 1},
    "subscribe": {"topic": "t", "subscription": "s", "sub_type": 0, "consumer_id": 1},
    "lookup": {"topic": "t"},
    "partition_metadata": {"topic": "t"},
    "get_last_message_id": {"consumer_id": 1},
    "ack": {"consumer_id": 1, "ack_type": 0},
    "seek": {"consumer_id": 1},
    "tc_client_connect_request": {"tc_id": 0},
    "new_txn": {"tc_id": 0},
    "end_txn": {},
}


def connect(broker: FakeBroker, timeout: float = SOON, **options: Any) -> BrokerConnection:
    return BrokerConnection.open(
        Address("127.0.0.1", broker.port), ConnectionOptions(**options), ClientDeadline(timeout)
    )


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """Return a broker that serves all topics."""
    with fake_broker() as broker:
        owns_everything(broker)
        yield broker


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[wire.PulsarClient]:
    with wire.PulsarClient(broker.url) as client:
        yield client


@pytest.fixture
def producer(client: wire.PulsarClient) -> wire.PulsarProducer:
    return client.create_producer("t", name="p", timeout=SOON)


partitions = replies("partition_metadata_response", partitions=3)


@pytest.mark.parametrize("name", ["pulsar resolve", "pulsar 127"])
def test_a_connection_without_a_thread_is_closed_and_may_be_tried_again(broker, monkeypatch, name):
    when = lambda thread: thread.name.startswith(name)  # noqa: E731
    fail_call(monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"), when=when)
    with pytest.raises(wire.ConnectFailed, match="can't start new thread"):  # an open socket warns
        connect(broker)
    connect(broker).close()


@pytest.mark.parametrize(
    ("text", "addresses", "tls"),
    [
        ("pulsar://a", [("a", 6650)], False),
        ("pulsar://a:1,b,[::1]:2/", [("a", 1), ("b", 6650), ("::1", 2)], False),
        ("pulsar+ssl://a", [("a", 6651)], True),
    ],
)
def test_a_service_url_names_its_brokers(text, addresses, tls):
    assert service_url(text) == (tuple(addresses), tls)


@pytest.mark.parametrize(
    "text",
    ["a:1", "http://a", "pulsar://", "pulsar://a:x", "pulsar://a:99999", "pulsar://a,,b", "pulsar://me:secret@a"],
)
def test_a_text_that_is_no_service_url_is_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match="Pulsar service URL") as refused:
        service_url(text)
    assert "secret" not in str(refused.value)


def test_names_of_topics_become_full():
    assert full_topic_name("orders") == "persistent://public/default/orders"
    assert full_topic_name("t/n/orders") == "persistent://t/n/orders"
    assert partition_name("orders", 3) == "persistent://public/default/orders-partition-3"
    with pytest.raises(ValueError, match="'t/orders'"):
        full_topic_name("t/orders")


def test_pauses_grow_up_to_a_limit():
    found = [pause for pause, _ in zip(backoff_pauses(), range(20), strict=False)]
    assert found[0] <= 0.05
    assert 2.5 <= found[-1] <= 5


def test_many_requests_are_in_flight_and_each_gets_its_own_answer():
    waiting: list[int] = []

    def answer_backwards(peer: Peer, fields: dict[str, Any]) -> None:
        waiting.append(fields["request_id"])
        if len(waiting) == 100:
            for id in reversed(waiting):
                peer.say("partition_metadata_response", request_id=id, partitions=id)

    with fake_broker(partition_metadata=answer_backwards) as broker, closing(connect(broker)) as connection:
        asked = [connection.request("partition_metadata", ClientDeadline(SOON), topic="t") for _ in range(100)]
        answers = [response.result(SOON) for response in asked]
        assert [answer["partitions"] for answer in answers] == [answer["request_id"] for answer in answers]
        assert len({answer["request_id"] for answer in answers}) == 100


def test_a_request_without_an_answer_times_out_and_a_late_answer_disturbs_no_other():
    with fake_broker(partition_metadata=partitions) as broker, closing(connect(broker)) as connection:
        with pytest.raises(wire.RequestTimedOut) as error:
            connection.ask("new_txn", ClientDeadline(0.1), tc_id=0)
        assert error.value.may_have_had_effect
        assert connection._requests == {}
        (asked,) = broker.wait_for("new_txn")
        broker.peers[0].say("new_txn_response", request_id=asked.fields["request_id"])
        assert connection.ask("partition_metadata", ClientDeadline(SOON), topic="t")["partitions"] == 3


def test_lanes_that_were_hung_up_leave_no_connection_behind(broker, client):
    for number in range(10):
        client.read("persistent://a/b/t", timeout=SOON, connection_key=f"reader {number}")
        client.hang_up(f"reader {number}")
    pool = client._pool
    assert [key for _, key in [*pool._connections, *pool._opening]] == [""]


def test_an_error_with_the_code_0_is_an_error():
    refuse = replies("new_txn_response", error=0, message="no")
    with fake_broker(new_txn=refuse) as broker, closing(connect(broker)) as connection:
        with pytest.raises(Exception, match="UNKNOWN: no"):
            connection.ask("new_txn", ClientDeadline(SOON))


@pytest.mark.parametrize("closes", [False, True], ids=["breaks", "is closed on this side"])
def test_a_request_ends_when_the_connection(closes):
    with fake_broker(new_txn=lambda peer, fields: None if closes else peer.hang_up()) as broker:
        connection = connect(broker)
        asked = connection.request("new_txn", ClientDeadline(SOON))
        if broker.wait_for("new_txn") and closes:
            connection.close()
        for may_have_had_effect in (True, False):
            with pytest.raises(wire.BrokerConnectionLost) as error:
                asked.result(SOON) if may_have_had_effect else connection.ask("new_txn", ClientDeadline(SOON))
            assert error.value.may_have_had_effect is may_have_had_effect
        assert connection.closed


def test_an_acknowledgement_is_unknown_at_once_when_the_broker_closes_the_consumer(broker, client):
    def acknowledged(peer: Peer, fields: dict[str, Any]) -> None:
        peer.say("close_consumer", consumer_id=fields["consumer_id"], request_id=0)  # and never another answer

    broker.handlers["ack"] = acknowledged
    consumer = client.subscribe("persistent://public/default/t", "group", timeout=SOON)
    with pytest.raises(wire.BrokerConnectionLost, match="closed before it was answered") as lost:
        acknowledge(consumer, [wire.MessageId(1, 1)], wire.TxnId(0, 1))
    assert not isinstance(lost.value, wire.RequestTimedOut)
    assert lost.value.may_have_had_effect


def test_in_a_transaction_each_part_of_an_entry_is_acknowledged_by_a_command_of_its_own(broker, client):
    """A broker that loads the topic anew skips a command for several entries if it knows one of them already."""
    whole, parts = (
        [wire.MessageId(1, 0), wire.MessageId(1, 1, -1, -1, 2)],
        [wire.MessageId(1, 3, -1, 0, 2), wire.MessageId(1, 4, -1, 1, 2)],
    )
    consumer = client.subscribe("persistent://public/default/t", "group", timeout=SOON)
    consumer.start_acknowledge([parts[0], *whole, parts[1]], wire.TxnId(0, 1), timeout=SOON)
    in_transaction = [frame.fields for frame in broker.wait_for("ack", 5) if "txnid_least_bits" in frame.fields]
    told = [[id["entry_id"] for id in fields["message_id"]] for fields in in_transaction]
    assert sorted(told) == [[0, 1], [3], [4]]
    consumer.start_acknowledge([*whole, *parts], timeout=SOON)
    assert len(broker.wait_for("ack", 6)[-1].fields["message_id"]) == 4


@pytest.mark.parametrize("type", list(wire.SubscriptionType))
def test_a_batch_acknowledged_in_part_in_a_transaction_has_an_extra_index(broker, client, type):
    """A broker notices no conflict over an entry of which all indexes are pending or acknowledged."""
    ordered = type in (wire.SubscriptionType.EXCLUSIVE, wire.SubscriptionType.FAILOVER)
    consumer = client.subscribe("persistent://public/default/t", "group", timeout=SOON, type=type)
    consumer.start_acknowledge([wire.MessageId(1, 3, -1, 1, 2)], wire.TxnId(0, 1), timeout=SOON)
    acks = [frame.fields for frame in broker.wait_for("ack", 1 + ordered)]
    told = [("txnid_least_bits" in ack, ack["message_id"][0]["ack_set"]) for ack in acks]
    assert told == [(False, [0b11])] * ordered + [(True, [0b101])]


def test_commands_that_nobody_knows_or_asked_for_are_ignored():
    def odd(peer: Peer, fields: dict[str, Any]) -> None:
        peer.raw(b"\x00\x00\x00\x0a\x00\x00\x00\x06\x08\x63\x9a\x06\x01x")  # command 99
        peer.say("success", request_id=12345)
        peer.say("send_receipt", producer_id=99, sequence_id=0)
        peer.say("message", consumer_id=99, message_id={"ledger_id": 1, "entry_id": 1})
        peer.say("close_consumer", consumer_id=99, request_id=0)
        partitions(peer, fields)

    with fake_broker(partition_metadata=odd) as broker, closing(connect(broker)) as connection:
        assert connection.ask("partition_metadata", ClientDeadline(SOON), topic="t")["partitions"] == 3


def test_an_interrupt_behind_any_call_leaves_no_lock_held_and_sends_nothing_twice():
    lock, number, where = threading.Lock(), 0, "nowhere"

    def act():
        transport.write(b"written", ClientDeadline(SOON))
        transport.post(b"posted")
        with Deadline(SOON).holding(lock, ""):
            pass

    while where:
        near, far = socket.socketpair()
        transport, number = Transport(near), number + 1
        where = interrupted_at(act, number, ("client/connecting/transport.py", "/deadline.py"))
        with suppress(OSError):  # what was sent is not known
            transport.write(b"behind", ClientDeadline(1))
        assert not lock.locked(), f"a lock is held after an interrupt at {where}"
        transport.close()
        sent = b"".join(iter(partial(far.recv, 99), b""))
        assert all(sent.count(frame) <= 1 for frame in (b"written", b"posted", b"behind")), f"{sent!r} after {where}"
        far.close()
    assert number > 20


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x05\x00\x00\x00\x01\xff"],
    ids=["giant", "another protocol", "no command"],
)
def test_garbage_ends_the_connection_and_says_so(data):
    with fake_broker(new_txn=lambda peer, fields: peer.raw(data)) as broker:
        connection = connect(broker)
        with pytest.raises(wire.BrokerConnectionLost) as error:
            connection.ask("new_txn", ClientDeadline(SOON))
        assert isinstance(error.value.__cause__, wire.ProtocolError)


@pytest.mark.parametrize("by_tls", [False, True])
def test_a_broker_that_says_nothing_or_speaks_no_tls_lets_nobody_in_and_nobody_hang(certified, by_tls):
    tls = certified[1] if by_tls else None
    with fake_broker(connect=lambda peer, fields: None) as broker, within(0.3), pytest.raises(wire.ConnectFailed):
        connect(broker, timeout=0.3, tls=tls)


def test_a_port_where_nobody_listens_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(wire.ConnectFailed, match=f"127.0.0.1:{port}"):
        BrokerConnection.open(Address("127.0.0.1", port), ConnectionOptions(), ClientDeadline(SOON))


def test_an_address_of_a_host_that_does_not_answer_leaves_time_for_the_next_one(broker, monkeypatch):
    with socket.socket() as full, ExitStack() as queued:
        full.bind(("127.0.0.2", broker.port))
        full.listen(0)
        for _ in range(4):  # more than its queue holds: it answers nobody any more
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        resolve = socket.getaddrinfo

        def found(host: str, *where: Any, **named: Any) -> list[Any]:
            hosts = ("127.0.0.2", "127.0.0.1") if host == "broker" else (host,)
            return [resolve(each, *where, **named)[0] for each in hosts]

        monkeypatch.setattr(socket, "getaddrinfo", found)
        BrokerConnection.open(Address("broker", broker.port), ConnectionOptions(), ClientDeadline(4)).close()


def test_a_broker_that_stops_reading_blocks_no_writer_beyond_its_deadline():
    stop = threading.Event()
    with fake_broker(flow=lambda peer, fields: stop.wait(SOON)) as broker, closing(connect(broker)) as connection:
        frame = b"".join([b"\x00\x00\x00\x09", b"\x00\x00\x00\x05\x08\x12\x92\x01\x00"]) * 100_000  # pings
        connection.write(b"\x00\x00\x00\x0c\x00\x00\x00\x08\x08\x0b\x5a\x04\x08\x00\x10\x01", ClientDeadline(SOON))
        with pytest.raises(wire.RequestTimedOut) as error:
            for _ in range(1000):
                connection.write(frame, ClientDeadline(0.2))
        assert error.value.may_have_had_effect
        stop.set()


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_of_another_kind_is_refused(name):
    wrong = replies("success" if answer_to(name) != "success" else "end_txn_response")
    with fake_broker() as broker:
        broker.handlers[name] = wrong
        connection = connect(broker)
        with pytest.raises(wire.ProtocolError, match="was due"):
            connection.ask(name, ClientDeadline(SOON), **REQUESTS[name])
        assert not connection.closed
        connection.close()


def test_a_transaction_without_an_id_is_refused(broker, client):
    broker.handlers["partition_metadata"] = partitions
    for name in ("tc_client_connect_request", "new_txn"):
        broker.handlers[name] = replies(answer_to(name))
    with pytest.raises(wire.ProtocolError, match="without an id"):
        client.transactions.begin(1000, SOON)


def test_a_coordinator_that_does_not_answer_is_looked_for_again(broker, client):
    begun = replies("new_txn_response", txnid_least_bits=7, txnid_most_bits=0)
    connected_to = replies("tc_client_connect_response")
    with fake_broker(tc_client_connect_request=connected_to, new_txn=begun) as other:
        owns_everything(other)
        broker.handlers.update(partition_metadata=partitions, tc_client_connect_request=connected_to)
        with pytest.raises(wire.RequestTimedOut):
            client.transactions.begin(1000, 0.5, 0)
        broker.handlers["lookup"] = other.handlers["lookup"]
        assert client.transactions.begin(1000, 5, 0) == wire.TxnId(0, 7)


def test_a_coordinator_that_is_absent_stops_no_connection_to_the_others(broker, client):
    """Their transactions would not time out (hazard H53)."""

    def connect_to(peer: Peer, fields: dict[str, Any]) -> None:
        if fields["tc_id"] != 0:
            peer.answer(fields, "tc_client_connect_response")

    broker.handlers.update(partition_metadata=partitions, tc_client_connect_request=connect_to)
    with pytest.raises(wire.RequestTimedOut):
        client.transactions.connect(1)
    assert client.transactions.connect(SOON, all_within=0.5) == 3
    assert {frame.fields["tc_id"] for frame in broker.wait_for("tc_client_connect_request", 3)} == {0, 1, 2}
    broker.handlers["tc_client_connect_request"] = replies("tc_client_connect_response")
    assert client.transactions.connect(SOON) == 3


SAID = [
    command("message", consumer_id=1, message_id={"ledger_id": 1, "entry_id": 2}, ack_set=[1]),
    command("send_error", producer_id=1, sequence_id=2, error=3, message="m"),
    command("error", request_id=1, error=3, message="m"),
    command("close_producer", producer_id=1, request_id=2**64 - 1),
    command("topic_migrated", resource_id=1, resource_type=1),
    command("auth_challenge", challenge={"auth_data": b"x"}),
    command("connected", server_version="again", max_message_size=5),
]


def damaged(frame: bytes, at: int, difference: int) -> bytes:
    at %= len(frame)
    return frame[:at] + bytes([frame[at] ^ difference]) + frame[at + 1 :]


FRAMES = st.binary(min_size=4, max_size=60).map(lambda data: len(data).to_bytes(4, "big") + data) | st.builds(
    damaged, st.sampled_from(SAID), st.integers(0, 100), st.integers(0, 255)
)


@given(frame=FRAMES)
def test_a_request_ends_whatever_a_broker_says(garbage, frame):
    broker, says = garbage
    says[:] = [frame]
    connection = connect(broker)
    with pytest.raises(wire.PulsarError) as error:
        connection.ask("new_txn", ClientDeadline(SOON), tc_id=0)
    connection.close()
    assert not isinstance(error.value, wire.RequestTimedOut)
    assert "could not be handled" not in str(error.value)  # a mistake of ours


@pytest.fixture(scope="module")
def garbage() -> Iterator[tuple[FakeBroker, list[bytes]]]:
    """A broker that says what the list holds, and then hangs up."""
    says: list[bytes] = []

    def speak(peer: Peer, fields: dict[str, Any]) -> None:
        peer.raw(b"".join(says))
        peer.hang_up()

    with fake_broker(new_txn=speak) as broker:
        yield broker, says


def test_a_quiet_broker_is_pinged_and_given_up_if_it_stays_quiet():
    with fake_broker() as broker:
        connection = connect(broker, keepalive_seconds=0.2)
        with pytest.raises(wire.BrokerConnectionLost, match=r"0\.4 s"):
            connection.request("new_txn", ClientDeadline(SOON)).result(SOON)
        assert len(broker.wait_for("ping")) == 1


def test_a_quiet_broker_that_answers_pings_is_kept():
    with fake_broker(ping=lambda peer, fields: peer.say("pong")) as broker:
        with closing(connect(broker, keepalive_seconds=1.0)) as connection:
            broker.wait_for("ping", 2)
            assert not connection.closed


SECRET = "the-secret"


@pytest.mark.parametrize(
    ("authentication", "method", "data"),
    [
        (wire.token_authentication(SECRET), "token", SECRET.encode()),
        (wire.basic_authentication("me", SECRET), "basic", b"me:the-secret"),
    ],
)
def test_credentials_go_with_the_greeting(broker, authentication, method, data):
    with closing(connect(broker, authentication=authentication)):
        (hello,) = broker.wait_for("connect")
        assert (hello.fields["auth_method_name"], hello.fields["auth_data"]) == (method, data)


def test_a_challenge_is_answered_with_the_credentials_of_that_moment(tmp_path):
    (tmp_path / "token").write_text("old\n")

    def challenge(peer: Peer, fields: dict[str, Any]) -> None:
        connected(peer, fields)
        (tmp_path / "token").write_text("new\n")
        peer.say("auth_challenge", challenge={"auth_method_name": "token", "auth_data": b""})

    authentication = wire.token_file(tmp_path / "token")
    with fake_broker(connect=challenge) as broker, closing(connect(broker, authentication=authentication)):
        (hello,) = broker.wait_for("connect")
        assert hello.fields["auth_data"] == b"old"
        assert hello.fields["feature_flags"] == {"supports_auth_refresh": True}
        (answer,) = broker.wait_for("auth_response")
        assert answer.fields["response"] == {"auth_method_name": "token", "auth_data": b"new"}


def test_a_challenge_before_the_welcome_is_answered():
    with fake_broker(
        connect=lambda peer, fields: peer.say("auth_challenge", challenge={}), auth_response=connected
    ) as broker:
        connect(broker, authentication=wire.token_authentication(SECRET)).close()


def refuse(peer: Peer, fields: dict[str, Any]) -> None:
    peer.say("error", request_id=2**64 - 1, error=3, message="Failed to authenticate")


def test_credentials_that_are_refused_are_an_error_of_their_own_and_not_tried_again(broker, client):
    broker.handlers["connect"] = refuse
    with pytest.raises(wire.NotAuthenticated, match="Failed to authenticate"):
        client.partitions("t", SOON)
    assert len(broker.wait_for("connect")) == 1


def test_credentials_that_cannot_be_read_are_an_error_of_the_client(broker, tmp_path):
    with wire.PulsarClient(broker.url, authentication=wire.token_file(tmp_path / "missing")) as client:
        with pytest.raises(wire.NotAuthenticated, match="FileNotFoundError"):
            client.partitions("t", SOON)


def test_no_secret_is_shown(caplog):
    caplog.set_level(logging.DEBUG)

    with fake_broker(connect=refuse) as broker:
        for authentication in (wire.token_authentication(SECRET), wire.basic_authentication("me", SECRET)):
            assert SECRET not in repr(authentication) + repr(ConnectionOptions(authentication))
            with pytest.raises(wire.NotAuthenticated) as error:
                connect(broker, authentication=authentication)
            assert SECRET not in repr(error.value) + str(error.value)
    with fake_broker() as broker:
        tokens, fail = iter(["good"]), raising(RuntimeError(SECRET))
        connection = connect(broker, authentication=wire.token_authentication(lambda: next(tokens, None) or fail()))
        broker.peers[0].say("auth_challenge", challenge={})
        broker.peers[0].say("ping")
        broker.wait_for("pong")
        connection.close()
    assert SECRET not in caplog.text


@pytest.fixture
def certified(tmp_path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts by which a broker and its clients trust each other."""
    authority = Authority(tmp_path, "authority")
    server = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    return context, wire.tls_context(authority.certificate)


def test_many_threads_read_and_write_through_tls_at_once(certified):
    """Large answers to large questions: what TLS has to say itself comes in the middle of both."""

    def echo(peer: Peer, fields: dict[str, Any]) -> None:
        peer.say("partition_metadata_response", request_id=fields["request_id"], message=fields["topic"])

    theirs, ours = certified
    with fake_broker(theirs, partition_metadata=echo) as broker, closing(connect(broker, tls=ours)) as connection:

        def ask(number: int) -> bool:
            topic = f"{number} " * 50_000
            answer = connection.ask("partition_metadata", ClientDeadline(SOON), topic=topic)
            return bool(answer["message"] == topic)

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, range(100))) == [True] * 100


def redirect_to(other: FakeBroker) -> Any:
    return replies("lookup_response", response=0, broker_service_url=other.url, authoritative=True)


def test_a_redirect_is_followed_with_the_authority_that_it_gives(broker):
    with fake_broker(lookup=redirect_to(broker)) as first, wire.PulsarClient(first.url) as client:
        client.create_producer("t", timeout=SOON)
        (asked,) = broker.wait_for("lookup")
        assert asked.fields["authoritative"]
        assert len(broker.wait_for("producer")) == 1


def test_a_broker_that_redirects_in_circles_is_asked_anew_after_twenty_times(broker, client):
    answer = broker.handlers["lookup"]

    def twenty_times(peer: Peer, fields: dict[str, Any]) -> None:
        (answer if len(broker.wait_for("lookup")) > 20 else redirect_to(broker))(peer, fields)

    broker.handlers["lookup"] = twenty_times
    client.create_producer("t", timeout=SOON).close(SOON)
    assert [frame.fields["authoritative"] for frame in broker.wait_for("lookup")] == [False, *[True] * 19, False]


def test_a_broker_of_the_service_url_that_is_down_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        down = taken.getsockname()[1]
    with fake_broker(partition_metadata=partitions) as broker:
        with wire.PulsarClient(f"pulsar://127.0.0.1:{down},127.0.0.1:{broker.port}") as client:
            assert client.partitions("t", SOON) == 3


def test_a_broker_behind_a_proxy_is_named_to_the_proxy(broker, client):
    inside = {"broker_service_url": "pulsar://inside:1234", "proxy_through_service_url": True}
    broker.handlers["lookup"] = replies("lookup_response", response=1, **inside)
    client.create_producer("t", timeout=SOON)
    first, second = broker.wait_for("connect", 2)
    assert "proxy_to_broker_url" not in first.fields
    assert second.fields["proxy_to_broker_url"] == "inside:1234"


def test_a_topic_that_is_not_ready_is_asked_for_again_until_it_is(broker, client):
    def not_at_first(peer: Peer, fields: dict[str, Any]) -> None:
        if len(broker.wait_for("producer")) < 3:
            peer.answer(fields, "error", error=6, message="please redo the lookup")
        else:
            peer.answer(fields, "producer_success", producer_name="p")

    broker.handlers["producer"] = not_at_first
    client.create_producer("t", timeout=SOON).close(SOON)
    assert len(broker.wait_for("lookup")) == 3


def test_a_lane_that_is_hung_up_loses_what_was_opened_in_it_and_nothing_else(broker, client):
    opened = [client.create_producer("t", timeout=SOON, connection_key=key) for key in ("", "", "a", "b")]
    assert len({id(connection_of(producer)) for producer in opened}) == 3
    client.hang_up("b")
    assert [producer.lost is None for producer in opened] == [True, True, True, False]
    opened[-1].reopen(SOON)
    assert opened[-1].lost is None


def test_a_closed_client_opens_nothing(client):
    client.close()
    client.close()
    with pytest.raises(wire.Closed):
        client.partitions("t", SOON)


def test_sends_without_a_receipt_are_unconfirmed_after_a_loss_and_sent_again_only_when_asked(broker, producer):
    sends = [producer.send(wire.Single(b"%d" % number), timeout=SOON) for number in range(3)]
    broker.wait_for("send", 3)
    broker.peers[0].hang_up()
    for send in sends:
        with pytest.raises(wire.BrokerConnectionLost) as error:
            send.result(SOON)
        assert error.value.may_have_had_effect
    assert producer.unconfirmed == sends
    with pytest.raises(wire.BrokerConnectionLost) as error:
        producer.send(wire.Single(b"x"), timeout=SOON)
    assert not error.value.may_have_had_effect
    producer.reopen(SOON)
    assert broker.wait_for("producer", 2)[1].fields["epoch"] == 1
    assert producer.resend(SOON) == sends
    tails = [frame.tail for frame in broker.wait_for("send", 6)]
    assert tails[:3] == tails[3:]
    for send in sends:
        broker.peers[1].say("send_receipt", producer_id=producer.id, sequence_id=send.sequence_id)
    assert [send.result(SOON).sequence_id for send in sends] == [0, 1, 2]
    assert producer.unconfirmed == []
    producer.close(SOON)


def test_unconfirmed_sends_keep_their_order_also_when_they_are_lost_while_they_are_sent_again(client, producer):
    sends = [producer.send(wire.Single(b"%d" % number), timeout=SOON) for number in range(6)]
    client.hang_up("")
    for after in (4, 2, 5):
        producer.reopen(SOON)
        connection = connection_of(producer)
        assert connection is not None
        write = connection.write
        written: list[bytes] = []

        def breaks(frame: bytes, deadline: ClientDeadline, write=write, written=written, after=after) -> None:
            if len(written) == after:
                raise wire.BrokerConnectionLost("it broke")
            written.append(frame)
            write(frame, deadline)

        connection.write = breaks  # type: ignore[method-assign]
        with pytest.raises(wire.BrokerConnectionLost):
            producer.resend(SOON)
        client.hang_up("")  # the loss is told to the producer only now
        assert producer.unconfirmed == sends
        assert written == [send.frame for send in sends[:after]]


def test_an_interrupt_behind_any_call_of_a_resending_drops_no_send(broker, client):
    number, where = 1, "the start"
    while where:
        producer = client.create_producer("t", timeout=SOON)
        sends = [producer.send(wire.Single(b"%d" % value), timeout=SOON) for value in range(3)]
        cut(producer)
        producer.reopen(SOON)
        where = interrupted_at(partial(producer.resend, SOON), number, ("client/producer.py",))
        cut(producer)
        assert producer.unconfirmed == sends, f"sends are missing after an interrupt at {where}"
        number += 1
    assert number > 20


def test_a_loss_that_is_told_late_is_no_result_of_sending_again(broker, producer):
    def send_again() -> None:
        producer.reopen(SOON)
        producer.resend(SOON)

    with ThreadPoolExecutor(1) as others:
        sent_again = lambda _: wait([others.submit(send_again)], 0.5)  # noqa: E731
        sends = [producer.send(wire.Single(b"0"), timeout=SOON, when_done=sent_again)]
        sends.append(producer.send(wire.Single(b"1"), timeout=SOON))
        broker.wait_for("send", 2)
        broker.peers[0].hang_up()
        broker.wait_for("send", 4)
    for number in range(2):
        broker.peers[1].say("send_receipt", producer_id=producer.id, sequence_id=number)
    assert [send.result(SOON).sequence_id for send in sends] == [0, 1]


def test_sequence_ids_of_forgotten_sends_are_not_used_again(broker, client, producer):
    producer.send(wire.Single(b"0"), timeout=SOON)
    broker.wait_for("send")
    broker.peers[0].say("close_producer", producer_id=producer.id, request_id=2**64 - 1)
    producer.flush(SOON)
    assert producer.lost is not None
    producer.forget()
    producer.reopen(SOON)
    assert producer.send(wire.Single(b"1"), timeout=SOON).sequence_id == 1
    producer.close(SOON)
    assert client._budget._used == 0


def test_a_producer_whose_topic_moves_is_lost_and_the_connection_is_not(broker, client):
    first, second = (client.create_producer(topic, timeout=SOON) for topic in ("a", "b"))
    broker.peers[0].say("close_producer", producer_id=first.id, request_id=2**64 - 1)
    send = second.send(wire.Single(b"x"), timeout=SOON)
    broker.peers[0].say("send_receipt", producer_id=second.id, sequence_id=0)
    send.result(SOON)
    assert first.lost is not None and second.lost is None
    first.reopen(SOON)
    assert first.lost is None


@pytest.mark.parametrize(
    ("why", "refused"), [("fenced", True), ("Cannot determine whether the message is a duplicate at this time", False)]
)
def test_a_send_that_a_broker_cannot_store_now_is_sent_again_with_all_that_follow_it(broker, producer, why, refused):
    """A topic that moves is closed first: what follows a message that came too late may be stored before it."""
    sends = [producer.send(wire.Single(b"%d" % number), timeout=SOON) for number in range(3)]
    broker.wait_for("send", 3)
    broker.peers[0].say("send_receipt", producer_id=producer.id, sequence_id=0)
    broker.peers[0].say("send_error", producer_id=producer.id, sequence_id=1, error=2, message=why)
    broker.peers[0].say("send_receipt", producer_id=producer.id, sequence_id=2)
    assert sends[0].result(SOON).sequence_id == 0
    for send in sends[1:]:
        with pytest.raises(wire.BrokerConnectionLost, match=why):
            send.result(SOON)
    assert producer.unconfirmed == sends[1:]
    assert [send.refused for send in sends] == [False, refused, False]
    producer.reopen(SOON)
    assert producer.resend(SOON) == sends[1:]
    frames = broker.wait_for("send", 5)
    assert [frame.tail for frame in frames[3:]] == [frame.tail for frame in frames[1:3]]
    nowhere = {"ledger_id": 2**64 - 1, "entry_id": 2**64 - 1}
    for send in sends[1:]:
        broker.peers[0].say("send_receipt", producer_id=producer.id, sequence_id=send.sequence_id, message_id=nowhere)
    # What followed a refused one may have made the broker take it for an older one.
    with pytest.raises(wire.PerhapsDropped) if refused else nullcontext():
        assert sends[1].result(SOON).duplicate
    assert sends[2].result(SOON).duplicate


def test_a_send_that_a_broker_will_never_store_fails_alone(broker, producer):
    sends = [producer.send(wire.Single(b"%d" % number), timeout=SOON) for number in range(2)]
    broker.wait_for("send", 2)
    broker.peers[0].say("send_error", producer_id=producer.id, sequence_id=0, error=22, message="not here")
    broker.peers[0].say("send_receipt", producer_id=producer.id, sequence_id=1)
    with pytest.raises(wire.NotAllowed):
        sends[0].result(SOON)
    assert sends[1].result(SOON).sequence_id == 1
    assert producer.lost is None


def test_a_refused_send_is_found_without_a_look_at_each_other_one(producer):
    """A broker may refuse each of very many, and no other answer on the connection is heard meanwhile."""
    other, send = (producer.send(wire.Single(b"x"), timeout=SOON) for _ in range(2))
    del other.highest_sequence_id  # so that a look at it fails
    producer.on_send_error({"sequence_id": 1, "error": 15, "message": "terminated"})
    assert send.done


def test_a_message_that_is_larger_than_the_broker_takes_is_not_sent(producer):
    with pytest.raises(Exception, match="1000"):
        producer.send(wire.Single(bytes(1000)), timeout=SOON)
    assert producer.send(wire.Single(bytes(900)), timeout=SOON).sequence_id == 0


def test_no_more_bytes_are_on_their_way_than_allowed():
    with served(room=1500) as (broker, client):
        producer = client.create_producer("t", timeout=SOON)
        first = producer.send(wire.Single(bytes(900)), timeout=SOON)
        with pytest.raises(wire.RequestTimedOut) as error:
            producer.send(wire.Single(bytes(900)), timeout=0.1)
        assert not error.value.may_have_had_effect
        broker.peers[0].say("send_receipt", producer_id=producer.id, sequence_id=0)
        first.result(SOON)
        assert producer.send(wire.Single(bytes(900)), timeout=SOON).sequence_id == 1
        producer.close(SOON)
        client.create_producer("u", timeout=SOON).send(wire.Single(bytes(900)), timeout=1)


def test_a_lost_connection_makes_room_for_those_that_wait_for_it(monkeypatch):
    with served(room=1500) as (_, client):
        lost, other = (client.create_producer("t", timeout=SOON, connection_key=key) for key in "ab")
        entry = wire.Single(bytes(900))
        first = lost.send(entry, timeout=SOON)
        asked = note_calls(monkeypatch, Budget, "take")
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(each.send, entry, timeout=SOON) for each in (lost, other)]
            wait_until(lambda: len(asked) == 2)
            client.hang_up("a")
            with pytest.raises(wire.BrokerConnectionLost, match="reopened"):
                waiting[0].result()
            assert waiting[1].result().sequence_id == 0
        lost.reopen(SOON)
        assert lost.resend(SOON) == [first]  # whose room is needed anyhow
        for each in lost, other:
            each.close(SOON)
        client.create_producer("u", timeout=SOON).send(entry, timeout=1)


def test_the_entries_of_a_broker_that_hangs_stop_no_small_ones_of_others():
    with served(room=500 << 10, connect=partial(connected, largest=1 << 20)) as (_, client):
        hanging, other = (client.create_producer(topic, timeout=SOON) for topic in "tu")
        hanging.send(wire.Single(bytes(600 << 10)), timeout=SOON)
        assert other.send(wire.Single(bytes(300)), timeout=SOON).sequence_id == 0
        for producer, size in (other, 300), (client.create_producer("v", timeout=SOON), 600):
            with pytest.raises(wire.RequestTimedOut):
                producer.send(wire.Single(bytes(size)), timeout=0.1)


def test_an_opening_that_is_not_answered_in_time_is_taken_back(broker, client):
    client.create_producer("other", timeout=SOON).close(SOON)  # so that connecting takes none of the time
    broker.handlers["producer"] = lambda peer, fields: None
    with pytest.raises(wire.RequestTimedOut):
        client.create_producer("t", timeout=0.5)
    *_, opened = broker.wait_for("producer", 2)
    *_, closed = broker.wait_for("close_producer", 2)
    assert closed.fields["producer_id"] == opened.fields["producer_id"]


@pytest.mark.parametrize("kind", ["producer", "subscribe"])
def test_a_broker_that_never_answers_an_opening_is_left_for_the_one_that_serves_the_topic_by_then(kind):
    with fake_broker() as silent, fake_broker() as other:
        with wire.PulsarClient(silent.url, opening_attempt_seconds=0.2) as client:
            for broker in (silent, other):
                owns_everything(broker)

            def says_nothing(peer: Peer, fields: dict[str, Any]) -> None:
                silent.handlers["lookup"] = other.handlers["lookup"]

            silent.handlers[kind] = says_nothing
            if kind == "producer":
                client.create_producer("t", timeout=SOON)
            else:
                client.subscribe("t", "group", timeout=SOON)
            assert len(silent.wait_for(kind)) == len(other.wait_for(kind)) == 1


def test_a_producer_that_waits_for_its_turn_is_ready_when_the_turn_comes(broker, client):
    def later(peer: Peer, fields: dict[str, Any]) -> None:
        for ready in (False, True):
            peer.say("producer_success", request_id=fields["request_id"], producer_name="p", producer_ready=ready)

    broker.handlers["producer"] = later
    client.create_producer("t", timeout=SOON).close(SOON)


def test_a_consumer_gets_no_permits_before_the_broker_has_made_it(broker, client):
    """A broker forgets how many messages it may send, and then sends none, for ever."""
    requests: list[int] = []
    early: list[Any] = []

    def make(peer: Peer, fields: dict[str, Any]) -> None:
        requests.append(fields["request_id"])
        peer.say("active_consumer_change", consumer_id=fields["consumer_id"], is_active=False)
        peer.say("ping")

    def make_the_rest(peer: Peer, fields: dict[str, Any]) -> None:
        early.extend(frame for frame in peer.seen if frame.name == "flow")
        peer.say("success", request_id=requests[0])

    broker.handlers.update(subscribe=make, pong=make_the_rest)
    consumer = client.subscribe("t", "s", timeout=SOON, type=wire.SubscriptionType.FAILOVER)
    (flow,) = broker.wait_for("flow")
    assert (early, flow.fields["message_permits"] > 0) == ([], True)
    consumer.close(SOON)


def test_permits_that_an_odd_entry_claims_to_have_used_up_are_granted_in_a_number_that_brokers_take(broker, client):
    odd = {"producer_name": "p", "sequence_id": 0, "publish_time": 1, "num_messages_in_batch": 2**31 - 1}
    entry = send_command({"producer_id": 1, "sequence_id": 0}, encode("MessageMetadata", odd), b"")

    def deliver(peer: Peer, fields: dict[str, Any]) -> None:
        message = command("message", consumer_id=fields["consumer_id"], message_id={"ledger_id": 1, "entry_id": 0})
        tail = parse(entry[4:]).tail
        peer.raw((len(message) - 4 + len(tail)).to_bytes(4, "big") + message[4:] + tail)
        del broker.handlers["flow"]

    broker.handlers["flow"] = deliver
    consumer = client.subscribe("t", "s", timeout=SOON)
    consumer.receive(SOON)
    _, flow = broker.wait_for("flow", 2)
    assert flow.fields["message_permits"] == 2**31 - 1


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_an_interrupt_behind_any_call_of_a_reopening_leaves_what_works_or_is_known_to_be_lost(broker, client, kind):
    def deliver(peer: Peer, fields: dict[str, Any]) -> None:
        peer.say("message", consumer_id=fields["consumer_id"], message_id={"ledger_id": 1, "entry_id": 0})

    def store(peer: Peer, fields: dict[str, Any]) -> None:
        peer.say("send_receipt", producer_id=fields["producer_id"], sequence_id=fields["sequence_id"])

    broker.handlers.update(flow=deliver, send=store)
    made = client.subscribe("t", "s", timeout=SOON) if kind == "consumer" else client.create_producer("t", timeout=SOON)
    number, where = 0, "the start"
    while where:
        if made.lost is None and kind == "consumer":
            assert made.receive(5) or made.receive(5), f"nothing comes after an interrupt at {where}"
        elif made.lost is None:
            made.send(wire.Single(b""), timeout=SOON).result(5)
        if made.lost is None:
            cut(made)
        number += 1
        where = interrupted_at(lambda: made.reopen(SOON), number, (f"client/{kind}.py",))
    assert number > 5


def test_a_broker_is_asked_to_redeliver_before_it_gets_new_permits(broker, client):
    """With permits it starts to read on, and may skip entries if it has to go back then (hazard H94)."""

    def deliver(peer: Peer, fields: dict[str, Any]) -> None:
        for entry in range(fields["message_permits"]):
            peer.say("message", consumer_id=fields["consumer_id"], message_id={"ledger_id": 1, "entry_id": entry})
        peer.say("ping")

    broker.handlers["flow"] = deliver
    consumer = client.subscribe("t", "s", timeout=SOON, type=wire.SubscriptionType.FAILOVER)
    broker.wait_for("pong")
    consumer.redeliver()
    broker.wait_for("flow", 2)
    sent = [frame.name for peer in broker.peers for frame in peer.seen if frame.name in ("flow", "redeliver")]
    assert sent == ["flow", "redeliver", "flow"]
    consumer.close(SOON)
