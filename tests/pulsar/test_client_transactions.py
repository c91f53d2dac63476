"""Transactions on a real broker, as a client of its coordinators sees them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import brokers
from txnbridge_pulsar import client as wire

from tests.in_time import within
from tests.pulsar.client_kit import SOON, admin, batch_of, begin, everything, payloads, receive

ALL_TYPES = pytest.mark.parametrize("type", list(wire.SubscriptionType), ids=lambda type: type.name)


def producer_on(client: wire.PulsarClient, topic: str):
    return client.create_producer(topic, timeout=SOON, transactions=True)


def end(client: wire.PulsarClient, txn: wire.TxnId, commit: bool = True) -> None:
    client.transactions.end(txn, commit, SOON)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_what_was_sent_to_several_topics_is_seen_after_commit_and_never_after_abort(client, topic, commit):
    topics = [topic, f"{topic}-2"]
    txn = begin(client, *topics)
    for name in topics:
        producer = producer_on(client, name)
        producer.send(batch_of(b"1", b"2"), txn, timeout=SOON)
        producer.send(wire.Single(b"3"), txn, timeout=SOON).result(SOON)
        producer.send(wire.Single(b"plain"), timeout=SOON).result(SOON)
        assert everything(client, name) == []
    end(client, txn, commit)
    expected = [b"1", b"2", b"3", b"plain"] if commit else [b"plain"]
    assert [everything(client, name) for name in topics] == [expected, expected]


@ALL_TYPES
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_what_was_acknowledged_comes_again_only_after_abort(client, topic, type, commit):
    producer = producer_on(client, topic)
    producer.send(wire.Single(b"1"), timeout=SOON)
    producer.send(batch_of(b"2", b"3", b"4"), timeout=SOON).result(SOON)
    consumer = client.subscribe(topic, "s", timeout=SOON, type=type, start=wire.EARLIEST)
    entries = receive(consumer, 4)
    found = [message.id for entry in entries for message in entry.messages()]
    txn = client.transactions.begin(60_000, SOON)
    client.transactions.register(txn, SOON, subscriptions=[(topic, "s")])
    consumer.acknowledge([found[0], found[2]], txn, timeout=SOON)
    end(client, txn, commit)
    consumer.redeliver()
    assert payloads(receive(consumer, 2 if commit else 4)) == ([b"2", b"4"] if commit else [b"1", b"2", b"3", b"4"])


def test_a_message_is_acknowledged_in_one_transaction_only(client, topic):
    producer_on(client, topic).send(batch_of(b"1", b"2", b"3"), timeout=SOON).result(SOON)
    consumer = client.subscribe(topic, "s", timeout=SOON, type=wire.SubscriptionType.SHARED, start=wire.EARLIEST)
    first, second, _ = (message.id for entry in receive(consumer, 3) for message in entry.messages())
    one, other = (client.transactions.begin(60_000, SOON) for _ in range(2))
    for txn in (one, other):
        client.transactions.register(txn, SOON, subscriptions=[(topic, "s")])
    consumer.acknowledge([first], one, timeout=SOON)
    consumer.acknowledge([second], other, timeout=SOON)
    for txn in (one, other):
        with pytest.raises(wire.TransactionConflict):
            consumer.acknowledge([first], txn, timeout=SOON)
    end(client, one)
    end(client, other, False)
    assert payloads(receive(consumer, 2)) == [b"2", b"3"]


@pytest.mark.parametrize("first", [True, False], ids=["commit", "abort"])
def test_ending_twice_is_told_as_not_found_whatever_the_first_was(client, topic, first):
    txn = begin(client, topic)
    end(client, txn, first)
    for commit in (True, False):
        with pytest.raises(wire.TransactionNotFound) as error:
            end(client, txn, commit)
        assert not error.value.may_have_had_effect
    with pytest.raises(wire.TransactionNotFound):
        client.transactions.register(txn, SOON, [topic])


def test_of_many_that_end_at_once_one_does_it_and_the_others_learn_the_state(client, topic):
    txn = begin(client, topic)
    producer_on(client, topic).send(wire.Single(b"x"), txn, timeout=SOON).result(SOON)
    start = threading.Barrier(5)

    def commit() -> wire.PulsarError | None:
        start.wait()
        try:
            end(client, txn)
        except (wire.InvalidTransactionStatus, wire.TransactionNotFound) as error:
            return error
        return None

    with ThreadPoolExecutor(5) as threads:
        answers = [answer.result() for answer in [threads.submit(commit) for _ in range(5)]]
    assert answers.count(None) == 1
    states = [answer.state for answer in answers if isinstance(answer, wire.InvalidTransactionStatus)]
    assert set(states) <= {"COMMITTING", "COMMITTED"}
    assert everything(client, topic) == [b"x"]


def test_a_transaction_that_lives_too_long_is_aborted(client, topic):
    producer = producer_on(client, topic)
    producer.send(wire.Single(b"first"), timeout=SOON).result(SOON)
    txn = begin(client, topic, ttl_ms=3000)
    producer.send(wire.Single(b"late"), txn, timeout=SOON).result(SOON)
    producer.send(wire.Single(b"plain"), timeout=SOON).result(SOON)
    reader = client.read(topic, timeout=SOON)
    assert payloads(receive(reader, 2)) == [b"first", b"plain"]
    with pytest.raises((wire.TransactionNotFound, wire.InvalidTransactionStatus)):
        end(client, txn)


def test_a_coordinator_that_is_not_there_is_asked_for_until_the_deadline_and_no_longer(client):
    with within(1), pytest.raises((wire.CoordinatorNotFound, wire.PulsarError)):
        client.transactions.end(wire.TxnId(12, 0), True, 1.0)


def test_every_coordinator_is_loaded_at_once(client):
    assert client.transactions.connect(SOON) == client.transactions.coordinators(SOON) >= 1


def test_transactions_go_round_the_coordinators(client):
    count = client.transactions.coordinators(SOON)
    ids = [client.transactions.begin(1000, SOON) for _ in range(2 * count)]
    assert {txn.most for txn in ids} == set(range(count))
    assert len(set(ids)) == 2 * count


def test_a_send_of_a_transaction_that_the_topic_knows_as_ended_is_refused(client, topic, pulsar_broker):
    producer = producer_on(client, topic)
    old = begin(client, topic)
    producer.send(wire.Single(b"1"), old, timeout=SOON).result(SOON)
    end(client, old)
    wait_until_nothing_is_open(pulsar_broker)
    end(client, begin(client, topic))  # with this the topic learns how far its coordinator is
    with pytest.raises(wire.NotAllowed, match="has been ended"):
        producer.send(wire.Single(b"2"), old, timeout=SOON).result(SOON)


def wait_until_nothing_is_open(broker: brokers.Pulsar) -> None:
    """Other tests' transactions may be: a coordinator tells topics how far it is by the oldest open one."""
    until = time.monotonic() + SOON
    while admin(broker, "GET", "transactions/slowTransactions/0", version=3):
        assert time.monotonic() < until
        time.sleep(0.1)
