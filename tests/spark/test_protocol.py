"""Deciding and publishing a batch, without Spark's scheduler: its tasks and its driver as plain functions."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from itertools import count

import pytest
from pyspark_txnbridge import _worker_gc
from pyspark_txnbridge._kept_bridges import connect, sessions
from pyspark_txnbridge._write import driver as _driver
from pyspark_txnbridge._write.batch_identity import BatchId, BatchInDoubt
from pyspark_txnbridge._write.driver import with_session
from pyspark_txnbridge._write.recovery import recover
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.task import write_partition

import txnbridge
from tests.failing import EACH, answer_calls, fail_call, replace_method
from tests.spark.kit import forget, left_open, mostly_embedded, new_run, options, published, rows, run_batch, write
from txnbridge import Admin, Decision, errors
from txnbridge.testing import Child, crash_everywhere

source = pytest.importorskip("pyspark_txnbridge._source", reason="needs PySpark")

FIRST = [[0, 1, 2], [3, 4], []]
SECOND = [[5, 6], [7]]


def test_no_message_is_visible_before_the_driver_commits(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, FIRST)
    assert len(left_open(sink, query)) == 2  # an empty partition needs no transaction
    _driver.commit(sink, written)
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_batch_without_rows_is_committed(sink, query):
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[], []])
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[]])
    run_batch(sink, BatchId(query, "sink", 1, new_run()), FIRST)
    assert published(sink) == [0, 1, 2, 3, 4]


@mostly_embedded
def test_the_cost_of_a_batch_is_logged_in_one_line(sink, query, caplog):
    caplog.set_level("INFO", "txnbridge.spark")
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    cost = (
        r"5 rows, 85000 bytes in 2 transactions; prepared in \d+ ms, decided in \d+ ms, published in \d+ ms; the oldest"
    )
    assert len(re.findall(cost, caplog.text)) == 1


@mostly_embedded
def test_a_job_without_a_name_leaves_nothing_that_the_log_is_asked_for(sink):
    job = new_run()
    run_batch(sink, BatchId(f"#{job}", "sink", 0, job, job=True), FIRST)
    with txnbridge.connect(sink.url, application=sink.application(f"#{job}")) as bridge:
        assert bridge.decisions().claims("#results") == []
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_run_that_was_not_told_that_its_batch_is_done_commits_it_again(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, FIRST)
    for _ in range(2):
        _driver.commit(sink, written)
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_committed_batch_that_comes_again_changes_nothing(sink, query):
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    again = write(sink, BatchId(query, "sink", 0, new_run()), [[0, 1, 2, 3, 4]])
    assert all(part.settled and not part.parts for part in again)
    _driver.commit(sink, again)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


@pytest.mark.parametrize("kill", [None, "resolve/before/1"], ids=["done", "decided"])
@pytest.mark.parametrize("other", [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 9, 4]], []], ids=["more", "others", "none"])
def test_a_batch_that_comes_again_with_other_rows_is_in_doubt_until_somebody_has_looked(start, kill, other):
    """A restored checkpoint that lacks the plan of its last batch makes Spark plan that batch anew."""
    sink, query = start
    with Child(decide, start, kill=kill) as child:
        child.stopped() if kill else child.result(60)
    if not other:
        other = [[]]
    for _ in range(2):
        with pytest.raises(BatchInDoubt, match=r"published with 5 rows.*--skip 0"):
            run_batch(sink, BatchId(query, "sink", 0, new_run()), other)
        assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])
    with_session(sink, BatchId(query, "sink", 0, "-"), lambda session: recover(session, (query, "sink"), skip=0))
    run_batch(sink, BatchId(query, "sink", 0, new_run()), other)
    run_batch(sink, BatchId(query, "sink", 1, new_run()), [[5], [6]])
    assert published(sink) == list(range(7))


@mostly_embedded
def test_a_query_whose_rows_vary_is_compared_by_their_number(sink, query):
    sink = replace(sink, nondeterministic=True)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[10, 11], [12, 13, 14]])
    with pytest.raises(BatchInDoubt, match="published with 5 rows"):
        run_batch(sink, BatchId(query, "sink", 0, new_run()), SECOND)
    assert published(sink) == [0, 1, 2, 3, 4]


def test_two_sinks_of_one_query_do_not_know_each_other(sink, query):
    run = new_run()
    for name in ("one", "two"):
        run_batch(sink, BatchId(query, name, 0, run), FIRST)
    assert published(sink) == sorted([0, 1, 2, 3, 4] * 2)


def test_a_process_with_more_tasks_than_ids_for_prepared_transactions_takes_further_slots(sink, query):
    if sink.url.startswith("kafka"):
        sink = replace(sink, url=f"{sink.url}?prepared_ids=2")
    identity = BatchId(query, "sink", 0, new_run())
    run_batch(sink, identity, [[number] for number in range(5)])
    run_batch(sink, replace(identity, batch=1), [[number] for number in range(5, 10)])
    assert (published(sink), left_open(sink, query)) == (list(range(10)), [])


def run_two_batches(start, first=FIRST, again=([4, 3, 2, 1, 0],), second=SECOND):
    """A query that is started again goes on under a new run, and may share its rows out differently."""
    sink, query = start
    run = new_run()
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        known = bridge.decisions().read((query, "sink"))
    if known.done_up_to != 1:  # Spark repeats only its last batch
        run_batch(sink, BatchId(query, "sink", 0, run), first if known.opening is None else again)
    run_batch(sink, BatchId(query, "sink", 1, run), second)


def check_two_batches(start, rows=8):
    sink, query = start
    assert (published(sink), left_open(sink, query)) == (list(range(rows)), [])


def fresh_starts(url):
    """Make starts of a walk: a sink and a query, each in a broker of its own if the URL has a NUMBER."""
    numbers = count()
    return lambda: (options(url.replace("NUMBER", f"{next(numbers)}"), topic=f"out-{new_run()}"), new_run())


@pytest.mark.timeout(900)
def test_killed_at_every_event_a_batch_is_published_once(tmp_path):
    fresh = fresh_starts(f"embedded:{tmp_path}/NUMBER.db")
    points = crash_everywhere(run_two_batches, check_two_batches, fresh=fresh, at_once=2)
    assert len({point.event for point in points}) > 10


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_at_every_event_a_batch_is_published_once_on_kafka(kafka_broker):
    crash_everywhere(run_two_batches, check_two_batches, fresh=fresh_starts(kafka_broker.url), timeout=120, at_once=2)


def publish_in_the_task(start):
    sink, query = start
    identity = BatchId(query, "sink", 0, new_run())
    for report in write(sink, identity, [*FIRST, *SECOND]):
        for part in report.parts:
            with txnbridge.connect(sink.url) as bridge:
                bridge.commit(part.token)


def publish_without_a_decision(start):
    sink, query = start
    written = write(sink, BatchId(query, "sink", 0, new_run()), [*FIRST, *SECOND])
    with txnbridge.connect(sink.url) as bridge:
        for report in written:
            for part in report.parts:
                bridge.commit(part.token)


def publish_after_clearing_up(start):
    """Abort every open transaction, as a naive new run would, and go on."""
    sink, query = start
    with txnbridge.connect(sink.url) as bridge:
        for transaction in left_open(sink, query):
            bridge.admin.abort(transaction)
    run_two_batches(start)


@pytest.mark.parametrize(
    ("broken", "point"),
    [
        (publish_in_the_task, "resolve/after/1"),
        (publish_without_a_decision, "resolve/after/1"),
        (publish_after_clearing_up, "resolve/before/2"),
    ],
)
def test_a_simpler_writer_loses_or_doubles_rows_when_it_is_killed(broken, point, start):
    with Child(broken, start, kill=point) as child:
        child.stopped()
    with pytest.raises((AssertionError, BatchInDoubt)):
        broken(start)
        check_two_batches(start)


def decide(start, parts=FIRST):
    sink, query = start
    run_batch(sink, BatchId(query, "sink", 0, new_run()), parts)


def die_deciding(start, *parts, at="resolve/before/1"):
    """Let a driver decide, and kill its process when it publishes."""
    with Child(decide, start, *parts, kill=at) as child:
        child.stopped()


def test_a_decided_transaction_is_alive_when_the_next_run_needs_it(start):
    """The next run's tasks come before its commit; they may not touch what the last run decided."""
    sink, query = start
    die_deciding(start)
    assert published(sink) == []
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, [[0, 1, 2, 3, 4]])
    assert all(part.settled for part in written)
    _driver.commit(sink, written)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


