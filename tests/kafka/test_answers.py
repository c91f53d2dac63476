"""The meaning of a broker's answer for a request: it was carried out, it is repeated, or it is refused.

The answers are made up, each as Kafka's own source gives it.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from threading import Barrier, BrokenBarrierError, Event
from types import SimpleNamespace as Fields
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import ConsumerGroupType, KafkaError, KafkaException, TopicPartition
from txnbridge_kafka import broker as broker_module
from txnbridge_kafka.admin import admin, groups
from txnbridge_kafka.client import request_retry, wire
from txnbridge_kafka.client.connection import AttemptError
from txnbridge_kafka.client.connections import Connections
from txnbridge_kafka.client.librdkafka import GroupMembership, with_exceptions
from txnbridge_kafka.client.messages import offsets_of
from txnbridge_kafka.client.protocol_types import (
    ActiveProducer,
    CommittedOffset,
    TransactionDescription,
    TransactionListing,
)
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.outcome import hanging_transactions, outcome
from txnbridge_kafka.outcome.transaction_state_log import RecordedDecision, StateRecord
from txnbridge_kafka.read import start_positions
from txnbridge_kafka.read.partition import KafkaPartition, SeekRequest
from txnbridge_kafka.read.start_lookup import StartLookup
from txnbridge_kafka.topics import KafkaTopics

from tests.core.decisions_kit import MemoryLog
from tests.failing import answer_calls, fail_call, raising
from tests.in_time import wait_until
from tests.kafka.mock_kit import Coordinator
from tests.kafka.test_settings import read
from txnbridge import BrokerUnavailable, InvalidOption, Outcome
from txnbridge._decisions.decisions import Decisions
from txnbridge.errors import AccessDenied, EvidenceLost, InvalidToken, NotFound, StorageFailed
from txnbridge.spi import Deadline, Decision, Identity, LedgerValue, Partition, Status, Subscription, Token, TokenState

pytestmark = pytest.mark.offline

COORDINATOR = 2  # of each group
LOST = None  # the request was sent, and its answer is lost
UNKNOWN_TOPIC, NOT_LEADER, DENIED, INVALID_PARTITIONS, KAFKA_STORAGE_ERROR = 3, 6, 29, 37, 56
UNKNOWN_TOPIC_ID = 100


def topic(name: str, code: int = 0, leader: int = 1) -> Fields:
    """Return what metadata has of a topic of one partition; of one that may not be seen it has no partitions."""
    led = [] if code else [Fields(partition_index=0, leader_id=leader)]
    return Fields(name=name, error_code=code, partitions=led)


def ends(code: int) -> Fields:
    return Fields(topics=[Fields(name="orders", partitions=[Fields(partition_index=0, error_code=code, offset=0)])])


class Cluster:
    """A broker that answers each request but Metadata with the next of `answers`."""

    def __init__(self, *topics: Fields) -> None:
        self.topics, self.answers = list(topics), list[Any]()
        self.deleted_at = 0  # a node that no longer has the topics
        self.unaware = 0  # how many answers about topics are of a broker that does not know them yet

    def send(self, connections: object, node: int, request: wire.Request) -> Any:
        if request.api is wire.METADATA and self.unaware:
            self.unaware -= 1
            return Fields(brokers=[], topics=[topic(each.name, UNKNOWN_TOPIC) for each in self.topics])
        if request.api is wire.METADATA:
            return Fields(controller_id=1, brokers=[], topics=[] if node == self.deleted_at else self.topics)
        answer = self.answers.pop(0)
        if answer is LOST:
            raise AttemptError("the broker closed the connection")
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(topic("orders"))
    answer_calls(monkeypatch, Connections, "connect")
    answer_calls(monkeypatch, Connections, "group_coordinator", COORDINATOR)
    monkeypatch.setattr(Connections, "send", lambda *asked: cluster.send(*asked))
    return cluster


@pytest.fixture
def requests() -> Iterator[Requests]:
    with closing(Requests(read())) as requests:
        yield requests


def change(code: int) -> Fields:
    result = [Fields(error_code=code, error_message=None)]
    return Fields(responses=result, results=result)


@pytest.mark.parametrize(
    ("ask", "repeated"),
    [
        (lambda requests: requests.delete_topic("orders", "", Deadline(30)), UNKNOWN_TOPIC),
        (lambda requests: requests.delete_topic("orders", "1" * 32, Deadline(30)), UNKNOWN_TOPIC_ID),
        (lambda requests: requests.grow_topic("orders", 3, Deadline(30)), INVALID_PARTITIONS),
    ],
    ids=["delete", "delete by id", "grow"],
)
def test_a_change_of_a_topic_whose_answer_is_lost_is_done_if_the_second_copy_finds_it_done(
    cluster: Cluster, requests: Requests, ask: Callable[[Requests], Any], repeated: int
) -> None:
    cluster.answers = [LOST, change(41), change(repeated), change(repeated), LOST, change(DENIED)]  # 41: it has moved
    assert [ask(requests).code for _ in range(3)] == [0, repeated, DENIED]


def test_a_member_that_its_coordinator_did_not_remove_is_removed_again(cluster: Cluster, requests: Requests) -> None:
    member = GroupMembership("group", 1, "member", None)
    cluster.answers = [Fields(error_code=0, members=[Fields(error_code=code)]) for code in (16, 0, 25, DENIED)]
    requests.leave(member, Deadline(30))
    requests.leave(member, Deadline(30))  # the broker does not know it any more
    with pytest.raises(AccessDenied):
        requests.leave(member, Deadline(30))
    assert not cluster.answers


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python refuses it")
def test_an_error_of_the_client_that_no_clause_catches_becomes_an_exception():
    def broken() -> None:  # as confluent-kafka now and then in a flush, after another owner has opened the id
        fenced: Any = KafkaError(KafkaError._FENCED)
        ctypes.pythonapi.PyErr_SetObject(ctypes.py_object(KafkaError), ctypes.py_object(fenced))

    with pytest.raises(KafkaException, match="_FENCED"):
        with_exceptions(broken)()


def test_offsets_are_asked_for_again_when_a_leaders_disk_has_failed(cluster: Cluster, requests: Requests) -> None:
    cluster.answers = [ends(code) for code in (KAFKA_STORAGE_ERROR, 0)]
    assert requests.ends([("orders", 0)], Deadline(30)) == {("orders", 0): 0}


def test_a_topic_that_one_broker_does_not_know_yet_is_not_missing(cluster: Cluster, requests: Requests) -> None:
    cluster.answers, cluster.unaware = [ends(0)], 3
    assert requests.counts(["orders"], Deadline(30)) == {"orders": 1}
    cluster.unaware = 3
    assert requests.ends([("orders", 0)], Deadline(30)) == {("orders", 0): 0}
    for seconds in (30, 0.5):
        cluster.unaware = 1000
        with pytest.raises(NotFound):
            requests.counts(["orders"], Deadline(seconds))


def test_acknowledgements_in_a_topic_that_is_gone_are_refused_before_the_deadline(cluster, requests, monkeypatch):
    """The coordinator stores the offsets of other topics; the transaction's abort takes them back."""
    answer_calls(monkeypatch, Connections, "coordinator", COORDINATOR)
    member, offsets = GroupMembership("group", 1, "member", None), {("gone", 0): 5, ("orders", 0): 3}
    asked = "id", 1, 1, offsets_of(member, offsets, {}, {})
    refused = Fields(name="gone", partitions=[Fields(partition_index=0, error_code=UNKNOWN_TOPIC)])
    cluster.answers = [Fields(error_code=0), *[Fields(topics=[*ends(0).topics, refused])] * 2, ends(0)]
    cluster.unaware = 1  # each broker learns of a new topic a little later than the first one
    assert requests.acknowledge(*asked, Deadline(30)).code == 0
    cluster.topics.append(topic("gone", UNKNOWN_TOPIC))
    cluster.answers = [Fields(error_code=0), *[Fields(topics=[*ends(0).topics, refused])] * 1000]
    monkeypatch.setattr(request_retry, "_MISSING_SECONDS", 0.05)
    with pytest.raises(NotFound, match="there is no topic 'gone'"):
        requests.acknowledge(*asked, Deadline(5))


