"""What a query says about where it reads from; the names are those of Spark's own Kafka source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark_txnbridge._options import Settings, check_names, flag, number, seconds, take_address
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
# As Spark's Kafka source writes them in JSON.
_WORDS: Mapping[Any, str] = {-2: EARLIEST, -1: LATEST, EARLIEST: EARLIEST, LATEST: LATEST}

# Beside the partitions of a topic in a checkpoint: which topic of that name their positions belong to.
TOPIC_ID = "topicId"

# A word for all partitions, or for each of them its position or a word.
Wanted = str | tuple[tuple[Partition, Position | str], ...]


@dataclass(frozen=True)
class SourceOptions:
    """The options of one source, checked as far as that goes without a broker."""

    url: str = field(repr=False)  # may hold a password
    topics: tuple[str, ...]
    settings: Settings = field(default=(), repr=False)
    starting: Wanted | None = None  # a batch begins with what is there, a stream with what comes
    ending: Wanted = LATEST
    max_offsets: int | None = None
    fail_on_data_loss: bool = True
    headers: bool = False
    timeout: float = 30.0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Raises `InvalidOption` for what is missing, unknown or makes no sense."""
        options = {name.lower(): value for name, value in given.items()}
        if "path" in options:
            raise InvalidOption("load() takes no path here: the option url names the broker, topic the topic")
        url, settings = take_address(options, "read")
        check_names(options, _NAMES)
        found = cls(
            url=url,
            settings=settings,
            topics=_topics(options),
            starting=_wanted(options, "startingOffsets", (EARLIEST, LATEST)),
            ending=_wanted(options, "endingOffsets", (LATEST,)) or cls.ending,
            max_offsets=number(options, "maxOffsetsPerTrigger"),
            fail_on_data_loss=flag(options, "failOnDataLoss", cls.fail_on_data_loss),
            headers=flag(options, "includeHeaders", cls.headers),
            timeout=seconds(options, "timeout", cls.timeout),
        )
        if found.max_offsets == 0:
            raise InvalidOption("option maxOffsetsPerTrigger is at least 1: with 0 the query would never go on")
        return found


def _topics(options: Mapping[str, str]) -> tuple[str, ...]:
    given = [options[name] for name in ("topic", "subscribe") if name in options]
    names = [name.strip() for name in given[0].split(",")] if len(given) == 1 else []
    if not names or "" in names:
        raise InvalidOption("say what to read, once: option topic, or subscribe with a list such as orders,refunds")
    return tuple(dict.fromkeys(names))


def _wanted(options: Mapping[str, str], name: str, words: tuple[str, ...]) -> Wanted | None:
    value = options.get(name.lower())
    if value is None or value.strip().lower() in words:
        return value and value.strip().lower()
    try:
        return tuple(sorted(_positions(json.loads(value)), key=lambda pair: pair[0]))
    except (ValueError, AttributeError, TypeError):
        raise InvalidOption(
            f"option {name} is {' or '.join(words)}, or what to do for each partition, such as"
            f' {{"orders": {{"0": 23, "1": "latest"}}}}, not {value!r:.100}'
        ) from None


def _positions(told: Any) -> Iterator[tuple[Partition, Position | str]]:
    for topic, partitions in told.items():
        for partition, at in partitions.items():
            if partition == TOPIC_ID:
                continue  # it comes from a checkpoint
            word = None if isinstance(at, list) else _WORDS.get(at)
            yield (topic, int(partition)), word or position_of(at)


def position_of(told: Any) -> Position:
    """A position out of JSON: a number, or a list of them. Raises `ValueError`."""
    numbers = told if isinstance(told, list) else [told]
    if not numbers or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise ValueError(f"{told!r:.100} is no position")
    return tuple(numbers)
