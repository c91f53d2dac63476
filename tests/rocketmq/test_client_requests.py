"""Tests of requests: their encoding, and the values that are refused before sending."""

import ast
import json
from pathlib import Path

import pytest
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import administration, groups, routes
from txnbridge_rocketmq.client.errors import ErrorResponse, NotDurable, ProtocolViolation
from txnbridge_rocketmq.client.groups import Membership, Queue
from txnbridge_rocketmq.client.protocol import read_requests, send_requests
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand
from txnbridge_rocketmq.client.protocol.read_requests import NewestByKey, PullStatus
from txnbridge_rocketmq.client.protocol.records import decode_records, unpack_properties, unwrap
from txnbridge_rocketmq.client.protocol.send_requests import HalfAddress, WireMessage
from txnbridge_rocketmq.errors import translate

from tests.rocketmq.kit import pairs, stored
from txnbridge.errors import BrokerUnavailable, StorageFailed

pytestmark = pytest.mark.offline

STORED = {"msgId": "7F00000100002A9F000000000002B67C", "queueId": "2", "queueOffset": "5", "transactionId": "AB"}
HALF = HalfAddress("orders", "shop", 5, 177788, "AB")


def in_text(fields):
    return " ".join(sorted(map("=".join, fields.items())))


def test_a_message_is_sent_with_its_fields_by_their_letters():
    message = WireMessage("orders", b"hello", {"own": "x"}, ("k1", "k2"), "new", "AB", 1234)
    request = send_requests.send(message, "shop", 2)
    told = dict(request.fields)
    properties = {"own": "x", "KEYS": "k1 k2", "TAGS": "new", "UNIQ_KEY": "AB", "WAIT": "true"}
    assert unpack_properties(told.pop("i")) == properties
    assert in_text(told) == "a=shop b=orders c=NO-TEMPLATE d=4 e=2 f=0 g=1234 h=0 j=0 k=false m=false"
    assert (request.code, request.body) == (310, b"hello")


def test_messages_that_are_sent_together_are_stored_one_by_one():
    messages = [WireMessage("orders", b"%d" % number, {"own": "x"}) for number in range(3)]
    request = send_requests.send_together(messages, "shop", 2)
    assert (request.code, request.fields["b"], request.fields["e"], request.fields["m"]) == (320, "orders", "2", "true")
    (together,) = decode_records(stored(request.body, "orders", queue_offset=7))
    found = list(unwrap(together))
    assert [(each.body, each.queue_offset) for each in found] == [(b"0", 7), (b"1", 8), (b"2", 9)]
    assert {each.properties["own"] for each in found} == {"x"} and len({each.unique_key for each in found}) == 3
    several = {**STORED, "msgId": ",".join([STORED["msgId"]] * 3)}
    assert request.result(RemotingCommand(0, fields=several)) == 5
    with pytest.raises(NotDurable):
        request.result(RemotingCommand(ResponseCode.FLUSH_DISK_TIMEOUT, fields=several))


def test_the_request_of_a_half_message_says_its_kind_and_its_producer_group():
    request = send_requests.send_half(WireMessage("orders", b"hello", unique_key="AB"), "shop", 0, immunity=6)
    assert request.fields["f"] == "4"
    properties = unpack_properties(request.fields["i"])
    assert (properties["TRAN_MSG"], properties["PGROUP"]) == ("true", "shop")
    assert properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] == "6"


def test_two_messages_without_a_unique_key_get_two():
    one, two = (
        unpack_properties(send_requests.send(WireMessage("t", b"x"), "g", 0).fields["i"])["UNIQ_KEY"] for _ in range(2)
    )
    assert one != two and len(one) == 32


def test_a_half_message_is_ended_by_the_place_where_it_was_stored():
    receipt = send_requests.send_half(WireMessage("orders", b"x", unique_key="AB"), "shop", 2).result(
        RemotingCommand(0, fields=STORED)
    )
    assert (receipt.queue, receipt.queue_offset, receipt.offset_id.log_offset) == (2, 5, 177788)
    assert send_requests.half_address("orders", "shop", receipt) == HALF
    assert in_text(send_requests.end(HALF, send_requests.HalfEnd.COMMIT, from_check=True).fields) == (
        "commitLogOffset=177788 commitOrRollback=8 fromTransactionCheck=true msgId=AB producerGroup=shop topic=orders"
        " tranStateTableOffset=5 transactionId=AB"
    )
    assert send_requests.end(HALF, send_requests.HalfEnd.ABORT).fields["commitOrRollback"] == "12"


