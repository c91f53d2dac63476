"""Tests of the client: brokers by name, name servers in turn, memberships after lost connections, notifications."""

import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from txnbridge_rocketmq.client import errors
from txnbridge_rocketmq.client.client import RemotingClient, _NotificationQueue
from txnbridge_rocketmq.client.groups import Membership, members
from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand
from txnbridge_rocketmq.client.protocol.send_requests import CheckBack
from txnbridge_rocketmq.client.retry import retry_call

from tests.in_time import within
from tests.rocketmq.kit import LONG, ONE_WAY, FakeBroker, Peer, becomes_true, echo, frame, our_threads, pairs, stored
from txnbridge.spi import Deadline

SHORT = 0.3
SHOP = Membership(frozenset({"shop"}))


class Cluster:
    """A name server and a broker of a few lines, which record the requests."""

    def __init__(self) -> None:
        self.asked: list[RemotingCommand] = []
        self.names: list[RemotingCommand] = []
        self.known = True
        self.others: dict[str, dict[str, str]] = {}
        self.broker = FakeBroker(self._answer)
        self.name_server = FakeBroker(self._name)

    def _answer(self, peer: Peer, command: RemotingCommand) -> None:
        self.asked.append(command)
        if command.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            return  # gets no response
        if command.code == 9002:
            peer.answer(command, ResponseCode.SYSTEM_BUSY, remark="[PCBUSY_CLEAN_QUEUE]")
        else:
            peer.answer(command, remark="done")

    def _name(self, peer: Peer, command: RemotingCommand) -> None:
        self.names.append(command)
        addresses = {"0": self.broker.address} if self.known else {}
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            brokers = {**self.others, "a": addresses}
            told = {name: {"brokerName": name, "brokerAddrs": each} for name, each in brokers.items()}
            peer.answer(command, body=json.dumps({"brokerAddrTable": told}).encode())
        elif command.fields["topic"] == "orders":
            queues = [{"brokerName": "a", "perm": 6, "readQueueNums": 2, "writeQueueNums": 2}]
            masters = [{"brokerName": "a", "brokerAddrs": addresses}]
            peer.answer(command, body=json.dumps({"queueDatas": queues, "brokerDatas": masters}).encode())
        else:
            peer.answer(command, ResponseCode.TOPIC_NOT_EXIST, remark="No topic route info")

    def moves(self) -> None:
        """Close the broker and start another one under its name."""
        self.broker.close()
        self.broker = FakeBroker(self._answer)

    def requests(self, code: int) -> list[RemotingCommand]:
        return [command for command in self.asked if command.code == code]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.broker.close()
    cluster.name_server.close()


@pytest.fixture
def client(cluster) -> Iterator[RemotingClient]:
    with RemotingClient([cluster.name_server.address], client_id="me@1") as client:
        yield client


def test_a_broker_is_found_by_its_name_and_asked_for_once(cluster, client):
    assert [client.call("a", echo(), LONG) for _ in range(3)] == ["done"] * 3
    assert len(cluster.names) == 1
    assert len(cluster.broker.peers) == 1


def test_a_broker_that_nobody_knows_is_unreachable(client):
    with pytest.raises(errors.Unreachable, match="no master of broker b") as caught:
        client.call("b", echo(), LONG)
    assert not caught.value.may_have_had_effect


def test_a_route_is_remembered_and_asked_for_anew_on_demand(cluster, client):
    found = client.route("orders", LONG)
    assert found is not None
    assert [(each.broker, each.queue) for each in found.writable] == [("a", 0), ("a", 1)]
    client.route("orders", LONG)
    assert len(cluster.names) == 1
    client.route("orders", LONG, fresh=True)
    client.call("a", echo(), LONG)  # `route` has returned the broker's address
    assert len(cluster.names) == 2
    assert client.route("missing", LONG) is None


