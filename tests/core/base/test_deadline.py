"""Waits end by their time, however short it is, and whatever signal handlers do meanwhile."""

import signal
import time
from queue import Empty, SimpleQueue

import pytest

from txnbridge._base.deadline import Deadline, Wake, next_within
from txnbridge._base.fair_semaphore import FairSemaphore
from txnbridge._base.service_stop import Shutdown


def wait_for_an_item(seconds: float) -> None:
    with pytest.raises(Empty):
        next_within(SimpleQueue(), seconds)


def wait_for_a_wake(seconds: float) -> None:
    Wake().wait(seconds)


TURNS = FairSemaphore(1, 0.002)
TAKEN = TURNS.place()


def wait_for_a_turn(seconds: float) -> None:
    assert TAKEN.enter(Deadline(60)) and not TURNS.place().enter(Deadline(seconds))


def sleep_in_a_loop(seconds: float) -> None:
    Shutdown(60, "test", lambda at: None, lambda: None).sleep(seconds)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wait", [wait_for_an_item, wait_for_a_wake, wait_for_a_turn, sleep_in_a_loop])
def test_a_wait_of_microseconds_ends(wait):
    for number in range(5000):
        wait(number % 300 * 1e-7 + 1e-9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wait", [wait_for_a_wake, wait_for_a_turn, sleep_in_a_loop])
def test_a_wait_ends_although_a_signal_handler_runs_for_longer(wait):
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        wait(0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_wake_ends_the_present_wait_or_the_next_one_and_no_more():
    wake = Wake()
    wake.wake()
    wake.wake()
    wake.wait(60)
    began = time.monotonic()
    wake.wait(0.01)
    assert time.monotonic() - began >= 0.01