@pytest.mark.parametrize("hidden", [topic("secret", DENIED), topic("leaderless", leader=-1)], ids=["denied", "offline"])
def test_a_topic_whose_producers_are_not_told_hides_no_other(cluster: Cluster, requests: Requests, hidden: Fields):
    """A right to one of the topics that a bridge has used may be taken away."""
    cluster.topics.append(hidden)
    partition = Fields(partition_index=0, error_code=0, active_producers=[])
    cluster.answers = [Fields(topics=[Fields(name="orders", partitions=[partition])])]
    partitions = [("orders", 0), (hidden.name, 0)]
    assert requests.producers(partitions, Deadline(1), readable_only=True) == {("orders", 0): []}


def test_brokers_that_do_not_know_a_topic_yet_hide_no_hanging_transaction(cluster, requests, monkeypatch) -> None:
    answer_calls(monkeypatch, hanging_transactions, "recorded_decisions", [])
    producer = {"producer_id": 1, "producer_epoch": 4, "last_timestamp": 0, "coordinator_epoch": 0}
    unknown = Fields(partition_index=0, error_code=UNKNOWN_TOPIC, active_producers=[])
    hanging = Fields(partition_index=0, error_code=0, active_producers=[Fields(**producer, current_txn_start_offset=3)])
    cluster.answers = [Fields(topics=[Fields(name="orders", partitions=[each])]) for each in (unknown, hanging)]
    cluster.unaware = 1
    opened = TransactionDescription("shop.0", "Empty", 1, 6, None, 30_000, ())
    at: Any = Fields(requests=requests, opening=None)
    with pytest.raises(StorageFailed, match="no record has its outcome"):
        hanging_transactions.write_missing_markers_of_owner(at, at, opened, opened, [("orders", 0)], Deadline(30))