def test_a_broker_that_moved_is_found_again(cluster, client):
    assert client.call("a", echo(), LONG) == "done"
    cluster.moves()
    said = []

    def asked_again() -> bool:
        with suppress(errors.RemotingError):
            said.append(client.call("a", echo(), LONG))
        return said != []

    assert becomes_true(asked_again)
    assert said == ["done"]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels queue more connections")
def test_a_broker_that_moved_is_found_although_its_old_host_answers_nothing(cluster, client):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as old, socket.create_connection(old.getsockname()):
        new, cluster.broker.address = cluster.broker.address, f"127.0.0.1:{old.getsockname()[1]}"
        client.brokers(LONG)
        cluster.broker.address = new
        assert retry_call(client, "a", echo(), "asking", Deadline(LONG)) == "done"


def test_name_servers_are_asked_in_turn_and_one_that_fails_last(cluster):
    with FakeBroker() as gone:
        pass
    with FakeBroker(reads=False) as silent:
        addresses = [gone.address, silent.address, cluster.name_server.address]
        with RemotingClient(addresses) as client:
            with within(3 * SHORT):
                assert client.brokers(3 * SHORT) == {"a": cluster.broker.address}
            assert client._name_servers[0] == cluster.name_server.address


def test_a_name_server_that_is_not_ready_or_knows_no_broker_yet_leaves_it_to_the_next(cluster):
    def refuse(peer: Peer, command: RemotingCommand) -> None:
        peer.answer(command, ResponseCode.SYSTEM_ERROR, remark="name server not ready")

    def know_nothing(peer: Peer, command: RemotingCommand) -> None:
        peer.answer(command, ResponseCode.TOPIC_NOT_EXIST if "topic" in command.fields else 0, body=b"{}")

    with FakeBroker(refuse) as starting, FakeBroker(know_nothing) as empty:
        for first in (starting.address, empty.address):
            with RemotingClient([first, cluster.name_server.address]) as client:
                assert client.brokers(LONG) == {"a": cluster.broker.address}
                assert client.route("orders", LONG) and client.route("missing", LONG) is None
        with RemotingClient([empty.address, cluster.name_server.address, starting.address]) as client:
            assert client.route("missing", LONG) is None
        with RemotingClient([starting.address]) as client, pytest.raises(errors.ErrorResponse, match="not ready"):
            client.brokers(LONG)


def test_without_any_name_server_the_last_reason_is_told():
    with FakeBroker() as gone:
        pass
    with RemotingClient([gone.address, gone.address]) as client, pytest.raises(errors.Unreachable, match=gone.address):
        client.brokers(LONG)


@pytest.mark.parametrize("addresses", [[], ["nowhere"]])
def test_a_wrong_address_of_a_name_server_is_refused(addresses):
    with pytest.raises(ValueError, match=r"name server|host:port"):
        RemotingClient(addresses)


def test_the_client_repeats_no_request_by_itself(cluster, client):
    with pytest.raises(errors.ErrorResponse, match="PCBUSY") as caught:
        client.call("a", echo(2), LONG)
    assert not caught.value.may_have_had_effect
    with pytest.raises(errors.ResponseTimeout):
        client.call("a", members("g"), SHORT)
    assert len(cluster.requests(9002)) == len(cluster.requests(RequestCode.GET_CONSUMER_LIST_BY_GROUP)) == 1


def test_a_call_ends_by_its_time_wherever_it_waits(cluster):
    with FakeBroker(reads=False) as silent, RemotingClient([silent.address]) as client:
        with within(SHORT), pytest.raises(errors.ResponseTimeout):
            client.call("a", echo(), SHORT)


def test_many_threads_that_submit_first_share_one_connection(cluster, client):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: client.submit("a", echo(), LONG).result(), range(16)))
    assert len(cluster.requests(9001)) == 16
    assert len(cluster.broker.peers) == 1


