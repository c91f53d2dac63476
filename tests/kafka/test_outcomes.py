"""Tests of the outcome that a program gets when the network, the broker or its process fails at an end."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers.plugin import StartKafka
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import eventually, seen, send, values

import txnbridge
from tests.in_time import within
from tests.kafka.kit import FORGETFUL, describe, flush, plain_admin, plain_producer, write, writer_of
from txnbridge import Bridge, Outcome, Token, TokenState, errors

# The time of a transaction in these tests, within which the client asks a silent broker at least twice.
SECONDS = 4.0


@pytest.fixture
def through(proxy: faults.Proxy) -> Iterator[Bridge]:
    with txnbridge.connect(proxy.url, writers=1, timeout=SECONDS) as bridge:
        yield bridge


def unknown(bridge: Bridge, topic: str, value: bytes) -> str:
    """Commit one message, and be told that nobody knows; returns the token."""
    with within(SECONDS), pytest.raises(errors.OutcomeUnknown) as caught:
        send(bridge, topic, value)
    assert caught.value.token
    return caught.value.token


def test_a_commit_whose_answers_are_all_lost_is_known_to_have_happened(proxy, through, bridge, topic):
    send(through, topic, b"0")
    hold = proxy.hold(answers="EndTxn", count=None)
    token = unknown(through, topic, b"1")
    assert bridge.status(token).state is TokenState.COMMITTED
    hold.drop()
    send(through, topic, b"2")
    assert bridge.status(token).state is TokenState.COMMITTED
    assert values(seen(bridge, topic)) == [b"0", b"1", b"2"]


def test_a_commit_that_never_arrives_is_not_taken_for_the_one_before(proxy, through, bridge, topic):
    send(through, topic, b"0")
    hold = proxy.hold(requests="EndTxn", count=None)
    token = unknown(through, topic, b"never")
    assert bridge.status(token).state in (TokenState.UNKNOWN, TokenState.ABORTED)
    assert not bridge.status(token).permanent
    proxy.cut()
    hold.release()  # and here they come, late
    eventually(lambda: bridge.status(token).state is not TokenState.UNKNOWN, "it is known")
    state = bridge.status(token).state
    send(through, topic, b"2")
    assert bridge.status(token).state is state
    wanted = [b"0", *([b"never"] if state is TokenState.COMMITTED else []), b"2"]
    assert values(seen(bridge, topic)) == wanted


def test_a_commit_lost_on_its_way_is_aborted_for_good_once_its_writer_goes_on(proxy, through, bridge, topic):
    send(through, topic, b"0")
    hold = proxy.hold(requests="EndTxn", count=None)
    token = unknown(through, topic, b"never")
    proxy.cut()
    hold.drop()
    send(through, topic, b"2")
    assert bridge.status(token).state is TokenState.ABORTED
    assert values(seen(bridge, topic)) == [b"0", b"2"]


@pytest.mark.parametrize("request_kind", ["AddPartitionsToTxn", "Produce"])
def test_a_transaction_never_stored_is_aborted_although_the_coordinator_shows_the_one_before(
    proxy: faults.Proxy, through: Bridge, bridge: Bridge, topic: str, request_kind: str
) -> None:
    send(through, topic, b"0")
    hold = proxy.hold(requests=request_kind, count=None)
    with pytest.raises(errors.TxnBridgeError) as caught, through.transaction() as txn:
        txn.send(topic, b"never")
    assert txn.outcome is Outcome.ABORTED, caught.value
    proxy.cut()
    hold.release()
    send(through, topic, b"2")
    assert values(seen(bridge, topic)) == [b"0", b"2"]


def test_a_transaction_of_a_named_owner_that_timed_out_while_its_commit_was_on_its_way_is_aborted(
    proxy: faults.Proxy, bridge: Bridge, topic: str, owner: str
) -> None:
    with txnbridge.connect(proxy.url, transactional_id=owner, writers=1, timeout=SECONDS) as through:
        hold = proxy.hold(requests="EndTxn", count=None)
        token = unknown(through, topic, b"never")
        proxy.cut()
        hold.drop()
        eventually(lambda: bridge.status(token).state is TokenState.ABORTED, "the broker has timed it out")
        send(through, topic, b"2")
        assert bridge.status(token).state is TokenState.ABORTED
    assert values(seen(bridge, topic)) == [b"2"]


def test_a_commit_whose_answer_is_lost_stays_committed_when_a_stranger_aborts_one_on_the_same_id(
    proxy: faults.Proxy, kafka_broker: brokers.Broker, bridge: Bridge, topic: str, owner: str
) -> None:
    """A program that does not write this application's decision log opens the id, and nobody here is told."""
    with (
        txnbridge.connect(proxy.url, transactional_id=owner, writers=1, timeout=15) as through,
        ThreadPoolExecutor(1) as other,
    ):
        send(through, topic, b"0")
        hold = proxy.hold(answers="EndTxn")
        txn = through.transaction()
        txn.send(topic, b"1")
        committing = other.submit(txn.commit)
        hold.wait()
        eventually(lambda: describe(bridge, f"{owner}.0")[f"{owner}.0"].state == "CompleteCommit", "it is committed")
        write(stranger := plain_producer(kafka_broker, f"{owner}.0"), topic, b"never")
        stranger.abort_transaction(30)
        hold.drop()
        proxy.cut()
        with suppress(errors.Fenced):
            committing.result(60)
    assert txn.outcome is Outcome.COMMITTED
    assert values(seen(bridge, topic)) == [b"0", b"1"]


