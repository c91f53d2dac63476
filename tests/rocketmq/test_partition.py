"""Tests of a reader's partition with responses that a broker seldom gives."""

import struct
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from txnbridge_rocketmq.client.errors import Disconnected, ErrorResponse
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import Property, RequestCode
from txnbridge_rocketmq.client.protocol.read_requests import PullResult, PullStatus
from txnbridge_rocketmq.client.protocol.records import MessageExt, decode_records, unwrap
from txnbridge_rocketmq.read.partition import QueueReader
from txnbridge_rocketmq.read.verifiable_offset import ReferenceRecord, VerifiableOffset
from txnbridge_rocketmq.settings import RocketMQTiming
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, TransactionPlace, properties, unique_key

from tests.rocketmq.kit import batched, pairs, stored
from txnbridge.errors import AccessDenied, NotFound, NotSupported, PositionLost

pytestmark = pytest.mark.offline

QUICK = RocketMQTiming(pull_pause=0.0, missing_timeout=0.05)


def record(offset: int, body: bytes = b"x", properties: str = "", **more: Any) -> MessageExt:
    (found,) = decode_records(
        stored(body, "orders", properties, queue=0, queue_offset=offset, log_offset=1000 + offset, **more)
    )
    return found


def found(*records: MessageExt, begin: int = 0, end: int = 100) -> PullResult:
    return PullResult(PullStatus.FOUND, records[-1].queue_offset + 1, begin, end, list(records))


def nothing(at: int) -> PullResult:
    return PullResult(PullStatus.NOTHING_NEW, at, 0, at, [])


@dataclass
class Answer:
    """A call with a response or an error, or one that never ends."""

    given: Any
    is_none: bool = False

    def done(self):
        return self.is_none or self.given is not None

    def result(self):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@dataclass
class Broker:
    """Answers requests from lists, in order, and then no more."""

    pulls: list[Any]
    lookups: list[Any] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    references: list[Any] = field(default_factory=list)
    begin: int = 0

    def submit(self, broker, request, timeout):
        assert broker == "broker-1"
        self.asked.append(request)
        if request.code == RequestCode.QUERY_CONSUME_QUEUE:  # by default, the commit log offset that `record` gives
            return Answer(
                self.references.pop(0) if self.references else 1000 + int(request.fields["index"]), is_none=True
            )
        if request.code == RequestCode.GET_MIN_OFFSET:
            return Answer(self.begin)
        answers = self.pulls if request.code == RequestCode.PULL_MESSAGE else self.lookups
        return Answer(answers.pop(0) if answers else None)

    def offsets(self):
        return [int(each.fields["queueOffset"]) for each in self.asked if each.code == RequestCode.PULL_MESSAGE]


def reading(*pulls: Any, at: int = 0, lookups: Any = (), timing: RocketMQTiming = QUICK) -> tuple[QueueReader, Broker]:
    cursor = QueueReader(("orders", 0), Queue("orders", "broker-1", 0), timing)
    broker = Broker(list(pulls), list(lookups))
    cursor.continue_at(VerifiableOffset(at))
    return cursor, broker


def go(cursor: QueueReader, broker: Broker, rounds: int = 20) -> list[Any]:
    """Send requests, process responses, and return the messages handed out."""
    messages = []
    for _ in range(rounds):
        cursor.send_pulls(broker.submit)
        cursor.process_responses()
        while cursor.has_message and (message := cursor.hand_out()) is not None:
            messages.append((message.position[0], message.value, message.deliveries))
    return messages


def test_several_requests_are_under_way_while_more_is_waiting_than_one_brings():
    first = found(*(record(offset) for offset in range(32)), end=100)
    cursor, broker = reading(first)
    go(cursor, broker)
    assert broker.offsets() == [0, 32, 64, 96]


def test_only_one_request_waits_at_the_end_of_a_queue():
    cursor, broker = reading(found(record(0), record(1), end=2), nothing(2))
    assert go(cursor, broker) == [(0, b"x", 1), (1, b"x", 1)]
    assert broker.offsets() == [0, 2, 2]
    waits = [int(each.fields["suspendTimeoutMillis"]) for each in broker.asked if each.code == RequestCode.PULL_MESSAGE]
    assert [wait > 0 for wait in waits] == [True, True, True]


class Bounded(Broker):
    """Has 300 messages of one transaction. A response has as many as `room` returns."""

    def __init__(self, room):
        super().__init__([])
        self._room = room

    def submit(self, broker, request, timeout):
        answer = super().submit(broker, request, timeout)
        if request.code != RequestCode.PULL_MESSAGE:
            return answer
        first, count = (int(request.fields[name]) for name in ("queueOffset", "maxMsgNums"))
        last = min(first + min(count, self._room()), 300)
        return Answer(found(*map(marked, range(first, last)), end=300) if first < 300 else nothing(300))

    def before_the_end(self):
        return [offset for offset in self.offsets() if offset < 300]


