"""Tests of ending halves, on a broker of a few lines: what is decided is published once, whatever fails."""

import random
import sys
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from txnbridge_rocketmq import half_store
from txnbridge_rocketmq.admin import open_halves
from txnbridge_rocketmq.admin.admin import RocketMQAdmin
from txnbridge_rocketmq.admin.open_halves import OpenHalves, PendingHalf, end_open
from txnbridge_rocketmq.client.protocol.codes import Property, RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.half_store import RocketMQHalfStore
from txnbridge_rocketmq.outcome import end_transaction, outcome
from txnbridge_rocketmq.outcome.check_back import CheckBackHandler
from txnbridge_rocketmq.outcome.outcome import end_prepared, status_of
from txnbridge_rocketmq.write.acks import RocketMQAckContext
from txnbridge_rocketmq.write.transaction_properties import origin_of

import txnbridge
from tests.core.decisions_kit import MemoryLog
from tests.failing import answer_calls, note_calls, raising
from tests.interrupts import interrupted_everywhere
from tests.rocketmq.half_broker import HOME, HalfBroker, Killed, Process, once, same_hash, send, wait_for_deadline
from tests.rocketmq.kit import becomes_true
from txnbridge import errors
from txnbridge._decisions.ledger import LogLedger
from txnbridge.spi import Ack, Begin, Deadline, Decision, Half, HalfMessage, Outcome, Token, TokenState

VALUES = [b"%d" % number for number in range(5)]


@pytest.fixture
def broker() -> HalfBroker:
    return HalfBroker()


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def owner(broker: HalfBroker, log: MemoryLog) -> Process:
    return Process(broker, log, "owner", "billing")


@pytest.fixture
def other(broker: HalfBroker, log: MemoryLog) -> Process:
    return Process(broker, log, "other")


def always(broker: HalfBroker, code: int, fault: str | int) -> None:
    """Let all requests of a kind meet a fault."""
    broker.fault = lambda request: fault if request.code == code else None


def written(process: Process, *values: bytes, **how: Any) -> Any:
    """Return the writer of a transaction that has sent these values to topic "a"."""
    writer = process.begin(**how)
    send(writer, "a", *(values or VALUES))
    return writer


def stored(process: Process, *values: bytes, **how: Any) -> Any:
    """Return the writer of such a transaction, whose halves are stored."""
    writer = written(process, *values, **how)
    writer.flush(Deadline(60))
    return writer


def answer_all(process: Process, broker: HalfBroker) -> None:
    """Run rounds of check-backs until no half is open: undecided transactions are aborted after their deadline."""
    until = Deadline(30)
    while broker.open:
        assert not until.expired, "halves are still open"
        process.checks.answer(broker.ask())
        time.sleep(0.02)


@pytest.mark.parametrize("id", ["a\x01b", "\ud800"], ids=ascii)
def test_a_transactional_id_that_no_message_can_hold_is_refused(broker, log, id):
    with pytest.raises(errors.InvalidOption, match="transactional_id"):
        Process(broker, log, "owner", id)


def test_each_message_is_published_once_and_in_order(owner, broker):
    writer = written(owner)
    send(writer, "b", *VALUES)
    assert broker.published == []
    writer.commit(Deadline(60))
    assert broker.seen("a") == broker.seen("b") == VALUES and not broker.open


@pytest.mark.parametrize(
    "fault", ["lose request", "lose answer", int(ResponseCode.SYSTEM_BUSY), int(ResponseCode.SYSTEM_ERROR)]
)
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_an_end_that_fails_is_made_good_once_and_in_order(owner, broker, fault, nth):
    writer = stored(owner)
    once(broker, RequestCode.END_TRANSACTION, fault, nth)
    writer.commit(Deadline(60))
    assert broker.seen("a") == VALUES


def test_an_end_that_a_paused_broker_carries_out_later_is_not_sent_again_by_the_next_call(owner, broker):
    writer, brokers, late = stored(owner), owner.cluster.brokers, list[Any]()
    config = brokers.config

    def lose(request: Any) -> str | None:
        if is_end := request.code == RequestCode.END_TRANSACTION:
            late.append(request)
        return "lose request" if is_end else None

    broker.fault = lose
    brokers.config = lambda name, deadline, fresh=False: refuse(b"", deadline) if fresh else config(name, deadline)
    with pytest.raises(errors.OutcomeUnknown):
        writer.commit(Deadline(60))
    broker.fault = lambda request: None
    brokers.config = lambda name, deadline, fresh=False: fresh and broker.answer(late.pop()) and config(name, deadline)
    writer.begin(Begin(f"{owner.id}/x/2", Deadline(60), False, None))
    assert broker.seen("a") == VALUES and not late


REFUSALS = ResponseCode.NO_PERMISSION, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.FLUSH_DISK_TIMEOUT


@pytest.mark.parametrize("hold", [None, 60], ids=["commit", "prepare"])
@pytest.mark.parametrize("fault", ["lose request", "lose answer", *map(int, REFUSALS)])
def test_a_transaction_with_a_half_that_is_not_plainly_stored_is_aborted(owner, other, broker, fault, hold):
    writer: Any = owner.begin(hold=hold)
    once(broker, RequestCode.SEND_MESSAGE_V2, fault, 3)
    send(writer, "a", *VALUES)
    with pytest.raises(errors.AccessDenied if fault == ResponseCode.NO_PERMISSION else errors.DeliveryFailed):
        writer.prepare(Deadline(60)) if hold else writer.commit(Deadline(60))
    if hold:
        with pytest.raises(errors.InvalidToken, match="never prepared"):
            finish(other, token_of(owner, 1, writer))
    answer_all(other, broker)
    assert broker.published == []


