"""Tests of the producer groups in which a bridge answers check-backs, and of other clients in them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import Unreachable
from txnbridge_rocketmq.client.groups import Membership
from txnbridge_rocketmq.half_store import RocketMQHalfStore
from txnbridge_rocketmq.outcome.producer_groups import CheckBackRouter, ProducerGroups

from tests.core.decisions_kit import MemoryLog
from tests.failing import EACH, fail_call
from tests.in_time import Hold
from tests.rocketmq.half_broker import HalfBroker, Process
from tests.rocketmq.kit import LONG
from tests.rocketmq.reading_kit import unique
from txnbridge.errors import AccessDenied, DeadlineExceeded, InvalidOption
from txnbridge.spi import Deadline

OURS = "_txnbridge-app-tests"
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
def test_a_foreign_producer_that_joins_our_group_later_is_warned_of_once(broker, process, caplog):
    groups = process.cluster.producer_groups
    groups.join([OURS], process.checks.answer, Deadline(60))
    broker.producers[OURS] = [STRANGER]
    with caplog.at_level(logging.WARNING, "txnbridge"):
        for _ in range(2):
            process.end_discarded()
    assert [OURS in record.message for record in caplog.records] == [True]


@pytest.mark.offline
@pytest.mark.parametrize("fault", ["lose answer", 16])
def test_a_broker_that_does_not_list_members_keeps_nobody_out(broker, process, fault):
    broker.fault = lambda request: fault if "producers" in request.action else None
    process.cluster.producer_groups.join([OURS], process.checks.answer, Deadline(60))
    assert process.cluster.producer_groups.groups == {OURS}
    if fault == 16:  # the doctor says that it may not look
        with pytest.raises(AccessDenied):
            process.cluster.producer_groups.strangers([OURS], Deadline(60), strict=True)


@pytest.mark.offline
def test_a_resolver_that_could_not_join_its_group_is_no_member_of_it(process, monkeypatch):
    joined = fail_call(monkeypatch, process.cluster.client, "join", Unreachable("away"), EACH)
    with pytest.raises(DeadlineExceeded):
        RocketMQHalfStore(process.ender).checks("shop", 1, Deadline(0.1))
    assert joined[0][0].producers and not joined[-1][0].producers


@pytest.mark.offline
@pytest.mark.parametrize("call", ["join", "leave"])
def test_a_thread_that_waits_for_anothers_change_of_the_groups_keeps_its_deadline(call):
    hold = Hold()
    client: Any = SimpleNamespace(join=hold, brokers=lambda seconds: {}, call_all=lambda *_: [])
    groups = ProducerGroups(client, CheckBackRouter())
    with hold.asked_by(lambda: groups.leave([OURS], Deadline(60))), pytest.raises(DeadlineExceeded):
        getattr(groups, call)([OURS], *[print] * (call == "join"), Deadline(0.1))


def test_the_doctor_names_other_clients_in_the_groups_of_bridges(rocketmq_broker, open_bridge):
    application = unique("shop")
    with RemotingClient([rocketmq_broker.url.removeprefix("rocketmq://")], client_id="stranger") as stranger:
        with open_bridge(application=application) as bridge:
            group = f"_txnbridge-app-{application}"
            stranger.join(Membership(frozenset({group})), LONG)
            (advice,) = [each for each in bridge.admin.doctor() if each.subject == f"producer group {group}"]
            assert advice.level == "problem" and "stranger" in advice.text
            with pytest.raises(InvalidOption, match="stranger"):
                open_bridge(application=application)
