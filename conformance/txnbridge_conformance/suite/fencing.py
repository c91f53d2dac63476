"""Tests of fencing: a process that opens a transactional id fences the older owner, and no other id."""

from __future__ import annotations

from contextlib import suppress

import pytest

from txnbridge import Bridge, Capability, Fenced, Outcome, TokenState
from txnbridge.testing import Point, Unvisited
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import seen, send, values
from txnbridge_conformance.plugin import Connect, Much, RunChild, needs, proves


@proves(Capability.FENCING)
def test_a_shut_out_owner_stays_shut_out(connect: Connect, topic: str, owner: str) -> None:
    older = connect(transactional_id=owner)
    newer = connect(transactional_id=owner)
    for number in range(3):
        with pytest.raises(Fenced):
            send(older, topic, b"zombie")
        send(newer, topic, b"%d" % number)
    assert values(seen(newer, topic)) == [b"0", b"1", b"2"]


@proves(Capability.FENCING)
def test_opening_an_id_aborts_what_its_older_owner_left_open(
    connect: Connect, topic: str, owner: str, much: Much
) -> None:
    older = connect(transactional_id=owner, timeout=600)  # no test waits so long for the time-out to abort it
    with pytest.raises(Fenced):
        with older.transaction() as txn:
            txn.send_many(topic, much(b"left open"))
            newer = connect(transactional_id=owner)
            assert values(seen(newer, topic)) == []
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(newer, topic)) == []


@proves(Capability.FENCING)
def test_every_writer_of_an_older_owner_is_shut_out(connect: Connect, topic: str, owner: str) -> None:
    older = connect(transactional_id=owner, writers=3)
    open_ones = [older.transaction() for _ in range(3)]
    for txn in open_ones:
        txn.send(topic, b"zombie")
    newer = connect(transactional_id=owner, writers=1)
    for txn in open_ones:
        with pytest.raises(Fenced):
            txn.commit()
    assert values(seen(newer, topic)) == []


@proves(Capability.FENCING)
@needs(Capability.PREPARE)
def test_an_owner_that_was_shut_out_cannot_prepare(connect: Connect, topic: str, owner: str) -> None:
    older = connect(transactional_id=owner)
    with pytest.raises(Fenced):
        with older.transaction(prepare=True) as txn:
            txn.send(topic, b"zombie")
            newer = connect(transactional_id=owner)
    assert txn.outcome is Outcome.ABORTED
    assert values(seen(newer, topic)) == []


@needs(Capability.FENCING, Capability.PREPARE, Capability.RESOLVE_ANYWHERE)
def test_a_prepared_transaction_survives_a_new_owner(connect: Connect, topic: str, owner: str) -> None:
    with connect(transactional_id=owner).transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
    newer = connect(transactional_id=owner)
    assert newer.status(str(txn.token)).state is TokenState.PREPARED
    assert newer.commit(str(txn.token)) is Outcome.COMMITTED
    assert values(seen(newer, topic)) == [b"prepared"]


@proves(Capability.FENCING)
def test_wherever_an_owner_sleeps_through_a_takeover_nothing_of_it_appears_later(
    run: RunChild, txnbridge_url: str, connect: Connect, topic: str, owner: str
) -> None:
    visited: set[Point] = set()
    while Point("bridge.close/after", 1) not in visited:
        value = b"sleeper %d" % len(visited)
        sleeper = run(programs.own_and_commit, txnbridge_url, topic, owner, value, pause=Unvisited(frozenset(visited)))
        visited.add(point := sleeper.stopped())
        if Point("bridge.open/after", 1) not in visited:
            continue  # a process paused before it opened the id would be the newer owner when it resumes
        newer = connect(transactional_id=owner)
        before = values(seen(newer, topic)).count(value)
        sleeper.resume()
        result = sleeper.result()
        assert values(seen(newer, topic)).count(value) == before, f"it slept at {point}"
        assert (result == "committed") == bool(before), f"it slept at {point}"


@proves(Capability.FENCING)
def test_of_two_owners_that_race_for_an_id_one_commits(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, owner: str
) -> None:
    pause = "transaction.begin/before"
    racers = [run(programs.own_and_commit, txnbridge_url, topic, owner, b"%d" % n, pause=pause) for n in range(2)]
    opened = []
    for racer in racers:
        with suppress(AssertionError):  # it was fenced when it opened the id, and has ended
            racer.stopped()
            opened.append(racer)
    for racer in opened:
        racer.resume()
    assert sorted(racer.result() for racer in racers) == ["Fenced", "committed"]
    assert len(seen(bridge, topic)) == 1


def test_another_id_is_left_alone(connect: Connect, topic: str, owner: str) -> None:
    one = connect(transactional_id=owner)
    with one.transaction() as txn:
        txn.send(topic, b"one")
        send(connect(transactional_id=f"{owner}-other"), topic, b"other")
        send(connect(), topic, b"nobody's")
    assert sorted(m.value for m in seen(one, topic)) == [b"nobody's", b"one", b"other"]


def test_an_id_is_opened_again_after_its_owner_closed_or_died(
    run: RunChild, txnbridge_url: str, connect: Connect, topic: str, owner: str
) -> None:
    run(programs.commit_one, txnbridge_url, topic, b"closed", owner).result()
    run(programs.commit_one, txnbridge_url, topic, b"died", owner, kill="commit/before").stopped()
    last = connect(transactional_id=owner)
    send(last, topic, b"last")
    assert values(seen(last, topic)) == [b"closed", b"last"]