# When the coordinator dies, of a transaction of which everything is stored.
MOMENTS = ["before it is asked", "when it has decided", "when it has done all of it"]
AT_EACH_MOMENT = pytest.mark.parametrize(
    "moment", [moment if moment == MOMENTS[1] else pytest.param(moment, marks=pytest.mark.full) for moment in MOMENTS]
)


def hold_the_end(proxy: faults.Proxy, moment: str) -> faults.Hold:
    return proxy.hold(requests="EndTxn") if moment == MOMENTS[0] else proxy.hold(answers="EndTxn")


def at_the_moment(bridge: Bridge, hold: faults.Hold, moment: str, id: str) -> None:
    hold.wait()
    if moment == MOMENTS[2]:
        eventually(lambda: describe(bridge, id)[id].state == "CompleteCommit", "the markers are written")


@AT_EACH_MOMENT
def test_a_commit_whose_coordinator_dies_is_committed_once_that_is_back(
    proxy: faults.Proxy, bridge: Bridge, topic: str, owner: str, kill_broker: Callable[[], object], moment: str
) -> None:
    with txnbridge.connect(proxy.url, transactional_id=owner, writers=1) as through, ThreadPoolExecutor(1) as other:
        send(through, topic, b"0")
        hold = hold_the_end(proxy, moment)
        committing = other.submit(send, through, topic, b"1")
        at_the_moment(bridge, hold, moment, f"{owner}.0")
        kill_broker()
        hold.drop()
        proxy.cut()
        committing.result(60)
        # Its next transaction there also finishes what the broker forgot in dying.
        send(through, topic, b"2")
    assert values(seen(bridge, topic)) == [b"0", b"1", b"2"]


@AT_EACH_MOMENT
def test_a_commit_whose_coordinator_dies_and_stays_away_is_unknown_until_it_is_asked(
    kafka_broker: brokers.Broker, proxy: faults.Proxy, through: Bridge, bridge: Bridge, topic: str, moment: str
) -> None:
    send(through, topic, b"0")
    hold = hold_the_end(proxy, moment)
    with ThreadPoolExecutor(1) as other:
        txn = through.transaction()
        txn.send(topic, b"1")
        committing = other.submit(txn.commit)
        at_the_moment(bridge, hold, moment, str(writer_of(txn).id))
        kafka_broker.kill()
        try:
            hold.drop()
            proxy.cut()
            with pytest.raises(errors.OutcomeUnknown) as caught:
                committing.result(60)
        finally:
            kafka_broker.start()
    token = str(caught.value.token)
    eventually(lambda: bridge.status(token).state is not TokenState.UNKNOWN, "it is known")
    happened = moment != MOMENTS[0]
    assert bridge.status(token).state is (TokenState.COMMITTED if happened else TokenState.ABORTED)
    send(through, topic, b"2")
    assert values(seen(bridge, topic)) == [b"0", *([b"1"] if happened else []), b"2"]