def test_the_newer_of_two_drivers_wins(sink, query):
    older, newer = BatchId(query, "sink", 0, new_run()), BatchId(query, "sink", 0, new_run())
    by_older = write(sink, older, FIRST)
    forget()
    by_newer = write(sink, newer, FIRST)
    with pytest.raises(errors.Fenced):
        _driver.commit(sink, by_older)
    _driver.abort(sink, by_older)
    _driver.commit(sink, by_newer)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])
    with pytest.raises(errors.Fenced):
        write(sink, older, FIRST)


def test_a_driver_that_slept_after_its_decision_finds_it_finished(start):
    sink, query = start
    with Child(decide, start, [[0, 1, 2, 3, 4]], pause="resolve/before/1") as child:
        child.stopped()
        run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
        assert published(sink) == [0, 1, 2, 3, 4]
        child.resume()
        child.result(60)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


@mostly_embedded
def test_a_batch_that_an_operator_finishes_while_its_next_driver_looks_is_done(start, monkeypatch):
    sink, query = start
    die_deciding(start)
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, FIRST)

    def look_before_the_operator(is_done, session, identity):
        looks.append(identity)
        return is_done(session, identity) or (len(looks) == 1 and bool(recover(session, identity.path).skipped))

    looks = []
    replace_method(monkeypatch, _driver, "is_done", look_before_the_operator)
    _driver.commit(sink, written)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


