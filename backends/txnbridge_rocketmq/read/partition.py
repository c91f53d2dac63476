"""One partition as one reader sees it."""

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
from txnbridge_rocketmq.client.records import StoredMessage
from txnbridge_rocketmq.errors import translate
from txnbridge_rocketmq.read.anchored_position import Anchor, AnchoredPosition, topic_recreated
from txnbridge_rocketmq.read.duplicates import DuplicateFilter
from txnbridge_rocketmq.read.pull import WAIT_SECONDS, AnchorCheck, NotIndexed, QueuePull, Submit
from txnbridge_rocketmq.write.message_format import from_wire

_log = logging.getLogger("txnbridge.rocketmq.client")

# What was read ahead of one partition. Brokers give 32 messages at a time, so several requests are under way where
# more than those are waiting.
_AHEAD_MESSAGES = 500
_AHEAD_BYTES = 4 * 2**20
_MOST_REQUESTS = 8
# Of large messages an answer has fewer, and what was asked for behind them is thrown away. So many full answers pay for
# trying whether there may be more again.
_FULL_ANSWERS = 100
# How soon a request is repeated that failed, or that brought less than was to be expected.
_REST_SECONDS = 0.1
# A broker that has just started, or that is dropping old messages, says for a moment what is not so.
SURE_SECONDS = 3.0
# Of how many messages that were handed out it is known where the commit log has them: of older ones, of every second.
_ANCHORS = 2000
_COUNTS = 1000  # counts of deliveries that are kept without asking whether they are still needed


@dataclass(frozen=True)
class SeekTarget:
    """Where a partition is to go on; `chosen` by the user, who may also say where in a topic that was made anew."""

    at: int
    chosen: bool


