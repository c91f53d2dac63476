"""Tests of Kafka's answers to raw requests, row by row; every request ends by its deadline."""

import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.brokers.plugin import kafka_or_skip
from txnbridge_conformance.observing import take
from txnbridge_kafka.client import request_retry
from txnbridge_kafka.client.protocol_types import END_TXN_CODES, EndTxnResult, TransactionDescription
from txnbridge_kafka.client.requests import Requests

import txnbridge
from tests.brokers.kit import create_topic, port_of, topic_appears
from tests.failing import EACH, fail_call
from tests.in_time import takes
from tests.inside import broker_of
from tests.kafka.kit import LONG, bootstrap_of, plain_producer, stand_still, without_epoch_bumps, write
from tests.kafka.test_admin import settings_of, visible
from tests.keeping import keeping
from txnbridge import errors
from txnbridge.spi import Deadline

pytestmark = pytest.mark.timeout(600)  # the first start of a version fetches it

COMMIT, ABORT = True, False
# So that a transaction can time out within a test; the brokers look twice a second.
SHORT_MS = 1000

_numbers = count(1)


@dataclass
class World:
    """A broker, our requests to it, and a producer to ask about: A in the comments."""

    broker: brokers.Broker
    requests: Requests
    topic: str
    version: int  # of EndTxn: what `end` uses here
    id: str = field(default_factory=lambda: f"requests-{next(_numbers)}")
    producers: list[Producer] = field(default_factory=list)

    def opened(self, id: str | None = None, timeout_ms: int = 60_000) -> Producer:
        """A: a producer whose id is open."""
        self.producers.append(plain_producer(self.broker, id or self.id, timeout_ms))
        return self.producers[-1]

    def begun(self, timeout_ms: int = 60_000) -> tuple[int, int]:
        """A writes one message in a transaction and does nothing more: its pid and epoch."""
        write(self.opened(timeout_ms=timeout_ms), self.topic, self.id.encode())
        return self.who()

    def described(self) -> TransactionDescription:
        return self.requests.describe([self.id], Deadline(LONG))[self.id]

    def who(self) -> tuple[int, int]:
        told = self.described()
        return told.pid, told.epoch

    def timed_out(self) -> tuple[int, int]:
        """A's transaction was ended by the broker: A's pid and epoch before that."""
        who = self.begun(timeout_ms=SHORT_MS)
        assert wait_until(lambda: self.described().state == "CompleteAbort", LONG)
        return who

    def end(self, who: tuple[int, int], commit: bool) -> EndTxnResult:
        return self.requests.end(self.id, *who, commit, Deadline(LONG), bump_epoch=True)

    def completed(self) -> TransactionDescription:
        """Return the coordinator's description once the markers are written: a kill before that may lose them."""
        assert wait_until(lambda: self.described().state.startswith("Complete"), LONG)
        return self.described()

    def visible(self) -> list[bytes]:
        """The messages of this world's producer that readers of committed messages see, up to the end."""
        return [value for value in visible(self.broker, self.topic) if value == self.id.encode()]


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    def make(broker: brokers.Broker, version: int | None = None) -> World:
        ours = Requests(settings_of(broker))
        topic = f"requests-topic-{next(_numbers)}"
        # A broker that was killed or paused by the test before may be out of the controller's count for a moment.
        assert wait_until(lambda: create_topic(port_of(broker), topic) == 0, LONG)
        assert topic_appears(port_of(broker), topic)
        newest = 5 if ours.transaction_version(Deadline(LONG)) >= 2 else 4
        return World(broker, ours, topic, version or newest)

    yield from keeping(make, lambda world: world.requests.close())


@pytest.fixture
def world(kafka_broker: brokers.Broker, make_world: Callable[..., World]) -> World:
    return make_world(kafka_broker)


@pytest.fixture
def older_end(monkeypatch) -> None:
    """A coordinator that has not finalised what EndTxn 5 needs."""
    without_epoch_bumps(monkeypatch)


# A situation is brought about, and says who asks: the table says what each decision is answered by EndTxn 4 and 5.
Situation = Callable[[World], tuple[int, int]]


def ended_one(world: World, commit: bool) -> tuple[int, int]:
    who = world.begun()
    assert world.end(who, commit).code == 0
    return who


