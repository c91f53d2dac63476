"""Tasks that nobody waits for any more: whoever clears up may have looked before such a task began its transaction."""

from __future__ import annotations

import pytest
from pyspark_txnbridge import _driver
from pyspark_txnbridge._unit import Unit

from tests.spark.kit import left_open, new_run, options, published, run_batch, write
from txnbridge import Fenced, TransactionAborted
from txnbridge.testing import Child, tell

ROWS = [0, 1, 2, 3, 4]


@pytest.fixture
def sink(url):
    return options(url, topic=f"out-{new_run()}")


@pytest.fixture
def unit():
    return Unit(new_run(), "sink", 0, new_run())


def write_all(sink, unit):
    (written,) = write(sink, unit, [ROWS])
    tell((written.settled, written.token))


def late_task(sink, unit):
    """It has all that it needs to begin its transaction, and sleeps."""
    return Child(write_all, sink, unit, pause="transaction.begin/before")


def test_a_task_of_an_older_run_leaves_nothing_open(sink, unit):
    with late_task(sink, unit) as task:
        task.stopped()
        run_batch(sink, Unit(unit.query, "sink", 0, new_run()), [ROWS])
        task.resume()
        with pytest.raises(Fenced):
            task.result()
    assert left_open(sink, unit.query) == []
    assert published(sink) == ROWS


def test_another_attempt_of_a_batch_that_is_done_leaves_nothing_open(sink, unit):
    with late_task(sink, unit) as task:
        task.stopped()
        run_batch(sink, unit, [ROWS])
        task.resume()
        assert task.told() == (True, None)
    assert left_open(sink, unit.query) == []
    assert published(sink) == ROWS


def test_a_task_of_a_batch_that_was_given_up_leaves_nothing_open(sink, unit):
    with late_task(sink, unit) as task:
        task.stopped()
        _driver.abort(sink, write(sink, unit, [ROWS]))
        task.resume()
        with pytest.raises(TransactionAborted, match="too late"):
            task.result()
    assert left_open(sink, unit.query) == []
    assert published(sink) == []
