"""The data source in a real Spark: what its users write, and what goes wrong in its tasks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import txnbridge
from tests.spark.kit import left_open, mostly_embedded, new_run, options, published

sql = pytest.importorskip("pyspark.sql", reason="needs PySpark")
from pyspark.sql import functions as F  # noqa: E402, N812 (as everybody calls it)
from pyspark_txnbridge import BatchLogger  # noqa: E402


def writer(frame, sink, **given):
    found = frame.write.format("txnbridge").option("url", sink.url).option("createTopics", "2")
    found = found.option("topic", sink.topic).option("transactionalIdPrefix", sink.prefix)
    return found.options(**given).mode("append")


def numbers(spark, count, partitions=2):
    return spark.range(0, count, 1, partitions).select(F.col("id").cast("string").alias("value"))


def read(sink):
    with txnbridge.connect(sink.url, create_topics=1) as bridge:
        return bridge.read(sink.topic, 1_000_000)


def test_every_column_of_the_kafka_sink_arrives(spark, url):
    topic, other = f"out-{new_run()}", f"out-{new_run()}"
    with txnbridge.connect(url) as bridge:
        for name in (topic, other):
            bridge.admin.create_topic(name, partitions=3)
    rows = [
        (b"one", b"k", topic, 2, 1_700_000_000.5, [("a", b"1"), ("a", b"2")]),
        (None, None, other, None, None, None),
        (b"", b"", topic, 0, None, []),
    ]
    schema = (
        "value binary, key binary, topic string, partition int, seconds double,"
        " headers array<struct<key:string,value:binary>>"
    )
    frame = spark.createDataFrame(rows, schema).withColumn("timestamp", F.col("seconds").cast("timestamp"))
    frame.write.format("txnbridge").options(url=url, includeTimestamp="true").mode("append").save()
    with txnbridge.connect(url) as bridge:
        by_value = {message.value: message for name in (topic, other) for message in bridge.read(name, 10)}
    assert by_value.keys() == {b"one", None, b""}
    one = by_value[b"one"]
    assert (one.key, one.partition, one.timestamp, one.headers.all("a")) == (b"k", 2, 1_700_000_000_500, ["1", "2"])
    assert (by_value[None].topic, by_value[None].key) == (other, None)
    assert (by_value[b""].key, by_value[b""].partition) == (b"", 0)


def test_rows_with_an_old_timestamp_get_the_time_of_their_writing(spark, sink):
    before = int(time.time() * 1000)
    writer(numbers(spark, 3).selectExpr("value", "timestamp '2001-01-01' as timestamp"), sink).save()
    assert [message.timestamp >= before for message in read(sink)] == [True] * 3


def test_an_empty_frame_is_written(spark, sink):
    writer(numbers(spark, 5).where("false"), sink).save()
    assert published(sink) == []


def test_a_task_that_failed_is_repeated_and_its_rows_come_once(spark, sink, tmp_path):
    marker = str(tmp_path / "failed")

    def fail_once(value):
        if value == "1500" and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("the first attempt fails")
        return value

    frame = numbers(spark, 2000).select(F.udf(fail_once, useArrow=False)("value").alias("value"))
    writer(frame, sink).save()
    assert Path(marker).exists()
    assert (published(sink), left_open(sink)) == (list(range(2000)), [])


def test_rows_that_end_early_because_something_failed_are_not_published(spark, sink):
    """Spark just ends a failing task's rows; 30,000 rows are three batches of Arrow, and the error is in the last."""
    frame = numbers(spark, 60_000).select(
        F.when(F.col("value") == "59999", F.raise_error(F.lit("broken row"))).otherwise(F.col("value")).alias("value")
    )
    with pytest.raises(Exception, match="broken row"):
        writer(frame, sink).save()
    assert published(sink) == []


