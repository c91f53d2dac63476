"""Messages that were published more than once, of which the first one counts.

A broker publishes a half again each time it is told to, and it is told again where an answer was lost, or where several
end the same transaction. All copies lie in the queue of the first one. Its position tells which that is, to every
reader at any time: nothing has to be remembered across restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from txnbridge_rocketmq.client.codes import Property
from txnbridge_rocketmq.client.records import StoredMessage
from txnbridge_rocketmq.write.transaction_properties import TransactionSlot, slot_of

# So many messages are remembered, twice: some 200 bytes each.
_REMEMBERED = 10_000


class DuplicateFilter:
    """Which of one queue's messages are repeats. Give it what was read, in order: `suspects` first, then `sift`.

    What was read before is remembered. A message whose half is younger than all that has its repeats there. Of any
    other only the broker can tell: one that was published from the copy which a broker makes when it asks about a half,
    or one whose half was there before the first message that is remembered.
    """

    def __init__(self) -> None:
        self._forget(-1, 0)

    def _forget(self, at: int, since: int) -> None:
        # Between these two offsets everything was seen, and all that stands behind `since` in the commit log is
        # remembered.
        self._begin = self._end = at
        self._since = since
        self._since_newer: int | None = None
        self._older: dict[TransactionSlot, int] = {}
        self._newer: dict[TransactionSlot, int] = {}

    def suspects(self, records: Sequence[StoredMessage], first_offset: int) -> list[StoredMessage]:
        """Those of which only a look-up of their unique key can tell; `first_offset` is the queue's first."""
        if not records:
            return []
        at = records[0].queue_offset
        if not self._begin <= at <= self._end:
            self._forget(at, records[0].log_offset if at > first_offset else 0)
        if len(self._newer) >= _REMEMBERED and self._since_newer is not None:
            self._older, self._newer = self._newer, {}
            self._since, self._since_newer = self._since_newer, None
        return [record for record in records if self._is_suspect(record)]

    def _is_suspect(self, record: StoredMessage) -> bool:
        slot = slot_of(record)
        if slot is None or slot in self._newer or slot in self._older:
            return False
        return record.prepared_offset < self._since or not record.properties.keys().isdisjoint(_COPIED)

    def sift(
        self, records: Sequence[StoredMessage], found: Mapping[int, Sequence[StoredMessage]]
    ) -> list[StoredMessage]:
        """The same records without repeats; `found` is what the look-ups brought, by the offset of each suspect."""
        return [record for record in records if self._is_first(record, found.get(record.queue_offset, ()))]

    def _is_first(self, record: StoredMessage, others: Sequence[StoredMessage]) -> bool:
        self._end = max(self._end, record.queue_offset + 1)
        slot = slot_of(record)
        if slot is None:
            return True
        first = self._newer.get(slot, self._older.get(slot))
        if first is None:
            copies = [other for other in others if other.queue == record.queue and slot_of(other) == slot]
            first = min(each.queue_offset for each in (record, *copies))
            self._remember(slot, first, record)
        return first == record.queue_offset

    def _remember(self, slot: TransactionSlot, first: int, record: StoredMessage) -> None:
        if self._since_newer is None:
            self._since_newer = record.log_offset
        self._newer[slot] = first


# What brokers write into the copy that they make of a half when they look at it.
_COPIED = frozenset({Property.CHECKS, Property.COPY_OF})
