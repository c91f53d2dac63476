"""What runs in a task that reads: the committed messages of one partition between two positions, as Arrow batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from pyspark_txnbridge._offset_ranges import MADE_ANEW, Range, connect, is_another, report_loss, show
from pyspark_txnbridge._session import Keeper
from pyspark_txnbridge._source_options import SourceOptions
from txnbridge import InvalidState, Message, Position, PositionLost
from txnbridge.spi import Deadline

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("txnbridge.spark")

# Of one Arrow batch: what Spark itself puts into one by default.
_ROWS = 10_000
# The last entry before the end may be no message but the mark that a transaction has ended: after so long without a
# message the broker is asked whether any is left. A message that is there takes less.
_WAIT_SECONDS = 0.02


def read_range(options: SourceOptions, wanted: Range) -> Iterator[pa.RecordBatch]:
    """The rows of a range, in order. Raises `PositionLost` if some of them are gone, unless the query goes on then."""
    with _feeds.held(options, lambda: Feed(options)) as feed:  # closed also when nobody takes the rest
        if feed.has(wanted):
            yield from feed.read(wanted)
            return
    _feeds.drop(options)  # the topic has more partitions now, or was made anew
    with _feeds.held(options, lambda: Feed(options)) as feed:
        yield from feed.read(wanted)


class Feed:
    """One process's connection to a query's topics: all partitions rest but the one that is being read."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._bridge = connect(options)
        try:
            self._topic_ids = self._bridge.admin.topic_ids(options.topics)
            # From the end, so that nothing is fetched before a task says from where.
            self._consumer = self._bridge.consumer(options.topics, start="latest")
            self._consumer.pause()
        except BaseException:
            self._bridge.close()
            raise

    def has(self, wanted: Range) -> bool:
        """Return whether this feed can read a range: it has the partition, and began in the same topic."""
        known = self._topic_ids.get(wanted.topic)
        return (wanted.topic, wanted.partition) in self._consumer.assignment and not is_another(wanted.topic_id, known)

    def read(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """As `read_range`."""
        yield from self._read_all(wanted)
        # Read behind the rows: all of them came out of the topic that they were planned in.
        now = self._bridge.admin.topic_ids(wanted.topic)
        if is_another(wanted.topic_id, now.get(wanted.topic)):
            report_loss((wanted.topic, wanted.partition), wanted.start, MADE_ANEW, self._options)

    def _read_all(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        at = wanted.start
        while at < wanted.end:
            try:
                for rows in self._read(wanted, at):
                    at = self._position(wanted)
                    yield rows
                return
            except PositionLost as error:
                first, _ = self._bridge.admin.bounds(wanted.topic)[wanted.topic, wanted.partition]
                if first <= at:
                    raise
                report_loss((wanted.topic, wanted.partition), at, str(error), self._options)
                at = first

    def _read(self, wanted: Range, start: Position) -> Iterator[pa.RecordBatch]:
        consumer, partition = self._consumer, (wanted.topic, wanted.partition)
        consumer.seek({partition: start})
        consumer.resume([partition])
        patience = Deadline(self._options.timeout)
        while self._position(wanted) < wanted.end:
            found = consumer.poll(_ROWS, _WAIT_SECONDS)
            if found:
                patience = Deadline(self._options.timeout)
            elif not consumer.lag()[partition]:
                break  # what is left up to the end are no messages
            else:
                patience.check(f"reading {wanted.topic}[{wanted.partition}] up to {show(wanted.end)}")
            if others := {(m.topic, m.partition) for m in found} - {partition}:
                consumer.pause(sorted(others))  # partitions that topics have got meanwhile
            rows = [m for m in found if m.position < wanted.end and (m.topic, m.partition) == partition]
            if rows:
                yield to_arrow(rows, self._options.headers)
        consumer.pause([partition])

    def _position(self, wanted: Range) -> Position:
        at = self._consumer.positions().get((wanted.topic, wanted.partition))
        if at is None or at < wanted.start:
            raise InvalidState(f"{wanted.topic}[{wanted.partition}] left while it was read; was its topic deleted?")
        return at

    def close(self) -> None:
        self._bridge.close()


_feeds: Keeper[Feed] = Keeper()


# --- rows ------------------------------------------------------------------------------------------------------------


def columns(position: Position, headers: bool) -> str:
    """The columns of Spark's Kafka source, for a broker whose positions are like this one.

    Its column timestampType is there, and null: nobody here tells who has set a timestamp.
    """
    where = "offset bigint" if len(position) == 1 else "position array<bigint>"
    found = f"key binary, value binary, topic string, partition int, {where}, timestamp timestamp, timestampType int"
    return f"{found}, headers array<struct<key:string,value:binary>>" if headers else found


def to_arrow(messages: Sequence[Message], headers: bool) -> pa.RecordBatch:
    """Messages of one partition as rows."""
    import pyarrow as pa

    count, first = len(messages), messages[0]
    positions = list(map(itemgetter(2), messages))
    if len(first.position) == 1:
        name, where = "offset", pa.array([position[0] for position in positions], pa.int64())
    else:
        name, where = "position", pa.array(positions, pa.list_(pa.field("element", pa.int64())))
    times = pa.array([message.timestamp for message in messages], pa.timestamp("ms", "UTC"))
    found = {
        "key": pa.array([message.key for message in messages], pa.binary()),
        "value": pa.array([message.value for message in messages], pa.binary()),
        "topic": pa.repeat(pa.scalar(first.topic, pa.string()), count),
        "partition": pa.repeat(pa.scalar(first.partition, pa.int32()), count),
        name: where,
        "timestamp": times.cast(pa.timestamp("us", "UTC")),
        "timestampType": pa.nulls(count, pa.int32()),
    }
    if headers:
        pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
        found["headers"] = pa.array(
            [[{"key": key, "value": value} for key, value in message.headers.raw] or None for message in messages],
            pa.list_(pa.field("element", pair)),
        )
    return pa.RecordBatch.from_pydict(found)
