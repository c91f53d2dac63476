"""`waiting_topics`: an overview of the messages that wait for a retry, read without joining a group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from txnbridge._base.messages import Message, Position
from txnbridge._process.retries import WaitingMessage, parse_retry_topic, retry_group
from txnbridge.capabilities import Capability
from txnbridge.errors import NotFound
from txnbridge.spi import Partition

if TYPE_CHECKING:
    from txnbridge._bridge import Bridge

_POLL = 500
_POLL_SECONDS = 0.05
# How far the clocks of the broker, the processors and this machine may differ. A larger value only costs reading time.
_CLOCKS_MS = 60_000


@dataclass(frozen=True)
class WaitingTopic:
    """The messages that wait in a retry topic.

    `waiting` is the number of messages that are not due yet, `due` that of the others, which no processor has processed
    yet; None if the broker does not tell what a group has read. `next_due` (milliseconds since 1970), `attempts` and
    `reason` are those of the message that is due first; None if there is none.
    """

    topic: str
    group: str
    delay: float
    waiting: int
    due: int | None
    next_due: int | None
    attempts: int | None
    reason: str | None


def waiting_topics(bridge: Bridge, group: str | None = None) -> list[WaitingTopic]:
    """Return the retry topics, of one group or of all, with the counts of messages that wait in each."""
    waiting: list[WaitingTopic] = []
    for found in _retry_topics(bridge, group):
        with suppress(NotFound):  # the topic was deleted meanwhile
            waiting.append(_waiting_topic(bridge, *found))
    return waiting


def shortest_retry_topic(bridge: Bridge, group: str) -> str:
    """Return the retry topic of a group that has the shortest delay. Raise `NotFound` if the group has none.

    While the group has members, only topics that they read count, not one whose delay was taken out of `retry=`.
    """
    found = _retry_topics(bridge, group)
    if bridge.capabilities[Capability.GROUP_ADMIN]:
        with suppress(NotFound):
            members = bridge.admin.group(retry_group(group)).members
            read = {topic for member in members for topic, _ in member.partitions}
            found = [each for each in found if each[0] in read] or found
    return min(found, key=lambda each: each[2])[0]


def _retry_topics(bridge: Bridge, group: str | None) -> list[tuple[str, str, float]]:
    """Return the retry topics, of one group or of all, each with its group and its delay."""
    topics = bridge.admin.topics()
    found = [(topic.name, *parsed) for topic in topics if (parsed := parse_retry_topic(topic.name))]
    found = [each for each in found if group in (None, each[1])]
    if group is not None and not found:
        raise NotFound(f"there is no retry topic of group {group!r}: its names are {group}-retry-10s and the like")
    return found


def _waiting_topic(bridge: Bridge, topic: str, group: str, delay: float) -> WaitingTopic:
    positions = _group_positions(bridge, group)
    now = int(time.time() * 1000)
    waiting = due = 0
    first: WaitingMessage | None = None
    for message in _unread(bridge, topic, positions, since=now - int(delay * 1000) - _CLOCKS_MS):
        each = WaitingMessage.of(message)
        if each is None or each.group != group or (positions is None and each.due <= now):
            continue
        waiting += each.due > now
        due += each.due <= now
        if first is None or each.due < first.due:
            first = each
    head = (None, None, None) if first is None else (first.due, first.attempts, first.reason)
    return WaitingTopic(topic, group, delay, waiting, None if positions is None else due, *head)


def _group_positions(bridge: Bridge, group: str) -> Mapping[Partition, Position] | None:
    """Return where a group reads its retry topics next; None if the broker does not tell."""
    if not bridge.capabilities[Capability.GROUP_ADMIN]:
        return None
    try:
        return bridge.admin.group(retry_group(group)).positions
    except NotFound:
        return {}


def _unread(
    bridge: Bridge, topic: str, positions: Mapping[Partition, Position] | None, since: int
) -> Iterator[Message]:
    """Yield the messages from the group's positions on; if these are unknown, those since a time in milliseconds."""
    by_time = positions is None and bool(bridge.capabilities[Capability.START_BY_TIME])
    with bridge.consumer(topic, start=since if by_time else "earliest") as consumer:
        if positions:
            here = consumer.assignment
            consumer.seek({partition: at for partition, at in positions.items() if partition in here})
        while (batch := consumer.poll(_POLL, _POLL_SECONDS)) or any(consumer.lag().values()):
            yield from batch
