"""Threads of one process that use one decision log: who waits for whom, and who reads for whom."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
from txnbridge_conformance.observing import eventually

from tests.core.decisions_kit import MemoryLog, Records, follower_of
from tests.failing import raising
from tests.interrupts import Interrupted
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge.errors import BrokerUnavailable, TxnBridgeError

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT


class HeldLog(MemoryLog):
    """A log whose next request of a kind waits after its answer, from `hold` until `release`, as on a slow network."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._is_held, self._goes_on = threading.Event(), threading.Event()
        self.ends = self.readings = 0

    def hold(self, request: str) -> None:
        self._held = request
        self._is_held.clear()

    def wait_until_held(self) -> None:
        assert self._is_held.wait(60)

    def release(self, hold: str = "") -> None:
        """Let the request that waits go on; hold the next one of the kind `hold`."""
        goes_on, self._goes_on = self._goes_on, threading.Event()
        self._held = hold
        self._is_held.clear()
        goes_on.set()

    def _pass(self, request: str) -> None:
        if request == self._held:
            self._held = ""
            self._is_held.set()
            assert self._goes_on.wait(60)

    def begin(self, deadline: Deadline | None = None) -> Position | None:
        self._pass("begin")
        return super().begin()

    def end(self, deadline: Deadline | None = None) -> Position | None:
        self.ends += 1
        end = super().end()
        self._pass("end")
        return end

    def read(self, first: Position | None, last: Position | None, deadline: Deadline | None = None) -> Records:
        self.readings += 1
        records = list(super().read(first, last))
        self._pass("read")
        yield from records


@pytest.fixture
def log() -> HeldLog:
    return HeldLog()


