"""Transactions on a real broker, as a client of its coordinators sees them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_pulsar import client as wire

from tests.in_time import within
from tests.pulsar.client_kit import SOON, begin, everything


def end(client: wire.PulsarClient, txn: wire.TxnId, commit: bool = True) -> None:
    client.transactions.end(txn, commit, SOON)


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


def test_one_of_many_concurrent_ends_succeeds_and_the_others_learn_the_state(client, topic):
    txn = begin(client, topic)
    producer = client.create_producer(topic, timeout=SOON, transactions=True)
    producer.send(wire.Single(b"x"), txn, timeout=SOON).result(SOON)
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


def test_a_coordinator_that_is_not_there_is_asked_for_until_the_deadline_and_no_longer(client):
    with within(1), pytest.raises((wire.CoordinatorNotFound, wire.PulsarError)):
        client.transactions.end(wire.TxnId(12, 0), True, 1.0)


def test_transactions_go_round_the_coordinators(client):
    count = client.transactions.connect(SOON)
    ids = [client.transactions.begin(1000, SOON) for _ in range(2 * count)]
    assert {txn.most for txn in ids} == set(range(count))
    assert len(set(ids)) == 2 * count
