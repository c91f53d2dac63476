"""A span over two brokers: all or none, wherever its process dies, and whatever ends its parts."""

import gc
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import txnbridge
from tests.core.half.ends import Ends, addresses, failing, no_checks, span_pair
from tests.core.half.span_programs import Pair, copy_all, send_one
from tests.failing import fail_call, note_calls, raising
from tests.in_time import Hold, wait_until
from tests.inside import connection_of
from txnbridge import Bridge, Decision, Outcome, errors, spanning
from txnbridge._base.token import State
from txnbridge._half.span import sweep_of
from txnbridge._half.span_sweep import SpanSweep, digest, mark
from txnbridge._metrics import Metrics
from txnbridge.spi import OpenTransaction
from txnbridge.testing import Child

STEPS = ("prepare", "half.store", "resolve", "half.end")


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def pair(tmp_path, request: pytest.FixtureRequest, ends: Ends, broken_broker) -> Iterator[tuple[Any, Any]]:
    like, folder = getattr(request, "param", ""), f"{broken_broker(**ends.parts())}:{tmp_path}"
    with span_pair(folder, ends, like) as pair:
        for bridge in pair:
            bridge.ensure_topics("t")
        yield pair


def values(pair: tuple[Bridge, Bridge]) -> list[list[bytes]]:
    return [[message.value for message in bridge.read("t", 100)] for bridge in pair]


def open_ones(pair: tuple[Bridge, Bridge]) -> list[object]:
    return [each for bridge in pair for each in bridge.admin.transactions()]


def send(span: txnbridge.Span, pair: tuple[Bridge, Bridge], value: bytes) -> None:
    for bridge in pair:
        span.on(bridge).send("t", value)


def test_the_end_of_the_block_commits_all_parts_and_an_exception_aborts_all(pair):
    with spanning(*pair) as span:
        send(span, pair, b"1")
        assert values(pair) == [[], []]
    with pytest.raises(errors.InvalidState, match="its block has ended"):
        span.abort()
    assert span.outcome is Outcome.COMMITTED
    assert values(pair) == [[b"1"], [b"1"]]
    with spanning(*pair) as span:
        send(span, pair, b"2")
        raise errors.Abort
    assert span.outcome is Outcome.ABORTED
    span.abort()
    with pytest.raises(ValueError, match="a test says so"), spanning(*pair) as span:
        send(span, pair, b"2")
        raise ValueError("a test says so")
    assert span.outcome is Outcome.ABORTED
    with pytest.raises(errors.TransactionAborted), spanning(*pair) as span:
        send(span, pair, b"3")
        span.on(pair[1]).abort()
    assert values(pair) == [[b"1"], [b"1"]]
    assert open_ones(pair) == []


@pytest.mark.parametrize("name", ["commit", "abort"])
def test_no_end_of_a_part_may_take_longer_than_the_span(pair, ends, name):
    if name == "abort":
        ends.by["put"] = failing(AWAY)
    with suppress(txnbridge.BrokerUnavailable), spanning(*pair, timeout=20) as span:
        send(span, pair, b"1")
    (_, first), (_, second) = ends.given[name]
    assert max(first, second) <= 20


def test_a_decision_that_took_all_the_time_leaves_some_for_the_other_parts(pair, ends):
    def slowly(number: int, commit: Callable[[], Outcome]) -> Outcome:
        outcome = commit()
        time.sleep(0 if number else 0.5)
        return outcome

    ends.by["commit"] = slowly
    with spanning(*pair, timeout=0.5) as span:
        send(span, pair, b"1")
    (_, first), (_, second) = ends.given["commit"]
    assert first <= 0.5 and second > 1


@pytest.mark.parametrize("decided", [True, False])
def test_a_lost_answer_of_the_decision_is_found_later(pair, ends, decided):
    ends.by["commit"] = failing(LOST, 0, happens=decided)
    with pytest.raises(errors.OutcomeUnknown) as caught, spanning(*pair, timeout=1) as span:
        send(span, pair, b"1")
    assert span.outcome is Outcome.UNKNOWN
    assert caught.value.token == str(span.token)
    wait_until(lambda: open_ones(pair) == [])
    assert values(pair) == [[b"1"] * decided] * 2


