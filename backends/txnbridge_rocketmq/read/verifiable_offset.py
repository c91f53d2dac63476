"""Positions by which a reader notices that a topic was deleted and created again.

A broker identifies a topic only by its name, so an old offset would be valid in the new topic. Therefore a position
names a reference record, which was read earlier: its queue offset, and its offset in the broker's commit log, which
only grows. If the queue has another record at that queue offset, the topic was recreated (hazard H80).
"""

from __future__ import annotations

from typing import NamedTuple

from txnbridge.errors import PositionLost
from txnbridge.spi import Partition, Position


class ReferenceRecord(NamedTuple):
    """A record that was read from a queue, by its queue offset and commit log offset; a recreated topic lacks it."""

    offset: int
    log_offset: int


class VerifiableOffset(NamedTuple):
    """The position of a group or reader: the next offset to read, and a record before it that no new topic has."""

    next: int
    reference: ReferenceRecord | None = None

    @classmethod
    def of(cls, position: Position) -> VerifiableOffset:
        """Return the offset, and the reference record if there is one, in a decision log's position."""
        match position:
            case (at, offset, log_offset):
                return cls(at, ReferenceRecord(offset, log_offset))
        return cls(position[0])

    @property
    def position(self) -> Position:
        """The form that the decision log stores: (next,), or (next, offset, log_offset) with a reference record."""
        return (self.next, *(self.reference or ()))


def topic_recreated(name: str, partition: Partition, at: int, reference: ReferenceRecord) -> PositionLost:
    """Return the error for a position (`name` says whose) in a topic that was recreated, and so lacks `reference`."""
    topic, number = partition
    return PositionLost(
        f"{name} is {at} in {topic}[{number}], but the message that was read at {reference.offset} is no longer"
        " there: the topic was deleted and created again, or the broker lost messages. Nothing was skipped:"
        f" seek({{({topic!r}, {number}): (0,)}}) reads the queue from its beginning"
    )
