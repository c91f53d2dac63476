"""Writers as one would write them at first: with these the tests of faults must fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark_txnbridge._kept_bridges import connect
from pyspark_txnbridge._source import DefaultSource, StreamWriter, TaskMessage, _micro_batch, write_in_task


def given(writer: Any) -> tuple[Any, Any]:
    """Return the arguments with which a writer of ours was made."""
    return writer._options, writer._columns


class _InTasks(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        message = self.prepare(iterator)
        self._publish([message])
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass

    def prepare(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        # A stream's batch is refused if the log has no record of an earlier one, and a simpler writer records nothing.
        identity = replace(_micro_batch(self._options), job=True)
        return TaskMessage(write_in_task(identity, self._options, self._columns, iterator))

    def _publish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        with connect(self._options, "naive") as bridge:
            for message in messages:
                if isinstance(message, TaskMessage):
                    for part in message.written.parts:
                        bridge.commit(part.token)


class _WithoutALog(_InTasks):
    write = _InTasks.prepare

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._publish(messages)


class InTasks(DefaultSource):
    """Write with tasks that publish their own rows."""

    _kind: type[_InTasks] = _InTasks

    @classmethod
    def name(cls) -> str:
        return "in-tasks"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        return self._kind(*given(super().streamWriter(schema, overwrite)))


class WithoutALog(InTasks):
    """The driver publishes what the tasks prepared, and writes down nothing."""

    _kind = _WithoutALog

    @classmethod
    def name(cls) -> str:
        return "without-a-log"
