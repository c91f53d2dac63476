"""Tests of open transactions on a live broker: they are listed, ended by hand, and their check-backs resumed."""

import time

import pytest
from txnbridge_rocketmq.admin import open_halves
from txnbridge_rocketmq.client import administration
from txnbridge_rocketmq.client.protocol.codes import Property
from txnbridge_rocketmq.client.protocol.send_requests import HalfAddress, HalfEnd, WireMessage, end, send_half
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, address_of_copy
from txnbridge_rocketmq.outcome.outcome import end_prepared

from tests.failing import EACH, fail_call, raising
from tests.rocketmq import writing_kit
from tests.rocketmq.kit import BROKER, LONG, becomes_true, bodies
from tests.rocketmq.reading_kit import new_topic, unique
from tests.rocketmq.writing_kit import copies, flush
from txnbridge import Outcome, TokenState
from txnbridge.errors import BrokerUnavailable, EvidenceLost, InvalidState, NotFound, OutcomeUnknown
from txnbridge.testing import Child, tell


@pytest.fixture
def observer(open_bridge):
    """Return an administrator's bridge, whose application gets no check-backs of the tests' transactions."""
    return open_bridge(application="observers").admin


@pytest.fixture
def topic(client):
    return new_topic(client, 2)


def listed(admin, name):
    return [each for each in admin.transactions() if each.transaction == name]


def gone(admin, name):
    time.sleep(2)  # transactions that were decided just now are not listed
    return becomes_true(lambda: not listed(admin, name))


def prepare_and_go(open_bridge, topic):
    """Prepare a transaction, close its bridge, and return the transaction's id, its token and the application."""
    application = unique("gone")
    with open_bridge(application=application) as bridge:
        with bridge.transaction(prepare=True, hold=600) as txn:
            txn.send(topic, b"left", partition=0)
        return txn.id, str(txn.token), application


def open_and_wait(url, topic, application, id=None):
    """Tell the transaction's id, and wait; the test kills the process long before the deadline."""
    bridge = writing_kit.open_bridge(url, application=application, transactional_id=id)
    txn = bridge.transaction(timeout=600)
    txn.send(topic, b"left", partition=0)
    flush(txn)
    tell(txn.id)
    time.sleep(600)


def test_an_open_transaction_is_listed_until_it_ends(open_bridge, observer, topic):
    id = unique("owner")
    with open_bridge(transactional_id=id).transaction() as txn:
        for partition in (0, 1, 1):
            txn.send(topic, b"1", partition=partition)
        flush(txn)
        (found,) = listed(observer, txn.id)
        assert (found.state, found.transactional_id, found.owner) == ("open", id, writing_kit.APPLICATION)
        assert (found.partitions, found.messages, found.token) == (((topic, 0), (topic, 1)), 3, None)
        assert found.since is not None and abs(found.since / 1000 - time.time()) < 60
        assert found.expires_at is not None and 0 < found.expires_at - found.since < 60_000
        with pytest.raises(InvalidState, match="only its writer"):
            observer.commit(txn.id)
    assert gone(observer, txn.id)


def test_a_decided_transaction_is_listed_and_published_by_hand(open_bridge, observer, client, topic, monkeypatch):
    with monkeypatch.context() as patched, open_bridge(application=unique("gone")) as bridge:
        patched.setattr(HalfEnder, "publish_fresh", lambda *args: False)
        patched.setattr(HalfEnder, "publish", raising(BrokerUnavailable("as if the process were killed")))
        with pytest.raises(OutcomeUnknown, match="it is committed"), bridge.transaction(timeout=10) as txn:
            txn.send(topic, b"late", partition=0)
    assert becomes_true(lambda: [each.state for each in listed(observer, txn.id)] == ["ending"])
    assert bodies(client, topic) == []
    assert any(txn.id in each.subject and "does not end" in each.text for each in observer.doctor())
    assert observer.abort(txn.id) is Outcome.COMMITTED  # the true outcome, although ABORT was asked for
    assert gone(observer, txn.id)
    assert bodies(client, topic) == [b"late"]


