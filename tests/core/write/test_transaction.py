"""A transaction's states and guards, on a backend that fails as it is told."""

import gc
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import Mock

import pytest

from tests.core.toy import SlowWriter, ToyBackend, ToyBroker, ToyWriter, connect_toy
from tests.failing import note_calls, raising
from tests.in_time import Hold, wait_until, within
from tests.inside import connection_of, queued, writers_of
from txnbridge import Bridge, Decision, Event, Outcome, State, Status, TokenState, Topic, Transaction, codecs, errors
from txnbridge._bridge import _at_exit, _live
from txnbridge.errors import BrokerUnavailable, InvalidOption, InvalidState, OutcomeUnknown, TransactionAborted
from txnbridge.spi import Deadline
from txnbridge.testing import listening


@pytest.fixture
def toy() -> Iterator[tuple[Bridge, ToyBroker]]:
    bridge, broker = connect_toy(writers=1, timeout=0.4, transactional_id="billing")
    with bridge:
        yield bridge, broker


@pytest.fixture
def bridge(toy: tuple[Bridge, ToyBroker]) -> Bridge:
    return toy[0]


@pytest.fixture
def broker(toy: tuple[Bridge, ToyBroker]) -> ToyBroker:
    return toy[1]


@pytest.fixture
def writer(broker: ToyBroker) -> ToyWriter:
    return broker.writers[0]


def test_a_failing_abort_never_hides_the_exception_of_the_block(bridge, writer, caplog):
    writer.raises["abort"] = [BrokerUnavailable("gone")]
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError), bridge.transaction() as txn:
        raise KeyError("mine")
    assert "gone" in caplog.text
    assert txn.outcome is Outcome.UNKNOWN and txn.token is not None
    writer.raises["abort"] = [BrokerUnavailable("gone")]
    with pytest.raises(BrokerUnavailable), bridge.transaction():  # there is nothing to hide
        raise errors.Abort


def test_a_transaction_is_used_once(bridge: Bridge) -> None:
    with bridge.transaction() as txn:
        pass
    with pytest.raises(InvalidState), txn:
        pass


def test_a_failed_delivery_leaves_only_abort(bridge: Bridge, writer: ToyWriter) -> None:
    writer.raises["send"] = [errors.DeliveryFailed("queue lost")]
    txn = bridge.transaction()
    with pytest.raises(errors.DeliveryFailed):
        txn.send("orders", b"1")
    assert txn.state is State.FAILED
    with pytest.raises(InvalidState, match="queue lost"):
        txn.send("orders", b"2")
    with pytest.raises(InvalidState, match="abort it"):
        txn.commit()
    txn.abort()
    assert txn.outcome is Outcome.ABORTED


def test_a_failed_delivery_that_was_swallowed_is_raised_at_the_end_of_the_block(bridge, writer):
    writer.raises["send"] = [BrokerUnavailable("gone")]
    with pytest.raises(TransactionAborted) as caught, bridge.transaction() as txn, pytest.raises(BrokerUnavailable):
        txn.send("orders", b"1")
    assert isinstance(caught.value.__cause__, BrokerUnavailable)
    assert txn.outcome is Outcome.ABORTED


@pytest.mark.parametrize(
    "error", [errors.Conflict("taken"), errors.Fenced("newer", newer="host-2"), errors.DeliveryFailed("lost")]
)
def test_a_commit_that_certainly_did_not_happen_is_aborted(bridge: Bridge, writer: ToyWriter, error: Exception) -> None:
    writer.raises["commit"] = [error]
    with pytest.raises(type(error)), bridge.transaction() as txn:
        txn.send("orders", b"1")
    assert txn.outcome is Outcome.ABORTED


def test_a_commit_that_could_not_be_asked_leaves_only_abort(bridge: Bridge, writer: ToyWriter) -> None:
    writer.raises["commit"] = [BrokerUnavailable("gone"), BrokerUnavailable("gone")]
    with pytest.raises(BrokerUnavailable), bridge.transaction() as txn:
        txn.send("orders", b"1")
    assert txn.outcome is Outcome.ABORTED
    assert writer.calls == ["begin", "send", "commit", "abort"]
    txn = bridge.transaction()  # the only writer is free again
    with pytest.raises(BrokerUnavailable):
        txn.commit()
    assert txn.state is State.FAILED
    txn.abort()
    assert txn.outcome is Outcome.ABORTED


