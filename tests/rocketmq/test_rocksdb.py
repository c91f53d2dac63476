"""Tests of a broker that keeps halves in RocksDB: they are found by key, and end as decided."""

from collections.abc import Callable
from typing import Any

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.brokers.plugin import StartRocketMQ
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import DISCARDED_TOPIC, HALF_TOPIC, ROCKSDB_HALF_TOPIC
from txnbridge_rocketmq.outcome.check_back import CheckBackHandler
from txnbridge_rocketmq.write.transaction_properties import TransactionPlace, unique_key

from tests.failing import answer_calls
from tests.inside import broker_of
from tests.rocketmq import writing_kit
from tests.rocketmq.kit import BROKER, LONG, becomes_true, bodies
from tests.rocketmq.reading_kit import new_topic, unique
from tests.rocketmq.writing_kit import flush, numbered, prepare
from txnbridge import Bridge, Capability, NotSupported, Outcome
from txnbridge.spi import Deadline, Token
from txnbridge.testing import Child

Open = Callable[..., Bridge]


@pytest.fixture(scope="module")
def rocketmq_broker(start_shared: StartRocketMQ) -> brokers.RocketMQ:
    return start_shared(settings={"transRocksDBEnable": "true", "transWriteOriginTransHalfEnable": "false"})


def halves(client: RemotingClient, topic: str) -> int:
    """Return how many halves were ever stored in a half topic."""
    return client.call(BROKER, read_requests.max_offset(topic, 0), LONG)


def test_half_messages_wait_in_rocksdb_and_the_capabilities_say_what_is_missing(open_bridge, client, topic):
    bridge = open_bridge()
    with bridge.transaction() as txn:
        txn.send_many(topic, numbered(3))
        flush(txn)
        assert becomes_true(lambda: halves(client, ROCKSDB_HALF_TOPIC) >= 3)  # the broker counts a little later
        assert halves(client, HALF_TOPIC) == 0
    assert bodies(client, topic) == numbered(3)
    for capability in (Capability.LIST_OPEN, Capability.END_OPEN):
        assert "RocksDB" in bridge.capabilities[capability].note
    with pytest.raises(NotSupported, match="RocksDB"):
        bridge.admin.transactions()


def test_an_aborted_message_is_never_seen_nor_asked_about_long(open_bridge: Open, client: RemotingClient, topic: str):
    bridge = open_bridge()
    with bridge.transaction() as txn:
        txn.send(topic, b"never")
        flush(txn)
        txn.abort()
    with bridge.transaction() as txn:
        txn.send(topic, b"seen")
    assert becomes_true(lambda: bodies(client, topic) == [b"seen"])


@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_a_token_ends_half_messages_in_rocksdb_from_another_process_after_a_kill_of_the_broker(
    rocketmq_broker: brokers.RocketMQ, open_bridge: Open, client: RemotingClient, topic: str, decision: str
) -> None:
    token = prepare(open_bridge(), topic, *numbered(4))
    rocketmq_broker.restart()
    other = open_bridge()
    outcome = other.commit(token) if decision == "commit" else other.abort(token)
    assert outcome is (Outcome.COMMITTED if decision == "commit" else Outcome.ABORTED)
    assert open_bridge().status(token).state.value == outcome.value
    assert bodies(client, topic) == (numbered(4) if decision == "commit" else [])


def test_messages_that_a_dead_owner_decided_are_published_by_others_once_and_in_order(
    rocketmq_broker: brokers.RocketMQ, open_bridge: Open, client: RemotingClient, topic: str
) -> None:
    with faults.proxy(rocketmq_broker) as proxy, Child(writing_kit.commit_some, proxy.url, [topic], 4) as child:
        held = proxy.hold(requests="END_TRANSACTION", count=None)
        held.wait()
        child.kill()
        held.drop()
    open_bridge()  # of the same application, so that it gets the check-backs
    assert becomes_true(lambda: len(bodies(client, topic)) >= 4)
    assert bodies(client, topic) == numbered(4)


@pytest.mark.full  # waits for the last check-back, and restarts the broker
def test_decided_messages_that_the_broker_gave_up_are_lost_until_a_restart_with_more_checks(
    rocketmq_broker, settings, open_bridge, client, topic, monkeypatch
):
    settings(transactionCheckMax=10)
    application, id, owned = unique("application"), unique("owner"), new_topic(client)
    given_up = [
        left_decided(rocketmq_broker.url, [topic], 3, 2.0, None, application),
        left_decided(rocketmq_broker.url, [owned], 3, 2.0, id, application),
    ]
    with monkeypatch.context() as patched:
        name = lambda checks, transaction, halves: transaction  # noqa: E731
        asked = answer_calls(patched, CheckBackHandler, "_settle_quietly", False, name)
        later = prepared(open_bridge(timeout=2), client)
        # One more check-back was sent for it, and so also for older halves, although no bridge was running.
        assert becomes_true(lambda: asked.count(later) == 11)
        heir = open_bridge(application=application, timeout=2)
        last = prepared(heir, client)
        assert becomes_true(lambda: asked.count(last) == 2)
    assert not {*asked} & {*given_up}
    key = unique_key(topic, TransactionPlace(given_up[0], 0))
    assert client.call(BROKER, read_requests.by_unique_key(DISCARDED_TOPIC, key), LONG) == []
    assert bodies(client, topic) == bodies(client, owned) == []
    open_bridge(transactional_id=id, application=application)
    assert (bodies(client, topic), bodies(client, owned)) == ([], numbered(3))
    assert any("stays unpublished" in each.text for each in broker_of(heir).admin.check(Deadline(LONG)))
    settings(transactionCheckMax=1000)  # the broker also writes this setting to its file
    rocketmq_broker.restart()
    assert becomes_true(lambda: bodies(client, topic) == numbered(3))


def left_decided(*what: Any) -> str:
    """Return a transaction whose owner died after the commit and before it published a message."""
    with Child(writing_kit.commit_some, *what, kill="step:publish/before") as child:
        child.stopped()
    return str(child.told())


def prepared(bridge: Bridge, client: RemotingClient) -> str:
    """Return a prepared transaction, for which the broker is going to send check-backs."""
    return Token.parse(prepare(bridge, new_topic(client), b"1", hold=1)).transaction
