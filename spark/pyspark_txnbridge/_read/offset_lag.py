"""The lag of a streaming query, computed from the offsets that Spark reports after each batch.

Spark takes metrics of a source from no Python data source, but it reports where a batch ended and where the source
ended when the batch was planned.
"""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import SourceProgress


def offsets_behind(source: SourceProgress) -> dict[str, float]:
    """Return by how many positions the partitions of a source were ahead of the batch when it was planned.

    `source` is one of the `sources` of a query's progress. The names are those of Spark's Kafka source:
    `minOffsetsBehindLatest`, `maxOffsetsBehindLatest` and `avgOffsetsBehindLatest`, over the partitions. Return an
    empty dictionary if Spark reports no offsets, or if the broker's positions are not single numbers.
    """
    behind = lags(source)
    values = {"min": min(behind), "max": max(behind), "avg": mean(behind)} if behind else {}
    return {f"{name}OffsetsBehindLatest": value for name, value in values.items()}


def lags(source: SourceProgress) -> list[int]:
    """Return the number of positions that a batch, when it was planned, left unread in each partition of a source."""
    try:
        ends, latest = json.loads(source.endOffset), json.loads(source.latestOffset)
        return [
            int(at - ends.get(topic, {}).get(number, at))
            for topic, partitions in latest.items()
            for number, at in partitions.items()
        ]
    except (TypeError, ValueError, AttributeError):
        return []  # Spark reports no offsets, or positions are no numbers
