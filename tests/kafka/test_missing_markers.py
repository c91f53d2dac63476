"""Markers that a broker forgot: the plain client's next abort destroys what was committed, ours finishes it first."""

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import wait_until
from txnbridge_conformance.observing import send
from txnbridge_kafka.client.protocol_types import ActiveProducer
from txnbridge_kafka.outcome import hanging_transactions
from txnbridge_kafka.outcome.transaction_state_log import RecordedDecision
from txnbridge_kafka.topics import offsets_partition

import txnbridge
from tests.failing import EACH, answer_calls, fail_call
from tests.java_kit import ask_java
from tests.kafka.kit import LONG, plain_producer, without_epoch_bumps, write
from tests.kafka.test_admin import Held, MakeAdmin, commit_one, end_another, make_admin  # noqa: F401
from txnbridge.errors import AccessDenied, StorageFailed
from txnbridge.spi import Deadline

Hold = Callable[[bool], Held]


@pytest.fixture
def hold(unverified: brokers.Broker, make_admin: MakeAdmin, monkeypatch: pytest.MonkeyPatch) -> Hold:  # noqa: F811
    admin = make_admin(unverified)

    def make(commit: bool) -> Held:
        with monkeypatch.context() as older:
            without_epoch_bumps(older)  # so that the producer can write on
            return Held(unverified, admin, commit)

    return make


def owner_of(held: Held) -> str:
    """The transactional id whose first writer's id this is."""
    return held.id.removesuffix(".0")


def test_the_next_abort_of_the_plain_client_destroys_what_was_committed(hold: Hold) -> None:
    held = hold(True)
    again = plain_producer(held.broker, held.id)
    write(again, held.topic, b"again")
    again.abort_transaction(LONG)
    commit_one(held.broker, held.topic, b"later")
    assert wait_until(lambda: b"later" in held.visible(), LONG)
    assert b"held" not in held.visible()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_transaction_without_its_marker_is_finished_before_our_next_message_in_its_topic(hold: Hold, end: str):
    held = hold(True)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        with bridge.transaction() as txn:
            txn.send(held.topic, b"again")
            if end == "abort":
                txn.abort()
    commit_one(held.broker, held.topic, b"later")
    wanted = [b"before", b"held", *([b"again"] if end == "commit" else []), b"later"]
    assert wait_until(lambda: held.visible() == wanted, LONG)


@pytest.mark.parametrize("again", [False, True], ids=["same-epoch", "opened-again"])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_outcome_of_a_later_transaction_elsewhere_decides_no_missing_marker(hold: Hold, commit: bool, again: bool):
    held = hold(commit)
    end_another(held, not commit, again)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        send(bridge, held.topic, b"again")
    kept = [b"before", b"held"] if commit else []
    assert wait_until(lambda: held.visible() == [*kept, b"again"], LONG)


def test_the_end_of_another_opening_decides_no_missing_marker(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other opening's markers were forgotten too, and it had stored nothing: else its epoch would be known."""
    held = hold(True)
    told = held.admin.requests.describe([held.id], Deadline(LONG))[held.id]
    for _ in range(2):
        held.admin.requests.fence(held.id, 60_000, Deadline(LONG))
    there = frozenset({(held.topic, 0)})
    ends = [
        RecordedDecision(told.pid, told.epoch, True, there),
        RecordedDecision(told.pid, told.epoch + 2, False, there),
    ]
    answer_calls(monkeypatch, hanging_transactions, "recorded_decisions", ends)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        send(bridge, held.topic, b"again")
    assert wait_until(lambda: held.visible() == [b"before", b"held", b"again"], LONG)


def test_each_partition_is_judged_by_the_last_end_there_of_its_own_epoch_or_the_next() -> None:
    partitions = [("topic", number) for number in range(3)]
    held = {where: ActiveProducer(7, 5, 0, 0, 0) for where in partitions}
    ends = [
        RecordedDecision(7, 5, True, frozenset(partitions)),
        RecordedDecision(7, 5, False, frozenset(partitions[1:])),
        RecordedDecision(7, 6, True, frozenset(partitions[2:])),  # its end has raised the epoch
        RecordedDecision(7, 7, False, frozenset(partitions)),
        RecordedDecision(8, 5, False, frozenset(partitions)),
    ]
    assert hanging_transactions.last_decisions(held, ends) == dict(zip(partitions, ends[:3], strict=True))
    assert hanging_transactions.last_decisions(held, ends[3:]) == {}


def test_without_the_right_to_the_coordinators_log_the_coordinators_own_word_counts(hold, monkeypatch):
    held = hold(True)
    denied = AccessDenied("this user may not read it")
    fail_call(monkeypatch, hanging_transactions, "recorded_decisions", denied, EACH)
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        send(bridge, held.topic, b"again")
    assert wait_until(lambda: held.visible() == [b"before", b"held", b"again"], LONG)


def test_a_transaction_of_unknown_outcome_gets_no_marker_and_blocks_its_id(hold: Hold, monkeypatch: pytest.MonkeyPatch):
    held = hold(True)
    held.admin.requests.fence(held.id, 60_000, Deadline(LONG))
    answer_calls(monkeypatch, hanging_transactions, "recorded_decisions", [])
    with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1) as bridge:
        with pytest.raises(StorageFailed, match="no record has its outcome"):
            send(bridge, held.topic, b"never")
    assert held.visible() == [b"before"]


def test_missing_markers_are_written_when_their_topic_is_used_also_by_an_owner_that_comes_later(hold: Hold) -> None:
    held = hold(True)
    for _ in range(2):  # each opens the id, which makes the coordinator forget, and writes elsewhere
        with txnbridge.connect(held.broker.url, transactional_id=owner_of(held), writers=1, create_topics=1) as bridge:
            send(bridge, f"{held.topic}-other", b"1")
        assert held.visible() == [b"before"]
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
