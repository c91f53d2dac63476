"""Positions with an anchor, which distinguishes a queue from the queue of the same name in a recreated topic.

A broker identifies a topic only by its name. But each record has an offset in the broker's commit log, which only
grows. A queue that has a record with the same commit log offset at the same queue offset is the queue from which that
record was read (hazard H80).
"""

from __future__ import annotations

from typing import NamedTuple

from txnbridge.errors import PositionLost
from txnbridge.spi import Partition, Position


class Anchor(NamedTuple):
    """A record that was read: its queue offset and its commit log offset."""

    offset: int
    log_offset: int


class AnchoredOffset(NamedTuple):
    """The position of a group or reader: the next offset, and an anchor, a record that identifies the queue."""

    next: int
    anchor: Anchor | None = None

    @classmethod
    def of(cls, position: Position) -> AnchoredOffset:
        """Parse a position of a decision log. Positions of earlier versions have an offset without an anchor."""
        match position:
            case (at, offset, log_offset):
                return cls(at, Anchor(offset, log_offset))
        return cls(position[0])

    @property
    def position(self) -> Position:
        """The position as the decision log stores it."""
        return (self.next, *(self.anchor or ()))


def topic_recreated(owner: str, partition: Partition, at: int, anchor: Anchor) -> PositionLost:
    """Return the error for a position whose anchor is gone from the queue."""
    topic, number = partition
    return PositionLost(
        f"{owner} is {at} in {topic}[{number}], but the message that was read at {anchor.offset} is not there any more:"
        " the topic was deleted and made anew, or the broker lost messages. Nothing was skipped:"
        f" seek({{({topic!r}, {number}): (0,)}}) reads what is there now from its beginning"
    )