def test_a_token_that_claims_many_messages_in_one_half_is_damaged(owner, other):
    token = token_of(owner, 1, stored(owner))
    with pytest.raises(errors.InvalidToken, match="damaged"):
        finish(other, replace(token, how={"halves": [["a", HOME, 1 << 10]]}, expires_at=1))


@pytest.mark.parametrize("fault", ["lose request", "lose answer", int(ResponseCode.SYSTEM_BUSY)])
def test_an_abort_that_is_lost_on_its_way_is_what_the_broker_is_told_when_it_asks(owner, other, broker, fault):
    writer = stored(owner, timeout=60)
    once(broker, RequestCode.END_TRANSACTION, fault, 2)
    writer.abort(Deadline(60))
    assert bool(broker.open) is (fault != "lose answer")
    other.checks.answer(broker.ask())  # long before the deadline
    assert broker.published == [] and not broker.open


def test_an_abort_that_cannot_be_written_down_is_unknown_until_its_time_is_over(owner, other, broker, log):
    writer = stored(owner, timeout=1.0)
    log.append = refuse
    with pytest.raises(errors.OutcomeUnknown, match="after its deadline"):
        writer.abort(Deadline(1))
    assert len(broker.open) == len(VALUES), "it may have been committed, as far as its owner can tell"
    del log.append
    answer_all(other, broker)
    assert broker.published == []


@pytest.mark.parametrize("stands", [True, False], ids=["stands in the log", "never came there"])
def test_a_commit_without_an_answer_is_decided_before_its_writer_goes_on(owner, broker, log, stands):
    writer = stored(owner, number=1)
    append = log.append

    def lose_answer(record: bytes, deadline: Deadline | None = None) -> Any:
        if stands:
            append(record, deadline)
        raise errors.OutcomeUnknown("no answer")

    log.append = lose_answer
    with pytest.raises(errors.OutcomeUnknown):
        writer.commit(Deadline(0.1))
    if not stands:
        with pytest.raises(errors.BrokerUnavailable, match=f"{owner.id}/x/1"):
            writer.reopen(Deadline(0.1))
    del log.append
    writer.reopen(Deadline(60))
    writer.begin(Begin(f"{owner.id}/x/2", Deadline(60), False, None))
    send(writer, "a", b"next")
    writer.commit(Deadline(60))
    assert broker.seen("a") == [*(VALUES if stands else []), b"next"] and not broker.open


@pytest.mark.parametrize(
    ("first_asked", "seconds", "taken"),
    [("6000", 30, True), ("6000", 42, False), ("60000", 5, False)],  # halves are discarded after 50 s
    ids=["asked about behind its end", "discarded before its end", "too young to be asked about"],
)
def test_a_transaction_that_would_be_discarded_before_a_check_is_refused(owner, broker, first_asked, seconds, taken):
    broker.told |= {"transactionTimeOut": first_asked, "transactionCheckInterval": "5000", "transactionCheckMax": "10"}
    writer = owner.begin(timeout=seconds)
    if taken:
        send(writer, "a", b"1")
    else:
        with pytest.raises(errors.InvalidOption, match="discards halves after 50 s"):
            send(writer, "a", b"1")
    writer.abort(Deadline(60))


def test_a_busy_broker_is_asked_again(owner, broker):
    once(broker, RequestCode.SEND_MESSAGE_V2, int(ResponseCode.SYSTEM_BUSY), 2)
    written(owner).commit(Deadline(60))
    assert sorted(broker.seen("a")) == VALUES


def test_check_backs_get_no_answer_while_the_transaction_is_undecided(owner, other, broker):
    writer = stored(owner)
    for _ in range(3):
        other.checks.answer(broker.ask())
    assert len(broker.open) == len(VALUES)
    broker.late = True  # the writer's addresses are of old copies now
    writer.commit(Deadline(60))
    assert broker.seen("a") == VALUES and not broker.open


def test_one_look_at_the_log_answers_all_check_backs_of_a_transaction(owner, other, broker, log, monkeypatch):
    writer = stored(owner)
    other.checks.answer(broker.ask()[:1])
    looks = note_calls(monkeypatch, log, "end")
    other.checks.answer(broker.ask()[:1])
    for_one = len(looks)
    asked = [check for _ in range(20) for check in broker.ask()]  # also for copies of copies
    assert len(asked) == 20 * len(VALUES)
    other.checks.answer(asked)
    assert len(looks) == 2 * for_one > 0
    broker.late = True
    writer.commit(Deadline(60))
    broker.open.update(half.queue_offset for half in broker.halves)
    looks.clear()
    other.checks.answer(broker.ask())
    assert broker.seen("a") == VALUES
    assert not broker.open and 0 < len(looks) < 2 * len(VALUES)


def test_the_abort_of_a_transaction_past_its_deadline_is_recorded_before_it_is_answered(owner, broker, log):
    other = Process(broker, log, "other", settle_timeout=0.5)
    writer = stored(owner, b"late", timeout=1.0)
    wait_for_deadline(writer)
    (check,) = broker.ask()
    log.append = refuse
    other.checks.answer([check])
    assert broker.open, "without the record nothing is answered"
    del log.append
    other.checks.answer([check])
    assert not broker.open
    with pytest.raises(errors.TxnBridgeError):
        writer.commit(Deadline(60))
    assert broker.published == []


def decide(writer):
    """Claim the commit of a transaction, and do not carry it out."""
    assert writer._claim(Decision.COMMIT, Deadline(60)).decision is Decision.COMMIT