def test_requests_to_several_brokers_are_sent_at_once_and_one_that_is_unknown_fails_alone(cluster, client):
    unknown, done, busy = client.call_all([("b", echo()), ("a", echo()), ("a", echo(2))], LONG)
    assert (type(unknown), done, type(busy)) == (errors.Unreachable, "done", errors.ErrorResponse)


def test_closing_a_client_ends_waiting_calls_and_every_thread(cluster):
    before = our_threads()
    client = RemotingClient([cluster.name_server.address])
    client.join(SHOP, LONG)
    call = client.submit("a", members("g"), LONG)
    assert len(our_threads(before)) == 3  # the connection with check-backs, heartbeats, callbacks
    client.close()
    client.close()
    with pytest.raises(errors.Disconnected):
        call.result()
    with pytest.raises(errors.RemotingError, match="closed"):
        client.call("a", echo(), LONG)
    assert our_threads(before) == []


def test_a_member_that_joins_is_known_to_every_broker_when_the_call_returns(cluster, client):
    client.join(SHOP, LONG)
    (beat,) = cluster.requests(RequestCode.HEART_BEAT)
    assert json.loads(beat.body)["producerDataSet"] == [{"groupName": "shop"}]
    assert json.loads(beat.body)["clientID"] == "me@1"


def test_a_client_that_leaves_a_group_tells_the_brokers(cluster, client):
    reads = {"readers": frozenset({"orders"}), "kept": frozenset({"orders"})}
    client.join(Membership(frozenset({"shop", "bar"}), reads), LONG)
    client.join(Membership(SHOP.producers, {"kept": frozenset()}), LONG)
    left = [dict(command.fields) for command in cluster.requests(RequestCode.UNREGISTER_CLIENT)]
    assert left == [{"clientID": "me@1", "producerGroup": "bar"}, {"clientID": "me@1", "consumerGroup": "readers"}]
    client.close()
    left = [dict(command.fields) for command in cluster.requests(RequestCode.UNREGISTER_CLIENT)[2:]]
    assert left == [{"clientID": "me@1", "producerGroup": "shop"}, {"clientID": "me@1", "consumerGroup": "kept"}]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_broker_is_told_again_on_each_new_connection(cluster, client, elsewhere):
    client.join(SHOP, LONG)
    cluster.known = not elsewhere
    cluster.moves() if elsewhere else cluster.broker.peers[0].hang_up()
    cluster.known = True
    assert becomes_true(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) == 2)
    assert len(cluster.broker.peers) == (1 if elsewhere else 2)


def test_heartbeats_go_on(cluster):
    with RemotingClient([cluster.name_server.address], heartbeat_seconds=0.1) as client:
        client.join(SHOP, LONG)
        assert becomes_true(lambda: len(cluster.requests(RequestCode.HEART_BEAT)) >= 3)


def test_a_silent_broker_keeps_no_other_one_from_being_told(cluster, client):
    with FakeBroker(reads=False) as silent:
        cluster.others["silent"] = {"0": silent.address}
        client.join(SHOP, LONG)
    assert cluster.requests(RequestCode.HEART_BEAT)


def test_a_thread_that_could_not_be_started_is_started_by_the_next_call_that_joins(cluster, client, no_threads):
    before, is_own = our_threads(), lambda thread: thread.name == "rocketmq client"
    no_threads(1, when=is_own)
    with pytest.raises(RuntimeError):
        client.join(SHOP, LONG)
    client.join(SHOP, LONG)
    assert len(our_threads(before)) == 3  # the connection with check-backs, heartbeats, callbacks


def test_joining_fails_if_no_broker_can_be_told(cluster, client):
    cluster.broker.close()
    with pytest.raises(errors.Unreachable):
        client.join(SHOP, LONG)


HALF = stored(b"hello", "orders", pairs(UNIQ_KEY="AB", PGROUP="shop", REAL_TOPIC="orders"))
ASKED = {"tranStateTableOffset": "9", "commitLogOffset": "4711", "transactionId": "AB", "bname": "a"}
QUESTION = frame(RequestCode.CHECK_TRANSACTION_STATE, 1, ONE_WAY, ASKED, HALF)


