"""Tests of administration and doctor: on a live broker, and with settings that brokers have."""

import os
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_rocketmq.admin.admin import RocketMQAdmin
from txnbridge_rocketmq.admin.doctor import check_disk, check_open, check_settings
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.errors import ErrorResponse, Unreachable
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, encode
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage, send
from txnbridge_rocketmq.client.routes import TopicRoute
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.settings.broker_config import BrokerConfig

from tests.inside import broker_of
from tests.rocketmq.kit import LONG, cluster_for, settings_for
from tests.rocketmq.reading_kit import cluster_of, connect_to
from txnbridge.errors import InvalidOption, NotFound, NotSupported
from txnbridge.spi import Deadline, OpenTransaction, Token

pytestmark = pytest.mark.timeout(600)  # the first start fetches RocketMQ


def soon():
    return Deadline(LONG)


@pytest.fixture
def name():
    return f"administered-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def admin(rocketmq_broker):
    with connect_to(rocketmq_broker.url) as bridge:
        yield broker_of(bridge).admin


def named(admin, name):
    return [topic for topic in admin.topics(soon()) if topic.name == name]


def test_a_topic_of_users_grows_and_never_shrinks_and_is_not_found_once_deleted(admin, name):
    admin.create_topic(name, 2, soon())
    admin.grow_topic(name, 4, soon())
    (found,) = named(admin, name)
    assert (found.partitions, found.internal, found.retention_seconds) == (4, False, 72 * 3600)
    with pytest.raises(InvalidOption, match="fewer"):
        admin.grow_topic(name, 1, soon())
    admin.delete_topic(name, soon())
    assert named(admin, name) == []
    for call in (lambda: admin.delete_topic(name, soon()), lambda: admin.grow_topic(name, 2, soon())):
        with pytest.raises(NotFound, match=name):
            call()


def test_growing_leaves_a_topic_of_the_kind_that_it_was(admin, rocketmq_broker, client, name):
    rocketmq_broker.create_topic(name, queues=1, kind="FIFO")
    admin.grow_topic(name, 2, soon())
    assert client.call("broker-1", administration.topic_attributes(name), LONG) == {"message.type": "FIFO"}


def test_the_official_client_may_send_transactions_to_a_topic_that_we_create(admin, client, name):
    admin.create_topic(name, 1, soon())
    assert client.call("broker-1", administration.topic_attributes(name), LONG) == {"message.type": "TRANSACTION"}


@pytest.mark.parametrize("kept", [{"retention_seconds": 90}, {"retention_bytes": 1}], ids=str)
def test_a_retention_of_its_own_no_topic_has(admin, name, kept):
    with pytest.raises(NotSupported, match="fileReservedTime"):
        admin.create_topic(name, 1, soon(), **kept)
    assert named(admin, name) == []


