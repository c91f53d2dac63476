"""Reading one queue: what was asked for, what has come, and which of it was there before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from txnbridge_rocketmq.client import reading
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import CannotDecompress, ProtocolViolation
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.reading import PullResult
from txnbridge_rocketmq.client.records import StoredMessage, unwrap
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.read.anchored_position import Anchor
from txnbridge_rocketmq.read.duplicates import DuplicateFilter

# Brokers want a name in every request; nobody is a member of this group.
GROUP = "txnbridge-reader"
# How long a broker holds an answer back for which there is no message. Each such wait is a request in an hour's log of
# a proxy or firewall, and shorter than what those take for a dead connection.
WAIT_SECONDS = 15.0
# Brokers hold on for up to five seconds longer, until they look again.
_ANSWER_SECONDS = 15.0
# A broker that knows a message knows it by its key a moment later, mostly within a millisecond.
_LOOK_AGAIN_SECONDS = 0.05
# Past this time its index is not kept.
_INDEX_SECONDS = 10.0

Submit = Callable[[str, RpcRequest[Any], float], Call[Any]]  # to the broker of this name


class NotIndexed(Exception):
    """The broker does not find a message by its unique key that it has."""


class QueuePull:
    """One request for what a queue has from an offset on, and the look-ups that its answer takes."""

    def __init__(self, submit: Submit, queue: Queue, at: int, count: int, wait: float) -> None:
        self.at = at
        self.count = count
        self.pulled: PullResult | None = None
        self._submit = submit
        self._queue = queue
        request = reading.pull(queue.topic, queue.queue, at, GROUP, count, wait)
        self._call = submit(queue.broker, request, wait + _ANSWER_SECONDS)
        self._records: list[StoredMessage] = []
        self._lookups: list[_KeyLookUp] = []

    @property
    def records(self) -> list[StoredMessage]:
        """All that came from the offset on, in order, without a gap before the first one that is missing."""
        return self._records

    def is_done(self, duplicates: DuplicateFilter) -> bool:
        """Return whether all has come. Raises the remoting client's errors, and `NotIndexed`."""
        if self.pulled is None:
            if not self._call.done():
                return False
            self.pulled = self._call.result()
            self._records = _from(self.at, self.pulled.records)
            suspects = duplicates.suspects(self._records, self.pulled.min_offset)
            self._lookups = [_KeyLookUp(self._submit, self._queue, suspect) for suspect in suspects]
        is_done = [lookup.is_done() for lookup in self._lookups]  # each is asked: they are repeated until then
        return all(is_done)

    def without_duplicates(self, duplicates: DuplicateFilter) -> list[StoredMessage]:
        """Once it is done: the records that are no repeats."""
        return duplicates.sift(self._records, {lookup.record.queue_offset: lookup.found for lookup in self._lookups})


class AnchorCheck:
    """One look whether a queue still has the record that it is known by: after it, all that came before it counts."""

    def __init__(self, submit: Submit, queue: Queue, anchor: Anchor) -> None:
        self._submit = submit
        self._queue = queue
        self._anchor = anchor
        self._there = submit(
            queue.broker, reading.log_offset_at(queue.topic, queue.queue, anchor.offset), _ANSWER_SECONDS
        )
        self._begin: Call[int] | None = None

    def is_done(self) -> bool:
        """Return whether the broker has answered. Raises the remoting client's errors."""
        if not self._there.done():
            return False
        if self._there.result() is not None:
            return True
        if self._begin is None:
            request = reading.min_offset(self._queue.topic, self._queue.queue)
            self._begin = self._submit(self._queue.broker, request, _ANSWER_SECONDS)
        return self._begin.done()

    def found(self) -> bool | None:
        """Once it is done: whether the record is there; None where none is, and retention has not dropped it."""
        log_offset: int | None = self._there.result()
        if log_offset is not None:
            return log_offset == self._anchor.log_offset
        assert self._begin is not None
        return True if self._begin.result() > self._anchor.offset else None


class _KeyLookUp:
    """What a broker has under the unique key of a record: that itself, and its copies."""

    def __init__(self, submit: Submit, queue: Queue, record: StoredMessage) -> None:
        self.record = record
        self.found: Sequence[StoredMessage] = ()
        self._submit = submit
        self._queue = queue
        self._ask_at = 0.0
        self._until = time.monotonic() + _INDEX_SECONDS
        self._call: Call[list[StoredMessage]] | None = None
        self.is_done()

    def is_done(self) -> bool:
        if self.found:
            return True
        if self._call is None:
            if time.monotonic() >= self._ask_at:
                request = reading.by_unique_key(self.record.topic, self.record.unique_key or "")
                self._call = self._submit(self._queue.broker, request, _ANSWER_SECONDS)
            return False
        if not self._call.done():
            return False
        found, self._call = self._call.result(), None
        # Messages are indexed in their order: where it is found itself, no earlier one is missing.
        if any(each.log_offset == self.record.log_offset for each in found):
            self.found = found
            return True
        if time.monotonic() > self._until:
            raise NotIndexed
        self._ask_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        return False


def _from(at: int, records: Sequence[StoredMessage]) -> list[StoredMessage]:
    """The records from an offset on, batches taken apart, up to the first gap, or to the first that cannot be read.

    Raises `CannotDecompress` if there is none before that.
    """
    found: list[StoredMessage] = []
    for record in records:
        try:
            parts = list(unwrap(record)) if record.holds_several else [record]
        except (CannotDecompress, ProtocolViolation) as error:
            if found:
                return found
            raise CannotDecompress(str(error)) from error
        for each in parts:
            if each.queue_offset > at + len(found):
                return found
            if each.queue_offset == at + len(found):
                found.append(each)
    return found
