"""Markers that a broker forgot: the plain client's next abort destroys what was committed, ours finishes it first."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.looking import send
from txnbridge_kafka.topics import offsets_partition

import txnbridge
from tests.kafka.java_kit import ask_java
from tests.kafka.test_admin import LONG, Held, MakeAdmin, commit_one, make_admin, producer_of, write  # noqa: F401

Hold = Callable[[bool], Held]


@pytest.fixture(scope="module")
def unverified() -> Iterator[brokers.Broker]:
    """A broker that takes a message of a transaction that has ended: so what a forgotten marker leaves can be made."""
    with brokers.kafka(container=False, settings={"transaction.partition.verification.enable": "false"}) as broker:
        yield broker


@pytest.fixture
def hold(unverified: brokers.Broker, make_admin: MakeAdmin, monkeypatch: pytest.MonkeyPatch) -> Hold:  # noqa: F811
    admin = make_admin(unverified)

    def make(commit: bool) -> Held:
        with monkeypatch.context() as older:
            # The older request leaves the epoch as it is, so that the producer can write on.
            older.setattr("txnbridge_kafka.requests._EPOCH_BUMPS", 99)
            return Held(unverified, admin, commit)

    return make


def owner_of(held: Held) -> str:
    """The transactional id whose first writer's id this is."""
    return held.id.removesuffix(".0")


def test_the_next_abort_of_the_plain_client_destroys_what_was_committed(hold: Hold) -> None:
    held = hold(True)
    again = producer_of(held.broker, held.id)
    write(again, held.topic, b"again")
    again.abort_transaction(LONG)
    commit_one(held.broker, held.topic, b"later")
    assert wait_until(lambda: b"later" in held.visible(), LONG)
    assert b"held" not in held.visible()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_before_our_next_message_there_it_is_finished_as_it_was_decided(hold: Hold, end: str) -> None:
    held = hold(True)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        with bridge.transaction() as txn:
            txn.send(held.topic, b"again")
            if end == "abort":
                txn.abort()
    commit_one(held.broker, held.topic, b"later")
    wanted = [b"before", b"held", *([b"again"] if end == "commit" else []), b"later"]
    assert wait_until(lambda: held.visible() == wanted, LONG)


def test_what_was_aborted_stays_so(hold: Hold) -> None:
    held = hold(False)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        send(bridge, held.topic, b"again")
    assert wait_until(lambda: held.visible() == [b"again"], LONG)


def test_another_topic_is_not_touched_and_the_first_is_mended_when_it_is_used(hold: Hold) -> None:
    held = hold(True)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1, create_topics=1) as bridge:
        send(bridge, f"{held.topic}-other", b"1")
        assert held.visible() == [b"before"]
        with bridge.transaction() as txn:
            txn.send(held.topic, b"never")
            txn.abort()
    assert wait_until(lambda: held.visible() == [b"before", b"held"], LONG)


def test_an_owner_that_comes_later_still_knows_how_it_was_decided(hold: Hold) -> None:
    held = hold(True)
    for _ in range(2):  # each opens the id, which makes the coordinator forget, and writes elsewhere
        with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1, create_topics=1) as bridge:
            send(bridge, f"{held.topic}-other", b"1")
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        with bridge.transaction() as txn:
            txn.send(held.topic, b"never")
            txn.abort()
    assert wait_until(lambda: held.visible() == [b"before", b"held"], LONG)


PARTITIONS_OF_JAVA = """
var in = new BufferedReader(new InputStreamReader(System.in));
for (String line; (line = in.readLine()) != null; ) System.out.println(
    Utils.abs(new String(Base64.getDecoder().decode(line), "UTF-8").hashCode()) % 50);
"""


def test_a_groups_positions_are_looked_for_where_kafka_keeps_them(tmp_path: Path) -> None:
    # The second one's hash is Java's smallest number, which has no positive counterpart.
    groups = ["a", "polygenelubricants", "Zoë", "😀", *(f"group-{number}" for number in range(200))]
    sent = [base64.b64encode(group.encode()).decode() for group in groups]
    told = ask_java(tmp_path, "org.apache.kafka.common.utils.Utils", PARTITIONS_OF_JAVA, sent)
    assert [offsets_partition(group, 50) for group in groups] == [("__consumer_offsets", int(each)) for each in told]
