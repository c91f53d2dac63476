"""Tasks of few rows, whose rows travel to the driver and are written there."""

from __future__ import annotations

import time
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark_txnbridge._write import driver as _driver
from pyspark_txnbridge._write.batch_identity import SMALL_TASKS, BatchId, BatchInDoubt
from pyspark_txnbridge._write.recovery import clear
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.task import SlotWriters, write_partition

import txnbridge
from tests.failing import EACH, fail_call, note_calls
from tests.spark.kit import forget, left_open, mostly_embedded, new_run, options, published, rows, run_batch, write
from tests.spark.test_protocol import check_two_batches, fresh_starts, run_two_batches
from txnbridge import (
    Bridge,
    BrokerUnavailable,
    Fenced,
    InvalidOption,
    NotFound,
    OutcomeUnknown,
    Token,
    TransactionAborted,
)
from txnbridge._decisions.decisions import Decisions, Opening
from txnbridge.testing import Child, crash_everywhere, listening, recorded

SMALL: list[list[object]] = [["0", "1", "2"], ["3"], [], ["4"]]
MIXED: list[list[object]] = [["5"], [6], ["7", "8"], [9]]


def test_small_tasks_prepare_nothing_and_the_driver_publishes_their_rows_in_one_transaction(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, SMALL)
    assert left_open(sink, query) == []
    assert [report.attempt for report in written] == [0, None, None, None]
    with recorded() as events:
        _driver.commit(sink, written)
    assert [event.phase for event in events if event.name == "prepare"] == ["before", "after"]
    assert published(sink) == [0, 1, 2, 3, 4]
    run_batch(sink, replace(identity, batch=1), MIXED)
    assert (published(sink), left_open(sink, query)) == (list(range(10)), [])


@mostly_embedded
def test_the_row_that_exceeds_the_limit_makes_its_task_a_large_one(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    small, large = write(sink, identity, [["0".rjust(15_000)], ["1".rjust(8_000), "2".rjust(8_500)]])
    assert (len(small.parts), len(large.parts)) == (0, 1)
    assert small.travels and not large.travels


@pytest.mark.offline
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"value": [b"1"], "topic": pa.array([None], pa.string())}, "null topic"),
        ({"value": [b"1"], "topic": ["out"], "headers": [[{"key": None, "value": b"1"}]]}, "column headers"),
    ],
)
def test_a_row_that_no_broker_takes_fails_in_its_task(columns, message):
    batch = pa.RecordBatch.from_pydict(columns)
    sink = options("embedded:unused")
    with pytest.raises(InvalidOption, match=message):
        write_partition(BatchId("query", "sink", 0, "run"), sink, Columns(frozenset(columns), None), [batch], 1, "task")


@mostly_embedded
def test_rows_of_small_tasks_go_to_the_topics_that_they_name(sink, query):
    names = [f"out-{new_run()}" for _ in range(2)]
    columns = Columns(frozenset({"value", "key", "topic"}), None)
    sink, identity = replace(sink, topic=None), BatchId(query, "sink", 0, new_run())
    batch = {"value": [b"1", None], "key": [b"k", None], "topic": names, "unused": [1, 2]}
    written = [
        write_partition(identity, sink, columns, [pa.RecordBatch.from_pydict(batch)], number, f"task {number}")
        for number in range(2)
    ]
    _driver.commit(sink, written)
    with txnbridge.connect(sink.url) as bridge:
        for name, row in zip(names, [(b"k", b"1"), (None, None)], strict=True):
            assert [(message.key, message.value) for message in bridge.read(name, 10)] == [row, row]


def run_small_batches(start):
    run_two_batches(start, SMALL, [["4", "3"], ["2", "1", "0"]], MIXED)


def check_small_batches(start):
    check_two_batches(start, 10)


@pytest.mark.timeout(900)
def test_killed_at_every_event_a_batch_of_small_tasks_is_published_once(tmp_path):
    fresh = fresh_starts(f"embedded:{tmp_path}/NUMBER.db")
    crash_everywhere(run_small_batches, check_small_batches, fresh=fresh, at_once=2)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_at_every_event_a_batch_of_small_tasks_is_published_once_on_kafka(kafka_broker):
    crash_everywhere(
        run_small_batches, check_small_batches, fresh=fresh_starts(kafka_broker.url), timeout=120, at_once=2
    )


def lose_small_rows(sink, query):
    """Decide a batch in a driver that dies, and abort its transaction with the rows of small tasks."""
    with Child(run_batch, sink, BatchId(query, "sink", 0, new_run()), MIXED, kill="resolve/before/1") as child:
        child.stopped()
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        (claim,) = bridge.decisions().claims((query, "sink", 0))
        assert [part["partition"] for part in claim.data["parts"]] == [1, 3, SMALL_TASKS]
        bridge.abort(claim.data["parts"][-1]["token"])