@pytest.mark.parametrize(
    ("lost", "found", "error", "outcome"),
    [
        (OutcomeUnknown, [BrokerUnavailable("still gone"), Status(TokenState.COMMITTED)], None, Outcome.COMMITTED),
        (OutcomeUnknown, [errors.AccessDenied("the password has expired")], OutcomeUnknown, Outcome.UNKNOWN),
        (OutcomeUnknown, [Status(TokenState.ABORTED)], TransactionAborted, Outcome.ABORTED),
        (
            OutcomeUnknown,
            [Status(TokenState.UNKNOWN, reason="trimmed", permanent=True)],
            errors.EvidenceLost,
            Outcome.UNKNOWN,
        ),
        (errors.EvidenceLost, [Status(TokenState.COMMITTED)], errors.EvidenceLost, Outcome.UNKNOWN),
    ],
    ids=["found", "not allowed", "aborted", "gone", "gone at once"],
)
def test_a_lost_answer_is_looked_up_before_anybody_is_told_unknown(bridge, broker, lost, found, error, outcome):
    broker.writers[0].raises["commit"] = [lost("trimmed")]
    broker.answers["status"] = found
    with pytest.raises(error) if error else nullcontext() as caught, bridge.transaction() as txn:
        txn.send("orders", b"1")
    assert txn.outcome is outcome
    if error is errors.EvidenceLost:
        assert caught is not None
        assert "trimmed" in str(caught.value) and caught.value.permanent and caught.value.token == str(txn.token)


def test_a_commit_that_was_interrupted_is_unknown(bridge: Bridge, writer: ToyWriter) -> None:
    writer.raises["commit"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt), bridge.transaction() as txn:
        txn.send("orders", b"1")
    assert txn.outcome is Outcome.UNKNOWN and txn.token is not None


def test_after_an_unknown_outcome_the_writer_is_reopened_before_it_is_used(bridge: Bridge, writer: ToyWriter) -> None:
    writer.raises["commit"] = [OutcomeUnknown("no answer")]
    with pytest.raises(OutcomeUnknown), bridge.transaction():
        pass
    with bridge.transaction():
        pass
    assert writer.calls == ["begin", "commit", "reopen", "begin", "commit"]


def test_a_writer_that_cannot_be_reopened_is_tried_again_and_takes_no_place(bridge: Bridge, writer: ToyWriter) -> None:
    writer.raises["commit"] = [OutcomeUnknown("no answer")]
    writer.raises["reopen"] = [BrokerUnavailable("gone"), errors.Fenced("newer owner")]
    with pytest.raises(OutcomeUnknown), bridge.transaction():
        pass
    with pytest.raises(BrokerUnavailable):
        bridge.transaction()
    with pytest.raises(errors.Fenced):
        bridge.transaction()
    with bridge.transaction():
        pass


@pytest.mark.parametrize("refused", ["begin", "reopen"])
def test_while_one_writer_can_begin_nothing_the_others_go_on(refused):
    bridge, broker = connect_toy(writers=2, timeout=0.5)
    with bridge:
        bridge.transaction().abort()
        first = next(writer for writer in broker.writers if writer.calls)
        first.raises = {"commit": [OutcomeUnknown("no answer")], refused: [BrokerUnavailable("gone")]}
        with pytest.raises(OutcomeUnknown if refused == "reopen" else BrokerUnavailable), bridge.transaction():
            pass
        if refused == "reopen":
            with pytest.raises(BrokerUnavailable):
                bridge.transaction()
        calls = len(first.calls)
        for _ in range(3):
            with bridge.transaction():
                pass
        assert len(first.calls) == calls


@pytest.mark.parametrize("error", [errors.Conflict("taken"), BrokerUnavailable("gone"), OutcomeUnknown("no answer")])
def test_a_prepare_that_failed_is_aborted_and_leaves_no_token(bridge: Bridge, broker: ToyBroker, error: Exception):
    txn = bridge.transaction(prepare=True)
    broker.writers[-1].raises["prepare"] = [error]
    with pytest.raises(type(error)), txn:
        txn.send("orders", b"1")
    assert txn.outcome is Outcome.ABORTED and txn.token is None


