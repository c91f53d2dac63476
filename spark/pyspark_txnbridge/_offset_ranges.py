"""Which positions a batch covers: fixed before its first row is read, so that a repetition reads the same rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import txnbridge
from pyspark_txnbridge._options import as_keywords
from pyspark_txnbridge._session import Keeper, patiently
from pyspark_txnbridge._source_options import EARLIEST, LATEST, TOPIC_ID, SourceOptions, Wanted, position_of
from txnbridge import Bridge, InvalidOption, NotSupported, Position, PositionLost
from txnbridge.spi import Partition

_log = logging.getLogger("txnbridge.spark")

Offsets = dict[Partition, Position]
Bounds = Mapping[Partition, tuple[Position, Position]]
TopicIds = Mapping[str, str]


@dataclass(frozen=True)
class Range:
    """The committed messages of a partition from one position to before another."""

    topic: str
    partition: int
    start: Position
    end: Position
    topic_id: str | None = None  # of the topic that the positions belong to, where the broker tells it


def connect(options: SourceOptions) -> Bridge:
    # A reader makes no topics.
    return patiently(
        options.timeout,
        lambda: txnbridge.connect(
            options.url, timeout=options.timeout, create_topics=0, **as_keywords(options.settings)
        ),
    )


def look(options: SourceOptions) -> tuple[TopicIds, Bounds]:
    """Return which topics there are now, and what can be read of each partition. Raises `NotFound`."""
    with _planners.held(options, lambda: connect(options)) as bridge:
        # The ids first: positions of a topic that was made anew in between do not pass for those of the one before.
        return bridge.admin.topic_ids(options.topics), bridge.admin.bounds(options.topics)


def let_go(options: SourceOptions) -> None:
    """Close what `look` keeps open."""
    _planners.drop(options)


_planners: Keeper[Bridge] = Keeper()


# --- where to begin and to end ---------------------------------------------------------------------------------------


def resolve(name: str, wanted: Wanted, bounds: Bounds) -> Offsets:
    """The positions that an option means. Raises `InvalidOption` unless it is about the partitions that there are."""
    told = dict.fromkeys(bounds, wanted) if isinstance(wanted, str) else dict(wanted)
    if strange := sorted(told.keys() ^ bounds.keys()):
        topic, number = strange[0]
        problem = "does not say anything about" if strange[0] in bounds else "names a partition that is not read:"
        raise InvalidOption(f"option {name} {problem} {topic}[{number}]")
    words = {EARLIEST: 0, LATEST: 1}
    return {each: bounds[each][words[at]] if isinstance(at, str) else at for each, at in sorted(told.items())}


def ranges(
    start: Offsets, end: Offsets, bounds: Bounds, options: SourceOptions, topic_ids: TopicIds | None = None
) -> list[Range]:
    """The ranges to read between two sets of positions. Messages in between that the broker removed are lost, and told.

    A partition that only the second set names begins there.
    """
    found = []
    for (topic, number), stop in end.items():
        at = start.get((topic, number), stop)
        if at != stop:
            _check_kept((topic, number), min(at, stop), max(at, stop), bounds, options)
        if at < stop:
            found.append(Range(topic, number, at, stop, (topic_ids or {}).get(topic)))
    return found


def _check_kept(partition: Partition, at: Position, stop: Position, bounds: Bounds, options: SourceOptions) -> None:
    if partition not in bounds:
        report_loss(partition, at, "it is not there any more", options)
        return
    first, end = bounds[partition]
    if at < first:
        report_loss(partition, at, f"retention has removed everything before {show(first)}", options)
    if stop > end:
        report_loss(partition, stop, f"it can be read up to {show(end)} only. Was the topic made anew?", options)


def report_loss(partition: Partition, at: Position, why: str, options: SourceOptions) -> None:
    """Rows that should be there cannot be read: stop, or go on without them where the query says so."""
    topic, number = partition
    text = f"{topic}[{number}] cannot be read at {show(at)}: {why}"
    if options.fail_on_data_loss:
        raise PositionLost(f"{text}. Nothing was skipped; with failOnDataLoss=false the query goes on without it")
    _log.warning("%s. The query goes on without it (failOnDataLoss=false)", text)


def in_the_same_topics(offsets: Offsets, before: TopicIds, now: TopicIds, options: SourceOptions) -> Offsets:
    """Return the positions but for those in topics that were made anew since: these rows are lost, and told."""
    found = {}
    for (topic, number), at in offsets.items():
        if is_another(before.get(topic), now.get(topic)):
            report_loss((topic, number), at, MADE_ANEW, options)
        else:
            found[topic, number] = at
    return found


def is_another(before: str | None, now: str | None) -> bool:
    """Return whether two ids of a topic are known, and of different topics."""
    return before is not None and now is not None and before != now


MADE_ANEW = "the topic was deleted and made anew since"


# --- a stream goes on ------------------------------------------------------------------------------------------------


def go_on(start: Offsets, bounds: Bounds, options: SourceOptions) -> Offsets:
    """Where a stream that stands somewhere comes to next.

    A partition that is new, or cannot be read where the stream stands, is not read in this batch: it is only placed
    where it begins, so that the next batch has its first position in writing, whenever it is repeated.
    """
    found: Offsets = {}
    for partition, (first, end) in sorted(bounds.items()):
        at = start.get(partition, first)
        if not first <= at <= end:
            _check_kept(partition, at, at, bounds, options)
        found[partition] = end if partition in start and first <= at <= end else first
    for partition in sorted(start.keys() - bounds.keys()):
        _check_kept(partition, start[partition], start[partition], bounds, options)
    return found


def limited(start: Offsets, end: Offsets, bounds: Bounds, most: int) -> Offsets:
    """As far as so many positions reach. Each partition gets as much as any other, as far as it has that much."""
    if any(len(position) != 1 for position in end.values()):
        raise NotSupported("maxOffsetsPerTrigger counts positions, and this broker's are more than a number")
    # The others are only placed.
    sizes = {p: at[0] - start[p][0] for p, at in end.items() if p in start and bounds[p][0] <= start[p] < at}
    found, left = dict(end), most
    for index, (partition, size) in enumerate(sorted(sizes.items(), key=lambda pair: (pair[1], pair[0]))):
        share = min(size, -(-left // (len(sizes) - index)))
        left -= share
        found[partition] = (start[partition][0] + share,)
    return found


# --- positions in a checkpoint ---------------------------------------------------------------------------------------


def show(position: Position) -> str:
    """A position as it stands in JSON."""
    return str(_plain(position))


def to_json(offsets: Offsets, topic_ids: TopicIds | None = None) -> dict[str, dict[str, Any]]:
    """Return positions as a checkpoint holds them: as Spark's Kafka source writes them, where they are numbers.

    The topics' ids stand beside the partitions.
    """
    found: dict[str, dict[str, Any]] = {}
    for (topic, number), position in sorted(offsets.items()):
        found.setdefault(topic, {})[str(number)] = _plain(position)
    for topic, partitions in found.items():
        if topic_ids and topic in topic_ids:
            partitions[TOPIC_ID] = topic_ids[topic]
    return found


def from_json(told: Mapping[str, Mapping[str, Any]]) -> Offsets:
    return dict(_told(told))


def topic_ids_of(told: Mapping[str, Mapping[str, Any]]) -> TopicIds:
    """Return the ids of the topics that positions in a checkpoint belong to; earlier versions wrote none."""
    return {topic: str(partitions[TOPIC_ID]) for topic, partitions in told.items() if TOPIC_ID in partitions}


def _plain(position: Position) -> int | list[int]:
    return position[0] if len(position) == 1 else list(position)


def _told(told: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Partition, Position]]:
    for topic, partitions in told.items():
        for number, position in partitions.items():
            if number != TOPIC_ID:
                yield (topic, int(number)), position_of(position)
