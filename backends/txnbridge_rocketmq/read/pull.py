"""Pull requests for one queue, and the look-ups that filter duplicates from their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from txnbridge_rocketmq.client import reading
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import CannotDecompress, ProtocolViolation
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.reading import PullResult
from txnbridge_rocketmq.client.records import MessageExt, unwrap
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.read.anchored_offset import Anchor
from txnbridge_rocketmq.read.duplicates import DuplicateFilter

# The group in the reader's requests, which has no members.
GROUP = "txnbridge-reader"
# Seconds for which a broker holds back the response while the queue has no message. It is short enough for firewalls
# that drop idle connections, and long enough to send few requests.
WAIT_SECONDS = 15.0
# The additional time for the response: brokers hold it back for up to five seconds longer.
_ANSWER_SECONDS = 15.0
# The time between two look-ups. Brokers index a message within about a millisecond.
_LOOK_AGAIN_SECONDS = 0.05
# Seconds for which a message is looked up; after that the broker counts as a broker without an index.
_INDEX_SECONDS = 10.0

Submit = Callable[[str, RpcRequest[Any], float], Call[Any]]  # to the broker of this name


class NotIndexed(Exception):
    """The broker's index does not contain a message that the broker has (hazard H76)."""


class QueuePull:
    """One pull request, and the look-ups by key for its result."""

    def __init__(self, submit: Submit, queue: Queue, at: int, count: int, wait: float) -> None:
        self.at = at
        self.count = count
        self.pulled: PullResult | None = None
        self._submit = submit
        self._queue = queue
        request = reading.pull(queue.topic, queue.queue, at, GROUP, count, wait)
        self._call = submit(queue.broker, request, wait + _ANSWER_SECONDS)
        self._records: list[MessageExt] = []
        self._lookups: list[_KeyLookUp] = []

    @property
    def records(self) -> list[MessageExt]:
        """The records from the requested offset on, in order and without a gap."""
        return self._records

    def is_done(self, duplicates: DuplicateFilter) -> bool:
        """Return whether all responses have arrived. Raise the client's errors, or `NotIndexed`."""
        if self.pulled is None:
            if not self._call.done():
                return False
            self.pulled = self._call.result()
            self._records = _consecutive(self.at, self.pulled.records)
            suspects = duplicates.suspects(self._records, self.pulled.min_offset)
            self._lookups = [_KeyLookUp(self._submit, self._queue, suspect) for suspect in suspects]
        is_done = [lookup.is_done() for lookup in self._lookups]  # call each: the call also repeats requests
        return all(is_done)

    def without_duplicates(self, duplicates: DuplicateFilter) -> list[MessageExt]:
        """Return the records without duplicates. Call this after `is_done` has returned True."""
        return duplicates.sift(self._records, {lookup.record.queue_offset: lookup.copies for lookup in self._lookups})


class AnchorCheck:
    """A check whether a queue still has its anchor. If so, all records read before are from this queue."""

    def __init__(self, submit: Submit, queue: Queue, anchor: Anchor) -> None:
        self._submit = submit
        self._queue = queue
        self._anchor = anchor
        self._lookup = submit(
            queue.broker, reading.log_offset_at(queue.topic, queue.queue, anchor.offset), _ANSWER_SECONDS
        )
        self._begin: Call[int] | None = None

    def is_done(self) -> bool:
        """Return whether the broker has responded. Raise the client's errors."""
        if not self._lookup.done():
            return False
        if self._lookup.result() is not None:
            return True
        if self._begin is None:
            request = reading.min_offset(self._queue.topic, self._queue.queue)
            self._begin = self._submit(self._queue.broker, request, _ANSWER_SECONDS)
        return self._begin.done()

    def has_anchor(self) -> bool | None:
        """Return whether the queue has the anchor; None if the record is missing, and not because of retention."""
        log_offset: int | None = self._lookup.result()
        if log_offset is not None:
            return log_offset == self._anchor.log_offset
        assert self._begin is not None
        return True if self._begin.result() > self._anchor.offset else None


class _KeyLookUp:
    """A look-up of a record and its copies by unique key."""

    def __init__(self, submit: Submit, queue: Queue, record: MessageExt) -> None:
        self.record = record
        self.copies: Sequence[MessageExt] = ()
        self._submit = submit
        self._queue = queue
        self._ask_at = 0.0
        self._until = time.monotonic() + _INDEX_SECONDS
        self._call: Call[list[MessageExt]] | None = None
        self.is_done()

    def is_done(self) -> bool:
        if self.copies:
            return True
        if self._call is None:
            if time.monotonic() >= self._ask_at:
                request = reading.by_unique_key(self.record.topic, self.record.unique_key or "")
                self._call = self._submit(self._queue.broker, request, _ANSWER_SECONDS)
            return False
        if not self._call.done():
            return False
        copies, self._call = self._call.result(), None
        # Messages are indexed in order. If the record itself is found, no earlier copy is missing.
        if any(each.log_offset == self.record.log_offset for each in copies):
            self.copies = copies
            return True
        if time.monotonic() > self._until:
            raise NotIndexed
        self._ask_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        return False


def _consecutive(at: int, records: Sequence[MessageExt]) -> list[MessageExt]:
    """Return the consecutive records from an offset on, with batches split, up to a gap or an unreadable record.

    Raise `CannotDecompress` if the first record is unreadable.
    """
    consecutive: list[MessageExt] = []
    for record in records:
        try:
            parts = list(unwrap(record)) if record.holds_several else [record]
        except (CannotDecompress, ProtocolViolation) as error:
            if consecutive:
                return consecutive
            raise CannotDecompress(str(error)) from error
        for each in parts:
            if each.queue_offset > at + len(consecutive):
                return consecutive
            if each.queue_offset == at + len(consecutive):
                consecutive.append(each)
    return consecutive