def test_a_prepared_transaction_is_listed_with_a_token_that_ends_it(open_bridge, observer, client, topic):
    bridge = open_bridge()
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"1", partition=0)
    (found,) = listed(observer, txn.id)
    assert (found.state, found.messages, found.expires_at) == ("prepared", 1, txn.token.expires_at)
    assert str(found.token) == str(txn.token)
    assert bridge.commit(str(found.token)) is Outcome.COMMITTED
    assert gone(observer, txn.id)
    assert bodies(client, topic) == [b"1"]


def test_a_copy_that_is_left_of_what_was_published_is_dropped_by_hand(open_bridge, observer, client, topic):
    name, _, _ = prepare_and_go(open_bridge, topic)
    assert becomes_true(lambda: len(copies(client, topic, name)) >= 2)
    client.call(BROKER, end(address_of_copy(copies(client, topic, name)[0]), HalfEnd.COMMIT, from_check=True), LONG)
    assert becomes_true(lambda: bodies(client, topic) == [b"left"])
    assert observer.commit(name) is Outcome.COMMITTED
    time.sleep(3)
    assert not listed(observer, name)  # no other process aborts the half
    assert bodies(client, topic) == [b"left"]


@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_a_copy_that_the_broker_makes_while_a_transaction_is_ended_by_hand_is_dropped_too(
    open_bridge, observer, client, topic, decision, monkeypatch
):
    def end_and_copy(*args, **how):
        outcome = end_prepared(*args, **how)
        newest = copies(client, topic, name)[-1]
        # As by a round of check-backs that began before.
        client.call(BROKER, administration.resume_half(newest.offset_id), LONG)
        return outcome

    name, _, _ = prepare_and_go(open_bridge, topic)
    monkeypatch.setattr(open_halves, "end_prepared", end_and_copy)
    getattr(observer, decision)(name)
    assert gone(observer, name)


def test_a_transaction_that_is_not_there_cannot_be_ended(observer):
    for call in (observer.commit, observer.abort, observer.repair):
        with pytest.raises(NotFound, match="no/such/one"):
            call("no/such/one")


def test_a_transaction_that_a_dead_owner_left_open_is_aborted_when_its_id_is_opened_again(
    rocketmq_broker, open_bridge, observer, topic
):
    id = unique("owner")
    with Child(open_and_wait, rocketmq_broker.url, topic, id, id) as child:
        left = child.told()
        child.kill()
    with open_bridge(application=id, transactional_id=id).transaction(prepare=True, hold=600) as txn:
        txn.send(topic, b"prepared", partition=0)
    assert becomes_true(lambda: [each.state for each in listed(observer, left)] == ["open"])
    with open_bridge(application=id, transactional_id=id).transaction():
        pass  # this opens the writers, and the transactional id
    assert gone(observer, left)  # long before its deadline
    assert [each.state for each in listed(observer, txn.id)] == ["prepared"]
    assert observer.abort(txn.id) is Outcome.ABORTED


@pytest.mark.parametrize("published_before", [True, False])
def test_an_administrator_looks_before_a_single_message_is_aborted(
    open_bridge, observer, client, topic, monkeypatch, published_before
):
    with open_bridge(application=unique("gone"), timeout=60) as bridge:
        with bridge.transaction() as txn:
            txn.send(topic, b"first", partition=0)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            fail_call(patched, HalfEnder, "publish_fresh", KeyboardInterrupt, EACH, happens=published_before)
            with bridge.transaction() as txn:
                txn.send(topic, b"single", partition=0)
        token = str(txn.token)
        state = TokenState.COMMITTED if published_before else TokenState.UNKNOWN
        assert becomes_true(lambda: bridge.status(token).state is state)
        assert [each.state for each in listed(observer, txn.id)] == ([] if published_before else ["open"])
        if not published_before:
            assert observer.abort(txn.id) is Outcome.ABORTED
            assert bridge.status(token).state is TokenState.ABORTED
    assert bodies(client, topic) == [b"first", *([b"single"] if published_before else [])]