@pytest.mark.parametrize(
    "code", [ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT]
)
def test_a_message_stored_less_safely_than_asked_is_an_error_that_knows_its_place(code):
    request = send_requests.send(WireMessage("orders", b"x"), "shop", 2)
    with pytest.raises(NotDurable) as caught:
        request.result(RemotingCommand(code, fields=STORED))
    assert caught.value.may_have_had_effect
    assert (caught.value.code, caught.value.offset_id) == (code, STORED["msgId"])


@pytest.mark.parametrize("missing", ["msgId", "queueId", "queueOffset"])
def test_an_answer_that_lacks_something_is_no_success(missing):
    told = {name: value for name, value in STORED.items() if name != missing}
    with pytest.raises(ProtocolViolation) as caught:
        send_requests.send(WireMessage("orders", b"x"), "shop", 2).result(RemotingCommand(0, fields=told))
    assert caught.value.may_have_had_effect


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (WireMessage("orders", b""), "is empty"),
        (WireMessage("or.ders", b"x"), "is not a topic name"),
        (WireMessage("", b"x"), "is not a topic name"),
        (WireMessage("t" * 128, b"x"), "is not a topic name"),
        (WireMessage("orders", b"x", keys=("a b",)), "space"),
        (WireMessage("orders", b"x", keys=("",)), "empty"),
        (WireMessage("orders", b"x", {"a": ""}), "empty"),
        (WireMessage("orders", b"x", {"a": "\x01"}), "separator"),
    ],
)
def test_a_message_that_brokers_would_change_or_choke_on_is_refused(message, words):
    with pytest.raises(ValueError, match=words):
        send_requests.send(message, "shop", 0)


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
def test_a_half_to_be_delivered_late_is_refused(name):
    with pytest.raises(ValueError, match="delayed"):
        send_requests.send_half(WireMessage("orders", b"x", {name: "3"}), "shop", 0)


@pytest.mark.parametrize("group", ["", "a b", "g" * 121, "ä"])
def test_a_group_that_brokers_do_not_take_is_refused(group):
    with pytest.raises(ValueError, match="is not a group name"):
        send_requests.send(WireMessage("orders", b"x"), group, 0)


