"""Tests of appends by several threads: one request stores what waits, and each thread gets its own result in time."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from txnbridge_rocketmq import decision_log
from txnbridge_rocketmq.client.errors import Disconnected, ResponseTimeout
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage
from txnbridge_rocketmq.decision_log import AppendQueue

from tests.in_time import within
from tests.interrupts import interrupted_everywhere
from tests.rocketmq.kit import becomes_true
from txnbridge.spi import Deadline

pytestmark = pytest.mark.offline


class Log:
    """Stores what it is given together. A request waits until it is `allowed`."""

    def __init__(self) -> None:
        self.together: list[list[bytes]] = []
        self.left: list[float] = []  # the time of each request
        self.fault: BaseException | None = None
        self.allowed = threading.Semaphore(0)
        self.queue = AppendQueue(self._send)

    def _send(self, messages: Sequence[WireMessage], deadline: Deadline) -> list[bytes]:
        self.together.append([message.body for message in messages])
        self.left.append(deadline.left())
        assert self.allowed.acquire(timeout=30)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return [message.body.upper() for message in messages]

    def store(self, body: bytes, seconds: float = 30) -> bytes:
        return self.queue.store(WireMessage("log", body), Deadline(seconds))

    def waits(self, count: int) -> bool:
        return becomes_true(lambda: len(self.waiting) == count)

    @property
    def waiting(self) -> deque[Any]:
        return self.queue._waiting


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(200) as pool:
        yield pool


def stored(log: Log, pool: ThreadPoolExecutor, *bodies: bytes, seconds: float = 30) -> list[Future[bytes]]:
    """Store messages, each in a thread of its own, in this order, behind a request that waits."""
    found = [pool.submit(log.store, b"first")]
    assert becomes_true(lambda: log.together == [[b"first"]])
    for number, body in enumerate(bodies):
        found.append(pool.submit(log.store, body, seconds))
        assert log.waits(number + 1)
    return found


def test_waiting_messages_are_stored_together_and_in_order(log, pool):
    found = stored(log, pool, b"a", b"b", b"c")
    log.allowed.release(999)
    assert [each.result() for each in found] == [b"FIRST", b"A", b"B", b"C"]
    assert log.together == [[b"first"], [b"a", b"b", b"c"]]
    assert log.store(b"later") == b"LATER"


def test_a_request_has_bounds(log, pool):
    small, large, larger = [b"a"] * 64, b"b" * 1_000_000, b"c" * 2_000_000
    found = stored(log, pool, *small, b"a", large, larger)
    log.allowed.release(999)
    assert [each.result()[:1] for each in found] == [b"F", *[b"A"] * 65, b"B", b"C"]
    assert log.together[1:] == [small, [b"a", large], [larger]]


def test_an_error_hits_all_records_that_were_sent_together_and_no_others(log, pool):
    found = stored(log, pool, b"a", b"b")
    log.fault = Disconnected("lost", may_have_had_effect=True)
    late = pool.submit(lambda: becomes_true(lambda: len(log.together) == 2) and log.store(b"late"))
    log.allowed.release(999)
    with pytest.raises(Disconnected):
        found[0].result()
    assert [each.result() for each in (*found[1:], late)] == [b"A", b"B", b"LATE"]


def test_a_thread_with_little_time_fails_no_thread_with_more_time(log, pool):
    first, short, long, longer = (
        *stored(log, pool, b"short", seconds=1),
        pool.submit(log.store, b"long", 30),
        pool.submit(log.store, b"longer", 60),
    )
    assert log.waits(3)
    log.allowed.release()
    assert first.result() == b"FIRST"
    assert becomes_true(lambda: len(log.together) == 2)
    assert log.left == [pytest.approx(30, abs=5), pytest.approx(60, abs=5)]
    with pytest.raises(ResponseTimeout):
        short.result()
    log.allowed.release(9)
    assert [each.result() for each in (long, longer)] == [b"LONG", b"LONGER"]


def test_a_sender_takes_along_no_record_that_has_more_time_than_its_own(log):
    log.allowed.release(9)
    log.waiting.append(decision_log._Append(WireMessage("log", b"later"), Deadline(60)))
    assert log.store(b"first", 30) == b"FIRST"
    assert log.together == [[b"first"]]
    assert log.waiting[0].sends


def test_a_thread_that_waits_too_long_takes_its_message_back(log, pool):
    first, slow = stored(log, pool, b"slow", seconds=0.2)
    with within(0.2), pytest.raises(ResponseTimeout) as caught:
        slow.result()
    assert not caught.value.may_have_had_effect
    log.allowed.release(999)
    assert first.result() == b"FIRST"
    assert log.store(b"next") == b"NEXT"
    assert log.together == [[b"first"], [b"next"]]


def test_a_time_out_of_a_message_that_another_thread_sent_may_have_had_effect(log, pool):
    first, sender, slow = stored(log, pool, b"sender", b"slow", seconds=1)
    log.allowed.release()
    first.result()
    with pytest.raises(ResponseTimeout) as caught:
        slow.result()
    assert caught.value.may_have_had_effect
    log.allowed.release(9)
    assert sender.result() == b"SENDER"
    assert log.store(b"next") == b"NEXT"


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ValueError("too large")])
def test_a_sender_that_is_interrupted_leaves_the_queue_usable(log, pool, fault):
    found = stored(log, pool, b"a", b"b")
    log.allowed.release(999)
    found[0].result()
    for each in found[1:]:
        each.result()
    log.fault = fault
    with pytest.raises(type(fault)):
        log.store(b"c")
    assert log.store(b"d") == b"D"


def test_an_exception_of_a_signal_handler_keeps_no_later_thread_from_storing(log):
    log.allowed.release(999)

    def store() -> None:
        assert log.store(b"e", 5) == b"E"

    assert interrupted_everywhere(store, store, ["decision_log.py", "/deadline.py"])


def test_many_threads_get_their_own_results(log, pool):
    log.allowed.release(999)
    bodies = [b"%d-x" % number for number in range(200)]
    began = time.monotonic()
    assert list(pool.map(log.store, bodies)) == [body.upper() for body in bodies]
    assert time.monotonic() - began < 30
    assert sum(map(len, log.together)) == 200
    assert not log.queue._sending.locked() and not log.waiting
