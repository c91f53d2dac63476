"""A topic that is terminated while a transaction is open that has named it: the coordinator never ends that one."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.error import HTTPError

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.observing import eventually, send, take
from txnbridge_pulsar.client import PulsarClient, RequestTimedOut
from txnbridge_pulsar.outcome.outcome import end_prepared

from tests.pulsar import writing_kit
from tests.pulsar.client_kit import admin, path_of
from tests.pulsar.test_opening import abandon, leave_open
from txnbridge import BrokerUnavailable, DeliveryFailed, Outcome, OutcomeUnknown, TokenState
from txnbridge.spi import Deadline

Terminate = Callable[[str], None]


@pytest.fixture
def terminate(pulsar_broker: brokers.Pulsar) -> Iterator[Terminate]:
    """Terminate a topic by its short name. In the end it is deleted, and so what has named it ends."""
    writing_kit.end_all(pulsar_broker)
    done: list[str] = []

    def one(topic: str) -> None:
        done.append(topic)
        admin(pulsar_broker, "POST", f"{path_of(writing_kit.concrete(topic))}/terminate")

    yield one
    for topic in done:
        with suppress(HTTPError):  # the test has deleted it
            delete(pulsar_broker, topic)


def delete(broker: brokers.Pulsar, topic: str) -> None:
    """The partition alone, which the broker makes anew when the coordinator asks for it."""
    admin(broker, "DELETE", f"{path_of(writing_kit.concrete(topic))}?force=true")


def test_an_id_is_opened_although_a_topic_of_an_open_transaction_was_terminated(open_bridge, client, terminate):
    id, group = writing_kit.unique("owner"), writing_kit.unique("group")
    older = open_bridge(transactional_id=id, timeout=20)
    source, topic, other = (writing_kit.new_topic(older) for _ in range(3))
    send(older, source, b"to be processed")
    left = older.transaction()
    with older.consumer(source, group) as consumer:
        left.ack(take(consumer, 1))
        left.send(topic, b"never seen")
        left.send(other, b"never seen")
        writing_kit.flush(left)
        terminate(topic)
        for value in (b"1", b"2"):
            with open_bridge(transactional_id=id, timeout=20) as newer:
                send(newer, other, value)
        abandon(left)
    assert writing_kit.read_all(client, writing_kit.concrete(other)) == [b"1", b"2"]
    with open_bridge() as onlooker, onlooker.consumer(source, group) as consumer, onlooker.transaction() as again:
        again.ack(take(consumer, 1))  # what the aborted transaction had acknowledged has come again


def test_a_writer_goes_on_when_it_has_aborted_over_a_topic_that_was_terminated(open_bridge, client, terminate):
    bridge = open_bridge(timeout=20)
    topic, other = writing_kit.new_topic(bridge), writing_kit.new_topic(bridge)
    txn, _ = leave_open(bridge, topic)
    terminate(topic)
    txn.abort()
    send(bridge, other, b"1")
    assert writing_kit.read_all(client, writing_kit.concrete(other)) == [b"1"]


def test_a_topic_that_is_terminated_between_two_transactions_is_not_named_in_the_second(open_bridge, client, terminate):
    """A writer guesses that a transaction writes where the last one did."""
    bridge = open_bridge(timeout=20)
    topic, other = writing_kit.new_topic(bridge), writing_kit.new_topic(bridge)
    with bridge.transaction() as txn:
        writer = writing_kit.writer_of(txn)
        txn.send(topic, b"1")
    terminate(topic)
    eventually(lambda: not writing_kit.topic_producer(writer, topic).is_open, "the writer is told")
    send(bridge, other, b"1")
    with pytest.raises(DeliveryFailed, match="TERMINATED"):
        send(bridge, topic, b"2")
    send(bridge, other, b"2")
    assert writing_kit.read_all(client, writing_kit.concrete(other)) == [b"1", b"2"]


def test_a_prepared_transaction_over_a_topic_that_was_terminated_is_aborted_and_said_to_be(open_bridge, terminate):
    bridge = open_bridge(timeout=20)
    topic = writing_kit.new_topic(bridge)
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"never seen")
    terminate(topic)
    token = str(txn.token)
    assert bridge.abort(token) is Outcome.ABORTED
    assert bridge.status(token).state is TokenState.ABORTED
    assert bridge.commit(token) is Outcome.ABORTED


def test_a_commit_that_a_terminated_topic_keeps_from_ending_is_not_taken_for_ended(
    pulsar_broker: brokers.Pulsar, open_bridge: writing_kit.Connect, client: PulsarClient, terminate: Terminate
) -> None:
    """The messages on the terminated topic are lost, and an administrator has to allow that by deleting the topic."""
    id = writing_kit.unique("owner")
    older = open_bridge(transactional_id=id, timeout=20, writers=2)
    topic, other = writing_kit.new_topic(older), writing_kit.new_topic(older)
    txn, number = leave_open(older, topic)
    txn.send(other, b"1")
    writing_kit.flush(txn)
    with older.transaction(prepare=True) as prepared:
        prepared.send(topic, b"never seen")
    terminate(topic)
    with pytest.raises(RequestTimedOut):
        client.transactions.end(number, True, 3)
    assert prepared.token is not None
    with pytest.raises(OutcomeUnknown, match=f"{topic}.*delete"):
        end_prepared(writing_kit.cluster_of(older), prepared.token, True, Deadline(20))
    with pytest.raises(BrokerUnavailable, match=f"{topic}.*delete"):
        open_bridge(transactional_id=id, timeout=20)
    delete(pulsar_broker, topic)
    open_bridge(transactional_id=id)
    assert writing_kit.read_all(client, writing_kit.concrete(other)) == [b"1"]
    abandon(txn)