@mostly_embedded
@pytest.mark.parametrize("kind", [errors.AccessDenied, errors.NotSupported])
def test_where_no_transactions_are_listed_a_query_is_published(sink, query, monkeypatch, kind):
    fail_call(monkeypatch, Admin, "transactions", kind("no transactions are listed here"), EACH)
    for batch, rows_of_batch in enumerate((FIRST, SECOND)):
        run_batch(sink, BatchId(query, "sink", batch, new_run()), rows_of_batch)
    assert published(sink) == list(range(8))


def test_transactions_that_losing_attempts_prepared_do_not_stay_open(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    lost = write(sink, identity, FIRST)
    forget()  # another process writes the second attempts
    _driver.commit(sink, write(sink, identity, FIRST))
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])
    with txnbridge.connect(sink.url) as bridge:
        assert bridge.status(lost[0].parts[0].token).state is txnbridge.TokenState.ABORTED


@mostly_embedded
def test_a_transaction_that_cannot_be_ended_keeps_no_other_open(sink, query, bridge, monkeypatch):
    refused = fail_call(monkeypatch, type(bridge.admin), "abort", errors.AccessDenied("not this one"))
    identity = BatchId(query, "sink", 0, new_run())
    write(sink, identity, FIRST)
    forget()  # another process writes the second attempts
    _driver.commit(sink, write(sink, identity, FIRST))
    assert left_open(sink, query) == [transaction for _, transaction in refused]


@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_batch_that_is_given_up_spares_what_was_decided_before_it_in_a_log_elsewhere(url, query, tmp_path):
    """The broker shows a token decided in a log elsewhere as it shows one that nobody decided about."""
    sink = elsewhere(url, tmp_path)
    die_deciding((sink, query))
    next_batch = BatchId(query, "sink", 1, new_run())
    # The task of partition 0, which would finish what was decided, has failed.
    second = write_partition(next_batch, sink, Columns(frozenset({"value"}), sink.topic), rows([5]), 1, "task 1")
    _driver.abort(sink, [None, second])
    assert left_open(sink, query) == []
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[0, 1, 2, 3, 4]])  # nothing can be replaced
    assert published(sink) == [0, 1, 2, 3, 4]


