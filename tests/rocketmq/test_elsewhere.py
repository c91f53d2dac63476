"""Tests of RocketMQ's transactions with the decision log on another broker or in a database."""

from collections.abc import Callable
from pathlib import Path

import pytest
from txnbridge_conformance import brokers, faults
from txnbridge_conformance.observing import take
from txnbridge_rocketmq.client.client import RemotingClient

from tests.core.reading_kit import SOON
from tests.log_contract import place_of
from tests.rocketmq import writing_kit
from tests.rocketmq.kit import becomes_true, bodies
from tests.rocketmq.reading_kit import new_topic, publish, unique
from txnbridge import Bridge, Outcome, TokenState
from txnbridge.errors import InvalidToken, PositionLost
from txnbridge.testing import Child

Open = Callable[..., Bridge]


@pytest.fixture(params=["sqlite", "embedded", "kafka", pytest.param("pulsar", marks=pytest.mark.full)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a value for `decision_log`."""
    return str(place_of(request.param, request, tmp_path))


@pytest.fixture
def application() -> str:
    """Return the name of an application of its own: no other test's bridge could read its decisions."""
    return unique("elsewhere")


@pytest.fixture
def bridge(open_bridge: Open, application: str, place: str) -> Bridge:
    return open_bridge(application=application, decision_log=place)


def test_acknowledgements_and_messages_are_decided_together_in_a_log_elsewhere(
    open_bridge: Open, bridge: Bridge, client: RemotingClient, topic: str, application: str
) -> None:
    results = new_topic(client)
    publish(client, topic, b"1", b"2")
    group = unique("group")
    with bridge.consumer(topic, group=group) as consumer:
        for message in take(consumer, 2):
            with bridge.transaction() as txn:
                txn.send(results, message.value + b"0")
                txn.ack([message])
    with bridge.consumer(topic, group=group) as consumer:
        assert not consumer.poll(timeout=1)
    assert bodies(client, results) == [b"10", b"20"]
    # A reader with another decision log neither skips nor repeats messages of which it knows no acknowledgement.
    with open_bridge(application=application).consumer(topic, group=group) as consumer:
        with pytest.raises(PositionLost, match="not in this application's decision log"):
            consumer.poll(timeout=SOON)


def test_a_token_is_committed_from_another_process_that_decides_there_too(
    rocketmq_broker, open_bridge, bridge, client, topic, application, place
):
    with Child(
        writing_kit.prepare_some, rocketmq_broker.url, [topic], 3, 60.0, application, place, kill="status/before"
    ) as child:
        token = child.told()
        child.stopped()
    with pytest.raises(InvalidToken, match="connect with the same decision_log"):
        open_bridge(application=application).commit(token)
    assert bridge.status(token).state is TokenState.PREPARED
    assert bridge.commit(token) is Outcome.COMMITTED
    assert bodies(client, topic) == [b"0", b"1", b"2"]


def test_a_dead_owners_decision_in_a_log_elsewhere_is_published_by_others(
    rocketmq_broker: brokers.RocketMQ, bridge: Bridge, client: RemotingClient, topic: str, application: str, place: str
) -> None:
    """The broker sends check-backs to the application's other members, which read the decision log there."""
    with faults.proxy(rocketmq_broker) as proxy:
        with Child(writing_kit.commit_some, proxy.url, [topic], 3, 30, None, application, place) as child:
            held = proxy.hold(requests="END_TRANSACTION", count=None)
            held.wait()
            child.kill()
        held.drop()
    assert becomes_true(lambda: len(bodies(client, topic)) >= 3)
    assert bodies(client, topic) == [b"0", b"1", b"2"]