@pytest.fixture
def administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_calls(monkeypatch, groups, "ConfluentAdminClient", Administrator())


def test_a_position_in_a_partition_that_is_gone_holds_no_list_of_groups_up(cluster, requests, administrator):
    """A coordinator that is away while a topic is deleted keeps the positions, and the new topic may be smaller."""
    cluster.answers = [ends(0)]
    topics = Fields(all=lambda deadline: {"orders": Fields(partitions={0: None})})
    kafka: Any = Fields(settings=read(), requests=requests, topics=topics)
    (group,) = groups.KafkaGroups(kafka, Deadline(1)).describe(["billing"]).values()
    assert group.positions == {("orders", 0): (0,)}


def test_a_topic_that_is_deleted_meanwhile_hides_no_lag_in_others(requests, administrator, monkeypatch) -> None:
    fail_call(monkeypatch, Requests, "ends", NotFound("there is no topic 'gone'"))
    answer_calls(monkeypatch, Requests, "list_offsets", {("orders", 0): 0})
    told = iter([{"gone": Fields(partitions={0: None})}, {}])
    topics = Fields(all=lambda deadline: {"orders": Fields(partitions={0: None}), **next(told)})
    kafka: Any = Fields(settings=read(), requests=requests, topics=topics)
    assert groups.KafkaGroups(kafka, Deadline(1)).group("billing").lag == {("orders", 0): 0}


def test_a_group_that_this_user_may_not_describe_hides_no_other_one(administrator: None) -> None:
    """A user that may describe the cluster is told the names of all groups."""
    kafka: Any = Fields(settings=read())
    found = groups.KafkaGroups(kafka, Deadline(1))
    assert found.members() == {"billing": 0}
    with pytest.raises(AccessDenied, match="secret"):
        found.group("secret")


class Administrator:
    """A client by which a group has positions in a partition that is gone, and in a topic. Another group is secret."""

    def list_consumer_groups(self, request_timeout: float) -> Future[Any]:
        valid = [Fields(group_id=name, type=ConsumerGroupType.CLASSIC) for name in ("secret", "billing")]
        return told(Fields(valid=valid))

    def describe_consumer_groups(self, names: list[str], request_timeout: float) -> dict[str, Future[Any]]:
        answers = {name: told(Fields(members=[])) for name in names}
        if "secret" in names:
            answers["secret"] = Future()
            answers["secret"].set_exception(KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)))
        return answers

    def list_consumer_group_offsets(self, asked: list[Any], request_timeout: float) -> dict[str, Future[Any]]:
        offsets = [TopicPartition(*partition, 0) for partition in (("orders", 0), ("orders", 7), ("gone", 0))]
        return {each.group_id: told(Fields(topic_partitions=offsets)) for each in asked}


