"""PySpark's writer and reader beside Spark's own for Kafka, and the recovery of a driver's batch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark_txnbridge._write import driver as _driver
from pyspark_txnbridge._write.batch_identity import BatchId
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.sink_options import SinkOptions
from pyspark_txnbridge._write.task import write_partition
from txnbridge_conformance.brokers._jars import cache_folder

from benchmarks import _kafka as kafka
from benchmarks._harness import (
    Contender,
    Lap,
    Report,
    Round,
    Settings,
    alternate,
    at_least,
    at_most,
    contender,
    estimate,
    in_turn,
    timed,
)
from txnbridge import Consumer, connect
from txnbridge.testing import Child

ROWS = {100: 5_000_000, 1024: 1_000_000}  # by the bytes of a row
Write = Callable[[str], object]  # it writes all rows to a topic

# The newest versions of which all four can be fetched; they work with PySpark 4.3.
_SINK = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.12.1",
)


def connector_jars() -> list[Path]:
    """Return the jars of Spark's Kafka connector; fetch them if they are not in the cache folder."""
    folder = cache_folder() / "spark-kafka-sink"
    for artifact in _SINK:
        _, name, version = artifact.split(":")
        if not (folder / f"{name}-{version}.jar").exists():
            copy = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
            subprocess.run(copy, check=True, stdout=sys.stderr)
    return sorted(folder.glob("*.jar"))


@contextmanager
def spark(with_sink: bool = True) -> Iterator[Any]:
    """Yield a Spark session on two cores; `with_sink` adds Spark's own Kafka sink."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.jars", ",".join(map(str, connector_jars() if with_sink else ())))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()


def rows(session: Any, size: int, count: int) -> Any:
    """Return rows that are kept in memory, so that making them takes no time of a contender."""
    frame = session.range(0, count, 1, 2).selectExpr(f"cast(lpad(string(id), {size}, 'x') as binary) as value")
    frame = frame.persist()
    frame.count()
    return frame


def exactly_once(frame: Any, url: str) -> Write:
    """Return a function that writes these rows to a topic exactly once, with txnbridge."""
    writer = frame.write.format("txnbridge").option("url", url).mode("append")
    return lambda topic: writer.option("topic", topic).save()


# --- writing ---------------------------------------------------------------------------------------------------------

BATCHES = 30  # micro-batches of one query, after five that warm it up
TASKS = 200  # tasks of one row each, which show the cost of a task
TUNED = {"kafka.linger.ms": "20", "kafka.batch.size": "1000000"}


def spark_write(settings: Settings, broker: str) -> None:
    """Measure the exactly-once writer beside Spark's own Kafka sink, which publishes at least once: the same rows.

    On Pulsar the peer is a loop of the official client, which has no transactions.
    """
    {"kafka": write_to_kafka, "pulsar": write_to_pulsar}[broker](settings)


def write_to_kafka(settings: Settings) -> None:
    with kafka.broker(settings) as url, spark() as session:
        for size, wanted in ROWS.items():
            count = 10_000 if settings.quick else wanted
            frame = rows(session, size, count)
            writers = {
                "ours": exactly_once(frame, url),
                "sink": _sink(frame, url, {}),
                "tuned": _sink(frame, url, TUNED),
            }
            for write in writers.values():
                write(kafka.new_topic(url, 2))  # the first write starts the workers and does not count
            found = _in_turn(settings, url, writers, count)
            frame.unpersist()
            report = Report(settings, f"Spark: {count:,} rows of {size} B to Kafka, two partitions")
            report.ratio("exactly once / Spark's sink", found["ours"], found["sink"], at_least(1.7))
            name = "exactly once / the sink with linger.ms=20, batch.size=1000000"
            report.ratio(name, found["ours"], found["tuned"], at_least(0.95))
            report.each(found, "a row")
        _many_tasks(settings, session, url)
        _micro_batches(settings, session, url)


def _in_turn(settings: Settings, url: str, writers: Mapping[str, Write], units: int) -> dict[str, list[Round]]:
    """Write to a new topic in each round."""

    def turn(write: Write) -> Round:
        topic = kafka.new_topic(url, 2)
        found = timed(lambda: write(topic), units)()
        kafka.drop_topic(url, topic)  # each of a large batch holds half a gigabyte or more
        return found

    return in_turn({name: partial(turn, write) for name, write in writers.items()}, settings.rounds)


def _sink(frame: Any, url: str, options: dict[str, str]) -> Write:
    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", kafka.bootstrap(url)).options(**options)
    return lambda topic: writer.option("topic", topic).save()


def _many_tasks(settings: Settings, session: Any, url: str) -> None:
    tasks = 4 if settings.quick else TASKS
    frame = session.range(0, tasks, 1, tasks).selectExpr("cast(id as string) as value")
    writers = {"exactly once": exactly_once(frame, url), "Spark's sink": _sink(frame, url, {})}
    found = _in_turn(settings, url, writers, tasks)
    report = Report(settings, f"Spark: {tasks} tasks of one row to Kafka")
    name = "a task exactly once / one of Spark's sink"
    report.ratio(name, found["Spark's sink"], found["exactly once"], at_most(3))
    report.each(found, "a task", "ms")


def _micro_batches(settings: Settings, session: Any, url: str) -> None:
    batches = 3 if settings.quick else BATCHES
    found: dict[str, list[float]] = {"ours": [], "noop": []}
    for number in range(2 if settings.quick else 4):
        for name in list(found)[:: -1 if number % 2 else 1]:
            found[name] += _query(session, url, name, batches)
    report = Report(settings, "Spark: a micro-batch of 100 rows to Kafka, in milliseconds")
    ours, noop = estimate(found["ours"]), estimate(found["noop"])
    pairs = [a - b for a, b in zip(found["ours"], found["noop"], strict=True)]
    report.figure("exactly once, above the noop sink", estimate(pairs), "ms", at_most(300))
    report.figure("exactly once", ours, "ms")
    report.figure("noop", noop, "ms")


def _query(session: Any, url: str, name: str, batches: int) -> list[float]:
    """Return the duration of each micro-batch after those that warm up."""
    source = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2)
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = source.load().selectExpr("cast(value as string) as value").writeStream
        writer = writer.option("checkpointLocation", checkpoint)
        if name == "ours":
            writer = writer.format("txnbridge").option("url", url).option("topic", kafka.new_topic(url, 2))
        else:
            writer = writer.format("noop")
        query = writer.start()
        while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < batches + 5):
            time.sleep(0.1)
        if error := query.exception():
            raise RuntimeError(str(error))
        query.stop()
        warm = [each for each in query.recentProgress if 5 <= each.batchId < batches + 5]
    return [float(each.durationMs["triggerExecution"]) for each in warm]


PULSAR_ROWS = {100: 300_000, 1024: 100_000}


def write_to_pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    def to_new_topic(write: Write, count: int) -> Round:
        topic = pulsar.new_topic(url)
        return timed(lambda: write(topic), count)()

    with pulsar.broker(settings) as url, pulsar.official(settings, url) as client, spark(with_sink=False) as session:
        for size, wanted in PULSAR_ROWS.items():
            count = 1_000 if settings.quick else wanted
            frame = rows(session, size, count)
            writers = {
                "exactly once": exactly_once(frame, url),
                "`send_async` in a loop": pulsar.write(client, size, count),
            }
            turns = {name: partial(to_new_topic, write, count) for name, write in writers.items()}
            for turn in turns.values():
                turn()  # the first write starts the workers and does not count
            found = in_turn(turns, settings.rounds)
            frame.unpersist()
            report = Report(settings, f"Spark: {count:,} rows of {size} B from two partitions to a topic of Pulsar")
            writer, loop = found
            report.ratio(f"{writer} / {loop}", found[writer], found[loop])
            report.each(found, "a row")


# --- reading ---------------------------------------------------------------------------------------------------------


@contender
def reading(frame: Any, count: int) -> Iterator[Lap]:
    def lap() -> int:
        frame.write.format("noop").mode("overwrite").save()
        return count

    yield lap


def contenders(session: Any, url: str, topic: str, count: int) -> dict[str, Contender]:
    ours = session.read.format("txnbridge").option("url", url).option("topic", topic).load()
    options = {"kafka.bootstrap.servers": kafka.bootstrap(url), "kafka.isolation.level": "read_committed"}
    plain = session.read.format("kafka").options(**options).option("subscribe", topic).load()
    return {name: reading(frame, count) for name, frame in (("ours", ours), ("source", plain))}


def spark_read(settings: Settings, broker: str) -> None:
    """Measure our reader beside Spark's own Kafka source, here with `isolation.level=read_committed`."""
    with kafka.broker(settings) as url, spark() as session:
        for size, wanted in ROWS.items():
            count = 10_000 if settings.quick else wanted
            topic = kafka.new_topic(url, 2)
            exactly_once(rows(session, size, count), url)(topic)
            found = alternate(settings, contenders(session, url, topic, count))
            report = Report(settings, f"Spark: reading {count:,} rows of {size} B from Kafka, two partitions")
            report.ratio("ours / Spark's source", found["ours"], found["source"], at_least(1.0))
            report.each(found, "a row")


