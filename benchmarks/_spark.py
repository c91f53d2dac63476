"""Spark for the benchmarks, and their yardstick, Spark's own Kafka sink."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from txnbridge_conformance.brokers._jars import cache_folder

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
def spark(memory: str = "3g", with_sink: bool = True) -> Iterator[Any]:
    """Yield a Spark session on two cores; `with_sink` adds Spark's own Kafka sink."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", memory)
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


def exactly_once(frame: Any, url: str) -> Callable[[str], None]:
    """Return a function that writes these rows to a topic exactly once, with txnbridge."""
    writer = frame.write.format("txnbridge").option("url", url).mode("append")
    return lambda topic: writer.option("topic", topic).save()
