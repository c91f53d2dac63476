"""A job from broker to broker, exactly once from end to end: it reads what is committed, changes it, and writes it.

    from pyspark_txnbridge import pipeline

    pipeline.run(
        "kafka://broker:9092", ["orders"], "kafka://other:9092", "totals",
        checkpoint="/data/checkpoints/totals", sql="select key, upper(string(value)) as value from input",
    )

The checkpoint and the decision log say how far it has come. Whichever process dies, the same call goes on: no message
comes twice, and none is left out. `txnbridge pipeline run` is the same on the command line, and
`spark-submit …/pyspark_txnbridge/pipeline.py` on a cluster.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from txnbridge import BackendMissing, InvalidOption, TxnBridgeError, errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Progress", "run"]

_FEEDS_ITSELF = "the pipeline would read what it writes"
_COMES_BACK = (
    f"{_FEEDS_ITSELF}: a row's column topic names one that is read; name another one there, or give --to-topic"
)
# The parts of a message that arrive as they were; the other columns say where it was.
_MESSAGE = ("key", "value", "headers")
# Spark looks for something new without pause otherwise, and each look asks the broker.
_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 1
# As tracebacks of Spark's Python workers end: the class of an error, and what it says.
_OURS = re.compile(r"^(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """How far a pipeline has come: what it has published since it was started.

    `behind` is how many positions were left when the last batch began; None where they cannot be counted.
    """

    batches: int = 0
    rows: int = 0
    behind: int | None = None


def run(
    from_url: str,
    from_topics: str | Sequence[str],
    to_url: str,
    to_topic: str | None,
    *,
    checkpoint: str,
    sql: str | None = None,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    max_rows_per_batch: int | None = None,
    available_now: bool = False,
    start: str = "earliest",
    from_options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
    report: Callable[[Progress], object] | None = None,
) -> Progress:
    """Run until it is stopped, or with `available_now` until all that is there now is published.

    Rows are those of `format("txnbridge")` with headers. Without `sql`, which finds them as the table `input`, and
    `transform`, which is given them as a frame, messages pass as they are. `start` is where a new checkpoint begins
    (startingOffsets). Further options of source and sink go into `from_options` and `to_options`.

    Raises the errors of `txnbridge`: `UsageError` for what is wrong about the call, `PositionLost` if rows are gone
    that were to be read, `BrokerUnavailable`. After all but the first the same call goes on.
    """
    given = [from_topics] if isinstance(from_topics, str) else from_topics
    topics = [topic.strip() for each in given for topic in each.split(",")]
    if sql is not None and transform is not None:
        raise InvalidOption("a pipeline changes rows by SQL or by a function, not by both")
    source = {"url": from_url, "subscribe": ",".join(topics), "startingOffsets": start, "includeHeaders": "true"}
    if max_rows_per_batch is not None:
        source["maxOffsetsPerTrigger"] = str(max_rows_per_batch)
    sink = {"url": to_url, "checkpointLocation": checkpoint} | ({} if to_topic is None else {"topic": to_topic})
    sink |= dict(to_options or {})
    on_one_broker = _place(from_url) == _place(to_url)
    if on_one_broker and sink.get("topic") in topics:
        raise InvalidOption(f"{_FEEDS_ITSELF}: {sink['topic']!r} is where it comes from and goes to")
    with _session(spark) as session, _errors_of_ours():
        rows = session.readStream.format("txnbridge").options(**source | dict(from_options or {})).load()
        changed = _change(session, rows, sql, transform)
        if on_one_broker and "topic" not in sink:
            changed = _leaving(topics, changed)
        writer = changed.writeStream.format("txnbridge").options(**sink)
        pause = {"availableNow": True} if available_now else {"processingTime": f"{_PAUSE_SECONDS} seconds"}
        return _follow(writer.trigger(**pause).start(), report or (lambda progress: None))


def _change(
    spark: SparkSession, rows: DataFrame, sql: str | None, transform: Callable[[DataFrame], DataFrame] | None
) -> DataFrame:
    if transform is not None:
        return transform(rows)
    if sql is None:
        return rows.select(*_MESSAGE)
    rows.createOrReplaceTempView("input")
    return spark.sql(sql)


def _place(url: str) -> str:
    return url.partition("?")[0].rstrip("/")


def _leaving(topics: Sequence[str], rows: DataFrame) -> DataFrame:
    """The same rows; one that would go to where rows come from ends the pipeline instead."""
    from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

    if "topic" not in rows.columns:
        return rows  # the sink says what is missing
    comes_back = F.col("topic").isin(*topics)
    return rows.withColumn("topic", F.when(comes_back, F.raise_error(F.lit(_COMES_BACK))).otherwise(F.col("topic")))


def _follow(query: StreamingQuery, report: Callable[[Progress], object]) -> Progress:
    """Wait for the end of a query, and report each of its batches."""
    found, last = Progress(), -1
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(_LOOK_SECONDS))
            for each in query.recentProgress:
                if each.batchId > last and each.numInputRows:
                    last = each.batchId
                    found = Progress(found.batches + 1, found.rows + each.numInputRows, _behind(each.sources[0]))
                    report(found)
    finally:
        query.stop()
    return found


def _behind(source: Any) -> int | None:
    """How many positions lie between where a batch ends and where its source ended when it was planned."""
    try:
        ends, latest = json.loads(source.endOffset), json.loads(source.latestOffset)
        return sum(
            int(at - ends.get(topic, {}).get(number, at))
            for topic, partitions in latest.items()
            for number, at in partitions.items()
        )
    except (TypeError, ValueError, AttributeError):
        return None  # nothing is told, or positions are no numbers


@contextmanager
def _session(given: SparkSession | None) -> Iterator[SparkSession]:
    """The session that is given or active; else one of its own, on this machine unless spark-submit says where."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise BackendMissing(
            "a pipeline runs on PySpark: in a clone of txnbridge, pip install -e '.[spark]'"
        ) from error
    found = given or SparkSession.getActiveSession()
    if found is not None:
        yield found
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the interpreter that has txnbridge
    own = SparkSession.builder.appName("txnbridge pipeline").getOrCreate()
    own.sparkContext.setLogLevel("ERROR")
    try:
        yield own
    finally:
        own.stop()


@contextmanager
def _errors_of_ours() -> Iterator[None]:
    """Raise what our own code raised in Spark's processes as it was, not as Spark wraps it."""
    from pyspark.errors import AnalysisException, PySparkException

    from pyspark_txnbridge._batch_identity import BatchInDoubt

    known = vars(errors) | {BatchInDoubt.__name__: BatchInDoubt}
    try:
        yield
    except PySparkException as error:
        if f"[USER_RAISED_EXCEPTION] {_COMES_BACK}" in str(error):  # and not only in the plan, which is told as well
            raise InvalidOption(_COMES_BACK) from error
        for name, text in reversed(_OURS.findall(str(error))):
            kind = known.get(name)
            if isinstance(kind, type) and issubclass(kind, TxnBridgeError):
                raise kind(text) from error
        if isinstance(error, AnalysisException):
            raise InvalidOption(f"Spark refuses the pipeline: {str(error).splitlines()[0]}") from error
        raise


if __name__ == "__main__":
    from pyspark_txnbridge._pipeline_command import main

    main()