class QueueReader:
    """One stay of one partition with a reader: what has been read, what was handed out, and where it goes on.

    What was read is handed out once the broker was asked behind it whether the queue still has an earlier record (the
    anchor): if it has, all of that was read from the same queue, and not from one that was made anew under its name.

    One thread uses it, but for `claims`, which the reader's guard protects, and `place`, which any thread calls.
    """

    def __init__(self, partition: Partition, queue: Queue) -> None:
        self.partition = partition
        self.queue = queue
        self.source: object = None
        self.paused = False
        self.fault: TxnBridgeError | None = None  # why nothing more comes until a seek
        self.target: SeekTarget | None = None  # where a seek wants it to go on, until that is settled
        self.settled = False
        self.moves = 0  # how many times it was moved
        # Acknowledged here, first and end of each: what became of it is not known yet.
        self.claims: list[tuple[int, int]] = []
        self.overtaken = False  # the group's position is another one than it was here
        self.is_cut_off = False  # the last request failed: somebody has to see to the connection
        self._duplicates = DuplicateFilter()
        self._fetches: deque[QueuePull] = deque()
        self._ready: deque[StoredMessage] = deque()
        self._bytes = 0
        self._read = self._behind = 0
        self._end = 0  # of the queue, when it was last heard of
        self._at_once = reading.PULL_MOST  # how many messages an answer has room for, as it seems
        self._full_answers = 0
        self.anchor: Anchor | None = None  # a record that was read, by which the queue is known
        self._last: Anchor | None = None  # the last record that was read
        self._sure = 0  # what was read before this offset is known to be of the anchor's queue
        self._is_unsure = False  # something has come since the broker was asked about the anchor
        self._check: tuple[AnchorCheck, int, Anchor | None] | None = None  # with what was read and the last by then
        self._missing_since: float | None = None
        self._anchors: list[Anchor] = []  # of what was handed out, in order
        self._rest_until = 0.0
        self._doubted_at: float | None = None
        self._highest = -1  # what comes below was handed out before, or was passed by a seek
        self._times: dict[int, int] = {}

    # --- where it stands ----------------------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The offset to hand out next."""
        if self.target is not None:
            return self.target.at
        return self._ready[0].queue_offset if self._ready else self._read

    @property
    def behind(self) -> int:
        """The offset behind the last message that was handed out."""
        return self._behind

    def place(self, end: int) -> AnchoredPosition:
        """Return an offset behind messages that were handed out as a place by which others know the queue."""
        anchors = self._anchors
        at = bisect_left(anchors, Anchor(end, 0))
        return AnchoredPosition(end, anchors[at - 1] if at else self.anchor)

    def unsettle(self, target: SeekTarget) -> None:
        """Hand out nothing until it is settled where it goes on."""
        self.target = target
        if target.chosen:
            self.anchor = None
        self.moves += 1
        self.settled = False
        self.fault = None

    def lose(self, fault: PositionLost) -> None:
        """Hand out nothing more until a seek: what comes is no repetition of what was handed out."""
        self.fault = fault
        self._highest = -1
        self._times.clear()

    def go_back(self, at: int) -> None:
        """Go on at an offset in what was read before."""
        self.go_on(AnchoredPosition(at, self.anchor))

    def go_on(self, place: AnchoredPosition) -> None:
        """Go on at a place, whatever was read before."""
        at = place.next
        self._fetches.clear()
        self._ready.clear()
        self._bytes = 0
        self._read = self._behind = at
        self._rest_until = 0.0
        self._doubted_at = self._missing_since = None
        self.anchor, self._last, self._check = place.anchor, None, None
        self._sure, self._is_unsure = at, False
        self._anchors = [anchor for anchor in self._anchors if anchor.offset < at]
        self.fault = self.target = None
        self.settled = True
        self.overtaken = False
        self.claims = [claim for claim in self.claims if claim[0] < at]

    @property
    def is_busy(self) -> bool:
        """Return whether something is to be done soon that nobody announces."""
        return time.monotonic() < self._rest_until or bool(self._fetches and self._fetches[0].pulled)

    # --- reading ------------------------------------------------------------------------------------------------------

    def ask(self, submit: Submit) -> None:
        """Have as many requests under way as there is room for what they may bring."""
        if self.paused or self.fault or not self.settled or self.is_cut_off or time.monotonic() < self._rest_until:
            return
        try:
            while self._has_room():
                at = self._fetches[-1].at + self._fetches[-1].count if self._fetches else self._read
                # Only one waits at the end of the queue: where there is nothing yet, no more than one will bring it.
                wait = 0.0 if self._fetches or at < self._end or self._doubted_at else WAIT_SECONDS
                self._fetches.append(QueuePull(submit, self.queue, at, self._at_once, wait))
            if self._is_unsure and self._check is None and self.anchor is not None:
                self._check = AnchorCheck(submit, self.queue, self.anchor), self._read, self._last
                self._is_unsure = False
        except RemotingError as error:
            self._fail(error)

    def _has_room(self) -> bool:
        if not self._fetches:
            return len(self._ready) < _AHEAD_MESSAGES and self._bytes < _AHEAD_BYTES
        asked = sum(fetch.count for fetch in self._fetches)
        return (
            self._fetches[-1].at + self._fetches[-1].count < self._end
            and len(self._fetches) < _MOST_REQUESTS
            and len(self._ready) + asked < _AHEAD_MESSAGES
            and self._bytes < _AHEAD_BYTES
        )

    def take_in(self) -> None:
        """Take what has come."""
        self._take_check()
        while self._fetches:
            fetch = self._fetches[0]
            if fetch.at != self._read:  # the answer before it had less, or more, than was asked for
                self._fetches.clear()
                return
            try:
                if not fetch.is_done(self._duplicates):
                    return
                self._fetches.popleft()
                self._take(fetch)
            except NotIndexed:
                self._fetches.clear()
                self.fault = NotSupported(
                    f"broker {self.queue.broker} does not find messages by their unique keys, so repeats cannot be told"
                    " from messages: set messageIndexEnable=true there, and messageIndexSafe=true if it was killed"
                )
            except CannotDecompress as error:
                self._fetches.clear()
                self.fault = self._cannot_read(self._read, error)
            except RemotingError as error:
                self._fetches.clear()
                self._fail(error)

    def _take(self, fetch: QueuePull) -> None:
        assert fetch.pulled is not None
        self._end = fetch.pulled.max_offset
        records = fetch.records
        if records:
            self._read += len(records)
            self._learn(fetch)
            self._doubted_at = None
            self._last = Anchor(records[-1].queue_offset, records[-1].log_offset)
            if self.anchor is None:  # nothing was read before, so nothing is skipped in whatever queue this is
                self.anchor, self._sure = self._last, self._read
            for record in fetch.without_duplicates(self._duplicates):
                self._ready.append(record)
                self._bytes += len(record.body)
        elif fetch.pulled.status is not PullStatus.NOTHING_NEW:
            self._doubt(fetch.pulled)
        self._is_unsure = self.anchor is not None

    def _take_check(self) -> None:
        """Take what the broker has said of the anchor."""
        if self._check is None:
            return
        check, read, last = self._check
        try:
            if not check.is_done():
                return
            found = check.found()
        except RemotingError as error:
            self._check, self._is_unsure = None, True
            self._fail(error)
            return
        self._check = None
        if found:
            self._sure, self.anchor, self._missing_since = read, last or self.anchor, None
            return
        self._is_unsure = True
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        self._rest_until = now + _REST_SECONDS
        if found is False or now - self._missing_since >= SURE_SECONDS:
            assert self.anchor is not None
            self.lose(topic_recreated("the position", self.partition, self.next, self.anchor))

    def _learn(self, fetch: QueuePull) -> None:
        """How many messages to ask for at once."""
        if len(fetch.records) >= fetch.count:
            self._full_answers += 1
            if self._full_answers >= _FULL_ANSWERS:
                self._at_once, self._full_answers = min(2 * self._at_once, reading.PULL_MOST), 0
        elif self._read < self._end:
            self._at_once, self._full_answers = len(fetch.records), 0

    def _doubt(self, pulled: PullResult) -> None:
        """There is no message where one should be. Nothing is ever skipped for that."""
        now = time.monotonic()
        self._doubted_at = self._doubted_at or now
        self._rest_until = now + _REST_SECONDS
        self._fetches.clear()
        if self._read < pulled.min_offset or now - self._doubted_at >= SURE_SECONDS:
            found = out_of_range("the position", self.partition, self._read, pulled.min_offset, pulled.max_offset)
            self.lose(PositionLost(found))

    def _fail(self, error: RemotingError) -> None:
        refused = translate(error, f"reading {self.partition[0]}[{self.partition[1]}]")
        if isinstance(refused, BrokerUnavailable):
            _log.debug("waited out: %s", error)
            self.is_cut_off = not isinstance(error, ErrorResponse)
        else:
            refused.__cause__ = error
            self.fault = refused
        self._rest_until = time.monotonic() + _REST_SECONDS

    # --- handing out --------------------------------------------------------------------------------------------------

    @property
    def has_some(self) -> bool:
        """Return whether something can be handed out."""
        if self.paused or not self.settled or self.fault is not None or not self._ready:
            return False
        return self._ready[0].queue_offset < self._sure

    def hand_out(self) -> Message | None:
        """The next message; None if it cannot be read, and then `fault` says why."""
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

    def _note_anchor(self, record: StoredMessage) -> None:
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
        """How many times an offset that was handed out before is handed out with this one."""
        count = self._times[offset] = self._times.get(offset, 1) + 1
        if len(self._times) > _COUNTS:
            # The lowest were given back longest ago, or are acknowledged by now.
            for old in sorted(self._times)[: _COUNTS // 2]:
                del self._times[old]
        return count


def out_of_range(owner: str, partition: Partition, at: int, begin: int, end: int) -> str:
    """The text for a position that the broker does not have."""
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