def told(result: object) -> Future[Any]:
    answer = Future[Any]()
    answer.set_result(result)
    return answer


def test_dropping_records_follows_a_leader_that_has_moved(cluster: Cluster, requests: Requests) -> None:
    cluster.answers = [ends(NOT_LEADER), ends(0)]
    KafkaTopics(read(), requests).drop_records(("orders", 0), 5, Deadline(30))
    assert not cluster.answers


def test_a_topic_that_is_missing_is_not_looked_up_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    monkeypatch.setattr(start_positions, "time", Fields(sleep=pauses.append))
    client: Any = Fields(topic_ids=lambda *_: {}, led=lambda *_: set(), begins=lambda *_: {}, ends=lambda *_: {})
    starts = start_positions.KafkaStartPositions(client, Subscription(("orders",), None))
    assert starts.resolve({("orders", 0): SeekRequest()}, Deadline(30)).offsets == {}
    assert pauses


def group_starts(
    requests: Requests, count: int, positions: Sequence[int | None] = (), start: str = "earliest"
) -> start_positions.KafkaGroupStartPositions:
    read, ledger = Subscription(("orders",), "group", start), Decisions(MemoryLog(), timeout=30).ledger
    context: Any = Fields(application="a", ledger=lambda _, id: ledger(id))
    if positions:
        record = {"partitions": len(positions), "positions": list(positions)}
        LedgerValue(ledger("group/group/orders")).update(lambda _: record, Deadline(30))
    counts = {"orders": count}
    return start_positions.KafkaGroupStartPositions(requests, read, context, counts, lambda _: [], Deadline(30))


def test_a_group_has_lost_no_position_in_a_topic_that_is_deleted_meanwhile(cluster, requests, monkeypatch):
    monkeypatch.setattr(requests, "positions", lambda *_, **__: {("orders", 0): None})
    starts, asked = group_starts(requests, 1, [0]), {("orders", 0): SeekRequest()}
    cluster.deleted_at = COORDINATOR  # who has dropped the offsets; another broker still has the topic
    assert starts.resolve(asked, Deadline(30)).offsets == {}
    cluster.deleted_at = 0
    assert isinstance(starts.resolve(asked, Deadline(30)).offsets["orders", 0], start_positions.LostPosition)


def test_a_topic_deleted_while_beginnings_are_recorded_keeps_no_other_one_from_being_read(requests, monkeypatch):
    """A new group has committed its first offsets; the messages are read once their record is written."""
    answer_calls(monkeypatch, Requests, "counts", {"orders": 1})
    gone = NotFound("there is no topic 'gone'")
    fail_call(monkeypatch, Requests, "counts", gone, when=lambda _, of, *__: "gone" in of)
    answer_calls(monkeypatch, Requests, "committed", {("orders", 0): 7})
    starts = group_starts(requests, 1)
    starts.unrecorded = {"gone", "orders"}
    with pytest.raises(NotFound, match="gone"):
        starts.record(["gone", "orders"], Deadline(5))
    assert starts.unrecorded == {"gone"} and not starts.unchecked


def test_a_first_position_whose_member_ended_before_it_was_recorded_is_recorded_by_the_next_one(requests, monkeypatch):
    said = {"positions": {("orders", 0): CommittedOffset(5, "")}, "topic_ids": {"orders": ""}, "counts": {"orders": 1}}
    for name, answer in said.items():
        answer_calls(monkeypatch, Requests, name, answer)
    starts = group_starts(requests, 1)
    starts.unchecked.clear()  # it was checked before the other member committed
    for unchecked in ({"orders"}, set()):
        starts.resolve({("orders", 0): SeekRequest()}, Deadline(30))
        assert starts.unchecked == unchecked
        starts.record(["orders"], Deadline(30))


def test_a_log_that_was_truncated_below_a_groups_position_is_told_until_the_user_seeks(cluster, requests, monkeypatch):
    for name, answer in {
        "positions": {("orders", 0): CommittedOffset(10, "1", 3)},
        "topic_ids": {"orders": "1"},
    }.items():
        answer_calls(monkeypatch, Requests, name, answer)
    starts, cluster.answers = group_starts(requests, 1), [ends(0)] * 3
    for again in (SeekRequest(), SeekRequest(target=10, topic_id="1")):
        (lost,) = starts.resolve({("orders", 0): again}, Deadline(30)).offsets.values()
        assert isinstance(lost, start_positions.LostPosition) and "truncated" in lost.why
    assert starts.resolve({("orders", 0): SeekRequest(target=0)}, Deadline(30)).to_commit == {("orders", 0): 0}


