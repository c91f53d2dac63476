"""Reading without a group: exactly the committed messages, each partition in order."""

import shutil
import tempfile
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnbridge
from tests.core.reading_kit import Listener, rows
from tests.embedded import kit
from tests.embedded.test_writer import failing
from tests.in_time import within
from tests.keeping import keeping
from txnbridge.errors import InvalidOption, InvalidState, NotFound, PositionLost, StorageFailed
from txnbridge.spi import Deadline, Message, Subscription

ORDERS = ("orders", 0)


@pytest.fixture
def reading(broker):
    """Open readers without a group on topics that are made for them, closed at the end."""

    def open_one(*topics, start="earliest", listener=None):
        for topic in topics or ("orders",):
            with suppress(InvalidOption):  # it is there, with more partitions
                broker.admin.create_topic(topic, 1, Deadline(10))
        subscription = Subscription(topics or ("orders",), None, start)
        return broker.reader(subscription, listener or Listener(), Deadline(10))

    yield from keeping(open_one, lambda reader: reader.close(Deadline(10)))


def take(reader, count):
    """Exactly so many messages, in however many polls."""
    messages: list[Message] = []
    deadline = Deadline(20)
    while len(messages) < count:
        messages += reader.poll(count - len(messages), deadline)
        deadline.check(f"reading {count} messages, of which {len(messages)} came")
    return messages


def take_values(reader, count):
    return [message.value for message in take(reader, count)]


def test_a_reader_notices_that_its_file_was_replaced(broker, reading):
    reader = reading()
    copy = broker.store.path.with_suffix(".copy")
    shutil.copy(broker.store.path, copy)
    copy.rename(broker.store.path)
    with pytest.raises(StorageFailed, match="moved or replaced"):
        take(reader, 1)


texts = st.none() | st.binary(max_size=3)
sent = st.tuples(
    st.integers(0, 1), texts, texts, st.none() | st.lists(st.tuples(st.text(min_size=1, max_size=2), texts), max_size=2)
)


@given(st.lists(st.tuples(st.booleans(), st.lists(sent, min_size=1, max_size=6))), st.integers(1, 7), st.integers(0, 5))
def test_columns_have_the_same_rows_as_messages(transactions, most, start):
    with tempfile.TemporaryDirectory() as folder:
        with txnbridge.connect(f"embedded:{folder}/b.db", create_topics=2) as bridge:
            bridge.ensure_topics("orders")
            for commits, messages in transactions:
                with bridge.transaction() as txn:
                    for partition, key, value, headers in messages:
                        txn.send("orders", value, key=key, headers=headers, partition=partition, timestamp=partition)
                    if not commits:
                        txn.abort()
            one, other = bridge.consumer("orders"), bridge.consumer("orders")
            for consumer in (one, other):
                _, (end,) = bridge.admin.bounds("orders")["orders", 1]
                consumer.seek({("orders", 1): (min(start, end),)})
            while messages := [message._replace(source=None) for message in one.poll(most, 0)]:
                assert [row for columns in other.poll_columns(most, 0) for row in rows(columns)] == messages
                assert other.positions() == one.positions()
            assert other.poll_columns(most, 0) == []


def test_an_aborted_message_is_never_seen_and_leaves_no_lag(broker, reading):
    reader = reading()
    token = kit.prepare(broker, "orders", b"aborted", b"aborted")
    kit.commit(kit.open_writer(broker), "orders", b"after")
    broker.abort(token, kit.NO_LEDGER, Deadline(10))
    assert take_values(reader, 1) == [b"after"]
    broker.abort(kit.prepare(broker, "orders", b"aborted at the end"), kit.NO_LEDGER, Deadline(10))
    assert reader.lag(Deadline(10)) == {ORDERS: 0}
    kit.commit(kit.open_writer(broker), "orders", b"last")
    assert take_values(reader, 1) == [b"last"]


def test_a_half_finished_abort_is_finished_by_the_reader_that_it_holds_back(broker, reading):
    kit.prepare(broker, "orders", b"aborted")
    kit.execute(broker, "UPDATE transactions SET state = 'aborting'")
    kit.commit(kit.open_writer(broker), "orders", b"after")
    assert take_values(reading(), 1) == [b"after"]


