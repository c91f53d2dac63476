"""The decision log on RocketMQ: a topic with one queue, on one broker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

from txnbridge.errors import BrokerUnavailable, OutcomeUnknown, PositionLost, TxnBridgeError
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge_rocketmq.client import groups
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError, ResponseTimeout
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.codes import ResponseCode
from txnbridge_rocketmq.client.protocol.frames import RpcRequest
from txnbridge_rocketmq.client.protocol.read_requests import PullResult, PullStatus
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage, send, send_together
from txnbridge_rocketmq.client.retry import retry
from txnbridge_rocketmq.errors import translate, translated
from txnbridge_rocketmq.write.message_format import pack_value, unpack_value

T = TypeVar("T")

# The consumer group in the log's requests. It has no members; the broker stores the trim position as its offset.
GROUP = "txnbridge-log"
# The wait before the first read of a stored record, and between two reads. A broker makes records readable each
# millisecond. A pull that waits at the broker is not safe here: if the record becomes readable while the broker begins
# to hold the pull, it is answered up to five seconds later.
_VISIBLE_POLL_SECONDS = 0.0005
# An append reads the records since the last one that was read if they are fewer. For so many seconds, `read` takes
# them from there: later the log may have been created again.
_LONGEST_TAIL, _TAIL_SECONDS = 256, 1.0
# For this long, a broker that has just started may report an end that is lower than the offsets of stored records.
_RESTARTED_BROKER_SECONDS = 2.0
# The limits of one append request. A broker takes 4 MiB by default.
_MOST_TOGETHER, _MOST_BYTES = 64, 1 << 20
# A request has the time of the thread that sends it. A message goes along only if its thread has hardly more time, so
# that a thread with a short deadline fails no other one.
_MORE_TIME = 1.1
# The interval at which a waiting thread looks whether nobody sends.
_LOOK_SECONDS = 0.1


class _Append(Generic[T]):
    """A message that waits to be stored. `wake` is set once it has a result, or once its thread has to send."""

    def __init__(self, message: WireMessage, deadline: Deadline) -> None:
        self.message = message
        self.deadline = deadline
        self.result: T | RemotingError | None = None
        self.taken = self.sends = False
        self.wake = threading.Event()


class AppendQueue(Generic[T]):
    """Stores messages of several threads together: one thread at a time calls `send` for messages that wait.

    The next sender is the first waiting thread that has about as much time left as any other. `send` returns a result
    for each message. An error of `send` is the result of each of its messages.
    """

    def __init__(self, send: Callable[[Sequence[WireMessage], Deadline], Sequence[T]]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[_Append[T]] = deque()
        self._sending = threading.Lock()  # of the thread that sends

    def store(self, message: WireMessage, deadline: Deadline) -> T:
        """Store a message, and return its result. Raise a `RemotingError`."""
        append: _Append[T] = _Append(message, deadline)
        held: list[bool] = []
        try:
            with self._lock:
                self._waiting.append(append)
                append.sends = len(self._waiting) == 1 and not self._sending.locked()
            while append.result is None and not held:
                is_free = not self._sending.locked()
                if append.sends and Deadline(0).acquire(self._sending, held):
                    if not append.taken:
                        self._send_waiting(append)
                elif deadline.expired:
                    break
                elif not append.wake.wait(min(deadline.left(), _LOOK_SECONDS)) and is_free:
                    append.sends = True  # a signal handler's exception kept the last sender from naming the next one
                append.wake.clear()
        finally:
            if held:
                self._sending.release()
            self._leave(append)
        if append.result is None:
            raise ResponseTimeout("another thread has sent this message and got no answer", may_have_had_effect=True)
        if isinstance(append.result, RemotingError):
            raise append.result
        return append.result

    def _leave(self, append: _Append[T]) -> None:
        """Take back a message that was not sent. If its thread was to send, let another waiting thread do so."""
        with self._lock:
            if append.result is None and append in self._waiting:
                self._waiting.remove(append)
                append.result = ResponseTimeout("no time was left to send this message")
            if append.sends and self._waiting:
                left = [(each, each.deadline.left()) for each in self._waiting]
                longest = max(seconds for _, seconds in left)
                sender = next(each for each, seconds in left if seconds * _MORE_TIME >= longest)
                sender.sends = True
                sender.wake.set()

    def _send_waiting(self, own: _Append[T]) -> None:
        together: list[_Append[T]] = []
        found: Sequence[T | RemotingError | None] = ()
        try:
            with self._lock:
                self._take(own, together)
            found = self._send([append.message for append in together], own.deadline)
        except RemotingError as error:
            found = [error] * len(together)
        finally:
            for append, result in zip_longest(together, found):
                append.result = result
                append.wake.set()

    def _take(self, own: _Append[T], together: list[_Append[T]]) -> None:
        """Move this thread's own message and the first others that fit into one request to `together`, in order."""
        taken, size = {own}, len(own.message.body)
        most_time = own.deadline.left() * _MORE_TIME
        for append in self._waiting:
            if append is own or append.deadline.left() > most_time:
                continue
            size += len(append.message.body)
            if len(taken) >= _MOST_TOGETHER or size > _MOST_BYTES:
                break
            taken.add(append)
        for append in taken:
            append.taken = True
        together += (append for append in self._waiting if append.taken)
        self._waiting = deque(append for append in self._waiting if not append.taken)