def test_the_topics_of_the_broker_and_of_ours_are_internal(admin, name):
    admin.create_topic(name, 1, soon())
    internal = {topic.name for topic in admin.topics(soon()) if topic.internal}
    assert {"RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "broker-1", "BenchmarkTest"} < internal
    assert "_txnbridge-cluster" in internal
    assert len([each for each in internal if each.startswith("cluster-")]) == 2  # the cluster's own, and its replies
    assert name not in internal


@pytest.mark.parametrize("bad", ["a b", "a/b", "", "x" * 128, "ü"])
def test_a_name_that_no_topic_can_have_is_refused(admin, bad):
    with pytest.raises(InvalidOption, match="is not a topic name"):
        admin.create_topic(bad, 1, soon())


@pytest.mark.parametrize("port", ["proxy", "broker"])
def test_the_port_of_a_proxy_or_a_broker_is_no_name_server(rocketmq_broker, port):
    address = rocketmq_broker.broker_address(1)
    if port == "proxy":
        address = f"127.0.0.1:{rocketmq_broker._proxy_remoting[1]}"
    with pytest.raises(InvalidOption, match=f"a broker or a proxy answers at {address}"):
        cluster_for(f"rocketmq://{address}")


AS_THEY_COME = (
    {"transactionTimeOut": "6000", "transactionCheckInterval": "30000", "transactionOpBatchInterval": "3000"}
    | {"transactionCheckMax": "15", "fileReservedTime": "72", "messageIndexEnable": "true"}
    | {"messageIndexSafe": "false", "rejectTransactionMessage": "false", "indexRocksDBEnable": "false"}
    | {"flushDiskType": "ASYNC_FLUSH", "brokerRole": "ASYNC_MASTER"}
)
INDEXED = AS_THEY_COME | {"messageIndexSafe": "true"}
DURABLE = {"flushDiskType": "SYNC_FLUSH", "brokerRole": "SYNC_MASTER"}
AS_THEY_SHOULD_BE = INDEXED | DURABLE | {"transactionOpBatchInterval": "100", "transactionCheckMax": "1440"}


def found(told, level="problem", **given):
    settings = settings_for("rocketmq://localhost:9876", **given)
    return [each for each in check_settings(BrokerConfig("b", told), settings) if each.level == level]


def test_the_doctor_has_no_advice_for_a_well_configured_broker():
    assert found(AS_THEY_SHOULD_BE, "problem") == found(AS_THEY_SHOULD_BE, "warning") == []
    (about,) = found(AS_THEY_SHOULD_BE, "ok")
    assert "72 h" in about.text


def test_a_broker_as_it_comes_is_safe_for_healthy_transactions_and_weak_in_a_crash():
    (problem,) = found(AS_THEY_COME)
    assert "-k messageIndexSafe -v true" in problem.remedy
    told = " ".join(each.text for each in found(AS_THEY_COME, "warning"))
    assert all(word in told for word in ("after 450 s a half is discarded", "ASYNC_FLUSH", "ASYNC_MASTER"))


def test_replicas_that_move_halves_to_other_brokers_are_a_problem():
    (problem,) = found(AS_THEY_SHOULD_BE | {"enableSlaveActingMaster": "true"})
    assert "-k enableSlaveActingMaster -v false" in problem.remedy


# transactionTimeOut, transactionCheckInterval and transactionOpBatchInterval in milliseconds, and whether a live broker
# with these settings sent check-backs for halves that had ended.
MEASURED = [
    (6000, 1000, 3000, False),
    (2000, 2000, 3000, True),
    (2000, 1000, 3000, True),
    (2000, 1000, 100, False),
    (1000, 500, 100, False),
    (300, 300, 50, True),
]


@pytest.mark.parametrize(("timeout", "interval", "noted", "doubled"), MEASURED)
def test_settings_under_which_healthy_commits_double_are_a_problem(timeout, interval, noted, doubled):
    told = AS_THEY_SHOULD_BE | {
        "transactionTimeOut": str(timeout),
        "transactionCheckInterval": str(interval),
        "transactionOpBatchInterval": str(noted),
        "transactionCheckMax": "100000",
    }
    problems = [each for each in found(told) if "are written again" in each.text]
    assert bool(problems) is doubled
    assert all("-k transactionTimeOut -v" in each.remedy for each in problems)


def test_a_broker_that_notes_each_end_at_once_may_ask_early():
    told = AS_THEY_SHOULD_BE | {
        "transactionTimeOut": "2000",
        "transactionCheckInterval": "2000",
        "transactionOpBatchInterval": "3000",
        "transactionOpMsgMaxSize": "1",
        "transactionCheckMax": "50000",
    }
    assert found(told) == []


def test_a_half_that_is_discarded_before_its_transaction_may_end_is_a_problem():
    assert found(INDEXED, timeout=30.0, hold=380.0) == []
    (problem,) = found(INDEXED, timeout=30.0, hold=420.0)
    assert "450 s" in problem.text and "-k transactionCheckMax -v 1440" in problem.remedy


def test_halves_that_are_discarded_before_they_are_old_enough_to_be_asked_about_are_a_problem():
    told = INDEXED | {"transactionCheckInterval": "5000", "transactionCheckMax": "10"}
    assert found(told, timeout=30.0) == []
    (problem,) = found(told | {"transactionTimeOut": "60000"}, timeout=30.0)
    assert "first when it is 60 s old (transactionTimeOut)" in problem.text


def test_a_broker_that_discards_halves_without_a_trace_soon_is_a_problem():
    told = INDEXED | {"transRocksDBEnable": "true", "transWriteOriginTransHalfEnable": "false"}
    (problem,) = found(told)
    assert "450 s" in problem.text and "stays unpublished" in problem.text
    assert "-k transactionCheckMax -v 1440" in problem.remedy
    assert found(told | {"transactionCheckMax": "1440"}) == []


def test_a_log_that_is_dropped_within_a_transactions_life_is_a_problem():
    told = AS_THEY_SHOULD_BE | {"fileReservedTime": "1", "transactionCheckMax": "100"}
    assert [each for each in found(told, hold=3500.0) if "decision log" in each.text]
    assert [each for each in found(told, "warning") if "no bridge of an application runs" in each.text]
    assert found(told) == []


@pytest.mark.parametrize(
    ("changed", "level", "text", "remedy"),
    [
        (
            {"transactionOpMsgMaxSize": "1", "transactionOpBatchInterval": "2147483647"},
            "warning",
            "name few halves each",
            "-k transactionOpMsgMaxSize -v 4096",
        ),
        (
            {"transactionCheckInterval": "1000", "transactionOpBatchInterval": "3000", "transactionCheckMax": "100000"},
            "problem",
            "halves that have ended get check-backs",
            "-k transactionCheckInterval -v 3000",
        ),
        ({"transactionCheckMax": "10000"}, "problem", "outlive the record that decides it", ""),
        ({"rejectTransactionMessage": "true"}, "problem", "rejectTransactionMessage", ""),
        ({"messageIndexEnable": "false"}, "problem", "messageIndexEnable", ""),
        ({"indexRocksDBEnable": "true"}, "warning", "indexRocksDBEnable", ""),
    ],
)
def test_a_setting_that_takes_a_promise_away_is_named_with_its_remedy(changed, level, text, remedy):
    (advice,) = [each for each in found(AS_THEY_SHOULD_BE | changed, level) if text in each.text]
    assert remedy in advice.remedy
    assert level == "problem" or found(AS_THEY_SHOULD_BE | changed) == []


def test_the_defaults_of_a_broker_are_taken_where_it_tells_no_setting():
    told = BrokerConfig("b", {"transactionTimeOut": "?"})
    assert (told.transaction_timeout, told.check_interval, told.check_max, told.op_message_interval) == (6, 30, 15, 3)
    assert (told.discarded_after, told.retention, told.message_bytes) == (450, 72 * 3600, 4 << 20)
    assert told.half_topic == "RMQ_SYS_TRANS_HALF_TOPIC"


def test_a_message_as_large_as_any_broker_allows_fits_into_one_request():
    most = BrokerConfig("b", {"maxMessageSize": str(64 << 20)}).message_bytes
    message = WireMessage("t", bytes(most), {"a": "\x03" * 30_000})  # JSON writes each character by six
    request = send(message, "g", 0)
    assert encode(RemotingCommand(request.code, fields=request.fields, body=request.body))


@pytest.mark.parametrize(
    ("rocksdb", "original", "rocks"), [("true", "false", True), ("true", "true", False), ("false", "false", False)]
)
def test_the_topic_in_which_halves_wait_is_told_by_two_settings(rocksdb, original, rocks):
    told = BrokerConfig("b", {"transRocksDBEnable": rocksdb, "transWriteOriginTransHalfEnable": original})
    assert ("ROCKSDB" in told.half_topic) is rocks


@pytest.mark.parametrize(("full", "levels"), [(0.74, []), (0.8, ["warning"]), (0.86, ["problem"])])
def test_a_disk_that_makes_a_broker_drop_decisions_is_told_of(full, levels):
    found = list(check_disk("b", full))
    assert [each.level for each in found] == levels
    assert all(f"{full:.0%}" in each.text for each in found)


def left(state, owner, token=None):
    return OpenTransaction(f"{owner}/1", state, owner, expires_at=1, messages=2, token=token)


@pytest.mark.offline
@pytest.mark.parametrize(
    ("found", "subject", "remedy"),
    [
        (
            left("prepared", "_txnbridge-half-a%20b|shop"),
            "half-a%20b|shop/1",
            "txnbridge resolver run --group shop --application 'a b'",
        ),
        (left("discarded", "_txnbridge-half-a|shop"), "half-a|shop/1", "txnbridge transactions repair"),
        (left("ending", "billing"), "billing/1", "open a bridge with application='billing'"),
        (left("discarded", "billing"), "billing/1", "txnbridge transactions repair"),
    ],
    ids=lambda value: value.state if isinstance(value, OpenTransaction) else "",
)
def test_the_doctor_names_who_can_end_an_abandoned_transaction(found, subject, remedy):
    (advice,) = check_open([found], settings_for("rocketmq://localhost:9876"))
    assert subject in advice.subject
    assert advice.remedy.startswith(remedy)


@pytest.mark.offline
def test_parked_half_messages_are_counted_by_their_group():
    token = Token("rocketmq", "cluster", "halves/1", {}, True, None, 1)
    half_groups = ["_txnbridge-half-sales|my%20shop", "_txnbridge-half-billing|my%20shop"]
    parked = [left("discarded", group, token) for group in [*half_groups, "billing"]]
    advice = {each.subject: each for each in check_open(parked, settings_for("rocketmq://localhost:9876"))}
    assert advice.keys() == {"half messages of my shop", "transaction billing/1"}
    assert advice["half messages of my shop"].text.startswith("2 are parked")
    assert advice["half messages of my shop"].remedy == "txnbridge resolver parked --group 'my shop'"


@pytest.mark.offline
def test_a_topic_that_may_not_be_read_is_told_before_a_read_and_one_whose_broker_is_away_is_not():
    told = {"mine": None, "secret": ErrorResponse(ResponseCode.NO_PERMISSION, "", ""), "away": Unreachable("")}
    client = SimpleNamespace(
        route=lambda topic, *_, **__: TopicRoute(topic, (Queue(topic, topic, 0),), (), {}),
        call_all=lambda asked, seconds: [told[broker] for broker, _ in asked],
    )
    cluster: Any = SimpleNamespace(client=client, topics=None)
    assert RocketMQAdmin(HalfEnder(cluster)).unreadable([*told], soon()) == ["secret"]


def test_a_broker_tells_how_full_its_disk_is(rocketmq_broker, client):
    told = client.call("broker-1", administration.disk_ratio(), LONG)
    disk = os.statvfs(rocketmq_broker.folder)
    used = disk.f_blocks - disk.f_bfree
    assert told == pytest.approx(used / (used + disk.f_bavail), abs=0.1)


def test_the_doctor_judges_the_settings_that_a_broker_has_now(admin, settings):
    def problems():
        return [one.text for one in admin.check(soon()) if one.level == "problem" and one.subject == "broker broker-1"]

    assert problems() == []
    settings(transactionOpBatchInterval=3000, transactionOpMsgMaxSize=4096)
    assert any("are written again" in text for text in problems())


@pytest.mark.full
def test_a_topic_on_two_brokers_is_refused_by_name(start_rocketmq):
    broker = start_rocketmq(nodes=2)
    broker.create_topic("spread", queues=2)
    with connect_to(broker.url) as bridge:
        admin = broker_of(bridge).admin
        topics = cluster_of(bridge).topics
        for call in (topics.queues, lambda topic, deadline: topics.require(topic, 0, deadline)):
            with pytest.raises(NotSupported, match=r"spread.*broker-1, broker-2"):
                call("spread", soon())
        advice = [each.subject for each in admin.check(soon()) if "neither reads nor writes" in each.text]
        assert advice == ["topic spread"]
        admin.create_topic("here", 2, soon())
        assert {queue.broker for queue in topics.queues("here", soon())} == {"broker-1"}
        admin.delete_topic("spread", soon())
        assert named(admin, "spread") == []