def test_a_reader_that_starts_at_the_latest_sees_all_that_becomes_visible_from_then_on(broker, reading):
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"old")
    token = kit.prepare(broker, "orders", b"prepared before, committed after")
    reader = reading(start="latest")
    kit.commit(writer, "orders", b"new")
    broker.commit(token, kit.NO_LEDGER, Deadline(10))
    assert take_values(reader, 2) == [b"prepared before, committed after", b"new"]


def test_a_reader_that_starts_at_a_time_begins_with_the_first_message_stamped_then_or_later(broker, reading):
    kit.send_stamped(broker, 10, 30, 20, 40)
    assert take_values(reading(start=20), 3) == [b"30", b"20", b"40"]
    late = reading(start=50)
    kit.send_stamped(broker, 1)
    assert take_values(late, 1) == [b"1"]


def test_seeking_to_a_time_goes_to_the_first_message_stamped_then_or_later(broker, reading):
    kit.send_stamped(broker, *range(100, 100_000, 2))
    reader = reading()
    reader.seek_to_time(90_001, Deadline(10))
    assert take_values(reader, 1) == [b"90002"]
    reader.seek_to_time(0, Deadline(10))
    assert take_values(reader, 1) == [b"100"]


def test_a_position_beyond_the_end_is_refused_and_no_message_before_it_skipped(broker, reading):
    writer = kit.open_writer(broker)
    reader = reading("orders")
    with pytest.raises(PositionLost, match=r"orders\[0\] ends at 0"):
        reader.seek({ORDERS: (2,)})
    kit.commit(writer, "orders", b"0", b"1")
    reader.seek({ORDERS: (1,)})
    assert take_values(reader, 1) == [b"1"]


@pytest.mark.parametrize("position", [(), (1, 2), (-1,), ("1",), None])
def test_seeking_to_an_invalid_position_or_in_a_partition_that_is_not_there_is_refused(reading, position):
    with pytest.raises(InvalidOption, match="not a position"):
        reading().seek({ORDERS: position})
    with pytest.raises(InvalidState, match=r"orders\[7\]"):
        reading().seek({("orders", 7): (0,)})


def test_a_reader_that_retention_overtakes_is_told_and_nothing_is_skipped(broker, reading):
    kit.commit(kit.open_writer(broker), "orders", *(b"%d" % n for n in range(10)))
    reader = reading()
    assert take_values(reader, 2) == [b"0", b"1"]
    kit.trim(broker, 5)
    for _ in range(2):
        with pytest.raises(PositionLost, match=r"2 in orders\[0\].*before 5"):
            reader.poll(10, Deadline(10))
    with pytest.raises(PositionLost, match="before 5"):
        reader.seek({ORDERS: (4,)})
    reader.seek({ORDERS: (5,)})
    assert take_values(reader, 5) == [b"%d" % n for n in range(5, 10)]
    assert take_values(reading(), 5) == [b"%d" % n for n in range(5, 10)]  # starts at the earliest that is there


@pytest.mark.parametrize("lost", [0, 1])
def test_messages_already_read_are_handed_out_before_another_partition_is_found_lost(broker, reading, lost):
    broker.admin.create_topic("orders", 2, Deadline(10))
    writer = kit.open_writer(broker)
    for partition in range(2):
        kit.commit(writer, "orders", *(b"%d" % partition for _ in range(5)), partition=partition)
    reader = reading()
    kit.trim(broker, 2, partition_id=1 + lost)
    found = []
    with pytest.raises(PositionLost):
        while True:
            found += [message.partition for message in reader.poll(10, Deadline(10))]
    reader.seek({("orders", lost): (2,)})
    found += [message.partition for message in take(reader, 8 - len(found))]
    assert sorted(found) == sorted([lost] * 3 + [1 - lost] * 5)


