"""A reader's state for one partition."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from txnbridge.errors import BrokerUnavailable, NotSupported, PositionLost, TxnBridgeError
from txnbridge.spi import Message, Partition
from txnbridge_rocketmq.client import reading
from txnbridge_rocketmq.client.errors import CannotDecompress, ErrorResponse, RemotingError
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.reading import PullResult, PullStatus
from txnbridge_rocketmq.client.records import MessageExt
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.read.anchored_offset import Anchor, AnchoredOffset, topic_recreated
from txnbridge_rocketmq.read.duplicates import DuplicateFilter
from txnbridge_rocketmq.read.pull import WAIT_SECONDS, AnchorCheck, NotIndexed, QueuePull, Submit
from txnbridge_rocketmq.write.message_format import from_wire

_log = logging.getLogger("txnbridge.rocketmq.client")

# Limits for messages that are read ahead from one partition. A broker returns 32 messages at a time, so a reader sends
# several requests at once.
_AHEAD_MESSAGES = 500
_AHEAD_BYTES = 4 * 2**20
_MOST_REQUESTS = 8
# A response holds fewer large messages, and further requests sent ahead are wasted. After this many full responses the
# reader requests more messages at once again.
_FULL_ANSWERS = 100
# The time before a failed or incomplete request is repeated.
_REST_SECONDS = 0.1
# Seconds for which a missing record is requested again. A broker that has just started, or is dropping old messages,
# may briefly report wrong bounds.
SURE_SECONDS = 3.0
# The number of delivered messages whose anchors are kept; beyond it, every second anchor is dropped.
_ANCHORS = 2000
_COUNTS = 1000  # the number of delivery counts that are kept


@dataclass(frozen=True)
class SeekTarget:
    """The offset at which to continue. If the user has `chosen` it, it is also valid in a recreated topic."""

    at: int
    chosen: bool


class QueueReader:
    """The state of one assignment of a partition to a reader: records read, messages handed out, and the next position.

    Records are handed out only after an anchor check that was made after reading them: if the queue still has the
    anchor, an earlier record, then all these records are from the same queue, and not from a recreated topic (hazard
    H80).

    One thread uses this object, except for `claims` (under the reader's guard) and `position_at` (for any thread).
    """

    def __init__(self, partition: Partition, queue: Queue) -> None:
        self.partition = partition
        self.queue = queue
        self.source: object = None
        self.paused = False
        self.fault: TxnBridgeError | None = None  # the error after which nothing is handed out until a seek
        self.target: SeekTarget | None = None  # the target of a seek that is not settled yet
        self.settled = False
        self.moves = 0  # how many times the position was changed
        # Begin and end of acknowledgements whose transactions are undecided.
        self.claims: list[tuple[int, int]] = []
        self.overtaken = False  # the group's position has been moved by another member
        self.is_cut_off = False  # the last request failed, so the connection has to be repaired
        self._duplicates = DuplicateFilter()
        self._pulls: deque[QueuePull] = deque()
        self._ready: deque[MessageExt] = deque()
        self._bytes = 0
        self._read = self._behind = 0
        self._end = 0  # the end of the queue in the last response
        self._pull_size = reading.PULL_MOST  # number of messages that fit into one response, estimated
        self._full_answers = 0
        self.anchor: Anchor | None = None  # a record that was read, which identifies the queue
        self._last: Anchor | None = None  # the last record that was read
        self._verified_end = 0  # records before this offset are known to be from the anchor's queue
        self._needs_check = False  # records have arrived since the last check of the anchor
        # The running anchor check, with the read offset and the last record at its start.
        self._check: tuple[AnchorCheck, int, Anchor | None] | None = None
        self._missing_since: float | None = None
        self._anchors: list[Anchor] = []  # of messages that were handed out, in order
        self._paused_until = 0.0
        self._gap_since: float | None = None
        self._highest = -1  # offsets below were handed out before, or skipped by a seek
        self._deliveries: dict[int, int] = {}

    # --- position -----------------------------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The offset of the next message to hand out."""
        if self.target is not None:
            return self.target.at
        return self._ready[0].queue_offset if self._ready else self._read

    @property
    def behind(self) -> int:
        """The offset after the last message that was handed out."""
        return self._behind

    def position_at(self, end: int) -> AnchoredOffset:
        """Return the anchored position at an offset up to which messages were handed out."""
        anchors = self._anchors
        at = bisect_left(anchors, Anchor(end, 0))
        return AnchoredOffset(end, anchors[at - 1] if at else self.anchor)

    def unsettle(self, target: SeekTarget) -> None:
        """Set the target of a seek. No message is handed out until the target is settled."""
        self.target = target
        if target.chosen:
            self.anchor = None
        self.moves += 1
        self.settled = False
        self.fault = None

    def fail_until_seek(self, fault: PositionLost) -> None:
        """Hand out no message until a seek. Messages after the seek do not count as redelivered."""
        self.fault = fault
        self._highest = -1
        self._deliveries.clear()

    def go_back(self, at: int) -> None:
        """Continue at an offset that was read before, with the same anchor."""
        self.continue_at(AnchoredOffset(at, self.anchor))

    def continue_at(self, position: AnchoredOffset) -> None:
        """Continue at a position, and drop all records that were read ahead."""
        at = position.next
        self._pulls.clear()
        self._ready.clear()
        self._bytes = 0
        self._read = self._behind = at
        self._paused_until = 0.0
        self._gap_since = self._missing_since = None
        self.anchor, self._last, self._check = position.anchor, None, None
        self._verified_end, self._needs_check = at, False
        self._anchors = [anchor for anchor in self._anchors if anchor.offset < at]
        self.fault = self.target = None
        self.settled = True
        self.overtaken = False
        self.claims = [claim for claim in self.claims if claim[0] < at]

    @property
    def is_busy(self) -> bool:
        """Return whether work is due soon without a response that would wake the reader."""
        return time.monotonic() < self._paused_until or bool(self._pulls and self._pulls[0].pulled)

    # --- reading ------------------------------------------------------------------------------------------------------

    def send_pulls(self, submit: Submit) -> None:
        """Send pull requests while there is room for their results."""
        if self.paused or self.fault or not self.settled or self.is_cut_off or time.monotonic() < self._paused_until:
            return
        try:
            while self._has_room():
                at = self._pulls[-1].at + self._pulls[-1].count if self._pulls else self._read
                # Only one request waits at the end of the queue. Several would all return the same message.
                wait = 0.0 if self._pulls or at < self._end or self._gap_since else WAIT_SECONDS
                self._pulls.append(QueuePull(submit, self.queue, at, self._pull_size, wait))
            if self._needs_check and self._check is None and self.anchor is not None:
                self._check = AnchorCheck(submit, self.queue, self.anchor), self._read, self._last
                self._needs_check = False
        except RemotingError as error:
            self._fail(error)

    def _has_room(self) -> bool:
        if not self._pulls:
            return len(self._ready) < _AHEAD_MESSAGES and self._bytes < _AHEAD_BYTES
        asked = sum(pull.count for pull in self._pulls)
        return (
            self._pulls[-1].at + self._pulls[-1].count < self._end
            and len(self._pulls) < _MOST_REQUESTS
            and len(self._ready) + asked < _AHEAD_MESSAGES
            and self._bytes < _AHEAD_BYTES
        )

    def process_responses(self) -> None:
        """Process the responses that have arrived."""
        self._take_check()
        while self._pulls:
            pull = self._pulls[0]
            if pull.at != self._read:  # the response before brought fewer or more messages than requested
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
                    f"broker {self.queue.broker} does not find messages by their unique keys, so repeats cannot be told"
                    " from messages: set messageIndexEnable=true there, and messageIndexSafe=true if it was killed"
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
            self._last = Anchor(records[-1].queue_offset, records[-1].log_offset)
            if self.anchor is None:  # no record was read before, so none can be missed
                self.anchor, self._verified_end = self._last, self._read
            for record in pull.without_duplicates(self._duplicates):
                self._ready.append(record)
                self._bytes += len(record.body)
        elif pull.pulled.status is not PullStatus.NOTHING_NEW:
            self._handle_missing_record(pull.pulled)
        self._needs_check = self.anchor is not None

    def _take_check(self) -> None:
        """Process the result of the anchor check."""
        if self._check is None:
            return
        check, read, last = self._check
        try:
            if not check.is_done():
                return
            has_anchor = check.has_anchor()
        except RemotingError as error:
            self._check, self._needs_check = None, True
            self._fail(error)
            return
        self._check = None
        if has_anchor:
            self._verified_end, self.anchor, self._missing_since = read, last or self.anchor, None
            return
        self._needs_check = True
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        self._paused_until = now + _REST_SECONDS
        if has_anchor is False or now - self._missing_since >= SURE_SECONDS:
            assert self.anchor is not None
            self.fail_until_seek(topic_recreated("the position", self.partition, self.next, self.anchor))

    def _adjust_pull_size(self, pull: QueuePull) -> None:
        """Adjust the number of messages to request at once to the number in a response."""
        if len(pull.records) >= pull.count:
            self._full_answers += 1
            if self._full_answers >= _FULL_ANSWERS:
                self._pull_size, self._full_answers = min(2 * self._pull_size, reading.PULL_MOST), 0
        elif self._read < self._end:
            self._pull_size, self._full_answers = len(pull.records), 0

    def _handle_missing_record(self, pulled: PullResult) -> None:
        """Handle a missing record: request it again, then set `fault`. Missing records are never skipped."""
        now = time.monotonic()
        self._gap_since = self._gap_since or now
        self._paused_until = now + _REST_SECONDS
        self._pulls.clear()
        if self._read < pulled.min_offset or now - self._gap_since >= SURE_SECONDS:
            text = out_of_range("the position", self.partition, self._read, pulled.min_offset, pulled.max_offset)
            self.fail_until_seek(PositionLost(text))

    def _fail(self, error: RemotingError) -> None:
        refused = translate(error, f"reading {self.partition[0]}[{self.partition[1]}]")
        if isinstance(refused, BrokerUnavailable):
            _log.debug("waited out: %s", error)
            self.is_cut_off = not isinstance(error, ErrorResponse)
        else:
            refused.__cause__ = error
            self.fault = refused
        self._paused_until = time.monotonic() + _REST_SECONDS

    # --- handing out --------------------------------------------------------------------------------------------------

    @property
    def has_message(self) -> bool:
        """Return whether a message can be handed out."""
        if self.paused or not self.settled or self.fault is not None or not self._ready:
            return False
        return self._ready[0].queue_offset < self._verified_end

    def hand_out(self) -> Message | None:
        """Return the next message; None if it cannot be read, and then `fault` is the reason."""
        record = self._ready[0]
        try:
            message = from_wire(record, *self.partition, self.source)
        except CannotDecompress as error:
            self.fault = self._cannot_read(record.queue_offset, error)
            return None
        self._ready.popleft()
        self._bytes -= len(record.body)
        self._behind = record.queue_offset + 1
        self._note_anchor(record)
        if record.queue_offset < self._highest:
            return message._replace(deliveries=self._count(record.queue_offset))
        self._highest = self._behind
        return message

    def _note_anchor(self, record: MessageExt) -> None:
        self._anchors.append(Anchor(record.queue_offset, record.log_offset))
        if len(self._anchors) > _ANCHORS:
            self._anchors = self._anchors[: _ANCHORS // 2 : 2] + self._anchors[_ANCHORS // 2 :]

    def _cannot_read(self, at: int, error: CannotDecompress) -> TxnBridgeError:
        topic, number = self.partition
        refused = NotSupported(
            f"{topic}[{number}] at {at}: {error}. Nothing was skipped: seek({{({topic!r}, {number}): ({at + 1},)}})"
            " goes on behind it"
        )
        refused.__cause__ = error
        return refused

    def _count(self, offset: int) -> int:
        """Return the delivery count of a message, by its offset, that was handed out before."""
        count = self._deliveries[offset] = self._deliveries.get(offset, 1) + 1
        if len(self._deliveries) > _COUNTS:
            # The lowest offsets were returned longest ago, or are acknowledged by now.
            for old in sorted(self._deliveries)[: _COUNTS // 2]:
                del self._deliveries[old]
        return count


def out_of_range(owner: str, partition: Partition, at: int, begin: int, end: int) -> str:
    """Return the error text for a position where the broker has no message."""
    topic, number = partition
    if at < begin:
        return (
            f"{owner} is {at} in {topic}[{number}], but everything before {begin} is gone: brokers drop messages by age"
            f" (fileReservedTime). Nothing was skipped: seek({{({topic!r}, {number}): ({begin},)}}) goes on there"
            " without what is gone"
        )
    if at > end:
        return (
            f"{owner} is {at} in {topic}[{number}], but the queue ends at {end}: the topic was deleted and made anew,"
            f" or the broker lost messages. Nothing was skipped: seek({{({topic!r}, {number}): (offset,)}}) says where"
            " to go on"
        )
    return (
        f"{owner} is {at} in {topic}[{number}], and the broker has no message there although its queue goes from"
        f" {begin} to {end}. Nothing was skipped: seek({{({topic!r}, {number}): (offset,)}}) says where to go on"
    )
