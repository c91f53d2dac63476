"""Acknowledgements, which our own requests bring: no broker that restarts makes them hang, or stops a processor."""

import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from confluent_kafka import Consumer
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers.plugin import kafka_or_skip
from txnbridge_conformance.observing import eventually, seen, send, take, values
from txnbridge_kafka.client.librdkafka import GroupMembership, membership_of

import txnbridge
from tests.core.processor_kit import thread_of
from tests.in_time import within
from txnbridge import Event, Outcome, State, errors
from txnbridge.testing import listening

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
ACKS = "step:acks"
RESTARTS = 3
RARE = ["transaction.begin", "message.send", ACKS, "step:commit"]


@given(group=NAMES, generation=st.integers(-1, 2**31 - 1), name=NAMES, instance=st.none() | NAMES)
def test_a_membership_is_read_from_the_clients_metadata(group: str, generation: int, name: str, instance: str | None):
    behind = b"\1" if instance is None else b"\0" + instance.encode() + b"\0"
    told = b"CGMDv2:" + struct.pack("<i", generation) + group.encode() + b"\0" + name.encode() + b"\0" + behind
    assert membership_of(told) == GroupMembership(group, generation, name, instance)


@given(st.binary() | st.binary().map(lambda rest: b"CGMDv2:" + rest))
def test_a_group_membership_that_cannot_be_parsed_is_told_as_another_version(told: bytes) -> None:
    with suppress(errors.BackendMissing):
        membership_of(told)


@pytest.mark.parametrize("instance", [None, "one"])
def test_the_client_that_is_installed_is_understood(instance: str | None) -> None:
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}
    client = Consumer(settings if instance is None else {**settings, "group.instance.id": instance})
    assert membership_of(client.consumer_group_metadata()) == GroupMembership("g", -1, "", instance)
    client.close()


@pytest.fixture(scope="module")
def mortal() -> Iterator[brokers.Broker]:
    """Killed and started again by these tests alone."""
    with kafka_or_skip(container=False) as broker:
        yield broker


@pytest.fixture(scope="module")
def txnbridge_url(mortal: brokers.Broker) -> str:
    return f"{mortal.url}?session.timeout.ms=6000&heartbeat.interval.ms=1000"


def readable(bridge: txnbridge.Bridge, topic: str) -> list[txnbridge.Message]:
    with suppress(errors.BrokerUnavailable):
        return bridge.read(topic, 1000)
    return []


def test_acknowledgements_alone_are_committed_and_aborted(bridge: txnbridge.Bridge, topic: str, group: str) -> None:
    send(bridge, topic, b"1", b"2")
    with bridge.consumer(topic, group) as consumer:
        with bridge.transaction() as txn:
            txn.ack(take(consumer, 2))
            raise errors.Abort
        (first, second) = take(consumer, 2)
        for message in (first, second):
            with bridge.transaction() as txn:
                txn.ack(message)
            assert txn.outcome is Outcome.COMMITTED
        # The group's position moves behind the answer to the commit.
        eventually(lambda: consumer.lag() == {(topic, 0): 0}, "the group has no lag")


@pytest.mark.parametrize("sends", [True, False], ids=["with messages", "alone"])
def test_a_commit_ends_in_time_when_the_broker_was_restarted_behind_the_poll(bridge, mortal, new_topic, group, sends):
    source, target = new_topic(), new_topic()
    send(bridge, source, *[b"%d" % number for number in range(5)])
    ended: list[State] = []
    with bridge.consumer(source, group) as consumer:
        while len(ended) < RESTARTS or consumer.lag().get((source, 0), 1):
            with suppress(errors.TransactionAborted, errors.BrokerUnavailable, errors.OutcomeUnknown):
                batch = consumer.poll(1)
                if not batch:
                    continue
                if len(ended) < RESTARTS:
                    mortal.restart()
                txn = bridge.transaction(timeout=20)
                try:
                    with txn:
                        if sends:
                            txn.send(target, batch[0].value)
                        txn.ack(batch)
                finally:
                    ended.append(txn.state)
    assert State.COMMITTED in ended
    assert values(seen(bridge, target)) == ([b"%d" % number for number in range(5)] if sends else [])


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *[("reader.poll", "after"), (ACKS, "before"), ("step:commit", "before")],
        *[pytest.param(step, "after", marks=pytest.mark.full) for step in RARE],
    ],
)
def test_a_processor_goes_on_at_whatever_step_the_broker_is_restarted(
    bridge, mortal, new_topic, txnbridge_url, group, name, phase
):
    source, target = new_topic(), new_topic()
    expected = [b"%d" % number for number in range(30)]
    send(bridge, source, *expected)
    times = [10, 5]  # of these events, the ones at which it is killed

    def kill_in_time(event: Event) -> None:
        if (event.name, event.phase) == (name, phase) and times:
            times[-1] -= 1
            if not times[-1]:
                times.pop()
                mortal.restart()

    with listening(kill_in_time), txnbridge.connect(txnbridge_url, writers=1) as own:
        copy = own.processor(
            source, group=group, each=lambda m, txn: txn.send(target, m.value), max_messages=2, backoff=(0.1, 1.0)
        )
        with copy:
            eventually(lambda: len(readable(bridge, target)) == 30, "all are passed on")
    assert not times
    assert values(seen(bridge, target)) == expected


def test_a_processor_ends_within_its_time_when_the_broker_is_gone(bridge, mortal, new_topic, txnbridge_url, group):
    """The processor's error says that the messages of its open transaction come again."""
    source, target = new_topic(), new_topic()
    send(bridge, source, b"1")
    killed: list[Event] = []

    def kill(event: Event) -> None:
        if event.name == ACKS and event.phase == "before" and not killed:
            killed.append(event)
            mortal.kill()

    try:
        with listening(kill), txnbridge.connect(txnbridge_url, writers=1) as own:
            processor = own.processor(
                source, group=group, each=lambda m, txn: txn.send(target, m.value), timeout=60, stop_timeout=20
            )
            with within(20), pytest.raises(errors.DeadlineExceeded, match="will be redelivered"), processor:
                eventually(lambda: bool(killed), "the broker is gone")
            eventually(lambda: not thread_of(processor).is_alive(), "its thread ends")
    finally:
        mortal.start()
    with bridge.processor(source, group=group, each=lambda m, txn: txn.send(target, m.value)):
        eventually(lambda: bool(readable(bridge, target)), "it is passed on")
    assert values(seen(bridge, target)) == [b"1"]
