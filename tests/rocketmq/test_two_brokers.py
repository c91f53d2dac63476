"""Tests of a cluster with two brokers, one of which is down: its topics are neither missing nor created again."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import StartRocketMQ
from txnbridge_conformance.observing import eventually
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import Disconnected, Unreachable
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import RequestCode
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage, send
from txnbridge_rocketmq.client.routes import TopicRoute
from txnbridge_rocketmq.cluster import ClusterId, identify_cluster
from txnbridge_rocketmq.read import rebalance
from txnbridge_rocketmq.topics import RocketMQTopics

from tests.rocketmq.kit import LONG, bodies, settings_for
from tests.rocketmq.reading_kit import unique
from txnbridge import Bridge, BrokerUnavailable, DeliveryFailed, NotFound, Outcome, Transaction, UsageError
from txnbridge.spi import Deadline

Open = Callable[..., Bridge]
HERE, AWAY = "broker-1", "broker-2"  # the bridge's own topics are on the first broker by name


@dataclass
class Two:
    cluster: brokers.RocketMQ
    client: RemotingClient

    def new_topic(self, broker: str) -> str:
        name = unique("topic")
        self.client.call(broker, administration.create_topic(name, 1, "TRANSACTION"), LONG)
        eventually(lambda: self.where(name) == [broker], "the name server knows it")
        return name

    def where(self, topic: str) -> list[str]:
        found = self.client.route(topic, LONG, fresh=True)
        return [] if found is None else sorted({queue.broker for queue in found.readable})


@pytest.fixture(scope="module")
def two(start_shared: StartRocketMQ) -> Iterator[Two]:
    cluster = start_shared(nodes=2)
    with RemotingClient([cluster.url.removeprefix("rocketmq://")]) as client:
        yield Two(cluster, client)


@pytest.fixture
def topic(two: Two) -> Iterator[str]:
    """Create a topic on the second broker, which runs again after the test."""
    yield two.new_topic(AWAY)
    two.cluster.start(2)
    eventually(lambda: AWAY in two.client.brokers(LONG), "the broker is back")


def go_away(two: Two, topic: str) -> None:
    two.cluster.kill(2)
    eventually(lambda: not two.where(topic), "the name server has forgotten it")


def test_a_topic_whose_broker_is_away_is_neither_missing_nor_made_anew(two: Two, topic: str, open_bridge: Open) -> None:
    bridge = open_bridge(two.cluster.url, create_topics=1, timeout=5)
    with bridge.transaction() as txn:
        txn.send(topic, b"1")
    go_away(two, topic)
    newer = open_bridge(two.cluster.url, create_topics=1, timeout=5)
    looks: list[Callable[[], object]] = [
        lambda: write(bridge, topic, 2),
        lambda: write(newer, topic, 2),
        lambda: newer.read(topic, 1),
        lambda: newer.admin.bounds(topic),
        lambda: newer.admin.create_topic(topic, 1),
    ]
    for look in looks:
        with pytest.raises((BrokerUnavailable, DeliveryFailed)):
            look()
    two.cluster.start(2)
    eventually(lambda: two.where(topic) == [AWAY], "it is back, and nowhere else")
    assert write(bridge, topic, LONG) is Outcome.COMMITTED
    assert bodies(two.client, topic, AWAY) == [b"1", b"2"]


@pytest.mark.offline
def test_a_broker_that_was_not_known_when_the_bridge_was_opened_may_have_a_topic_too():
    """The name server had just restarted, and the bridge was opened while it knew neither broker's topics."""
    settings = settings_for("rocketmq://h")
    client: Any = Mock(brokers=lambda _: {HERE: "h:1"}, seen_brokers=frozenset({HERE}), route=lambda *_, **__: None)
    client.ask_name_server, client.call = lambda *_: [settings.broker_topic(AWAY)], lambda *_: None
    with pytest.raises(BrokerUnavailable, match=f"broker {AWAY}, which may have the topic"):
        RocketMQTopics(settings, client, HERE).create("orders", 1, Deadline(0.5))


@pytest.mark.offline
def test_a_name_server_that_knows_only_a_new_broker_gives_no_second_id() -> None:
    client: Any = Mock(brokers=lambda _: {HERE: "h:1"}, ask_name_server=lambda *_: [])
    client.route = lambda topic, *_, **__: TopicRoute(topic, (Queue(topic, HERE, 0),), (), {})
    settings = replace(settings_for("rocketmq://new:1"), name_servers=("new:1", "old:1"))
    client.call_address.side_effect = [[], Unreachable("down"), [f"_txnbridge-cluster-{'0' * 32}-{AWAY}"]]
    assert identify_cluster(settings, client, Deadline(LONG)) == ClusterId("0" * 32, AWAY)
    client.call_address.side_effect = Unreachable("down")
    with pytest.raises(BrokerUnavailable, match="name server new:1 whether this cluster has an id"):
        identify_cluster(settings, client, Deadline(0.1))


