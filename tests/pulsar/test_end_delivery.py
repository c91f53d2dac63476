"""Tests of transactions that a coordinator says have ended, but not on a topic that was moved: we end them there."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import pulsar_or_skip
from txnbridge_conformance.observing import eventually, seen, send, take, values
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.open_transactions import list_open
from txnbridge_pulsar.admin.rest import path_of
from txnbridge_pulsar.client import Transactions, TxnId
from txnbridge_pulsar.outcome import anchors, end_delivery
from txnbridge_pulsar.outcome.anchors import Anchors
from txnbridge_pulsar.outcome.end_delivery import NO_PARTICIPANTS, EndDelivery, Participants
from txnbridge_pulsar.outcome.outcome import EndResult, TokenEvidence
from txnbridge_pulsar.write import owner as owner_module

from tests.failing import EACH, answer_calls, fail_call
from tests.pulsar import writing_kit
from tests.pulsar.client_kit import admin
from tests.pulsar.kit import SOON
from txnbridge import Bridge, Consumer, Outcome, TokenState, errors
from txnbridge.errors import InvalidToken
from txnbridge.spi import Deadline

# A message of another owner.
BESIDE = b"beside"

# Of so many commits while a topic is unloaded the coordinator forgets a third.
COMMITS = 12


# Of the broker itself: it has stood still for good after these were unloaded under open transactions.
ITS_OWN = ("__transaction_buffer_snapshot", "__change_events")


@pytest.fixture(scope="module")
def pulsar_broker() -> Iterator[brokers.Pulsar]:
    """A broker that no other tests use, because unloading concerns all topics on it."""
    with pulsar_or_skip() as broker:
        yield broker


@pytest.fixture
def bridge(open_bridge: writing_kit.Connect) -> Bridge:
    return open_bridge()


@pytest.fixture
def unload(pulsar_broker: brokers.Pulsar, bridge: Bridge) -> Callable[[str], None]:
    """Have the broker let go of a topic, and of all in its bundle. It loads them again for the next who asks."""
    path = "namespaces/public/default"
    return lambda topic: admin(pulsar_broker, "PUT", f"{path}/{bundle_of(bridge, writing_kit.concrete(topic))}/unload")


def bundle_of(bridge: Bridge, full: str) -> str:
    path = f"/lookup/v2/topic/persistent/{path_of(full)}/bundle"
    _, answer = writing_kit.cluster_of(bridge).rest.exchange("GET", path, Deadline(SOON))
    return answer.decode().strip('"')


def movable(bridge: Bridge, *away_from: str) -> str:
    """A topic that is not let go of together with these, nor with the broker's own."""
    taken = {bundle_of(bridge, f"persistent://public/default/{name}") for name in ITS_OWN}
    taken |= {bundle_of(bridge, writing_kit.concrete(topic, 0)) for topic in away_from}
    while bundle_of(bridge, writing_kit.concrete(topic := writing_kit.unique("moved"), 0)) in taken:
        pass
    writing_kit.cluster_of(bridge).topics.create(topic, 1, Deadline(SOON))
    return topic