class RocketMQDecisionLog(DecisionLog):
    """A decision log in one queue: the position of a record is its queue offset. Thread-safe."""

    origin = (0,)
    numbered = True

    def __init__(self, client: RemotingClient, queue: Queue, keeps: float | None = None) -> None:
        """`queue` is the only queue of an existing topic. `keeps` is the broker's retention in seconds."""
        self._client = client
        self._queue = queue
        self.keeps = keeps
        self._has_records = False  # whether a record was seen in the log
        self._appends = AppendQueue(self._store)
        self._read_up_to = -1  # the offset of the last record that was read
        self._tail: _Tail | None = None  # the records that the last append has read

    def begin(self, deadline: Deadline) -> Position | None:
        at, end_offset = self._bounds(deadline)
        request = groups.committed_offset(GROUP, self._queue.topic, self._queue.queue)
        trimmed = self._ask(request, "asking for its trim position", deadline) or 0
        # A broker that was killed may return an older trim position; one that lost messages, a position after the end.
        at = max(at, trimmed) if trimmed < end_offset else at
        while at < end_offset:
            # After it has dropped records, the broker still reports the old first offset for a while. So read a record.
            pulled = self._pull(at, deadline, count=1)
            if pulled.records:
                return (pulled.records[0].queue_offset,)
            if pulled.next_offset <= at:
                time.sleep(_VISIBLE_POLL_SECONDS)
            at = max(at, pulled.next_offset)
            deadline.check(f"looking for the first record of the decision log {self._queue.topic}")
        return None

    def end(self, deadline: Deadline) -> Position | None:
        # A log that had records stays numbered on when the broker drops them, so the first offset is not needed. A
        # reader that has read up to the end finds the drop at its next record (hazard H68).
        first, end_offset = (0, self._end_offset(deadline)) if self._has_records else self._bounds(deadline)
        self._has_records = first < end_offset
        return (end_offset - 1,) if first < end_offset else None

    def was_used(self, deadline: Deadline) -> bool:
        """Return whether the log has or had records, which the broker may have dropped."""
        return self._end_offset(deadline) > 0

    def _bounds(self, deadline: Deadline) -> tuple[int, int]:
        """Return the offset of the first record, and the offset after the last record.

        The first may be too low for a while after the broker has dropped old records.
        """
        first = self._ask(read_requests.min_offset(self._queue.topic, 0), "asking for its first offset", deadline)
        return max(first, 0), self._end_offset(deadline)

    def _end_offset(self, deadline: Deadline) -> int:
        return self._ask(read_requests.max_offset(self._queue.topic, 0), "asking for its end", deadline)

    def append(self, record: bytes, deadline: Deadline) -> Position:
        body, properties = pack_value(record)
        message = WireMessage(self._queue.topic, body, properties)
        offset, is_visible = self._retry(lambda: self._send(message, deadline), "appending to it", deadline)
        try:
            if not is_visible:
                self._retry(lambda: self._read_back(offset, deadline), "reading a stored record back", deadline)
        except TxnBridgeError as error:  # the record is stored, and the caller must not take it for not stored
            raise self._unknown(str(error)) from error
        return (offset,)

    def _send(self, message: WireMessage, deadline: Deadline) -> tuple[int, bool]:
        """Store a record; return its offset and whether readers see it. Raise `OutcomeUnknown` if it may be stored."""
        try:
            return self._appends.store(message, deadline)
        except RemotingError as error:
            # This includes `NotDurable`: the record is stored, but not flushed or replicated as configured.
            if error.may_have_had_effect:
                raise self._unknown(str(error)) from error
            raise

    def _store(self, messages: Sequence[WireMessage], deadline: Deadline) -> list[tuple[int, bool]]:
        """Store records by one request, and read them back. Return the offset of each, and whether it is visible."""
        queue = self._queue.queue
        if len(messages) == 1:
            first = self._call(send(messages[0], GROUP, queue), deadline).queue_offset
        else:
            first = self._call(send_together(messages, GROUP, queue), deadline)
        is_visible = False
        with suppress(RemotingError, TxnBridgeError):  # then each thread reads its own record back
            self._read_back(first + len(messages) - 1, deadline)
            is_visible = True
        return [(first + number, is_visible) for number in range(len(messages))]

    def _read_back(self, offset: int, deadline: Deadline) -> None:
        """Wait until a stored record can be read: until then `read` would end before it.

        Keep all records from the last one that was read, for the thread that reads next: it compares this record with
        its own one, because the log may have been created again.
        """
        at = first = self._read_up_to if 0 <= offset - self._read_up_to < _LONGEST_TAIL else offset
        records: list[MessageExt] = []
        asked_at = time.monotonic()
        time.sleep(_VISIBLE_POLL_SECONDS)
        while at <= offset:
            pulled = self._call(self._pull_request(at), deadline)
            if [record.queue_offset for record in pulled.records] != list(range(at, at + len(pulled.records))):
                return  # `read` raises `PositionLost`
            records += pulled.records
            at += len(pulled.records)
            if not pulled.records:
                if pulled.next_offset > offset:
                    return  # dropped already
                if pulled.next_offset > at:
                    at, first, records = offset, offset, []  # the last record that was read is gone
                deadline.check("reading it back")
                time.sleep(_VISIBLE_POLL_SECONDS)
        self._tail = _Tail(first, records, asked_at)

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"a record may or may not be in the decision log {self._queue.topic}: {why}")

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """Yield the records from `first` (or the log's begin) to `last` (or the end, if the log ends before)."""
        start = first or self.begin(deadline)
        if start is None:
            return
        at, stop = start[0], last[0] if last else self._end_offset(deadline) - 1
        late: Deadline | None = None  # after it, the log counts as ended although `stop` is not reached
        while at <= stop:
            deadline.check(f"reading the decision log {self._queue.topic}")
            pulled = self._known(at, stop) or self._pull(at, deadline)
            self._check_gap(pulled, at)
            for record in pulled.records:
                if record.queue_offset != at:
                    raise self._lost(at)
                self._read_up_to = at
                with translated(f"the decision log {self._queue.topic}, reading record {at}"):
                    yield (at,), unpack_value(record) or b""
                at += 1
                if at > stop:
                    if (tail := self._tail) is not None and stop >= tail.end - 1:
                        self._tail = None
                    return
            if pulled.records:
                late = None
                continue
            stop = min(stop, self._end_offset(deadline) - 1)
            late = late or Deadline(_RESTARTED_BROKER_SECONDS)
            if late.expired:
                return
            time.sleep(_VISIBLE_POLL_SECONDS)

    def _known(self, at: int, stop: int) -> PullResult | None:
        """Return the records from `at` to `stop` if an append has read all of them, else None."""
        tail = self._tail
        if tail is None or not tail.first <= at <= stop < tail.end or time.monotonic() - tail.asked_at > _TAIL_SECONDS:
            return None
        records = tail.records[at - tail.first : stop + 1 - tail.first]
        return PullResult(PullStatus.FOUND, stop + 1, tail.first, tail.end, records)

    def _check_gap(self, pulled: PullResult, at: int) -> None:
        """Raise `PositionLost` if the broker skips offsets: queues have no gaps, so it dropped records (hazard H68)."""
        if not pulled.records and pulled.next_offset > at:
            raise self._lost(at)

    def _lost(self, at: int) -> PositionLost:
        return PositionLost(f"the decision log {self._queue.topic} was trimmed: the broker has dropped record {at}")

    def _pull(self, at: int, deadline: Deadline, count: int = read_requests.PULL_MOST) -> PullResult:
        return self._ask(self._pull_request(at, count), "reading it", deadline)

    def _pull_request(self, at: int, count: int = read_requests.PULL_MOST) -> RpcRequest[PullResult]:
        return read_requests.pull(self._queue.topic, self._queue.queue, at, GROUP, count)

    def trim(self, before: Position, deadline: Deadline) -> None:
        """Store `before` as the new begin of the log. The broker drops the older records by its retention."""
        request = groups.commit_offset(GROUP, self._queue.topic, self._queue.queue, before[0])
        self._ask(request, "storing its trim position", deadline)

    def _ask(self, request: RpcRequest[T], action: str, deadline: Deadline) -> T:
        return self._retry(lambda: self._call(request, deadline), action, deadline)

    def _call(self, request: RpcRequest[T], deadline: Deadline) -> T:
        return self._client.call(self._queue.broker, request, deadline.left())

    def _retry(self, attempt: Callable[[], T], action: str, deadline: Deadline) -> T:
        return retry(attempt, f"the decision log {self._queue.topic}, {action}", deadline, _translate)


@dataclass(frozen=True)
class _Tail:
    """Consecutive records that were read by requests since `asked_at`, a time by `time.monotonic()`."""

    first: int
    records: list[MessageExt]
    asked_at: float

    @property
    def end(self) -> int:
        return self.first + len(self.records)


def _translate(error: RemotingError, action: str) -> TxnBridgeError:
    if isinstance(error, ErrorResponse) and error.code == ResponseCode.TOPIC_NOT_EXIST:
        return BrokerUnavailable(f"{action}: the topic is missing: it was deleted, or the broker has just started")
    return translate(error, action)
