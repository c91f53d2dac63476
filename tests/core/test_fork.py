"""After a fork nothing of the parent's can be used in the child, and the parent goes on."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import Mock

import pytest

from tests.core.decisions_kit import MemoryLog
from tests.core.toy import ToyBroker, connect_toy
from tests.in_time import Hold
from txnbridge import Decision, InvalidState, JsonLinesRecorder, Outcome, _metrics, connect, spanning
from txnbridge._base.events import Emitter
from txnbridge._base.plugins import plugins
from txnbridge._base.service_stop import Shutdown
from txnbridge._decisions.decisions import Decisions
from txnbridge._metrics import BrokerWatch, Metrics

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork.*:DeprecationWarning"
)  # 3.12 warns of forks in threaded programs


def in_child(check) -> int:
    """Run a check in a forked child; its exit code says whether it held."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(60)  # kills the child if it hangs
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outlive_parent(steps: Callable[[], Iterator[None]], close: Callable[[], object]) -> int:
    """Take a step in a forked child, then `close` here, then the other step there; return the child's exit code."""

    def child() -> None:
        for _ in steps():
            there.send("opened")
            there.recv()

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    here.recv()
    close()
    here.send("closed")
    process.join()
    return process.exitcode or 0


def test_the_child_is_told_what_to_do_and_the_parent_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, broker = connect_toy()
    with bridge:
        consumer = bridge.consumer("t", "g")
        txn = bridge.transaction()
        monkeypatch.setattr(ToyBroker, "admin", Mock())
        admin = bridge.admin
        watch = BrokerWatch(bridge, 1)  # as every service

        def check() -> None:
            calls: list[Callable[[], object]] = [
                bridge.transaction,
                lambda: bridge.status("txb1.x"),
                lambda: bridge.admin,
                lambda: admin.commit("billing/1"),
                consumer.poll,
                watch.run,
                lambda: txn.send("t", b"1"),
                txn.commit,
                txn.abort,
            ]
            for call in calls:
                with pytest.raises(InvalidState, match="post_fork"):
                    call()
            assert not txn.__exit__(SystemExit, SystemExit(), None)  # an error here would keep the child from its end
            bridge.close()  # does nothing
            consumer.close()
            assert not broker.closed

        assert in_child(check) == 0
        txn.send("t", b"1")
        txn.commit()
        assert txn.outcome is Outcome.COMMITTED


def test_the_child_is_refused_a_publisher_at_once_although_a_thread_of_the_parent_was_sending(monkeypatch) -> None:
    hold = Hold(Mock())
    monkeypatch.setattr(ToyBroker, "publisher", Mock(return_value=Mock(flush=hold)))
    bridge, _ = connect_toy()
    with bridge, bridge.publisher() as publisher:

        def check() -> None:
            for call in partial(publisher.send, "t", b"1"), publisher.flush, partial(publisher.last_sequence, "t"):
                with pytest.raises(InvalidState, match="post_fork"):
                    call()
            publisher.close()  # does nothing

        with hold.asked_by(publisher.flush):
            assert in_child(check) == 0


def test_the_child_opens_a_bridge_although_a_thread_of_the_parent_was_loading_plug_ins() -> None:
    hold = Hold()

    def load() -> None:
        with plugins.lock:
            hold()

    with hold.asked_by(load):
        assert in_child(plugins.backends) == 0


def test_a_listener_works_in_the_child_although_a_thread_of_the_parent_was_inside_it(tmp_path, monkeypatch):
    def check() -> None:
        monkeypatch.undo()
        emitter.emit("half.store", "after")

    recorder = JsonLinesRecorder(tmp_path / "events")
    for inside, name, listener in (recorder, "_file", recorder), (_metrics, "_family", Metrics().txnbridge_event):
        emitter, hold = Emitter("b-1", [listener]), Hold()
        monkeypatch.setattr(inside, name, Mock(write=hold, side_effect=hold))
        with hold.asked_by(partial(emitter.emit, "half.store", "after")):
            assert in_child(check) == 0
    monkeypatch.undo()
    recorder.close()


def test_a_signal_ends_a_child_that_a_service_with_handlers_has_forked():
    with Shutdown(60, "test", lambda _: None, lambda: None).by_signals():
        assert in_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM


def test_the_child_opens_bridges_and_spans_of_its_own_although_a_thread_of_the_parent_was_opening_some(
    tmp_path, monkeypatch
):
    urls = [f"embedded:{tmp_path}/{name}.db" for name in "ab"]

    def check() -> None:
        monkeypatch.undo()
        with connect(urls[0]) as here, connect(urls[1]) as there, spanning(here, there) as span:
            span.on(here).send("t", b"1")
        assert span.outcome is Outcome.COMMITTED

    hold = Hold()
    with connect(urls[0]) as here, connect(urls[1]) as there:
        monkeypatch.setattr("txnbridge._half.span.Spans", hold)
        with hold.asked_by(lambda: spanning(here, there)):
            assert in_child(check) == 0


def test_a_decision_log_of_the_parent_is_neither_used_nor_closed_by_the_child() -> None:
    log, closed = MemoryLog(), list[int]()
    log.close = lambda: closed.append(os.getpid())  # type: ignore[method-assign]
    decisions = Decisions(log)

    def check() -> None:
        with pytest.raises(InvalidState):
            decisions.claim("id", Decision.COMMIT)
        decisions.close()  # as `finally:` does, on the way out of what the fork was called in
        assert not closed and not log.records

    assert in_child(check) == 0
    assert decisions.claim("id", Decision.COMMIT).mine
    decisions.close()
    assert closed == [os.getpid()]