@mostly_embedded
def test_a_job_none_of_whose_tasks_succeeded_leaves_nothing_open(sink):
    """Spark hands on no message then; a task whose rows end early has prepared all the same."""
    job = source.BatchWriter(sink, Columns(frozenset({"value"}), sink.topic))
    write(sink, job._identity, FIRST)
    job.abort([None, None, None])
    assert left_open(sink) == []


def test_a_batch_that_was_given_up_takes_no_late_tasks_and_comes_again(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    _driver.abort(sink, [*write(sink, identity, FIRST), None])
    assert left_open(sink, query) == []
    with pytest.raises(errors.TransactionAborted, match="too late"):
        write(sink, identity, FIRST)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_run_that_tries_a_batch_again_takes_no_late_tasks_of_its_first_attempt(sink, query):
    first = BatchId(query, "sink", 0, new_run(), attempt=0)
    write(sink, first, FIRST)
    _driver.abort(sink, [], first)
    assert left_open(sink, query) == []
    second = replace(first, attempt=_driver.next_attempt(sink, first))
    written = write(sink, second, FIRST)
    with pytest.raises(errors.TransactionAborted, match="too late"):
        write(sink, first, FIRST)
    _driver.commit(sink, written)
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])


def test_an_abort_after_the_decision_changes_nothing(start):
    sink, query = start
    die_deciding(start, at="resolve/before/2")
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        (claim,) = bridge.decisions().claims((query, "sink", 0))
    identity = BatchId(query, "sink", 0, claim.data["run"])
    _driver.abort(sink, [write(sink, identity, [[1]])[0]])
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_transaction_that_died_before_the_decision_stops_the_batch_and_nothing_is_published(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, FIRST)
    with txnbridge.connect(sink.url) as bridge:
        bridge.abort(written[1].parts[0].token)
    with pytest.raises(errors.TransactionAborted, match="partition 1 is aborted before anybody decided"):
        _driver.commit(sink, written)
    _driver.abort(sink, written)
    assert (published(sink), left_open(sink, query)) == ([], [])
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_worker_goes_on_when_its_session_was_closed_for_the_sake_of_others(sink, query):
    run = new_run()
    run_batch(sink, BatchId(query, "sink", 0, run), FIRST)
    sessions.clear()
    run_batch(sink, BatchId(query, "sink", 1, run), [[5], [6]])
    assert published(sink) == [0, 1, 2, 3, 4, 5, 6]


def test_a_batch_that_took_too_long_is_not_decided(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    written = [
        replace(
            report,
            parts=[
                replace(part, began_at=part.began_at - 800_000, expires_at=part.began_at + 100_000)
                for part in report.parts
            ],
        )
        for report in write(sink, identity, FIRST)
    ]
    with pytest.raises(errors.TransactionAborted, match="took too long"):
        _driver.commit(sink, written)
    assert published(sink) == []


def lose_a_decided_part(sink, query, number, *parts):
    die_deciding((sink, query), *parts)
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        (claim,) = bridge.decisions().claims((query, "sink", 0))
        bridge.abort(claim.data["parts"][number]["token"])


def test_a_lost_part_of_a_decided_batch_is_written_again_when_the_same_rows_come_again(start):
    sink, query = start
    lose_a_decided_part(sink, query, 1)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[4, 3], [], [0, 1, 2]])  # the same parts, in another order
    assert (published(sink), left_open(sink, query)) == ([0, 1, 2, 3, 4], [])
    run_batch(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    run_batch(sink, BatchId(query, "sink", 1, new_run()), SECOND)
    assert published(sink) == list(range(8))


@mostly_embedded
def test_a_lost_part_of_a_decided_batch_comes_from_its_own_partition_where_others_look_alike(start, monkeypatch):
    sink, query = start
    lose_a_decided_part(sink, query, 1, [[1], [1], [1]])
    marked = answer_calls(monkeypatch, _driver, "mark_done", note=lambda session, path, batch, data: data)
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[1], [1], [1]])
    assert [part["partition"] for data in marked for part in data["parts"]] == [1]