def marks(number, **more):
    mark, origin = TransactionPlace("transaction", number), HalfOrigin({"at": [0], "id": "x"}, 0)
    return pairs(**properties(mark, origin), **{Property.UNIQUE_KEY: unique_key("orders", mark)}, **more)


def marked(offset):
    return record(offset, properties=marks(offset), prepared_offset=900 + offset, system_flag=8)


def test_a_pull_of_large_messages_asks_for_no_more_than_an_answer_has_room_for():
    broker = Bounded(lambda: 10)
    cursor, _ = reading()
    assert [offset for offset, *_ in go(cursor, broker, rounds=200)] == list(range(300))
    # The requests that were in flight after the first are wasted.
    assert len(broker.before_the_end()) < 300 / 10 + 10
    assert RequestCode.QUERY_MESSAGE not in [each.code for each in broker.asked]  # no look-up, as for a gap


def test_a_pull_asks_for_more_again_once_messages_are_small_again():
    rooms = iter([2, 2, *[32] * 1000])
    broker = Bounded(lambda: next(rooms))
    cursor, _ = reading(timing=replace(QUICK, full_responses=3))
    assert [offset for offset, *_ in go(cursor, broker, rounds=200)] == list(range(300))
    assert len(broker.before_the_end()) < 100


def test_an_answer_that_begins_before_what_was_asked_for_is_cut():
    cursor, broker = reading(found(*(record(offset) for offset in range(5))), at=3)
    assert [offset for offset, *_ in go(cursor, broker)] == [3, 4]


def test_messages_that_retention_removed_are_never_skipped():
    moved = PullResult(PullStatus.OUT_OF_RANGE, 7, 7, 20, [])
    cursor, broker = reading(moved, at=3)
    assert go(cursor, broker) == []
    assert isinstance(cursor.fault, PositionLost) and "(7,)" in str(cursor.fault)
    assert cursor.next == 3


# The second is an answer without the consume queue's file (OFFSET_FOUND_NULL).
@pytest.mark.parametrize("gap", [found(record(5)), PullResult(PullStatus.NOTHING_NEW, 50, 0, 100, [])])
def test_a_gap_is_no_reason_to_go_on_behind_it(gap):
    cursor, broker = reading(*[gap] * 1_000_000, at=3)
    while cursor.fault is None:
        assert go(cursor, broker) == []
    assert isinstance(cursor.fault, PositionLost) and cursor.next == 3


def test_a_queue_that_has_become_shorter_is_believed_when_it_stays_so():
    shorter = PullResult(PullStatus.OUT_OF_RANGE, 2, 0, 2, [])
    cursor, broker = reading(shorter, shorter, found(record(3), end=4), at=3)
    assert go(cursor, broker) == [(3, b"x", 1)]
    assert cursor.fault is None
    cursor, broker = reading(*[shorter] * 1_000_000, at=3)
    while cursor.fault is None:
        go(cursor, broker)
    assert isinstance(cursor.fault, PositionLost) and "ends at 2" in str(cursor.fault)


def test_the_deliveries_of_a_message_are_counted():
    cursor, broker = reading(found(record(0), record(1), end=2))
    go(cursor, broker)
    cursor.continue_at(VerifiableOffset(0))
    broker.pulls.append(found(record(0), record(1), end=2))
    assert go(cursor, broker) == [(0, b"x", 2), (1, b"x", 2)]


def test_an_answer_to_a_request_from_before_a_seek_counts_for_nothing():
    cursor, broker = reading(None)
    cursor.send_pulls(broker.submit)
    cursor.continue_at(VerifiableOffset(5))
    broker.pulls.append(found(record(5), end=6))
    assert go(cursor, broker) == [(5, b"x", 1)]


def test_a_refused_right_is_a_fault_and_a_lost_connection_is_none():
    for code, kind in ((16, AccessDenied), (17, NotFound)):
        cursor, broker = reading(ErrorResponse(code, "no", "reading"))
        go(cursor, broker)
        assert isinstance(cursor.fault, kind)
    cursor, broker = reading(Disconnected("gone"), found(record(0), end=1))
    assert go(cursor, broker) == []
    assert cursor.fault is None and cursor.is_cut_off
    cursor.is_cut_off = False
    assert go(cursor, broker) == [(0, b"x", 1)]


def test_messages_of_a_recreated_topic_raise_position_lost_before_they_are_handed_out():
    cursor, broker = reading(found(record(0), record(1), end=2), found(record(2), end=3))
    broker.references = [1001, 5001]
    assert go(cursor, broker) == [(0, b"x", 1), (1, b"x", 1)]
    assert isinstance(cursor.fault, PositionLost) and "created again" in str(cursor.fault)
    cursor.continue_at(VerifiableOffset(0))
    broker.pulls.append(found(record(0), end=1))
    assert go(cursor, broker) == [(0, b"x", 1)]  # it is another message than was handed out before


