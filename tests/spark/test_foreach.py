"""`write_exactly_once` in `foreachBatch`."""

from __future__ import annotations

from contextlib import suppress

import pytest
from pyspark_txnbridge import write_exactly_once

import txnbridge
from tests.spark.kit import mostly_embedded, new_run, options, published
from tests.spark.test_writer import assert_a_prefix, run_until
from txnbridge import InvalidOption

sql = pytest.importorskip("pyspark.sql", reason="needs PySpark")
from pyspark import InheritableThread  # noqa: E402


def where(sink):
    return {"url": sink.url, "topic": sink.topic, "transactionalIdPrefix": sink.prefix, "createTopics": 1}


def query(spark, checkpoint, function):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).option("numPartitions", 2).load()
    frame = source.selectExpr("cast(value as string) as value")
    return frame.writeStream.foreachBatch(function).option("checkpointLocation", str(checkpoint)).start()


def test_two_sinks_of_a_query_get_each_row_once_over_a_restart(spark, sink, tmp_path):
    other = options(sink.url, topic=f"other-{new_run()}", transactionalIdPrefix=sink.prefix)

    def publish(df, batch):
        for name, to in (("one", sink), ("two", other)):
            write_exactly_once(df, batch_id=batch, sink=name, **where(to))

    for batch in (1, 3):
        run_until(query(spark, tmp_path / "checkpoint", publish), batch)
    for to in (sink, other):
        assert_a_prefix(published(to))
        assert len(published(to)) >= 80


def test_a_function_that_calls_again_after_an_error_publishes_once(spark, sink, tmp_path):
    failed: list[int] = []

    def publish(df, batch):
        given = {"batch_id": batch, "sink": "one", **where(sink)}
        if not failed:
            with pytest.raises(Exception, match="broken row"):
                write_exactly_once(
                    df.selectExpr("if(value = '19', raise_error('broken row'), value) as value"), **given
                )
            failed.append(batch)
        write_exactly_once(df, **given)

    run_until(query(spark, tmp_path / "checkpoint", publish), 1)
    assert failed
    assert_a_prefix(published(sink))


def test_a_batch_of_no_partitions_is_published_as_an_empty_one(spark, sink, tmp_path):
    """Spark knows beforehand that there is nothing, and starts no task."""

    def publish(df, batch):
        rows = df.where("false") if batch == 0 else df
        write_exactly_once(rows, batch_id=batch, sink="one", **where(sink))

    run_until(query(spark, tmp_path / "checkpoint", publish), 2)
    values = published(sink)
    assert values == list(range(20, 20 + len(values)))
    assert len(values) >= 40


def test_a_function_may_leave_out_batches_without_rows_also_the_first_one(spark, sink, tmp_path):
    def publish(df, batch):
        rows = df.where("int(value) >= 20 and int(value) not between 40 and 59")
        if not rows.isEmpty():
            write_exactly_once(rows, batch_id=batch, sink="one", **where(sink))

    run_until(query(spark, tmp_path / "checkpoint", publish), 3)
    values = published(sink)
    assert values == [each for each in range(20, 20 + len(values) + 20) if not 40 <= each < 60]
    assert len(values) >= 40


def test_a_function_that_tries_again_leaves_alone_what_it_has_published(spark, sink, tmp_path):
    other = options(sink.url, topic=f"other-{new_run()}", transactionalIdPrefix=sink.prefix)

    def publish(df, batch):
        for rows in ("if(value = '19', raise_error('broken row'), value)", "value"):
            write_exactly_once(df.select("value"), batch_id=batch, sink="one", **where(sink))
            with suppress(Exception):
                write_exactly_once(df.selectExpr(f"{rows} as value"), batch_id=batch, sink="two", **where(other))

    run_until(query(spark, tmp_path / "checkpoint", publish), 1)
    for to in (sink, other):
        assert_a_prefix(published(to))
        assert len(published(to)) >= 40


@mostly_embedded
@pytest.mark.parametrize("change", [{"topic": "another"}, {"rows": "concat('1', value)"}])
def test_one_name_for_two_sinks_is_refused(spark, sink, tmp_path, change):
    second = {"rows": "value", **change}

    def publish(df, batch):
        write_exactly_once(df, batch_id=batch, sink="one", **where(sink))
        frame = df.selectExpr(f"{second['rows']} as value")
        topic = second.get("topic", sink.topic)
        write_exactly_once(frame, batch_id=batch, sink="one", **where(sink) | {"topic": topic})

    running = query(spark, tmp_path / "checkpoint", publish)
    with pytest.raises(Exception, match="a name of its own"):
        running.awaitTermination(120)
    assert published(sink) == list(range(20))


@mostly_embedded
def test_a_query_whose_function_changes_the_job_group_is_known_by_its_runs(spark, sink, tmp_path):
    def publish(df, batch):
        spark.sparkContext.setJobGroup("orders", "what the program calls it")
        write_exactly_once(df, batch_id=batch, sink="one", **where(sink))

    runs = []
    for batch in (1, 3):
        running = query(spark, tmp_path / "checkpoint", publish)
        run_until(running, batch)
        with txnbridge.connect(sink.url, application=sink.application(str(running.id))) as bridge:
            opening = bridge.decisions().read((str(running.id), "one")).opening
        assert opening is not None
        runs.append((opening.name, opening.number))
        assert opening.name == str(running.runId)
    assert [number for _, number in runs] == [1, 2]
    assert_a_prefix(published(sink))


@mostly_embedded
def test_more_sinks_at_once_than_kept_connections_all_publish(spark, sink, tmp_path):
    sinks = [
        options(sink.url, topic=f"{number}-{new_run()}", transactionalIdPrefix=sink.prefix) for number in range(10)
    ]

    def publish(df, batch):
        def write(number):
            write_exactly_once(df, batch_id=batch, sink=f"sink-{number}", **where(sinks[number]))

        threads = [InheritableThread(target=write, args=(number,)) for number in range(len(sinks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run_until(query(spark, tmp_path / "checkpoint", publish), 1)
    for to in sinks:
        assert_a_prefix(published(to))
        assert len(published(to)) >= 40


def test_a_job_inside_a_stream_has_to_say_which_batch_it_is(spark, tmp_path):
    sink = options(f"embedded:{tmp_path / 'broker.db'}", topic="out")

    def publish(df, batch):
        writer = df.write.format("txnbridge").options(url=sink.url, topic="out").mode("append")
        if batch:
            writer.save()
        writer.options(txnAppId="job", txnVersion=str(batch)).save()

    running = query(spark, tmp_path / "checkpoint", publish)
    with pytest.raises(Exception, match="write_exactly_once"):
        running.awaitTermination(120)
    assert published(sink) == list(range(20))


def test_write_exactly_once_outside_a_query_asks_for_the_query(spark, tmp_path):
    frame = spark.range(3).selectExpr("string(id) as value")
    sink = options(f"embedded:{tmp_path / 'broker.db'}", topic="out")
    with pytest.raises(Exception, match="which query this is"):
        write_exactly_once(frame, batch_id=0, sink="one", url=sink.url, topic="out")
    with pytest.raises(InvalidOption, match="option query is 1 to 80"):  # the ids of another query would begin with it
        write_exactly_once(frame, batch_id=0, sink="one", url=sink.url, topic="out", query="mine.one")
    for _ in range(2):
        write_exactly_once(frame, batch_id=0, sink="one", url=sink.url, topic="out", query="mine", createTopics=1)
    assert published(sink) == [0, 1, 2]