@contextmanager
def forgetting(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Inside, coordinators say that a transaction has ended and tell no topic."""
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "end", lambda *_: meanwhile())
        yield


def test_a_topic_unloaded_during_a_commit_is_told_of_the_commit(bridge, unload, monkeypatch):
    inputs, results = movable(bridge), movable(bridge)
    send(bridge, inputs, b"1", b"2")
    with bridge.consumer(inputs, group="workers") as consumer:
        messages = take(consumer, 2)
        with bridge.transaction() as txn:
            txn.send(results, b"result")
            txn.ack(messages)
            writing_kit.flush(txn)
            with forgetting(monkeypatch, lambda: [unload(each) for each in (inputs, results)]):
                txn.commit()
        assert values(seen(bridge, results)) == [b"result"]
    send(bridge, inputs, b"3")
    with bridge.consumer(inputs, group="workers") as consumer:
        assert values(take(consumer, 1)) == [b"3"]


def test_a_topic_unloaded_a_moment_after_a_commit_is_told_of_it_too(bridge, unload, monkeypatch):
    topic = movable(bridge)
    with forgetting(monkeypatch), bridge.transaction() as txn:
        txn.send(topic, b"1")
    unload(topic)
    assert values(seen(bridge, topic)) == [b"1"]


def test_a_bridge_closed_right_after_a_commit_first_tells_it_to_a_topic_that_is_unloaded(
    open_bridge, bridge, unload, monkeypatch, with_timing
):
    topic = movable(bridge)
    with with_timing(unload_notice_seconds=3.0):  # a broker unloads within milliseconds, if it is not busy
        hasty = open_bridge()
    with hasty as short:
        with forgetting(monkeypatch), short.transaction() as txn:
            txn.send(topic, b"1")
        unloading = threading.Thread(target=unload, args=(topic,))
        unloading.start()
    unloading.join()
    assert values(seen(bridge, topic)) == [b"1"]


def test_an_abort_is_told_as_well(bridge: Bridge, unload: Callable[[str], None], monkeypatch: pytest.MonkeyPatch):
    topic = movable(bridge)
    send(bridge, topic, b"0")
    with forgetting(monkeypatch, lambda: unload(topic)), pytest.raises(KeyError), bridge.transaction() as txn:
        txn.send(topic, b"1")
        writing_kit.flush(txn)
        raise KeyError
    assert values(seen(bridge, topic)) == [b"0"]


def test_no_end_is_sent_and_no_thread_stays_where_no_topic_moves(bridge: Bridge, monkeypatch: pytest.MonkeyPatch):
    told = answer_calls(monkeypatch, Transactions, "end_on_partition")
    topic = movable(bridge)
    for _ in range(3):
        send(bridge, topic, b"1")
    end_delivery = writing_kit.owner_of(bridge).end_delivery
    eventually(lambda: end_delivery._thread is None, "the last is old enough")
    assert not end_delivery._recent and not told
    send(bridge, topic, b"2")
    assert end_delivery._thread is not None
    bridge.close()
    assert not told


def test_a_commit_by_token_of_another_bridge_is_told_to_every_topic_and_group(open_bridge, bridge, monkeypatch):
    inputs, results = writing_kit.new_topic(bridge), writing_kit.new_topic(bridge, partitions=3)
    send(bridge, inputs, b"1")
    with bridge.consumer(inputs, group="workers") as consumer:
        messages = take(consumer, 1)
        with bridge.transaction(prepare=True) as txn:
            for number in range(3):
                txn.send(results, b"%d" % number, partition=number)
            txn.ack(messages)
    with forgetting(monkeypatch):
        assert open_bridge().commit(str(txn.token)) is Outcome.COMMITTED
    assert set(values(seen(bridge, results))) == {b"0", b"1", b"2"}
    send(bridge, inputs, b"2")
    with bridge.consumer(inputs, group="workers") as consumer:
        assert values(take(consumer, 1)) == [b"2"]


def test_a_new_owner_tells_topics_of_the_commit_of_its_dead_predecessor(open_bridge, monkeypatch):
    name = writing_kit.unique("owned")
    dead = open_bridge(transactional_id=name)
    topic = writing_kit.new_topic(dead)
    with dead.transaction() as txn:
        txn.send(topic, b"1")
        number = writing_kit.flush(txn)
        proof = writing_kit.writer_of(txn).proof
        assert proof is not None
        # As if the coordinator had ended it, its marker been told, and its process been killed before it heard of it.
        writing_kit.cluster_of(dead).client.transactions.end_on_partition(number, proof.topic, True, SOON)
        answer_calls(monkeypatch, owner_module, "end", EndResult.BEFORE)
        newer = open_bridge(transactional_id=name)
        assert values(seen(newer, topic)) == [b"1"]


@pytest.mark.parametrize("shows", [True, False], ids=["proven", "by hand"])
def test_a_new_owner_does_not_take_back_a_commit_that_its_coordinator_forgot(open_bridge, bridge, monkeypatch, shows):
    name = writing_kit.unique("owned")
    dead = open_bridge(transactional_id=name)
    told, untold, other = writing_kit.new_topic(dead), writing_kit.new_topic(dead), writing_kit.new_topic(dead)
    transactions = writing_kit.cluster_of(dead).client.transactions
    txn = dead.transaction()
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "register", lambda *_: None)  # so that its end reaches no topic
        txn.send(told, b"1")
        txn.send(untold, b"1")
        number = writing_kit.flush(txn)
    proof = writing_kit.writer_of(txn).proof
    assert proof is not None
    token = writing_kit.token_of(txn, dead)
    transactions.end(number, True, SOON)
    participants = [writing_kit.concrete(topic) for topic in (told, untold)]
    if shows:
        transactions.end_on_partition(number, participants[0], True, SOON)
    newer = open_bridge(transactional_id=name, timeout=30)
    if not shows:
        for _ in range(2):
            with pytest.raises(errors.BrokerUnavailable, match=f"repair {number}"):
                send(newer, untold, b"2")
        send(newer, other, b"2")
        assert newer.status(token).state is TokenState.UNKNOWN
        for place in (*participants, proof.topic):
            transactions.end_on_partition(number, place, True, SOON)
    send(newer, untold, b"3")
    assert newer.status(token).state is TokenState.COMMITTED
    assert (values(seen(newer, told)), values(seen(newer, untold))) == ([b"1"], [b"1", b"3"])
    with pytest.raises(errors.Fenced):
        txn.commit()


def test_a_writer_takes_back_no_commit_that_its_coordinator_forgot(bridge: Bridge, monkeypatch: pytest.MonkeyPatch):
    topic = writing_kit.new_topic(bridge)
    txn = bridge.transaction()
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "register", lambda *_: None)  # so that its end reaches no topic
        txn.send(topic, b"1")
        number = writing_kit.flush(txn)
    writer = writing_kit.writer_of(txn)
    assert writer.proof is not None
    hidden = writer.proof.topic
    writing_kit.cluster_of(bridge).client.transactions.end(number, True, SOON)
    writer.reopen(Deadline(SOON))
    with pytest.raises(errors.BrokerUnavailable, match=f"repair {number}"):
        writing_kit.owner_of(bridge).require_no_doubt([writing_kit.concrete(topic)], Deadline(SOON))
    assert number in writing_kit.under_way(bridge)
    for place in (writing_kit.concrete(topic), hidden):
        writing_kit.cluster_of(bridge).client.transactions.end_on_partition(number, place, True, SOON)
    writing_kit.owner_of(bridge).require_no_doubt([writing_kit.concrete(topic)], Deadline(SOON))
    assert number not in writing_kit.under_way(bridge)
    txn.abort()
    assert values(seen(bridge, topic)) == [b"1"]


def test_another_owner_takes_back_no_commit_that_a_topic_missed(open_bridge, bridge, unload, monkeypatch):
    topic, other = movable(bridge), open_bridge()
    send(other, topic, b"0")
    monkeypatch.setattr(anchors, "_USE_SECONDS", 0.1)
    monkeypatch.setattr(anchors, "_KEEP_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        deliveries = fail_call(patch, end_delivery, "_end_on", wire.BrokerConnectionLost("not yet"), EACH)
        with patch.context() as inner:
            inner.setattr(Transactions, "register", lambda *_: None)  # so that its end reaches no topic
            with bridge.transaction() as txn:
                txn.send(topic, b"1")
        unload(topic)
        eventually(lambda: len(deliveries) > 9, "an unneeded anchor would be dropped")
        for _ in range(2 * writing_kit.cluster_of(other).client.transactions.connect(SOON)):
            with other.transaction() as later:
                later.send(topic, b"2")
    assert b"1" in values(seen(bridge, topic))


@pytest.mark.parametrize("end", ["commit", "token", "death"])
def test_no_anchor_stays_open(open_bridge, pulsar_broker, monkeypatch, end):
    name = writing_kit.unique("owned")
    bridge = open_bridge(transactional_id=name)
    topic = writing_kit.new_topic(bridge)
    cluster = writing_kit.cluster_of(bridge)

    def empty() -> set[TxnId]:
        return {each.txn for each in list_open(cluster, Deadline(SOON)) if each.is_empty}

    before = empty()
    if end == "token":
        token = writing_kit.prepare(bridge, topic)
        assert empty() - before
        assert open_bridge().commit(token) is Outcome.COMMITTED
    else:
        monkeypatch.setattr(Anchors, "drop_unused", lambda *_: None) if end == "death" else None
        send(bridge, topic, b"1")
        assert empty() - before == set(writing_kit.owner_of(bridge).anchors.open()) != set()
    if end == "death":
        open_bridge(transactional_id=name)
    eventually(lambda: not empty() - before, "all are ended")


def prepare_and_forget(bridge: Bridge, topic: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, TxnId]:
    """The token of what was prepared, and then committed so that no topic has heard of it."""
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "register", lambda *_: None)  # so that its end reaches no topic
        with bridge.transaction(prepare=True) as txn:
            txn.send(topic, b"1")
    token = str(txn.token)
    number, _ = writing_kit.evidence_of(token)
    # As by a process that died before it told the topics.
    writing_kit.cluster_of(bridge).client.transactions.end(number, True, SOON)
    return token, number


@pytest.mark.parametrize("by", ["its owner", "a newer owner"])
def test_the_proof_topic_of_a_prepared_transaction_is_used_again_once_it_tells_the_outcome(
    open_bridge: writing_kit.Connect, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    name = writing_kit.unique("owned")
    bridge = open_bridge(transactional_id=name)
    topic, other = writing_kit.new_topic(bridge), writing_kit.new_topic(bridge)
    first, number = prepare_and_forget(bridge, topic, monkeypatch)
    if by == "a newer owner":
        bridge = open_bridge(transactional_id=name)
    assert bridge.abort(writing_kit.prepare(bridge, other)) is Outcome.ABORTED
    with pytest.raises(errors.BrokerUnavailable, match=f"repair {number}"):
        send(bridge, topic, b"2")
    assert bridge.status(first).state is TokenState.UNKNOWN
    _, proof = writing_kit.evidence_of(first)
    writing_kit.cluster_of(bridge).client.transactions.end_on_partition(number, proof.topic, True, SOON)
    send(bridge, topic, b"3")
    assert bridge.status(first).state is TokenState.COMMITTED
    assert values(seen(bridge, topic)) == [b"1", b"3"]


def race(bridge: Bridge, unload: Callable[[str], None], beside: Bridge | None = None) -> tuple[set[Any], set[Any]]:
    """Process messages while the topics of inputs and results are let go of in turn, each time some milliseconds before
    a commit: which results were lost, and which came twice. `beside` sends to the results all the time.
    """
    inputs = movable(bridge)
    results = movable(bridge, inputs)
    processed: list[Any] = []
    with bridge.consumer(inputs, group="workers") as consumer, sending(beside, results):
        for number in range(COMMITS):
            send(bridge, inputs, b"%d" % number)
            process(bridge, consumer, results, processed, partial(unload, (inputs, results)[number % 2]))

        def all_are() -> bool:
            process(bridge, consumer, results, processed)
            return len(set(processed)) == COMMITS

        eventually(all_are, "all are processed")
        process(bridge, consumer, results, processed)  # what comes again
    stored = Counter(values(seen(bridge, results)))
    return set(processed) - set(stored), {value for value, count in stored.items() if count > 1} - {BESIDE}


@contextmanager
def sending(bridge: Bridge | None, topic: str) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while bridge is not None and not stop.wait(0.01):
            with suppress(errors.TxnBridgeError):
                send(bridge, topic, BESIDE)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def process(
    bridge: Bridge, consumer: Consumer, results: str, processed: list[Any], meanwhile: Callable[[], None] | None = None
) -> None:
    messages = consumer.poll(timeout=2)
    if not messages:
        return
    unloading = threading.Thread(target=meanwhile or (lambda: None))
    try:
        with bridge.transaction() as txn:
            txn.send_many(results, [message.value for message in messages])
            txn.ack(messages)
            writing_kit.flush(txn)
            unloading.start()
            time.sleep(random.uniform(0, 0.012))
        processed += values(messages)
    except (errors.Conflict, errors.TransactionAborted, errors.BrokerUnavailable):
        consumer.nack(messages)
    finally:
        unloading.join()


@pytest.mark.full
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another owner"])
def test_commits_while_topics_unload_lose_and_double_nothing(open_bridge, bridge, unload, alone):
    assert race(bridge, unload, None if alone else open_bridge()) == (set(), set())


@pytest.mark.full
def test_a_coordinator_forgets_topics_that_are_being_unloaded(bridge, unload, monkeypatch):
    """A client that trusts the coordinator misses commits; an end sent to the partition itself is the cure."""
    answer_calls(monkeypatch, EndDelivery, "ended")
    topic = movable(bridge)
    other = movable(bridge, topic)
    numbers = []
    for number in range(COMMITS):
        unloading = threading.Thread(target=unload, args=(topic,))
        with bridge.transaction() as txn:
            txn.send(topic, b"%d" % number)
            txn.send(other, b"%d" % number)
            numbers.append(writing_kit.flush(txn))
            unloading.start()
            time.sleep(0.006)
        unloading.join()
    assert len(seen(bridge, other)) == COMMITS
    with bridge.consumer(topic) as consumer:
        found = consumer.poll(timeout=2)
        for txn_id in numbers:
            writing_kit.cluster_of(bridge).client.transactions.end_on_partition(
                txn_id, writing_kit.concrete(topic, 0), True, SOON
            )
        assert len(found) + len(consumer.poll(timeout=2)) < COMMITS  # of the others some are lost for good


def test_a_token_tells_what_its_transaction_touched() -> None:
    topics = ("persistent://public/default/a-partition-0", "persistent://public/default/a-partition-70")
    participants = Participants(("persistent://public/default/b", *topics), ((topics[1], "g"), (topics[0], "h")))
    found = Participants.read(participants.fields())
    assert set(found.topics) == set(participants.topics) and set(found.subscriptions) == set(participants.subscriptions)
    assert Participants.read({}) == NO_PARTICIPANTS


def test_participants_too_many_for_a_token_are_left_out() -> None:
    many = tuple(f"persistent://public/default/some-topic-{number}" for number in range(100))
    assert Participants(many).fields() == {}
    assert len(Participants(tuple(f"persistent://public/default/t-partition-{n}" for n in range(1000))).fields()) == 2


@pytest.mark.parametrize(
    "fields", [{"r": 1, "g": {}}, {"r": {"a": 1}, "g": {}}, {"r": {}}, {"r": {"a": "x"}, "g": {}}, {"r": {}, "g": []}]
)
def test_damaged_evidence_in_a_token_is_refused(fields: dict[str, Any]) -> None:
    damaged = {"x": list(TxnId(1, 2)), "a": True, "m": "persistent://a/b/c", "s": [1, 2], "n": "x", **fields}
    with pytest.raises(InvalidToken):
        TokenEvidence.read(damaged)