def test_a_block_decides_nothing_once_its_transaction_is_prepared(bridge: Bridge) -> None:
    with bridge.transaction(prepare=True) as txn:
        pass
    with pytest.raises(InvalidState, match="is prepared"):
        txn.abort()


def test_ending_by_token_is_repeated_until_an_answer_comes(bridge: Bridge, broker: ToyBroker) -> None:
    with bridge.transaction(prepare=True) as txn:
        pass
    broker.answers["commit"] = [OutcomeUnknown("lost"), BrokerUnavailable("gone"), Outcome.ABORTED]
    assert txn.token is not None
    assert bridge.commit(txn.token) is Outcome.ABORTED  # the truth, though COMMIT was asked


def test_ending_by_token_gives_up_at_the_deadline_and_says_unknown(bridge: Bridge, broker: ToyBroker) -> None:
    with bridge.transaction(prepare=True) as txn:
        pass
    broker.answers["commit"] = [OutcomeUnknown("lost")] * 100
    with pytest.raises(OutcomeUnknown) as caught:
        bridge.commit(str(txn.token))
    assert caught.value.token == str(txn.token)


def test_a_prepared_transaction_may_not_live_longer_than_the_broker_allows(bridge: Bridge) -> None:
    with pytest.raises(InvalidOption, match="3600"):
        bridge.transaction(prepare=True, hold=3601)


def test_a_fingerprint_does_not_depend_on_the_order(bridge: Bridge) -> None:
    def fingerprint(*messages: tuple[bytes | None, bytes | None]) -> int | None:
        with bridge.transaction(prepare=True, fingerprint=True) as txn:
            for value, key in messages:
                txn.send("orders", value, key=key)
        assert txn.token is not None
        return txn.token.fingerprint

    assert fingerprint((b"1", None), (b"2", b"k")) == fingerprint((b"2", b"k"), (b"1", None))
    assert fingerprint((b"1", b"2")) != fingerprint((b"2", b"1"))
    assert fingerprint((b"", None)) != fingerprint((b"", b""))
    assert fingerprint() == 0


def test_a_second_call_while_one_runs_is_refused(bridge: Bridge, writer: ToyWriter) -> None:
    txn = bridge.transaction()

    def items() -> Iterator[bytes]:
        with pytest.raises(InvalidState, match="one thread at a time"):
            txn.send("orders", b"from inside")
        with pytest.raises(InvalidState, match="one thread at a time"):
            txn.commit()
        yield b"1"

    txn.send_many("orders", items())
    txn.commit()
    assert writer.sent == [("orders", b"1")]


