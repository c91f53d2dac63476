"""Tests of half messages of applications on a live broker: each is published once or never, whoever dies."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import eventually
from txnbridge_conformance.plugin import RunChild
from txnbridge_rocketmq.admin import open_halves
from txnbridge_rocketmq.client.protocol.codes import Property
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder

from tests.failing import on_call
from tests.rocketmq import writing_kit
from tests.rocketmq.kit import bodies
from tests.rocketmq.reading_kit import cluster_of, unique
from txnbridge import Bridge, Decision, Outcome, TokenState
from txnbridge.spi import Deadline
from txnbridge.testing import tell

OpenBridge = Callable[..., Bridge]
SHORT = 2.0


def says(decision: Decision) -> Callable[..., Decision]:
    return lambda *_: decision


def store(url: str, topic: str, group: str, timeout: float) -> None:
    """Store two half messages that stay undecided. The test may kill the process before."""
    with writing_kit.open_bridge(url) as bridge:
        with bridge.half_messages(group, execute=says(Decision.UNDECIDED), check=says(Decision.UNDECIDED)) as halves:
            with halves.transaction(timeout=timeout) as txn:
                txn.send_many(topic, [b"1", b"2"])
            tell(txn.id)


def resolve(url: str, group: str) -> None:
    with writing_kit.open_bridge(url) as bridge, bridge.resolver(group, check=says(Decision.COMMIT)) as resolver:
        eventually(lambda: resolver.stats.committed, "it is asked")


def halves_of(group: str, cluster: Any, look: Any) -> list[open_halves.PendingHalf]:
    """Return the halves of a group that are waiting for check-backs, or were discarded."""
    deadline = Deadline(60)
    found = [half for name in cluster.brokers.names(deadline) for half in look(cluster, name, deadline)]
    return [half for half in found if half.record.properties[Property.GROUP].endswith(group)]


def test_a_resolver_killed_while_it_publishes_is_taken_over_and_nothing_is_there_twice(
    run: RunChild, rocketmq_broker: brokers.RocketMQ, client: Any, topic: str
) -> None:
    group, url = unique("halves"), rocketmq_broker.url
    for kill in ("half.check/after", "step:decide/after", "step:publish/before", "step:publish/after"):
        run(store, url, topic, group, SHORT).result()
        before = len(bodies(client, topic))
        run(resolve, url, group, kill=kill).stopped()
        if kill != "step:publish/after":  # otherwise it has ended, and no check-back follows
            run(resolve, url, group).result()
        assert len(bodies(client, topic)) == before + 2, f"killed at {kill}"
    assert sorted(bodies(client, topic)) == [b"1"] * 4 + [b"2"] * 4


def test_check_is_not_asked_about_half_messages_that_a_killed_process_stored_in_part(
    run: RunChild, rocketmq_broker: brokers.RocketMQ, open_bridge: OpenBridge, client: Any, topic: str
) -> None:
    group = unique("halves")
    run(store, rocketmq_broker.url, topic, group, SHORT, kill="step:record/before").stopped()
    run(store, rocketmq_broker.url, topic, group, SHORT).result()
    asked: list[str] = []

    def check(id: str, messages: Any) -> Decision:
        asked.append(id)
        return Decision.COMMIT

    with open_bridge().resolver(group, check=check):
        eventually(lambda: bodies(client, topic) == [b"1", b"2"], "the one that is whole is published")
        cluster = cluster_of(open_bridge(application="observers"))
        # `admin.transactions` would not do: it leaves out transactions that were decided just now.
        eventually(lambda: not halves_of(group, cluster, open_halves._waiting), "the other is dropped")
    assert len(set(asked)) == 1
    assert bodies(client, topic) == [b"1", b"2"]


def test_a_bridge_that_has_closed_its_resolver_is_asked_no_more(open_bridge: OpenBridge, topic: str) -> None:
    group, bridge = unique("halves"), open_bridge()
    joined = cluster_of(bridge).producer_groups
    undecided = says(Decision.UNDECIDED)
    with bridge.half_messages(group, execute=undecided, check=undecided) as halves:
        with bridge.resolver(group, check=undecided):
            eventually(lambda: any(name.endswith(group) for name in joined.groups), "it is a member")
        assert any(name.endswith(group) for name in joined.groups)
        halves.close()
    assert not any(name.endswith(group) for name in joined.groups)


def test_two_applications_that_name_their_groups_alike_do_not_answer_for_each_other(open_bridge, client, topic):
    group = unique("halves")
    undecided, asked = says(Decision.UNDECIDED), count()

    def check(id: str, messages: Any) -> Decision:
        return Decision.COMMIT if next(asked) > 3 else Decision.UNDECIDED

    with open_bridge(application="another-shop").resolver(group, check=says(Decision.ABORT)) as another:
        with open_bridge().half_messages(group, execute=undecided, check=check) as halves:
            with halves.transaction(timeout=SHORT) as txn:
                txn.send(topic, b"1")
            eventually(lambda: bodies(client, topic) == [b"1"], "it is published")
        assert another.stats.checks == 0


def test_an_undecided_half_message_survives_a_kill_of_the_broker(rocketmq_broker, open_bridge, client, topic):
    group, bridge = unique("halves"), open_bridge()

    def execute(*_: Any) -> Decision:
        rocketmq_broker.restart()
        return Decision.UNDECIDED

    with bridge.half_messages(group, execute=execute, check=says(Decision.COMMIT)) as halves:
        with halves.transaction(timeout=60) as txn:
            txn.send_many(topic, [b"1", b"2"])
        eventually(lambda: bodies(client, topic) == [b"1", b"2"], "it is published")


def test_a_resolver_that_no_broker_can_ask_is_not_healthy(rocketmq_broker: brokers.RocketMQ, open_bridge: OpenBridge):
    with open_bridge().resolver(unique("halves"), check=says(Decision.COMMIT)) as resolver:
        eventually(lambda: resolver.healthy, "it is a member")
        try:
            rocketmq_broker.kill()
            eventually(lambda: not resolver.healthy, "it has noticed")
        finally:
            rocketmq_broker.start()
        eventually(lambda: resolver.healthy, "it is a member again")


def test_half_messages_that_nobody_answered_for_are_parked_resumed_and_ended(
    settings: Callable[..., None], rocketmq_broker: brokers.RocketMQ, open_bridge: OpenBridge, client: Any, topic: str
) -> None:
    group, bridge = unique("halves"), open_bridge()
    settings(transactionCheckMax=2)

    def leave() -> str:
        with bridge.half_messages(group, execute=says(Decision.UNDECIDED), check=says(Decision.UNDECIDED)) as halves:
            with halves.transaction(timeout=SHORT) as txn:
                txn.send(topic, txn.id.encode())
            parked = lambda: txn.id in [half.transaction for half in bridge.admin.parked(group)]  # noqa: E731
            eventually(parked, "it is parked")
        return txn.id

    resumed, ended, dropped = leave(), leave(), leave()
    [advice] = [each for each in bridge.admin.doctor() if each.subject == f"half messages of {group}"]
    assert advice.text.startswith("3 are parked")
    assert advice.remedy == f"txnbridge resolver parked --group {group}"
    [half] = [half for half in bridge.admin.parked(group) if half.transaction == resumed]
    assert [(message.topic, message.value) for message in half.messages] == [(topic, resumed.encode())]
    settings(transactionCheckMax=1000)
    bridge.admin.resume(group, resumed)
    with bridge.resolver(group, check=says(Decision.COMMIT)):
        eventually(lambda: bodies(client, topic) == [resumed.encode()], "it is asked about again")
    bridge.admin.end_parked(group, ended, Decision.COMMIT, reason="a test")
    bridge.admin.end_parked(group, dropped, Decision.ABORT, reason="a test")
    assert bodies(client, topic) == [resumed.encode(), ended.encode()]
    assert bridge.admin.parked(group) == []


def sell(url: str, topic: str, group: str) -> None:
    with writing_kit.open_bridge(url) as bridge:
        with bridge.half_messages(group, execute=says(Decision.COMMIT), check=says(Decision.COMMIT)) as halves:
            with halves.transaction(timeout=SHORT) as txn:
                txn.send_many(topic, [b"1", b"2"])


def test_half_messages_decided_before_the_broker_discarded_them_are_published_by_a_resolver(
    run, settings, rocketmq_broker, open_bridge, client, topic, with_timing
):
    group = unique("halves")
    run(sell, rocketmq_broker.url, topic, group, kill="step:publish/before").stopped()
    settings(transactionCheckMax=2)
    cluster = cluster_of(open_bridge(application="observers"))
    eventually(
        lambda: len(halves_of(group, cluster, open_halves._discarded)) == 2, "the broker asks about neither any more"
    )
    with_timing(discarded_retry=1.0)
    with open_bridge().resolver(group, check=says(Decision.UNDECIDED)):
        eventually(lambda: bodies(client, topic) == [b"1", b"2"], "both are published")


@pytest.mark.parametrize(("messages", "end"), [(1, Bridge.commit), (1, Bridge.abort), (2, Bridge.commit)])
def test_an_end_by_token_of_a_half_message_waits_for_an_owner_that_may_be_publishing(
    open_bridge, client, topic, monkeypatch, messages, end
):
    other, ended = open_bridge(), list[Future[Outcome]]()

    def find_token(txn: Any, _: Any) -> Decision:
        tokens.extend(str(each.token) for each in other.admin.transactions() if each.transaction == txn.id)
        return Decision.COMMIT

    def end_by_token(*_: object) -> None:
        ended.append(pool.submit(end, other, tokens[0]))
        time.sleep(1)

    tokens: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        on_call(monkeypatch, HalfEnder, "publish_fresh", end_by_token)
        with open_bridge().half_messages(unique("halves"), execute=find_token, check=says(Decision.COMMIT)) as halves:
            with halves.transaction() as txn:
                txn.send_many(topic, [b"1"] * messages)
        assert ended[0].result(60) is Outcome.COMMITTED
    assert other.status(tokens[0]).state is TokenState.COMMITTED
    assert bodies(client, topic) == [b"1"] * messages


def test_a_half_message_without_a_prepare_record_is_ended_by_the_token_with_which_it_is_listed(
    open_bridge: OpenBridge, client: Any, topic: str
) -> None:
    undecided = says(Decision.UNDECIDED)
    with open_bridge().half_messages(unique("halves"), execute=undecided, check=undecided) as halves:
        with halves.transaction() as txn:
            txn.send(topic, b"1")
    other = open_bridge()
    (listed,) = [each for each in other.admin.transactions() if each.transaction == txn.id]
    token = str(listed.token)
    assert listed.state == "prepared"
    assert other.status(token).state is TokenState.PREPARED
    assert other.commit(token) is Outcome.COMMITTED
    assert other.abort(token) is Outcome.COMMITTED
    assert bodies(client, topic) == [b"1"]