def test_a_half_of_another_client_is_listed_and_can_be_aborted(observer, client, topic):
    stored = client.call(BROKER, send_half(WireMessage(topic, b"foreign"), "strangers", 1), LONG)
    (found,) = listed(observer, stored.unique_key)
    assert (found.state, found.owner, found.transactional_id) == ("open", "strangers", "")
    assert (found.partitions, found.expires_at, found.token) == (((topic, 1),), None, None)
    with pytest.raises(InvalidState, match="another client's"):
        observer.commit(stored.unique_key)
    assert observer.abort(stored.unique_key) is Outcome.ABORTED
    assert gone(observer, stored.unique_key)


def test_a_topic_in_use_by_a_transaction_is_not_deleted(open_bridge, observer, topic):
    with open_bridge().transaction() as txn:
        txn.send(topic, b"1", partition=0)
        flush(txn)
        with pytest.raises(InvalidState, match=txn.id):
            observer.delete_topic(topic)
    assert gone(observer, txn.id)
    observer.delete_topic(topic)


def discard(observer, settings, name):
    """Let the broker discard a transaction's open halves, and then allow many check-backs again."""
    settings(transactionCheckMax=1)
    assert becomes_true(lambda: [each.state for each in listed(observer, name)] == ["discarded"])
    settings(transactionCheckMax=1000)


def test_a_discarded_half_of_another_client_keeps_no_topic(observer, client, topic, settings):
    stored = client.call(BROKER, send_half(WireMessage(topic, b"foreign"), "strangers", 1), LONG)
    with pytest.raises(InvalidState, match=stored.unique_key):
        observer.delete_topic(topic)
    discard(observer, settings, stored.unique_key)
    assert observer.abort(stored.unique_key) is Outcome.ABORTED
    observer.delete_topic(topic)


@pytest.mark.parametrize("how", ["token", "by hand"])
def test_half_messages_given_up_are_listed_and_end_as_decided(open_bridge, observer, client, topic, settings, how):
    name, token, application = prepare_and_go(open_bridge, topic)
    discard(observer, settings, name)
    (advice,) = [each for each in observer.doctor() if name in each.subject]
    assert (advice.level, "repair" in advice.remedy) == ("problem", True)
    if how == "token":
        assert open_bridge(application=application).commit(token) is Outcome.COMMITTED
    else:
        assert observer.commit(name) is Outcome.COMMITTED
    assert gone(observer, name)
    assert bodies(client, topic) == [b"left"]


def test_the_broker_asks_again_about_what_it_has_given_up(rocketmq_broker, observer, client, topic, settings):
    with Child(open_and_wait, rocketmq_broker.url, topic, unique("gone")) as child:
        name = child.told()
        child.kill()
    discard(observer, settings, name)
    assert observer.repair(name) == f"the broker sends check-backs again for 1 halves of {name}"
    assert becomes_true(lambda: any(each.state != "discarded" for each in listed(observer, name)))
    with pytest.raises(InvalidState, match="has not discarded"):
        observer.repair(name)
    assert observer.abort(name) is Outcome.ABORTED
    assert gone(observer, name)
    assert bodies(client, topic) == []


def test_a_transaction_that_nobody_can_decide_is_reported_and_not_touched(open_bridge, observer, client, topic):
    name, _, application = prepare_and_go(open_bridge, topic)
    observer.delete_topic(f"_txnbridge-log-{application}")
    observer = open_bridge(application="late observers").admin  # a bridge that has never read that log
    (found,) = listed(observer, name)
    assert found.state == "lost"
    assert any(name in each.subject and "no process may end it" in each.text for each in observer.doctor())
    with pytest.raises(EvidenceLost):
        observer.abort(name)
    newest = copies(client, topic, name)[-1]  # otherwise the broker would write it again in each round
    half = HalfAddress(topic, newest.properties[Property.GROUP], newest.queue_offset, newest.log_offset, "")
    client.call(BROKER, end(half, HalfEnd.ABORT, from_check=True), LONG)
    assert gone(observer, name)