def test_a_partition_that_another_member_knew_first_is_read_from_its_begin(cluster, requests, monkeypatch):
    """The topic has grown between the joins of two members of a new group that begins at the end."""
    monkeypatch.setattr(requests, "positions", lambda *_, **__: {("orders", 1): None})
    monkeypatch.setattr(requests, "ends", lambda asked, _: dict.fromkeys(asked, 9))
    monkeypatch.setattr(requests, "begins", lambda asked, _: dict.fromkeys(asked, 3))
    starts = group_starts(requests, 1, [9, None], "latest")
    cluster.topics[0].partitions.append(Fields(partition_index=1, leader_id=1))
    assert starts.resolve({("orders", 1): SeekRequest()}, Deadline(30)).to_commit == {("orders", 1): 3}


@pytest.mark.parametrize("group", [None, "group"])
def test_a_partition_without_a_leader_delays_no_other_one(cluster, requests, monkeypatch, caplog, group):
    monkeypatch.setattr(start_positions, "_LEADER_SECONDS", 0)
    cluster.topics[0].partitions.append(Fields(partition_index=1, leader_id=-1))
    cluster.answers = [ends(0), ends(0)]
    asked, gone = {("orders", number): SeekRequest() for number in (0, 1)}, ("orders", 2)
    committed = {gone: CommittedOffset(5, None)}
    monkeypatch.setattr(requests, "positions", lambda _, wanted, *__, **___: {p: committed.get(p) for p in wanted})
    starts = start_positions.KafkaStartPositions(requests, Subscription(("orders",), None))
    if group is not None:
        starts = group_starts(requests, 2)
    for _ in range(2):
        found = starts.resolve({**asked, gone: SeekRequest(refused=5)}, Deadline(2))
        assert {**found.offsets, **found.to_commit} == {("orders", 0): 0}
    assert caplog.text.count("orders[1] has no leader") == 1
    cluster.topics = [topic("orders", DENIED)]
    with pytest.raises(AccessDenied):
        starts.resolve(asked, Deadline(2))


@pytest.mark.parametrize("kind", [start_positions.KafkaStartPositions, start_positions.KafkaGroupStartPositions])
def test_a_partition_without_a_leader_keeps_no_other_work_from_being_done(kind):
    starts = Mock(spec=kind, unchecked={"orders"}, unrecorded=set(), left=None)
    starts.resolve.return_value, starts.counts.return_value = start_positions.ResolvedOffsets({}), {}
    assignment = Mock(partitions={("orders", 0): KafkaPartition(("orders", 0), {})}, **{"current.return_value": []})
    lookup: Any = StartLookup(assignment, starts, Mock(), 30)
    other = starts.counts if kind is start_positions.KafkaStartPositions else starts.record
    wait_until(lambda: lookup.advance() or (other.called and starts.resolve.call_count > 1))


def test_a_record_that_is_completed_late_moves_no_partition_back_that_is_read_meanwhile():
    """An earlier attempt to record the other topic has failed."""
    starts, recorded = Mock(spec=start_positions.KafkaGroupStartPositions, unchecked=set(), left=None), Event()
    starts.unrecorded = {"new"}
    starts.resolve.return_value = start_positions.ResolvedOffsets({("orders", 0): 10, ("new", 0): 0})
    starts.record.side_effect = lambda *_: recorded.wait(30) and starts.unrecorded.clear()
    partitions = {each: KafkaPartition(each, {}) for each in starts.resolve.return_value.offsets}
    assignment = Mock(partitions=partitions, **{"current.side_effect": list})
    lookup: Any = StartLookup(assignment, starts, Mock(), 30)
    read, waiting = partitions.values()
    wait_until(lambda: lookup.advance() or read.next == 10)
    read.next = 60  # its messages were handed out, and acknowledged
    recorded.set()
    wait_until(lambda: lookup.advance() or waiting.next == 0)
    assert read.next == 60


