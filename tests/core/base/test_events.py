"""Events: every step is told; a listener is never felt."""

import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.failing import raising
from txnbridge import Event, EventLogger, JsonLinesRecorder
from txnbridge._base.events import Emitter
from txnbridge.metrics import Metrics
from txnbridge.testing import StopAt


def test_a_step_tells_before_and_after_with_what_was_found() -> None:
    seen: list[Event] = []
    with Emitter("b", [seen.append]).step("commit", "t-1", size=3) as found:
        found["answer"] = 7
    assert [(e.name, e.phase, e.transaction) for e in seen] == [("commit", "before", "t-1"), ("commit", "after", "t-1")]
    assert seen[0].data == {"size": 3} and seen[1].data == {"size": 3, "answer": 7}
    assert seen[0].mono_ns <= seen[1].mono_ns


def test_a_failing_step_tells_so_and_raises_its_error() -> None:
    seen: list[Event] = []
    with pytest.raises(KeyError), Emitter("b", [seen.append]).step("commit"):
        raise KeyError("x")
    assert [e.phase for e in seen] == ["before", "failed"] and seen[1].data == {"error": "KeyError"}


def test_a_listener_that_raises_is_logged_and_the_next_one_still_hears(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    Emitter("b", [raising(ValueError("listener's own fault")), seen.append]).emit("commit", "before")
    assert len(seen) == 1
    assert "listener's own fault" in caplog.text


def test_a_listener_gets_only_the_events_that_it_wants_and_no_other_is_made() -> None:
    all_of_them: list[Event] = []
    commits: list[Event] = []
    both = Emitter("b", [all_of_them.append], [(commits.append, {"commit"})])
    for name in ("commit", "message.send"):
        both.emit(name, "before")
    assert [e.name for e in all_of_them] == ["commit", "message.send"] and [e.name for e in commits] == ["commit"]
    filtered = Emitter("b", [], [(commits.append, {"commit"})])
    assert filtered.wants("commit") and not filtered.wants("message.send")
    assert not Emitter("b", []).wants("commit")


def test_the_logger_warns_of_failures_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "txnbridge"), pytest.raises(KeyError):
        with Emitter("b", [EventLogger()]).step("commit", "t-1"):
            raise KeyError
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_signal_handler_that_causes_an_event_does_not_wait_for_the_listener_that_it_interrupts(tmp_path: Path):
    recorder = JsonLinesRecorder(tmp_path / "events.jsonl")

    def interrupt(*_: object) -> None:
        sys.setprofile(None)
        emitter.emit("half.store", "after")
        sys.setprofile(interrupt)

    def interrupted() -> None:
        sys.setprofile(interrupt)
        emitter.emit("half.store", "after")

    for listener in recorder, Metrics().txnbridge_event, StopAt("commit/before").txnbridge_event:
        emitter = Emitter("b-1", [listener])
        thread = threading.Thread(target=interrupted, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    recorder.close()


def test_the_recorder_writes_one_whole_line_an_event_from_many_threads(tmp_path: Path) -> None:
    recorder = JsonLinesRecorder(tmp_path / "events.jsonl")
    emitter = Emitter("b", [recorder])

    def emit_many(_: int) -> None:
        for i in range(200):
            emitter.emit("ack", "after", "t", n=i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(emit_many, range(4)))
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(lines) == 800
    assert set(lines[0]) == {"v", "name", "phase", "mono_ns", "wall_ns", "bridge", "transaction", "data"}
    assert lines[0]["v"] == 1