def test_a_position_whose_message_before_was_dropped_by_retention_is_believed():
    cursor, broker = reading(found(record(5), begin=5, end=6), at=5)
    cursor.continue_at(VerifiableOffset(5, ReferenceRecord(4, 1004)))
    broker.references, broker.begin = [None], 5
    assert go(cursor, broker) == [(5, b"x", 1)]
    assert cursor.fault is None


def test_a_broker_that_does_not_know_the_last_message_is_believed_when_it_stays_so():
    cursor, broker = reading(found(record(0), end=1), found(record(1), end=2))
    broker.references = [1000, None]
    assert go(cursor, broker) == [(0, b"x", 1), (1, b"x", 1)]
    cursor, broker = reading(found(record(0), end=1), found(record(1), end=2))
    broker.references = [1000, *[None] * 1_000_000]
    while cursor.fault is None:
        go(cursor, broker)
    assert isinstance(cursor.fault, PositionLost) and cursor.next == 1


def test_the_place_in_the_log_is_kept_with_the_position_of_a_delivered_message():
    pulled = found(*(record(offset) for offset in range(32)), end=32)
    cursor, broker = reading(pulled, timing=replace(QUICK, references=8))
    go(cursor, broker)
    assert cursor.position_at(32) == VerifiableOffset(32, ReferenceRecord(31, 1031))
    for end in range(1, 33):
        place = cursor.position_at(end)
        assert place.reference is not None and place.reference.log_offset == 1000 + place.reference.offset
        assert VerifiableOffset.of(place.position) == place


def test_a_body_that_cannot_be_unpacked_holds_its_place_until_a_seek_goes_on_behind_it():
    lz4 = record(1, system_flag=0x101)
    cursor, broker = reading(found(record(0), lz4, record(2), end=3))
    assert go(cursor, broker) == [(0, b"x", 1)]
    assert isinstance(cursor.fault, NotSupported) and "LZ4" in str(cursor.fault) and "(2,)" in str(cursor.fault)
    cursor.continue_at(VerifiableOffset(2))
    broker.pulls.append(found(record(2), end=3))
    assert go(cursor, broker) == [(2, b"x", 1)]


def test_the_messages_of_a_batch_have_places_of_their_own():
    body = batched(b"one", pairs(a="b")) + batched(b"two", "")
    batch = record(4, body, system_flag=0x40 | 0x80)
    assert batch.holds_several and not any(each.holds_several for each in unwrap(batch))
    cursor, broker = reading(found(batch, record(6), end=7), at=4)
    assert go(cursor, broker) == [(4, b"one", 1), (5, b"two", 1), (6, b"x", 1)]
    cursor.continue_at(VerifiableOffset(5))
    broker.pulls.append(found(batch, end=6))
    assert [value for _, value, _ in go(cursor, broker)] == [b"two"]


OWN = marks(0, **{Property.CHECKS: "1"})


def test_a_message_is_held_back_until_the_broker_has_told_whether_it_was_there_before():
    copy, original = (record(at, properties=OWN, system_flag=8) for at in (5, 2))
    cursor, broker = reading(found(copy, record(6), end=7), at=5, lookups=[None])
    assert go(cursor, broker) == []
    cursor, broker = reading(found(copy, record(6), end=7), at=5, lookups=[[original, copy]])
    assert [offset for offset, *_ in go(cursor, broker)] == [6]


def test_a_look_up_that_does_not_find_the_message_itself_proves_nothing():
    at_once = replace(QUICK, read_look_up_pause=0.0)
    copy, original = (record(at, properties=OWN, system_flag=8) for at in (5, 2))
    cursor, broker = reading(found(copy, end=6), at=5, lookups=[[], [], [original, copy]], timing=at_once)
    assert go(cursor, broker) == [] and cursor.next == 6 and not broker.lookups
    never = replace(at_once, index_timeout=-1.0)
    cursor, broker = reading(found(copy, end=6), at=5, lookups=[[], []], timing=never)
    assert go(cursor, broker) == []
    assert isinstance(cursor.fault, NotSupported) and "messageIndexEnable" in str(cursor.fault)


def test_a_batch_that_is_damaged_holds_its_place_behind_what_came_with_it():
    damaged = record(1, struct.pack(">i", 99), system_flag=0x40 | 0x80)
    cursor, broker = reading(found(record(0), damaged, end=2), found(damaged, end=2))
    assert go(cursor, broker) == [(0, b"x", 1)]
    assert isinstance(cursor.fault, NotSupported) and cursor.next == 1