AWAY = txnbridge.BrokerUnavailable("a test says so")
LOST = errors.OutcomeUnknown("the answer is lost")


@pytest.mark.parametrize("checks", [{}, {"checks": no_checks}])  # the next check-back may be minutes away
def test_a_part_that_its_broker_cannot_end_now_is_ended_later(pair, ends, quick_sweep, checks):
    ends.by |= {"commit": failing(AWAY, 1), **checks}
    with spanning(*pair) as span:
        send(span, pair, b"1")
    assert span.outcome is Outcome.COMMITTED
    wait_until(lambda: values(pair) == [[b"1"], [b"1"]])


@pytest.mark.parametrize("away", ["here", "everywhere"])
def test_a_part_that_is_still_prepared_at_half_of_its_hold_is_warned_of_once(
    pair, monkeypatch, ends, quick_sweep, caplog, away
):
    ends.by["commit"] = failing(AWAY, *range(1, 1000))
    for each in pair if away == "everywhere" else ():
        each.admin = SimpleNamespace(transactions=raising(AWAY))
    with spanning(*pair, hold=600) as span:
        send(span, pair, b"1")
    sweeps = note_calls(monkeypatch, SpanSweep, "sweep")

    def warnings_after_two_sweeps() -> int:
        before = len(sweeps)
        wait_until(lambda: len(sweeps) > before + 1)
        text: str = caplog.text
        return text.count(f"its broker aborts it in 240 s: {span.tokens[1]!r}")

    assert warnings_after_two_sweeps() == 0
    now = (span.tokens[1].expires_at or 0) / 1000 - 240
    monkeypatch.setattr("txnbridge._half.span_sweep.time", SimpleNamespace(time=lambda: now))
    assert warnings_after_two_sweeps() == 1 == warnings_after_two_sweeps()
    (healthy,) = (each.samples for each in Metrics().families() if each.name == "txnbridge_service_healthy")
    assert 0 in healthy.values()


def test_a_prepared_part_that_its_broker_cannot_abort_now_is_aborted_later(pair, ends, quick_sweep):
    ends.by["abort"] = failing(AWAY, 1)
    ends.by["put"] = failing(AWAY)
    with pytest.raises(txnbridge.BrokerUnavailable), spanning(*pair) as span:
        send(span, pair, b"1")
    assert span.outcome is Outcome.ABORTED
    wait_until(lambda: open_ones(pair) == [])


def test_a_part_of_which_only_the_broker_knows_that_it_is_prepared_is_aborted_later(pair, ends, quick_sweep):
    ends.by |= {"prepare": failing(LOST, 1, happens=True), "drop": failing(AWAY)}
    with pytest.raises(errors.OutcomeUnknown), spanning(*pair, timeout=1) as span:
        send(span, pair, b"1")
    assert span.outcome is Outcome.ABORTED
    wait_until(lambda: open_ones(pair) == [])


def abort_part(bridge: Any) -> Any:
    """Let an administrator abort a part right before a commit."""

    def end(number: int, commit: Callable[[], Outcome]) -> Outcome:
        for left in bridge.admin.transactions():
            bridge.admin.abort(left.transaction, reason="by hand")
        return commit()

    return end


def test_a_part_that_an_administrator_has_aborted_is_told(pair, ends, caplog):
    ends.by["commit"] = abort_part(pair[1])
    with caplog.at_level(logging.ERROR, "txnbridge"), spanning(*pair) as span:
        send(span, pair, b"1")
    assert span.outcome is Outcome.COMMITTED
    assert "is torn" in caplog.text
    assert sorted(values(pair)) == [[], [b"1"]]