def test_a_named_job_that_is_run_again_is_not_published_twice(spark, sink):
    named = {"txnAppId": f"job-{new_run()}", "txnVersion": "3"}
    for partitions in (2, 3):
        writer(numbers(spark, 100, partitions), sink, **named).save()
    assert published(sink) == list(range(100))
    with pytest.raises(Exception, match="txnVersion used twice"):
        writer(numbers(spark, 99), sink, **named).save()
    writer(numbers(spark, 10), sink, **(named | {"txnVersion": "4"})).save()
    assert published(sink) == sorted([*range(100), *range(10)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topc": "x"}, "'topc' is unknown; did you mean topic"),
        ({"commitTimeout": "soon"}, "option commitTimeout is a number of seconds"),
        ({"txnVersion": "1"}, "txnAppId"),
        ({"txnAppId": "daily"}, "only the first would publish anything"),
        ({"kafka.bootstrap.servers": "localhost:1"}, "say where to write, once"),
        ({"transactionalIdPrefix": "a.b"}, "letters, digits"),
        ({"kafkaConsumer.pollTimeoutMs": "100"}, "is only for Spark's own Kafka source"),
    ],
)
def test_a_wrong_option_is_refused_by_name_before_the_first_row(spark, tmp_path, change, message):
    sink = options(f"embedded:{tmp_path / 'broker.db'}")
    with pytest.raises(Exception, match=message):
        writer(numbers(spark, 1), sink, **change).save()
    assert not (tmp_path / "broker.db").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["id"], "Required attribute 'value' not found"),
        (["id as value"], r"value attribute unsupported type bigint. value must be a\(n\) string or binary"),
        (["string(id) as value", "id as partition"], "partition attribute unsupported type"),
    ],
)
def test_a_column_of_the_wrong_type_is_refused_as_by_the_kafka_sink(spark, url, columns, message):
    sink = options(url)
    with pytest.raises(Exception, match=message):
        writer(spark.range(3).selectExpr(*columns), sink).save()


def test_without_a_topic_nothing_is_written(spark, url):
    plain = {"url": url}
    with pytest.raises(Exception, match="topic option required when no 'topic' attribute is present"):
        numbers(spark, 1).write.format("txnbridge").options(**plain).mode("append").save()
    frame = numbers(spark, 2).withColumn("topic", F.lit(None).cast("string"))
    with pytest.raises(Exception, match="null topic present in the data"):
        frame.write.format("txnbridge").options(**plain).mode("append").save()


def test_a_topic_that_is_missing_is_named_before_the_first_row(spark, tmp_path):
    began = tmp_path / "began"
    frame = numbers(spark, 1).select(
        F.udf(lambda value: began.touch() or value, useArrow=False)("value").alias("value")
    )
    with pytest.raises(Exception, match="there is no topic 'missing'"):
        writer(frame, options(f"embedded:{tmp_path / 'broker.db'}", topic="missing"), createTopics="0").save()
    assert not began.exists()


def test_overwriting_is_refused_with_the_reason(spark, tmp_path):
    sink = options(f"embedded:{tmp_path / 'broker.db'}")
    with pytest.raises(Exception, match="what is published stays published"):
        writer(numbers(spark, 1), sink).mode("overwrite").save()


@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_timeout_beyond_what_the_broker_allows_is_refused_by_the_options_name(spark, sink):
    with pytest.raises(Exception, match="commitTimeout"):
        writer(numbers(spark, 1), sink, commitTimeout="100000").save()


def test_a_broker_that_cannot_be_reached_is_named_before_the_first_row(spark):
    sink = options("kafka://127.0.0.1:9", topic="out")
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        writer(numbers(spark, 1), sink, commitTimeout="3").save()


def stream(spark, sink, checkpoint, rows=20, **given):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    frame = source.load().select(F.col("value").cast("string"))
    return (
        frame.writeStream.format("txnbridge")
        .option("url", sink.url)
        .option("topic", sink.topic)
        .option("transactionalIdPrefix", sink.prefix)
        .option("createTopics", "2")
        .option("checkpointLocation", str(checkpoint))
        .options(**given)
    )


def run_until(query, batch):
    """Let a query go on until it has committed a batch."""
    while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < batch):
        time.sleep(0.05)
    assert query.exception() is None, query.exception()
    query.stop()


def assert_a_prefix(values):
    """Check that the published values are the first n numbers, each once."""
    assert values == list(range(len(values)))


def test_a_stream_that_is_stopped_and_started_publishes_each_row_once(spark, sink, tmp_path):
    for batch in (2, 5):
        run_until(stream(spark, sink, tmp_path / "checkpoint").start(), batch)
    values = published(sink)
    assert len(values) >= 120
    assert_a_prefix(values)


@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_a_stream_that_starts_while_the_broker_is_away_waits_for_it(spark, sink, kafka_broker, tmp_path):
    run_until(stream(spark, sink, tmp_path / "checkpoint").start(), 1)
    kafka_broker.kill()

    def come_back():
        time.sleep(3)
        kafka_broker.start()

    with ThreadPoolExecutor(1) as later:
        back = later.submit(come_back)
        try:
            query = stream(spark, sink, tmp_path / "checkpoint").start()
        finally:
            back.result()
        run_until(query, 3)
    values = published(sink)
    assert len(values) >= 80
    assert_a_prefix(values)


