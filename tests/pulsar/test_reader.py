"""Readers in groups and alone, against a live broker and a listener that stands in for the core."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.read import subscriptions
from txnbridge_pulsar.read.partition import BEGIN
from txnbridge_pulsar.settings import Timing

from tests.core.reading_kit import by_partition, values
from tests.failing import answer_calls, fail_call
from tests.in_time import paused, takes, within
from tests.pulsar.client_kit import admin, batch_of, path_of, service, waiting
from tests.pulsar.kit import SOON
from tests.pulsar.reading_kit import Member, write, write_chunks
from txnbridge import errors
from txnbridge.spi import Deadline, Message

ALL_SHARINGS = pytest.mark.parametrize("sharing", ["partition", "message", "key"])
BOTH_SHARED = pytest.mark.parametrize("sharing", ["message", "key"])


@pytest.fixture
def member(member, pulsar_broker):
    return partial(member, admin_url=pulsar_broker.admin_url)


@pytest.fixture
def partitioned(pulsar_broker, topic):
    """Make the topic with partitions."""

    def make(count):
        admin(pulsar_broker, "PUT", f"{path_of(topic)}/partitions", count)
        return [wire.partition_name(topic, number) for number in range(count)]

    return make


def short(topic):
    return topic.rpartition("/")[2]


def test_a_message_comes_with_all_that_its_sender_gave(client, topic, member):
    batch = wire.MessageBatch()
    batch.append(b"plain")
    batch.append(b"full", b"key", [("a", "1"), ("a", "2"), ("txnbridge-b64.raw", "/w==")], 1_600_000_000_000)
    batch.append(None, b"\xff")
    batch.append(b"", "")
    before = int(time.time() * 1000)
    write(client, topic, batch, wire.Single(b"alone", "text", [("b", "ü")], 5), wire.Single(None))
    found = member(topic, None).take(6)
    assert values(found) == [b"plain", b"full", None, b"", b"alone", None]
    assert [m.key for m in found] == [None, b"key", b"\xff", b"", b"text", None]
    assert found[1].headers.raw == (("a", b"1"), ("a", b"2"), ("raw", b"\xff"))
    assert found[4].headers["b"] == "ü"
    assert [found[1].timestamp, found[4].timestamp] == [1_600_000_000_000, 5]
    assert before <= found[0].timestamp <= time.time() * 1000
    assert {(m.topic, m.partition, m.deliveries) for m in found} == {(topic, 0, 1)}
    assert [m.position for m in found] == sorted(m.position for m in found)


def test_a_reader_without_a_group_waits_on_in_an_empty_topic_that_moves(pulsar_broker, client, topic, member):
    client.create_producer(topic, timeout=SOON).close(SOON)
    reader = member(topic, None, start="latest")
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/unload")
    write(client, topic, b"1")
    assert values(reader.take(1)) == [b"1"]


def test_a_reader_without_a_group_may_begin_at_a_time(client, topic, member):
    batch = wire.MessageBatch()
    for number in range(5):
        batch.append(b"%d" % number, event_time=1_600_000_000_000 + number)
    write(client, topic, batch)
    reader = member(topic, None, start=1_600_000_000_003)
    assert values(reader.take(2)) == [b"3", b"4"]
    reader.seek_to_time(1_600_000_000_001, Deadline(SOON))
    assert values(reader.take(4)) == [b"1", b"2", b"3", b"4"]
    reader.seek_to_time(1_700_000_000_000, Deadline(SOON))
    write(client, topic, wire.Single(b"later", event_time=7))
    assert values(reader.take(1)) == [b"later"]


def test_a_reader_without_a_group_can_go_to_any_position(client, topic, member):
    write(client, topic, b"0", batch_of(b"1", b"2", b"3"), b"4")
    reader = member(topic, None)
    found = reader.take(5)
    for number in (3, 0, 4, 2, 1):
        reader.seek({(topic, 0): found[number].position})
        assert reader.positions() == {(topic, 0): found[number].position}
        assert values(reader.take(5 - number)) == values(found[number:])
    reader.seek({(topic, 0): BEGIN})
    assert values(reader.take(5)) == values(found)


def test_messages_that_retention_has_removed_cannot_be_gone_to(pulsar_broker, client, topic, member):
    write(client, topic, b"old")
    reader = member(topic, None)
    (old,) = reader.take(1)
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/unload")  # which closes the ledger
    write(client, topic, b"new")
    assert values(reader.take(1)) == [b"new"]
    admin(pulsar_broker, "DELETE", f"{path_of(topic)}/truncate")
    with pytest.raises(errors.PositionLost, match="keeps"):
        reader.seek({(topic, 0): old.position})


def test_a_reader_without_a_group_loses_and_doubles_nothing_when_connections_break(client, topic, member):
    write(client, topic)
    reader = member(topic, None)
    producer = client.create_producer(topic, timeout=SOON)
    found = []
    for number in range(60):
        producer.send(wire.Single(b"%d" % number), timeout=SOON).result(SOON)
        if number % 10 == 5:
            reader.cut()
        found += reader.poll(3, timeout=0)
    found += reader.take(60 - len(found))
    assert values(found) == [b"%d" % number for number in range(60)]
    assert ("lost", (topic, 0)) not in reader.listener.told


@pytest.mark.parametrize("position", [(1,), (1, 2), (1, 2, -1), ("1", 2, 3), (1, 2, 3, 4)])
def test_a_value_that_is_no_position_is_refused(client, topic, member, position):
    write(client, topic, b"1")
    with pytest.raises(errors.InvalidOption, match="position"):
        member(topic, None).seek({(topic, 0): position})


def test_an_entry_that_cannot_be_read_holds_its_place_until_somebody_goes_on(client, topic, member):
    write(client, topic, b"1")
    producer = client.create_producer(topic, timeout=SOON)
    bad = batch_of(b"bad")
    bad._parts[0] = b"\xff" * 4
    bad_id = producer.send(bad, timeout=SOON).result(SOON).message_id
    write(client, topic, b"2")
    reader = member(topic)
    assert values(reader.take(1)) == [b"1"]
    for _ in range(2):
        with pytest.raises(errors.StorageFailed, match="cannot be read"):
            reader.take(1)
    reader.seek({(topic, 0): (bad_id.ledger, bad_id.entry + 1, 0)})
    assert values(reader.take(1)) == [b"2"]


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_a_message_in_chunks_beyond_what_is_held_is_told_of_until_somebody_goes_on(client, topic, member, group):
    write(client, topic, b"1")
    write_chunks(client, topic, [bytes(500_000)] * 4, of=5)  # it claims nothing, and is not complete
    write(client, topic, b"2")
    reader = member(topic, group, timing=Timing(reader_bytes=2_000_000))
    assert values(reader.take(1)) == [b"1"]
    for _ in range(2):
        with pytest.raises(errors.StorageFailed, match="2000000 bytes that are held"):
            reader.take(1)
    ((partition, (ledger, entry, _)),) = reader.reader.positions().items()
    reader.seek({partition: (ledger, entry + 4, 0)})
    assert values(reader.take(1)) == [b"2"]


def test_a_reader_that_begins_amid_a_message_in_chunks_gets_the_whole_message(pulsar_broker, client, topic, member):
    """Also if the chunks are in several BookKeeper ledgers: each loading of a topic begins one."""
    write(client, topic, b"0")
    write_chunks(client, topic, [b"a", b"b"], of=3)
    write(client, topic, b"1")
    admin(pulsar_broker, "PUT", f"{path_of(topic)}/unload")
    write_chunks(client, topic, [b"c"], first=2, of=3)
    write(client, topic, b"2")
    write_chunks(client, topic, [b"its sender is dead"], of=3)
    reader = member(topic, None)
    found = reader.take(4)
    assert values(found) == [b"0", b"1", b"abc", b"2"]
    (ledger, entry, _), *_ = ends = [message.position for message in found]
    for start in (*ends, (ledger, entry + 1, 0), (ledger, entry + 2, 0)):
        reader.seek({(topic, 0): start})
        read = reader.until(lambda: not reader.lag(Deadline(SOON))[topic, 0])
        assert [message.position for message in read] == [each for each in ends if each >= start]


def test_chunks_of_a_message_amid_which_a_group_has_begun_do_not_stay_in_its_backlog(client, topic, member):
    write_chunks(client, topic, [b"a"], of=3)
    reader = member(topic, start="latest", timing=Timing(idle_check_seconds=0.2))
    reader.has(1)
    write_chunks(client, topic, [b"b", b"c"], first=1, of=3)
    write(client, topic, b"1")
    reader.pass_on(reader.take(1))

    def is_acknowledged():
        last, acknowledged = reader.partition(topic).consumer.progress(SOON)
        return acknowledged is not None and acknowledged[:2] >= last[:2]

    assert values(reader.until(is_acknowledged)) == []


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_added_partitions_are_read_from_their_beginning(pulsar_broker, client, topic, member, partitioned, group):
    write(client, partitioned(1)[0], b"old")
    reader = member(topic, group, start="latest")
    reader.has(1)
    admin(pulsar_broker, "POST", f"{path_of(topic)}/partitions", 3)
    for number in (1, 2):
        write(client, wire.partition_name(topic, number), b"%d" % number)
    assert sorted(values(reader.take(2))) == [b"1", b"2"]
    assert sorted(reader.positions()) == [(topic, 0), (topic, 1), (topic, 2)]


def test_partitions_that_were_added_while_something_failed_are_read_by_nobody_else(
    pulsar_broker, client, topic, member, partitioned, monkeypatch
):
    write(client, partitioned(1)[0], b"0")
    reader = member(topic)
    assert values(reader.take(1)) == [b"0"]
    answer_calls(monkeypatch, reader.reader._registry, "record")
    away = errors.BrokerUnavailable("the decision log's broker is away")
    fail_call(monkeypatch, reader.reader._registry, "record", away, range(2))
    admin(pulsar_broker, "POST", f"{path_of(topic)}/partitions", 4)
    for number in (1, 2, 3):
        write(client, wire.partition_name(topic, number), b"%d" % number)
    assert sorted(values(reader.take(3))) == [b"1", b"2", b"3"]
    for number in (1, 2, 3):
        stats = admin(pulsar_broker, "GET", f"{path_of(wire.partition_name(topic, number))}/stats")
        assert len(stats["subscriptions"]["group"]["consumers"]) == 1


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_a_paused_partition_keeps_what_it_has(client, topic, member, partitioned, group):
    names = partitioned(2)
    reader = member(topic, group)
    reader.has(2)
    reader.pause([(topic, 0)])
    for number in range(3):
        for name in names:
            write(client, name, b"%d" % number)
        assert [(m.partition, m.value) for m in reader.take(1)] == [(1, b"%d" % number)]
    reader.resume([(topic, 0)])
    assert [(m.partition, m.value) for m in reader.take(3)] == [(0, b"%d" % number) for number in range(3)]


def test_no_more_waits_in_memory_than_is_allowed(client, topic, member):
    write(client, topic, *[b"x" * 100_000 for _ in range(100)])
    reader = member(topic, None, timing=Timing(reader_bytes=2_000_000))
    most, count = 0, 0
    while count < 100:
        count += len(reader.poll(1, timeout=SOON))
        here = sum(entry.size for entry in reader.partition(topic)._waiting)
        on_the_way = sum(len(item[3]) for item in waiting(reader.reader._inbox))
        most = max(most, here + on_the_way)
    assert most < 2 * 2_000_000 + 16 * 100_000


@ALL_SHARINGS
def test_a_new_group_may_begin_at_a_time(client, topic, member, sharing):
    batch = wire.MessageBatch()
    for number in range(4):
        batch.append(b"%d" % number, event_time=1_600_000_000_000 + number)
    write(client, topic, batch, wire.Single(b"out of order", event_time=7))
    first = member(topic, sharing=sharing, start=1_600_000_000_002)
    found = first.take(3)
    assert values(found) == [b"2", b"3", b"out of order"]
    first.pass_on(found[:1])
    first.leave()
    assert values(member(topic, sharing=sharing, start=1_600_000_000_003).take(2)) == [b"3", b"out of order"]


@pytest.mark.parametrize("sharing", ["partition", "message"])
def test_where_a_group_begins_is_kept_also_by_a_broker_that_lets_go_of_the_topic_at_once(
    pulsar_broker, client, topic, member, monkeypatch, sharing
):
    begin_at = subscriptions.FailoverMode._begin_at

    def begin_and_unload(self, concrete, timestamp, deadline):
        begin_at(self, concrete, timestamp, deadline)
        admin(pulsar_broker, "PUT", f"{path_of(concrete)}/unload")

    monkeypatch.setattr(subscriptions.FailoverMode, "_begin_at", begin_and_unload)
    for attempt in range(5):  # it takes the broker milliseconds to forget it
        name, start = f"{topic}-{attempt}", 1_600_000_000_000
        write(client, name, *(wire.Single(b"%d" % number, event_time=start + number) for number in range(3)))
        assert values(member(name, sharing=sharing, start=start + 1).take(2)) == [b"1", b"2"]


def test_members_that_come_at_once_begin_at_the_same_time(client, topic, member):
    for number in range(3):
        write(client, topic, wire.Single(b"%d" % number, event_time=1_600_000_000_000 + number))
    start = 1_600_000_000_001
    with ThreadPoolExecutor(3) as pool:
        members = list(pool.map(lambda _: member(topic, sharing="message", start=start), range(3)))
    found: list[Message] = []
    deadline = Deadline(SOON)
    while len(found) < 2:
        found += [message for each in members for message in each.poll(1, timeout=0.05)]
        deadline.check("reading")
    assert sorted(values(found)) == [b"1", b"2"]


def test_a_group_that_starts_at_a_time_after_all_messages_begins_at_the_end(client, topic, member):
    write(client, topic, b"old", batch_of(b"old", b"old"))
    reader = member(topic, start=int(time.time() * 1000) + 3_600_000)
    write(client, topic, b"new")
    assert values(reader.take(1)) == [b"new"]


@ALL_SHARINGS
def test_a_message_given_back_comes_again_and_the_others_do_not(client, topic, member, sharing):
    write(client, topic, *(b"%d" % number for number in range(5)))
    reader = member(topic, sharing=sharing)
    found = reader.take(5)
    back = [m for m in found if m.value in (b"1", b"3")]
    reader.nack(by_partition(back))
    again = reader.take(2)
    assert sorted(values(again)) == [b"1", b"3"]
    assert all(m.deliveries > 1 for m in again)
    write(client, topic, b"marker")
    assert values(reader.take(1)) == [b"marker"]


def test_messages_of_a_batch_that_are_given_back_come_again_alone(client, topic, member):
    write(client, topic, batch_of(b"0", b"1", b"2", b"3"))
    reader = member(topic)
    found = reader.take(4)
    reader.nack(by_partition([found[1], found[2]]))
    assert values(reader.take(2)) == [b"1", b"2"]
    reader.pass_on(found)
    write(client, topic, b"marker")
    assert values(reader.take(1)) == [b"marker"]


def test_entries_that_a_broker_skips_when_it_goes_back_come_before_later_messages(client, topic, member, monkeypatch):
    """A broker that reads on while it goes back may jump there (hazard H94): here entries 3 to 6 do not arrive once."""
    write(client, topic, *(b"%d" % number for number in range(10)))
    group = member(topic)
    first = group.take(8)
    consumer = group.partition(topic).consumer
    left_out = {message.position[:2] for message in first[3:7]}
    arrived = consumer.entry_arrived

    def jump(generation, fields, tail):
        entry = fields["message_id"]["ledger_id"], fields["message_id"]["entry_id"]
        if entry in left_out:
            left_out.remove(entry)
        else:
            arrived(generation, fields, tail)

    monkeypatch.setattr(consumer, "entry_arrived", jump)
    group.seek({(topic, 0): first[0].position})
    assert values(group.take(10)) == [b"%d" % number for number in range(10)]
    assert not left_out


def test_a_member_that_waits_gets_what_a_broker_has_left_out(client, topic, member, monkeypatch):
    """No transaction aborts and the partition does not move, so that the broker would never go back (hazard H94)."""
    write(client, topic, b"0")
    group = member(topic, timing=Timing(idle_check_seconds=0.2))
    group.pass_on(group.take(1))
    consumer = group.partition(topic).consumer
    arrived, left_out = consumer.entry_arrived, iter([True, True])
    monkeypatch.setattr(consumer, "entry_arrived", lambda *entry: next(left_out, False) or arrived(*entry))
    write(client, topic, b"1", b"2")
    assert values(group.take(2)) == [b"1", b"2"]


def test_seeking_in_a_group_brings_back_unacknowledged_messages(client, topic, member):
    write(client, topic, b"0", batch_of(b"1", b"2", b"3"), b"4")
    reader = member(topic)
    found = reader.take(5)
    reader.pass_on([found[1], found[2]])
    reader.seek({(topic, 0): found[0].position})
    assert values(reader.take(3)) == [b"0", b"3", b"4"]
    reader.seek({(topic, 0): found[3].position})
    assert values(reader.take(2)) == [b"3", b"4"]


def test_seeking_forward_in_a_group_passes_over_the_messages_between(client, topic, member):
    write(client, topic, *(b"%d" % number for number in range(4)))
    other = member(topic, None)
    positions = [m.position for m in other.take(4)]
    reader = member(topic)
    assert values(reader.take(1)) == [b"0"]
    reader.seek({(topic, 0): positions[3]})
    assert values(reader.take(1)) == [b"3"]
    reader.seek({(topic, 0): positions[1]})
    assert values(reader.take(3)) == [b"1", b"2", b"3"]


def test_calls_that_a_way_of_reading_does_not_have_are_refused(client, topic, member):
    write(client, topic, b"1")
    for sharing in ("message", "key"):
        shared = member(topic, sharing, sharing=sharing)
        shared.has(1)
        with pytest.raises(errors.NotSupported, match="no position of their own"):
            shared.seek({(topic, 0): (0, 0, 0)})
    alone = member(topic, None)
    with pytest.raises(errors.NotSupported, match="seek"):
        alone.nack(by_partition(alone.take(1)))
    for call in (shared.pause, shared.resume):
        with pytest.raises(errors.InvalidState, match="not assigned to this reader"):
            call([(topic, 7)])


def test_partitions_come_together(topic, member, partitioned):
    """A reader that reads all partitions that it holds would take the first partition for all of them."""
    partitioned(8)
    reader = member(topic)
    reader.until(lambda: reader.positions())
    assert len(reader.positions()) == 8


def test_partitions_come_although_rest_does_not_answer_and_rest_is_asked_once(topic, member, partitioned):
    # A busy machine may take longer for the partitions than a reader sends no request.
    timing = Timing(rest_seconds=0.2, no_rest_factor=18000.0)
    partitioned(4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reader = member(topic, admin_url=f"http://127.0.0.1:{silent.getsockname()[1]}", timing=timing)
        reader.has(4)
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_partition_that_goes_is_told_before_another_member_has_it(client, topic, member, partitioned):
    partitioned(2)
    one = member(topic)
    one.has(2)
    two = member(topic)
    one.has(1)
    (kept,) = one.positions()
    gone = (topic, 1 - kept[1])
    assert one.listener.told[-1] == ("revoking", gone)
    two.has(1)
    assert list(two.positions()) == [gone]


def test_a_connection_that_breaks_ends_the_assignment_and_everything_comes_again(client, topic, member):
    write(client, topic, b"1", b"2", b"3")
    reader = member(topic)
    reader.take(2)
    reader.cut()
    reader.until(lambda: ("lost", (topic, 0)) in reader.listener.told)
    assert values(reader.take(3)) == [b"1", b"2", b"3"]


@BOTH_SHARED
def test_a_member_takes_no_more_shared_messages_than_it_asked_for(client, topic, member, sharing):
    write(client, topic)
    one, two = member(topic, sharing=sharing), member(topic, sharing=sharing)
    keys = [b"%d" % number for number in range(20)]
    write(client, topic, *(wire.Single(key, key) for key in keys))
    found: list[Message] = []
    deadline = Deadline(SOON)
    while len(found) < 20:
        found += [*one.poll(1, timeout=0.05), *two.poll(1, timeout=0.05)]
        deadline.check("sharing")
    assert sorted(values(found)) == sorted(keys)
    assert one.listener.here and two.listener.here


def test_a_member_whose_partition_is_slow_to_come_takes_no_more_than_it_asked_for(client, topic, member, monkeypatch):
    write(client, topic, b"1", b"2", b"3")
    one, two = member(topic, sharing="message"), member(topic, sharing="message")
    mode, may_begin = one.reader._mode, threading.Event()
    begin = mode.begin
    monkeypatch.setattr(mode, "begin", lambda *how: may_begin.wait(SOON) and begin(*how))
    for _ in range(5):
        assert one.poll(1) == []
    may_begin.set()
    assert values(one.take(1) + two.take(2)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_a_topic_that_is_deleted_is_not_made_anew_by_its_readers(pulsar_broker, client, topic, member, group):
    write(client, topic, b"1")
    reader = member(topic, group)
    reader.take(1)
    admin(pulsar_broker, "DELETE", f"{path_of(topic)}?force=true")
    with pytest.raises(errors.NotFound, match="no longer exists"):
        reader.until(lambda: False)
    assert topic not in client.topics("public/default", SOON)


@pytest.mark.parametrize("group", [None, "group"], ids=["alone", "group"])
def test_while_the_broker_says_nothing_every_call_ends_in_time(pulsar_broker, client, topic, member, group):
    write(client, topic, b"1", b"2")
    reader = member(topic, group)
    found = reader.take(2)
    with paused(pulsar_broker):
        with within(0.5):
            assert reader.poll(timeout=0.5) == []
        takes(1, errors.DeadlineExceeded, reader.lag)
        if group is not None:
            reader.seek({(topic, 0): found[0].position})  # as behind an abort: it must not fail
            reader.nack({(topic, 0): []})
        with within(1):
            reader.reader.close(Deadline(1))


@pytest.mark.full
def test_reading_goes_on_when_the_broker_comes_back(start_pulsar, topic):
    broker = start_pulsar()
    with wire.PulsarClient(service(broker)) as client, ExitStack() as stack:
        write(client, topic, b"0", b"1")
        alone, grouped = (Member(broker.url, topic, group) for group in (None, "group"))
        for each in (alone, grouped):
            stack.callback(each.leave)
        assert values(alone.take(1)) == [b"0"]
        grouped.pass_on(grouped.take(1))
        broker.restart()
        write(client, topic, b"2")
        assert values(alone.take(2, 120)) == [b"1", b"2"]
        grouped.until(lambda: ("lost", (topic, 0)) in grouped.listener.told)
        assert values(grouped.take(2, 120)) == [b"1", b"2"]


def test_the_next_member_of_a_group_that_is_done_has_no_lag(client, topic, member):
    write(client, topic, b"1", b"2")
    reader = member(topic)
    reader.pass_on(reader.take(2))
    reader.leave()
    after = member(topic)
    after.has(1)
    after.until(lambda: after.lag(Deadline(SOON))[topic, 0] == 0)


def test_counts_of_deliveries_are_forgotten_when_there_are_too_many(client, topic, member):
    write(client, topic, *(b"%d" % number for number in range(6)))
    reader = member(topic, timing=Timing(max_delivery_counts=4))
    found = reader.take(6)
    for _ in range(2):
        reader.seek({(topic, 0): found[0].position})
        assert all(m.deliveries > 1 for m in reader.take(6))
    assert len(reader.partition(topic)._delivery_counts) <= 4
