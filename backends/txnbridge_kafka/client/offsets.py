"""Offsets in a topic that was deleted and created again under its name."""

from __future__ import annotations

from txnbridge.spi import Partition


def is_another_topic(now: str | None, before: str | None) -> bool:
    """Return whether a topic was deleted and created again, by its ids now and before. Unknown ids prove nothing."""
    return bool(now) and bool(before) and now != before


def recreated_text(name: str, partition: Partition, at: int) -> str:
    """Return the error text for an offset (`name` says whose) in a topic that was deleted and created again."""
    topic, number = partition
    return (
        f"{name} is {at} in {topic}[{number}], but the topic was deleted and created again since, so that offset means"
        " nothing in the new topic. Nothing was skipped. Choose where to continue in the new topic by"
        f" seek({{({topic!r}, {number}): (offset,)}})"
    )