def ended_by_its_producer(world: World, commit: bool) -> tuple[int, int]:
    """End by the oldest request, which is the one that librdkafka knows: the epoch stays."""
    who = world.begun()
    (world.producers[-1].commit_transaction if commit else world.producers[-1].abort_transaction)(LONG)
    assert world.completed().epoch == who[1]
    return who


def committed_and_opened_again(world: World) -> tuple[int, int]:
    who = ended_one(world, COMMIT)
    world.completed()
    world.opened()
    return who


def lower_epoch(world: World) -> tuple[int, int]:
    world.opened()
    world.producers.clear()
    pid, epoch = world.begun()
    assert epoch > 0
    return pid, epoch - 1


def committed_and_asked_with_the_epoch_since(world: World) -> tuple[int, int]:
    pid, epoch = ended_one(world, COMMIT)
    assert world.completed().epoch == epoch + 1
    return pid, epoch + 1


def later(who: tuple[int, int], pids: int = 0, epochs: int = 0) -> tuple[int, int]:
    return who[0] + pids, who[1] + epochs


SITUATIONS: dict[str, Situation] = {
    "open_one": World.begun,
    "committed_one": lambda world: ended_one(world, COMMIT),
    "aborted_one": lambda world: ended_one(world, ABORT),
    "committed_by_its_producer": lambda world: ended_by_its_producer(world, COMMIT),
    "aborted_by_its_producer": lambda world: ended_by_its_producer(world, ABORT),
    "timed_out": World.timed_out,
    "timed_out_and_asked_with_the_epoch_since": lambda world: later(world.timed_out(), epochs=1),
    "opened_again_while_open": lambda world: (world.begun(), world.opened())[0],
    "committed_and_opened_again": committed_and_opened_again,
    "committed_by_the_old_way_and_asked_with_the_next_epoch": (
        lambda world: later(committed_and_opened_again(world), epochs=1)
    ),
    "empty": lambda world: (world.opened(), world.who())[1],
    "another_pid": lambda world: later(world.begun(), pids=100_000),
    "unknown_id": lambda world: (1, 0),
    "lower_epoch": lower_epoch,
    "higher_epoch": lambda world: later(world.begun(), epochs=1),
    "committed_and_asked_with_the_epoch_since": committed_and_asked_with_the_epoch_since,
    "committed_and_asked_with_a_higher_epoch": (
        lambda world: (ended_one(world, COMMIT)[0], world.completed().epoch + 1)
    ),
}


# The answers to a commit and to an abort, by the version of EndTxn.
TABLE: dict[str, dict[int, tuple[int | None, int | None]]] = {
    "open_one": {4: (0, 0), 5: (0, 0)},
    "committed_one": {4: (0, 48), 5: (0, 48)},
    "aborted_one": {4: (48, 0), 5: (48, 0)},
    # The newer request takes what is complete under its own epoch for the past: a commit has nothing to commit, and an
    # abort is an end of nothing. So it tells nobody how such a transaction ended.
    "committed_by_its_producer": {4: (0, 48), 5: (48, 0)},
    "aborted_by_its_producer": {4: (48, 0), 5: (48, 0)},
    "timed_out": {4: (90, 90), 5: (48, 0)},
    "timed_out_and_asked_with_the_epoch_since": {4: (48, None), 5: (48, None)},
    "opened_again_while_open": {4: (90, 90), 5: (90, 90)},
    "committed_and_opened_again": {4: (90, None), 5: (90, None)},
    "committed_by_the_old_way_and_asked_with_the_next_epoch": {4: (48, None)},
    "empty": {4: (48, 48), 5: (48, 0)},
    "another_pid": {4: (49, None), 5: (49, None)},
    "unknown_id": {4: (49, 49), 5: (49, 49)},
    "lower_epoch": {4: (90, None), 5: (90, None)},
    "higher_epoch": {4: (90, None), 5: (90, None)},
    "committed_and_asked_with_the_epoch_since": {5: (48, None)},
    "committed_and_asked_with_a_higher_epoch": {4: (90, None), 5: (90, None)},
}
# What the older cluster and the older version show of it in an ordinary run.
SHORT = {"open_one", "empty", "unknown_id", "committed_by_its_producer", "timed_out"}