@pytest.fixture
def join(log: HeldLog) -> Callable[[], Decisions]:
    return lambda: Decisions(log, timeout=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def wait_for_turns(decisions: Decisions, count: int) -> None:
    """Wait until so many threads wait for their turn to read."""
    follower = follower_of(decisions)
    eventually(lambda: len(follower._waiting) == count, "they wait")


def test_a_thread_that_looks_does_not_wait_for_one_that_reads(join, log, pool):
    decisions = join()
    begun = decisions.begin()
    log.hold("end")
    reading = pool.submit(decisions.read, "X")
    log.wait_until_held()
    assert decisions.begin() == begun
    assert not reading.done()
    log.release()
    assert reading.result().claim is None


def test_a_reading_serves_all_calls_from_before_it_began_and_no_later_ones(join, log, pool):
    decisions, other = join(), join()
    decisions.read("X")
    log.hold("end")
    early = pool.submit(decisions.read, "X")
    log.wait_until_held()
    other.claim("X", COMMIT)
    asked = log.ends
    late = [pool.submit(decisions.read, "X") for _ in range(5)]
    wait_for_turns(decisions, 5)
    log.release()
    assert early.result().claim is None  # its answer is older than the claim
    for each in late:
        claim = each.result().claim
        assert claim is not None and claim.decision is COMMIT
    assert log.ends == asked + 1


def test_a_reading_takes_all_records_that_this_process_has_stored(join, log, pool):
    decisions = join()
    decisions.begin()
    decisions.claim("first", COMMIT)
    log.hold("read")
    first = pool.submit(decisions.claim, "held", COMMIT)
    log.wait_until_held()
    readings = log.readings
    others = [pool.submit(decisions.claim, f"{number}", ABORT) for number in range(5)]
    wait_for_turns(decisions, 5)
    log.release()
    assert first.result().decision is COMMIT
    assert [each.result().decision for each in others] == [ABORT] * 5
    assert log.readings == readings + 1


def test_no_thread_sees_conclusions_from_a_part_of_a_reading_that_begins_anew(join, log, pool):
    decisions, other = join(), join()
    decisions.open("owner")
    for number in range(20):
        other.claim(f"{number}", COMMIT)
    other.tidy()
    assert log.records[0][0] > (1,)  # what `decisions` has read is trimmed

    def begin_anew(first: Position | None, last: Position | None, deadline: Deadline | None = None) -> object:
        log.read = HeldLog.read.__get__(log)
        log.hold("read")  # the next one, which reads from the log's begin
        return log.read(first, last)

    log.read = begin_anew
    reading = pool.submit(decisions.read, "3")
    log.wait_until_held()

    def look() -> bool:
        with follower_of(decisions).looking(Deadline(60)) as state:
            return bool(state.completeness.complete)

    looking = pool.submit(look)
    with pytest.raises(FutureTimeout):
        looking.result(0.3)
    log.release()
    claim = reading.result().claim
    assert claim is not None and claim.decision is COMMIT
    assert looking.result()


def test_a_thread_that_waits_for_its_turn_keeps_its_deadline_while_another_reads_for_the_first_time(join, log, pool):
    join().claim("X", COMMIT)
    decisions = join()
    log.hold("end")
    first = pool.submit(decisions.read, "X")
    log.wait_until_held()
    late = pool.submit(decisions.read, "X", timeout=1)
    wait_for_turns(decisions, 1)
    log.release(hold="read")
    log.wait_until_held()
    with pytest.raises(TxnBridgeError):
        late.result(30)
    log.release()
    assert first.result().claim is not None


def test_a_thread_that_asks_where_the_log_begins_does_not_keep_others_from_it(join, log, pool):
    decisions = join()
    decisions.begin()
    log.hold("begin")
    entries = pool.submit(decisions.ledger("X").entries, "kind", Deadline(60))
    log.wait_until_held()
    assert decisions.begin(timeout=1)
    log.release()
    assert entries.result() == []


class LateDeadline(Deadline):
    """A deadline with which a thread that has waited for its turn goes on only when the test lets it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.asked, self.woken, self.goes_on = 0, threading.Event(), threading.Event()

    def acquire(self, lock: object, held: list[bool]) -> bool:
        self.asked += 1
        if self.asked == 2:
            self.woken.set()
            assert self.goes_on.wait(60)
        return super().acquire(lock, held)  # type: ignore[arg-type]


def test_a_block_that_reads_once_and_a_thread_that_reads_do_not_wait_for_each_other(join, log, pool):
    decisions, deadline = join(), LateDeadline(5)
    decisions.begin()

    def claim() -> object:
        with decisions.reading_once(timeout=deadline):
            return decisions.claim("Y", COMMIT, timeout=5).decision

    log.hold("end")
    first = pool.submit(decisions.read, "X")
    log.wait_until_held()
    once = pool.submit(claim)
    wait_for_turns(decisions, 1)
    log.release()
    assert deadline.woken.wait(60)
    first.result()
    decisions.read("X")  # as far as the block wants it, too
    log.hold("end")
    reading = pool.submit(decisions.read, "X")
    log.wait_until_held()
    deadline.goes_on.set()
    wait_for_turns(decisions, 1)
    log.release()
    assert once.result() is COMMIT
    assert reading.result().claim is None


def test_an_exception_of_a_signal_handler_keeps_no_other_thread_from_reading(join, log, pool, monkeypatch):
    decisions, held, goes_on = join(), threading.Event(), threading.Event()
    decisions.begin()

    def hold() -> None:
        with follower_of(decisions).looking(Deadline(60)):
            held.set()
            goes_on.wait(60)

    def fail(_: Deadline) -> None:
        waits.append(pool.submit(decisions.read, "X"))
        wait_for_turns(decisions, 1)
        pool.submit(hold)
        assert held.wait(60)
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # while this thread waits for the one that looks
        raise BrokerUnavailable("it is away")

    waits: list[Future[Any]] = []
    before = signal.signal(signal.SIGALRM, raising(Interrupted))
    monkeypatch.setattr(log, "end", fail)
    try:
        with pytest.raises(Interrupted):
            decisions.read("X")
    finally:
        signal.signal(signal.SIGALRM, before)
        monkeypatch.undo()
        goes_on.set()
    assert waits[0].result(20).claim is None
