"""Drops messages that were published more than once. Of the published copies, the one with the lowest offset counts.

A broker publishes a half each time it receives a commit. It receives a second commit if a response was lost, or if
several processes end the same transaction. All copies are in the same queue, so all readers agree which is the first,
and a reader stores nothing across restarts (hazard H75).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from txnbridge_rocketmq.client.protocol.codes import Property, SystemFlag
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.write.transaction_properties import place_of


class DuplicateFilter:
    """Filter for duplicates among the messages of one queue, with memory of recently read messages.

    Pass records in order, first to `suspects`, then to `sift`.

    If the half of a message was stored after the first remembered message, then all earlier copies of the message are
    remembered, too. Other messages are looked up at the broker: messages with an older half, and messages published
    from a copy of a half that the broker made in a round of check-backs.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._forget(-1, 0)

    def _forget(self, at: int, since: int) -> None:
        # All records from `_begin` to `_end` were read. Messages after `_since` in the commit log are remembered.
        self._begin = self._end = at
        self._since = since
        self._since_newer: int | None = None
        self._older: dict[str, int] = {}  # the first offset of a message, by its unique key
        self._newer: dict[str, int] = {}

    def suspects(self, records: Sequence[MessageExt], first_offset: int) -> list[MessageExt]:
        """Return the records that must be looked up by unique key. The queue's first message is at `first_offset`."""
        if not records:
            return []
        at = records[0].queue_offset
        if not self._begin <= at <= self._end:
            self._forget(at, records[0].log_offset if at > first_offset else 0)
        if len(self._newer) >= self._remembered and self._since_newer is not None:
            self._older, self._newer = self._newer, {}
            self._since, self._since_newer = self._since_newer, None
        return [record for record in records if self._is_suspect(record)]

    def _is_suspect(self, record: MessageExt) -> bool:
        key = _key_of(record)
        if key is None or key in self._newer or key in self._older:
            return False
        return record.prepared_offset < self._since or not record.properties.keys().isdisjoint(_COPY_PROPERTIES)

    def sift(self, records: Sequence[MessageExt], found: Mapping[int, Sequence[MessageExt]]) -> list[MessageExt]:
        """Return the records without duplicates. `found` has the look-up result of each suspect, by queue offset."""
        return [record for record in records if self._is_first(record, found.get(record.queue_offset, ()))]

    def _is_first(self, record: MessageExt, others: Sequence[MessageExt]) -> bool:
        self._end = max(self._end, record.queue_offset + 1)
        key = _key_of(record)
        if key is None:
            return True
        first = self._newer.get(key, self._older.get(key))
        if first is None:
            copies = [other for other in others if other.queue == record.queue and _key_of(other) == key]
            first = self._newer[key] = min(each.queue_offset for each in (record, *copies))
            if self._since_newer is None:
                self._since_newer = record.log_offset
        return first == record.queue_offset


def _key_of(record: MessageExt) -> str | None:
    """Return the unique key of a message that a bridge sent in a transaction; None for messages of other clients.

    Another client may copy the headers of a bridge's message into several messages, each with a unique key of its own.
    A Java client that sends a message on keeps its unique key too, but no half of a bridge was committed for the copy.
    """
    was_half = record.system_flag & SystemFlag.ABORTED == SystemFlag.COMMITTED
    return record.unique_key if was_half and place_of(record) is not None else None


# The properties that brokers add to a half when they copy it for a check-back.
_COPY_PROPERTIES = frozenset({Property.CHECKS, Property.COPY_OF})
