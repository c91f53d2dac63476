"""Tests of the filter for duplicates: by memory, and by the broker's look-ups."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from txnbridge_rocketmq.client.protocol.codes import Property
from txnbridge_rocketmq.client.protocol.records import MessageExt, OffsetId
from txnbridge_rocketmq.read.duplicates import DuplicateFilter
from txnbridge_rocketmq.write import transaction_properties
from txnbridge_rocketmq.write.transaction_properties import HalfOrigin, place_of, properties, unique_key

pytestmark = pytest.mark.offline

ORIGIN = HalfOrigin({"at": [0], "id": "x"}, 0)


@dataclass
class Queue:
    """A queue as a broker fills it. Halves are in the same commit log as the messages published from them."""

    records: list[MessageExt] = field(default_factory=list)
    log: int = 0
    halves: dict[int, list[int]] = field(default_factory=dict)  # commit log offsets of each half's copies, oldest first

    def store(self, number: int) -> None:
        self.log += 1
        self.halves[number] = [self.log]

    def copy(self, number: int) -> None:
        """Write an open half again, as in a round of check-backs."""
        self.log += 1
        self.halves[number].append(self.log)

    def publish(self, number: int | None, copy: int = 0) -> None:
        """Commit a copy of a half; None stores another client's message."""
        self.log += 1
        told, at = {"a": "b"}, 0
        if number is not None:
            mark, at = transaction_properties.TransactionPlace("t", number), self.halves[number][copy]
            told = {**properties(mark, ORIGIN), Property.UNIQUE_KEY: unique_key("t", mark)}
            if copy:
                told[Property.CHECKS] = str(copy)
        self.records.append(
            MessageExt(
                topic="t",
                queue=0,
                queue_offset=len(self.records),
                offset_id=OffsetId("127.0.0.1", 1, self.log),
                system_flag=8,
                born_time=0,
                stored_time=0,
                prepared_offset=at,
                properties=told,
                body=b"x",
            )
        )

    def first_ones(self, start: int) -> list[int]:
        """Return the offsets of the messages that are no duplicates, from an offset on."""
        seen, found = set(), []
        for record in self.records:
            mark = place_of(record)
            if mark is None or mark not in seen:
                found.append(record.queue_offset)
            seen.add(mark)
        return [offset for offset in found if offset >= start]


@dataclass
class Reading:
    """A reader of a queue that counts look-ups."""

    queue: Queue
    first: int = 0
    remembered: int = 10_000
    looked_up: int = 0

    def __post_init__(self) -> None:
        self.repeats = DuplicateFilter(self.remembered)

    def read(self, start: int, count: int) -> list[int]:
        batch = self.queue.records[start : start + count]
        suspects = self.repeats.suspects(batch, self.first)
        self.looked_up += len(suspects)
        found = {
            each.queue_offset: [other for other in self.queue.records if other.unique_key == each.unique_key]
            for each in suspects
        }
        return [record.queue_offset for record in self.repeats.sift(batch, found)]


def in_order(count: int) -> Queue:
    """Return a queue with messages whose halves are stored and published one after another."""
    queue = Queue()
    for number in range(count):
        queue.store(number)
        queue.publish(number)
    return queue


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "copy", "publish", "publish", "foreign"]), st.integers(0, 5), st.integers(0, 3)
    ),
    min_size=1,
    max_size=60,
)
READS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=8)


@pytest.mark.parametrize("remembered", [2, 10_000])
@given(steps=STEPS, reads=READS)
def test_only_the_first_copy_is_handed_out_wherever_a_reader_starts_and_goes_back_to(remembered, steps, reads):
    queue = Queue()
    for step, number, copy in steps:
        if step == "foreign":
            queue.publish(None)
        elif step == "store":
            if number not in queue.halves:
                queue.store(number)
        elif number in queue.halves and step == "copy":
            queue.copy(number)
        elif number in queue.halves:
            queue.publish(number, min(copy, len(queue.halves[number]) - 1))
    reading = Reading(queue, remembered=remembered)
    for start, count in reads:
        wanted = [offset for offset in queue.first_ones(start) if offset < start + count]
        assert reading.read(start, count) == wanted


def test_a_reader_from_the_queues_first_message_looks_nothing_up():
    reading = Reading(in_order(500))
    assert reading.read(0, 250) + reading.read(250, 250) == list(range(500))
    assert reading.looked_up == 0


def test_a_reader_from_the_middle_looks_up_messages_that_were_under_way_then():
    queue = Queue()
    for number in range(3):
        queue.store(number)
    queue.publish(0)
    queue.publish(1)
    for number in range(3, 100):
        queue.store(number)
        queue.publish(number)
    queue.publish(2)
    reading = Reading(queue)
    assert reading.read(1, 200) == list(range(1, 100))
    assert reading.looked_up == 2  # messages 1 and 2: their halves are before the first message that was read


def test_a_copy_that_comes_much_later_is_a_repeat_also_where_the_first_one_is_forgotten():
    queue = in_order(100)
    queue.publish(3)
    reading = Reading(queue, remembered=10)
    assert [offset for start in range(0, 101, 32) for offset in reading.read(start, 32)] == list(range(100))
    assert reading.looked_up == 1


def test_messages_of_others_are_never_taken_for_repeats():
    queue = Queue()
    for _ in range(3):
        queue.publish(None)
    assert Reading(queue, first=1).read(0, 3) == [0, 1, 2]


def test_messages_of_another_client_with_the_headers_of_one_of_ours_are_no_repeats():
    queue = in_order(1)
    (ours,) = queue.records
    # The last is sent on as it is.
    for number, key, flag in ((1, "1", 8), (2, "2", 8), (3, ours.properties[Property.UNIQUE_KEY], 0)):
        own = {**ours.properties, Property.UNIQUE_KEY: key}
        queue.records.append(replace(ours, queue_offset=number, system_flag=flag, properties=own))
    assert Reading(queue).read(0, 4) == [0, 1, 2, 3]
