"""A broker that is killed may forget to finish what it has ended: the next transaction of its writer finishes it first.

Otherwise that would take in what the last one left behind, and an abort would destroy what was committed.
"""

from collections.abc import Callable

import pytest
from txnbridge_conformance.observing import eventually, seen, send, values
from txnbridge_conformance.plugin import Connect, NewTopic
from txnbridge_kafka.client.marker_proof import CoordinatorSession

import txnbridge
from tests.kafka.kit import LONG, describe, flush, plain_producer, requests_of, without_epoch_bumps, write
from tests.kafka.test_admin import MakeAdmin, commit_one, make_admin, visible  # noqa: F401
from txnbridge import Bridge, Outcome, Token, Transaction
from txnbridge.spi import Deadline

PARTITIONS = 6
ROUNDS = 20  # so often a broker that forgets did it at least once, at every point


def test_a_transaction_begins_when_the_last_one_is_complete(connect: Connect, owner: str, new_topic: NewTopic) -> None:
    topic = new_topic(40)  # many markers to write
    bridge = connect(transactional_id=owner, writers=1)
    for number in range(50):
        with bridge.transaction() as txn:
            for partition in range(40):
                txn.send(topic, b"", partition=partition)
            if number % 2:
                txn.abort()
        with bridge.transaction():
            (told,) = describe(bridge, f"{owner}.0").values()
            # Empty: the id was opened anew, because messages were still waiting to be sent when they were aborted.
            assert told.state in ("Empty", "CompleteAbort" if number % 2 else "CompleteCommit")


def test_a_writer_that_lost_its_coordinator_opens_its_id_anew(connect, owner, topic, kill_broker):
    bridge = connect(transactional_id=owner, writers=1)
    send(bridge, topic, b"0")
    (before,) = describe(bridge, f"{owner}.0").values()
    kill_broker()
    send(bridge, topic, b"1")
    (after,) = describe(bridge, f"{owner}.0").values()
    assert after.epoch > before.epoch
    assert values(seen(bridge, topic)) == [b"0", b"1"]


WHEN = {
    "before it begins": 0,
    "before its first message": 1,
    "with messages waiting": 2,
    "right after messages": 3,
    "after its last message": 4,
}


@pytest.mark.parametrize("rounds", [1, pytest.param(ROUNDS, marks=pytest.mark.full)], ids=["once", "often"])
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("first", ["commit", "abort"])
def test_a_transaction_that_ended_right_before_a_broker_was_killed_stays_as_it_ended(
    connect, owner, new_topic, kill_broker, first, when, rounds
):
    """The writer's next transaction ends the other way."""
    bridge = connect(transactional_id=owner, writers=1, timeout=60)
    for number in range(rounds):
        topic = new_topic(PARTITIONS)
        one, other = ([b"%s %d" % (name, each) for each in range(300)] for name in (b"one", b"other"))
        end(bridge, topic, one, commit=first == "commit")
        if when == 0:
            kill_broker()
        txn = bridge.transaction()
        try:
            send_in_steps(txn, topic, other, when, kill_broker)
            txn.commit() if first == "abort" else txn.abort()
        except txnbridge.TransactionAborted:
            assert txn.outcome is Outcome.ABORTED
        wanted = one if first == "commit" else other if txn.outcome is Outcome.COMMITTED else []
        assert sorted(m.value for m in seen(bridge, topic)) == sorted(wanted), f"in round {number}"


def end(bridge: Bridge, topic: str, contents: list[bytes], *, commit: bool) -> None:
    with bridge.transaction() as txn:
        txn.send_many(topic, contents)
        flush(txn)
        if not commit:
            txn.abort()


def send_in_steps(
    txn: Transaction, topic: str, contents: list[bytes], when: int, kill_broker: Callable[[], object]
) -> None:
    if when == 1:
        kill_broker()
    txn.send_many(topic, contents[:150])
    if when == 2:
        kill_broker()
    if when > 2:
        flush(txn)
    if when == 3:
        kill_broker()
    txn.send_many(topic, contents[150:])
    if when == 4:
        flush(txn)
        kill_broker()


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_ending_by_token_finishes_what_a_coordinator_forgot_that_died_meanwhile(
    unverified,
    make_admin,  # noqa: F811
    owner,
    commit,
    monkeypatch,
    caplog,
):
    without_epoch_bumps(monkeypatch)  # else its producer could not write on
    make_admin(unverified).create_topic(owner, 1, Deadline(LONG))
    producer = plain_producer(unverified, owner)
    write(producer, owner, b"1")
    last = CoordinatorSession.last_transaction

    def dies(self: CoordinatorSession, deadline: Deadline) -> None:
        """Leave the transaction, which the coordinator has ended, open in a partition."""
        monkeypatch.setattr(CoordinatorSession, "last_transaction", last)
        assert last(self, deadline) is not None
        producer.produce(owner, b"2", partition=0)
        assert producer.flush(LONG) == 0
        commit_one(unverified, owner, b"later")
        assert visible(unverified, owner) == ([b"1"] if commit else [])

    monkeypatch.setattr(CoordinatorSession, "last_transaction", dies)
    with txnbridge.connect(unverified.url) as bridge:
        (told,) = describe(bridge, owner).values()
        how = {"id": owner, "pid": told.pid, "epoch": told.epoch, "start": told.start}
        token = Token("kafka", requests_of(bridge).cluster_id(Deadline(LONG)), "1", how, prepared=True)
        assert (bridge.commit if commit else bridge.abort)(token) is (Outcome.COMMITTED if commit else Outcome.ABORTED)
    assert "wrote missing control markers" in caplog.text
    wanted = [b"1", b"2", b"later"] if commit else [b"later"]
    eventually(lambda: visible(unverified, owner) == wanted, "readers go on")