def test_threads_get_a_writer_in_the_order_in_which_they_came_however_long_they_wait(with_timing):
    with_timing(writer_checks=0.01)
    bridge, _ = connect_toy(writers=1)
    writers = writers_of(bridge)
    order: list[int] = []

    def wait_for_a_writer(number: int) -> None:
        with bridge.transaction(timeout=60):
            order.append(number)

    held = bridge.transaction(timeout=60)
    threads = [threading.Thread(target=wait_for_a_writer, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: queued(writers._turns) == number)  # type: ignore[misc]
    time.sleep(0.3)  # so each has waited for many turns
    held.commit()
    for thread in threads:
        thread.join()
    assert order == list(range(8))


@pytest.mark.parametrize("group_commit", [False, True])
def test_an_unfinished_transaction_warns_and_is_aborted_by_the_next_one_within_its_deadline(group_commit):
    bridge, broker = connect_toy(ToyBackend(group_commit=group_commit), writers=1)
    txn = bridge.transaction()
    with pytest.warns(ResourceWarning, match="left unfinished"):
        del txn
        gc.collect()
    (writer,) = broker.writers
    assert writer.calls == ["begin"]
    with bridge.transaction(timeout=7):
        pass
    assert (writer.calls, writer.abort_seconds) == (["begin", "abort", "begin", "commit"], 7)
    bridge.close()


def test_a_writer_made_for_preparing_is_closed_if_it_does_not_begin_or_its_transaction_is_left_unfinished(
    bridge: Bridge, broker: ToyBroker, writer: ToyWriter
) -> None:
    broker.acts["begin"] = raising(BrokerUnavailable("gone"))
    with pytest.raises(BrokerUnavailable):
        bridge.transaction(prepare=True)
    broker.acts.clear()
    made = broker.writers[-1]
    txn = bridge.transaction(prepare=True)
    with pytest.warns(ResourceWarning, match="left unfinished"):
        del txn
        gc.collect()
    for _ in range(2):
        with bridge.transaction():
            pass
    assert made.calls == ["close"]
    assert broker.writers[-1].calls == ["begin", "abort", "close"]
    assert writer.calls == ["begin", "commit"] * 2


def test_closing_the_bridge_is_complete_also_if_its_warning_is_raised_as_an_error() -> None:
    bridge, broker = connect_toy()
    unfinished = [bridge.transaction(), bridge.transaction()]
    with pytest.raises(ResourceWarning, match="left unfinished"):
        bridge.close()
    assert [txn.outcome for txn in unfinished] == [Outcome.ABORTED] * 2 and broker.closed


def test_a_block_whose_bridge_was_closed_meanwhile_does_not_end_as_if_it_had_committed() -> None:
    bridge, _ = connect_toy()
    with pytest.raises(TransactionAborted, match="closed"), bridge.transaction() as txn:
        with pytest.warns(ResourceWarning, match="left unfinished"):
            bridge.close()
        with pytest.raises(InvalidState, match="closed"):
            txn.send("t", b"1")
    assert txn.outcome is Outcome.ABORTED


@contextmanager
def slow_commit(timeout: float) -> Iterator[tuple[Bridge, ToyBroker, SlowWriter, Transaction]]:
    """A bridge on which another thread commits."""
    bridge, broker = connect_toy(timeout=timeout)
    writer = SlowWriter()
    broker.open_writers = lambda *given: [writer]  # type: ignore[method-assign]
    txn = bridge.transaction(timeout=60)
    thread = threading.Thread(target=txn.commit)
    thread.start()
    assert writer.begun.wait(60)
    try:
        yield bridge, broker, writer, txn
    finally:
        writer.may_end.set()
        thread.join()


def test_closing_waits_for_a_running_commit_and_refuses_new_transactions() -> None:
    with slow_commit(timeout=60) as (bridge, broker, writer, txn):
        closing = threading.Thread(target=bridge.close)
        closing.start()
        wait_until(lambda: connection_of(bridge).closed)
        for call in (bridge.transaction, bridge.publisher, lambda: bridge.consumer("t")):
            with pytest.raises(InvalidState, match="closed"):
                call()
        assert not broker.closed
        writer.may_end.set()
        closing.join()
    assert (txn.outcome, broker.closed) == (Outcome.COMMITTED, True)
    assert writer.calls == ["begin", "commit", "close"]


def test_a_commit_that_runs_longer_than_closing_may_last_keeps_its_writer_to_its_end() -> None:
    with slow_commit(timeout=0.1) as (bridge, broker, writer, txn):
        bridge.close()
        assert broker.closed and writer.calls == ["begin"]
    assert txn.outcome is Outcome.COMMITTED
    assert writer.calls == ["begin", "commit", "close"]


def test_closing_a_bridge_waits_for_another_thread_that_closes_it() -> None:
    with slow_commit(timeout=60) as (bridge, broker, writer, _):
        closing = [threading.Thread(target=bridge.close) for _ in range(2)]
        closing[0].start()
        wait_until(lambda: connection_of(bridge).closed)
        closing[1].start()
        closing[1].join(0.2)
        assert closing[1].is_alive() and not broker.closed
        writer.may_end.set()
        for thread in closing:
            thread.join()
    assert writer.calls == ["begin", "commit", "close"]


def test_closing_a_bridge_waits_for_another_closing_thread_no_longer_than_the_timeout() -> None:
    bridge, broker = connect_toy(timeout=0.2)
    broker.close = closing = Hold()  # type: ignore[method-assign]
    with closing.asked_by(bridge.close):
        bridge.close()


def test_closing_by_a_signal_handler_leaves_the_call_that_it_interrupted_alone() -> None:
    class Interrupted(ToyWriter):
        def commit(self, deadline: Deadline) -> None:
            signal.raise_signal(signal.SIGUSR1)
            super().commit(deadline)

    bridge, broker = connect_toy(timeout=60)
    broker.open_writers = lambda *given: [Interrupted()]  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, lambda *_: bridge.close())
    try:
        with bridge:
            with bridge.transaction() as txn:
                txn.send("t", b"1")
            assert (txn.outcome, broker.closed) == (Outcome.COMMITTED, False)
            with pytest.raises(InvalidState, match="closed"):
                bridge.transaction()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert broker.closed