def test_a_part_that_was_aborted_before_the_decision_aborts_all(pair, ends):
    ends.by["commit"] = abort_part(pair[0])
    with pytest.raises(errors.TransactionAborted), spanning(*pair) as span:
        send(span, pair, b"1")
    assert span.outcome is Outcome.ABORTED
    assert values(pair) == [[], []]


def test_a_pair_that_cannot_be_a_span_is_refused(pair):
    a, b = pair
    for given in ((), (a,), (a.url, a)):
        with pytest.raises(errors.InvalidOption, match="bridges to two or more clusters"):
            spanning(*given)
    with pytest.raises(errors.InvalidOption, match="two or more clusters"):
        a.processor("t", group="g", each=move, to=a)
    with spanning(a, b) as span, txnbridge.connect(a.url) as other:
        with pytest.raises(errors.InvalidOption, match="on\\(\\) takes"):
            span.on(other)
    with pytest.raises(errors.InvalidState):
        span.on(a)
    with spanning(a, b) as span, pytest.raises(errors.InvalidState, match="its span ends it"), span.on(b):
        pass
    mine = [txnbridge.connect(each.url, application="my shop") for each in pair]
    with mine[0], mine[1], pytest.raises(errors.InvalidOption, match="application="):
        spanning(*mine)


@pytest.mark.parametrize("hold", [0, 5])
@pytest.mark.parametrize("pair", ["?like=kafka"], indirect=True)
def test_parts_expire_a_minute_after_each_other_first_where_the_limit_is_lowest(pair, hold):
    with spanning(pair[1], pair[0], timeout=10, hold=hold) as span:
        send(span, pair, b"1")
    assert [token.cluster for token in span.tokens] == [bridge.cluster for bridge in pair]
    first, second = (token.expires_at or 0 for token in span.tokens)
    assert 55_000 < second - first < 65_000
    for timeout, wanted in ((10, 891), (901, None)):
        with pytest.raises(errors.InvalidOption, match=f"at most 900 s, its timeout of {timeout} s included"):
            spanning(*pair, timeout=timeout, hold=wanted)


def test_a_processor_sends_to_another_broker_and_acknowledges_all_or_none(pair):
    a, b = pair
    a.ensure_topics("in", "dead", "late-retry-1s")
    with a.transaction() as txn:
        txn.send_many("in", [b"1", b"poison", b"3", b"later"])
    tried: list[bytes] = []

    def move(message: txnbridge.Message, txn: txnbridge.Transaction) -> None:
        tried.append(message.value)
        txn.send("t", message.value, key=message.key)
        if message.value == b"poison":
            raise txnbridge.Poison("so it is")
        if message.value == b"later" and tried.count(b"later") < 3:
            raise ValueError("a test says so")

    settings: Any = {"group": "late", "each": move, "to": b, "dead_letter": "dead", "retry": [1]}
    a.processor("in", **settings).run(until_idle=True)
    with a.processor("in", **settings):
        wait_until(lambda: len(b.read("t", 9)) == 3)
    assert [message.value for message in b.read("t", 9)] == [b"1", b"3", b"later"]
    assert [message.value for message in a.read("dead", 9)] == [b"poison"]
    assert open_ones(pair) == []


def test_everything_is_copied_once_wherever_its_process_dies(tmp_path, kill_walk):
    numbers = count()

    def fresh() -> Pair:
        name = f"{tmp_path}/{next(numbers)}"
        made = Pair(f"embedded:{name}-a.db", f"embedded:{name}-b.db", "source", "target")
        with txnbridge.connect(made.first) as first, txnbridge.connect(made.second) as second:
            first.ensure_topics("source", "target")
            second.ensure_topics("target")
            with first.transaction() as txn:
                txn.send_many("source", [b"%d" % number for number in range(4)])
        return made

    everything = [b"0", b"1", b"2", b"3"]

    def has_all(bridge: Bridge) -> bool:
        read = sorted(message.value or b"" for message in bridge.read("target", 100))
        return read == everything and bridge.admin.transactions() == []

    def check(made: Pair) -> None:
        with txnbridge.connect(made.first) as first, txnbridge.connect(made.second) as second:
            # A prepared part does not keep another member from what lies behind its acknowledgements.
            for bridge in (first, second):
                wait_until(partial(has_all, bridge))
                assert sorted(message.value for message in bridge.read("target", 100)) == everything

    kill_walk(copy_all, check, fresh, {f"{step}/{phase}" for step in STEPS for phase in ("before", "after")})


