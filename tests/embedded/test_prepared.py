"""Prepared transactions: durable, invisible, ended by whoever has the token."""

import time
from contextlib import nullcontext

import pytest
from txnbridge_embedded.outcome import ending
from txnbridge_embedded.settings import Timing

from tests.embedded.kit import NO_LEDGER, begin, commit, open_preparing, open_writer, prepare, rows, token_of, values
from tests.embedded.test_writer import LARGE, failing, status
from tests.failing import on_call, raising
from txnbridge import errors
from txnbridge.spi import Deadline, Outcome, TokenState


def test_a_large_prepared_transaction_comes_whole(opened):
    broker = opened(spill_bytes=1000)
    token = prepare(broker, "orders", *LARGE)
    assert values(broker, "orders") == []
    broker.commit(token, NO_LEDGER, Deadline(5))
    assert values(broker, "orders") == LARGE


def test_an_empty_transaction_can_be_prepared(broker):
    assert broker.commit(prepare(broker, "orders"), NO_LEDGER, Deadline(5)) is Outcome.COMMITTED


@pytest.mark.parametrize("stored", [False, True])
def test_an_owner_that_was_shut_out_prepares_nothing(opened, stored):
    first = opened()
    open_writer(first, "billing")
    writer = open_preparing(first, "billing")
    transaction = begin(writer, "orders", b"old", prepare=True)
    if stored:
        writer.flush(Deadline(5))
    second = opened()
    open_writer(second, "billing")
    with pytest.raises(errors.Fenced):
        writer.prepare(Deadline(5))
    assert rows(second, "SELECT * FROM transactions") == rows(second, "SELECT * FROM messages") == []
    with pytest.raises(errors.EvidenceLost):
        second.commit(token_of(first, writer, transaction, prepared=True), NO_LEDGER, Deadline(5))


def test_status_that_says_aborted_by_the_clock_holds_when_the_clock_is_set_right(opened, clock):
    broker = opened(hold_seconds=60.0)
    token = prepare(broker, "orders", b"1")
    clock.ahead = 3_600_000
    found = status(broker, token)
    assert (found.state, found.reason) == (TokenState.ABORTED, "its deadline passed")
    clock.ahead = 0
    assert opened().commit(token, NO_LEDGER, Deadline(5)) is Outcome.ABORTED
    assert status(broker, token).reason == "its deadline passed"
    assert values(broker, "orders") == []


@pytest.mark.parametrize(("hold", "expected"), [(None, 500.0), (2.0, 2.0), (0.0, 0.0)])
def test_hold_counts_from_the_deadline_of_the_transaction(opened, hold, expected):
    broker = opened(hold_seconds=500.0)
    before = time.time()
    token = prepare(broker, "orders", b"1", hold=hold)
    assert token.expires_at is not None
    assert token.expires_at / 1000 == pytest.approx(before + 10 + expected, abs=2)
    assert status(broker, token).expires_at == token.expires_at


def test_an_outcome_is_forgotten_after_a_while_and_then_unknown_for_ever(opened):
    broker = opened(keep_seconds=0.001)
    writer = open_writer(broker)
    plain = token_of(broker, writer, begin(writer))
    writer.commit(Deadline(5))
    token = prepare(broker, "orders", b"1")
    broker.commit(token, NO_LEDGER, Deadline(5))
    time.sleep(0.01)
    open_writer(broker)  # an opening cleans up
    for found in (status(broker, token), status(broker, plain)):
        assert (found.state, found.permanent) == (TokenState.UNKNOWN, True)
    with pytest.raises(errors.EvidenceLost):
        broker.commit(token, NO_LEDGER, Deadline(5))
    with pytest.raises(errors.EvidenceLost):
        broker.abort(token, NO_LEDGER, Deadline(5))


def test_a_transaction_that_is_not_prepared_yet_cannot_be_committed_by_a_token(broker):
    writer = open_preparing(broker)
    transaction = begin(writer, "orders", b"1", prepare=True)
    writer.flush(Deadline(5))
    token = token_of(broker, writer, transaction, prepared=True)
    assert status(broker, token).state is TokenState.UNKNOWN
    with pytest.raises(errors.InvalidState):
        broker.commit(token, NO_LEDGER, Deadline(5))
    writer.prepare(Deadline(5))
    assert broker.commit(token, NO_LEDGER, Deadline(5)) is Outcome.COMMITTED


def test_prepare_after_the_deadline_is_refused(broker):
    writer = open_preparing(broker)
    begin(writer, "orders", b"1", timeout=1, prepare=True)
    time.sleep(1.01)
    with pytest.raises(errors.TransactionTimedOut):
        writer.prepare(Deadline(5))
    assert rows(broker, "SELECT * FROM transactions") == []


