"""Decision logs as topics with one queue, on one broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, OutcomeUnknown, PositionLost, TxnBridgeError
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge_rocketmq.client import groups, reading
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.codes import ResponseCode
from txnbridge_rocketmq.client.connection import Call
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.reading import PullResult
from txnbridge_rocketmq.client.requests import RpcRequest
from txnbridge_rocketmq.client.retry import retry
from txnbridge_rocketmq.client.sending import SendResult, WireMessage, send
from txnbridge_rocketmq.errors import translate, translated
from txnbridge_rocketmq.write.message_format import pack_value, unpack_value

T = TypeVar("T")

# The group in the log's requests, which has no members. The broker stores the trim position as this group's offset.
GROUP = "txnbridge-log"
# Seconds between two reads while a record is not readable yet. A stored record becomes readable within about a
# millisecond.
_LOOK_SECONDS = 0.001
# The number of pull requests sent ahead. Each response has 256 KB at most.
_AHEAD = 8
# Seconds for which a broker that has just started may report an end before existing records.
_LATE = 2.0


class RocketMQDecisionLog(DecisionLog):
    """A decision log in one queue. A record's position is its offset in the queue. Thread-safe."""

    origin = (0,)
    numbered = True

    def __init__(self, client: RemotingClient, queue: Queue, keeps: float | None = None) -> None:
        """Open the log in `queue`, the only queue of an existing topic (`RocketMQTopics.internal`)."""
        self._client = client
        self._queue = queue
        self.keeps = keeps

    # --- begin and end ------------------------------------------------------------------------------------------------

    def begin(self, deadline: Deadline) -> Position | None:
        at, end_offset = self._bounds(deadline)
        trimmed = self._trimmed(deadline)
        # A killed broker may remember an older trim position, and a broker that lost messages, a position after the
        # log's end.
        at = max(at, trimmed) if trimmed < end_offset else at
        while at < end_offset:
            # The broker corrects its first offset some time after it has dropped records, so the first record is read.
            pulled = self._pull(at, deadline, count=1)
            if pulled.records:
                return (pulled.records[0].queue_offset,)
            at = self._next_offset(pulled, at)
            deadline.check(f"looking for the begin of the decision log {self._queue.topic}")
        return None

    def _next_offset(self, pulled: PullResult, at: int) -> int:
        if pulled.next_offset > at:
            return pulled.next_offset
        time.sleep(_LOOK_SECONDS)
        return at

    def end(self, deadline: Deadline) -> Position | None:
        first, end_offset = self._bounds(deadline)
        return (end_offset - 1,) if first < end_offset else None

    def was_used(self, deadline: Deadline) -> bool:
        """Return whether the log ever had a record, even if the broker has dropped all records."""
        return self._bounds(deadline)[1] > 0

    def _bounds(self, deadline: Deadline) -> tuple[int, int]:
        """Return the first offset, as far as the broker knows, and the offset of the next record."""
        ask = "asking where it begins and ends"
        first = self._retry(lambda: self._call(reading.min_offset(self._queue.topic, 0), deadline), ask, deadline)
        return max(first, 0), self._end_offset(deadline)

    def _trimmed(self, deadline: Deadline) -> int:
        request = groups.committed_offset(GROUP, self._queue.topic, self._queue.queue)
        return self._retry(lambda: self._call(request, deadline), "asking where it was trimmed", deadline) or 0

    def _end_offset(self, deadline: Deadline) -> int:
        action = "asking where it ends"
        return self._retry(lambda: self._call(reading.max_offset(self._queue.topic, 0), deadline), action, deadline)

    # --- appending ----------------------------------------------------------------------------------------------------

    def append(self, record: bytes, deadline: Deadline) -> Position:
        body, properties = pack_value(record)
        message = WireMessage(self._queue.topic, body, properties)
        offset = self._retry(lambda: self._send(message, deadline), "appending to it", deadline).queue_offset
        try:
            while self._end_offset(deadline) <= offset:  # a read before that would miss this record
                deadline.check("reading it back")
                time.sleep(_LOOK_SECONDS)
        except TxnBridgeError as error:  # the record is stored, so the error must not say that it is not
            raise self._unknown(str(error)) from error
        return (offset,)

    def _send(self, message: WireMessage, deadline: Deadline) -> SendResult:
        """Store a record. Raise the client's error if it was certainly not stored, and `OutcomeUnknown` otherwise."""
        try:
            return self._call(send(message, GROUP, self._queue.queue), deadline)
        except RemotingError as error:
            # Including a record that was stored, but not as safely as the broker is configured
            if error.may_have_had_effect:
                raise self._unknown(str(error)) from error
            raise

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"a record may or may not be in the decision log {self._queue.topic}: {why}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records from `first` to `last`, or to the end of the log if it ends before `last`."""
        start = first or self.begin(deadline)
        if start is None:
            return
        at, stop = start[0], last[0] if last else self._end_offset(deadline) - 1
        late: Deadline | None = None  # by when more records must be readable
        ahead = _ReadAhead(self._submit, stop)
        while at <= stop:
            deadline.check(f"reading the decision log {self._queue.topic}")
            pulled = ahead.take(at, deadline) or self._pull(at, deadline)
            self._check_gap(pulled, at)
            for record in pulled.records:
                if record.queue_offset != at:
                    raise self._lost(at)
                with translated(f"the decision log {self._queue.topic}, reading record {at}"):
                    yield (at,), unpack_value(record) or b""
                at += 1
                if at > stop:
                    return
            if pulled.records:
                late = None
                continue
            stop = min(stop, self._end_offset(deadline) - 1)
            late = late or Deadline(_LATE)
            if late.expired:
                return
            time.sleep(_LOOK_SECONDS)

    def _check_gap(self, pulled: PullResult, at: int) -> None:
        """Raise `PositionLost` if the broker skips offsets. Queues have no gaps, so records are lost (hazard H68)."""
        if not pulled.records and pulled.next_offset > at:
            raise self._lost(at)

    def _lost(self, at: int) -> PositionLost:
        return PositionLost(f"the decision log {self._queue.topic} was trimmed: there is no record {at} any more")

    def _submit(self, at: int, deadline: Deadline) -> Call[PullResult]:
        request = reading.pull(self._queue.topic, self._queue.queue, at, GROUP)
        return self._client.submit(self._queue.broker, request, deadline.left())

    def _pull(self, at: int, deadline: Deadline, count: int = reading.PULL_MOST) -> PullResult:
        request = reading.pull(self._queue.topic, self._queue.queue, at, GROUP, count)
        return self._retry(lambda: self._call(request, deadline), "reading it", deadline)

    # --- trimming -----------------------------------------------------------------------------------------------------

    def trim(self, before: Position, deadline: Deadline) -> None:
        """Store the position at which the log begins for all readers.

        The broker drops records only by age, so records before the position may stay readable for days.
        """
        request = groups.commit_offset(GROUP, self._queue.topic, self._queue.queue, before[0])
        self._retry(lambda: self._call(request, deadline), "noting where it begins", deadline)

    def _call(self, request: RpcRequest[T], deadline: Deadline) -> T:
        return self._client.call(self._queue.broker, request, deadline.left())

    def _retry(self, attempt: Callable[[], T], action: str, deadline: Deadline) -> T:
        return retry(attempt, f"the decision log {self._queue.topic}, {action}", deadline, _translate)


