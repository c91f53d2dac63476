"""The options of a query's source. Their names are those of Spark's own Kafka source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark_txnbridge._sink_options import Settings, check_names, flag, number, seconds, take_address
from txnbridge import InvalidOption, Position
from txnbridge.spi import Partition

_NAMES = {
    name.lower(): name
    for name in (
        "url",
        "topic",
        "subscribe",
        "startingOffsets",
        "endingOffsets",
        "maxOffsetsPerTrigger",
        "failOnDataLoss",
        "includeHeaders",
        "timeout",
    )
}
EARLIEST, LATEST = "earliest", "latest"
# Spark's Kafka source writes these numbers in JSON for earliest and latest.
_WORDS: Mapping[Any, str] = {-2: EARLIEST, -1: LATEST, EARLIEST: EARLIEST, LATEST: LATEST}

# The key of a topic's id in a checkpoint, next to the topic's partitions. The id shows whether the topic was recreated.
TOPIC_ID = "topicId"

# One word for all partitions, or a position or word for each partition.
OffsetsOption = str | tuple[tuple[Partition, Position | str], ...]


@dataclass(frozen=True)
class SourceOptions:
    """The options of one source, checked as far as possible without a broker."""

    url: str = field(repr=False)  # may hold a password
    topics: tuple[str, ...]
    settings: Settings = field(default=(), repr=False)
    starting: OffsetsOption | None = None  # default: earliest for a batch, latest for a stream
    ending: OffsetsOption = LATEST
    max_offsets: int | None = None
    fail_on_data_loss: bool = True
    headers: bool = False
    timeout: float = 30.0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Return the checked options. Raise `InvalidOption` for an option that is missing, unknown or invalid."""
        options = {name.lower(): value for name, value in given.items()}
        if "path" in options:
            raise InvalidOption("load() takes no path here: the option url names the broker, topic the topic")
        url, settings = take_address(options, "read")
        check_names(options, _NAMES)
        parsed = cls(
            url=url,
            settings=settings,
            topics=_topics(options),
            starting=_offsets_option(options, "startingOffsets", (EARLIEST, LATEST)),
            ending=_offsets_option(options, "endingOffsets", (LATEST,)) or cls.ending,
            max_offsets=number(options, "maxOffsetsPerTrigger"),
            fail_on_data_loss=flag(options, "failOnDataLoss", cls.fail_on_data_loss),
            headers=flag(options, "includeHeaders", cls.headers),
            timeout=seconds(options, "timeout", cls.timeout),
        )
        if parsed.max_offsets == 0:
            raise InvalidOption("option maxOffsetsPerTrigger is at least 1: with 0 the query would read nothing")
        return parsed


def _topics(options: Mapping[str, str]) -> tuple[str, ...]:
    given = [options[name] for name in ("topic", "subscribe") if name in options]
    names = [name.strip() for name in given[0].split(",")] if len(given) == 1 else []
    if not names or "" in names:
        raise InvalidOption("say what to read, once: option topic, or subscribe with a list such as orders,refunds")
    return tuple(dict.fromkeys(names))


def _offsets_option(options: Mapping[str, str], name: str, words: tuple[str, ...]) -> OffsetsOption | None:
    value = options.get(name.lower())
    if value is None or value.strip().lower() in words:
        return value and value.strip().lower()
    try:
        return tuple(sorted(_positions(json.loads(value)), key=lambda pair: pair[0]))
    except (ValueError, AttributeError, TypeError):
        raise InvalidOption(
            f"option {name} is {' or '.join(words)}, or a position or word for each partition, such as"
            f' {{"orders": {{"0": 23, "1": "latest"}}}}, not {value!r:.100}'
        ) from None


def _positions(given: Any) -> Iterator[tuple[Partition, Position | str]]:
    for topic, partitions in given.items():
        for partition, at in partitions.items():
            if partition == TOPIC_ID:
                continue  # the offsets were copied from a checkpoint
            word = None if isinstance(at, list) else _WORDS.get(at)
            yield (topic, int(partition)), word or position_of(at)


def position_of(given: Any) -> Position:
    """Return the position that JSON gives as a number or a list of numbers. Raise `ValueError` for anything else."""
    numbers = given if isinstance(given, list) else [given]
    if not numbers or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise ValueError(f"{given!r:.100} is no position")
    return tuple(numbers)
