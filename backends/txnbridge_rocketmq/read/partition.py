"""Reading one partition: requests messages ahead, filters and checks them, and hands them out in order."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from txnbridge.errors import BrokerUnavailable, NotSupported, PositionLost, TxnBridgeError
from txnbridge.spi import Message, Partition
from txnbridge_rocketmq.client.errors import CannotDecompress, ErrorResponse, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol import read_requests
from txnbridge_rocketmq.client.protocol.read_requests import PullResult, PullStatus
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.read.duplicates import DuplicateFilter
from txnbridge_rocketmq.read.pull import LONG_POLL_SECONDS, NotIndexed, QueuePull, SameQueueCheck, Submit
from txnbridge_rocketmq.read.verifiable_offset import ReferenceRecord, VerifiableOffset, topic_recreated
from txnbridge_rocketmq.settings import RocketMQTiming
from txnbridge_rocketmq.write.message_format import from_wire

_log = logging.getLogger("txnbridge.rocketmq.client")

# Limits for the messages that are read ahead from one partition, and for the pull requests in flight: a broker returns
# 32 messages at a time, so a reader sends several requests at once.
_MOST_READ_AHEAD = 500
_MOST_READ_AHEAD_BYTES = 4 * 2**20
_MOST_PULLS = 8
# The number of redelivered messages whose delivery counts are kept.
_MOST_DELIVERY_COUNTS = 1000


@dataclass(frozen=True)
class SeekTarget:
    """The offset to continue at. If the user has `chosen` it by a seek, it is also valid in a recreated topic."""

    at: int
    chosen: bool


class QueueReader:
    """One partition while it is assigned to a reader: the records read ahead, and the next position.

    Records are handed out only after a later check for the reference record, which was read earlier. If the queue still
    has the reference record, the new records are not from a recreated topic (hazard H80).

    Only the polling thread uses this object, except `undecided_acks` (any thread that has the reader's lock) and
    `position_at` (any thread).
    """

    def __init__(self, partition: Partition, queue: Queue, timing: RocketMQTiming) -> None:
        self._timing = timing
        self.partition = partition
        self.queue = queue
        self.source: object = None
        self.paused = False
        self.fault: TxnBridgeError | None = None  # the error after which nothing is handed out until a seek
        self.target: SeekTarget | None = None  # of a seek that the background task has not carried out yet
        self.settled = False  # whether the position is known; nothing is read before
        self.moves = 0  # how many times `unsettle` was called
        # First and end offset of acknowledgements whose transactions may be undecided.
        self.undecided_acks: list[tuple[int, int]] = []
        self.overtaken = False  # another member has moved the group's position
        self.is_cut_off = False  # the broker is unreachable; nothing is sent until the background task reaches it
        self._duplicates = DuplicateFilter(timing.remembered_messages)
        self._pulls: deque[QueuePull] = deque()
        self._ready: deque[MessageExt] = deque()
        self._bytes = 0
        self._read = self.delivered_end = 0  # `delivered_end` is the offset after the last message handed out
        self._end = 0  # the end of the queue in the last response
        self._pull_size = read_requests.PULL_MOST  # estimated number of messages that fit into one response
        self._full_answers = 0
        self.reference: ReferenceRecord | None = None
        self._last: ReferenceRecord | None = None  # the last record that was read
        self._verified_end = 0  # records before this offset are not from a recreated topic
        self._needs_check = False  # whether records have arrived since the last check was sent
        # The check in flight, with the read offset and the last record at the time of sending.
        self._check: tuple[SameQueueCheck, int, ReferenceRecord | None] | None = None
        self._missing_since: float | None = None
        self._references: list[ReferenceRecord] = []  # messages that were handed out, in order
        self._paused_until = 0.0
        self._gap_since: float | None = None
        self._highest = -1  # messages before this offset count as redelivered
        self._deliveries: dict[int, int] = {}

    # --- position -----------------------------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The offset of the next message to hand out."""
        if self.target is not None:
            return self.target.at
        return self._ready[0].queue_offset if self._ready else self._read

    def position_at(self, end: int) -> VerifiableOffset:
        """Return the position of the offset `end`, to acknowledge it; the message before is its reference record."""
        references = self._references
        at = bisect_left(references, ReferenceRecord(end, 0))
        return VerifiableOffset(end, references[at - 1] if at else self.reference)

    def unsettle(self, target: SeekTarget) -> None:
        """Hand out no messages until a task has looked up the position of `target` and has called `continue_at`."""
        self.target = target
        if target.chosen:
            self.reference = None
        self.moves += 1
        self.settled = False
        self.fault = None

    def fail_until_seek(self, fault: PositionLost) -> None:
        """Let `poll` raise `fault` until a seek. Messages after the seek do not count as redelivered."""
        self.fault = fault
        self._highest = -1
        self._deliveries.clear()

    def go_back(self, at: int) -> None:
        """Continue at an offset that was read before; the reference record stays the same."""
        self.continue_at(VerifiableOffset(at, self.reference))

    def continue_at(self, position: VerifiableOffset) -> None:
        """Continue at a position, and drop all records that were read ahead of the polls."""
        at = position.next
        self._pulls.clear()
        self._ready.clear()
        self._bytes = 0
        self._read = self.delivered_end = at
        self._paused_until = 0.0
        self._gap_since = self._missing_since = None
        self.reference, self._last, self._check = position.reference, None, None
        self._verified_end, self._needs_check = at, False
        self._references = [reference for reference in self._references if reference.offset < at]
        self.fault = self.target = None
        self.settled = True
        self.overtaken = False
        self.undecided_acks = [acked for acked in self.undecided_acks if acked[0] < at]

    @property
    def needs_early_poll(self) -> bool:
        """Whether `poll` must look again soon without waiting for a response: a pause ends, or look-ups are due."""
        return time.monotonic() < self._paused_until or bool(self._pulls and self._pulls[0].pulled)

    # --- reading ------------------------------------------------------------------------------------------------------

    def send_pulls(self, submit: Submit) -> None:
        """Send pull requests while there is room for messages, and, if due, the check for a recreated topic."""
        if self.paused or self.fault or not self.settled or self.is_cut_off or time.monotonic() < self._paused_until:
            return
        try:
            while self._has_room():
                at = self._pulls[-1].at + self._pulls[-1].count if self._pulls else self._read
                # Only one request waits at the broker for new messages. Several would all return the same message.
                wait = 0.0 if self._pulls or at < self._end or self._gap_since else LONG_POLL_SECONDS
                self._pulls.append(QueuePull(submit, self.queue, at, self._pull_size, wait, self._timing))
            if self._needs_check and self._check is None and self.reference is not None:
                self._check = SameQueueCheck(submit, self.queue, self.reference), self._read, self._last
                self._needs_check = False
        except RemotingError as error:
            self._fail(error)

    def _has_room(self) -> bool:
        if not self._pulls:
            return len(self._ready) < _MOST_READ_AHEAD and self._bytes < _MOST_READ_AHEAD_BYTES
        return (
            self._pulls[-1].at + self._pulls[-1].count < self._end
            and len(self._pulls) < _MOST_PULLS
            and len(self._ready) + sum(pull.count for pull in self._pulls) < _MOST_READ_AHEAD
            and self._bytes < _MOST_READ_AHEAD_BYTES
        )

    def process_responses(self) -> None:
        """Process the responses that have arrived, without waiting. Errors are kept in `fault`, for `poll` to raise."""
        self._take_check()
        while self._pulls:
            pull = self._pulls[0]
            if pull.at != self._read:  # the previous response brought fewer or more messages than requested
                self._pulls.clear()
                return
            try:
                if not pull.is_done(self._duplicates):
                    return
                self._pulls.popleft()
                self._take(pull)
            except NotIndexed:
                self._pulls.clear()
                self.fault = NotSupported(
                    f"broker {self.queue.broker} does not find messages by their unique keys, so duplicates are not"
                    " recognized: set messageIndexEnable=true there, and messageIndexSafe=true if it was killed"
                )
            except CannotDecompress as error:
                self._pulls.clear()
                self.fault = self._cannot_read(self._read, error)
            except RemotingError as error:
                self._pulls.clear()
                self._fail(error)

    def _take(self, pull: QueuePull) -> None:
        assert pull.pulled is not None
        self._end = pull.pulled.max_offset
        records = pull.records
        if records:
            self._read += len(records)
            self._adjust_pull_size(pull)
            self._gap_since = None
            self._last = ReferenceRecord(records[-1].queue_offset, records[-1].log_offset)
            if self.reference is None:  # no record was read before, so these cannot be from another topic
                self.reference, self._verified_end = self._last, self._read
            for record in pull.without_duplicates(self._duplicates):
                self._ready.append(record)
                self._bytes += len(record.body)
        elif pull.pulled.status is not PullStatus.NOTHING_NEW or pull.pulled.next_offset > self._read:
            self._handle_missing_record(pull.pulled)
        self._needs_check = self.reference is not None

    def _take_check(self) -> None:
        """Process the result of the check whether the topic was recreated, by a record that was read before.

        If the queue has the record, the records read before the check may be handed out. If the topic was recreated, or
        the record stays missing for some seconds, set `fault`.
        """
        if self._check is None:
            return
        check, read, last = self._check
        try:
            if not check.is_done():
                return
            is_same_queue = check.is_same_queue()
        except RemotingError as error:
            self._check, self._needs_check = None, True
            self._fail(error)
            return
        self._check = None
        if is_same_queue:
            self._verified_end, self.reference, self._missing_since = read, last or self.reference, None
            return
        self._needs_check = True
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        self._paused_until = now + self._timing.pull_pause
        if is_same_queue is False or now - self._missing_since >= self._timing.missing_timeout:
            assert self.reference is not None
            self.fail_until_seek(topic_recreated("the position", self.partition, self.next, self.reference))

    def _adjust_pull_size(self, pull: QueuePull) -> None:
        """Let the next pull ask for as many messages as this one returned.

        After several pulls that returned all requested messages, double the number.
        """
        if len(pull.records) >= pull.count:
            self._full_answers += 1
            if self._full_answers >= self._timing.full_responses:
                self._pull_size, self._full_answers = min(2 * self._pull_size, read_requests.PULL_MOST), 0
        elif self._read < self._end:
            self._pull_size, self._full_answers = len(pull.records), 0

    def _handle_missing_record(self, pulled: PullResult) -> None:
        """Wait before a record that the broker did not return is requested again. After some seconds set `fault`."""
        now = time.monotonic()
        self._gap_since = self._gap_since or now
        self._paused_until = now + self._timing.pull_pause
        self._pulls.clear()
        if self._read < pulled.min_offset or now - self._gap_since >= self._timing.missing_timeout:
            text = out_of_range("the position", self.partition, self._read, pulled.min_offset, pulled.max_offset)
            self.fail_until_seek(PositionLost(text))

    def _fail(self, error: RemotingError) -> None:
        refused = translate(error, f"reading {self.partition[0]}[{self.partition[1]}]")
        if isinstance(refused, BrokerUnavailable):
            _log.debug("reading is tried again: %s", error)
            self.is_cut_off = not isinstance(error, ErrorResponse)
        else:
            refused.__cause__ = error
            self.fault = refused
        self._paused_until = time.monotonic() + self._timing.pull_pause

    # --- handing out --------------------------------------------------------------------------------------------------

    @property
    def has_message(self) -> bool:
        """Whether a message is ready to be handed out by `hand_out`."""
        if self.paused or not self.settled or self.fault is not None or not self._ready:
            return False
        return self._ready[0].queue_offset < self._verified_end

    def hand_out(self) -> Message | None:
        """Return the next message, if `has_message`. If it cannot be unpacked, set `fault` and return None."""
        record = self._ready[0]
        try:
            message = from_wire(record, *self.partition, self.source)
        except CannotDecompress as error:
            self.fault = self._cannot_read(record.queue_offset, error)
            return None
        self._ready.popleft()
        self._bytes -= len(record.body)
        self.delivered_end = record.queue_offset + 1
        self._note_reference(record)
        if record.queue_offset < self._highest:
            return message._replace(deliveries=self._count(record.queue_offset))
        self._highest = self.delivered_end
        return message

    def _note_reference(self, record: MessageExt) -> None:
        self._references.append(ReferenceRecord(record.queue_offset, record.log_offset))
        if len(self._references) > self._timing.references:
            half = self._timing.references // 2
            self._references = self._references[:half:2] + self._references[half:]

    def _cannot_read(self, at: int, error: CannotDecompress) -> TxnBridgeError:
        topic, number = self.partition
        refused = NotSupported(
            f"{topic}[{number}] at {at}: {error}. Nothing was skipped: seek({{({topic!r}, {number}): ({at + 1},)}})"
            " continues after this message"
        )
        refused.__cause__ = error
        return refused

    def _count(self, offset: int) -> int:
        """Return how many times the message at this offset was delivered, including the present delivery."""
        count = self._deliveries[offset] = self._deliveries.get(offset, 1) + 1
        if len(self._deliveries) > _MOST_DELIVERY_COUNTS:
            # The lowest offsets were returned longest ago, or are acknowledged by now.
            for old in sorted(self._deliveries)[: _MOST_DELIVERY_COUNTS // 2]:
                del self._deliveries[old]
        return count


def out_of_range(owner: str, partition: Partition, at: int, begin: int, end: int) -> str:
    """Return the error text for the position `at` of `owner`, which is outside of the queue's `begin` to `end`."""
    topic, number = partition
    if at < begin:
        return (
            f"{owner} is {at} in {topic}[{number}], but the broker has dropped the messages before {begin} by their age"
            f" (fileReservedTime). Nothing was skipped: seek({{({topic!r}, {number}): ({begin},)}}) continues without"
            " the dropped messages"
        )
    if at > end:
        return (
            f"{owner} is {at} in {topic}[{number}], but the queue ends at {end}: the topic was deleted and created"
            " again, or the broker lost messages. Nothing was skipped: choose where to continue by"
            f" seek({{({topic!r}, {number}): (offset,)}})"
        )
    return (
        f"{owner} is {at} in {topic}[{number}], and the broker has no message there although its queue goes from"
        f" {begin} to {end}. Nothing was skipped: seek({{({topic!r}, {number}): (offset,)}}) continues elsewhere"
    )