def rows(version: int) -> list[Any]:
    return [
        pytest.param(
            SITUATIONS[name],
            commit,
            code,
            id=f"{name}-{'commit' if commit else 'abort'}",
            marks=[] if version == 5 or name in SHORT else pytest.mark.full,
        )
        for name, answers in TABLE.items()
        for commit, code in zip((COMMIT, ABORT), answers.get(version, ()), strict=False)
        if code is not None
    ]


def check_row(world: World, situation: Situation, commit: bool, code: int) -> None:
    pid, epoch = situation(world)
    ended = world.end((pid, epoch), commit)
    assert ended.code == code, END_TXN_CODES[ended.code]
    if code != 0 or world.version < 5:
        assert ended == EndTxnResult(code, pid, epoch)
    else:
        assert (ended.pid, ended.epoch) == world.who()
        assert ended.epoch > epoch


@pytest.mark.parametrize(("situation", "commit", "code"), rows(5))
def test_the_coordinator_answers_end_txn_5_as_the_table_says(world, situation, commit, code):
    assert world.version == 5
    check_row(world, situation, commit, code)


@pytest.mark.parametrize(("situation", "commit", "code"), rows(4))
def test_a_coordinator_answers_end_txn_4_as_the_table(kafka_broker, make_world, older_end, situation, commit, code):
    check_row(make_world(kafka_broker, version=4), situation, commit, code)


@pytest.fixture(scope="module")
def older_kafka() -> Iterator[brokers.Broker]:
    with kafka_or_skip(version="3.9.2") as broker:
        yield broker


@pytest.fixture(scope="module")
def older_transactions() -> Iterator[brokers.Broker]:
    with kafka_or_skip(container=False, transaction_version=1) as broker:
        yield broker


@pytest.mark.parametrize("older", ["older_kafka", "older_transactions"])
@pytest.mark.parametrize(("situation", "commit", "code"), rows(4))
def test_an_older_cluster_answers_end_txn_as_the_table_says(request, older, make_world, situation, commit, code):
    world = make_world(request.getfixturevalue(older))
    assert world.version == 4
    check_row(world, situation, commit, code)


def test_an_older_end_after_the_newer_one_is_fenced(world, monkeypatch):
    who = ended_one(world, COMMIT)
    without_epoch_bumps(monkeypatch)
    assert world.end(who, COMMIT) == EndTxnResult(90, *who)


def test_an_abort_that_need_not_shut_the_producer_out_never_denies_what_that_has_committed(world):
    who = ended_by_its_producer(world, COMMIT)
    before = world.completed()
    assert world.requests.end(world.id, *who, ABORT, Deadline(LONG)) == EndTxnResult(48, *who)
    assert world.described() == before
    world.producers.clear()
    pid, epoch = world.begun()
    assert world.requests.end(world.id, pid, epoch, COMMIT, Deadline(LONG)) == EndTxnResult(0, pid, epoch + 1)
    assert world.requests.end(world.id, pid, epoch, ABORT, Deadline(LONG)).code == 90
    assert world.completed().state == "CompleteCommit"


def check_states(world: World) -> None:
    """Every row of what a transaction's coordinator says, from before the first opening on."""
    assert world.requests.describe([world.id, "nobody's"], Deadline(LONG)) == {}
    producer = world.opened()
    new = world.described()
    assert (new.state, new.start, new.partitions, new.timeout) == ("Empty", None, (), 60_000)
    write(producer, world.topic, world.id.encode())
    mine = world.described()
    assert (mine.state, mine.pid, mine.epoch) == ("Ongoing", new.pid, new.epoch)
    assert mine.partitions == ((world.topic, 0),)
    assert mine.start is not None and abs(mine.start - time.time() * 1000) < 60_000
    check_ended(world, mine, COMMIT)

    world.producers.clear()
    world.begun()
    check_ended(world, world.described(), ABORT)

    world.producers.clear()
    world.timed_out()
    late = world.described()
    world.producers.clear()
    world.opened()
    again = world.described()
    assert (again.state, again.epoch) == ("Empty", late.epoch + 1)