def question(**changed: str) -> RemotingCommand:
    properties = {"UNIQ_KEY": "AB", "PGROUP": "shop", "REAL_TOPIC": "orders", "TRANSACTION_CHECK_TIMES": "2", **changed}
    body = stored(b"hello", "orders", pairs(**{name: value for name, value in properties.items() if value}))
    asked = {"tranStateTableOffset": "9", "commitLogOffset": "4711", "transactionId": "XY", "bname": "broker-a"}
    return RemotingCommand(39, fields={**asked, "topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, body=body)


@pytest.mark.parametrize(("key", "named"), [("AB", "AB"), ("", "XY")], ids=["its own key", "no key of its own"])
def test_a_question_tells_the_newest_copy_and_the_message(key, named):
    check = send_requests.check_back_of(question(UNIQ_KEY=key))
    assert check.half == HalfAddress("orders", "shop", 9, 4711, named)
    assert (check.broker, check.record.payload()) == ("broker-a", b"hello")


@pytest.mark.parametrize(
    "asked", [question(PGROUP=""), RemotingCommand(39, fields=question().fields)], ids=["no group", "no record"]
)
def test_a_question_that_lacks_something_is_refused(asked):
    with pytest.raises(ProtocolViolation):
        send_requests.check_back_of(asked)


BOUNDS = {"nextBeginOffset": "7", "minOffset": "1", "maxOffset": "9"}


def test_a_pull_brings_records_and_bounds():
    pulled = read_requests.pull("orders", 0, 5, "g").result(
        RemotingCommand(0, fields=BOUNDS, body=stored(b"a") + stored(b"b"))
    )
    assert (pulled.status, pulled.next_offset, pulled.min_offset, pulled.max_offset) == (PullStatus.FOUND, 7, 1, 9)
    assert [record.body for record in pulled.records] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("code", "status"), [(19, PullStatus.NOTHING_NEW), (20, PullStatus.AGAIN), (21, PullStatus.OUT_OF_RANGE)]
)
def test_a_pull_that_finds_nothing_says_where_to_go_on(code, status):
    pulled = read_requests.pull("orders", 0, 5, "g").result(RemotingCommand(code, fields=BOUNDS))
    assert (pulled.status, pulled.next_offset, pulled.records) == (status, 7, [])


def test_a_pull_waits_at_the_broker_only_if_asked_to():
    assert read_requests.pull("orders", 0, 5, "g").fields["sysFlag"] == "4"
    waiting = read_requests.pull("orders", 0, 5, "g", wait=1.5).fields
    assert (waiting["sysFlag"], waiting["suspendTimeoutMillis"]) == ("6", "1500")


def test_a_look_up_leaves_out_what_only_shares_the_hash_of_a_key():
    mine = stored(b"mine", "orders", pairs(UNIQ_KEY="AB", KEYS="k1"), log_offset=2)
    newer = stored(b"newer", "orders", pairs(UNIQ_KEY="AB", KEYS="k2 k1"), log_offset=3)
    foreign = stored(b"foreign", "orders", pairs(UNIQ_KEY="CD", KEYS="k3"), log_offset=1)
    elsewhere = stored(b"elsewhere", "audit", pairs(UNIQ_KEY="AB", KEYS="k1"), log_offset=4)
    answer = RemotingCommand(0, body=newer + foreign + mine + elsewhere)
    request = read_requests.by_unique_key("orders", "AB")
    assert int(request.fields["endTimestamp"]) > 1 << 62  # whatever the time is here: else it would be published again
    assert [each.body for each in request.result(answer)] == [b"mine", b"newer"]
    assert request.result(RemotingCommand(22)) == []
    newest = read_requests.newest_by_unique_key("orders", "AB", 4, body=True).result(answer)
    assert newest.record is not None and newest.record.body == b"newer"
    assert read_requests.newest_by_unique_key("orders", "AB").result(RemotingCommand(22)) == NewestByKey(None, False)


@pytest.mark.parametrize(("count", "may_have_more"), [(1, True), (2, False)])
def test_a_look_up_that_brings_only_others_says_whether_older_ones_may_be_left(count, may_have_more):
    foreign = stored(b"foreign", "orders", pairs(UNIQ_KEY="CD"))
    request = read_requests.newest_by_unique_key("orders", "AB", count)
    assert (request.fields["maxNum"], "_UNIQUE_KEY_QUERY" in request.fields) == (str(count), False)
    assert request.result(RemotingCommand(0, body=foreign)) == NewestByKey(None, may_have_more)


def test_a_heartbeat_names_the_groups():
    membership = Membership(frozenset({"b", "a"}), {"readers": frozenset({"orders"})})
    body = json.loads(groups.heartbeat("me@1", membership).body)
    assert body["clientID"] == "me@1"
    assert body["producerDataSet"] == [{"groupName": "a"}, {"groupName": "b"}]
    (consumer,) = body["consumerDataSet"]
    assert consumer["groupName"] == "readers"
    assert [each["topic"] for each in consumer["subscriptionDataSet"]] == ["orders"]


def test_a_position_that_was_never_said_is_none():
    request = groups.committed_offset("g", "orders", 0)
    assert request.result(RemotingCommand(0, fields={"offset": "5"})) == 5
    assert request.result(RemotingCommand(22)) is None
    with pytest.raises(ErrorResponse):
        request.result(RemotingCommand(26))


@pytest.mark.parametrize(
    ("request_", "words"),
    [(groups.members("g"), "no consumer for this group, g"), (administration.producers("g"), "the group[g] not exist")],
)
def test_the_error_of_a_group_without_members_is_an_empty_list_and_others_are_raised(request_, words):
    assert request_.result(RemotingCommand(1, remark=words)) == []
    with pytest.raises(ErrorResponse):
        request_.result(RemotingCommand(1, remark="disk on fire"))


def test_a_route_lists_queues_by_permission_and_masters_that_do_not_only_act_as_such():
    told = {
        "brokerDatas": [
            {"brokerName": "b", "cluster": "c", "brokerAddrs": {"0": "h:2", "1": "h:3"}},
            {"brokerName": "a", "cluster": "c", "brokerAddrs": {"0": "h:1"}, "enableActingMaster": True},
        ],
        "queueDatas": [
            {"brokerName": "b", "perm": 6, "readQueueNums": 2, "writeQueueNums": 1},
            {"brokerName": "a", "perm": 4, "readQueueNums": 1, "writeQueueNums": 1},
        ],
    }
    found = routes.route("orders").result(RemotingCommand(0, body=json.dumps(told).encode()))
    assert found is not None
    assert found.readable == (Queue("orders", "a", 0), Queue("orders", "b", 0), Queue("orders", "b", 1))
    assert found.writable == (Queue("orders", "b", 0),)
    assert found.masters == {"b": "h:2"}
    assert routes.route("orders").result(RemotingCommand(17)) is None


@pytest.mark.parametrize("count", [-1, 10**9, "many"])
def test_a_route_with_an_unlikely_number_of_queues_is_refused(count):
    data = {"brokerName": "b", "perm": 6, "readQueueNums": count, "writeQueueNums": 1}
    with pytest.raises(ProtocolViolation):
        routes.route("t").result(RemotingCommand(0, body=json.dumps({"queueDatas": [data]}).encode()))


@pytest.mark.parametrize("key", ["0", '"0"'])
def test_the_cluster_is_read_with_and_without_quotes_around_numbers(key):
    told = '{"brokerAddrTable":{"a":{"brokerAddrs":{%s:"127.0.0.1:30911",1:"h:1"},"brokerName":"a"}}}'
    assert routes.masters().result(RemotingCommand(0, body=(told % key).encode())) == {"a": "127.0.0.1:30911"}


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000, b"{", b'{"brokerAddrTable":1}'])
def test_a_body_that_is_not_what_was_asked_for_is_refused(body):
    for request in (routes.masters(), routes.topics(), routes.route("t"), groups.members("g")):
        if body == b'{"brokerAddrTable":1}' and request.code != 106:
            continue
        with pytest.raises(ProtocolViolation):
            request.result(RemotingCommand(0, body=body))


