"""Half messages on the embedded broker: messages and local work agree, whatever fails or dies in between."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.conformance.broken import around
from tests.core.half.test_half_lanes import check_wherever_a_seller_dies, says
from tests.core.toy import ToyBackend, connect_toy
from tests.embedded.kit import busy, rows
from tests.failing import on_call, raising
from tests.inside import broker_of, connection_of, consumers_of
from tests.interrupts import interrupted_everywhere
from tests.kill_walk import KillWalk
from txnbridge import Bridge, Capability, Decision, HalfMessages, HalfTransaction, Message, Outcome, errors
from txnbridge._base.timing import Timing
from txnbridge.spi import absent

COMMIT, ABORT, UNDECIDED = Decision.COMMIT, Decision.ABORT, Decision.UNDECIDED
# Asked about soon, and soon again.
SOON = "half_check_seconds=0.2"
# The time that local work has; then an ABORT of `check` counts.
TIMEOUT = 0.5
LOST = errors.OutcomeUnknown("the answer is lost")


Values = tuple[list[bytes], list[bytes]]
BOTH: Values = [b"order"], [b"audit"]
NOTHING: Values = [], []


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Bridge]:
    with txnbridge.connect(f"embedded:{tmp_path}/broker.db?{SOON}") as bridge:
        yield bridge


@pytest.fixture
def failing(bridge: Bridge, broken_broker: Callable[..., str]) -> Iterator[Callable[..., Bridge]]:
    """Return a function that opens another bridge to the broker, whose half store has such methods."""
    with ExitStack() as opened:

        def connect(**methods: Callable[..., Any]) -> Bridge:
            scheme = broken_broker(Halving=around(**methods))
            return opened.enter_context(txnbridge.connect(f"{bridge.url.replace('embedded', scheme)}?{SOON}"))

        yield connect


def stored(bridge: Bridge, query: str) -> Any:
    return rows(broker_of(bridge), query)


def sell(sales: HalfMessages, arg: Any = None, timeout: float = 60) -> HalfTransaction:
    with sales.transaction(arg, timeout=timeout) as txn:
        txn.send("orders", b"order", key="k", headers={"h": "1"})
        txn.send("audit", b"audit")
    return txn


def published(bridge: Bridge) -> Values:
    orders, audit = ([m.value for m in bridge.read(topic, 10)] for topic in ("orders", "audit"))
    return orders, audit


@pytest.fixture(autouse=True)
def topics(bridge: Bridge) -> None:
    bridge.ensure_topics("orders", "audit")


@pytest.mark.parametrize("execute", [says(ABORT), raising(errors.Abort)])
def test_a_half_message_that_execute_refuses_is_never_seen(bridge: Bridge, execute: Callable[..., Decision]) -> None:
    with bridge.half_messages("shop", execute=execute, check=says(COMMIT)) as sales:
        assert sell(sales).outcome is Outcome.ABORTED
    assert published(bridge) == NOTHING


@pytest.mark.parametrize("error", [errors.Abort, ZeroDivisionError])
def test_an_exception_in_the_block_stores_nothing_and_does_no_work(bridge: Bridge, error: type[Exception]) -> None:
    no_work = raising(AssertionError("no work"))
    with bridge.half_messages("shop", execute=no_work, check=says(COMMIT)) as sales:
        with suppress(ZeroDivisionError), sales.transaction() as txn:
            txn.send("orders", b"never")
            raise error
    assert (txn.outcome, stored(bridge, "SELECT * FROM halves")) == (Outcome.ABORTED, [])


@pytest.mark.parametrize(
    ("execute", "error"),
    [(raising(ZeroDivisionError), ZeroDivisionError), (says(UNDECIDED), None), (lambda *_: None, errors.InvalidOption)],
    ids=["raises", "undecided", "nonsense"],
)
@pytest.mark.parametrize("decision", [COMMIT, ABORT])
def test_check_decides_a_half_message_whose_execute_does_not(bridge, execute, error, decision):
    asked: list[tuple[str, list[tuple[str, bytes, bytes | None]]]] = []

    def check(id: str, messages: Sequence[Message]) -> Any:
        asked.append((id, [(m.topic, m.value, m.key) for m in messages]))
        return decision

    with bridge.half_messages("shop", execute=execute, check=check) as sales:
        txn = sales.transaction(timeout=TIMEOUT)
        with pytest.raises(error) if error else nullcontext(), txn:
            txn.send("orders", b"order", key="k")
        assert txn.outcome is Outcome.UNKNOWN
        ended = f"SELECT state FROM halves WHERE transaction_id = '{txn.id}' AND ended_at > 0"
        eventually(lambda: stored(bridge, ended) != [], "it is ended")
    assert asked[-1] == (txn.id, [("orders", b"order", b"k")])
    assert [m.value for m in bridge.read("orders", 10)] == ([b"order"] if decision is COMMIT else [])


def test_no_work_is_done_for_messages_of_which_nobody_knows_whether_they_are_stored(bridge, failing):
    done: list[Any] = []

    def lose(inner: Any, *given: Any) -> None:
        inner.put(*given)
        raise LOST

    def execute(*given: Any) -> Decision:
        done.append(given)
        return COMMIT

    with failing(put=lose).half_messages("shop", execute=execute, check=says(COMMIT)) as sales:
        with pytest.raises(errors.BrokerUnavailable, match="nothing was done"):
            sell(sales)
        assert (done, published(bridge)) == ([], NOTHING)
        assert stored(bridge, "SELECT state FROM halves") == [("aborted",)]


def test_a_block_that_a_signal_interrupts_raises_what_its_handler_has_raised(bridge: Bridge) -> None:
    with bridge.half_messages("shop", execute=says(ABORT), check=says(ABORT)) as sales:
        assert interrupted_everywhere(lambda: sell(sales), lambda: None, ["half_messages.py"])


def test_a_block_that_outlasts_its_transaction_is_aborted_before_the_work(bridge: Bridge) -> None:
    done: list[object] = []

    def execute(txn: HalfTransaction, given: object) -> Decision:
        done.append(given)
        return COMMIT

    with bridge.half_messages("shop", execute=execute, check=says(COMMIT)) as sales:
        with pytest.raises(errors.TransactionTimedOut), sales.transaction(timeout=0.01) as txn:
            time.sleep(0.02)
    assert (txn.outcome, done) == (Outcome.ABORTED, [])


@pytest.mark.parametrize("happened", [True, False])
def test_a_lost_answer_to_its_end_is_asked_for_again(bridge, failing, happened):
    asked: list[Any] = []

    def lose(inner: Any, *given: Any) -> Any:
        asked.append(given)
        outcome = inner.end(*given) if happened or len(asked) > 1 else None
        if len(asked) == 1:
            raise LOST
        return outcome

    with failing(end=lose).half_messages("shop", execute=says(COMMIT), check=says(UNDECIDED)) as sales:
        assert sell(sales).outcome is Outcome.COMMITTED
    assert published(bridge) == BOTH


@pytest.mark.parametrize("error", [errors.BrokerUnavailable, errors.NotFound, errors.AccessDenied])
def test_check_tells_the_broker_a_decision_that_execute_could_not_deliver(bridge, failing, error):
    away = [error("it is away")]

    def end(inner: Any, *given: Any) -> Any:
        if away:
            raise away[0]
        return inner.end(*given)

    with failing(end=end).half_messages("shop", execute=says(COMMIT), check=says(COMMIT)) as sales:
        with pytest.raises(errors.OutcomeUnknown, match="check is asked"):
            sell(sales, timeout=TIMEOUT)
        away.clear()
        eventually(lambda: published(bridge) == BOTH, "it is published")


def test_the_end_of_a_half_message_that_is_gone_is_not_tried_again(failing):
    asked: list[Decision] = []

    def end(inner: Any, half: Any, decision: Decision, deadline: Any) -> None:
        asked.append(decision)
        raise errors.EvidenceLost("a half is gone")

    with failing(end=end).half_messages("shop", execute=says(COMMIT), check=says(UNDECIDED)) as sales:
        with pytest.raises(errors.EvidenceLost, match="a half is gone"):
            sell(sales, timeout=5)
    assert asked == [COMMIT]


def test_an_abort_of_check_counts_only_when_the_time_of_the_work_is_over(bridge, with_timing):
    asked: list[str] = []

    def check(id: str, messages: Sequence[Message]) -> Decision:
        asked.append(id)
        return ABORT

    def slow(txn: HalfTransaction, arg: object) -> Decision:
        eventually(lambda: txn.id in asked and sales._resolver.stats.checks >= len(asked), "its answer is taken")
        return COMMIT

    with bridge.half_messages("shop", execute=slow, check=check) as sales:
        with_timing(first_check=0.0)
        assert sell(sales, timeout=60).outcome is Outcome.COMMITTED
        with_timing(first_check=Timing.first_check)
        with pytest.raises(errors.TransactionAborted, match="check answered ABORT"):
            sell(sales, timeout=TIMEOUT)


def test_a_check_that_fails_or_hangs_is_asked_again_and_what_nobody_answers_for_is_parked(bridge, tmp_path, caplog):
    held = threading.Event()

    def check(id: str, messages: Sequence[Message]) -> Decision:
        held.wait(60)
        raise ValueError(messages[0].value)

    url = f"{bridge.url.partition('?')[0]}?half_check_seconds=0.05&half_checks=2"
    with txnbridge.connect(url) as other:
        resolver = other.resolver("shop", check=check, parallel=1, check_timeout=0.1)
        with resolver:
            with bridge.half_messages("shop", execute=says(UNDECIDED), check=says(UNDECIDED)) as sales:
                sales.close()
                txn = sell(sales, timeout=TIMEOUT)
            eventually(lambda: not resolver.healthy, "it hangs")
            assert "occupies one of 1 threads" in caplog.text
            held.set()
            eventually(lambda: other.admin.parked("shop") != [], "it is parked")
            assert resolver.healthy
        assert resolver.stats.failed == 2
        assert "ValueError at " in caplog.text and "order" not in caplog.text.replace(txn.id, "")
        [half] = other.admin.parked("shop")
        assert (half.transaction, half.checks, len(half.messages)) == (txn.id, 2, 2)
        [advice] = [advice for advice in other.admin.doctor() if "parked" in advice.text]
        assert (advice.level, advice.remedy) == ("warning", "txnbridge resolver parked --group shop")
        with pytest.raises(errors.InvalidOption, match="COMMIT or ABORT"):
            other.admin.end_parked("shop", txn.id, UNDECIDED)
        other.admin.resume("shop", txn.id)
        assert other.admin.parked("shop") == []
        with other.resolver("shop", check=says(COMMIT)):
            eventually(lambda: published(bridge) == BOTH, "it is asked again")
        with pytest.raises(errors.NotFound):
            other.admin.end_parked("shop", txn.id, ABORT)


def test_a_resolver_is_unhealthy_once_it_cannot_look_for_longer_than_the_timeout(bridge, with_timing, caplog):
    with_timing(check_wait=0.1)
    with bridge.half_messages("shop", execute=says(UNDECIDED), check=says(UNDECIDED)) as sales:
        sales.close()
        sell(sales, timeout=TIMEOUT)
    with txnbridge.connect(bridge.url, timeout=3) as other, other.resolver("shop", check=says(UNDECIDED)) as resolver:
        eventually(lambda: resolver.healthy, "it runs")
        with busy(broker_of(bridge)):
            eventually(lambda: "retries in" in caplog.text, "it has failed")
            assert resolver.healthy
            eventually(lambda: not resolver.healthy, "it has failed for too long")
        eventually(lambda: resolver.healthy, "it can look again")


def test_a_check_that_hangs_keeps_one_place_however_often_it_is_due(bridge: Bridge) -> None:
    hanging, held, asked = threading.Event(), threading.Event(), list[str]()

    def check(id: str, messages: Sequence[Message]) -> Decision:
        asked.append(id)
        if len(set(asked)) > 1:
            return COMMIT
        hanging.set()
        held.wait(60)
        return UNDECIDED

    with bridge.half_messages("shop", execute=says(UNDECIDED), check=says(UNDECIDED)) as sales:
        sales.close()
        with bridge.resolver("shop", check=check, parallel=2):
            try:
                first = sell(sales, timeout=TIMEOUT)
                assert hanging.wait(60)
                eventually(lambda: stored(bridge, "SELECT checks FROM halves")[0][0] > 1, "it is due again")
                second = sell(sales, timeout=TIMEOUT)
                eventually(lambda: published(bridge) == BOTH, "another one is asked about")
                assert asked == [first.id, second.id]
            finally:
                held.set()


def test_a_check_for_which_there_is_no_thread_is_made_later(bridge: Bridge, no_threads) -> None:
    refused = no_threads(0, when=lambda thread: thread.name.startswith("txnbridge check"))
    with bridge.half_messages("shop", execute=says(UNDECIDED), check=says(COMMIT)) as sales:
        sell(sales, timeout=TIMEOUT)
        eventually(lambda: published(bridge) == BOTH, "it is published")
    assert refused


def test_closing_a_bridge_ends_its_resolvers_and_what_they_asked_about_waits(bridge: Bridge, tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def check(*_: Any) -> Decision:
        asked.set()
        go_on.wait(60)
        return COMMIT

    with txnbridge.connect(f"{bridge.url}?{SOON}", timeout=1) as closing_one:
        sales = closing_one.half_messages("shop", execute=says(UNDECIDED), check=check)
        sell(sales, timeout=TIMEOUT)
        assert asked.wait(60)
    go_on.set()
    eventually(lambda: not connection_of(closing_one).services, "it ends with its last check")
    with pytest.raises(errors.InvalidState, match="closed"):
        sales.transaction()
    with bridge.resolver("shop", check=says(COMMIT)):
        eventually(lambda: published(bridge) == BOTH, "another process ends it")


def test_a_resolver_that_is_stopped_does_not_wait_for_check_backs(bridge, with_timing, caplog):
    with_timing(check_wait=3600.0)
    with bridge.resolver("shop", check=says(COMMIT), stop_timeout=5):
        time.sleep(0.5)  # it waits for check-backs
    assert "did not end" not in caplog.text


def test_a_check_that_hangs_leaves_a_closing_bridge_time_for_the_rest(bridge, monkeypatch):
    asked, go_on = threading.Event(), threading.Event()
    left: list[float] = []

    def check(*_: Any) -> Decision:
        asked.set()
        go_on.wait(60)
        return UNDECIDED

    closing_one = txnbridge.connect(f"{bridge.url}?{SOON}", timeout=8)
    broker, consumers = broker_of(closing_one), consumers_of(closing_one)
    for each in (broker, consumers):
        on_call(monkeypatch, each, "close", lambda *deadlines: left.append(deadlines[-1].left()))
    try:
        sell(closing_one.half_messages("shop", execute=says(UNDECIDED), check=check), timeout=TIMEOUT)
        assert asked.wait(60)
        closing_one.close()
    finally:
        go_on.set()
    assert len(left) == 2 and all(left), left


def test_bad_calls_are_refused_by_name(bridge: Bridge) -> None:
    for group in ("", "two words", None):
        with pytest.raises(errors.InvalidOption, match="group"):
            bridge.half_messages(group, execute=says(COMMIT), check=says(COMMIT))  # type: ignore[arg-type]
    for wrong in ({"execute": None, "check": says(COMMIT)}, {"execute": says(COMMIT), "check": None}):
        with pytest.raises(errors.InvalidOption, match="is called as f"):
            bridge.half_messages("g", **wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidOption, match="parallel"):
        bridge.resolver("g", check=says(COMMIT), parallel=0)
    with bridge.half_messages("g", execute=says(COMMIT), check=says(COMMIT)) as sales:
        with sales.transaction() as txn, pytest.raises(errors.InvalidOption):
            txn.send("orders", 7)
        with pytest.raises(errors.InvalidState, match="has ended"):
            txn.send("orders", b"late")
        with pytest.raises(errors.InvalidState, match="has ended"), txn:
            pass
        assert txn.outcome is Outcome.COMMITTED  # of nothing but its work
    lacking, _ = connect_toy(ToyBackend({Capability.HALF_MESSAGES: absent("it has none")}))
    with lacking, pytest.raises(errors.NotSupported, match="half-messages"):
        lacking.half_messages("g", execute=says(COMMIT), check=says(COMMIT))


@pytest.mark.timeout(240)
def test_work_and_messages_agree_wherever_a_process_dies(tmp_path: Path, kill_walk: KillWalk) -> None:
    check_wherever_a_seller_dies(f"embedded:{tmp_path}/NAME.broker?{SOON}", tmp_path, kill_walk, (COMMIT,))