def test_each_batch_is_told_in_the_programs_log(spark, tmp_path, caplog):
    caplog.set_level("INFO", "txnbridge.spark")
    sink = options(f"embedded:{tmp_path / 'broker.db'}", topic="out")
    logger = BatchLogger()
    spark.streams.addListener(logger)
    try:
        run_until(stream(spark, sink, tmp_path / "checkpoint").queryName("told").start(), 1)
        until = time.monotonic() + 60
        while "ended" not in caplog.text and time.monotonic() < until:
            time.sleep(0.1)  # Spark calls listeners later
    finally:
        spark.streams.removeListener(logger)
    assert "query told: batch 0 published, 20 rows;" in caplog.text


@mostly_embedded
def test_spark_collects_what_a_batch_cost(spark, sink):
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    try:
        writer(numbers(spark, 5), sink).save()
        told = [str(row) for row in spark.tvf.python_worker_logs().collect()]
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    assert [line for line in told if "5 rows, 5 bytes in 1 transactions; prepared in" in line]


def forget_last_commit(checkpoint):
    """Let Spark repeat a checkpoint's last batch; return its number."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink()
    return int(last.name)


def test_a_batch_that_spark_replays_after_its_commit_is_not_published_twice(spark, sink, tmp_path):
    run_until(stream(spark, sink, tmp_path / "checkpoint").start(), 2)
    last = forget_last_commit(tmp_path / "checkpoint")
    run_until(stream(spark, sink, tmp_path / "checkpoint").start(), last + 1)
    assert_a_prefix(published(sink))


def test_a_changed_version_on_one_checkpoint_publishes_no_batch_again(spark, sink, tmp_path):
    named = {"txnAppId": f"job-{new_run()}"}
    run_until(stream(spark, sink, tmp_path / "checkpoint", **named).start(), 2)
    forget_last_commit(tmp_path / "checkpoint")
    before = published(sink)
    with pytest.raises(Exception, match=r"txnVersion=0.*published again under another number"):
        stream(spark, sink, tmp_path / "checkpoint", **named, txnVersion="1").start().awaitTermination(120)
    assert published(sink) == before
    run_until(stream(spark, sink, tmp_path / "checkpoint", **named).start(), 4)
    assert_a_prefix(published(sink))


def test_a_batch_that_spark_plans_anew_is_not_taken_for_the_published_one(spark, sink, tmp_path):
    """A backup of the checkpoint was restored that lacks the plan of the last batch, and more input has come since."""
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "input"
    folder.mkdir()

    def start(name, values):
        (folder / name).write_text("".join(f"{value}\n" for value in values))
        frame = spark.readStream.format("text").load(str(folder))
        return (
            frame.writeStream.format("txnbridge")
            .options(url=sink.url, topic=sink.topic, transactionalIdPrefix=sink.prefix, createTopics="2")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    start("first", range(20)).awaitTermination(120)
    start("second", range(20, 30)).awaitTermination(120)
    assert published(sink) == list(range(30))
    for name in ("offsets", "commits", "sources/0"):
        (checkpoint / name / "1").unlink()
        (checkpoint / name / ".1.crc").unlink()
    again = start("third", range(30, 40))
    with pytest.raises(Exception, match=r"BatchInDoubt.*published with 10 rows, and comes again with 20 rows"):
        again.awaitTermination(120)
    assert published(sink) == list(range(30))


def test_a_query_with_the_continuous_trigger_takes_no_batch_for_published(spark, tmp_path):
    """Spark calls no task's write() there, and ignores what commit() raises; but then it does not go on either."""
    sink = options(f"embedded:{tmp_path / 'broker.db'}", topic="out")
    frame = spark.readStream.format("rate").option("numPartitions", 1).load().select(F.col("value").cast("string"))
    query = (
        frame.writeStream.format("txnbridge")
        .options(url=sink.url, topic="out", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(continuous="1 second")
        .start()
    )
    try:
        offsets, commits = tmp_path / "checkpoint" / "offsets", tmp_path / "checkpoint" / "commits"
        while query.isActive and not (offsets.exists() and len(list(offsets.glob("[0-9]*"))) > 2):
            time.sleep(0.1)
        assert list(commits.glob("[0-9]*")) == []
    finally:
        query.stop()
    assert published(sink) == []


def test_update_and_complete_mode_are_refused(spark, tmp_path):
    sink = options(f"embedded:{tmp_path / 'broker.db'}", topic="out")
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    counted = source.groupBy("value").count().select(F.col("value").cast("string"))
    given = {"url": sink.url, "topic": "out"}
    update = counted.writeStream.format("txnbridge").options(**given, checkpointLocation=str(tmp_path / "update"))
    with pytest.raises(Exception, match="does not support Update mode"):
        update.outputMode("update").start().awaitTermination(60)
    complete = counted.writeStream.format("txnbridge").options(**given, checkpointLocation=str(tmp_path / "complete"))
    query = complete.outputMode("complete").start()
    with pytest.raises(Exception, match="nothing can be overwritten"):
        query.awaitTermination(60)
