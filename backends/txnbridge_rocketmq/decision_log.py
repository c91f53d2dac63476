"""Decision logs: topics with one queue, on one broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from txnbridge.errors import BrokerUnavailable, OutcomeUnknown, PositionLost, TxnBridgeError
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge_rocketmq import client as remoting
from txnbridge_rocketmq.client import Answer, Queue, groups, reading
from txnbridge_rocketmq.client.retry import again
from txnbridge_rocketmq.errors import translate, translated
from txnbridge_rocketmq.write.message_format import pack_value, unpack_value

T = TypeVar("T")

# Nobody is a member of this group. Brokers want a name in every request, and keep for it up to where a log was trimmed.
GROUP = "txnbridge-log"
# A stored record can be read a moment later: a millisecond, mostly.
_LOOK_SECONDS = 0.001
# Answers of 256 KB at most that are asked for before they are needed.
_AHEAD = 8
# A broker that has just started may know of fewer records for a moment.
_LATE = 2.0


class RocketMQLog(DecisionLog):
    """One log. A position is the record's offset in its queue. Any thread may call."""

    origin = (0,)
    numbered = True

    def __init__(self, client: remoting.Client, queue: Queue, keeps: float | None = None) -> None:
        """The queue is the only one of its topic, which is there (`Topics.internal`)."""
        self._client = client
        self._queue = queue
        self.keeps = keeps

    # --- where it begins and ends -------------------------------------------------------------------------------------

    def begin(self, deadline: Deadline) -> Position | None:
        at, following = self._bounds(deadline)
        trimmed = self._trimmed(deadline)
        # A broker that was killed may remember an older one, and one that lost messages a later one.
        at = max(at, trimmed) if trimmed < following else at
        while at < following:
            # The first offset is corrected some time after its record was dropped: so it is read.
            pulled = self._pull(at, deadline, count=1)
            if pulled.records:
                return (pulled.records[0].queue_offset,)
            at = self._further(pulled, at)
            deadline.check(f"looking for the begin of the decision log {self._queue.topic}")
        return None

    def _further(self, pulled: remoting.Pulled, at: int) -> int:
        if pulled.next_offset > at:
            return pulled.next_offset
        time.sleep(_LOOK_SECONDS)
        return at

    def end(self, deadline: Deadline) -> Position | None:
        first, following = self._bounds(deadline)
        return (following - 1,) if first < following else None

    def was_used(self, deadline: Deadline) -> bool:
        """Whether there ever was a record, gone or not."""
        return self._bounds(deadline)[1] > 0

    def _bounds(self, deadline: Deadline) -> tuple[int, int]:
        """The offset of the first record, as far as the broker knows, and the one that the next will have."""
        ask = "asking where it begins and ends"
        first = self._again(lambda: self._call(reading.min_offset(self._queue.topic, 0), deadline), ask, deadline)
        return max(first, 0), self._following(deadline)

    def _trimmed(self, deadline: Deadline) -> int:
        request = groups.committed_offset(GROUP, self._queue.topic, self._queue.queue)
        return self._again(lambda: self._call(request, deadline), "asking where it was trimmed", deadline) or 0

    def _following(self, deadline: Deadline) -> int:
        what = "asking where it ends"
        return self._again(lambda: self._call(reading.max_offset(self._queue.topic, 0), deadline), what, deadline)

    # --- appending ----------------------------------------------------------------------------------------------------

    def append(self, record: bytes, deadline: Deadline) -> Position:
        body, properties = pack_value(record)
        message = remoting.Message(self._queue.topic, body, properties)
        offset = self._again(lambda: self._sent(message, deadline), "appending to it", deadline).queue_offset
        try:
            while self._following(deadline) <= offset:  # until then a reading would end before it
                deadline.check("reading it back")
                time.sleep(_LOOK_SECONDS)
        except TxnBridgeError as error:  # it is stored, so nobody may be told that nothing was
            raise self._unknown(str(error)) from error
        return (offset,)

    def _sent(self, message: remoting.Message, deadline: Deadline) -> remoting.Stored:
        """Raises an error of the client if nothing was stored, `OutcomeUnknown` otherwise."""
        try:
            return self._call(remoting.send(message, GROUP, self._queue.queue), deadline)
        except remoting.RemotingError as error:
            if error.may_have_had_effect:  # also if the record is stored, but not as safely as the broker is told to
                raise self._unknown(str(error)) from error
            raise

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"a record may or may not be in the decision log {self._queue.topic}: {why}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterator[tuple[Position, bytes]]:
        """As the contract says. Ends early where the log ends before `last`."""
        start = first or self.begin(deadline)
        if start is None:
            return
        at, stop = start[0], last[0] if last else self._following(deadline) - 1
        late: Deadline | None = None  # by when more must have come
        ahead = _Ahead(self._submit, stop)
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
            stop = min(stop, self._following(deadline) - 1)
            late = late or Deadline(_LATE)
            if late.expired:
                return
            time.sleep(_LOOK_SECONDS)

    def _check_gap(self, pulled: remoting.Pulled, at: int) -> None:
        """Records are numbered without gaps; where the broker sends us further on, those before are dropped."""
        if not pulled.records and pulled.next_offset > at:
            raise self._lost(at)

    def _lost(self, at: int) -> PositionLost:
        return PositionLost(f"the decision log {self._queue.topic} was trimmed: there is no record {at} any more")

    def _submit(self, at: int, deadline: Deadline) -> remoting.Call[remoting.Pulled]:
        request = reading.pull(self._queue.topic, self._queue.queue, at, GROUP)
        return self._client.submit(self._queue.broker, request, deadline.left())

    def _pull(self, at: int, deadline: Deadline, count: int = reading.PULL_MOST) -> remoting.Pulled:
        request = reading.pull(self._queue.topic, self._queue.queue, at, GROUP, count)
        return self._again(lambda: self._call(request, deadline), "reading it", deadline)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def trim(self, before: Position, deadline: Deadline) -> None:
        """Note for all readers where the log begins. The broker drops records by their age alone: until then the
        records in front of that can still be read by their positions.
        """
        request = groups.commit_offset(GROUP, self._queue.topic, self._queue.queue, before[0])
        self._again(lambda: self._call(request, deadline), "noting where it begins", deadline)

    def _call(self, request: remoting.Request[T], deadline: Deadline) -> T:
        return self._client.call(self._queue.broker, request, deadline.left())

    def _again(self, attempt: Callable[[], T], what: str, deadline: Deadline) -> T:
        return again(attempt, f"the decision log {self._queue.topic}, {what}", deadline, _words)