@pytest.mark.parametrize("decided", [False, True], ids=["undecided", "decided"])
def test_a_transaction_without_its_evidence_is_neither_decided_nor_answered_and_logged_once(
    owner, other, broker, log, caplog, decided
):
    writer = stored(owner, timeout=1.0)
    if decided:
        decide(writer)
    wait_for_deadline(writer)
    log.trim((log.next,))  # by age, while no process ran
    Process(broker, log, "later").begin(2)
    stood = list(log.records)
    for _ in range(3):
        other.checks.answer(broker.ask())
    assert len(broker.open) == len(VALUES), "they wait for an administrator"
    assert broker.published == []
    assert log.records == stood
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"the outcome of transaction {owner.id}/x/1 is lost" in warned.getMessage()


@pytest.mark.parametrize("asked", ["the broker", "a status"])
def test_a_process_aborts_by_the_clock_only_after_the_time_by_which_clocks_may_differ(owner, other, broker, log, asked):
    careful = Process(broker, log, "careful", clocks_differ=60.0)
    writer = stored(owner, b"late", timeout=1.0)
    wait_for_deadline(writer)
    token = token_of(owner, 1, writer)

    def ask(process: Process) -> TokenState:
        if asked == "the broker":
            process.checks.answer(broker.ask())
        return status(process, token)

    assert ask(careful) is TokenState.PREPARED
    assert ask(other) is TokenState.ABORTED
    assert status(other, token) is TokenState.ABORTED


def refuse(record: bytes, deadline: Deadline) -> Any:
    raise errors.BrokerUnavailable("not now")


def test_a_bridge_looks_again_at_discarded_half_messages_while_its_log_or_another_broker_fails(owner, broker, log):
    other = Process(broker, log, "other", discarded_retry=0.01, discarded_pause=0.01)
    brokers: Any = other.cluster.brokers
    config, brokers.names = brokers.config, lambda deadline: ["away", HOME]
    brokers.config = lambda name, deadline: config(name, deadline) if name == HOME else refuse(b"", deadline)
    writer = stored(owner)
    decide(writer)
    broker.discard()
    looks = Counter[str]()

    def away(deadline: Deadline) -> Any:
        looks["log"] += 1
        raise ZeroDivisionError if looks["log"] == 1 else errors.BrokerUnavailable("not now")

    log.end = away
    other.checks.start(Deadline(60))
    try:
        assert becomes_true(lambda: looks["log"] > 1)
        assert broker.published == []
        del log.end
        assert becomes_true(lambda: broker.seen("a") == VALUES)
    finally:
        other.checks.close()


def test_discarded_halves_are_looked_at_within_an_hour_although_the_broker_discards_none_for_centuries(other, broker):
    broker.told["transactionCheckMax"] = str((1 << 31) - 1)
    assert other.end_discarded() <= 3600


def test_a_half_whose_properties_cannot_be_read_holds_up_no_other(owner, other, broker):
    properties = {Property.GROUP: owner.cluster.settings.producer_group, Property.UNIQUE_KEY: "odd"}
    named = {"txnbridge.transaction": "a/b/1", "txnbridge.number": "0", "txnbridge.deadline": "0"}
    broker.keep("a", 0, {**properties, **named, "txnbridge.log": "[" * 20_000}, b"odd")
    store, asker = RocketMQHalfStore(owner.ender), Asker(other, broker)
    store.put(half(1, 60), Deadline(60))
    wait_for_deadline(stored(owner, timeout=1.0))
    asked = broker.ask()
    other.checks.answer(asked)
    assert [broker.halves[number].body for number in broker.open] == [b"odd", b"1"]
    assert asker.ask() == [half(1, 60).transaction]


def test_all_halves_of_another_client_with_one_unique_key_are_aborted_by_hand(other, broker):
    for queue in (0, 1):  # the official client sends a message again without a pause, and proxies choose the queue
        broker.keep("a", queue, {Property.GROUP: "others", Property.UNIQUE_KEY: "one"}, b"x")
    halves = [PendingHalf(HOME, check.record) for check in broker.ask()]
    assert end_open(other.ender, OpenHalves("one", "open", halves), Decision.ABORT, Deadline(60)) is Outcome.ABORTED
    assert not broker.open


def test_a_half_that_the_decision_does_not_name_is_dropped(owner, other, broker):
    written(owner).commit(Deadline(60))
    stray = broker.halves[0]
    broker.keep("a", 0, {**stray.properties, "txnbridge.number": "99", "UNIQ_KEY": "STRAY"}, b"stray")
    answer_all(other, broker)
    assert broker.seen("a") == VALUES


def test_a_new_owner_first_publishes_the_messages_that_its_dead_predecessor_decided(owner, broker, log):
    broker.told["transactionTimeOut"] = "1"
    written(owner, b"first", number=1).commit(Deadline(60))
    writer = stored(owner, number=2)

    def die(request):
        if request.code == RequestCode.END_TRANSACTION:
            raise Killed

    broker.fault = die
    with pytest.raises(Killed):
        writer.commit(Deadline(60))
    broker.fault = lambda request: None
    newer = Process(broker, log, "newer", "billing").begin(3)
    assert broker.seen("a") == [b"first", *VALUES]
    send(newer, "a", b"newer")
    newer.commit(Deadline(60))
    assert broker.seen("a") == [b"first", *VALUES, b"newer"]


def token_of(process: Process, number: int, writer: Any) -> Token:
    found = writer.evidence()
    return Token("rocketmq", "cluster", f"{process.id}/x/{number}", {}, True, found.expires_at, 5, log=found.log)


def prepared(process: Process, number: int = 1, hold: float = 60, messages: int = 3) -> Token:
    writer = written(process, *(b"%d" % (10 * number + n) for n in range(messages)), number=number, hold=hold)
    writer.prepare(Deadline(60))
    return token_of(process, number, writer)


def finish(process: Process, token: Token, decision: Decision = Decision.COMMIT, seconds: float = 60) -> Outcome:
    ledger = process.decisions.ledger(token.transaction.rsplit("/", 2)[0], token.log)
    return end_prepared(process.ender, token, decision, ledger, Deadline(seconds))


