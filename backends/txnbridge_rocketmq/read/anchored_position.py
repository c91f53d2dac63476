"""Telling a queue from one of the same name that was made anew.

A broker names a topic by nothing but its name. But each record has a place of its own in the broker's commit log, which
only grows: so a queue that has a record's place at the same offset still is the queue that the record was read from.
"""

from __future__ import annotations

from typing import NamedTuple

from txnbridge.errors import PositionLost
from txnbridge.spi import Partition, Position


class Anchor(NamedTuple):
    """A record that was read: its offset in its queue, and its place in the commit log."""

    offset: int
    log_offset: int


class AnchoredPosition(NamedTuple):
    """Where a queue is read on: the next offset, and a record by which the queue is known, where there is one."""

    next: int
    anchor: Anchor | None = None

    @classmethod
    def of(cls, position: Position) -> AnchoredPosition:
        """Read back what a decision log has of a group; one written before there were anchors has an offset alone."""
        match position:
            case (at, offset, log_offset):
                return cls(at, Anchor(offset, log_offset))
        return cls(position[0])

    @property
    def position(self) -> Position:
        """As it stands in a decision log."""
        return (self.next, *(self.anchor or ()))


def topic_recreated(owner: str, partition: Partition, at: int, anchor: Anchor) -> PositionLost:
    """Return the error for a position in a queue whose anchor is not there any more."""
    topic, number = partition
    return PositionLost(
        f"{owner} is {at} in {topic}[{number}], but the message that was read at {anchor.offset} is not there any more:"
        " the topic was deleted and made anew, or the broker lost messages. Nothing was skipped:"
        f" seek({{({topic!r}, {number}): (0,)}}) reads what is there now from its beginning"
    )