def test_an_aborted_span_ends_its_block_quietly_and_keeps_its_exception(pair):
    with spanning(*pair) as span:
        send(span, pair, b"1")
        span.abort()
    assert span.outcome is Outcome.ABORTED
    with pytest.raises(ValueError, match="a test says so"), spanning(*pair) as span:
        span.abort()
        raise ValueError("a test says so")
    with pytest.raises(errors.InvalidState), span:
        pass
    assert values(pair) == [[], []]
    assert open_ones(pair) == []


def test_an_abort_in_the_midst_of_a_call_leaves_nothing_open_behind_the_block(pair):
    with spanning(*pair) as span:
        send(span, pair, b"1")
        part = span.on(pair[0])
        turn = part._turn
        calling = turn.pop()  # as another thread does for its call
        span.abort()
        assert part.state is State.OPEN
        turn.append(calling)
    assert span.outcome is Outcome.ABORTED
    assert part.state is State.ABORTED


@pytest.mark.parametrize("which", [0, 1])
def test_a_part_whose_abort_has_failed_aborts_all(pair, ends, which):
    with pytest.raises(errors.TransactionAborted), spanning(*pair) as span:
        send(span, pair, b"1")
        ends.by["drop"] = failing(AWAY, 0)
        with pytest.raises(txnbridge.BrokerUnavailable):
            span.on(pair[which]).abort()
    assert span.outcome is Outcome.ABORTED
    assert values(pair) == [[], []]


def test_another_bridge_to_the_same_cluster_may_be_closed_in_the_block(pair):
    with spanning(*pair) as span:
        send(span, pair, b"1")
        for other in map(txnbridge.connect, (pair[0].url, pair[1].url)):
            with other, spanning(*(other if each.cluster == other.cluster else each for each in pair)):
                pass
    assert span.outcome is Outcome.COMMITTED
    assert values(pair) == [[b"1"], [b"1"]]


