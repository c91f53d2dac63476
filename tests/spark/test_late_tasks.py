"""Tasks that nobody waits for any more: whoever clears up may have looked before such a task began its transaction."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark_txnbridge._write import driver as _driver
from pyspark_txnbridge._write import task as _task
from pyspark_txnbridge._write import transaction_cleanup as _transaction_cleanup
from pyspark_txnbridge._write.batch_identity import BatchId, Written
from pyspark_txnbridge._write.rows import Columns

import txnbridge
from tests.failing import EACH, fail_call, on_call
from tests.spark.kit import forget, left_open, mostly_embedded, new_run, options, published, rows, run_batch, write
from txnbridge import Admin, BrokerUnavailable, Fenced, TransactionAborted
from txnbridge.testing import Child, listening, tell

ROWS = [0, 1, 2, 3, 4]


@pytest.fixture
def sink(url):
    return options(url, topic=f"out-{new_run()}")


@pytest.fixture
def identity():
    return BatchId(new_run(), "sink", 0, new_run())


def write_all(sink, identity):
    (written,) = write(sink, identity, [ROWS])
    tell((written.settled, written.parts))


def late_task(sink, identity):
    """Start a task that has all that it needs to begin its transaction, and sleeps."""
    return Child(write_all, sink, identity, pause="transaction.begin/before")


def test_a_task_of_an_older_run_leaves_nothing_open(sink, identity):
    with late_task(sink, identity) as task:
        task.stopped()
        run_batch(sink, BatchId(identity.query, "sink", 0, new_run()), [ROWS])
        task.resume()
        with pytest.raises(Fenced):
            task.result()
    assert (left_open(sink, identity.query), published(sink)) == ([], ROWS)


@pytest.mark.parametrize("is_done", [True, False], ids=["done", "given up"])
def test_another_task_of_a_batch_that_has_ended_leaves_nothing_open(sink, identity, is_done):
    with late_task(sink, identity) as task:
        task.stopped()
        (_driver.commit if is_done else _driver.abort)(sink, write(sink, identity, [ROWS]))
        task.resume()
        if is_done:
            assert task.told() == (True, [])
        else:
            with pytest.raises(TransactionAborted, match="too late"):
                task.result()
    assert (left_open(sink, identity.query), published(sink)) == ([], ROWS if is_done else [])


def write_and_die(sink, identity):
    """Be a task whose process dies when it has prepared a transaction, or learns that its run was replaced."""

    def die(event):
        if event.data.get("error") == "Fenced" or (event.name, event.phase) == ("prepare", "after"):
            os.kill(os.getpid(), signal.SIGKILL)

    with listening(die):
        write(sink, identity, [ROWS])


@pytest.mark.parametrize("asleep", ["transaction.begin/before", "bridge.open/before/2"], ids=["opened", "leased"])
def test_a_task_of_an_older_run_that_dies_leaves_nothing_open_once_a_newer_run_has_looked(sink, identity, asleep):
    """A dead task cannot end its transaction. With only a lease it has not opened its id yet."""
    with Child(write_and_die, sink, identity, pause=asleep) as task:
        task.stopped()
        (written,) = write(sink, BatchId(identity.query, "sink", 0, new_run()), [ROWS])
        task.resume()
        with pytest.raises((Fenced, AssertionError), match=r"was opened|signal 9"):
            task.result()
    assert left_open(sink, identity.query) == [txnbridge.Token.parse(part.token).transaction for part in written.parts]
    _driver.commit(sink, [written])
    assert (left_open(sink, identity.query), published(sink)) == ([], ROWS)


@mostly_embedded
def test_a_transaction_that_begins_while_another_task_checks_the_log_is_known(sink, identity, monkeypatch):
    def begin(*_):
        monkeypatch.undo()
        written.append(_task.write_partition(identity, sink, columns, rows([5]), 1, "task 1"))

    on_call(monkeypatch, Admin, "transactions", begin)
    columns = Columns(frozenset({"value"}), sink.topic)
    written: list[Written] = []
    _driver.commit(sink, [*write(sink, identity, [ROWS]), *written])
    assert published(sink) == [*ROWS, 5]


@mostly_embedded
def test_the_task_of_partition_0_ends_older_runs_also_if_another_task_came_first_in_its_process(sink, identity):
    (older,) = write(sink, identity, [ROWS])
    newer, columns = BatchId(identity.query, "sink", 0, new_run()), Columns(frozenset({"value"}), sink.topic)
    for partition in (1, 0):
        _task.write_partition(newer, sink, columns, rows([5]), partition, f"task {partition}")
    with txnbridge.connect(sink.url) as bridge:
        assert bridge.status(older.parts[0].token).state is txnbridge.TokenState.ABORTED


@pytest.mark.parametrize("shared", [False, True], ids=["ours", "naive"])
def test_runs_that_shared_their_ids_would_end_what_the_other_has_prepared(sink, identity, shared, monkeypatch):
    name = _transaction_cleanup.writer_id
    if shared:
        monkeypatch.setattr(_task, "writer_id", lambda options, path, number, slot: name(options, path, 1, slot))
        monkeypatch.setattr(_driver, "check_log", lambda *_: None)  # the log knows no ids but those of the runs
    write(sink, identity, [ROWS])
    forget()
    newer = BatchId(identity.query, "sink", 0, new_run())
    columns = Columns(frozenset({"value"}), sink.topic)
    parts = []
    # The task of partition 0 ends what older runs left open; one in another process was faster.
    for partition, values in ((1, [5]), (0, ROWS)):
        parts.append(_task.write_partition(newer, sink, columns, rows(values), partition, f"task {partition}"))
        forget()
    if shared:
        with pytest.raises(TransactionAborted, match="before anybody decided"):
            _driver.commit(sink, parts)
    else:
        _driver.commit(sink, parts)
        assert published(sink) == [*ROWS, 5]


@pytest.mark.offline
def test_a_broker_that_is_away_is_not_waited_for_once_for_each_id_of_older_runs(monkeypatch):
    asked = fail_call(monkeypatch, _transaction_cleanup, "connect", BrokerUnavailable("away"), EACH)
    on_call(monkeypatch, _transaction_cleanup, "connect", lambda *_: time.sleep(0.1))
    leases = SimpleNamespace(claims=lambda _: [SimpleNamespace(id=(1, slot)) for slot in range(100)])
    session: Any = SimpleNamespace(options=options("embedded:nowhere"), decisions=leases)
    _transaction_cleanup.fence_older(session, ("query", "sink"), 1)
    assert 0 < len(asked) < 50