def test_a_topic_is_made_with_its_kind():
    told = administration.create_topic("orders", 4, "TRANSACTION", {"queue.type": "BatchCQ"}).fields
    assert told["attributes"] == "+message.type=TRANSACTION,+queue.type=BatchCQ"
    assert (told["readQueueNums"], told["writeQueueNums"], told["perm"]) == ("4", "4", "6")


def test_settings_are_lines():
    assert administration.broker_settings().result(RemotingCommand(0, body=b"a=1\n\nb=x=y\n")) == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize(
    ("used", "kind"),
    [("0.95", StorageFailed), ("0,97", StorageFailed), ("1.00", StorageFailed), ("0.42", BrokerUnavailable)],
)
def test_a_broker_that_stores_nothing_now_is_asked_again_unless_its_disk_is_full(used, kind):
    text = f"reasons: the broker's disk is full [CL:  {used} CQ:  0.42 INDEX:  0.42], messages are put to the slave"
    assert type(translate(ErrorResponse(ResponseCode.SERVICE_NOT_AVAILABLE, text, "sending"), "sending")) is kind


def test_a_group_that_the_broker_does_not_create_comes_with_the_setting_that_lets_it_do_so():
    missing = ErrorResponse(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "group [g] does not exist", "reading")
    assert "autoCreateSubscriptionGroup=true" in str(translate(missing, "reading"))


def test_the_client_knows_nothing_of_bridges_and_needs_only_python():
    # All modules except `retry`, which raises the bridge's errors.
    folder = Path(remoting.__file__).parent
    foreign = set()
    for path in set(folder.glob("*.py")) - {folder / "retry.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            foreign |= {name for name in names if name.startswith("txnbridge")}
    assert foreign
    assert {name for name in foreign if not name.startswith("txnbridge_rocketmq.client")} == set()