def test_partitions_that_a_topic_grows_by_are_read_from_their_beginning(broker, reading):
    kit.commit(kit.open_writer(broker), "orders", b"old")
    listener = Listener()
    reader = reading(start="latest", listener=listener)
    broker.admin.grow_topic("orders", 2, Deadline(10))
    writer = kit.open_writer(broker)
    kit.commit(writer, "orders", b"new", partition=1)
    assert take_values(reader, 1) == [b"new"]
    assert listener.told == [("assigned", ORDERS), ("assigned", ("orders", 1))]


def test_a_deleted_topic_is_missed_and_a_new_one_of_its_name_is_read_from_its_beginning(broker, reading):
    kit.commit(kit.open_writer(broker), "orders", b"old")
    listener = Listener()
    reader = reading(listener=listener)
    assert take_values(reader, 1) == [b"old"]
    broker.admin.delete_topic("orders", Deadline(10))
    with pytest.raises(NotFound, match="'orders'"):
        reader.poll(10, Deadline(10))
    kit.commit(kit.open_writer(broker), "orders", b"new")
    assert take_values(reader, 1) == [b"new"]
    assert listener.told == [("assigned", ORDERS), ("lost", ORDERS), ("assigned", ORDERS)]


def test_large_messages_come_in_portions(broker, reading):
    size = 4 << 20
    writer = kit.open_writer(broker)
    for number in range(20):
        kit.commit(writer, "orders", bytes([number]) * size)
    reader = reading()
    portions: list[int] = []
    while sum(portions) < 20:
        messages = reader.poll(500, Deadline(10))
        assert all(set(message.value) == {message.position[0]} for message in messages[:1])
        portions.append(len(messages))
    assert max(portions) * size <= 40 << 20  # 32 MiB is the bound, and the last one may go beyond it


def test_a_long_partition_does_not_keep_a_short_one_waiting(broker, reading):
    broker.admin.create_topic("orders", 2, Deadline(10))
    writer = kit.open_writer(broker)
    kit.begin(writer)
    kit.send(writer, "orders", *[b"long"] * 100, partition=0)
    kit.send(writer, "orders", b"short", partition=1)
    writer.commit(Deadline(10))
    assert b"short" in take_values(reading(), 20)


def test_a_poll_ends_by_its_deadline(reading):
    deadline = Deadline(0.2)
    with within(0.2):
        assert reading().poll(10, deadline) == []
    assert deadline.left() == 0


def test_readable_messages_come_before_an_error_of_ending_an_overdue_transaction(broker, reading):
    kit.prepare(broker, "orders", b"overdue", hold=0.001)
    kit.commit(kit.open_writer(broker), "marker", b"marker")
    reader = reading("orders", "marker")
    kit.execute(broker, "UPDATE transactions SET deadline_at = 0")
    failing(broker.store, happens=False, error=StorageFailed("no room"))
    assert take_values(reader, 1) == [b"marker"]
    with pytest.raises(StorageFailed, match="no room"):
        reader.poll(1, Deadline(10))


def test_a_reader_without_a_group_has_nothing_to_give_back(broker, reading):
    kit.commit(kit.open_writer(broker), "orders", b"order")
    reader = reading()
    take(reader, 1)
    with pytest.raises(InvalidState, match="without a group"):
        reader.nack({ORDERS: [(0,)]})


@pytest.mark.parametrize("create_topics", [0, 1])
def test_reading_without_a_group_makes_no_topic(opened, create_topics):
    broker = opened(create_topics=create_topics)
    with pytest.raises(NotFound, match="txnbridge topics create"):
        broker.reader(Subscription(("missing",)), Listener(), Deadline(10))
    assert broker.admin.topics(Deadline(10)) == []


def test_a_group_that_reads_a_topic_may_make_it(opened):
    with pytest.raises(NotFound, match="txnbridge topics create"):
        opened(create_topics=0).reader(Subscription(("missing",), "g"), Listener(), Deadline(10))
    broker = opened(create_topics=1)
    broker.reader(Subscription(("missing",), "g"), Listener(), Deadline(10)).close(Deadline(10))
    assert [topic.name for topic in broker.admin.topics(Deadline(10))] == ["missing"]