def check_ended(world: World, mine: TransactionDescription, commit: bool) -> None:
    """The start stays as evidence, the epoch depends on the version."""
    assert world.end((mine.pid, mine.epoch), commit).code == 0
    at_once = world.described()
    assert at_once.state in (("PrepareCommit", "CompleteCommit") if commit else ("PrepareAbort", "CompleteAbort"))
    ended = world.completed()
    assert ended.state == ("CompleteCommit" if commit else "CompleteAbort")
    assert (ended.start, ended.pid) == (mine.start, mine.pid)
    assert ended.epoch == mine.epoch + (world.version == 5)


def test_after_a_time_out_the_start_is_still_told(world):
    world.begun(timeout_ms=SHORT_MS)
    before = world.described()
    assert wait_until(lambda: world.described().state == "CompleteAbort", LONG)
    after = world.described()
    assert (after.pid, after.epoch, after.start) == (before.pid, before.epoch + 1, before.start)


def test_opening_an_id_again_destroys_the_evidence(world):
    ended_one(world, COMMIT)
    world.completed()
    world.opened()
    assert (world.described().state, world.described().start) == ("Empty", None)


@pytest.mark.full
def test_kafka_3_9_describes_an_id_from_birth_to_time_out(older_kafka, make_world):
    world = make_world(older_kafka)
    check_states(world)
    # It keeps the start of what was before: the state has to be looked at first.
    ended_one(world, COMMIT)
    start = world.completed().start
    world.opened()
    assert (world.described().state, world.described().start) == ("Empty", start)


@pytest.mark.parametrize("broker", ["kafka_broker", pytest.param("older_transactions", marks=pytest.mark.full)])
def test_the_coordinator_describes_an_id_from_birth_to_time_out(request, broker, make_world):
    check_states(make_world(request.getfixturevalue(broker)))


def test_many_ids_are_described_at_once(world):
    ids = [f"{world.id}-{number}" for number in range(300)]
    for id in ids[::2]:
        world.requests.fence(id, 60_000, Deadline(LONG))
    found = world.requests.describe([*ids, *ids], Deadline(LONG))
    assert list(found) == ids[::2]
    assert all(found[id].id == id for id in found)
    assert world.requests.describe([], Deadline(0)) == {}


def test_open_transactions_are_listed_and_filtered_by_state(world):
    open_id = world.id
    world.begun()
    world.id += "-empty"
    world.opened()
    everything = {each.id: each.state for each in world.requests.transactions(Deadline(LONG))}
    assert (everything[open_id], everything[world.id]) == ("Ongoing", "Empty")
    ongoing = {each.id for each in world.requests.transactions(Deadline(LONG), ["Ongoing"])}
    assert open_id in ongoing and world.id not in ongoing


def test_a_leader_tells_of_the_producers_of_its_partition(world):
    pid, epoch = world.begun()
    asked = [(world.topic, 0), (world.topic, 1), ("there-is-none", 0)]
    (found,) = world.requests.producers(asked, Deadline(LONG)).items()
    assert found[0] == (world.topic, 0)
    (producer,) = found[1]
    assert (producer.pid, producer.epoch, producer.start_offset) == (pid, epoch, 0)
    assert abs(producer.last_timestamp - time.time() * 1000) < 60_000
    world.end((pid, epoch), COMMIT)
    world.completed()
    (producer,) = world.requests.producers([(world.topic, 0)], Deadline(LONG))[world.topic, 0]
    assert producer.start_offset is None
    assert world.requests.producers([], Deadline(0)) == {}


def test_a_group_is_added_to_an_empty_transaction_which_makes_it_open(world):
    producer = world.opened()
    who = world.who()
    world.requests.add_offsets(world.id, *who, "some-group", Deadline(LONG))
    told = world.described()
    assert told.state == "Ongoing" and told.start is not None
    assert [topic for topic, _ in told.partitions] == ["__consumer_offsets"]
    assert world.end(who, ABORT).code == 0
    with pytest.raises(errors.Fenced):
        world.requests.add_offsets(world.id, who[0], who[1] + 7, "some-group", Deadline(LONG))
    del producer


