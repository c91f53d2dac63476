"""The duration of `txnbridge spark recover` for a driver that was killed between its decision and first commit."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from pathlib import Path

import pyarrow as pa
from pyspark_txnbridge._write import driver as _driver
from pyspark_txnbridge._write.batch_identity import BatchId
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.sink_options import SinkOptions
from pyspark_txnbridge._write.task import write_partition

from benchmarks._harness import Report, Settings, at_most, estimate
from benchmarks._kafka import broker as kafka
from benchmarks._kafka import new_topic
from txnbridge import Consumer, connect
from txnbridge.testing import Child

KILLED = 20  # drivers
PARTITIONS = 4
ROWS = 10_000  # in each partition


def decide(url: str, topic: str, query: str) -> None:
    """Write and commit a batch as a driver and its tasks do, without Spark itself; killed at the first commit."""
    options = SinkOptions.parse({"url": url, "topic": topic})
    unit = BatchId(query, options.sink, 0, str(uuid.uuid4()))
    batch = pa.RecordBatch.from_pydict({"value": [b"x" * 100] * ROWS})
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
    take(consumer, PARTITIONS * ROWS)
    return time.perf_counter() - begin


def measure(settings: Settings, broker: str) -> None:
    with kafka(settings) as url, connect(url) as bridge:
        topic = new_topic(url, 2)
        with bridge.consumer(topic) as consumer:
            found = [recovered(url, topic, consumer) for _ in range(1 if settings.quick else KILLED)]
        report = Report(
            settings, f"Spark: {len(found)} drivers killed behind their decision of {PARTITIONS * ROWS:,} rows"
        )
        report.figure("from `spark recover` until all is read", estimate(found), "s", at_most(2))
