"""Requests in flight that a reader needs for one queue: pulls, look-ups of duplicates, checks for a recreated topic."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import CannotDecompress, ProtocolViolation
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.read_requests import PullResult
from txnbridge_rocketmq.client.protocol.records import MessageExt, unwrap
from txnbridge_rocketmq.read.duplicates import DuplicateFilter
from txnbridge_rocketmq.read.verifiable_offset import ReferenceRecord
from txnbridge_rocketmq.settings import RocketMQTiming

# The consumer group in the reader's requests. It has no members.
GROUP = "txnbridge-reader"
# For this long, a broker holds back the response while the queue has no message. Firewalls drop connections that are
# idle for longer; a shorter time would cost more requests.
LONG_POLL_SECONDS = 15.0
# The time for the response in addition to that: brokers hold it back for up to five seconds longer.
_RESPONSE_SECONDS = 15.0

Submit = Callable[[str, RpcRequest[Any], float], Call[Any]]  # to the broker of this name


class NotIndexed(Exception):
    """Raised if a look-up by unique key does not find a message that a pull has returned (hazard H76)."""


class QueuePull:
    """A pull request, and the look-ups by unique key for those of its records that may be duplicates."""

    def __init__(self, submit: Submit, queue: Queue, at: int, count: int, wait: float, timing: RocketMQTiming) -> None:
        self.at = at
        self.count = count
        self.pulled: PullResult | None = None
        self._submit = submit
        self._queue = queue
        self._timing = timing
        request = read_requests.pull(queue.topic, queue.queue, at, GROUP, count, wait)
        self._call = submit(queue.broker, request, wait + _RESPONSE_SECONDS)
        self.records: list[MessageExt] = []  # from the requested offset on, in order and without a gap
        self._lookups: list[_KeyLookUp] = []

    def is_done(self, duplicates: DuplicateFilter) -> bool:
        """Return whether the pull and all look-ups have responses. Raise the client's errors, or `NotIndexed`."""
        if self.pulled is None:
            if not self._call.done():
                return False
            self.pulled = self._call.result()
            self.records = _consecutive(self.at, self.pulled.records)
            suspects = duplicates.suspects(self.records, self.pulled.min_offset)
            self._lookups = [_KeyLookUp(self._submit, self._queue, suspect, self._timing) for suspect in suspects]
        is_done = [lookup.is_done() for lookup in self._lookups]  # call all of them: `is_done` also repeats look-ups
        return all(is_done)

    def without_duplicates(self, duplicates: DuplicateFilter) -> list[MessageExt]:
        """Return the messages that the pull returned, without duplicates; call this once `is_done` returns True."""
        return duplicates.sift(self.records, {lookup.record.queue_offset: lookup.copies for lookup in self._lookups})


class SameQueueCheck:
    """A request in flight for a record read before (reference record), which a recreated topic lacks (hazard H80)."""

    def __init__(self, submit: Submit, queue: Queue, reference: ReferenceRecord) -> None:
        self._submit = submit
        self._queue = queue
        self._reference = reference
        self._lookup = submit(
            queue.broker, read_requests.log_offset_at(queue.topic, queue.queue, reference.offset), _RESPONSE_SECONDS
        )
        self._begin: Call[int] | None = None

    def is_done(self) -> bool:
        """Return whether the broker has responded. Raise the client's errors."""
        if not self._lookup.done():
            return False
        if self._lookup.result() is not None:
            return True
        if self._begin is None:
            request = read_requests.min_offset(self._queue.topic, self._queue.queue)
            self._begin = self._submit(self._queue.broker, request, _RESPONSE_SECONDS)
        return self._begin.done()

    def is_same_queue(self) -> bool | None:
        """Return True if the queue still has the reference record, which was read before, or dropped it by age.

        Return False if another record is at its offset, None if no record is there, which may be temporary.
        """
        log_offset: int | None = self._lookup.result()
        if log_offset is not None:
            return log_offset == self._reference.log_offset
        assert self._begin is not None
        return True if self._begin.result() > self._reference.offset else None


class _KeyLookUp:
    """A look-up, by unique key, of all published copies of a record. It repeats until the record itself is found."""

    def __init__(self, submit: Submit, queue: Queue, record: MessageExt, timing: RocketMQTiming) -> None:
        self.record = record
        self.copies: Sequence[MessageExt] = ()
        self._submit = submit
        self._queue = queue
        self._pause = timing.read_look_up_pause
        self._ask_at = 0.0
        self._until = time.monotonic() + timing.index_timeout
        self._call: Call[list[MessageExt]] | None = None
        self.is_done()

    def is_done(self) -> bool:
        if self.copies:
            return True
        if self._call is None:
            if time.monotonic() >= self._ask_at:
                request = read_requests.by_unique_key(self.record.topic, self.record.unique_key or "")
                self._call = self._submit(self._queue.broker, request, _RESPONSE_SECONDS)
            return False
        if not self._call.done():
            return False
        copies, self._call = self._call.result(), None
        # Brokers index messages in order. If the record itself is found, then also all copies before it.
        if any(each.log_offset == self.record.log_offset for each in copies):
            self.copies = copies
            return True
        if time.monotonic() > self._until:
            raise NotIndexed
        self._ask_at = time.monotonic() + self._pause
        return False


def _consecutive(at: int, records: Sequence[MessageExt]) -> list[MessageExt]:
    """Return the records from offset `at` on, with batches split, up to a gap or a record that cannot be unpacked.

    Raise `CannotDecompress` if the first record cannot be unpacked.
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