def test_check_backs_reach_the_callback_and_malformed_ones_are_passed_over(cluster, caplog):
    checks: list[CheckBack] = []
    changed: list[str] = []

    def on_checks(asked: Sequence[CheckBack]) -> None:
        checks.extend(asked)
        if len(checks) == 1:
            raise ZeroDivisionError

    with RemotingClient([cluster.name_server.address], on_checks=on_checks, on_members=changed.append) as client:
        client.join(SHOP, LONG)
        peer = cluster.broker.peers[0]
        peer.send(frame(RequestCode.CHECK_TRANSACTION_STATE, 1, ONE_WAY, ASKED, b"garbage"))
        peer.send(QUESTION)
        assert becomes_true(lambda: len(checks) == 1)
        peer.send(QUESTION)
        peer.send(frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 3, ONE_WAY, {"consumerGroup": "readers"}))
        assert becomes_true(lambda: changed == ["readers"])
        assert [check.half.log_offset for check in checks] == [4711, 4711]
        assert "ZeroDivisionError" in caplog.text and "hello" not in caplog.text


def test_a_callback_may_ask_the_broker(cluster):
    said: list[str] = []
    with RemotingClient([cluster.name_server.address], on_checks=lambda asked: said.extend(map(ask, asked))) as client:

        def ask(check: CheckBack) -> str:
            return client.call(check.broker, echo(), LONG)

        client.join(SHOP, LONG)
        cluster.broker.peers[0].send(QUESTION)
        assert becomes_true(lambda: said == ["done"])


def test_a_request_that_this_client_does_not_serve_is_answered_as_such(cluster, client):
    client.submit("a", echo(), LONG).result()
    cluster.broker.peers[0].send(frame(307, 99, 0))
    assert becomes_true(lambda: cluster.requests(3) != [])
    (answer,) = cluster.requests(3)
    assert (answer.opaque, answer.is_answer) == (99, True)


def test_check_backs_that_arrive_while_the_callback_works_come_together(cluster):
    together: list[int] = []
    go_on = threading.Event()

    def on_checks(checks: Sequence[CheckBack]) -> None:
        together.append(len(checks))
        assert go_on.wait(LONG)

    with RemotingClient([cluster.name_server.address], on_checks=on_checks) as client:
        client.join(SHOP, LONG)
        cluster.broker.peers[0].send(QUESTION)
        assert becomes_true(lambda: together == [1])
        for _ in range(3):
            cluster.broker.peers[0].send(QUESTION)
        client.submit("a", echo(), LONG).result()  # the response follows the notifications
        go_on.set()
        assert becomes_true(lambda: together == [1, 3])


def test_closing_a_client_leaves_a_callback_alone_that_does_not_end(cluster):
    before = our_threads()
    asked, over = threading.Event(), threading.Event()

    def hang(checks: object) -> None:
        asked.set()
        over.wait()

    client = RemotingClient([cluster.name_server.address], on_checks=hang)
    client.join(SHOP, LONG)
    try:
        cluster.broker.peers[0].send(QUESTION)
        assert asked.wait(LONG)
        with within(1):
            client.close(1)
    finally:
        over.set()
    assert becomes_true(lambda: our_threads(before) == [])


def test_questions_that_wait_are_bounded_in_number_and_in_bytes():
    questions = _NotificationQueue(most=3, most_bytes=100)
    taken = [questions.put(RemotingCommand(39, body=bytes(size))) for size in (60, 60, 0, 0, 0)]
    assert taken == [True, False, True, True, False]
    assert [len(command.body) for command in questions.take()] == [60, 0, 0]
    assert questions.put(RemotingCommand(39, body=bytes(100)))
    questions.close()
    assert questions.take() == []
