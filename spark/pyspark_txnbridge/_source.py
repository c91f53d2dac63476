"""The data source's classes that Spark calls. They pass the work to the other modules."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from pyspark_txnbridge._read.source_options import SourceOptions
from pyspark_txnbridge._write.batch_identity import BatchId, Written
from pyspark_txnbridge._write.rows import Columns
from pyspark_txnbridge._write.sink_options import NAMELESS, SinkOptions
from txnbridge import InvalidOption, InvalidState, NotSupported

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class TaskMessage(WriterCommitMessage):
    """A task's report, as Spark passes it to the driver."""

    written: Written


class DefaultSource(DataSource):
    """`format("txnbridge")`: reads committed messages and writes exactly once, in batches and in streams."""

    @classmethod
    def name(cls) -> str:
        return "txnbridge"

    def schema(self) -> str:
        from pyspark_txnbridge._read.fetch import columns
        from pyspark_txnbridge._read.offset_ranges import topic_bounds

        options = SourceOptions.parse(self.options)
        _, bounds = topic_bounds(options)
        first, _ = next(iter(bounds.values()))
        return columns(first, options.headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_txnbridge._read.readers import BatchReader

        return BatchReader(SourceOptions.parse(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        try:
            from pyspark_txnbridge._read.readers import StreamReader
        except ImportError as error:
            raise NotSupported("streams are read with PySpark 4.2 and newer; batches with 4.1, too") from error
        return StreamReader(SourceOptions.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        options = SinkOptions.parse(self.options)
        options.check_job()
        return BatchWriter(options, _prepare(options, schema, overwrite, options.app_id or NAMELESS))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 (Spark's name)
        options = SinkOptions.parse(self.options)
        return StreamWriter(options, _prepare(options, schema, overwrite))


def _prepare(options: SinkOptions, schema: StructType, overwrite: bool, query: str | None = None) -> Columns:
    """Check a job's or stream's options and broker before the first row is written; return the columns to send."""
    from pyspark_txnbridge._worker_gc import begin_call
    from pyspark_txnbridge._write.driver import check_broker

    begin_call()
    if overwrite:
        raise InvalidOption(
            'what is published stays published, so nothing can be overwritten: use mode("append"), or for a stream'
            ' outputMode("append")'
        )
    columns = Columns.of(schema, options.topic, options.timestamps)
    check_broker(options, query)
    return columns


class BatchWriter(DataSourceArrowWriter):
    """Writes one batch job. Spark makes one writer for a job, and copies of it reach every task and the commit."""

    def __init__(self, options: SinkOptions, columns: Columns) -> None:
        self._options = options
        self._columns = columns
        job = str(uuid.uuid4())
        self._identity = BatchId(
            options.app_id or f"{NAMELESS}{job}", options.sink, options.version or 0, job, job=True
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        self._check_not_in_a_stream()
        return TaskMessage(write_in_task(self._identity, self._options, self._columns, iterator))

    def _check_not_in_a_stream(self) -> None:
        """Raise `InvalidOption` for a nameless job in a streaming query.

        Call this in a task: only tasks can see that a streaming query runs them.
        """
        # Spark repeats batches, and a nameless job gets another name each time: the batch would be published again.
        if self._options.app_id is None and _context().getLocalProperty("sql.streaming.queryId"):
            raise InvalidOption(
                'format("txnbridge") in foreachBatch would publish a batch again whenever Spark repeats it: write it'
                " by pyspark_txnbridge.write_exactly_once(df, batch_id=..., sink=...), or give txnAppId and txnVersion"
            )

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        from pyspark_txnbridge._write import driver

        driver.commit(self._options, _written(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        from pyspark_txnbridge._write import driver

        driver.abort(self._options, _written(messages), self._identity)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes one micro-batch of a streaming query.

    Spark calls `commit` on another copy of the writer, so the tasks' reports hold all the data that `commit` needs.
    """

    def __init__(self, options: SinkOptions, columns: Columns) -> None:
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        return TaskMessage(write_in_task(_micro_batch(self._options), self._options, self._columns, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from pyspark_txnbridge._write import driver

        driver.commit(self._options, _of_batch(batchId, messages, self._options))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from pyspark_txnbridge._write import driver

        driver.abort(self._options, _of_batch(batchId, messages, self._options))


def write_in_task(identity: BatchId, options: SinkOptions, columns: Columns, rows: Iterable[pa.RecordBatch]) -> Written:
    from pyspark_txnbridge._write.task import write_partition

    context = _context()
    holder = f"task {context.taskAttemptId()} of stage {context.stageId()}"
    return write_partition(identity, options, columns, rows, context.partitionId(), holder)


def _micro_batch(options: SinkOptions) -> BatchId:
    """Return the micro-batch of this task, read from internal properties of Spark that no documentation names."""
    context = _context()
    names = ("sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id")
    query, batch, run = (context.getLocalProperty(name) for name in names)
    if not (query and batch and run):
        raise NotSupported("this Spark does not tell a task which micro-batch it belongs to; PySpark 4.1 and 4.3 do")
    number = (options.version or 0) + int(batch)
    return BatchId(options.app_id or query, options.sink, number, run, checkpoint=query)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "Spark calls write() in a task"
    return context


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written | None]:
    return [message.written if isinstance(message, TaskMessage) else None for message in messages]


def _of_batch(batch: int, messages: Sequence[WriterCommitMessage | None], options: SinkOptions) -> list[Written | None]:
    written = _written(messages)
    expected = (options.version or 0) + batch
    if any(message is not None and message.identity.batch != expected for message in written):
        raise InvalidState(f"Spark asks about batch {batch}, and tasks report another one")
    return written
