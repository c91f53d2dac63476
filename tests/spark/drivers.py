"""A driver program in a process of its own: python -m tests.spark.drivers '{"url": …}'

It reads a stream, the text files of a folder by default, one file a batch, writes each line as a row, and ends when
there are no more. Or it runs jobs of so many rows, of one task if nothing else is said.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark_txnbridge import write_exactly_once

from tests.spark import faults, measured, naive

# A JVM that lives for seconds is ready sooner with one compiler and one thread for its garbage.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


def main(given: dict[str, Any]) -> None:
    faults.this_is_the_driver()
    spark = _session(given)
    if given["jobs"]:
        spark.dataSource.register(measured.Measured)
        for count in given["jobs"]:
            frame = spark.range(0, count, 1, given["shuffled"] or 1).selectExpr("lpad(string(id), 100, '0') as value")
            frame.write.format(given["format"]).options(**given["options"]).mode("append").save()
    else:
        _run_stream(spark, given)
    spark.stop()


def _session(given: dict[str, Any]) -> SparkSession:
    found = SparkSession.builder
    found = found.remote(given["master"]) if given["connect"] else found.master(given["master"])
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": _JVM,
        "spark.executor.extraJavaOptions": _JVM,
        **given["settings"],
    }
    for name, value in settings.items():
        found = found.config(name, value)
    return found.getOrCreate()


def _run_stream(spark: SparkSession, given: dict[str, Any]) -> None:
    rows = spark.readStream.format(given["source"]).options(**given["source_options"]).load()
    if given["shuffled"]:
        rows = rows.repartition(given["shuffled"])
    for source in (naive.InTasks, naive.WithoutALog):
        spark.dataSource.register(source)

    def publish(frame: DataFrame, batch: int) -> None:
        write_exactly_once(frame, batch_id=batch, sink="sink", **given["options"])

    writer = rows.writeStream.options(**given["options"]).trigger(availableNow=True)
    writer = writer.foreachBatch(publish) if given["format"] == "foreachBatch" else writer.format(given["format"])
    writer.start().awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