def test_a_time_out_above_the_brokers_limit_is_refused_with_its_name(world):
    with pytest.raises(errors.InvalidOption, match=r"transaction\.max\.timeout\.ms"):
        world.requests.fence(world.id, 900_001, Deadline(LONG))


def test_a_marker_ends_a_transaction_in_its_partition(world):
    world.opened()
    world.producers.clear()
    pid, epoch = world.begun()
    world.requests.write_markers(pid, epoch, COMMIT, [(world.topic, 0)], Deadline(LONG))
    assert world.visible() == [world.id.encode()]
    with pytest.raises(errors.Fenced):
        world.requests.write_markers(pid, epoch - 1, COMMIT, [(world.topic, 0)], Deadline(LONG))


def test_a_cluster_tells_its_id_and_what_it_has_finalised(world, older_transactions, older_kafka, make_world):
    assert len(world.requests.cluster_id(Deadline(LONG))) == 22
    assert world.requests.transaction_version(Deadline(LONG)) == 2
    for older, version in ((older_transactions, 1), (older_kafka, 0)):
        assert make_world(older).requests.transaction_version(Deadline(LONG)) == version


ALL: dict[str, Callable[[Requests, Deadline], object]] = {
    "describe": lambda ours, deadline: ours.describe(["x"], deadline),
    "end": lambda ours, deadline: ours.end("x", 1, 0, COMMIT, deadline),
    "fence": lambda ours, deadline: ours.fence("x", 60_000, deadline),
    "add_offsets": lambda ours, deadline: ours.add_offsets("x", 1, 0, "g", deadline),
    "transactions": lambda ours, deadline: ours.transactions(deadline),
    "producers": lambda ours, deadline: ours.producers([("x", 0)], deadline),
    "write_markers": lambda ours, deadline: ours.write_markers(1, 0, COMMIT, [("x", 0)], deadline),
    "transaction_version": lambda ours, deadline: ours.transaction_version(deadline),
    "cluster_id": lambda ours, deadline: ours.cluster_id(deadline),
}


def check_in_time(call: Callable[[Requests, Deadline], object], ours: Requests, seconds: float) -> None:
    told = takes(seconds, errors.DeadlineExceeded, lambda deadline: call(ours, deadline))
    assert f"deadline of {seconds:g} s" in str(told)


@pytest.fixture
def paused(kafka_broker) -> Iterator[Callable[[], None]]:
    yield partial(stand_still, kafka_broker)
    kafka_broker.resume()


@pytest.mark.parametrize("call", ALL.values(), ids=ALL)
def test_with_a_broker_that_stands_still_every_call_ends_by_its_deadline(world, paused, call):
    known = world.requests
    known.cluster_id(Deadline(LONG))
    paused()
    check_in_time(call, known, 0.5)  # on a connection that is open
    with_new = Requests(settings_of(world.broker))
    check_in_time(call, with_new, 0.5)  # on one that is accepted and never answered
    with_new.close()


@pytest.mark.parametrize("call", ALL.values(), ids=ALL)
def test_without_a_broker_every_call_ends_by_its_deadline_and_asks_nothing_behind_it(call):
    with closing(Requests(settings_of("127.0.0.1:1"))) as ours:
        check_in_time(call, ours, 0.3)
        with pytest.raises(errors.DeadlineExceeded, match="no time was left"):
            call(ours, Deadline(0))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "no..host"])
def test_a_bridge_to_an_address_where_nothing_listens_says_so_in_one_line_without_waiting(host):
    with pytest.raises(errors.BrokerUnavailable, match=f"nothing listens at {host}:1 .* correct the URL") as refused:
        txnbridge.connect(f"kafka://{host}:1", timeout=600)
    assert "\n" not in str(refused.value)
    shown = "".join(traceback.format_exception(refused.value))
    assert shown.count("Traceback") == 1  # and none of the client's


def test_a_server_that_refuses_does_not_keep_the_next_one_from_being_asked(kafka_broker):
    with txnbridge.connect(f"kafka://127.0.0.1:1,{kafka_broker.url[8:]}") as bridge:
        assert bridge.cluster


