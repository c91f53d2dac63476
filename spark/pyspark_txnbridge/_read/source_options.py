"""The options of a query's source. Their names are those of Spark's own Kafka source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark_txnbridge._write.sink_options import (
    Settings,
    check_names,
    flag,
    number,
    option_names,
    seconds,
    take_address,
)
from txnbridge import InvalidOption, Position
from txnbridge.spi import Partition

_NAMES = option_names(
    "url topic subscribe subscribePattern assign startingOffsets startingOffsetsByTimestamp startingTimestamp"
    " startingOffsetsByTimestampStrategy endingOffsets endingOffsetsByTimestamp endingTimestamp maxOffsetsPerTrigger"
    " maxRecordsPerPartition minPartitions failOnDataLoss includeHeaders timestamps timeout"
)
EARLIEST, LATEST = "earliest", "latest"
# Spark's Kafka source writes these numbers in JSON for earliest and latest.
_WORDS: Mapping[Any, str] = {-2: EARLIEST, -1: LATEST, EARLIEST: EARLIEST, LATEST: LATEST}

# The keys in a checkpoint next to a topic's partitions: the topic's id, which shows whether the topic was recreated,
# and the positions at which the first batch begins.
NO_PARTITIONS = TOPIC_ID, BEGIN = "topicId", "begin"


@dataclass(frozen=True)
class Since:
    """The position of a partition's first message whose timestamp is at or after a time (milliseconds since 1970)."""

    milliseconds: int


# One word or time for all partitions, or a position, word or time for each partition.
OffsetsOption = str | Since | tuple[tuple[Partition, Position | str | Since], ...]


@dataclass(frozen=True)
class SourceOptions:
    """The options of one source, checked as far as possible without a broker."""

    url: str = field(repr=False)  # may hold a password
    topics: tuple[str, ...] = ()  # empty with `pattern`
    pattern: str | None = None  # a regular expression for the topics' whole names
    partitions: tuple[Partition, ...] = ()  # the partitions that are read; empty: all
    settings: Settings = field(default=(), repr=False)
    starting: OffsetsOption | None = None  # default: earliest for a batch, latest for a stream
    ending: OffsetsOption = LATEST
    latest_if_later: bool = False  # start at the end of a partition without a message since the starting time
    max_offsets: int | None = None
    max_rows: int | None = None  # the most positions of a task
    min_tasks: int = 0
    fail_on_data_loss: bool = True
    headers: bool = False
    timestamps: str = "error"  # what becomes of a time that Spark's timestamps cannot hold: error, null or clip
    timeout: float = 30.0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Return the checked options. Raise `InvalidOption` for an option that is missing, unknown or invalid."""
        options = {name.lower(): value for name, value in given.items()}
        if "path" in options:
            raise InvalidOption("load() takes no path here: the option url names the broker, topic the topic")
        url, settings = take_address(options, "read")
        check_names(options, _NAMES)
        return cls(
            url=url,
            settings=settings,
            **_topics(options),
            starting=_start_or_end(options, "starting", (EARLIEST, LATEST)),
            ending=_start_or_end(options, "ending", (LATEST,)) or cls.ending,
            latest_if_later=_word(options, "startingOffsetsByTimestampStrategy", "error", LATEST) == LATEST,
            max_offsets=_count(options, "maxOffsetsPerTrigger"),
            max_rows=_count(options, "maxRecordsPerPartition"),
            min_tasks=_count(options, "minPartitions") or cls.min_tasks,
            fail_on_data_loss=flag(options, "failOnDataLoss", cls.fail_on_data_loss),
            headers=flag(options, "includeHeaders", cls.headers),
            timestamps=_word(options, "timestamps", "error", "null", "clip"),
            timeout=seconds(options, "timeout", cls.timeout),
        )


def _count(options: Mapping[str, str], name: str) -> int | None:
    count = number(options, name)
    if count == 0:
        raise InvalidOption(f"option {name} is at least 1: with 0 the query would read nothing")
    return count


def _topics(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `SourceOptions` that say what is read."""
    given = [name for name in ("topic", "subscribe", "subscribepattern", "assign") if options.get(name, "").strip()]
    if len(given) != 1:
        raise InvalidOption(
            "say what to read, once: option topic, subscribe with a list such as orders,refunds, subscribePattern, or"
            " assign"
        )
    value = options[given[0]].strip()
    if given == ["subscribepattern"]:
        try:
            return {"pattern": re.compile(value).pattern}
        except re.error as error:
            raise InvalidOption(f"option subscribePattern is no regular expression: {error}") from None
    if given == ["assign"]:
        partitions = _assigned(value)
        return {"partitions": partitions, "topics": tuple(dict.fromkeys(topic for topic, _ in partitions))}
    names = [name.strip() for name in value.split(",")]
    if "" in names:
        raise InvalidOption("say what to read, once: a name in the list of topics is empty")
    return {"topics": tuple(dict.fromkeys(names))}