# --- recovery --------------------------------------------------------------------------------------------------------

KILLED = 20  # drivers
PARTITIONS = 4
PARTITION_ROWS = 10_000


def decide(url: str, topic: str, query: str) -> None:
    """Write and commit a batch as a driver and its tasks do, without Spark itself; killed at the first commit."""
    options = SinkOptions.parse({"url": url, "topic": topic})
    unit = BatchId(query, options.sink, 0, str(uuid.uuid4()))
    batch = pa.RecordBatch.from_pydict({"value": [b"x" * 100] * PARTITION_ROWS})
    columns = Columns(frozenset({"value"}), topic)
    written = [write_partition(unit, options, columns, [batch], n, f"task {n}") for n in range(PARTITIONS)]
    _driver.commit(options, written)


def take(consumer: Consumer, count: int) -> None:
    while count:
        count -= len(consumer.poll(10_000, timeout=1))


def recovered(url: str, topic: str, consumer: Consumer) -> float:
    """Run the command for a killed driver's query; return the seconds from its start until all rows were read."""
    query = str(uuid.uuid4())
    with Child(decide, url, topic, query, kill="resolve/before/1") as driver:
        driver.stopped()
    command = [str(Path(sys.executable).with_name("txnbridge")), "spark", "recover", "--url", url, "--query", query]
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    take(consumer, PARTITIONS * PARTITION_ROWS)
    return time.perf_counter() - begin


def spark_recover(settings: Settings, broker: str) -> None:
    """Measure `txnbridge spark recover` for a driver that was killed between its decision and first commit."""
    with kafka.broker(settings) as url, connect(url) as bridge:
        topic = kafka.new_topic(url, 2)
        with bridge.consumer(topic) as consumer:
            found = [recovered(url, topic, consumer) for _ in range(1 if settings.quick else KILLED)]
        of = f"of {PARTITIONS * PARTITION_ROWS:,} rows"
        report = Report(settings, f"Spark: {len(found)} drivers killed behind their decision {of}")
        report.figure("from `spark recover` until all is read", estimate(found), "s", at_most(2))