@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
def test_a_bridge_whose_opening_is_interrupted_at_its_end_is_closed_by_the_next_connect() -> None:
    def interrupt(event: Event) -> None:
        if (event.name, event.phase) == ("bridge.open", "after"):
            raise KeyboardInterrupt

    backend = ToyBackend()
    with listening(interrupt), suppress(KeyboardInterrupt):
        connect_toy(backend)
    gc.collect()
    connect_toy()[0].close()
    assert backend.brokers[0].closed


def test_closing_inside_the_making_of_a_service_leaves_it_alone() -> None:
    opened, broker = connect_toy(timeout=60)

    class Seconds(float):
        def __ge__(self, other: float) -> bool:
            opened.close()
            return float(self) >= other

    opened.resolver("g", check=lambda transaction, messages: Decision.COMMIT, stop_timeout=Seconds(1))
    assert not broker.closed
    opened.close()
    assert broker.closed


def test_closing_a_bridge_inside_its_own_closing_does_not_wait() -> None:
    bridge, broker = connect_toy(timeout=60)
    broker.close = close = Mock(side_effect=lambda _: bridge.close())  # type: ignore[method-assign]
    bridge.close()
    close.assert_called_once()


class Settings(dict[str, object]):
    """A common kind of object: a name that is no method is looked up as a key, and `KeyError` if it is missing."""

    __getattr__ = dict.__getitem__

    def close_bridge(self, bridge: Bridge) -> None:
        bridge.close()


def test_a_bridge_is_closed_also_by_an_object_that_has_its_own_idea_of_attributes() -> None:
    bridge, broker = connect_toy()
    Settings().close_bridge(bridge)
    assert broker.closed


def test_at_the_programs_end_bridges_are_closed_before_those_that_keep_their_decision_logs(monkeypatch) -> None:
    monkeypatch.setattr("txnbridge._bridge.exit_begins", bool)
    monkeypatch.setattr("txnbridge._bridge._live", type(_live)())
    closed, backend = note_calls(monkeypatch, ToyBroker, "close", lambda broker, _: broker), ToyBackend()
    bridges = [connect_toy(backend, decision_log="toy:") for _ in range(20)]
    _at_exit()
    assert closed == backend.brokers[::-1] and len(closed) == 2 * len(bridges)