def test_a_token_commits_the_newest_copies_once(owner, other, broker):
    token = prepared(owner)
    broker.ask(), broker.ask()
    broker.late = True
    assert [finish(other, token), finish(owner, token), finish(other, token, Decision.ABORT)] == [Outcome.COMMITTED] * 3
    assert broker.seen("a") == [b"10", b"11", b"12"] and not broker.open


def test_a_token_commits_a_part_of_a_span_with_a_database(owner, other, broker, tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with txnbridge.connect(f"embedded:{tmp_path}/a.db") as bridge, txnbridge.spanning(bridge, db=engine) as span:
        number: Any = "1" + "".join(span.on(bridge).id.partition(".span.")[1:])
    engine.dispose()
    writer = written(owner, number=number, hold=60)
    writer.prepare(Deadline(60))
    assert finish(other, token_of(owner, number, writer)) is Outcome.COMMITTED
    assert broker.seen("a") == VALUES


def test_an_exception_of_a_signal_handler_keeps_no_later_call_from_publishing(owner):
    def publish() -> None:
        with owner.ender.exclusively("billing/x/1", Deadline(60)) as turn:
            assert turn is end_transaction.LockHolder.CALLER

    assert interrupted_everywhere(publish, publish, ["end_transaction.py"])


def test_a_call_past_its_deadline_does_not_wait_long_for_the_broker_of_its_lock(owner):
    timeouts: list[float] = []
    owner.cluster.client.submit = lambda broker, request, timeout: timeouts.append(timeout)
    with owner.ender.exclusively("billing/x/1", Deadline(60)):
        pass
    assert timeouts == [1.0]


@pytest.mark.parametrize("dead", [False, True])
def test_one_of_two_publishers_of_a_transaction_waits_for_the_other_unless_it_seems_dead(owner, broker, log, dead):
    other, token = Process(broker, log, "other", publisher_stalled=0.05 if dead else 60.0), prepared(owner)
    with ThreadPoolExecutor(1) as pool:
        with owner.ender.exclusively(token.transaction, Deadline(60)):
            waiting = pool.submit(finish, other, token)
            if not dead:
                with pytest.raises(TimeoutError):
                    waiting.result(0.2)
            assert broker.published == [] or waiting.result(60)
        assert waiting.result(60) is Outcome.COMMITTED
    assert broker.seen("a") == [b"10", b"11", b"12"]


def test_an_owner_looks_up_what_it_has_published_only_if_the_broker_asks_much_later(owner, broker, monkeypatch):
    writer, asked = stored(owner), list[int]()
    checks = broker.ask()
    writer.commit(Deadline(5))
    broker.fault = lambda request: asked.append(request.code)
    owner.checks.answer(checks)
    assert asked == [RequestCode.END_TRANSACTION] * len(VALUES)
    assert broker.seen("a") == VALUES and not broker.open
    broker.published.clear()  # as after a power failure, which needs some time
    monkeypatch.setattr(end_transaction, "_SETTLED_SECONDS", 0.0)
    owner.checks.answer(checks)
    assert broker.seen("a") == VALUES


def test_a_process_that_falls_asleep_while_it_publishes_looks_again_when_it_wakes(broker, log):
    owner, other = (Process(broker, log, name, publisher_stalled=0.05, look_up_valid=0.5) for name in ("one", "other"))
    token = prepared(owner)
    answer = broker.answer

    def sleep(request: RpcRequest[Any]) -> Any:
        answered = answer(request)
        if request.code == RequestCode.END_TRANSACTION:
            broker.answer = answer
            assert finish(other, token) is Outcome.COMMITTED  # `other` takes the sleeping process for dead
            time.sleep(0.5)
        return answered

    broker.answer = sleep
    assert finish(owner, token) is Outcome.COMMITTED
    assert broker.seen("a") == [b"10", b"11", b"12"]


def test_messages_published_by_another_process_right_after_the_decision_are_not_repeated(owner, other, broker):
    token = prepared(owner)

    def let_the_other_publish(request: RpcRequest[Any]) -> None:
        if request.code == RequestCode.LOCK_BATCH_MQ:  # the first request behind the claim
            broker.fault = lambda request: None
            assert finish(other, token) is Outcome.COMMITTED

    broker.fault = let_the_other_publish
    assert finish(owner, token) is Outcome.COMMITTED
    assert broker.seen("a") == [b"10", b"11", b"12"]


def test_an_administrator_waits_for_an_owner_that_commits_meanwhile(owner, other, broker, monkeypatch):
    answer_calls(monkeypatch, open_halves, "_drop_all")
    writer, looks, ended = stored(owner), list[int](), list[Any]()
    found = [PendingHalf(HOME, check.record) for check in broker.ask()]
    listed = OpenHalves("billing/x/1", "open", found, origin_of(found[0].record))

    def end_by_hand(request: RpcRequest[Any]) -> None:
        if request.code == RequestCode.END_TRANSACTION:  # the owner's first one
            broker.fault = lambda request: looks.append(request.code)
            ended.append(pool.submit(end_open, other.ender, listed, Decision.ABORT, Deadline(60)))
            assert becomes_true(lambda: ended[0].done() or len(looks) > 10 * len(VALUES))

    broker.fault = end_by_hand
    with ThreadPoolExecutor(1) as pool:
        writer.commit(Deadline(60))
        assert ended[0].result(60) is Outcome.COMMITTED
    assert broker.seen("a") == VALUES


def test_a_stored_message_is_not_kept_in_memory(owner, broker):
    body = bytes(9)
    before = sys.getrefcount(body)
    writer = stored(owner, body)
    broker.halves.clear()
    assert sys.getrefcount(body) == before and writer.messages == 1


@pytest.mark.parametrize("slow", [1, 55, 80, 1500])
def test_a_slow_broker_needs_hardly_more_look_ups_than_a_fast_one(owner, broker, log, monkeypatch, slow):
    """A look-up becomes too old before all its messages are committed, and the others are looked up again."""
    other, clock = Process(broker, log, "other"), [0.0]
    virtual = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None)
    monkeypatch.setattr(end_transaction, "time", virtual)
    asked = Counter[int]()

    def take_time(request: RpcRequest[Any]) -> None:
        asked[request.code] += 1
        clock[0] += slow * 0.0003

    token = prepared(owner, messages=200)
    broker.fault = take_time
    assert finish(other, token) is Outcome.COMMITTED
    assert broker.seen("a") == [b"%d" % (10 + number) for number in range(200)]
    assert asked[RequestCode.END_TRANSACTION] == 200
    assert asked[RequestCode.QUERY_MESSAGE] < 8 * 200