@pytest.mark.parametrize("killed", [False, True])
def test_a_broker_that_stands_still_or_is_away_for_a_moment_is_waited_for(world, kafka_broker, killed):
    who = world.begun()
    kafka_broker.kill() if killed else stand_still(kafka_broker)
    returning = threading.Timer(0.5, kafka_broker.start if killed else kafka_broker.resume)
    returning.start()
    try:
        assert world.end(who, ABORT if killed else COMMIT).code == 0
    finally:
        returning.join()


def test_an_end_that_was_never_asked_for_is_not_called_unknown(world, kafka_broker, paused):
    who = world.begun()
    paused()
    with pytest.raises(errors.DeadlineExceeded):
        world.requests.end(world.id, *who, COMMIT, Deadline(0.5))
    kafka_broker.resume()
    assert world.described().state == "Ongoing"


@pytest.fixture
def through(kafka_broker) -> Iterator[tuple[faults.Proxy, Requests]]:
    with faults.proxy(kafka_broker) as proxy:
        ours = Requests(settings_of(proxy))
        yield proxy, ours
        ours.close()


def test_an_end_that_was_asked_for_and_not_answered_is_unknown(world, through):
    proxy, ours = through
    who = world.begun()
    hold = proxy.hold(requests="EndTxn")
    with pytest.raises(errors.OutcomeUnknown) as told:
        ours.end(world.id, *who, COMMIT, Deadline(1))
    assert isinstance(told.value.__cause__, errors.DeadlineExceeded)
    hold.wait()
    assert world.described().state == "Ongoing"
    hold.release()
    assert wait_until(lambda: world.described().state == "CompleteCommit", LONG)


def test_an_end_whose_answer_is_lost_is_asked_for_again(world, through):
    proxy, ours = through
    who = world.begun()
    hold = proxy.hold(answers="EndTxn", count=1)
    ending = threading.Thread(target=lambda: ended.append(ours.end(world.id, *who, COMMIT, Deadline(LONG))))
    ended: list[EndTxnResult] = []
    ending.start()
    hold.answered()
    proxy.cut()
    ending.join()
    assert [each.code for each in ended] == [0]
    assert world.completed().state == "CompleteCommit"


def test_a_connection_that_was_cut_while_nobody_used_it_is_replaced(world, through):
    proxy, ours = through
    who = world.begun()
    for _ in range(3):
        ours.describe([world.id], Deadline(LONG))
        proxy.cut()
    with pytest.raises(errors.DeadlineExceeded):  # not unknown: nothing was sent into a connection known to be dead
        proxy.close()
        ours.end(world.id, *who, COMMIT, Deadline(0.5))
    assert world.described().state == "Ongoing"


def test_a_half_open_connection_costs_no_more_than_the_deadline(world, through):
    proxy, ours = through
    ours.cluster_id(Deadline(LONG))
    proxy.half_open()
    hold = proxy.hold(requests="DescribeTransactions", count=None)
    check_in_time(ALL["describe"], ours, 0.5)
    hold.drop()
    check_in_time(lambda ours, deadline: check_silence(ours, proxy, deadline), ours, 0.5)


def check_silence(ours: Requests, proxy: faults.Proxy, deadline: Deadline) -> None:
    proxy.hold(answers="FindCoordinator", count=None)
    ours.describe(["x"], deadline)


def test_a_transaction_outlives_the_broker_and_is_ended_after_it(world, kafka_broker):
    who = world.begun()
    before = world.described()
    kafka_broker.restart()
    assert world.described() == before
    assert world.end(who, COMMIT).code == 0
    world.completed()
    kafka_broker.restart()
    assert world.end(who, COMMIT).code == 0
    assert world.end(who, ABORT).code == 48
    assert world.visible() == [world.id.encode()]


def test_many_threads_share_the_runner_of_requests(world):
    ids = [f"{world.id}-{number}" for number in range(12)]
    found: list[tuple[int, int]] = []

    def work(id: str) -> None:
        who = world.requests.fence(id, 60_000, Deadline(LONG))
        world.requests.add_offsets(id, *who, "some-group", Deadline(LONG))
        assert world.requests.end(id, *who, ABORT, Deadline(LONG)).code == 0
        found.append(who)

    with ThreadPoolExecutor(len(ids)) as pool:
        list(pool.map(work, ids))
    assert len({pid for pid, _ in found}) == 12
    assert len(world.requests._runner._idle) <= request_retry._MOST_IDLE