class _Ahead:
    """Asks for the next records ahead: an answer has few, and waiting for each takes most of the time."""

    def __init__(self, submit: Callable[[int, Deadline], remoting.Call[remoting.Pulled]], stop: int) -> None:
        self._submit = submit
        self._stop = stop
        self._calls: dict[int, remoting.Call[remoting.Pulled]] = {}
        self._stride = reading.PULL_MOST  # how many records come at once; less where they are large

    def take(self, at: int, deadline: Deadline) -> remoting.Pulled | None:
        """What is there from this record on; None if that has to be asked for again."""
        self._calls = {offset: call for offset, call in self._calls.items() if offset >= at}
        try:
            for offset in range(at, min(self._stop + 1, at + _AHEAD * self._stride), self._stride):
                if offset not in self._calls:
                    self._calls[offset] = self._submit(offset, deadline)
            pulled = self._calls.pop(at).result()
        except remoting.RemotingError:
            self._calls.clear()
            return None
        self._stride = len(pulled.records) or self._stride
        return pulled


def _words(error: remoting.RemotingError, what: str) -> TxnBridgeError:
    if isinstance(error, remoting.Refused) and error.code == Answer.TOPIC_NOT_EXIST:
        return BrokerUnavailable(f"{what}: its topic is not there; it was deleted, or the broker has just started")
    return translate(error, what)