def test_a_topic_whose_messages_cannot_be_published_keeps_no_others_from_it(owner, broker, log):
    writer = written(owner, number=1, hold=60)
    send(writer, "b", *VALUES)
    writer.prepare(Deadline(60))

    def refuse_b(request: RpcRequest[Any]) -> int | None:
        is_b = request.code == RequestCode.END_TRANSACTION and broker.half_of(request.fields).topic == "b"
        return int(ResponseCode.SYSTEM_BUSY) if is_b and broker.seen("a") != VALUES else None

    broker.fault = refuse_b
    other = Process(broker, log, "other", published_at_once=2)
    assert finish(other, token_of(owner, 1, writer), Decision.COMMIT, 5) is Outcome.COMMITTED
    assert broker.seen("a") == broker.seen("b") == VALUES


def test_a_process_that_publishes_for_long_keeps_its_lock(owner, broker, log):
    other = Process(broker, log, "other", published_at_once=1)
    token = prepared(owner)
    taken: list[bool] = []

    def forget(request: RpcRequest[Any]) -> None:
        if request.code == RequestCode.END_TRANSACTION:
            broker.locks.clear()  # as after a minute
        if request.code == RequestCode.QUERY_MESSAGE and broker.published:
            taken.append(bool(broker.locks))

    broker.fault = forget
    assert finish(other, token) is Outcome.COMMITTED
    assert any(taken)


def test_a_token_whose_halves_are_gone_says_so(owner, other, broker):
    token = prepared(owner)
    broker.halves.pop()
    with pytest.raises(errors.EvidenceLost, match="1 messages"):
        finish(other, token)


@pytest.mark.parametrize(
    ("decision", "code", "fault"),
    [
        (Decision.COMMIT, RequestCode.END_TRANSACTION, ResponseCode.NO_PERMISSION),
        (Decision.COMMIT, RequestCode.QUERY_MESSAGE, ResponseCode.NO_PERMISSION),
        (Decision.ABORT, RequestCode.QUERY_MESSAGE, ResponseCode.NO_PERMISSION),
        (Decision.COMMIT, RequestCode.QUERY_MESSAGE, ResponseCode.SYSTEM_BUSY),
        (Decision.ABORT, RequestCode.QUERY_MESSAGE, ResponseCode.SYSTEM_BUSY),
    ],
)
def test_a_process_that_decided_and_cannot_finish_is_told_the_decision(owner, other, broker, decision, code, fault):
    token = prepared(owner)
    always(broker, code, int(fault))
    busy = fault == ResponseCode.SYSTEM_BUSY
    outcome = Outcome.COMMITTED if decision is Decision.COMMIT else Outcome.ABORTED
    where = ".* publishing to a: " if code == RequestCode.END_TRANSACTION else ""
    told = f"transaction {token.transaction} is {outcome.value}, and{where}"
    with pytest.raises(errors.OutcomeUnknown if busy else errors.AccessDenied, match=told):
        finish(other, token, decision, 0.3 if busy else 60)
    broker.fault = lambda request: None
    assert finish(owner, token, Decision.COMMIT) is outcome
    assert broker.seen("a") == ([b"10", b"11", b"12"] if decision is Decision.COMMIT else [])


class Acknowledging(RocketMQAckContext):
    """Acknowledges the first messages of a partition for a group, without a reader."""

    def __init__(self, process: Process, *places: tuple[str, int]) -> None:
        self.ledger, self.places = process.cluster.ledger(f"{process.id}/x/1", {}), places

    def acks(self, positions: Any, deadline: Deadline, *, so_far: Any = ()) -> list[Ack]:
        _, read_up_to = self.ledger.positions("readers", deadline)
        return [Ack("readers", place, (0,), (5,), read_up_to) for place in self.places]

    def require_held(self, acks: Any, transaction: str, deadline: Deadline) -> None:
        pass


def test_a_prepared_transaction_of_acknowledgements_alone_is_listed_and_its_token_ends_it(owner, other, monkeypatch):
    """A span's part, say, whose process is dead: without halves the brokers do not know of it."""
    writer = owner.begin(hold=60)
    writer.ack(Acknowledging(owner, ("in", 0), ("in", 1)), {})
    writer.prepare(Deadline(60))
    admin = RocketMQAdmin(other.ender)
    monkeypatch.setattr(open_halves, "list_open", lambda *_: [])
    assert admin.transactions(Deadline(60)) == []  # an application without a log gets none by the look
    other.cluster.topics.names = [other.cluster.settings.log_topic("tests")]
    (found,) = admin.transactions(Deadline(60))
    assert (found.transaction, found.state, found.transactional_id) == ("billing/x/1", "prepared", "billing")
    assert (found.groups, found.expires_at) == (("readers",), writer.evidence().expires_at)
    assert admin.transactions(Deadline(60), "bill") == [found] and admin.transactions(Deadline(60), "o") == []
    with monkeypatch.context() as trimmed:  # a log without its evidence keeps no other transactions from being listed
        trimmed.setattr(LogLedger, "holds", raising(errors.EvidenceLost("the log was trimmed")))
        assert admin.transactions(Deadline(60)) == []
    with pytest.raises(errors.NotFound, match="token"):
        admin.end(found.transaction, Decision.ABORT, Deadline(60))
    assert found.token is not None and finish(other, found.token, Decision.ABORT) is Outcome.ABORTED
    assert admin.transactions(Deadline(60)) == []