class Elsewhere:
    """A place that keeps decision logs in the broker's stead."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    found = Elsewhere()
    monkeypatch.setattr("txnbridge._bridge._log_provider", lambda *_: found)
    return found


@pytest.mark.parametrize("at", ["option", "open", "open_writers"])
def test_a_bridge_that_does_not_open_lets_go_of_where_its_logs_are_kept(elsewhere, at):
    options: dict[str, Any] = {"transactional_id": "billing", "decision_log": "elsewhere:"}
    backend = ToyBackend()
    if at == "option":
        options["toy"] = {"no-such": 1}
    else:
        backend.acts[at] = raising(BrokerUnavailable("away"))
    with pytest.raises((BrokerUnavailable, InvalidOption)):
        connect_toy(backend, **options)
    assert elsewhere.closed == 1


def test_a_broker_that_fails_to_close_keeps_nothing_else_open(elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture):
    bridge, broker = connect_toy(decision_log="elsewhere:")
    broker.close = raising(BrokerUnavailable("away"))  # type: ignore[method-assign]
    bridge.close()
    bridge.close()
    assert (elsewhere.closed, caplog.messages) == (1, ["closing: away"])


def test_a_bridge_without_an_id_opens_its_writers_when_they_are_needed() -> None:
    bridge, broker = connect_toy()
    with bridge:
        assert broker.identities == [] and bridge.transactional_id is None
        with bridge.transaction():
            pass
        assert len(broker.writers) == 4 and not broker.identities[0].owned


def test_opening_an_id_opens_all_its_writers(bridge: Bridge, broker: ToyBroker) -> None:
    assert bridge.transactional_id == "billing"
    assert broker.identities[0].owned and "pid" in broker.identities[0].host


def test_a_wait_for_writers_that_another_thread_opens_ends_at_the_deadline():
    bridge, broker = connect_toy(timeout=60)
    hold = broker.acts["open_writers"] = Hold(bool)
    with bridge, hold.asked_by(lambda: bridge.transaction().abort()):
        with within(0.1), pytest.raises(errors.DeadlineExceeded, match="another thread"):
            bridge.transaction(timeout=0.1)


def test_a_codec_makes_bytes_of_the_value_and_text_keys_become_utf8(bridge: Bridge, writer: ToyWriter) -> None:
    orders = Topic("orders", codecs.json)
    with bridge.transaction() as txn:
        txn.send(orders, {"id": 1}, key="ü", headers={"kind": "new"}, partition=2, timestamp=5)
        txn.send_many(orders, [1, ([2], "k"), (None, b"k", {"a": "b"})])
        txn.send_many("plain", [b"x", (b"y", "k")])
    assert writer.sent == [
        ("orders", b'{"id":1}', "ü".encode(), (("kind", b"new"),), 2, 5),
        ("orders", (b"1", None, None)),
        ("orders", (b"[2]", b"k", None)),
        ("orders", (None, b"k", (("a", b"b"),))),
        ("plain", b"x"),
        ("plain", (b"y", "k")),
    ]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"topic": wrong} for wrong in ("", "two words", "x" * 250, None)),
        {"value": "text without a codec"},
        *({"key": wrong} for wrong in ("\ud800", 1)),
        *({"headers": wrong} for wrong in (5, "kind=new", ["ab"], [("kind", b"new", b"more")])),
        *({"headers": wrong} for wrong in ({"\ud800": b"new"}, {"kind": "\ud800"}, {"kind": 5})),
        *({"partition": wrong} for wrong in (1.0, True, "0")),
        *({"timestamp": wrong} for wrong in (1.0, True, -1)),
    ],
    ids=repr,
)
def test_an_argument_that_no_message_can_have_is_refused_and_leaves_the_transaction_usable(bridge, writer, slow, wrong):
    with bridge.transaction(fingerprint=slow) as txn:
        with pytest.raises(InvalidOption):
            txn.send(**{"topic": "orders", "value": b"1", **wrong})
        if "topic" in wrong:
            with pytest.raises(InvalidOption):
                txn.send_many(wrong["topic"], [b"1"])
        txn.send("orders", b"2")
    assert [value for _, value, *_ in writer.sent] == [b"2"]


@pytest.mark.parametrize("slow", [False, True])
def test_an_item_of_many_that_cannot_be_sent_is_named_and_leaves_only_abort(bridge, writer, slow):
    txn = bridge.transaction(fingerprint=slow)
    txn.send("orders", b"before")
    with pytest.raises(InvalidOption, match=r"^item 1 of send_many \(counted from 0\): .*cannot be encoded"):
        txn.send_many(Topic("orders", codecs.json), [1, object(), 3])
    assert txn.state is State.FAILED
    with pytest.raises(InvalidState, match=r"is failed \(InvalidOption: item 1 .*abort it"):
        txn.commit()
    txn.abort()
    assert writer.calls[-1] == "abort"


def test_an_exception_of_the_items_own_generator_leaves_only_abort(bridge: Bridge) -> None:
    def items() -> Iterator[bytes]:
        yield b"1"
        raise KeyError("secret")

    with pytest.raises(TransactionAborted, match=r"part of it failed \(KeyError\)"), bridge.transaction() as txn:
        with pytest.raises(KeyError):
            txn.send_many("orders", items())
        with pytest.raises(InvalidState, match=r"is failed \(KeyError\)"):
            txn.send("orders", b"2")
    assert txn.outcome is Outcome.ABORTED
