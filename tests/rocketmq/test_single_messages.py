"""Tests of transactions of one message, which their END alone commits, on a broker of a few lines."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
from txnbridge_rocketmq.admin import open_halves
from txnbridge_rocketmq.admin.open_halves import PendingHalf, end_open
from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RemotingCommand, RpcRequest
from txnbridge_rocketmq.outcome import outcome
from txnbridge_rocketmq.outcome.outcome import end_prepared, status_of
from txnbridge_rocketmq.write import half_buffer
from txnbridge_rocketmq.write.transaction_properties import origin_of

from tests.core.decisions_kit import MemoryLog
from tests.failing import answer_calls
from tests.rocketmq.half_broker import HOME, HalfBroker, Killed, Process, once, send, wait_for_deadline
from txnbridge.errors import EvidenceLost, OutcomeUnknown, TransactionAborted
from txnbridge.spi import Deadline, Decision, Ledger, Outcome, Status, Token, TokenState

END = RequestCode.END_TRANSACTION

pytestmark = pytest.mark.offline


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> HalfBroker:
    monkeypatch.setattr(half_buffer, "DIRECT_SLACK_SECONDS", 0.0)
    broker = HalfBroker()
    broker.told |= {"transactionTimeOut": "1000", "messageIndexSafe": "true"}
    return broker


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def owner(broker: HalfBroker, log: MemoryLog) -> Process:
    owner = Process(broker, log, "owner")
    begin(owner, 0).commit(Deadline(60))  # only a broker that was seen to publish needs no decision
    broker.published.clear()
    return owner


@pytest.fixture
def other(broker: HalfBroker, log: MemoryLog) -> Process:
    return Process(broker, log, "other")


def begin(process: Process, number: int, *values: bytes, timeout: float = 1.6) -> Any:
    writer = process.begin(number, timeout)
    send(writer, "a", *(values or (b"%d" % number,)))
    return writer


def token_of(writer: Any) -> Token:
    found = writer.evidence()
    return Token("rocketmq", "cluster", "owner/x/1", found.how, False, found.expires_at, 1, log=found.log)


def ledger_of(process: Process, writer: Any) -> Ledger:
    return process.decisions.ledger("owner", writer.evidence().log)


def status(process: Process, writer: Any) -> Status:
    return status_of(process.ender, token_of(writer), ledger_of(process, writer), Deadline(60))


def end_by_token(process: Process, writer: Any, decision: Decision) -> Outcome:
    return end_prepared(process.ender, token_of(writer), decision, ledger_of(process, writer), Deadline(60))


def lost(owner: Process, broker: HalfBroker, fault: str = "lose request") -> Any:
    """Return the writer of a transaction whose END was lost, and whose owner has died then."""
    writer = begin(owner, 1)
    lost: dict[int, str] = {END: fault, RequestCode.QUERY_MESSAGE: "lose request"}
    broker.fault = lambda request: lost.get(request.code)
    with pytest.raises(OutcomeUnknown):
        writer.commit(Deadline(0.2))
    broker.fault = lambda request: None
    return writer


def test_a_single_message_is_committed_by_its_end_alone(owner, broker, log):
    before, asked = log.next, []
    broker.fault = lambda request: asked.append(request.code)
    begin(owner, 1).commit(Deadline(60))
    assert (log.next, asked) == (before, [RequestCode.SEND_MESSAGE_V2, END])
    assert broker.seen("a") == [b"1"] and not broker.open


@pytest.mark.parametrize("why", ["two messages", "little time", "an id", "an index that a kill damages", "first"])
def test_any_other_transaction_is_decided_in_the_log(owner, other, broker, log, why):
    if why == "an index that a kill damages":
        del broker.told["messageIndexSafe"]
    process = {"first": other, "an id": Process(broker, log, "named", "billing")}.get(why, owner)
    if why == "an id":
        begin(process, 0).commit(Deadline(60))
    before = log.next
    values = (b"1", b"2") if why == "two messages" else (b"1",)
    begin(process, 1, *values, timeout=0.9 if why == "little time" else 1.6).commit(Deadline(60))
    assert log.next > before
    assert broker.seen("a")[-len(values) :] == list(values)


@pytest.mark.parametrize("fault", ["lose request", "lose answer", int(ResponseCode.ILLEGAL_OPERATION)])
def test_an_end_that_fails_is_made_good_once(owner, broker, fault):
    writer = begin(owner, 1)
    once(broker, END, fault)
    writer.commit(Deadline(60))
    assert broker.seen("a") == [b"1"]


def test_a_single_message_published_without_an_answer_is_committed_for_everyone(owner, other, broker, log):
    writer = lost(owner, broker, "lose answer")
    before = log.next
    wait_for_deadline(writer)
    assert status(owner, writer).state is TokenState.COMMITTED
    broker.open.add(1)  # as after a kill of the broker, which had not noted the end yet
    other.checks.answer(broker.ask())
    writer.reopen(Deadline(60))
    assert not broker.open and log.next == before
    assert broker.seen("a") == [b"1"]


def test_a_message_that_retention_may_have_dropped_is_told_neither_aborted_nor_committed(owner, other, broker, log):
    writer = lost(owner, broker, "lose answer")
    wait_for_deadline(writer)
    assert status(other, writer).state is TokenState.COMMITTED
    before = log.next
    broker.open.add(1)
    check = broker.ask()  # a copy of the half is stored behind the message, so it may outlive the message
    broker.age(keep=1)
    other.checks.answer(check)
    for kept in (1, 0):
        broker.age(keep=kept)
        assert (status(other, writer).state, status(other, writer).permanent) == (TokenState.UNKNOWN, True)
        for end in (Decision.ABORT, Decision.COMMIT):
            with pytest.raises(EvidenceLost, match="retention"):
                end_by_token(other, writer, end)
    writer.reopen(Deadline(60))
    assert log.next == before and broker.published == []


@pytest.mark.parametrize("first", ["the topic's first", "an older one"])
def test_an_unpublished_message_is_aborted_by_a_copy_too_if_the_broker_has_older_ones(owner, other, broker, first):
    if first == "an older one":
        begin(owner, 2).commit(Deadline(60))
        broker.age(keep=1)
        broker.halves[-1].stored_at -= 1000
    writer = lost(owner, broker)
    wait_for_deadline(writer)
    other.checks.answer(broker.ask())
    assert status(other, writer).state is TokenState.ABORTED
    assert broker.seen("a") == [] and not broker.open


@pytest.mark.parametrize("by", ["a check-back", "a status", "a token", "its writer"])
def test_a_message_that_the_index_does_not_have_yet_is_looked_up_again(owner, other, broker, log, by):
    writer = lost(owner, broker, "lose answer")
    wait_for_deadline(writer)
    broker.open.add(1)
    found, before, looks = broker.found, log.next, 0

    def find_late(fields: Mapping[str, str]) -> RemotingCommand:
        nonlocal looks
        looks += fields["topic"] == "a"
        early = fields["topic"] == "a" and looks == 1
        answer: RemotingCommand = found({**fields, "topic": "none"} if early else fields)
        return answer

    broker.found = find_late
    if by == "a check-back":
        other.checks.answer(broker.ask())
    elif by == "a status":
        assert status(other, writer).state is TokenState.COMMITTED
    elif by == "a token":
        assert end_by_token(other, writer, Decision.ABORT) is Outcome.COMMITTED
    else:
        writer.reopen(Deadline(60))
    assert log.next == before


@pytest.mark.parametrize("stored", ["before", "at the commit"])
def test_a_half_that_is_no_longer_fresh_is_decided_in_the_log_and_nobody_waits(owner, broker, log, stored):
    writer = begin(owner, 1, timeout=30)
    if stored == "before":
        writer.flush(Deadline(60))
    time.sleep(0.6)  # more than half of the immunity time
    before, began, asked = log.next, time.time() * 1000, []
    broker.fault = lambda request: asked.append(request.code)
    writer.commit(Deadline(60))
    if stored == "before":
        assert log.next == before + 1 and asked == [END]
    else:
        assert log.next == before and asked == [RequestCode.SEND_MESSAGE_V2, END]
        assert broker.halves[-1].born >= int(began)


def test_the_immunity_time_is_counted_from_the_birth_of_the_half(owner, other, broker, monkeypatch):
    writer = lost(owner, broker)
    broker.halves[-1].born -= 1000
    monkeypatch.setattr(outcome, "_PROGRESS_POLL_SECONDS", 1e6)  # nobody waits
    assert end_by_token(other, writer, Decision.ABORT) is Outcome.ABORTED


@pytest.mark.parametrize("by", ["a check-back", "a status", "its writer"])
def test_an_unpublished_message_is_aborted_when_its_time_is_over(owner, other, broker, by):
    writer = lost(owner, broker)
    other.checks.answer(broker.ask())
    assert status(owner, writer).state is TokenState.UNKNOWN
    if by == "its writer":
        writer.reopen(Deadline(60))
    else:
        wait_for_deadline(writer)
        other.checks.answer(broker.ask() if by == "a check-back" else [])
    assert status(owner, writer).state is TokenState.ABORTED
    assert broker.seen("a") == []


@pytest.mark.parametrize("by", ["a check-back", "a status"])
def test_a_message_published_behind_a_look_is_not_aborted_by_the_clock_after_it(owner, other, broker, log, by):
    writer = lost(owner, broker)
    look, before, looks = broker.found, log.next, 1 if by == "a check-back" else 2  # a status looks twice

    def look_and_sleep(fields: Mapping[str, str]) -> RemotingCommand:
        nonlocal looks
        answer: RemotingCommand = look(fields)
        looks -= fields["topic"] == "a"
        if looks == 0 and not broker.published:
            wait_for_deadline(writer)
            half = broker.halves[-1]
            broker.published.append((half.topic, half.queue, half.properties, half.body))
        return answer

    broker.found = look_and_sleep
    if by == "a check-back":
        other.checks.answer(broker.ask())
    else:
        assert status(owner, writer).state is TokenState.UNKNOWN
    assert log.next == before
    assert status(owner, writer).state is TokenState.COMMITTED


@pytest.mark.parametrize("by", ["a check-back", "an administrator"])
def test_a_commit_of_several_messages_is_not_taken_for_one_without_a_decision(owner, other, broker, by, monkeypatch):
    writer = begin(owner, 1, b"1", b"2", timeout=30)
    writer.flush(Deadline(60))
    checks = broker.ask()

    def die_between_two_ends(request: RpcRequest[Any]) -> None:
        if request.code == END and broker.published:
            raise Killed

    def commit(request: RpcRequest[Any]) -> None:
        if request.code == RequestCode.QUERY_MESSAGE:  # the other process has read the log, and looks the first one up
            broker.fault = die_between_two_ends
            with pytest.raises(Killed):
                writer.commit(Deadline(60))
            broker.fault = lambda request: None

    broker.fault = commit
    if by == "a check-back":
        other.checks.answer(checks)
    else:
        answer_calls(monkeypatch, open_halves, "_drop_all")  # this would also drop the second one
        found = [PendingHalf(HOME, checks[0].record)]
        listed = open_halves.OpenHalves("owner/x/1", "open", found, origin_of(found[0].record))
        end_open(other.ender, listed, Decision.ABORT, Deadline(60))
    assert broker.seen("a") == [b"1", b"2"]


def test_an_owner_that_sleeps_until_another_has_aborted_is_told_so(owner, other, broker):
    writer = begin(owner, 1)
    slept = False

    def sleep_before_end(request: RpcRequest[Any]) -> None:
        nonlocal slept
        if request.code == END and not slept:
            slept = broker.late = True
            wait_for_deadline(writer)
            other.checks.answer(broker.ask())

    broker.fault = sleep_before_end
    with pytest.raises(TransactionAborted):
        writer.commit(Deadline(60))
    assert broker.seen("a") == [] and not broker.open