def test_a_token_past_its_hold_only_aborts(owner, other, broker):
    token = prepared(owner, hold=0.0)
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr("txnbridge_rocketmq.outcome.outcome.time.time", lambda: (token.expires_at or 0) / 1000 + 1)
        assert finish(other, token) is Outcome.ABORTED
    assert finish(other, token) is Outcome.ABORTED
    assert broker.published == [] and not broker.open


def test_a_proxy_that_answers_and_does_nothing_is_found_out(owner, other, broker):
    token = prepared(owner)
    once(broker, RequestCode.END_TRANSACTION, 0)
    with pytest.raises(errors.OutcomeUnknown, match=r"is committed, and .* proxy"):
        finish(other, token)


@pytest.mark.parametrize("looked", [True, False], ids=["by a look", "before the next, because no look was answered"])
def test_a_proxy_that_swallows_an_owners_first_commit_is_found_out_and_made_good(owner, broker, looked):
    writer = stored(owner)
    always(broker, RequestCode.END_TRANSACTION, 0)
    swallows = broker.fault
    if not looked:
        broker.fault = lambda request: "lose answer" if request.code == RequestCode.QUERY_MESSAGE else swallows(request)
    with pytest.raises(errors.OutcomeUnknown, match="proxy" if looked else "it is committed"):
        writer.commit(Deadline(60 if looked else 0.3))
    broker.fault = swallows
    token = Token("rocketmq", "cluster", f"{owner.id}/x/1", {}, False, None, 5, log=writer.evidence().log)
    if looked:
        assert status(owner, token) is TokenState.UNKNOWN
    with pytest.raises(errors.BrokerUnavailable, match="proxy"):
        writer.begin(Begin(f"{owner.id}/x/2", Deadline(60), False, None))
    broker.fault = lambda request: None
    writer.begin(Begin(f"{owner.id}/x/2", Deadline(60), False, None))
    assert broker.seen("a") == VALUES
    assert status(owner, token) is TokenState.COMMITTED


def test_a_first_commit_that_swallows_is_found_out_after_an_end_that_was_lost(owner, broker):
    lost = iter(["lose request"])
    broker.fault = lambda request: next(lost, 0) if request.code == RequestCode.END_TRANSACTION else None
    with pytest.raises(errors.OutcomeUnknown, match="proxy"):
        written(owner).commit(Deadline(60))


def test_committed_is_not_said_of_messages_that_nobody_saw_published(owner, other, broker):
    writer = stored(owner)
    broker.late = True  # so that each message has to be looked up
    always(broker, RequestCode.QUERY_MESSAGE, int(ResponseCode.SYSTEM_ERROR))
    with pytest.raises(errors.OutcomeUnknown, match="it is committed, and may not be published"):
        writer.commit(Deadline(0.3))
    token = Token("rocketmq", "cluster", f"{owner.id}/x/1", {}, False, None, 5, log=writer.evidence().log)
    assert status(other, token, 0.3) is TokenState.UNKNOWN
    broker.fault = lambda request: None
    assert status(other, token) is status(owner, token) is TokenState.UNKNOWN
    answer_all(other, broker)
    assert status(other, token) is status(owner, token) is TokenState.COMMITTED
    assert broker.seen("a") == VALUES


@pytest.mark.parametrize("others", [1, 20, 63])
def test_a_message_or_half_is_found_behind_newer_ones_whose_keys_have_the_same_hash(owner, other, broker, others):
    token = prepared(owner)
    half = broker.halves[0]
    for _ in range(others):
        properties = {**half.properties, "UNIQ_KEY": same_hash(half.key)}
        broker.open.discard(broker.keep("a", 0, properties, b"another").queue_offset)
        broker.published.append(("a", 1, properties, b"another"))
    assert finish(other, token) is finish(owner, token) is Outcome.COMMITTED
    assert broker.seen("a") == [b"10", b"11", b"12"]


def test_a_message_is_not_taken_for_missing_behind_more_such_ones_than_the_broker_offers(owner, other, broker):
    token = prepared(owner)
    assert finish(owner, token) is Outcome.COMMITTED
    _, _, properties, _ = broker.published[0]
    broker.published += [("a", 1, {**properties, "UNIQ_KEY": same_hash(properties["UNIQ_KEY"])}, b"another")] * 64
    with pytest.raises(errors.EvidenceLost, match="same hash"):
        finish(other, token)
    assert broker.seen("a") == [b"10", b"11", b"12"]


@pytest.mark.parametrize(("index", "looks"), [("true", [1, 0, 0]), ("false", [0, 0, 0])], ids=["once", "no index"])
def test_a_broker_that_was_seen_to_publish_or_keeps_no_index_is_not_looked_at(owner, broker, index, looks):
    broker.told["messageIndexEnable"] = index
    counts = []
    for number in range(3):
        writer = written(owner, number=number)
        asked: list[int] = []
        broker.fault = lambda request, asked=asked: asked.append(request.code)
        writer.commit(Deadline(60))
        counts.append(asked.count(RequestCode.QUERY_MESSAGE))
    assert counts == looks