def test_closed_requests_refuse_a_call(world):
    world.requests.cluster_id(Deadline(LONG))
    world.requests.close()
    world.requests.close()
    with pytest.raises(errors.InvalidState, match="closed"):
        world.requests.cluster_id(Deadline(LONG))


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[brokers.Broker]:
    with kafka_or_skip(nodes=3) as broker:
        yield broker


@pytest.fixture
def cluster(three_nodes, make_world) -> Iterator[World]:
    yield make_world(three_nodes)
    for node in three_nodes.nodes:
        three_nodes.resume(node)
    three_nodes.start()


def coordinator_of(world: World) -> int:
    """The number of the node that coordinates a world's id."""

    runner = request_retry.RequestRunner(settings_of(world.broker))
    return runner.repeat(Deadline(LONG), "asking", lambda connections: connections.coordinator(world.id))


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_when_the_coordinator_dies_or_stands_still_another_node_ends_the_transaction(cluster, fault):
    who = cluster.begun()
    getattr(cluster.broker, fault)(coordinator_of(cluster))
    assert cluster.end(who, COMMIT).code == 0
    assert cluster.completed().state == "CompleteCommit"


@pytest.mark.full
def test_a_node_that_stands_still_does_not_hold_up_the_others(cluster):
    ids = [f"{cluster.id}-{number}" for number in range(9)]
    for id in ids:
        cluster.requests.fence(id, 60_000, Deadline(LONG))
    coordinator = coordinator_of(cluster)
    idle = next(node for node in cluster.broker.nodes if node != coordinator)
    cluster.broker.pause(idle)
    # Whatever node is asked first: a stranger finds one that answers, also in little time.
    servers = bootstrap_of(cluster.broker).split(",")
    for first in range(len(servers)):
        stranger = Requests(settings_of(",".join(servers[first:] + servers[:first])))
        assert stranger.describe([cluster.id], Deadline(3)) == {}
        stranger.close()


@pytest.mark.full
def test_the_answers_of_three_nodes_are_put_together(cluster):
    who = cluster.begun()
    assert cluster.id in {each.id for each in cluster.requests.transactions(Deadline(LONG), ["Ongoing"])}
    ((producer,),) = cluster.requests.producers([(cluster.topic, 0)], Deadline(LONG)).values()
    assert (producer.pid, producer.epoch) == who
    cluster.requests.write_markers(*who, COMMIT, [(cluster.topic, 0)], Deadline(LONG))
    assert cluster.visible() == [cluster.id.encode()]


def test_no_kafka_is_started_for_a_demo_that_lacks_its_client():
    program = """
import sys
sys.modules["confluent_kafka"] = None
import txnbridge_conformance._commands as commands
def start(name):
    raise AssertionError("started in vain")
commands._started = start
from txnbridge.cli import main
main(["demo", "kafka"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"txnbridge: [\w-]+ is not installed: .* pip install -e '\.\[kafka\]'\n", done.stderr)


def test_the_clients_own_administrator_is_asked_for_names_alone_while_messages_flow(kafka_broker, monkeypatch):
    """The administrator's other requests have ended the process when a broker died meanwhile."""

    names = {name for name, value in vars(AdminClient).items() if callable(value) and not name.startswith("_")}
    assert {"create_topics", "describe_configs", "delete_records"} <= names
    for name in names - {"list_topics"}:
        fail_call(monkeypatch, AdminClient, name, AssertionError("asked"), EACH)
    topic = f"flow-{next(_numbers)}"
    with txnbridge.connect(kafka_broker.url, transactional_id=topic, writers=1, create_topics=2) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send(topic, b"1")
        bridge.commit(str(txn.token))
        with bridge.consumer(topic, topic) as consumer, bridge.transaction() as txn:
            txn.ack(take(consumer, 1))
        with closing(broker_of(bridge).decision_log(f"_txnbridge-{topic}", Deadline(LONG))) as log:
            log.trim(log.append(b"old", Deadline(LONG)), Deadline(LONG))
        bridge.admin.grow_topic(topic, 3)
        assert {each.name: each.partitions for each in bridge.admin.topics()}[topic] == 3
        bridge.admin.delete_topic(topic)
