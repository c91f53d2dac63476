"""A reader whose client or broker fails while there are messages: it skips none. The client's messages are made up."""

from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import Message as Raw
from txnbridge_kafka.read import reader
from txnbridge_kafka.read.assignment import KafkaAssignment
from txnbridge_kafka.read.partition import KafkaPartition, PartitionReadState
from txnbridge_kafka.read.reader import KafkaReader
from txnbridge_kafka.settings import Timing

from tests.failing import answer_calls, raising
from txnbridge.errors import AccessDenied, BrokerUnavailable, PositionLost
from txnbridge.spi import Deadline, Subscription

pytestmark = pytest.mark.offline

PLACE = ("orders", 0)
NO_OFFSET, AUTO_OFFSET_RESET = -1001, -140  # librdkafka's numbers


def message(offset: int, error: KafkaError | None = None, topic: str = "orders") -> Any:
    make: Any = Raw
    return make(topic=topic, partition=0, offset=offset, value=b"v", error=error)


@pytest.fixture
def reader_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KafkaReader]:
    """Open a reader in a group whose client returns these batches, one for each call."""

    def open_reader(
        *batches: list[Any], topic_ids: Callable[..., Any] = lambda *_: {}, group: str | None = "billing"
    ) -> KafkaReader:
        partitions = {(m.topic(), 0): KafkaPartition((m.topic(), 0), {}) for batch in batches for m in batch}
        left = deque(batches)
        for each in partitions.values():
            each.state, each.next, each.topic_id = PartitionReadState.READING, 0, "1"
        state = {"partitions": partitions, "paused": set(), "errors": deque(), "prefetched": []}
        assignment = Mock(**state, revocations=0, fetch=lambda *_: left.popleft() if left else [])
        assignment.raise_later = lambda error, cause: assignment.errors.append(error)
        lookup = Mock(busy=False, **{"starts.owner.return_value": "the position of group 'billing'"})
        answer_calls(monkeypatch, reader, "KafkaAssignment", assignment)
        answer_calls(monkeypatch, reader, "KafkaGroupStartPositions")
        answer_calls(monkeypatch, reader, "StartLookup", lookup)
        answer_calls(monkeypatch, reader, "GroupRebalance", Mock(joins=False))
        cluster: Any = Mock(**{"settings.timing": Timing(), "requests.topic_ids": topic_ids})
        cluster.topics.partitions.return_value = 0
        read = Subscription(tuple(topic for topic, _ in partitions), group)
        return KafkaReader(read, Mock(), Mock(), cluster, Deadline(5))

    return open_reader


def test_a_poll_skips_no_message_while_the_broker_refuses_to_say_whether_the_topic_is_the_same(reader_of) -> None:
    """The login of that question is refused, because its password was changed; the client is logged in."""
    refuses = raising(AccessDenied("the login is refused"))
    reader = reader_of([message(0), message(1)], [message(2)], topic_ids=refuses)
    found, refused = list[int](), 0
    for _ in range(9):
        try:
            found += [each.position[0] for each in reader.poll(2, Deadline(0))]
        except AccessDenied:
            refused += 1
    assert found == [0, 1, 2] and refused


def test_a_reader_without_a_group_hands_out_nothing_before_the_topic_is_known_to_be_the_same(reader_of) -> None:
    """In a group each acknowledgement asks."""
    topic_ids = Mock(side_effect=[{}, BrokerUnavailable("no answer")])
    assert reader_of([message(0), message(1)], topic_ids=topic_ids, group=None).poll(2, Deadline(0)) == []
    lookup: Any = reader.StartLookup  # type: ignore[attr-defined]
    ((place, request),) = lookup().request.call_args.args[0].items()
    assert (place.partition, request.target, request.topic_id) == (PLACE, 0, "1")


def test_a_topic_that_was_made_anew_is_noticed_beside_one_that_was_just_asked_about(reader_of, monkeypatch) -> None:
    now, ids = [0.0], {"orders": "1", "audit": "1"}
    monkeypatch.setattr(reader, "time", Mock(monotonic=lambda: now[0]))
    batches = [message(0, topic="audit")], [message(0)], [message(1, topic="audit")]
    reading = reader_of(*batches, topic_ids=lambda *_: ids)
    assert len(reading.poll(1, Deadline(0))) == 1
    now[0], ids["audit"] = 1.0, "2"
    assert [len(reading.poll(1, Deadline(0))) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("code", [-199, -198, -170, 10])
def test_a_batch_that_the_client_cannot_read_is_told(reader_of, code: int) -> None:
    """The client fetches the batch again and again, and delivers nothing behind it."""
    broken: Any = KafkaError(code, "Decompression (codec 0x4) of message at 2 failed")
    with pytest.raises(BrokerUnavailable, match=r"reading orders: Decompression .* at 2 failed"):
        reader_of([message(2, broken)]).poll(2, Deadline(0))


def test_a_log_that_was_truncated_below_the_next_message_raises_position_lost_also_if_it_has_grown_again(reader_of):
    """The client compares the leaders' epochs, and names no offset."""
    truncated: Any = KafkaError(AUTO_OFFSET_RESET, "log truncation detected: broker end offset is 1")
    reader = reader_of([message(0), message(1)], [message(NO_OFFSET, truncated)])
    assert [each.position for each in reader.poll(2, Deadline(0))] == [(0,), (1,)]
    for _ in range(2):
        with pytest.raises(PositionLost, match=r"position of group 'billing' is 2 in orders\[0\].*truncat.*seek"):
            reader.poll(2, Deadline(5))
    assert reader.positions() == {PLACE: (2,)}
    fetched = Mock(prefetched=[message(NO_OFFSET, truncated)])
    assert KafkaAssignment.client_position(fetched, KafkaPartition(PLACE, {})) == 0
