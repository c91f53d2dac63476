"""Plans the positions that a batch covers, before its first row is read, so that a repetition reads the same rows."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import txnbridge
from pyspark_txnbridge._kept_bridges import ClientPool, connect_with_retry
from pyspark_txnbridge._read.source_options import (
    EARLIEST,
    LATEST,
    NO_PARTITIONS,
    TOPIC_ID,
    OffsetsOption,
    Since,
    SourceOptions,
    position_of,
)
from pyspark_txnbridge._write.sink_options import as_keywords
from txnbridge import Bridge, InvalidOption, NotFound, NotSupported, Position, PositionLost
from txnbridge.spi import Deadline, Partition

_log = logging.getLogger("txnbridge.spark")

# How many messages are read at a time to find the first one since a time, and for how long to wait for them.
_LOOKED_AT, _POLL_SECONDS = 100, 0.05

Offsets = dict[Partition, Position]
Bounds = Mapping[Partition, tuple[Position, Position]]
TopicIds = Mapping[str, str]


@dataclass(frozen=True)
class OffsetRange:
    """The committed messages of a partition from position `start` to before `end`."""

    topic: str
    partition: int
    start: Position
    end: Position
    topic_id: str | None = None  # the id of the topic that the positions belong to, if the broker has topic ids


def connect(options: SourceOptions) -> Bridge:
    # A reader creates no topics.
    url, timeout, settings = options.url, options.timeout, as_keywords(options.settings)
    return connect_with_retry(timeout, lambda: txnbridge.connect(url, timeout=timeout, create_topics=0, **settings))


def topic_bounds(options: SourceOptions) -> tuple[TopicIds, Bounds]:
    """Return the topics' ids, and each partition's readable bounds. Raise `NotFound` for a missing topic."""
    with planners.held(options, lambda: connect(options)) as bridge:
        while True:
            topics = _topics(bridge, options)
            # The ids are read first, so that those of a topic recreated meanwhile are not taken for the old one's.
            topic_ids = bridge.admin.topic_ids(topics)
            try:
                bounds = bridge.admin.bounds(topics)
                break
            except NotFound:
                if _topics(bridge, options) == topics:  # else one that the pattern has found was deleted meanwhile
                    raise
    if missing := sorted(set(options.partitions) - bounds.keys()):
        topic, number = missing[0]
        raise NotFound(f"option assign names {topic}[{number}], and the topic has no such partition")
    return topic_ids, {each: bounds[each] for each in options.partitions or bounds}


def _topics(bridge: Bridge, options: SourceOptions) -> Sequence[str]:
    if options.pattern is None:
        return options.topics
    fitting = [topic.name for topic in bridge.admin.topics() if re.fullmatch(options.pattern, topic.name)]
    for topic in (denied := bridge.admin.unreadable(fitting)):
        _warn_of_unreadable(topic)
    topics = [topic for topic in fitting if topic not in denied]
    if not topics:
        raise NotFound(f"no topic that may be read has a name that subscribePattern={options.pattern} matches")
    return topics


@cache
def _warn_of_unreadable(topic: str) -> None:
    _log.warning("topic %r fits subscribePattern, and is left out: this user may not read it", topic)


planners: ClientPool[Bridge] = ClientPool()  # the connections that this process keeps for planning batches


# --- where to begin and to end ---------------------------------------------------------------------------------------


def resolve_start(options: SourceOptions, default: str, bounds: Bounds) -> Offsets:
    """Return the positions at which a query begins, by the option startingOffsets, or else by `default`.

    Raise `InvalidOption` if the option names other partitions than those in `bounds`, or a time after a last message.
    """
    start = _resolve("startingOffsets", options.starting or default, bounds, options)
    for (topic, number), at in start.items():
        if isinstance(at, Since) and not options.latest_if_later:
            text = f"{topic}[{number}] has no message at or after {at.milliseconds} (milliseconds since 1970). With"
            raise InvalidOption(text + " startingOffsetsByTimestampStrategy=latest the query begins at its end")
    return _ends_for_times(start, bounds)


def resolve_end(options: SourceOptions, bounds: Bounds) -> Offsets:
    """Return the positions at which a batch ends. Raise `InvalidOption` if endingOffsets names other partitions."""
    return _ends_for_times(_resolve("endingOffsets", options.ending, bounds, options), bounds)


def _ends_for_times(positions: Mapping[Partition, Position | Since], bounds: Bounds) -> Offsets:
    return {each: bounds[each][1] if isinstance(at, Since) else at for each, at in positions.items()}


def _resolve(
    name: str, wanted: OffsetsOption, bounds: Bounds, options: SourceOptions
) -> dict[Partition, Position | Since]:
    """Return the positions that the option `name` means with the value `wanted`.

    A time stays a time if its partition has no message since then. Raise `InvalidOption` if the partitions that the
    value names are not exactly those that are read.
    """
    positions = dict.fromkeys(bounds, wanted) if isinstance(wanted, str | Since) else dict(wanted)
    if strange := sorted(positions.keys() ^ bounds.keys()):
        topic, number = strange[0]
        problem = "does not say anything about" if strange[0] in bounds else "names a partition that is not read:"
        raise InvalidOption(f"option {name} {problem} {topic}[{number}]")
    words = {EARLIEST: 0, LATEST: 1}
    found: dict[Partition, Position | Since] = {}
    for each, at in sorted(positions.items()):
        found[each] = bounds[each][words[at]] if isinstance(at, str) else at
    for since in {at for at in found.values() if isinstance(at, Since)}:
        found |= _first_since(since, [each for each, at in found.items() if at == since], bounds, options)
    return found


def _first_since(since: Since, partitions: Sequence[Partition], bounds: Bounds, options: SourceOptions) -> Offsets:
    """Return, for each partition that has a message since a time, the position of the first one."""
    missing, found, patience = set(partitions), Offsets(), Deadline(options.timeout)
    topics = sorted({topic for topic, _ in partitions})
    with (
        planners.held(options, lambda: connect(options)) as bridge,
        bridge.consumer(topics, start=since.milliseconds) as consumer,
    ):
        while missing:
            for columns in consumer.poll_columns(_LOOKED_AT, _POLL_SECONDS):
                patience = Deadline(options.timeout)
                each = columns.topic, columns.partition
                if each in missing:
                    found[each] = min(columns.position, bounds[each][1])
                consumer.pause([each])
            missing -= found.keys()
            if missing and patience.expired:
                patience.check(f"looking for messages since {since.milliseconds}")
            if missing:
                # A partition without lag has no message since that time.
                missing -= {each for each, left in consumer.lag().items() if not left}
    return found


def ranges(
    start: Offsets, end: Offsets, bounds: Bounds, options: SourceOptions, topic_ids: TopicIds | None = None
) -> list[OffsetRange]:
    """Return the ranges between two sets of positions.

    If the broker has removed messages of a range, raise `PositionLost`; with `failOnDataLoss=false` log it, and return
    the rest. A partition that only `end` names has no range: the next batch begins at its position in `end`.
    """
    planned = []
    for (topic, number), stop in end.items():
        at = start.get((topic, number), stop)
        if at != stop:
            _check_kept((topic, number), min(at, stop), max(at, stop), bounds, options)
        first, last = bounds.get((topic, number), (at, at))
        at, stop = max(at, first), min(stop, last)
        if at < stop:
            planned.append(OffsetRange(topic, number, at, stop, (topic_ids or {}).get(topic)))
    return planned


def divide(ranges: Sequence[OffsetRange], options: SourceOptions) -> list[OffsetRange]:
    """Return the ranges, divided as the options minPartitions and maxRecordsPerPartition say."""
    if not options.min_tasks and options.max_rows is None:
        return list(ranges)
    if any(len(each.end) != 1 for each in ranges):
        text = "minPartitions and maxRecordsPerPartition count positions, and this broker's are more than a number"
        raise NotSupported(text)
    total = sum(each.end[0] - each.start[0] for each in ranges)
    return [part for each in ranges for part in _parts(each, total, options)]


def _parts(whole: OffsetRange, total: int, options: SourceOptions) -> list[OffsetRange]:
    begin, size = whole.start[0], whole.end[0] - whole.start[0]
    count = max(_ceil(size * options.min_tasks, total), _ceil(size, options.max_rows or size))
    count = min(count, size)
    cuts = [begin + size * number // count for number in range(count + 1)]
    return [replace(whole, start=(at,), end=(end,)) for at, end in pairwise(cuts)]


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _check_kept(partition: Partition, at: Position, stop: Position, bounds: Bounds, options: SourceOptions) -> None:
    if partition not in bounds:
        report_loss(partition, at, "the partition no longer exists", options)
        return
    first, end = bounds[partition]
    if at < first:
        report_loss(partition, at, f"retention has removed everything before {in_json(first)}", options)
    if stop > end:
        report_loss(partition, stop, f"it can be read up to {in_json(end)} only. Was the topic recreated?", options)


def report_loss(partition: Partition, at: Position, why: str, options: SourceOptions) -> None:
    """Raise `PositionLost` for rows that cannot be read, or log them where failOnDataLoss is false."""
    topic, number = partition
    text = f"{topic}[{number}] cannot be read at {in_json(at)}: {why}"
    if options.fail_on_data_loss:
        raise PositionLost(f"{text}. Nothing was skipped; with failOnDataLoss=false the query skips the lost rows")
    _log.warning("%s. The query skips the lost rows (failOnDataLoss=false)", text)


def without_recreated(offsets: Offsets, before: TopicIds, now: TopicIds, options: SourceOptions) -> Offsets:
    """Return the positions except in topics whose ids `before` and `now` differ; their rows are reported as lost."""
    kept = {}
    for (topic, number), at in offsets.items():
        if is_recreated(before.get(topic), now.get(topic)):
            report_loss((topic, number), at, RECREATED, options)
        else:
            kept[topic, number] = at
    return kept


def is_recreated(before: str | None, now: str | None) -> bool:
    """Return whether both ids of a topic are known and differ."""
    return before is not None and now is not None and before != now


RECREATED = "the topic was deleted and recreated since"


# --- the next batch of a stream --------------------------------------------------------------------------------------


def next_offsets(start: Offsets, bounds: Bounds, options: SourceOptions, kept: Collection[str] = ()) -> Offsets:
    """Return the end of a stream's next batch that begins at `start`. The topics `kept` were certainly not recreated.

    Two kinds of partitions are not read in this batch: new ones, and those that cannot be read at the stream's
    position. The batch only records the first positions of these partitions. So the next batch begins there, however
    often this batch is repeated.
    """
    end_offsets: Offsets = {}
    for partition, (first, end) in sorted(bounds.items()):
        at = start.get(partition, first)
        _check_kept(partition, at, at, bounds, options)
        # A log that ends before the position was truncated, or belongs to a topic that was recreated.
        continues = partition in start and first <= at and (at <= end or partition[0] in kept)
        end_offsets[partition] = end if continues else first
    for partition in sorted(start.keys() - bounds.keys()):
        _check_kept(partition, start[partition], start[partition], bounds, options)
    return end_offsets


def limit_offsets(start: Offsets, end: Offsets, bounds: Bounds, most: int) -> Offsets:
    """Return the end of a batch limited to `most` positions.

    Partitions get equal shares. If a partition has fewer positions than its share, the others get the rest.
    """
    if any(len(position) != 1 for position in end.values()):
        raise NotSupported("maxOffsetsPerTrigger counts positions, and this broker's are more than a number")
    # The other partitions have no rows in this batch.
    sizes = {p: at[0] - start[p][0] for p, at in end.items() if p in start and bounds[p][0] <= start[p] < at}
    limited, left = dict(end), most
    for index, (partition, size) in enumerate(sorted(sizes.items(), key=lambda pair: (pair[1], pair[0]))):
        share = min(size, -(-left // (len(sizes) - index)))
        left -= share
        limited[partition] = (start[partition][0] + share,)
    return limited


# --- positions in a checkpoint ---------------------------------------------------------------------------------------


def in_json(position: Position) -> str:
    return str(_plain(position))


def to_json(offsets: Offsets, topic_ids: TopicIds | None = None) -> dict[str, dict[str, Any]]:
    """Return positions, and the topics' ids, as a checkpoint stores them: like those of Spark's Kafka source."""
    document: dict[str, dict[str, Any]] = {}
    for (topic, number), position in sorted(offsets.items()):
        document.setdefault(topic, {})[str(number)] = _plain(position)
    for topic, partitions in document.items():
        if topic_ids and topic in topic_ids:
            partitions[TOPIC_ID] = topic_ids[topic]
    return document


def from_json(positions: Mapping[str, Mapping[str, Any]]) -> Offsets:
    return {
        (topic, int(number)): position_of(position)
        for topic, partitions in positions.items()
        for number, position in partitions.items()
        if number not in NO_PARTITIONS
    }


def topic_ids_of(positions: Mapping[str, Mapping[str, Any]]) -> TopicIds:
    """Return the topic ids of a checkpoint, as far as the broker told them."""
    return {topic: str(partitions[TOPIC_ID]) for topic, partitions in positions.items() if TOPIC_ID in partitions}


def _plain(position: Position) -> int | list[int]:
    return position[0] if len(position) == 1 else list(position)
