"""Tests of the tasks that a reader runs beside its polls."""

import threading

import pytest

from txnbridge.spi import BackgroundTask


def test_the_result_of_a_background_task_is_taken_in_by_the_thread_that_finishes_it():
    taken: list[tuple[int, threading.Thread]] = []
    woken, may_end = threading.Event(), threading.Event()
    work = BackgroundTask(
        lambda: may_end.wait(30) and 7, lambda found: taken.append((found, threading.current_thread())), woken.set
    )
    assert not work.done and not work.join(0)
    may_end.set()
    assert woken.wait(30) and work.done and work.join(0)
    assert taken == []
    work.finish()
    assert taken == [(7, threading.current_thread())]


def test_an_error_of_a_background_task_is_raised_where_the_task_is_finished():
    taken: list[object] = []
    work = BackgroundTask(lambda: 1 // 0, taken.append)
    assert work.join(30)
    with pytest.raises(ZeroDivisionError):
        work.finish()
    assert taken == []
