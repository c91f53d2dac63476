"""Tests of the decision log: the first decision for an id counts for every process and for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from txnbridge import Bridge, Capability, Decision, Fenced
from txnbridge_conformance.faults import programs
from txnbridge_conformance.plugin import Connect, RunChild, proves


@pytest.fixture
def log(unique: Callable[[str], str]) -> str:
    """Return the name of a decision log that no other test uses."""
    return unique("log")


@proves(Capability.DECISION_LOG)
def test_the_first_claim_counts_for_everybody(connect: Connect, log: str) -> None:
    one, two, three = (connect().decisions(log) for _ in range(3))
    assert three.read("order").claim is None  # reading decides nothing
    first = one.claim("order", Decision.COMMIT, {"lot": 7})
    second = two.claim("order", Decision.ABORT, {"lot": 8})
    assert (first.decision, first.mine) == (Decision.COMMIT, True)
    assert (second.decision, second.mine, second.data) == (Decision.COMMIT, False, {"lot": 7})
    read = three.read("order").claim
    assert read is not None and (read.decision, read.data) == (Decision.COMMIT, {"lot": 7})


@proves(Capability.DECISION_LOG)
def test_ids_and_logs_are_apart(bridge: Bridge, log: str) -> None:
    decisions, others = bridge.decisions(log), bridge.decisions(f"{log}-too")
    assert decisions.claim(("query", 1), Decision.COMMIT).decision is Decision.COMMIT
    assert decisions.claim(("query", 2), Decision.ABORT).decision is Decision.ABORT
    assert others.claim(("query", 1), Decision.ABORT).decision is Decision.ABORT


@proves(Capability.DECISION_LOG)
def test_processes_that_race_agree_on_every_id(run: RunChild, txnbridge_url: str, bridge: Bridge, log: str) -> None:
    racers = [run(programs.claim_all, txnbridge_url, log, 60, decision) for decision in ("commit", "abort", "commit")]
    answers = [racer.result() for racer in racers]
    assert answers[0] == answers[1] == answers[2]
    decisions = bridge.decisions(log)
    claims = [decisions.read(("race", number)).claim for number in range(60)]
    assert [claim and claim.decision.value for claim in claims] == answers[0]


@proves(Capability.DECISION_LOG)
def test_a_decision_survives_those_who_made_it(run: RunChild, txnbridge_url: str, bridge: Bridge, log: str) -> None:
    dying = run(programs.claim_all, txnbridge_url, log, 5, "commit", kill="bridge.close/before")
    dying.stopped()
    assert bridge.decisions(log).claim(("race", 4), Decision.ABORT).decision is Decision.COMMIT


@proves(Capability.DECISION_LOG)
def test_an_older_owner_of_an_id_decides_nothing_any_more(connect: Connect, log: str) -> None:
    older, newer = connect().decisions(log), connect().decisions(log)
    before = older.open("query")
    assert older.claim(("query", 1), Decision.COMMIT, opening=before).decision is Decision.COMMIT
    now = newer.open("query")
    with pytest.raises(Fenced):
        older.claim(("query", 2), Decision.COMMIT, opening=before)
    assert newer.claim(("query", 2), Decision.ABORT, opening=now).decision is Decision.ABORT
    read = newer.read(("query", 1)).claim
    assert read is not None and read.decision is Decision.COMMIT


@proves(Capability.DECISION_LOG)
def test_a_batch_marked_as_done_is_known_to_be_done(connect: Connect, log: str) -> None:
    decisions = connect().decisions(log)
    for number in range(3):
        decisions.claim(("batch", number), Decision.COMMIT)
    decisions.done("batch", 1)
    other = connect().decisions(log)
    assert [other.read(("batch", number)).done for number in range(3)] == [True, True, False]