def test_a_user_who_may_not_look_hears_that_once_and_commits(owner, broker, caplog):
    always(broker, RequestCode.QUERY_MESSAGE, int(ResponseCode.NO_PERMISSION))
    for number in range(2):
        written(owner, number=number).commit(Deadline(60))
    assert broker.seen("a") == VALUES * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def status(process: Process, token: Token, seconds: float = 60) -> TokenState:
    ledger = process.decisions.ledger(token.transaction.rsplit("/", 2)[0], token.log)
    return status_of(process.ender, token, ledger, Deadline(seconds)).state


def test_no_thread_waits_beyond_its_deadline_while_another_thread_opens_the_id(owner, log):
    append, appending, stored = log.append, threading.Event(), threading.Event()

    def append_slowly(record, deadline=None):
        appending.set()
        assert stored.wait(30)
        return append(record)

    log.append = append_slowly
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(owner.owner.prepare_writer, Deadline(30))
        assert appending.wait(30)
        try:
            with pytest.raises(errors.DeadlineExceeded, match="opened billing"):
                owner.owner.prepare_writer(Deadline(0.1))
            assert not first.done()
        finally:
            stored.set()


def half(number: int, seconds: float, messages: int = 1) -> Half:
    message = HalfMessage("a", b"%d" % number, None, (), 0, None)
    return Half("shop", f"half-shop-x/y/{number}", [message] * messages, 0, int((time.time() + seconds) * 1000))


class Asker(RocketMQHalfStore):
    """The half store of an application, whose check-backs come from a `HalfBroker`."""

    def __init__(self, process: Process, broker: HalfBroker) -> None:
        super().__init__(process.ender)
        self._broker = broker
        self._check_backs["shop"] = OrderedDict()

    def note(self) -> None:
        """Run a round of check-backs."""
        self._note_check_backs("shop", self._broker.ask())

    def ask(self) -> list[str]:
        """Run a round of check-backs, and return the transactions that the application is asked about."""
        self.note()
        return [each.transaction for each in self.checks("shop", 4, Deadline(0.1))]


def test_half_messages_without_evidence_or_answers_leave_time_for_the_others(owner, broker, log):
    asker = Asker(Process(broker, log, "other", resolver_timeout=1.0), broker)
    RocketMQHalfStore(owner.ender).put(half(1, 60), Deadline(60))
    log.trim((log.next,))  # by age, while no process ran
    later = RocketMQHalfStore(Process(broker, log, "later").ender)
    for number in (2, 3, 4):
        later.put(half(number, 60), Deadline(60))
    silent = {each.key for each in broker.halves if each.body == b"2"}
    broker.fault = lambda request: "lose answer" if request.fields.get("key") in silent else None
    assert asker.ask() == [half(3, 60).transaction, half(4, 60).transaction]


def test_a_broker_that_is_down_is_not_looked_up_while_other_check_backs_wait(owner, other, broker):
    asker, brokers = Asker(other, broker), other.cluster.brokers
    RocketMQHalfStore(owner.ender).put(half(1, 60), Deadline(60))
    decide(stored(owner))
    brokers.names, broker.fault = lambda deadline: [], raising(Killed)
    other.checks.answer(broker.ask())
    assert asker.ask() == []
    del brokers.names
    broker.fault = lambda request: None
    other.checks.answer(broker.ask())
    assert broker.seen("a") == VALUES
    assert asker.ask() == [half(1, 60).transaction]


def test_only_the_broker_keeps_the_bodies_of_half_messages_that_wait_for_their_check_back(owner, other, broker):
    store, asker = RocketMQHalfStore(owner.ender), Asker(other, broker)
    store.put(half(1, 60), Deadline(60))
    asker.note()
    [[(check, *_)]] = [[list(asked.values()) for asked in found.values()] for found in asker._check_backs.values()]
    assert check.record.body == b""
    [found] = asker.checks("shop", 1, Deadline(60))
    assert [message.value for message in found.messages] == [b"1"]


@pytest.mark.parametrize(
    ("ahead", "seconds"), [(3.0, 0.0), (0.0, 0.3)], ids=["by a clock that is ahead", "by one who fell asleep"]
)
def test_half_messages_whose_owner_may_yet_do_the_work_are_not_dropped(owner, broker, log, monkeypatch, ahead, seconds):
    other = Process(broker, log, "other", clocks_differ=ahead)
    asker, wanted, noted = Asker(other, broker), half(1, seconds, messages=2), outcome.prepare_record
    append = log.append
    asking: list[Any] = []

    def note_and_sleep(*given):
        found = noted(*given)
        stored.set()  # the owner continues
        done.wait(30)
        time.sleep(max(0.0, wanted.deadline_at / 1000 - time.time()))
        return found

    def store_the_record(record, deadline=None):
        if b'"prepare"' in record and not asking:
            asking.append(pool.submit(asker.ask))
            assert stored.wait(30)
        return append(record, deadline)

    stored, done = threading.Event(), threading.Event()
    monkeypatch.setattr(half_store, "prepare_record", note_and_sleep)
    log.append = store_the_record
    with ThreadPoolExecutor(1) as pool:
        put = RocketMQHalfStore(owner.ender).put(wanted, Deadline(60))
        done.set()
        assert asking[0].result(30) == []
    assert RocketMQHalfStore(owner.ender).end(put, Decision.COMMIT, Deadline(60)) is Outcome.COMMITTED
    assert broker.seen("a") == [b"1", b"1"]


@pytest.mark.parametrize("fault", ["lose request", "lose answer"])
def test_a_half_message_whose_end_is_lost_is_published_once(owner, broker, fault):
    store = RocketMQHalfStore(owner.ender)
    put = store.put(half(1, 100), Deadline(60))
    once(broker, RequestCode.END_TRANSACTION, fault)
    assert store.end(put, Decision.COMMIT, Deadline(60)) is Outcome.COMMITTED
    assert broker.seen("a") == [b"1"]


