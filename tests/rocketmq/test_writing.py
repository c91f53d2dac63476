"""Tests of a writer's transactions, as a live broker and another client see them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers.plugin import StartRocketMQ
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import DISCARDED_TOPIC
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.outcome.check_back import CheckBackHandler
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder
from txnbridge_rocketmq.write.transaction_properties import TransactionPlace, unique_key

from tests.rocketmq import writing_kit
from tests.rocketmq.kit import BROKER, LONG, becomes_true, bodies
from tests.rocketmq.reading_kit import new_topic, unique
from tests.rocketmq.writing_kit import copies, flush, numbered, prepare, times_asked
from txnbridge import Bridge, Capability, Outcome, TokenState, errors
from txnbridge.spi import Token
from txnbridge.testing import Child

Open = Callable[..., Bridge]


@pytest.fixture
def bridge(open_bridge: Open) -> Bridge:
    return open_bridge()


@pytest.fixture
def one(client: RemotingClient) -> str:
    return new_topic(client)


@pytest.fixture
def two(client: RemotingClient) -> str:
    return new_topic(client)


@pytest.fixture
def proxy(rocketmq_broker: brokers.RocketMQ) -> Iterator[faults.Proxy]:
    with faults.proxy(rocketmq_broker) as found:
        yield found


def test_a_reader_sees_a_part_of_a_transaction_while_it_is_published(open_bridge, proxy, client, one):
    bridge: Bridge = open_bridge(proxy.url, application=unique("alone"))  # no other bridge gets its check-backs

    def write() -> Outcome | None:
        with bridge.transaction() as txn:
            txn.send_many(one, numbered(3))
        return txn.outcome

    with ThreadPoolExecutor(1) as pool:
        first = proxy.hold(requests="END_TRANSACTION")
        writing = pool.submit(write)
        first.wait()
        others = proxy.hold(requests="END_TRANSACTION", count=None)
        first.release()
        others.wait()
        assert bodies(client, one) == [b"0"]
        others.release()
        assert writing.result(LONG) is Outcome.COMMITTED
    assert bodies(client, one) == numbered(3)
    assert not bridge.capabilities[Capability.ISOLATION]


def test_a_transaction_that_takes_longer_than_a_half_is_its_owners_comes_whole_and_once(bridge, client, one):
    with bridge.transaction() as txn:
        for value in numbered(5):
            txn.send(one, value)
        flush(txn)
        # By then a round of check-backs has asked about them, and the broker refuses direct commits.
        assert becomes_true(lambda: len(copies(client, one, txn.id)) > 1)
        time.sleep(2)
        txn.send(one, b"5")
    assert bodies(client, one) == numbered(6)


def test_a_large_half_is_published_however_often_the_broker_has_copied_it(open_bridge, bridge, client, one, two):
    large = bytes(4 << 20)
    with bridge.transaction(prepare=True, hold=60) as prepared:
        prepared.send(one, large)
    with bridge.transaction() as txn:
        txn.send(one, large)
        txn.send(two, b"1")
        flush(txn)
        # With their bodies, more than the largest frame that Java's clients accept.
        assert becomes_true(lambda: times_asked(client, two, txn.id) >= 6)
        neighbours = Neighbours(bridge, two)
    assert txn.outcome is Outcome.COMMITTED
    token = str(prepared.token)
    assert bridge.status(token).state is TokenState.PREPARED
    assert open_bridge().commit(token) is bridge.commit(token) is Outcome.COMMITTED
    assert neighbours.stop() == {Outcome.COMMITTED}
    assert bodies(client, one) == [large] * 2


class Neighbours:
    """Transactions in other threads of the same bridge."""

    def __init__(self, bridge: Bridge, topic: str) -> None:
        self._bridge, self._topic = bridge, topic
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._outcomes = self._pool.submit(self._write)

    def _write(self) -> set[Outcome | None]:
        outcomes: set[Outcome | None] = set()
        while not outcomes or not self._stop.is_set():
            with self._bridge.transaction() as txn:
                txn.send(self._topic, b"neighbour")
            outcomes.add(txn.outcome)
        return outcomes

    def stop(self) -> set[Outcome | None]:
        """Return the outcomes. Raise the error of a transaction."""
        self._stop.set()
        with self._pool:
            return self._outcomes.result()


def test_a_process_that_publishes_a_transaction_answers_no_check_back_about_it(open_bridge, client, one, monkeypatch):
    bridge = open_bridge(application=unique("alone"))  # so that no other bridge gets its check-backs
    answered: list[bool] = []
    settles = CheckBackHandler._settle_quietly

    def settle(checks: CheckBackHandler, transaction: str, halves: Sequence[tuple[str, MessageExt]]) -> bool:
        answered.append(settles(checks, transaction, halves))
        return answered[-1]

    def be_asked(*_: object) -> bool:
        assert becomes_true(lambda: len(answered) > 1)
        return False  # as after the immunity time

    monkeypatch.setattr(CheckBackHandler, "_settle_quietly", settle)
    with monkeypatch.context() as patched:
        patched.setattr(HalfEnder, "publish_fresh", be_asked)
        with bridge.transaction() as txn:
            txn.send(one, b"1")
    assert answered[:2] == [False, False]
    assert bodies(client, one) == [b"1"]


def test_more_messages_than_a_transaction_may_have_are_refused_and_the_others_commit(
    open_bridge: Open, client: RemotingClient, one: str, with_timing: Callable[..., None]
) -> None:
    with_timing(transaction_messages=3)
    with open_bridge().transaction() as txn:
        for value in numbered(3):
            txn.send(one, value)
        with pytest.raises(errors.InvalidOption, match="at most 3"):
            txn.send(one, b"refused")
    assert bodies(client, one) == numbered(3)


def test_a_message_that_the_broker_would_refuse_is_refused_and_the_others_commit(bridge, client, one):
    with bridge.transaction() as txn:
        txn.send(one, b"1")
        with pytest.raises(errors.InvalidOption, match="bytes"):
            txn.send(one, b"x" * (4 * 1024 * 1024 + 1))
        with pytest.raises(errors.InvalidOption, match="headers"):
            txn.send(one, b"2", headers={"h": "x" * 40_000})
    assert bodies(client, one) == [b"1"]


def test_bridges_that_commit_the_same_tokens_at_once_publish_each_message_once(open_bridge, client, one):
    rivals = [open_bridge() for _ in range(3)]
    tokens = [prepare(rivals[0], one, value) for value in numbered(8)]
    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(lambda job: job[0].commit(job[1]), [(r, t) for t in tokens for r in (*rivals, *rivals)]))
    assert set(told) == {Outcome.COMMITTED}
    assert sorted(bodies(client, one)) == numbered(8)


@pytest.mark.parametrize("ended", [0, 2], ids=["before it published anything", "when it had published some"])
def test_unpublished_messages_of_a_dead_owners_commit_are_published_once_and_in_order(
    rocketmq_broker, proxy, bridge, client, one, two, ended
):
    with Child(writing_kit.commit_some, proxy.url, [one, two], 4) as child:
        # In each queue, one half is ended at a time.
        first = proxy.hold(requests="END_TRANSACTION", count=ended or 2)
        first.wait()
        others = proxy.hold(requests="END_TRANSACTION", count=None)
        if ended:
            first.release()
            others.wait()
        child.kill()
    for held in (first, others):
        held.drop()
    assert becomes_true(lambda: len(bodies(client, one) + bodies(client, two)) >= 8)
    assert bodies(client, one) == bodies(client, two) == numbered(4)


def test_an_owner_that_slept_until_others_published_adds_nothing_when_it_wakes(rocketmq_broker, bridge, client, one):
    with Child(writing_kit.commit_some, rocketmq_broker.url, [one], 3, pause="step:publish/before") as sleeper:
        sleeper.told()
        sleeper.stopped()
        # While the other bridge sleeps, only half of the check-backs come to this one.
        assert becomes_true(lambda: len(bodies(client, one)) == 3, 60)
        sleeper.resume()
        assert sleeper.result() == "committed"
    assert bodies(client, one) == numbered(3)


@pytest.mark.timeout(180)
def test_a_bridge_that_opens_during_a_restart_waits_for_it(rocketmq_broker: brokers.RocketMQ, open_bridge: Open):
    rocketmq_broker.kill()
    try:
        # After a moment the name server knows no broker.
        assert becomes_true(lambda: fails_to_connect(open_bridge, "knew no running broker"))
    finally:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(open_bridge, timeout=60)
            rocketmq_broker.start()
            bridge = opening.result()
    assert bridge.cluster


def fails_to_connect(open_bridge: Open, text: str) -> bool:
    with pytest.raises(errors.BrokerUnavailable) as caught:
        open_bridge(timeout=1)
    return text in str(caught.value)


def test_tokens_are_prepared_after_a_kill_of_the_broker_and_end_as_decided(
    rocketmq_broker: brokers.RocketMQ, open_bridge: Open, client: RemotingClient, one: str, two: str
) -> None:
    bridge = open_bridge()
    kept, given_up = prepare(bridge, one, *numbered(4)), prepare(bridge, two, *numbered(4))
    rocketmq_broker.restart()
    other = open_bridge()
    assert [other.status(token).state for token in (kept, given_up)] == [TokenState.PREPARED] * 2
    assert (other.abort(given_up), other.commit(kept)) == (Outcome.ABORTED, Outcome.COMMITTED)
    assert [bridge.status(token).state for token in (kept, given_up)] == [TokenState.COMMITTED, TokenState.ABORTED]
    # A later half has got two check-backs: so have those of these halves that are open.
    later = Token.parse(prepare(other, one, b"later")).transaction
    assert becomes_true(lambda: times_asked(client, one, later) >= 2)
    assert (bodies(client, one), bodies(client, two)) == (numbered(4), [])


@pytest.mark.full  # starts a broker of its own, and kills it
def test_a_message_asked_about_after_a_kill_is_not_published_again(start_rocketmq: StartRocketMQ, open_bridge: Open):
    """The broker writes op messages in batches, and has lost the last batch."""
    slow_notes = {"transactionOpMsgMaxSize": "4096", "transactionOpBatchInterval": "3000", "transactionTimeOut": "4000"}
    with start_rocketmq(settings=slow_notes) as broker:
        bridge = open_bridge(broker.url)
        with RemotingClient([broker.url.removeprefix("rocketmq://")]) as client:
            topic = new_topic(client)
            tokens = [prepare(bridge, topic, b"token %d" % number, hold=600) for number in range(3)]
            for number in range(30):
                with bridge.transaction() as txn:
                    txn.send(topic, b"%d" % number)
            broker.restart()
            assert [bridge.commit(token) for token in tokens] == [Outcome.COMMITTED] * 3
            # Once a later half has got two check-backs, the undecided halves have got theirs.
            with bridge.transaction(prepare=True, hold=60) as later:
                later.send(topic, b"later")
            assert becomes_true(lambda: times_asked(client, topic, later.id) >= 2, 60)
            assert sorted(bodies(client, topic)) == sorted(numbered(30) + [b"token %d" % n for n in range(3)])


@pytest.mark.full  # waits for the last check-back
def test_messages_decided_and_then_discarded_are_published_by_the_next_bridge(
    rocketmq_broker, settings, open_bridge, client, one
):
    settings(transactionCheckMax=10)
    application = unique("application")
    with Child(
        writing_kit.commit_some, rocketmq_broker.url, [one], 3, 2.0, None, application, kill="step:publish/before"
    ) as child:
        child.stopped()
    key = unique_key(one, TransactionPlace(child.told(), 0))
    assert becomes_true(lambda: bool(client.call(BROKER, read_requests.by_unique_key(DISCARDED_TOPIC, key), LONG)), 60)
    assert bodies(client, one) == []
    open_bridge(application=application, timeout=2)
    assert becomes_true(lambda: bodies(client, one) == numbered(3))