def with_input(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    pair[0].ensure_topics("in")
    with pair[0].transaction() as txn:
        txn.send_many("in", [b"1", b"2", b"3"])
    return pair


def move(message: txnbridge.Message, txn: txnbridge.Transaction) -> None:
    txn.send("t", message.value)


# A broker that takes single acknowledgements, and one whose groups have positions.
ON_BOTH = pytest.mark.parametrize("pair", ["", "?like=kafka"], indirect=True)


@ON_BOTH
def test_a_message_that_the_other_broker_refuses_is_a_dead_letter_after_its_attempts(pair, ends):
    a, b = with_input(pair)
    a.ensure_topics("dead")

    def refuse(number: int, store: Callable[[], None]) -> None:
        store()
        if b"2" in sent:
            sent.clear()
            error = txnbridge.DeliveryFailed("a test says so")
            error.permanent = True
            raise error

    sent: list[bytes | None] = []

    def note(message: txnbridge.Message, txn: txnbridge.Transaction) -> None:
        sent.append(message.value)
        move(message, txn)

    ends.by["store"] = refuse
    processor = a.processor("in", group="g", each=note, to=b, dead_letter="dead", max_attempts=2, backoff=(0.01, 0.01))
    processor.run(until_idle=True)
    assert values(pair) == [[], [b"1", b"3"]]
    assert [message.value for message in a.read("dead", 9)] == [b"2"]
    assert open_ones(pair) == []


def test_a_handler_cannot_commit_what_it_sends_to_another_broker(pair):
    a, b = with_input(pair)

    def move_and_commit(message: txnbridge.Message, txn: txnbridge.Transaction) -> None:
        move(message, txn)
        txn.commit()

    with pytest.raises(errors.InvalidState, match="its processor does"):
        a.processor("in", group="g", each=move_and_commit, to=b).run(until_idle=True)
    assert values(pair) == [[], []]
    assert open_ones(pair) == []


def test_a_stop_ends_the_decision_about_a_pass(pair, ends):
    a, b = with_input(pair)

    def stop(number: int, prepare: partial[None]) -> None:
        processor.stop()
        wait_until(lambda: prepare.args[0].left() <= 20)
        prepare()

    ends.by["prepare"] = stop
    processor = a.processor("in", group="g", each=move, to=b, timeout=60, stop_timeout=20)
    processor.run(until_idle=True)
    assert 0 < ends.given["commit"][0][1] <= 20


def test_a_pass_that_cannot_begin_at_the_other_broker_leaves_nothing_open(pair):
    a, b = with_input(pair)
    with txnbridge.connect(b.url, writers=1) as busy, busy.transaction(group_commit=False):
        with warnings.catch_warnings(record=True) as told, pytest.raises(errors.DeadlineExceeded):
            warnings.simplefilter("always")
            a.processor("in", group="g", each=move, to=busy, timeout=0.2, retry_for=0.1).run()
    gc.collect()
    assert [str(each.message) for each in told] == []


def test_passes_in_opposite_directions_do_not_wait_for_the_writers_of_each_other(pair, monkeypatch):
    begun = note_calls(monkeypatch, Bridge, "_begin_part", lambda bridge, *_: bridge)
    for here, there in (with_input(pair), with_input((pair[1], pair[0]))):
        here.processor("in", group="g", each=move, to=there).run(until_idle=True)
    assert begun[:2] == begun[2:]


@ON_BOTH
def test_behind_a_committed_pass_nothing_is_read_twice(pair, ends):
    a, b = with_input(pair)
    a.processor("in", group="g", each=move, to=b, max_messages=1).run(until_idle=True)
    assert values(pair) == [[], [b"1", b"2", b"3"]]
    assert not ends.given["rewind"]


@ON_BOTH
def test_a_processor_is_idle_only_when_its_acknowledgements_are_committed(pair, monkeypatch):
    a, b = with_input(pair)
    fail_call(monkeypatch, a.bridge, "commit", AWAY)
    a.processor("in", group="g", each=move, to=b).run(until_idle=True)
    assert open_ones(pair) == []
    assert values(pair) == [[], [b"1", b"2", b"3"]]


@ON_BOTH
@pytest.mark.parametrize(("call", "error"), [("put", AWAY), ("commit", LOST)])
def test_a_pass_that_failed_or_whose_answer_was_lost_is_ended_before_later_messages(pair, ends, call, error):
    a, b = with_input(pair)
    ends.by[call] = failing(error, 0)
    a.processor("in", group="g", each=move, to=b, max_messages=1, timeout=1).run(until_idle=True)
    assert open_ones(pair) == []
    assert values(pair) == [[], [b"1", b"2", b"3"]]


def die_before_the_record(pair: tuple[Bridge, Bridge]) -> None:
    """Leave parts of a span prepared, as a process does that dies before the record."""
    with Child(send_one, addresses(pair), kill="half.store/before") as dead:
        dead.stopped()


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_part_that_the_sweep_cannot_abort_now_is_aborted_by_the_next_one(pair, ends, quick_sweep, aborted):
    die_before_the_record(pair)
    for left in pair[1].admin.transactions()[:aborted]:
        pair[1].admin.abort(left.transaction, reason="a test says so")
    ends.by["abort"] = failing(AWAY, 1 - aborted)
    with spanning(*pair):
        pass
    wait_until(lambda: open_ones(pair) == [])


def test_a_sweep_without_a_bridge_to_each_broker_leaves_all_parts_to_another_one(pair, with_timing):
    die_before_the_record(pair)
    with_timing(sweep_margin=-3600.0)
    bridges = {bridge.cluster: bridge for bridge in pair}
    sweep = SpanSweep(connection_of(pair[0]), digest(" ".join(sorted(bridges))), lambda: bridges)
    del bridges[pair[1].cluster]  # a program closes one after the other
    sweep.sweep()
    assert len(open_ones(pair)) == 2


def listing(pair: tuple[Any, Any], transactions: Callable[[], list[OpenTransaction]]) -> list[str]:
    """Let both brokers list these transactions; return the list of those that are aborted."""
    aborted: list[str] = []
    for each in pair:
        each.admin = SimpleNamespace(transactions=transactions, abort=lambda name, reason: aborted.append(name))
    return aborted


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_an_open_part_is_aborted_when_its_process_can_no_longer_prepare_it(pair, ended, named):
    clusters = digest(" ".join(sorted(bridge.cluster for bridge in pair)))
    until = time.time() + (-90 if ended else 90)
    left = OpenTransaction("t", "open", prepares_until=int(until * 1000))
    if named:
        left = OpenTransaction(f"t{mark(f'{clusters}-x', 1, until)}", "open")
    aborted = listing(pair, lambda: [left])
    sweep_of(pair).sweep()
    assert {*aborted} == ({left.transaction} if ended else set())


def test_an_open_part_is_due_by_the_time_at_which_the_look_at_it_began(pair, monkeypatch):
    clock = [1_000.0]

    def look_for_long() -> list[OpenTransaction]:
        clock[0] += 100  # meanwhile the process prepares the part, and commits the part that decides
        return [OpenTransaction("t", "open", prepares_until=1_010_000)]

    monkeypatch.setattr("txnbridge._half.span_sweep.time", SimpleNamespace(time=lambda: clock[0]))
    aborted = listing(pair, look_for_long)
    sweep_of(pair).sweep()
    assert aborted == []


@pytest.mark.parametrize(
    ("row", "decision", "listed"), [("-x", Decision.ABORT, False), (".row", Decision.COMMIT, True)]
)
def test_an_open_part_that_was_prepared_since_the_look_is_not_aborted(pair, row, decision, listed):
    clusters = digest(" ".join(sorted(bridge.cluster for bridge in pair)))
    left = OpenTransaction(f"t{mark(f'{clusters}{row}', 1, time.time() - 90)}", "open")
    looks = count()
    aborted = listing(pair, lambda: [left] if listed or next(looks) < 2 else [])
    bridges = {bridge.cluster: bridge for bridge in pair}
    SpanSweep(connection_of(pair[0]), clusters, lambda: bridges, settle=lambda *_: decision).sweep()
    assert aborted == []


def test_a_sweep_that_hangs_is_left_to_itself_when_its_time_is_over(pair, quick_sweep, caplog):
    runs, go_on = threading.Event(), threading.Event()

    def hang() -> list[OpenTransaction]:
        runs.set()
        go_on.wait()
        return []

    listing(pair, hang)
    sweep = sweep_of(pair)
    sweep.start()
    assert runs.wait(60)
    sweep.close()
    go_on.set()
    assert "did not end within its stop_timeout" in caplog.text


def test_a_sweep_leaves_spans_over_other_brokers_to_their_own(pair, tmp_path, quick_sweep):
    with txnbridge.connect(f"embedded:{tmp_path}/c.db") as c, spanning(pair[0], c):
        c.ensure_topics("t")
        die_before_the_record(pair)
        time.sleep(1)
        with spanning(*pair):
            pass
        wait_until(lambda: open_ones(pair) == [])


@pytest.mark.parametrize("opened", ["Spans", "HalfMessages"])
def test_a_span_waits_for_the_first_one_of_another_thread_no_longer_than_its_timeout(pair, monkeypatch, opened):
    hold = Hold()
    monkeypatch.setattr(f"txnbridge._half.span.{opened}", hold)
    with hold.asked_by(lambda: spanning(*pair)), pytest.raises(errors.DeadlineExceeded):
        spanning(*pair, timeout=0.1)