def test_the_writer_itself_can_abort_before_and_after_it_prepared(broker):
    for prepared in (False, True):
        writer = open_preparing(broker)
        begin(writer, "orders", b"1", prepare=True)
        if prepared:
            writer.prepare(Deadline(5))
        writer.abort(Deadline(5))
        writer.close()
    assert rows(broker, "SELECT * FROM messages") == rows(broker, "SELECT * FROM undecided") == []


def test_the_writer_learns_when_its_prepared_transaction_was_committed_elsewhere(broker):
    writer = open_preparing(broker)
    transaction = begin(writer, prepare=True)
    writer.prepare(Deadline(5))
    broker.commit(token_of(broker, writer, transaction, prepared=True), NO_LEDGER, Deadline(5))
    with pytest.raises(errors.InvalidState, match="committed"):
        writer.abort(Deadline(5))


@pytest.mark.parametrize("happens", [True, False])
def test_a_prepare_that_failed_in_the_middle_is_looked_up(broker, happens):
    writer = open_preparing(broker)
    transaction = begin(writer, "orders", b"1", prepare=True)
    failing(broker.store, happens=happens)
    if happens:
        writer.prepare(Deadline(5))
        token = token_of(broker, writer, transaction, prepared=True)
        assert broker.commit(token, NO_LEDGER, Deadline(5)) is Outcome.COMMITTED
    else:
        with pytest.raises(errors.DeliveryFailed):
            writer.prepare(Deadline(5))
        assert rows(broker, "SELECT * FROM transactions") == []


@pytest.mark.parametrize("happens", [True, False])
def test_after_a_prepare_of_unknown_outcome_an_abort_is_certain(broker, monkeypatch, happens):
    writer = open_preparing(broker)
    begin(writer, "orders", b"1", prepare=True)
    failing(broker.store, happens=happens)
    with monkeypatch.context() as patch:
        patch.setattr(broker.store, "reading", raising(errors.StorageFailed("the disk is gone")))
        with pytest.raises(errors.OutcomeUnknown):
            writer.prepare(Deadline(5))
    writer.abort(Deadline(5))
    assert rows(broker, "SELECT * FROM transactions WHERE state = 'prepared'") == []
    commit(open_writer(broker), "orders", b"marker")
    assert values(broker, "orders") == [b"marker"]


@pytest.mark.parametrize("happens", [True, False])
def test_a_decision_that_failed_in_the_middle_may_be_repeated(broker, happens):
    token = prepare(broker, "orders", b"1")
    failing(broker.store, happens=happens)
    with pytest.raises(errors.OutcomeUnknown):
        broker.commit(token, NO_LEDGER, Deadline(5))
    assert broker.commit(token, NO_LEDGER, Deadline(5)) is Outcome.COMMITTED
    assert values(broker, "orders") == [b"1"]


def test_a_decision_that_was_interrupted_before_its_commit_is_not_told_and_locks_nobody_out(broker, monkeypatch):
    token = prepare(broker, "orders", b"1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(broker.store, "_commit", raising(KeyboardInterrupt))
        broker.commit(token, NO_LEDGER, Deadline(5))
    assert status(broker, token).state is TokenState.PREPARED


@pytest.mark.parametrize("dies", [True, False])
def test_an_abort_that_was_left_half_done_is_finished_by_another_bridge(opened, dies):
    broker = opened(timing=Timing(removed_rows=3))
    token = prepare(broker, "orders", *[b"%d" % n for n in range(10)])
    commit(open_writer(broker), "orders", b"behind")
    if dies:
        failing(broker.store, happens=False, error=SystemExit(), number=2)
    with pytest.raises(SystemExit) if dies else nullcontext():
        broker.abort(token, NO_LEDGER, Deadline(5 if dies else 0))
    assert rows(broker, "SELECT state FROM transactions") == [("aborting",)]
    assert len(rows(broker, "SELECT * FROM messages")) == 8
    assert status(broker, token).state is TokenState.ABORTED
    other = opened()
    assert values(other, "orders") == [b"behind"]
    assert other.commit(token, NO_LEDGER, Deadline(5)) is Outcome.ABORTED
    assert rows(other, "SELECT state FROM transactions") == [("aborted",)]


def test_others_write_between_the_pieces_of_a_large_abort(opened, monkeypatch):
    broker = opened(timing=Timing(removed_rows=10))
    token = prepare(broker, "orders", *[b"%d" % n for n in range(100)])
    other = opened()
    writer = open_writer(other)
    # A commit needs the lock that a single long removal would hold.
    on_call(monkeypatch, ending, "_remove_batch", lambda *_: commit(writer, "audit", b"between"))
    broker.abort(token, NO_LEDGER, Deadline(5))
    assert len(values(other, "audit")) == 11