def test_a_lost_part_of_a_decided_batch_is_named_when_its_rows_are_shared_out_otherwise(start):
    sink, query = start
    lose_a_decided_part(sink, query, 0)
    for _ in range(2):
        with pytest.raises(BatchInDoubt, match="3 rows of task partition 0 are not published"):
            run_batch(sink, BatchId(query, "sink", 0, new_run()), [[0, 1], [2, 3, 4]])
    assert published(sink) == [3, 4]


def test_a_replacement_that_was_decided_and_not_finished_is_finished(start):
    sink, query = start
    lose_a_decided_part(sink, query, 0)
    die_deciding(start, at="resolve/after/3")  # the two old ones, then the new one
    run_batch(sink, BatchId(query, "sink", 0, new_run()), [[0, 1, 2, 3, 4]])
    assert published(sink) == [0, 1, 2, 3, 4]


def test_a_decision_of_somebody_else_that_gives_the_batch_up_is_respected(sink, query):
    identity = BatchId(query, "sink", 0, new_run())
    written = write(sink, identity, FIRST)
    with txnbridge.connect(sink.url, application=sink.application(query)) as bridge:
        bridge.decisions().claim((query, "sink", 0, 0), Decision.ABORT, {"run": "an administrator"})
    with pytest.raises(errors.TransactionAborted):
        _driver.commit(sink, written)
    assert published(sink) == []


def elsewhere(url, tmp_path):
    """A sink whose decision log can be deleted."""
    place = f"sqlite:///{tmp_path / 'decisions.db'}"
    return options(url, topic=f"out-{new_run()}", transactionalIdPrefix=f"test-{new_run()}", decisionLog=place)


def test_a_later_batch_without_its_decision_log_is_refused_until_somebody_has_looked(url, query, tmp_path):
    sink = elsewhere(url, tmp_path)
    for batch in range(2):
        run_batch(sink, BatchId(query, "sink", batch, new_run()), [[batch]])
    forget()
    (tmp_path / "decisions.db").unlink()
    again = BatchId(query, "sink", 1, new_run())
    for _ in range(2):
        with pytest.raises(errors.EvidenceLost, match="knows of no batch"):
            run_batch(sink, again, [[1]])
        _driver.abort(sink, [], again)
        again = replace(again, run=new_run())
    assert published(sink) == [0, 1]
    with_session(sink, again, lambda session: recover(session, again.path, skip=1))
    run_batch(sink, again, [[1]])
    run_batch(sink, replace(again, batch=2), [[2]])
    assert published(sink) == [0, 1, 2]


def test_a_first_batch_whose_decision_is_gone_is_refused_while_its_transactions_are_open(url, query, tmp_path):
    sink = elsewhere(url, tmp_path)
    die_deciding((sink, query), at="resolve/before/2")
    opened = left_open(sink, query)
    (tmp_path / "decisions.db").unlink()
    again = BatchId(query, "sink", 0, new_run())
    for _ in range(2):
        with pytest.raises(errors.EvidenceLost, match="which its decision log does not know"):
            run_batch(sink, again, FIRST)
        _driver.abort(sink, [], again)
        again = replace(again, run=new_run())
    assert len(published(sink)) < 5
    assert left_open(sink, query) == opened


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
def test_a_function_may_leave_out_the_first_batches_also_before_its_driver_dies(url, sink, query):
    for batch in (2, 2, 5):  # the driver died before the query noted batch 2
        run_batch(sink, BatchId(query, "sink", batch, new_run(), attempt=0), SECOND if batch == 5 else FIRST)
    assert published(sink) == list(range(8))