def test_lost_rows_of_small_tasks_are_written_again_when_the_same_rows_come_again(sink, query):
    lose_small_rows(sink, query)
    with pytest.raises(BatchInDoubt, match=r"3 rows of small task partitions are not published"):
        run_batch(sink, BatchId(query, "sink", 0, new_run()), [["5"], [6], ["7"], ["8", "9"]])
    assert published(sink) == [6, 9]
    run_batch(sink, BatchId(query, "sink", 0, new_run()), MIXED)
    assert (published(sink), left_open(sink, query)) == (list(range(5, 10)), [])


@pytest.mark.parametrize("asleep", ["transaction.begin/before/1", "prepare/after/1"])
def test_a_driver_whose_run_was_replaced_leaves_none_of_its_small_tasks_rows_open(sink, query, asleep):
    """The newer run has listed open transactions before this driver began its own, or before it claimed."""
    with Child(run_batch, sink, BatchId(query, "sink", 0, new_run()), SMALL, pause=asleep) as child:
        child.stopped()
        run_batch(sink, BatchId(query, "sink", 0, new_run()), SMALL)
        child.resume()
        with pytest.raises((Fenced, TransactionAborted)):
            child.result(60)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


def test_a_batch_of_small_tasks_that_was_given_up_comes_again_in_the_same_run(sink, query):
    first = BatchId(query, "sink", 0, new_run(), attempt=0)
    late = write(sink, first, SMALL)
    _driver.abort(sink, late, first)
    second = replace(first, attempt=_driver.next_attempt(sink, first))
    assert second.attempt == 1
    written = write(sink, second, SMALL)
    with pytest.raises(TransactionAborted, match="given up"):
        _driver.commit(sink, late, first)
    _driver.commit(sink, written, second)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


def test_an_abort_by_reports_that_name_no_attempt_gives_the_batch_up(sink, query):
    """The task of partition 0, which reads the decision log, has failed."""
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, MIXED)
    _driver.abort(sink, [None, *written[1:]])
    assert left_open(sink, query) == []
    with pytest.raises(TransactionAborted, match="aborted before anybody decided"):
        _driver.commit(sink, written)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), MIXED)
    assert published(sink) == list(range(5, 10))


def test_a_task_with_more_rows_than_a_transaction_takes_prepares_several(tmp_path, query):
    """The embedded broker refuses what RocketMQ would."""
    sink = options(f"embedded:{tmp_path / 'broker.db'}?like=rocketmq")
    rows = [str(number) for number in range(20_001)]
    identity = BatchId(query, "sink", 0, new_run())
    written = write(
        sink, identity, [rows, *([str(20_001 + 100 * n + each) for each in range(100)] for n in range(101))]
    )
    assert [part.rows for part in written[0].parts] == [10_000, 10_000, 1]
    _driver.commit(sink, written)
    assert (published(sink), left_open(sink, query)) == (list(range(30_101)), [])


def test_transactions_of_one_task_are_committed_in_order(tmp_path, query):
    sink = options(f"embedded:{tmp_path / 'broker.db'}?like=rocketmq")
    large, *small = write(
        sink, BatchId(query, "sink", 0, new_run()), [[str(number) for number in range(30_000)], *([["0"] * 100] * 101)]
    )
    ended: list[str | None] = []

    def note(event):
        if (event.name, event.phase) == ("resolve", "before") and event.transaction == first:
            time.sleep(0.5)
        elif (event.name, event.phase) == ("resolve", "after"):
            ended.append(event.transaction)

    wanted = [Token.parse(part.token).transaction for part in large.parts]
    first = wanted[0]
    forget()  # only bridges that are opened now have the listener
    with listening(note):
        _driver.commit(sink, [large, *small])
    assert len(ended) == 5
    assert [each for each in ended if each in wanted] == wanted


def test_rows_of_small_tasks_are_written_again_when_the_broker_does_not_answer(sink, query, monkeypatch):
    """The transaction is prepared, but the driver gets no token of it."""
    written = write(sink, BatchId(query, "sink", 0, new_run()), SMALL)
    open_then = []

    def look(*_):
        open_then.append(left_open(sink, query))
        return True

    fail_call(monkeypatch, _driver, "prepare", OutcomeUnknown, happens=True, when=look)
    _driver.commit(sink, written)
    assert [len(left) for left in open_then] == [0, 1]
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
@pytest.mark.parametrize("failing", [(Bridge, "commit"), (Decisions, "done")])
def test_a_job_that_nobody_runs_again_is_published_whole_when_the_broker_is_away_for_a_while(
    sink, monkeypatch, failing
):
    job = new_run()
    written = write(sink, BatchId(f"#{job}", "sink", 0, job, job=True), MIXED)
    owner, name = failing
    fail_call(monkeypatch, owner, name, BrokerUnavailable("away"), range(2), happens=True)
    _driver.commit(sink, written)
    assert (published(sink), left_open(sink, f"#{job}")) == (list(range(5, 10)), [])


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
def test_a_job_that_is_decided_and_not_published_says_so_and_is_published_when_spark_aborts_it(sink, monkeypatch):
    job = new_run()
    written = write(sink, BatchId(f"#{job}", "sink", 0, job, job=True), MIXED)
    fail_call(monkeypatch, Bridge, "commit", BrokerUnavailable("away"), range(1, 99))
    with pytest.raises(OutcomeUnknown, match=rf"decided.*recover .*{job}"):
        _driver.commit(sink, written)
    monkeypatch.undo()
    _driver.abort(sink, written)
    assert (published(sink), left_open(sink, f"#{job}")) == (list(range(5, 10)), [])