def test_a_transaction_that_its_program_forgot_for_too_long_is_aborted_and_says_so(connect, bridge, topic):
    slow = connect(writers=1, timeout=1.5)
    send(slow, topic, b"0")
    with pytest.raises(errors.DeadlineExceeded, match="the transaction"), slow.transaction() as txn:
        txn.send(topic, b"never")
        flush(txn)
        time.sleep(3)  # longer than the broker lets it live
    assert txn.outcome is Outcome.ABORTED
    send(slow, topic, b"2")
    assert values(seen(bridge, topic)) == [b"0", b"2"]


def test_prepared_ones_survive_their_process_and_their_broker(run, txnbridge_url, connect, topic, kill_broker):
    tokens = []
    for number in range(4):
        dying = run(programs.prepare_one, txnbridge_url, topic, b"%d" % number, kill="status/before")
        tokens.append(dying.told())
        dying.stopped()
    kill_broker()
    bridge = connect()
    assert [bridge.status(token).state for token in tokens] == [TokenState.PREPARED] * 4
    ends = [bridge.commit, bridge.abort, bridge.commit, bridge.abort]
    assert [end(token) for end, token in zip(ends, tokens, strict=True)] == [Outcome.COMMITTED, Outcome.ABORTED] * 2
    # What a broker has not finished when it is killed it may forget, which is the doctor's business.
    ids = [Token.parse(token).how["id"] for token in tokens]
    eventually(lambda: all(d.state.startswith("Complete") for d in describe(bridge, *ids).values()), "all are complete")
    kill_broker()
    assert [bridge.status(token).state for token in tokens] == [TokenState.COMMITTED, TokenState.ABORTED] * 2
    assert sorted(m.value for m in seen(connect(), topic)) == [b"0", b"2"]


@pytest.fixture
def forgetful(start_kafka: StartKafka) -> brokers.Broker:
    """A broker that forgets an id that was not used for three seconds."""
    return start_kafka(settings={**FORGETFUL, "producer.id.expiration.ms": "3000"})


def test_an_id_that_the_broker_forgot_aborts_at_most_one_transaction(forgetful: brokers.Broker, owner: str) -> None:
    with txnbridge.connect(forgetful.url, transactional_id=owner, writers=1, create_topics=1) as bridge:
        send(bridge, "topic", b"0")
        eventually(lambda: not describe(bridge, f"{owner}.0"), "the id is forgotten")
        failed = 0
        for _ in range(2):
            try:
                send(bridge, "topic", b"1")
                break
            except errors.TransactionAborted:
                failed += 1
        assert failed <= 1
        assert values(seen(bridge, "topic")) == [b"0", b"1"]


def test_the_outcome_of_a_token_whose_id_is_forgotten_comes_from_the_log_or_is_unknown(forgetful, owner, monkeypatch):
    with txnbridge.connect(forgetful.url, transactional_id=owner, writers=1, create_topics=1) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send("topic", b"1")
        token = str(txn.token)
        assert bridge.commit(token) is Outcome.COMMITTED
        eventually(lambda: not describe(bridge, Token.parse(token).how["id"]), "the id is forgotten")
        assert bridge.status(token).state is TokenState.COMMITTED
        monkeypatch.setattr("txnbridge_kafka.outcome.outcome.state_records", lambda *_: [])  # once that is compacted
        status = bridge.status(token)
        assert (status.state, status.permanent) == (TokenState.UNKNOWN, True)
        assert "has expired" in status.reason
        for end in (bridge.commit, bridge.abort):
            with pytest.raises(errors.EvidenceLost):
                end(token)
        assert values(bridge.read("topic", limit=10)) == [b"1"]


@pytest.mark.full
def test_a_token_is_committed_while_its_coordinator_moves(start_kafka: StartKafka, owner: str) -> None:
    broker = start_kafka(nodes=3)
    with txnbridge.connect(broker.url, transactional_id=owner, create_topics=1) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send("topic", b"prepared")
    first = coordinator(broker)
    broker.kill(first)
    with txnbridge.connect(broker.url) as other:
        assert other.commit(str(txn.token)) is Outcome.COMMITTED
        assert other.status(str(txn.token)).state is TokenState.COMMITTED
        assert values(seen(other, "topic")) == [b"prepared"]
    assert coordinator(broker) != first


def coordinator(broker: brokers.Broker) -> int:
    """The node that coordinates all transactions: the leader of the one partition that they are kept in."""
    topics = plain_admin(broker).list_topics("__transaction_state", timeout=30).topics
    return int(topics["__transaction_state"].partitions[0].leader)