@mostly_embedded
def test_a_sink_that_is_added_to_a_query_begins_where_the_query_is(sink, query):
    run = new_run()
    run_batch(sink, BatchId(query, "sink", 0, run), FIRST)
    run_batch(replace(sink, sink="added"), BatchId(query, "added", 1, run), SECOND)
    assert published(sink) == list(range(8))


def test_a_task_that_reports_nothing_is_refused(sink, query):
    written = write(sink, BatchId(query, "sink", 0, new_run()), FIRST)
    for messages in ([*written, None], [None, None], []):
        with pytest.raises(errors.InvalidOption, match="continuous"):
            _driver.commit(sink, messages)
    assert published(sink) == []


@pytest.mark.offline
def test_a_worker_collects_the_garbage_of_its_calls_and_does_not_look_at_its_modules_again(monkeypatch):
    monkeypatch.setattr(_worker_gc, "_calls", count(1))
    excluded = []
    gc.unfreeze()  # what the tests' own configuration excludes
    try:
        for environment in ({}, {}, {"SPARK_REUSE_WORKER": "1"}, {"SPARK_REUSE_WORKER": "1"}):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            _worker_gc.begin_call()
            excluded.append(gc.get_freeze_count() > 10_000)
    finally:
        gc.freeze()
    assert excluded == [False, False, False, True]


@pytest.mark.offline
def test_a_session_in_use_is_not_closed_for_the_sake_of_others(tmp_path):
    sinks = [options(f"embedded:{tmp_path / 'broker.db'}", sink=f"sink-{number}") for number in range(20)]

    def use_them(left):
        if left:
            with_session(left[0], BatchId("query", left[0].sink, 0, "run"), lambda session: use(session, left[1:]))

    def use(session, left):
        use_them(left)
        assert session.decisions.claims("nothing") == []

    use_them(sinks)


@mostly_embedded
def test_a_batch_below_one_that_is_done_is_an_error_and_a_jobs_version_is_skipped(sink, query):
    """Spark repeats the last batch only: a lower number comes from another checkpoint, and has other rows."""
    for batch in range(4):
        run_batch(sink, BatchId(query, "sink", batch, new_run()), FIRST if batch == 3 else [[]])
    with pytest.raises(errors.InvalidOption, match=r"every batch up to 3 is done.*txnVersion=4"):
        run_batch(sink, BatchId(query, "sink", 2, new_run()), SECOND)
    run_batch(sink, BatchId(query, "sink", 2, new_run(), job=True), SECOND)
    assert published(sink) == [0, 1, 2, 3, 4]


@mostly_embedded
def test_a_version_that_is_decided_is_finished_and_has_to_have_the_same_rows(url):
    job = f"job-{new_run()}"
    sink = options(url, topic=f"out-{new_run()}", txnAppId=job)
    die_deciding((sink, job))
    with pytest.raises(errors.InvalidOption, match="is done, with 5 rows; now it has 2"):
        run_batch(sink, BatchId(job, "sink", 0, new_run()), SECOND[:1])
    assert (published(sink), left_open(sink, job)) == ([0, 1, 2, 3, 4], [])


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
@pytest.mark.parametrize("target", ["topic", "url"])
def test_a_version_that_is_done_for_one_target_is_refused_for_another_one(sink, query, tmp_path, target):
    sink = replace(sink, log_url=f"sqlite:///{tmp_path}/log.db")
    run_batch(sink, BatchId(query, "sink", 7, new_run(), job=True), FIRST)
    other = {"topic": "copy", "url": f"embedded://{tmp_path}/other.db"}[target]
    with pytest.raises(errors.InvalidOption, match=r"is done for {.*}, and now it is for {.*}: nothing was"):
        run_batch(replace(sink, **{target: other}), BatchId(query, "sink", 7, new_run(), job=True), FIRST)