@mostly_embedded
def test_a_transaction_that_an_older_run_left_open_is_aborted_before_the_first_row_comes(sink, query):
    write(sink, BatchId(query, "sink", 0, new_run()), MIXED)
    forget()
    assert left_open(sink, query) != []

    def upstream():
        assert left_open(sink, query) == []
        yield from rows(["5"])

    columns = Columns(frozenset({"value"}), sink.topic)
    write_partition(BatchId(query, "sink", 0, new_run()), sink, columns, upstream(), 0, "task 0")


def test_a_row_that_the_broker_refuses_fails_in_the_driver_and_leaves_nothing_open(tmp_path, query):
    sink = options(f"embedded:{tmp_path / 'broker.db'}")
    identity = BatchId(query, "sink", 0, new_run())
    columns = Columns(frozenset({"value", "partition"}), sink.topic)
    batch = pa.RecordBatch.from_pydict({"value": [b"1"], "partition": pa.array([1000], pa.int32())})
    written = [write_partition(identity, sink, columns, [batch], 0, "task 0"), *write(sink, identity, [[], [6]])[1:]]
    with pytest.raises(NotFound, match="no partition 1000"):
        _driver.commit(sink, written)
    _driver.abort(sink, written)
    assert (published(sink), left_open(sink, query)) == ([], [])


def test_lost_rows_of_small_tasks_are_written_again_when_a_task_has_them_in_another_order(tmp_path, query):
    """The rows need two transactions. After a shuffle the order of a task's rows is another one each time."""
    sink = options(f"embedded:{tmp_path / 'broker.db'}?like=rocketmq")
    tasks = [[str(300 * task + number) for number in range(300)] for task in range(40)]
    with Child(run_batch, sink, BatchId(query, "sink", 0, new_run()), tasks, kill="resolve/before/1") as child:
        child.stopped()
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        (claim,) = bridge.decisions().claims((query, "sink", 0))
        assert [part["rows"] for part in claim.data["parts"]] == [9_900, 2_100]
        bridge.abort(claim.data["parts"][-1]["token"])
    with pytest.raises(BatchInDoubt):
        run_batch(sink, BatchId(query, "sink", 0, new_run()), [["0"]])
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [task[::-1] for task in tasks])
    assert (published(sink), left_open(sink, query)) == (list(range(12_000)), [])


def test_the_driver_makes_messages_of_few_rows_at_once(tmp_path, query, monkeypatch):
    """The rows of 10,000 tasks as Python objects would take more than a gigabyte."""
    sink = options(f"embedded:{tmp_path / 'broker.db'}")
    written = write(sink, BatchId(query, "sink", 0, new_run()), [["0"] * 3_000] * 5)
    sizes = note_calls(monkeypatch, Columns, "send", lambda columns, batch, txn: batch.num_rows)
    _driver.commit(sink, written)
    assert sizes == [10_000, 5_000]


@pytest.mark.parametrize("asleep", ["prepare/after/1", "transaction.begin/before/2", "prepare/after/2"])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_driver_that_is_replaced_while_it_has_two_transactions_leaves_none_open(tmp_path, query, asleep, is_cleared):
    sink = options(f"embedded:{tmp_path / 'broker.db'}?like=rocketmq")
    tasks = [[str(3_000 * task + number) for number in range(3_000)] for task in range(4)]
    first = BatchId(query, "sink", 0, new_run())
    with Child(run_batch, sink, first, tasks, pause=asleep) as child:
        child.stopped()
        if is_cleared:
            _driver.with_session(sink, first, lambda session: clear(session, first.path))
        else:
            run_batch(sink, BatchId(query, "sink", 0, new_run()), tasks)
        child.resume()
        with pytest.raises((Fenced, TransactionAborted)):
            child.result(60)
    assert (published(sink), left_open(sink, query)) == ([] if is_cleared else list(range(12_000)), [])


def test_rows_of_small_tasks_are_aborted_at_once_when_the_driver_fails_before_its_claim(sink, query, monkeypatch):
    written = write(sink, BatchId(query, "sink", 0, new_run()), SMALL)
    fail_call(monkeypatch, _driver, "_check_alive", ZeroDivisionError, EACH)
    with pytest.raises(ZeroDivisionError):
        _driver.commit(sink, written)
    assert left_open(sink, query) == []


def test_slots_do_not_belong_to_another_run_with_the_same_number(tmp_path):
    """A log that was deleted counts its openings anew."""
    writers = SlotWriters(options(f"embedded:{tmp_path / 'broker.db'}"))
    first, second = (Opening("id", run, 1, (1,), "host", {}) for run in ("run 1", "run 2"))
    writers.renew(first)
    assert writers.belong_to(first) and not writers.belong_to(second)
