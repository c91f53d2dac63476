"""Tests of half messages: they stay invisible until the local work is done; check-backs end those of a dead process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from txnbridge import Bridge, Capability, Decision, HalfTransaction, Message, Outcome, errors
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import eventually, seen, values
from txnbridge_conformance.plugin import NewTopic, RunChild, proves

COMMIT, ABORT, UNDECIDED = Decision.COMMIT, Decision.ABORT, Decision.UNDECIDED
ENDS = pytest.mark.parametrize("decision", [COMMIT, ABORT], ids=["commit", "abort"])


def undecided(*_: Any) -> Decision:
    return UNDECIDED


@proves(Capability.HALF_MESSAGES)
@ENDS
def test_half_messages_are_published_as_the_work_went_and_not_before(
    bridge: Bridge, new_topic: NewTopic, group: str, decision: Decision
) -> None:
    one, other = new_topic(), new_topic(partitions=2)
    before: list[object] = []
    timestamp = 1_234_567_890_123 if bridge.capabilities[Capability.TIMESTAMPS] else None

    def execute(txn: HalfTransaction, arg: Any) -> Decision:
        before.extend(values(seen(bridge, one)) + values(seen(bridge, other)) + [arg])
        return decision

    with bridge.half_messages(group, execute=execute, check=undecided) as halves:
        with halves.transaction("given") as txn:
            txn.send(one, b"1", key="key", headers={"name": "value"}, timestamp=timestamp)
            txn.send(one, b"2", key="key")
            for number in (0, 1):
                txn.send(other, None, key="key", partition=number)
    assert before == ["given"]
    assert txn.outcome is (Outcome.COMMITTED if decision is COMMIT else Outcome.ABORTED)
    assert values(seen(bridge, one)) == ([b"1", b"2"] if decision is COMMIT else [])
    there = sorted((m.partition, m.value) for m in seen(bridge, other))
    assert there == ([(0, None), (1, None)] if decision is COMMIT else [])
    if decision is COMMIT:
        first = seen(bridge, one)[0]
        assert (first.key, first.headers["name"]) == (b"key", "value")
        assert timestamp in (first.timestamp, None)


@proves(Capability.HALF_MESSAGES)
@ENDS
def test_half_messages_of_a_killed_process_end_as_their_application_says(
    run: RunChild, txnbridge_url: str, bridge: Bridge, new_topic: NewTopic, group: str, decision: Decision
) -> None:
    one, other = new_topic(), new_topic()
    dying = run(programs.leave_half, txnbridge_url, group, [one, other], kill="half.end/before")
    transaction = dying.told()
    dying.stopped()
    asked: list[tuple[str, list[tuple[str, object]]]] = []

    def check(id: str, messages: Sequence[Message]) -> Decision:
        asked.append((id, [(m.topic, m.value) for m in messages]))
        return decision

    opposite = ABORT if decision is COMMIT else COMMIT
    with bridge.resolver(f"{group}-too", check=lambda *_: opposite), bridge.resolver(group, check=check) as resolver:
        eventually(lambda: resolver.stats.committed + resolver.stats.aborted, "somebody is asked")
    assert asked[-1] == (transaction, [(one, b"1"), (other, b"2")])
    assert values(seen(bridge, one)) == ([b"1"] if decision is COMMIT else [])
    assert values(seen(bridge, other)) == ([b"2"] if decision is COMMIT else [])


@proves(Capability.HALF_MESSAGES)
def test_an_undecided_half_message_is_asked_about_again(bridge: Bridge, topic: str, group: str) -> None:
    answers = [UNDECIDED, COMMIT]
    with bridge.half_messages(group, execute=undecided, check=lambda *_: answers.pop(0)) as halves:
        with halves.transaction(timeout=programs.SHORT) as txn:
            txn.send(topic, b"1")
        eventually(lambda: len(answers) < 2, "it is asked about")
        eventually(lambda: not answers, "it is asked about again")  # brokers wait half a minute by default
    assert txn.outcome is Outcome.UNKNOWN
    eventually(lambda: values(bridge.read(topic, 10)) == [b"1"], "it is published")


@proves(Capability.HALF_MESSAGES)
def test_of_two_answers_to_a_half_message_the_first_counts(bridge: Bridge, topic: str, group: str) -> None:
    def wait_for_other(*_: Any) -> Decision:
        halves.close()  # else the broker might ask this one each time
        eventually(lambda: resolver.stats.aborted, "the other answer counts")
        return COMMIT

    with bridge.resolver(group, check=lambda *_: ABORT) as resolver:
        with bridge.half_messages(group, execute=wait_for_other, check=undecided) as halves:
            with pytest.raises(errors.TransactionAborted), halves.transaction(timeout=programs.SHORT) as txn:
                txn.send(topic, b"never")
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []


@proves(Capability.HALF_MESSAGES)
def test_no_work_is_done_for_half_messages_that_cannot_be_stored(bridge: Bridge, topic: str, group: str) -> None:
    done: list[str] = []

    def execute(txn: HalfTransaction, _: Any) -> Decision:
        done.append(txn.id)
        return COMMIT

    with bridge.half_messages(group, execute=execute, check=undecided) as halves:
        with pytest.raises(errors.TxnBridgeError), halves.transaction() as txn:
            txn.send(topic, b"never")
            txn.send(topic, b"never", partition=99)
    assert (done, txn.outcome) == ([], Outcome.ABORTED)
    assert values(seen(bridge, topic)) == []
