"""Reads a partition's committed messages between two positions in a task, as Arrow batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark_txnbridge._kept_bridges import ClientPool
from pyspark_txnbridge._read.offset_ranges import RECREATED, OffsetRange, connect, in_json, is_recreated, report_loss
from pyspark_txnbridge._read.source_options import SourceOptions
from pyspark_txnbridge._worker_gc import begin_call
from txnbridge import InvalidState, MessageColumns, NotSupported, Position, PositionLost
from txnbridge.spi import Deadline

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("txnbridge.spark")

# The most rows of one Arrow batch: Spark's own default.
_MAX_ROWS = 10_000
# After this time without a message the broker is asked whether any are left: the last entry before the end may be a
# control marker. An available message arrives sooner.
_POLL_SECONDS = 0.02
# The most milliseconds that Spark's timestamps, which are microseconds, can hold.
_MOST_MILLISECONDS = ((1 << 63) - 1) // 1000


def read_range(options: SourceOptions, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
    """Yield a range's rows in order. Raise `PositionLost` for missing rows, unless failOnDataLoss is off."""
    begin_call()
    topics = options.topics or (wanted.topic,)  # with subscribePattern each topic has a connection
    key = options, topics
    for is_new in (False, True):
        with _feeds.held(key, lambda: TopicFeed(options, topics)) as feed:  # closed also if Spark stops reading early
            if is_new or feed.has(wanted):
                yield from feed.read(wanted)
                return
        _feeds.drop(key)  # the topic has more partitions now, or was recreated


