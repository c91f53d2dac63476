"""Run a job from broker to broker, exactly once from end to end: read committed messages, change and write them.

    from pyspark_txnbridge import pipeline

    pipeline.run(
        "kafka://broker:9092", ["orders"], "kafka://other:9092", "totals",
        checkpoint="/data/checkpoints/totals", sql="select key, upper(string(value)) as value from input",
    )

The checkpoint and the decision log hold the job's progress. Whichever process dies, the same call continues the job,
and no message is published twice or left out. `txnbridge pipeline run` does the same on the command line, and
`spark-submit …/pyspark_txnbridge/pipeline.py` on a cluster.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark_txnbridge._read.offset_lag import lags
from txnbridge import BackendMissing, InvalidOption, TxnBridgeError, errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Progress", "run"]

_READS_ITS_OUTPUT = "the pipeline would read what it writes"
_TOPIC_IS_READ = (
    f"{_READS_ITS_OUTPUT}: a row's column topic names a topic that is read; change the column, or give --to-topic"
)
# The columns that are copied to a message; the other columns say where the message was read.
_MESSAGE_COLUMNS = ("key", "value", "headers")
# The pause between batches. Without it Spark would ask the broker for new messages all the time.
_TRIGGER_SECONDS = 0.5
_PROGRESS_SECONDS = 1  # between two checks for new batches
# The last line of a traceback of Spark's Python workers: an error's class and text.
_ERROR_LINE = re.compile(r"^(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """The numbers of batches and rows that a pipeline has published since it was started.

    `behind` is the number of positions that the last batch, when it was planned, left unread in the source. It is None
    if the broker's positions are not single numbers.
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
    """Run until stopped; with `available_now`, until every message that exists at the start is published.

    Rows are those of `format("txnbridge")` with headers. `sql` finds the rows as the table `input`, and `transform`
    gets them as a frame; without either, messages pass unchanged. `start` is where a new checkpoint begins
    (startingOffsets). Further options of source and sink go into `from_options` and `to_options`.

    Raise the errors of `txnbridge`: `UsageError` for a wrong call, `PositionLost` if rows to be read were removed,
    `BrokerUnavailable`. After any error except `UsageError` the same call continues the job.
    """
    given = [from_topics] if isinstance(from_topics, str) else from_topics
    topics = [topic.strip() for each in given for topic in each.split(",")]
    if sql is not None and transform is not None:
        raise InvalidOption("a pipeline changes rows by SQL or by a function, not by both")
    source = {"url": from_url, "subscribe": ",".join(topics), "startingOffsets": start, "includeHeaders": "true"}
    if max_rows_per_batch is not None:
        source["maxOffsetsPerTrigger"] = str(max_rows_per_batch)
    sink = {"url": to_url, "checkpointLocation": checkpoint} | ({} if to_topic is None else {"topic": to_topic})
    sink |= {name.lower(): value for name, value in (to_options or {}).items()}
    on_one_broker = len({url.partition("?")[0].rstrip("/") for url in (from_url, to_url)}) == 1
    if on_one_broker and (topic := sink.get("topic", "").strip() or None) in topics:
        raise InvalidOption(f"{_READS_ITS_OUTPUT}: {topic!r} is read and written")
    with _session(spark) as session, _unwrapping_errors():
        rows = session.readStream.format("txnbridge").options(**source | dict(from_options or {})).load()
        changed = _change(session, rows, sql, transform)
        if on_one_broker and "topic" not in sink:
            changed = _refusing_read_topics(topics, changed)
        writer = changed.writeStream.format("txnbridge").options(**sink)
        pause = {"availableNow": True} if available_now else {"processingTime": f"{_TRIGGER_SECONDS} seconds"}
        return _follow(writer.trigger(**pause).start(), report or (lambda progress: None))


def _change(
    spark: SparkSession, rows: DataFrame, sql: str | None, transform: Callable[[DataFrame], DataFrame] | None
) -> DataFrame:
    if transform is not None:
        return transform(rows)
    if sql is None:
        return rows.select(*_MESSAGE_COLUMNS)
    rows.createOrReplaceTempView("input")
    return spark.sql(sql)


def _refusing_read_topics(topics: Sequence[str], rows: DataFrame) -> DataFrame:
    """Return the rows, changed so that a row for a topic that the pipeline reads ends the pipeline with an error."""
    from pyspark.sql import functions as F  # noqa: N812 (the usual name)

    if "topic" not in rows.columns:
        return rows  # the sink raises an error that names the missing column
    comes_back = F.col("topic").isin(*topics)
    return rows.withColumn("topic", F.when(comes_back, F.raise_error(F.lit(_TOPIC_IS_READ))).otherwise(F.col("topic")))


def _follow(query: StreamingQuery, report: Callable[[Progress], object]) -> Progress:
    """Wait for the end of a query, and call `report` after each of its batches; return the last progress."""
    progress, last = Progress(), -1
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(_PROGRESS_SECONDS))
            for each in query.recentProgress:
                if each.batchId > last and each.numInputRows:
                    last = each.batchId
                    rows = progress.rows + each.numInputRows
                    behind = lags(each.sources[0])
                    progress = Progress(progress.batches + 1, rows, sum(behind) if behind else None)
                    report(progress)
    finally:
        query.stop()
    return progress


@contextmanager
def _session(given: SparkSession | None) -> Iterator[SparkSession]:
    """Yield the given or active session, or create one, local unless spark-submit names a cluster."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        text = "a pipeline runs on PySpark: in a clone of txnbridge, pip install -e '.[spark]'"
        raise BackendMissing(text) from error
    session = given or SparkSession.getActiveSession()
    if session is not None:
        yield session
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the interpreter in which txnbridge is installed
    session = SparkSession.builder.appName("txnbridge pipeline").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def _unwrapping_errors() -> Iterator[None]:
    """Raise errors of txnbridge in place of those of Spark that wrap them."""
    from pyspark.errors import AnalysisException, PySparkException

    from pyspark_txnbridge._write.batch_identity import BatchInDoubt

    known = vars(errors) | {BatchInDoubt.__name__: BatchInDoubt}
    try:
        yield
    except PySparkException as error:
        if f"[USER_RAISED_EXCEPTION] {_TOPIC_IS_READ}" in str(error):  # the text's plan lacks this prefix
            raise InvalidOption(_TOPIC_IS_READ) from error
        for name, text in reversed(_ERROR_LINE.findall(str(error))):
            kind = known.get(name)
            if isinstance(kind, type) and issubclass(kind, TxnBridgeError):
                raise kind(text) from error
        if isinstance(error, AnalysisException):
            raise InvalidOption(f"Spark refuses the pipeline: {str(error).splitlines()[0]}") from error
        raise


if __name__ == "__main__":
    from pyspark_txnbridge._commands import main

    main()