def _assigned(value: str) -> tuple[Partition, ...]:
    try:
        given = [(topic, number) for topic, numbers in json.loads(value).items() for number in numbers]
        if not given or not all(type(number) is int and number >= 0 for _, number in given):
            raise ValueError
        return tuple(sorted(set(given)))
    except (ValueError, AttributeError, TypeError):
        raise InvalidOption(
            f'option assign names partitions, such as {{"orders": [0, 1], "refunds": [2]}}, not {value!r:.100}'
        ) from None


def _start_or_end(options: Mapping[str, str], side: str, words: tuple[str, ...]) -> OffsetsOption | None:
    names = f"{side}Offsets", f"{side}OffsetsByTimestamp", f"{side}Timestamp"
    given = [name for name in names if name.lower() in options]
    if len(given) > 1:
        raise InvalidOption(f"options {' and '.join(given)} contradict each other: give one of them")
    offsets, by_timestamp, timestamp = names
    if timestamp in given:
        return Since(number(options, timestamp) or 0)
    if by_timestamp in given:
        return _for_each(
            options, by_timestamp, _since, 'a time for each partition, such as {"orders": {"0": 1700000000000}}'
        )
    value = options.get(offsets.lower(), "").strip().lower()
    if offsets not in given or value in words:
        return value or None
    example = '{"orders": {"0": 23, "1": "latest"}}'
    form = f"{' or '.join(words)}, or a position or word for each partition, such as {example}"
    return _for_each(options, offsets, _position_or_word, form)


def _for_each(
    options: Mapping[str, str], name: str, parse: Callable[[Any], Position | str | Since], form: str
) -> OffsetsOption:
    """Return an option that is JSON with a value for each partition; `form` describes the option in error texts."""
    value = options[name.lower()]
    try:
        found = {
            (topic, int(partition)): parse(at)
            for topic, partitions in json.loads(value).items()
            for partition, at in partitions.items()
            if partition not in NO_PARTITIONS  # the offsets were copied from a checkpoint
        }
    except (ValueError, AttributeError, TypeError):
        raise InvalidOption(f"option {name} is {form}, not {value!r:.100}") from None
    return tuple(sorted(found.items(), key=lambda pair: pair[0]))


def _position_or_word(given: Any) -> Position | str:
    word = None if isinstance(given, list) else _WORDS.get(given)
    return word or position_of(given)


def _since(given: Any) -> Since:
    (milliseconds,) = position_of(given)
    return Since(milliseconds)


def _word(options: Mapping[str, str], name: str, *words: str) -> str:
    """Return the value of an option that is one of these words; the first word is the default."""
    value = options.get(name.lower(), words[0]).strip().lower()
    if value not in words:
        raise InvalidOption(f"option {name} is {', '.join(words[:-1])} or {words[-1]}, not {value!r:.100}")
    return value


def position_of(given: Any) -> Position:
    """Return the position that JSON gives as a number or a list of numbers. Raise `ValueError` for anything else."""
    numbers = given if isinstance(given, list) else [given]
    if not numbers or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise ValueError(f"{given!r:.100} is no position")
    return tuple(numbers)