class _ReadAhead:
    """Pull requests sent ahead: a response has few records, and waiting for each would take most of the time."""

    def __init__(self, submit: Callable[[int, Deadline], Call[PullResult]], stop: int) -> None:
        self._submit = submit
        self._stop = stop
        self._calls: dict[int, Call[PullResult]] = {}
        self._stride = reading.PULL_MOST  # the number of records in a response, which is lower for large records

    def take(self, at: int, deadline: Deadline) -> PullResult | None:
        """Return the response for this offset; None if the offset has to be requested again."""
        self._calls = {offset: call for offset, call in self._calls.items() if offset >= at}
        try:
            for offset in range(at, min(self._stop + 1, at + _AHEAD * self._stride), self._stride):
                if offset not in self._calls:
                    self._calls[offset] = self._submit(offset, deadline)
            pulled = self._calls.pop(at).result()
        except RemotingError:
            self._calls.clear()
            return None
        self._stride = len(pulled.records) or self._stride
        return pulled


def _translate(error: RemotingError, action: str) -> TxnBridgeError:
    if isinstance(error, ErrorResponse) and error.code == ResponseCode.TOPIC_NOT_EXIST:
        return BrokerUnavailable(f"{action}: its topic is not there; it was deleted, or the broker has just started")
    return translate(error, action)
