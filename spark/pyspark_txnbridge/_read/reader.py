"""`BatchReader`, which reads committed messages in one batch through the interface that Spark calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_txnbridge._read import offset_ranges
from pyspark_txnbridge._read.source_options import EARLIEST, SourceOptions
from txnbridge import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa


class BatchReader(DataSourceReader):
    """The reader of a batch query: reads the options' topics once, from their starting to their ending positions."""

    def __init__(self, options: SourceOptions) -> None:
        if options.max_offsets is not None:
            raise InvalidOption("maxOffsetsPerTrigger is for streams; endingOffsets says where a batch ends")
        self._options = options

    def partitions(self) -> list[InputPartition]:
        topic_ids, bounds = offset_ranges.topic_bounds(self._options)
        start = offset_ranges.resolve_start(self._options, EARLIEST, bounds)
        end = offset_ranges.resolve_end(self._options, bounds)
        for (topic, number), at in start.items():
            readable = bounds[topic, number][1]
            if end[topic, number] < at <= readable:
                raise InvalidOption(
                    f"the end of {topic}[{number}], {offset_ranges.in_json(end[topic, number])}, lies before its"
                    f" start, {offset_ranges.in_json(at)}: endingOffsets is behind startingOffsets"
                )
        return tasks(offset_ranges.ranges(start, end, bounds, self._options, topic_ids), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, partition)


def tasks(ranges: Sequence[offset_ranges.OffsetRange], options: SourceOptions) -> list[InputPartition]:
    return [InputPartition(each) for each in offset_ranges.divide(ranges, options)]


def read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task as Arrow batches."""
    from pyspark_txnbridge._read.fetch import read_range

    # If there is nothing to read, Spark makes one task without a range.
    return iter(()) if partition.value is None else read_range(options, partition.value)