@pytest.mark.offline
@pytest.mark.parametrize("begun", [0, 2], ids=["created", "grown"])
def test_a_topic_that_gets_more_partitions_before_a_request_is_repeated_keeps_them(begun: int) -> None:
    changes = [begun]  # the topic's number of partitions after each change

    def call(broker: str, request: RpcRequest[Any], timeout: float) -> Any:
        if request.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            changes.append(int(request.fields["readQueueNums"]))
            if len(changes) == 2:
                changes.append(8)  # by another process
                raise Disconnected("the answer was lost", may_have_had_effect=True)
        return {} if changes[-1] else None

    def route(topic: str, timeout: float, fresh: bool) -> TopicRoute | None:
        queues = tuple(Queue(topic, HERE, number) for number in range(changes[-1]))
        return TopicRoute(topic, queues, queues, {}) if queues else None

    client: Any = Mock(brokers=lambda _: {HERE: "h:1"}, seen_brokers=frozenset({HERE}), route=route, call=call)
    client.ask_name_server = lambda *_: []
    topics = RocketMQTopics(settings_for("rocketmq://h"), client, HERE)
    (topics.grow if begun else topics.create)("orders", 4, Deadline(LONG))
    assert changes == [begun, 4, 8]


@pytest.fixture
def member(monkeypatch: Any) -> Any:
    """Return a group's only member. Tests set `client.call`; `locked` has what it gets by default."""
    client: Any = Mock(locked={Queue("here", HERE, number) for number in range(2)})

    def call(broker: str, request: RpcRequest[Any], timeout: float) -> Any:
        if broker == AWAY:
            raise Unreachable("it is down")
        locks = request.code == RequestCode.LOCK_BATCH_MQ
        if locks and client.locked is None:
            raise Unreachable("it went down")
        return client.locked if locks else [client.client_id]

    client.call = call
    monkeypatch.setattr(rebalance, "open_client", lambda _, name, on: client.configure_mock(client_id=name) or client)
    monkeypatch.setattr(rebalance, "_BROKER_SECONDS", 0.1)
    return rebalance.Rebalancer(settings_for("rocketmq://h"), "group", ["away", "here"], print, Deadline(LONG))


@pytest.mark.offline
def test_a_broker_that_is_away_keeps_no_member_of_a_group_from_the_queues_of_others(member: Any) -> None:
    queues = {"away": [Queue("away", AWAY, 0)], "here": [Queue("here", HERE, 0)]}
    found = member.refresh(queues, {("away", 0)}, Deadline(1))
    assert found.free == {("here", 0)} and found.mine == {("here", 0), ("away", 0)}
    del queues["here"]
    with pytest.raises(BrokerUnavailable, match="it is down"):
        member.refresh(queues, (), Deadline(0.1))


@pytest.mark.offline
def test_a_lock_that_was_lost_behind_a_renewal_without_an_answer_is_noticed(member: Any) -> None:
    queues, holding = {"here": [Queue("here", HERE, number) for number in range(2)]}, {("here", 0), ("here", 1)}
    member.refresh(queues, holding, Deadline(1))
    member.client.locked = None
    with pytest.raises(BrokerUnavailable, match="it went down"):
        member.refresh(queues, holding, Deadline(0.1))
    member.client.locked, ids = set(), [member.client.client_id, member.client.client_id.replace("-", "-0")]
    call = member.client.call
    member.client.call = lambda *given: call(*given) if given[1].code == RequestCode.LOCK_BATCH_MQ else ids
    found = member.refresh(queues, holding, Deadline(1))
    assert found.taken == found.mine and len(found.mine) == 1


def write(bridge: Bridge, topic: str, timeout: float) -> Outcome | None:
    with bridge.transaction(timeout=timeout) as txn:
        txn.send(topic, b"2")
    return txn.outcome


def test_a_missing_topic_is_not_found_where_all_brokers_are_there(two: Two, topic: str, open_bridge: Open) -> None:
    bridge = open_bridge(two.cluster.url, create_topics=0)
    with pytest.raises(NotFound), bridge.transaction() as txn:
        txn.send(unique("missing"), b"1")


def test_a_broker_that_is_away_makes_no_dead_letters(two: Two, topic: str, open_bridge: Open) -> None:
    source, dead = two.new_topic(HERE), two.new_topic(HERE)
    for number in range(4):
        two.client.call(HERE, send(WireMessage(source, b"%d" % number), "tests", 0), LONG)
    bridge = open_bridge(two.cluster.url, create_topics=0)
    with bridge.transaction() as txn:
        txn.send(topic, b"first")
    failed: list[Exception] = []

    def copy(message: Any, txn: Transaction) -> None:
        try:
            txn.send(topic, message.value)
        except Exception as error:
            failed.append(error)
            raise

    processor = bridge.processor(
        source, group=unique("group"), each=copy, timeout=3.0, max_attempts=1, dead_letter=dead
    )
    go_away(two, topic)
    thread = threading.Thread(target=lambda: processor.run(until_idle=True))
    thread.start()
    try:
        eventually(lambda: len(failed) >= 2, "it tried")
    finally:
        two.cluster.start(2)
        thread.join()
    assert not any(isinstance(error, UsageError) for error in failed)
    assert bodies(two.client, dead) == []
    assert bodies(two.client, topic, AWAY) == [b"first", b"0", b"1", b"2", b"3"]
