"""Tests of prepared transactions: durable, invisible, and ended by any process that has the token."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest

from txnbridge import Bridge, Capability, InvalidState, InvalidToken, Outcome, OutcomeUnknown, State, Token, TokenState
from txnbridge.testing import next_commit
from txnbridge_conformance.faults import programs
from txnbridge_conformance.observing import eventually, seen, send, values
from txnbridge_conformance.plugin import Connect, NewTopic, RunChild, needs, proves


def prepare(bridge: Bridge, topic: str, *contents: bytes, hold: float | None = None) -> str:
    """Prepare a transaction, and return its token as text."""
    with bridge.transaction(prepare=True, hold=hold) as txn:
        for value in contents:
            txn.send(topic, value)
    return str(txn.token)


@proves(Capability.PREPARE)
def test_a_prepared_transaction_says_so_and_has_a_token(bridge: Bridge, topic: str) -> None:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"prepared")
        assert txn.token is None
    assert (txn.state, txn.outcome) == (State.PREPARED, None)
    assert txn.token is not None and txn.token.prepared
    assert bridge.abort(txn.token) is Outcome.ABORTED


@proves(Capability.PREPARE)
@needs(Capability.RESOLVE_ANYWHERE)
def test_a_prepared_message_is_not_seen_until_it_is_committed(bridge: Bridge, topic: str) -> None:
    send(bridge, topic, b"before")
    token = prepare(bridge, topic, b"prepared")
    send(bridge, topic, b"behind")
    assert b"prepared" not in values(bridge.read(topic, limit=10))
    assert bridge.commit(token) is Outcome.COMMITTED
    assert sorted(m.value for m in seen(bridge, topic)) == [b"before", b"behind", b"prepared"]


@proves(Capability.PREPARE)
def test_an_exception_before_the_end_prepares_nothing(bridge: Bridge, topic: str) -> None:
    with pytest.raises(ZeroDivisionError):
        with bridge.transaction(prepare=True) as txn:
            txn.send(topic, b"never")
            1 / 0  # noqa: B018
    assert (txn.outcome, txn.token) == (Outcome.ABORTED, None)
    assert values(seen(bridge, topic)) == []


@proves(Capability.PREPARE)
def test_a_transaction_to_be_prepared_is_not_committed_by_itself(bridge: Bridge, topic: str) -> None:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"never")
        with pytest.raises(InvalidState, match="token"):
            txn.commit()
        txn.abort()
    assert values(seen(bridge, topic)) == []


@proves(Capability.PREPARE)
@needs(Capability.ATOMIC_TOPICS, Capability.RESOLVE_ANYWHERE)
def test_a_token_commits_all_topics_and_partitions(bridge: Bridge, new_topic: NewTopic) -> None:
    one, two = new_topic(), new_topic(partitions=3)
    with bridge.transaction(prepare=True) as txn:
        txn.send(one, b"0")
        for number in range(3):
            txn.send(two, b"%d" % number, partition=number)
    assert bridge.commit(str(txn.token)) is Outcome.COMMITTED
    assert values(seen(bridge, one)) == [b"0"]
    assert sorted(m.value for m in seen(bridge, two)) == [b"0", b"1", b"2"]


@proves(Capability.RESOLVE_ANYWHERE)
@pytest.mark.parametrize(("decision", "outcome"), [("commit", "committed"), ("abort", "aborted")])
def test_another_process_ends_what_a_killed_one_prepared(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, decision: str, outcome: str
) -> None:
    dying = run(programs.prepare_one, txnbridge_url, topic, b"prepared", kill="status/before")
    token = dying.told()
    dying.stopped()
    assert run(programs.end_by_token, txnbridge_url, token, decision).result() == outcome
    assert values(seen(bridge, topic)) == ([b"prepared"] if decision == "commit" else [])


@proves(Capability.RESOLVE_ANYWHERE)
def test_ending_twice_changes_nothing_and_tells_the_truth(connect: Connect, bridge: Bridge, topic: str) -> None:
    with connect() as closing:
        kept, dropped = prepare(closing, topic, b"kept"), prepare(closing, topic, b"dropped")
    other = connect()
    assert [bridge.commit(kept), other.commit(kept), other.abort(kept)] == [Outcome.COMMITTED] * 3
    assert [bridge.abort(dropped), other.abort(dropped), other.commit(dropped)] == [Outcome.ABORTED] * 3
    assert values(seen(bridge, topic)) == [b"kept"]


@proves(Capability.RESOLVE_ANYWHERE)
def test_of_two_processes_that_end_one_transaction_both_hear_the_same(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str
) -> None:
    kept: list[bytes] = []
    for number in range(5):
        value = b"%d" % number
        token = prepare(bridge, topic, value)
        rivals = [
            run(programs.end_by_token, txnbridge_url, token, decision, pause="resolve/before")
            for decision in ("commit", "abort")
        ]
        for rival in rivals:
            rival.stopped()
        for rival in rivals:
            rival.resume()
        (heard,) = {rival.result() for rival in rivals}
        kept += [value] if heard == "committed" else []
    assert values(seen(bridge, topic)) == kept


@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE)
def test_many_prepared_transactions_wait_side_by_side(connect: Connect, topic: str, owner: str) -> None:
    bridge = connect(transactional_id=owner, writers=2)
    tokens = [prepare(bridge, topic, b"%d" % number) for number in range(8)]
    for number in (5, 0, 7, 2):
        assert bridge.commit(tokens[number]) is Outcome.COMMITTED
    for number in (1, 3, 4, 6):
        assert bridge.abort(tokens[number]) is Outcome.ABORTED
    assert sorted(m.value for m in seen(bridge, topic)) == [b"0", b"2", b"5", b"7"]


# --- status ---------------------------------------------------------------------------------------------------------


@proves(Capability.STATUS_LOOKUP)
@needs(Capability.PREPARE, Capability.RESOLVE_ANYWHERE)
def test_the_status_of_a_token_is_what_happened(connect: Connect, bridge: Bridge, topic: str) -> None:
    kept, dropped = prepare(bridge, topic, b"kept"), prepare(bridge, topic, b"dropped")
    first = [bridge.status(token) for token in (kept, dropped)]
    assert [connect().status(token) for token in (kept, dropped, kept, dropped)] == first * 2
    assert [bridge.commit(kept), bridge.abort(dropped)] == [Outcome.COMMITTED, Outcome.ABORTED]
    states = [status.state for status in (*first, *(connect().status(token) for token in (kept, dropped)))]
    assert states == [TokenState.PREPARED, TokenState.PREPARED, TokenState.COMMITTED, TokenState.ABORTED]
    assert values(seen(bridge, topic)) == [b"kept"]


@proves(Capability.STATUS_LOOKUP)
@needs(Capability.PREPARE)
def test_a_prepared_transaction_says_when_it_expires(bridge: Bridge, topic: str) -> None:
    now = time.time() * 1000
    token = prepare(bridge, topic, b"prepared", hold=300)
    expires = bridge.status(token).expires_at
    assert Token.parse(token).expires_at == expires
    # Between the hold, and timeout and hold together. The broker's clock may differ from this machine's by minutes.
    assert expires is not None and now + 300_000 - 200_000 < expires < now + 330_000 + 200_000
    bridge.abort(token)


@proves(Capability.STATUS_LOOKUP)
@pytest.mark.parametrize("happened", [True, False], ids=["committed", "aborted"])
def test_a_commit_whose_answer_was_lost_is_known_by_its_token(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, happened: bool
) -> None:
    with next_commit(bridge, Outcome.UNKNOWN, happened=happened):
        with pytest.raises(OutcomeUnknown) as caught:
            with bridge.transaction() as txn:
                txn.send(topic, b"hello")
    assert txn.outcome is Outcome.UNKNOWN
    token = caught.value.token
    assert token == str(txn.token)
    expected = "committed" if happened else "aborted"
    assert run(programs.ask_status, txnbridge_url, token).result() == expected
    assert values(seen(bridge, topic)) == ([b"hello"] if happened else [])
    assert bridge.status(str(token)).state.value == expected


@needs(Capability.STATUS_LOOKUP)
def test_a_transaction_that_was_not_prepared_is_not_ended_by_its_token(bridge: Bridge, topic: str) -> None:
    with next_commit(bridge, Outcome.UNKNOWN), pytest.raises(OutcomeUnknown) as caught:
        send(bridge, topic, b"hello")
    token = str(caught.value.token)
    for end in (bridge.commit, bridge.abort):
        with pytest.raises(InvalidState, match="never prepared"):
            end(token)
    assert values(seen(bridge, topic)) == [b"hello"]


@needs(Capability.PREPARE)
def test_a_token_fits_where_text_fits(bridge: Bridge, new_topic: NewTopic) -> None:
    topics = [new_topic() for _ in range(8)]
    with bridge.transaction(prepare=True) as txn:
        for topic in topics:
            for number in range(100):
                txn.send(topic, b"%d" % number)
    text = str(txn.token)
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", text)
    assert len(text) <= 4096
    assert Token.parse(text) == txn.token
    bridge.abort(text)


@needs(Capability.PREPARE)
def test_a_token_of_another_cluster_is_refused(bridge: Bridge, topic: str) -> None:
    token = prepare(bridge, topic, b"prepared")
    foreign = dataclasses.replace(Token.parse(token), cluster="another")
    for call in (bridge.commit, bridge.abort, bridge.status):
        with pytest.raises(InvalidToken, match="another"):
            call(str(foreign))
    assert bridge.abort(token) is Outcome.ABORTED


@needs(Capability.PREPARE)
def test_a_damaged_token_is_refused(bridge: Bridge, topic: str) -> None:
    token = prepare(bridge, topic, b"prepared")
    for damaged in (token[:-3], token[:40] + ("A" if token[40] != "A" else "B") + token[41:], "", "hello"):
        with pytest.raises(InvalidToken):
            bridge.commit(damaged)
    assert bridge.abort(token) is Outcome.ABORTED


# --- deadlines ------------------------------------------------------------------------------------------------------


@proves(Capability.DEADLINE)
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_transaction_that_a_vanished_process_left_open_is_aborted_by_its_deadline(
    run: RunChild, txnbridge_url: str, bridge: Bridge, topic: str, how: str
) -> None:
    leaver = run(programs.open_and_wait, txnbridge_url, topic, None, 4.0)
    leaver.told()
    if how == "killed":
        leaver.kill()
    else:
        leaver.pause()
    # A reader reaches the marker message only if no undecided transaction is before it in the partition.
    assert values(seen(bridge, topic)) == []


@proves(Capability.DEADLINE)
@needs(Capability.PREPARE, Capability.STATUS_LOOKUP, Capability.RESOLVE_ANYWHERE)
def test_a_prepared_transaction_that_nobody_ends_is_aborted_after_its_hold(
    connect: Connect, bridge: Bridge, topic: str
) -> None:
    holder = connect(timeout=1.0, hold=0.5)
    token = prepare(holder, topic, b"forgotten")
    assert values(seen(bridge, topic)) == []
    eventually(lambda: bridge.status(token).state is TokenState.ABORTED, "the forgotten transaction is aborted")
    assert bridge.commit(token) is Outcome.ABORTED
    assert values(seen(bridge, topic)) == []
