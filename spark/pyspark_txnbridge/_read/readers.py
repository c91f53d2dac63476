"""`StreamReader` and `BatchReader`: read committed messages through the interfaces that Spark calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from pyspark_txnbridge._read import offset_ranges
from pyspark_txnbridge._read.offset_ranges import Bounds, Offsets
from pyspark_txnbridge._read.source_options import BEGIN, EARLIEST, LATEST, SourceOptions
from txnbridge import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa


class _RangeReader:
    _options: SourceOptions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task as Arrow batches."""
        from pyspark_txnbridge._read.fetch import read_range

        # If there is nothing to read, Spark makes one task without a range.
        return iter(()) if partition.value is None else read_range(self._options, partition.value)

    def _tasks(self, ranges: Sequence[offset_ranges.OffsetRange]) -> list[InputPartition]:
        return [InputPartition(each) for each in offset_ranges.divide(ranges, self._options)]


class StreamReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query. Only Spark's checkpoint stores the stream's position."""

    def __init__(self, options: SourceOptions) -> None:
        if options.ending != LATEST:
            raise InvalidOption("endingOffsets is for batches: a stream has no end")
        self._options = options
        self._last: Offsets | None = None  # with availableNow: the ends when the query was started
        self._seen: Offsets | None = None
        self._initial: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's names, here and below)
        topic_ids, bounds = offset_ranges.topic_bounds(self._options)
        self._initial = offset_ranges.to_json(offset_ranges.resolve_start(self._options, LATEST, bounds), topic_ids)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, bounds = offset_ranges.topic_bounds(self._options)
        self._last = {partition: end for partition, (_, end) in bounds.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        topic_ids, bounds = offset_ranges.topic_bounds(self._options)
        self._seen = {partition: end for partition, (_, end) in bounds.items()}
        before = offset_ranges.topic_ids_of(start)
        position = offset_ranges.without_recreated(offset_ranges.from_json(start), before, topic_ids, self._options)
        kept = dict(before.items() & topic_ids.items())
        end = offset_ranges.next_offsets(position, self._up_to_last(bounds, position), self._options, kept)
        if isinstance(limit, ReadMaxRows):
            end = offset_ranges.limit_offsets(position, end, bounds, limit.max_rows)
        planned = offset_ranges.to_json(end, topic_ids)
        if planned == {topic: {key: at for key, at in each.items() if key != BEGIN} for topic, each in start.items()}:
            return start
        if start == self._initial:
            # Spark stores no initial offset, but asks for it again to read the first batch, and to repeat it.
            return {topic: {**each, BEGIN: start.get(topic, {})} for topic, each in planned.items()}
        return planned

    def _up_to_last(self, bounds: Bounds, position: Offsets) -> Bounds:
        if (last := self._last) is None:
            return bounds
        # A new query that begins at the end got its position after `last`; the topic may have grown between them.
        return {
            each: (first, max(first, last.get(each, first), min(end, position.get(each, first))))
            for each, (first, end) in bounds.items()
            if each in last or each in position
        }

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._seen is None else offset_ranges.to_json(self._seen)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        topic_ids, bounds = offset_ranges.topic_bounds(self._options)
        start = {topic: each[BEGIN] for topic, each in end.items() if BEGIN in each} or start
        planned, before = offset_ranges.topic_ids_of(end), offset_ranges.topic_ids_of(start)
        # Partitions of a topic that was recreated before this batch have no rows in it; latestOffset reported the loss.
        begin = {
            partition: at
            for partition, at in offset_ranges.from_json(start).items()
            if not offset_ranges.is_recreated(before.get(partition[0]), planned.get(partition[0]))
        }
        until = offset_ranges.without_recreated(offset_ranges.from_json(end), planned, topic_ids, self._options)
        return self._tasks(offset_ranges.ranges(begin, until, bounds, self._options, planned))

    def stop(self) -> None:
        offset_ranges.planners.drop(self._options)


class BatchReader(_RangeReader, DataSourceReader):
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
        return self._tasks(offset_ranges.ranges(start, end, bounds, self._options, topic_ids))