@pytest.mark.parametrize("version", [7, None], ids=["numbered", "named only"])
def test_a_version_that_is_done_is_not_written_again_and_has_to_have_the_same_rows(url, version):
    job = f"job-{new_run()}"
    sink = options(url, topic=f"out-{new_run()}", txnAppId=job, **({"txnVersion": str(version)} if version else {}))
    run_batch(sink, BatchId(job, "sink", version or 0, new_run()), FIRST)
    run_batch(sink, BatchId(job, "sink", version or 0, new_run()), [[4, 3], [2, 1, 0]])  # the same in another order
    assert published(sink) == [0, 1, 2, 3, 4]
    for other in ([[0, 1, 2, 3]], [[0, 1, 2, 3, 5]]):
        with pytest.raises(errors.InvalidOption, match="txnVersion used twice"):
            run_batch(sink, BatchId(job, "sink", version or 0, new_run()), other)
    assert published(sink) == [0, 1, 2, 3, 4]


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
def test_a_streams_batches_under_a_name_are_numbered_without_gaps_and_in_one_way_for_each_checkpoint(url):
    job = f"job-{new_run()}"
    sink = options(url, topic=f"out-{new_run()}", txnAppId=job)
    first = BatchId(job, "sink", 0, new_run(), checkpoint="one")
    run_batch(sink, first, FIRST)
    with pytest.raises(errors.InvalidOption, match="numbers its batches from txnVersion=0, and now from 1"):
        run_batch(replace(sink, version=1), replace(first, batch=1, run=new_run()), FIRST)  # it is batch 0 again
    with pytest.raises(BatchInDoubt, match="--skip 0"):
        run_batch(sink, replace(first, run=new_run()), SECOND)
    with pytest.raises(errors.InvalidOption, match=r"not the next one after batch 0.*txnVersion=1"):
        run_batch(replace(sink, version=2), BatchId(job, "sink", 2, new_run(), checkpoint="two"), SECOND)
    run_batch(replace(sink, version=1), BatchId(job, "sink", 1, new_run(), checkpoint="two"), SECOND)
    assert (published(sink), left_open(sink, job)) == (list(range(8)), [])


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
@pytest.mark.parametrize(("vary", "rows"), [("true", [[5, 6, 7], [8, 9]]), ("false", FIRST)], ids=["vary", "same"])
def test_a_new_checkpoint_that_counts_from_the_last_ones_number_loses_no_batch_silently(url, vary, rows):
    job = f"job-{new_run()}"
    sink = options(url, topic=f"out-{new_run()}", txnAppId=job, nondeterministic=vary)
    run_batch(sink, BatchId(job, "sink", 0, new_run(), checkpoint="one"), FIRST)
    with pytest.raises(errors.InvalidOption, match="txnVersion=1"):
        run_batch(sink, BatchId(job, "sink", 0, new_run(), checkpoint="two"), rows)
    run_batch(replace(sink, version=1), BatchId(job, "sink", 1, new_run(), checkpoint="two"), rows)
    assert published(sink) == sorted([0, 1, 2, 3, 4, *(row for part in rows for row in part)])


@pytest.mark.offline
def test_an_error_that_no_waiting_mends_is_raised_at_once_without_a_hint_at_a_wrong_option(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is tried again"))
    (tmp_path / "text.db").write_text("this is no database " * 100)
    with pytest.raises(errors.StorageFailed, match="not an SQLite database"):
        connect(options(f"embedded:{tmp_path / 'text.db'}"), "shop")
    log = options(f"embedded:{tmp_path / 'broker.db'}", decisionLog=f"sqlite:///{tmp_path / 'text.db'}")
    with pytest.raises(errors.StorageFailed, match="not a database"):
        with_session(log, BatchId("query", "sink", 0, "run"), lambda session: session.decisions.read("query"))
    with pytest.raises(errors.InvalidOption, match=r"timeout\.ms") as caught:
        connect(options("kafka://127.0.0.1:9", **{"kafka.max.block.timeout.ms": "5"}), "shop")
    assert "commitTimeout" not in str(caught.value)