def test_a_half_message_published_without_a_decision_is_not_dropped_by_an_abort_nor_asked_about(
    owner, other, broker, log
):
    store, asker = RocketMQHalfStore(owner.ender), Asker(other, broker)
    put, before = store.put(half(1, 100), Deadline(60)), log.next
    asker.note()
    (asked,) = asker.checks("shop", 4, Deadline(60))
    assert store.end(put, Decision.COMMIT, Deadline(60)) is Outcome.COMMITTED
    assert asker.end(asked, Decision.ABORT, Deadline(60)) is Outcome.COMMITTED
    assert log.next == before and broker.open
    assert asker.ask() == []
    assert broker.seen("a") == [b"1"] and not broker.open


def test_the_index_is_not_waited_for_if_nobody_can_have_published_an_old_half_message_since(owner, broker, log):
    put = RocketMQHalfStore(owner.ender).put(half(1, 100), Deadline(60))
    broker.halves[0].born -= 100_000_000
    patient = RocketMQHalfStore(Process(broker, log, "patient", index_delay=60.0).ender)
    assert patient.end(replace(put, how={**put.how, "fresh": []}), Decision.COMMIT, Deadline(10)) is Outcome.COMMITTED


@pytest.mark.parametrize("seed", range(40))
def test_decided_messages_are_published_once_in_order_whatever_is_lost_and_whoever_dies(seed):
    assert what_went_wrong(seed) == []


def test_without_a_look_first_messages_come_twice(monkeypatch):
    def publish(self, transaction, parts, deadline, *, first=False):
        lines = self._sequences(end_transaction._expected(transaction, parts), deadline)
        self._commit_halves(lines, True, deadline)

    monkeypatch.setattr(end_transaction.HalfEnder, "publish", publish)
    assert any(what_went_wrong(seed) for seed in range(40))


def test_without_the_log_a_transaction_is_torn(monkeypatch):
    answer_calls(monkeypatch, CheckBackHandler, "_settle", True)  # the answer is ABORT where nothing is known
    assert any(what_went_wrong(seed) for seed in range(40))


def what_went_wrong(seed: int) -> list[str]:
    """Return the broken promises after a random run: processes die, lose answers and take over from others."""
    chance = random.Random(seed)
    broker, log = HalfBroker(), MemoryLog()
    tokens: list[Token] = []
    number = 0
    for _ in range(6):
        process = Process(broker, log, f"p{chance.getrandbits(30)}", chance.choice(["billing", None]))
        broker.late = chance.random() < 0.3
        broker.fault = faults(chance)
        try:
            for _ in range(3):
                number += 1
                live(process, broker, number, tokens, chance)
        except Killed:
            broker.locks.clear()  # as after a minute
    broker.fault = lambda request: None
    last = Process(broker, log, "last")
    for token in tokens:
        finish(last, token)
    answer_all(last, broker)
    return findings(broker)


def faults(chance: random.Random) -> Any:
    def fault(request: RpcRequest[Any]) -> str | int | None:
        (found,) = chance.choices([None, "lose request", "lose answer", "busy", "killed"], [90, 3, 3, 2, 2])
        if found == "killed":
            raise Killed
        if request.code not in (RequestCode.END_TRANSACTION, RequestCode.SEND_MESSAGE_V2):
            return None
        return int(ResponseCode.SYSTEM_BUSY) if found == "busy" else found

    return fault


def live(process: Process, broker: HalfBroker, number: int, tokens: list[Token], chance: random.Random) -> None:
    act = chance.choice(["commit", "abort", "prepare", "end", "asked"])
    values = [b"%d.%d" % (number, n) for n in range(chance.randrange(1, 6))]
    try:
        if act == "asked":
            process.checks.answer(broker.ask())
        elif act == "end" and tokens:
            finish(process, chance.choice(tokens), chance.choice([Decision.COMMIT, Decision.ABORT]))
        elif act == "prepare":
            writer = written(process, *values, number=number, hold=0.05)
            writer.prepare(Deadline(0.3))
            tokens.append(token_of(process, number, writer))
        else:
            writer = written(process, *values, number=number, timeout=0.1)
            writer.commit(Deadline(0.3)) if act == "commit" else writer.abort(Deadline(0.3))
    except errors.TxnBridgeError:
        pass


def findings(broker: HalfBroker) -> list[str]:
    """Return the broken promises: of each transaction all or nothing is published, each message once and in order."""
    seen = broker.seen("a")
    found = [f"{body!r} came twice" for body in set(seen) if seen.count(body) > 1]
    sent: dict[bytes, set[int]] = {}
    for half in broker.halves:
        transaction, _, part = half.body.partition(b".")
        sent.setdefault(transaction, set()).add(int(part))
    for transaction, parts in sent.items():
        published = [int(body.partition(b".")[2]) for body in seen if body.partition(b".")[0] == transaction]
        if published not in ([], sorted(parts)):
            found.append(f"of {transaction!r} came {published}, of {sorted(parts)}")
    return found


def test_a_writer_goes_on_after_a_transaction_whose_evidence_is_lost(owner, broker):
    writer = written(owner)

    def lost(request: RpcRequest[Any]) -> str | None:
        if request.code != RequestCode.END_TRANSACTION or broker.first:
            return None
        broker.age()
        return "lose request"

    broker.fault = lost
    with pytest.raises(errors.EvidenceLost):
        writer.commit(Deadline(60))
    for number in (2, 3):
        writer.reopen(Deadline(60))
        writer.begin(Begin(f"{owner.id}/x/{number}", Deadline(60), False, None))
        send(writer, "a", b"%d" % number)
        writer.commit(Deadline(60))
    assert broker.seen("a") == [b"2", b"3"]