class Leftovers:
    """The coordinator and the leader of transactions that hang in a partition, by their ids."""

    def __init__(self, timeout: int = 60_000, refusal: Exception | None = None, foreign: Sequence[str] = ()) -> None:
        self.hanging = {"first": 1, "second": 2}
        self._timeout, self._refusal, self._foreign = timeout, refusal, foreign
        self.state = "CompleteCommit"

    def describe(self, ids: Sequence[str], deadline: Deadline) -> dict[str, TransactionDescription]:
        places = (("orders", 0),)
        pids = {id: self.hanging[id] for id in ids if id in self.hanging}
        return {id: TransactionDescription(id, self.state, pids[id], 0, 5, self._timeout, places) for id in pids}

    def transactions(self, deadline: Deadline, pids: Sequence[int]) -> list[TransactionListing]:
        return [TransactionListing(id, pid, self.state) for id, pid in self.hanging.items()]

    def producers(self, partitions: Sequence[Partition], *_: object, **__: object) -> dict[Partition, Any]:
        return {each: [ActiveProducer(pid, 0, 3, 0, 0) for pid in self.hanging.values()] for each in partitions}

    def fence(self, id: str, timeout_ms: int, deadline: Deadline) -> None:
        if timeout_ms > 900_000:
            raise InvalidOption("INVALID_TRANSACTION_TIMEOUT")
        if id in self._foreign:
            raise AccessDenied("TRANSACTIONAL_ID_AUTHORIZATION_FAILED")

    def write_markers(self, pid: int, *_: object) -> None:
        if pid == 1 and self._refusal is not None:
            raise self._refusal
        self.hanging = {id: each for id, each in self.hanging.items() if each != pid}


def decided(pid: int) -> RecordedDecision:
    return RecordedDecision(pid, 0, True, frozenset([("orders", 0)]))


TWO_PHASE = 2**31 - 1  # the time-out of a producer whose transactions end by no time


@pytest.mark.parametrize(
    ("leftovers", "left"),
    [
        (Leftovers(refusal=BrokerUnavailable("NOT_ENOUGH_REPLICAS")), ["first"]),
        (Leftovers(timeout=TWO_PHASE), []),
        (Leftovers(foreign=["first"]), ["first"]),
    ],
    ids=["too few replicas", "no time-out", "an id of others"],
)
def test_a_hanging_transaction_of_others_keeps_no_other_one_from_its_end(leftovers, left, monkeypatch):
    told = {id: [decided(pid)] for id, pid in leftovers.hanging.items()}
    monkeypatch.setattr(hanging_transactions, "recorded_decisions", lambda _, id, __: told[id])
    cluster: Any = Fields(requests=leftovers, settings=read())
    hanging_transactions.write_missing_markers_of_others(cluster, [("orders", 0)], Deadline(30))
    assert [*leftovers.hanging] == left


@pytest.mark.parametrize("id", [f"shop.{16 * 'a'}.p1", "made-up.made-up.p1"])
def test_a_hanging_transaction_that_was_prepared_is_ended_without_aborting_the_next_one(id, monkeypatch):
    """While the request to fence the id is repeated, the id's owner may prepare its next transaction there."""
    leftovers = Leftovers(foreign=[id])  # it refuses to be fenced
    leftovers.hanging = {id: 1}
    answer_calls(monkeypatch, hanging_transactions, "recorded_decisions", [decided(1)])
    cluster: Any = Fields(requests=leftovers, settings=read())
    assert hanging_transactions.write_missing_markers_of_others(cluster, [("orders", 0)], Deadline(30))
    assert leftovers.hanging == {}


def test_a_monitor_that_may_not_end_anothers_transaction_says_so_once_and_goes_on(monkeypatch, caplog):
    decision = decided(1)
    answer_calls(monkeypatch, hanging_transactions, "recorded_decisions", [decision])
    leftovers = Leftovers(foreign=["first"])
    del leftovers.hanging["second"]
    cluster: Any = Fields(requests=leftovers, settings=read(), watched_partitions={("orders", 0)})
    monitor = hanging_transactions.HangingTransactionMonitor(cluster)
    assert all(monitor.check() for _ in range(3))
    (told,) = caplog.messages
    assert "txnbridge transactions repair first" in told