class TopicFeed:
    """A process's connection to a query's topics; all partitions are paused except the one that is being read."""

    def __init__(self, options: SourceOptions, topics: Sequence[str]) -> None:
        self._options = options
        self._bridge = connect(options)
        try:
            self._topic_ids = self._bridge.admin.topic_ids(topics)
            # The consumer starts at the end, so that it fetches nothing before a task names a position.
            self._consumer = self._bridge.consumer(topics, start="latest")
            self._consumer.pause()
        except BaseException:
            self._bridge.close()
            raise

    def has(self, wanted: OffsetRange) -> bool:
        """Return whether this connection reads a range's partition.

        Return False also if the topic was deleted and created again after the range was planned.
        """
        is_assigned = (wanted.topic, wanted.partition) in self._consumer.assignment
        return is_assigned and not is_recreated(wanted.topic_id, self._topic_ids.get(wanted.topic))

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the range's rows in order. Raise `PositionLost` for missing rows, unless failOnDataLoss is off."""
        if not is_recreated(wanted.topic_id, self._topic_ids.get(wanted.topic)):
            yield from self._read_all(wanted)
        # The id is read after the rows: if it is unchanged, all rows came from the topic that was planned.
        now = self._bridge.admin.topic_ids(wanted.topic)
        if is_recreated(wanted.topic_id, now.get(wanted.topic)):
            report_loss((wanted.topic, wanted.partition), wanted.start, RECREATED, self._options)

    def _read_all(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        at = wanted.start
        while at < wanted.end:
            try:
                for rows in self._read(wanted, at):
                    at = self._position(wanted)
                    yield rows
                return
            except PositionLost as error:
                first, _ = self._bounds(wanted)
                if first <= at:
                    raise
                report_loss((wanted.topic, wanted.partition), at, str(error), self._options)
                at = first

    def _read(self, wanted: OffsetRange, start: Position) -> Iterator[pa.RecordBatch]:
        consumer, partition = self._consumer, (wanted.topic, wanted.partition)
        consumer.seek({partition: start})
        consumer.resume([partition])
        patience = Deadline(self._options.timeout)
        while self._position(wanted) < wanted.end:
            found = consumer.poll_columns(_MAX_ROWS, _POLL_SECONDS)
            if found:
                patience = Deadline(self._options.timeout)
            elif not consumer.lag()[partition]:
                if (end := self._bounds(wanted)[1]) < wanted.end:
                    report_loss(partition, end, "it ends there now: its last messages are lost", self._options)
                break  # only control markers are left up to the end
            else:
                patience.check(f"reading {wanted.topic}[{wanted.partition}] up to {in_json(wanted.end)}")
            if others := {(each.topic, each.partition) for each in found} - {partition}:
                consumer.pause(sorted(others))  # partitions that were added to the topics meanwhile
            rows = [each.before(wanted.end) for each in found if (each.topic, each.partition) == partition]
            if any(map(len, rows)):
                yield to_arrow(rows, self._options.headers, self._options.timestamps)
        consumer.pause([partition])

    def _bounds(self, wanted: OffsetRange) -> tuple[Position, Position]:
        return self._bridge.admin.bounds(wanted.topic)[wanted.topic, wanted.partition]

    def _position(self, wanted: OffsetRange) -> Position:
        at = self._consumer.positions().get((wanted.topic, wanted.partition))
        if at is None or at < wanted.start:
            raise InvalidState(f"{wanted.topic}[{wanted.partition}] was lost while it was read; was its topic deleted?")
        return at

    def close(self) -> None:
        self._bridge.close()


_feeds: ClientPool[TopicFeed] = ClientPool()


def columns(position: Position, headers: bool) -> str:
    """Return the columns of a query's rows as a schema for Spark: those of Spark's Kafka source.

    If `position`, one of the broker's, has several numbers, the column position replaces the column offset. The column
    timestampType is always null: txnbridge does not say whether the broker or the sender set a timestamp.
    """
    where = "offset bigint" if len(position) == 1 else "position array<bigint>"
    names = f"key binary, value binary, topic string, partition int, {where}, timestamp timestamp, timestampType int"
    return f"{names}, headers array<struct<key:string,value:binary>>" if headers else names


def to_arrow(found: Sequence[MessageColumns], headers: bool, timestamps: str = "error") -> pa.RecordBatch:
    """Return messages, at least one, as one Arrow batch of rows. `timestamps` is the source's option of this name."""
    import pyarrow as pa

    batches = [_to_arrow(each, headers, timestamps) for each in found]
    (rows,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return rows


def _to_arrow(found: MessageColumns, headers: bool, timestamps: str) -> pa.RecordBatch:
    import pyarrow as pa

    count = len(found)
    if len(found.numbers) == 1:
        name, where = "offset", pa.array(found.numbers[0], pa.int64())
    else:
        positions = list(zip(*found.numbers, strict=True))
        name, where = "position", pa.array(positions, pa.list_(pa.field("element", pa.int64())))
    fields = {
        "key": pa.array(found.keys, pa.binary()),
        "value": pa.array(found.values, pa.binary()),
        "topic": pa.repeat(pa.scalar(found.topic, pa.string()), count),
        "partition": pa.repeat(pa.scalar(found.partition, pa.int32()), count),
        name: where,
        "timestamp": _times(found, timestamps),
        "timestampType": pa.nulls(count, pa.int32()),
    }
    if headers:
        pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
        fields["headers"] = pa.array(
            [[{"key": key, "value": value} for key, value in pairs] if pairs else None for pairs in found.headers],
            pa.list_(pa.field("element", pair)),
        )
    return pa.RecordBatch.from_pydict(fields)


def _times(found: MessageColumns, timestamps: str) -> pa.Array:
    """Return the messages' times in microseconds. Times that are too large for Spark are treated as `timestamps` says.

    With "error" raise `NotSupported`. Any producer may set any time, and a time in nanoseconds is a usual mistake.
    """
    import pyarrow as pa

    kind = pa.timestamp("us", "UTC")
    try:
        return pa.array(found.timestamps, pa.timestamp("ms", "UTC")).cast(kind)
    except pa.ArrowInvalid:
        times = [max(-_MOST_MILLISECONDS, min(time, _MOST_MILLISECONDS)) for time in found.timestamps]
    pairs = list(zip(found.timestamps, times, strict=True))
    if timestamps == "error":
        first = next(index for index, (time, held) in enumerate(pairs) if time != held)
        position = tuple(numbers[first] for numbers in found.numbers)
        raise NotSupported(
            f"the message of {found.topic}[{found.partition}] at {in_json(position)} has the time"
            f" {found.timestamps[first]} (milliseconds since 1970), which Spark's timestamps cannot hold. With the"
            " option timestamps=null its time is null, with timestamps=clip the nearest one that they hold"
        )
    kept = [held * 1000 if timestamps == "clip" or time == held else None for time, held in pairs]
    return pa.array(kept, kind)
