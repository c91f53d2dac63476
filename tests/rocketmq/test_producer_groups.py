"""Tests of the producer groups in which a bridge answers check-backs, and of other clients in them."""

from __future__ import annotations

import logging

import pytest
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.outcome import check_back
from txnbridge_rocketmq.settings import RocketMQSettings

from tests.core.decisions_kit import MemoryLog
from tests.rocketmq.half_broker import HalfBroker, Process
from tests.rocketmq.kit import LONG, becomes_true, bodies
from tests.rocketmq.reading_kit import new_topic, unique
from tests.rocketmq.writing_kit import cluster_of, prepare
from txnbridge.errors import AccessDenied, InvalidOption
from txnbridge.spi import Deadline

OURS, FORMER = "_txnbridge-app-tests", "tests"
STRANGER, BRIDGE = ("host@7@0@1f2e3d4c5b6a", "PYTHON"), ("host@7@1f2e3d4c", "OTHER")


@pytest.fixture
def broker():
    return HalfBroker()


@pytest.fixture
def process(broker):
    return Process(broker, MemoryLog(), "bridge")


@pytest.mark.offline
def test_a_bridge_does_not_open_beside_other_clients_in_its_group(broker, process):
    broker.producers[OURS] = [BRIDGE, STRANGER]
    with pytest.raises(InvalidOption, match=rf"{STRANGER[0]} are in producer group '{OURS}'"):
        process.checks.start(Deadline(60))
    assert not process.cluster.producer_groups.groups


@pytest.mark.offline
def test_other_clients_that_come_later_are_warned_of_once(broker, process, caplog):
    groups = process.cluster.producer_groups
    groups.join([OURS], process.checks.answer, Deadline(60))
    broker.producers[OURS] = [STRANGER]
    with caplog.at_level(logging.WARNING, "txnbridge"):
        for _ in range(2):
            process.checks._end_discarded_once()
    assert [OURS in record.message for record in caplog.records] == [True]


@pytest.mark.offline
@pytest.mark.parametrize(
    ("members", "halves", "joins"),
    [([], False, True), ([BRIDGE], False, True), ([BRIDGE, STRANGER], False, False), ([STRANGER], True, True)],
)
def test_a_bridge_is_beside_other_clients_only_while_the_former_group_has_halves_of_bridges(
    broker, process, monkeypatch, members, halves, joins
):
    open_in = {FORMER} if halves else set()
    monkeypatch.setattr(check_back, "groups_of_open_halves", lambda *_: open_in)
    broker.producers[FORMER] = members
    process.checks._answer_in_former_group(Deadline(60))
    assert (FORMER in process.cluster.producer_groups.groups) is joins
    broker.producers[FORMER] = [STRANGER]
    open_in.clear()
    process.checks._end_discarded_once()
    assert FORMER not in process.cluster.producer_groups.groups


@pytest.mark.offline
@pytest.mark.parametrize("fault", ["lose answer", 16])
def test_a_broker_that_does_not_list_members_keeps_nobody_out(broker, process, fault):
    broker.fault = lambda request: fault if "producers" in request.action else None
    process.cluster.producer_groups.join([OURS], process.checks.answer, Deadline(60))
    assert process.cluster.producer_groups.groups == {OURS}
    if fault == 16:  # the doctor says that it may not look
        with pytest.raises(AccessDenied):
            process.cluster.producer_groups.strangers([OURS], Deadline(60), strict=True)


def test_the_doctor_names_other_clients_in_the_groups_of_bridges(rocketmq_broker, open_bridge):
    application = unique("shop")
    with (
        RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")], client_id="stranger") as stranger,
        open_bridge(application=application) as bridge,
    ):
        group = f"_txnbridge-app-{application}"
        stranger.join(Membership(frozenset({group})), LONG)
        (advice,) = [each for each in bridge.admin.check() if "stranger" in each.text]
        assert (advice.level, advice.subject) == ("problem", f"producer group {group}")
        with pytest.raises(InvalidOption, match="stranger"):
            open_bridge(application=application)


@pytest.mark.parametrize("with_stranger", [False, True])
def test_halves_of_earlier_versions_are_ended_in_their_former_group(
    rocketmq_broker, open_bridge, client, monkeypatch, with_stranger
):
    application, topic = unique("shop"), new_topic(client)
    with monkeypatch.context() as before:
        before.setattr(RocketMQSettings, "producer_group", RocketMQSettings.former_producer_group)
        with open_bridge(application=application, timeout=5) as old:
            prepare(old, topic, b"left", hold=1)
            (name,) = [each.transaction for each in old.admin.transactions() if each.owner == application]
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")], client_id="stranger") as stranger:
        if with_stranger:
            stranger.join(Membership(frozenset({application})), LONG)
        bridge = open_bridge(application=application)
        assert application in cluster_of(bridge).producer_groups.groups
        assert becomes_true(lambda: name not in [each.transaction for each in bridge.admin.transactions()])
    assert bodies(client, topic) == []