def test_a_monitor_whose_thread_could_not_be_started_is_started_by_the_next_use(no_threads):
    no_threads(0)
    cluster: Any = Fields(settings=read())
    monitor = hanging_transactions.HangingTransactionMonitor(cluster)
    with pytest.raises(RuntimeError):
        monitor.start()
    before = {*threading.enumerate()}
    for _ in range(2):
        monitor.start()
    assert [thread.name for thread in {*threading.enumerate()} - before] == ["txnbridge-kafka-watch"]
    monitor.close()


def test_an_administrator_aborts_a_transaction_whose_time_out_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch):
    leftovers = Leftovers(timeout=TWO_PHASE)
    leftovers.state = "Ongoing"
    answer_calls(monkeypatch, admin, "status_from_state_log", Status(TokenState.ABORTED))
    cluster: Any = Fields(requests=leftovers, settings=read(), topics=Fields(all=lambda deadline: {}))
    context: Any = None
    assert admin.KafkaAdmin(cluster, context).end("first", Decision.ABORT, Deadline(30)) is Outcome.ABORTED


@pytest.mark.parametrize(("named", "decision"), [("shop/x/1", Decision.ABORT), ("shop.p0", Decision.COMMIT)])
def test_an_id_that_an_unreadable_log_may_have_prepared_is_called_neither_ended_nor_unprepared(named, decision):
    leftovers = Leftovers()
    leftovers.state, leftovers.hanging = "Ongoing", {"shop.p0": 1}
    topics = Fields(all=lambda deadline: {read().log_topic("shop"): None})
    cluster: Any = Fields(requests=leftovers, settings=read(), topics=topics)
    lost = raising(EvidenceLost("the log has lost records"))
    context: Any = Fields(ledger=lambda application, owner: Fields(entries=lost))
    with pytest.raises(EvidenceLost):
        admin.KafkaAdmin(cluster, context).end(named, decision, Deadline(30))


@pytest.mark.parametrize("how", [{"pid": 1 << 63}, {"epoch": 1 << 15}, {"pid": -1}, {"epoch": -1}], ids=str)
def test_a_token_with_numbers_that_kafka_does_not_have_is_damaged(how: dict[str, int]) -> None:
    with pytest.raises(InvalidToken, match="damaged"):
        outcome.read_how({"id": "shop.0", "pid": 1, "epoch": 0, "start": 5, **how})


def test_an_aborted_token_behind_which_a_late_request_began_another_transaction_is_not_committed(monkeypatch) -> None:
    coordinator = Coordinator()
    coordinator.told = TransactionDescription("", "Ongoing", 1, 0, 6, 30_000, ())
    monkeypatch.setattr(outcome, "state_records", lambda *_: [StateRecord(1, 0, 3, frozenset(), 5)])  # it was aborted
    cluster: Any = Fields(requests=coordinator, events=Fields(step=lambda *_, **__: nullcontext({})))
    ledger: Any = Fields(find=lambda *_: [])
    token = Token("kafka", "c", "txn", {"id": "shop.p0", "pid": 1, "epoch": 0, "start": 5}, prepared=True)
    assert outcome.end_prepared(cluster, token, True, ledger, Deadline(30)) is Outcome.ABORTED
    assert coordinator.ended == []


def test_threads_that_prepare_at_once_use_one_pool_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools would use the same ids, so that one's transaction would abort what the other one has prepared."""
    both = Barrier(2)

    class Pool:
        def __init__(self, *_: object) -> None:
            with suppress(BrokenBarrierError):
                both.wait(0.5)

        def take(self, deadline: Deadline) -> Any:
            return self

    topics, monitor = Fields(overview=lambda deadline: Fields(brokers={})), Fields(start=lambda: None)
    answers = {"Requests": Coordinator(), "KafkaTopics": topics, "longest_transaction_ms": 900_000, "preflight": {}}
    for name, answer in {**answers, "HangingTransactionMonitor": monitor}.items():
        answer_calls(monkeypatch, broker_module, name, answer)
    monkeypatch.setattr(broker_module, "PreparedIdPool", Pool)
    context: Any = Fields(application="shop", events=None)
    ledger: Any = None
    broker, identity = broker_module.KafkaBroker(read(), context, Deadline(30)), Identity("shop", True, "shop", "")
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(broker.prepare_writer, identity, ledger, Deadline(30)) for _ in range(2)]
    assert len({id(each.result()) for each in taken}) == 1
