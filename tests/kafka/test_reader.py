"""Readers in groups and alone, against a live broker and a listener that stands in for the core."""

import random
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from txnbridge_kafka import cluster as asked
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.read.reader import KafkaReader
from txnbridge_kafka.settings import KafkaSettings, Timing
from txnbridge_kafka.settings.security import Access

from tests.core import reading_kit
from tests.core.reading_kit import rows, values
from tests.in_time import wait_until, within
from tests.kafka.kit import bootstrap_of, kafka_names, plain_admin, plain_producer, topics_of
from tests.kafka.mock_kit import produce
from tests.keeping import keeping
from txnbridge import errors
from txnbridge.spi import Context, Deadline, Emitter, Subscription

COOPERATIVE = {"assignment": "cooperative-sticky"}
EAGER = {"assignment": "range"}
CONSUMER = {"group_protocol": "consumer"}
KINDS = pytest.mark.parametrize("kind", [COOPERATIVE, EAGER, CONSUMER], ids=["cooperative", "eager", "consumer"])
ALONE = pytest.mark.parametrize("alone", [True, False], ids=["alone", "group"])
ALL_KINDS = pytest.mark.parametrize(
    "kind", [None, COOPERATIVE, EAGER, CONSUMER], ids=["alone", "cooperative", "eager", "consumer"]
)
APPLICATION = "reader-tests"


class Openings:
    """A ledger of openings, in memory."""

    def __init__(self):
        self.all = []
        self.reads = 0

    def opened(self, data, deadline):
        self.all.append(data)
        return str(len(self.all))

    def open_behind(self, before, data, deadline):
        if before != (str(len(self.all)) if self.all else None):
            return False
        self.opened(data, deadline)
        return True

    def newest_opening(self, deadline):
        self.reads += 1
        return (str(len(self.all)), self.all[-1]) if self.all else None


class Listener(reading_kit.Listener):
    """A listener that may do something when partitions leave, as the core ends a transaction."""

    on_revoking: Any = None

    def revoking(self, partitions):
        if self.on_revoking is not None:
            self.on_revoking(partitions)
        super().revoking(partitions)


TIMING = Timing()
TENS = Timing(converted_at_once=10)


class Member(reading_kit.Polling):
    """A reader with its listener."""

    reader: KafkaReader

    def __init__(self, cluster, topics, group, kind=COOPERATIVE, start="earliest", timing=TIMING, **client):
        self.listener, self.group = Listener(), group
        self.settings = cluster.settings(**kind, consumer=client, timing=timing)
        topics = (topics,) if isinstance(topics, str) else topics
        subscription = Subscription(topics, group, start)
        context = Context(
            "test", Emitter("test", ()), APPLICATION, 30, None, None, {}, lambda _, id: cluster.ledger(id)
        )
        self.cluster = asked.KafkaCluster(
            self.settings, Requests(self.settings), topics_of(self.settings), context.events
        )
        try:
            self.reader = KafkaReader(subscription, self.listener, context, self.cluster, Deadline(20))
        except BaseException:
            self.cluster.requests.close()
            raise

    @property
    def assignment(self):
        return self.reader._assignment

    def passes(self, topic, offset):
        """Poll until the client has passed over what is no message."""
        client = self.assignment.client
        self.until(lambda: client.position([TopicPartition(topic, 0)])[0].offset == offset)

    def is_sure(self):
        """Whether it has made sure where its group starts."""
        starts: Any = self.reader._lookup.starts
        return not starts.unchecked

    def lag(self):
        return self.reader.lag(Deadline(10))

    def close(self):
        self.reader.close(Deadline(20))
        self.cluster.requests.close()

    def closed_or_late(self):
        with suppress(errors.DeadlineExceeded):
            self.reader.close(Deadline(1))
        self.cluster.requests.close()


class Cluster:
    """A broker, with the raw client's means to bring about what is to be read."""

    def __init__(self, broker):
        self.bootstrap, self.admin = bootstrap_of(broker), plain_admin(broker)
        self.ledgers = {}
        self._writer = None

    def settings(self, **options):
        client = {"bootstrap.servers": self.bootstrap}
        return KafkaSettings(self.bootstrap, client, Access(), 30, None, APPLICATION, 0, **options)

    def ledger(self, id) -> Any:
        return self.ledgers.setdefault(id, Openings())

    def topic(self, partitions=1):
        name = f"reader-{uuid.uuid4().hex[:12]}"
        for made in self.admin.create_topics([kafka_names.NewTopic(name, partitions, 1)]).values():
            made.result(20)
        return name

    def producer(self):
        """Return a producer that may be in a transaction while another one is."""
        return plain_producer(self.bootstrap, uuid.uuid4().hex)

    def write(self, topic, *values, partition=0, commit=True, **options):
        """Write these values in one transaction."""
        producer = self._writer = self._writer or self.producer()
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=partition, **options)
        producer.flush(20)
        (producer.commit_transaction if commit else producer.abort_transaction)(20)

    def ack(self, member, *messages):
        """Acknowledge in a transaction, as a writer does."""
        producer = self.producer()
        producer.begin_transaction()
        producer.send_offsets_to_transaction(behind(messages), member.ack_context().metadata, 20)
        producer.commit_transaction(20)

    def all_of(self, topic, partitions):
        return [TopicPartition(topic, number) for number in range(partitions)]

    def grow(self, topic, partitions):
        for done in self.admin.create_partitions([kafka_names.NewPartitions(topic, partitions)]).values():
            done.result(20)
        while len(self.admin.list_topics(topic, 20).topics[topic].partitions) < partitions:
            time.sleep(0.01)

    def trim(self, topic, partition, before):
        """Delete the first records, as retention does."""
        for done in self.admin.delete_records([TopicPartition(topic, partition, before)]).values():
            done.result(20)

    def expire(self, group):
        """Delete the positions of a group without members, as a broker does a week later."""
        for done in self.admin.delete_consumer_groups([group]).values():
            done.result(20)

    def group(self, group):
        """The positions that a group has, by partition."""
        asked = self.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        found = asked[group].result(20).topic_partitions
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}


def behind(messages):
    last = {(message.topic, message.partition): message.position[0] for message in messages}
    return [TopicPartition(*partition, offset + 1) for partition, offset in last.items()]


def numbered(start, stop=None):
    return [b"%d" % number for number in (range(start) if stop is None else range(start, stop))]


@pytest.fixture(scope="session")
def cluster(kafka_broker):
    return Cluster(kafka_broker)


@pytest.fixture
def join(cluster):
    """Let members join, which leave at the end."""
    yield from keeping(lambda *args, **options: Member(options.pop("cluster", cluster), *args, **options))


def test_columns_have_the_same_rows_as_messages(cluster, join):
    topic = cluster.topic(2)
    for number in range(46):
        headers = [("a", b"1"), ("none", None), ("a", b"\xff")] if number % 5 == 0 else None
        key, value = None if number % 2 else b"key", b"%d" % number if number % 7 else None
        cluster.write(topic, value, key=key, headers=headers, partition=number % 4 // 3)
    one, other = join(topic, None, timing=TENS), join(topic, None, timing=TENS)
    messages, found, deadline = one.take(46), list[Any](), Deadline(30)
    while len(found) < 46:
        found += [row for columns in other.reader.poll_columns(35, deadline) for row in rows(columns)]
        deadline.check("reading")
    assert sorted(found) == sorted(message._replace(source=None) for message in messages)
    assert other.positions() == one.positions()


def pieces(monkeypatch, member, before_second=lambda: None):
    """Note how many of the client's messages are taken at a time; something happens before the second time."""
    asked = []
    read = member.assignment.fetch

    def read_piece(limit, wait):
        asked.append(limit)
        if len(asked) == 2:
            before_second()
        return read(limit, wait)

    monkeypatch.setattr(member.assignment, "fetch", read_piece)
    return asked


@pytest.mark.parametrize("enough", [None, 200])
def test_a_poll_hands_out_the_messages_at_hand_up_to_its_limit_and_to_enough_bytes(cluster, join, monkeypatch, enough):
    topic = cluster.topic()
    cluster.write(topic, *(b"%010d" % n for n in range(46)))
    member = join(topic, None, timing=TENS if enough is None else replace(TENS, poll_bytes=enough))
    first = member.take(1)  # the rest came with it
    asked = pieces(monkeypatch, member)
    found = member.poll(35)
    assert asked == ([10, 10] if enough else [10, 10, 10, 5])
    assert values([*first, *found, *member.take(45 - len(found))]) == [b"%010d" % n for n in range(46)]


@pytest.mark.parametrize("kind", [COOPERATIVE, CONSUMER], ids=["cooperative", "consumer"])
def test_messages_of_a_partition_that_leaves_within_a_poll_are_not_handed_out(cluster, join, group, monkeypatch, kind):
    topic = cluster.topic(2)
    member = join(topic, group, kind, timing=TENS)
    member.has(2)
    for partition in range(2):
        cluster.write(topic, *([b"%d" % partition] * 40), partition=partition)
    leaving = []

    def leave():
        """Whichever has just been read."""
        furthest = max(member.assignment.partitions.values(), key=lambda each: each.next)
        leaving.append(TopicPartition(*furthest.partition))
        member.reader._rebalance.on_revoke(member.assignment.client, leaving)

    pieces(monkeypatch, member, before_second=leave)
    found = []
    while not leaving:
        found = member.poll(60, timeout=5)
    assert leaving[0].partition not in {message.partition for message in found}


@pytest.mark.parametrize("read", ["poll", "poll_columns"])
def test_a_header_name_that_is_not_utf_8_is_delivered_with_replaced_bytes(cluster, join, caplog, read):
    topic = cluster.topic()
    produce(cluster.bootstrap, topic, (b"name", b"0"))
    for _ in range(2):
        produce(cluster.bootstrap, topic, (b"\xfffirst", b"f"), (b"good", b"g"), (b"\xfflast", b"l"))
    produce(cluster.bootstrap, topic)
    member = join(topic, None)
    found: list[Any] = []
    while len(found) < 4:
        for each in getattr(member.reader, read)(10, Deadline(1)):
            found += each.headers if read == "poll_columns" else [list(each.headers.raw) or None]
    replaced = [("\ufffdfirst", b"f"), ("good", b"g"), ("\ufffd", b"l")]
    assert found == [[("name", b"0")], replaced, replaced, None]
    assert caplog.text.count(f"{topic}[0]: the message at offset 1 has a header name that is not UTF-8") == 1


def test_a_partition_added_to_a_topic_is_read_from_its_beginning(cluster, join):
    topic = cluster.topic()
    member = join(topic, None, start="latest")
    cluster.grow(topic, 3)
    for partition in (1, 2):
        cluster.write(topic, b"%d" % partition, partition=partition)
    assert sorted(values(member.take(2))) == [b"1", b"2"]


def test_a_topic_that_is_deleted_is_not_found_any_more(cluster, join):
    topic = cluster.topic()
    member = join(topic, None)
    for done in cluster.admin.delete_topics([topic]).values():
        done.result(20)
    with pytest.raises(errors.NotFound):
        member.take(1)


def test_a_setting_that_the_client_does_not_take_is_refused(cluster, join):
    with pytest.raises(errors.InvalidOption, match=r"fetch\.min\.bytes"):
        join(cluster.topic(), None, **{"fetch.min.bytes": -1})


def test_a_group_that_starts_behind_the_latest_reads_what_was_open_then(cluster, join, group):
    topic = cluster.topic()
    slow = cluster.producer()
    slow.begin_transaction()
    slow.produce(topic, b"open", partition=0)
    slow.flush(20)
    member = join(topic, group, start="latest")
    member.has(1)
    slow.commit_transaction(20)
    assert values(member.take(1)) == [b"open"]


def test_lag_does_not_count_markers_and_what_was_aborted_once_they_are_passed(cluster, join, group):
    topic = cluster.topic()
    cluster.write(topic, *numbered(3))
    cluster.write(topic, *numbered(5), commit=False)
    alone, member = join(topic, None), join(topic, group)
    for reader in (alone, member):
        messages = reader.take(3)
        reader.passes(topic, 10)
    assert alone.lag() == {(topic, 0): 0}
    assert member.lag() == {(topic, 0): 10}
    cluster.ack(member, *messages[:2])
    wait_until(lambda: member.lag() == {(topic, 0): 8})
    cluster.ack(member, messages[2])
    wait_until(lambda: member.lag() == {(topic, 0): 0})
    again = join(topic, group)
    member.close()
    again.until(lambda: again.lag() == {(topic, 0): 0})


def test_lag_falls_to_zero_without_a_poll(cluster, join, group):
    topic = cluster.topic(2)
    cluster.write(topic, *numbered(2))
    member = join(topic, group)
    messages = member.take(2)
    cluster.ack(member, *messages)
    wait_until(lambda: member.lag() == {(topic, 0): 0, (topic, 1): 0})
    cluster.write(topic, b"2")
    wait_until(lambda: member.lag()[topic, 0] == 2)  # with its marker
    assert member.lag()[topic, 0] == 2
    assert values(member.take(1)) == [b"2"]  # which lag came across
    cluster.write(topic, *numbered(3, 5))
    wait_until(lambda: member.lag()[topic, 0] == 6)
    member.seek({(topic, 0): (3,)})
    assert values(member.take(3)) == numbered(2, 5)


def test_lag_is_told_while_acknowledgements_are_not_decided(cluster, join, group):
    topic = cluster.topic()
    cluster.write(topic, *numbered(3))
    member = join(topic, group)
    messages = member.take(3)
    producer = cluster.producer()
    producer.begin_transaction()
    producer.send_offsets_to_transaction(behind(messages), member.ack_context().metadata, 20)
    assert member.lag() == {(topic, 0): 4}
    producer.commit_transaction(20)
    member.until(lambda: member.lag() == {(topic, 0): 0})


@KINDS
def test_a_group_that_starts_behind_the_latest_loses_nothing_when_its_first_batch_aborts(cluster, join, group, kind):
    topic = cluster.topic()
    cluster.write(topic, b"old")
    first = join(topic, group, kind, start="latest")
    assert first.has(1) == []
    cluster.write(topic, b"new")
    assert values(first.take(1)) == [b"new"]
    first.close()  # and what it read was never acknowledged
    cluster.write(topic, b"newer")
    assert values(join(topic, group, kind, start="latest").take(2)) == [b"new", b"newer"]


@ALONE
def test_latest_is_when_the_reader_was_opened(cluster, join, group, alone):
    topic = cluster.topic()
    cluster.write(topic, b"old")
    member = join(topic, None if alone else group, start="latest")
    cluster.write(topic, b"new")
    assert values(member.take(1)) == [b"new"]


def test_where_a_group_begins_is_committed_and_recorded_before_the_first_message(cluster, join, group):
    topic = cluster.topic(2)
    cluster.write(topic, b"old")
    member = join(topic, group, start="latest")
    member.has(2)
    assert cluster.group(group) == {(topic, 0): 2, (topic, 1): 0}
    assert cluster.ledgers[f"group/{group}/{topic}"].all == [{"partitions": 2, "positions": [2, 0]}]


@KINDS
def test_a_group_whose_positions_have_expired_is_told_and_does_not_begin_again(cluster, join, group, kind):
    topic = cluster.topic(2)
    cluster.write(topic, *numbered(3))
    cluster.write(topic, *numbered(3), partition=1)
    first = join(topic, group, kind)
    messages = first.take(6)
    cluster.ack(first, *messages)
    first.close()
    wait_until(lambda: cluster.group(group) == {(topic, 0): 3, (topic, 1): 3})  # else they could come behind
    cluster.expire(group)
    second = join(topic, group, kind)
    for _ in range(3):
        with pytest.raises(errors.PositionLost, match=r"offsets\.retention\.minutes"):
            second.take(1)
    second.seek({(topic, 0): (1,), (topic, 1): (2,)})
    assert sorted((m.partition, m.value) for m in second.take(3)) == [(0, b"1"), (0, b"2"), (1, b"2")]
    second.close()
    # What the user said has become the group's position.
    third = join(topic, group, kind)
    assert sorted((m.partition, m.value) for m in third.take(3)) == [(0, b"1"), (0, b"2"), (1, b"2")]


def test_members_that_begin_at_once_are_not_taken_for_expired(cluster, join, group):
    topic = cluster.topic(4)
    members = [join(topic, group, CONSUMER) for _ in range(3)]
    deadline = Deadline(60)
    while sorted(p for m in members for p in m.positions()) != [(topic, number) for number in range(4)]:
        for member in members:
            member.poll(timeout=0.02)
        deadline.check("sharing four partitions")
    (*_, newest) = cluster.ledgers[f"group/{group}/{topic}"].all
    assert newest == {"partitions": 4, "positions": [0, 0, 0, 0]}


@KINDS
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_partition_added_to_a_groups_topic_is_read_from_its_beginning(cluster, join, group, kind, start):
    topic = cluster.topic()
    member = join(topic, group, kind, start=start)
    member.has(1)
    cluster.grow(topic, 2)
    cluster.write(topic, b"early", partition=1)
    assert values(member.take(1)) == [b"early"]
    (*_, newest) = cluster.ledgers[f"group/{group}/{topic}"].all
    assert newest == {"partitions": 1, "positions": [0, 0]}
    member.close()
    cluster.expire(group)
    with pytest.raises(errors.PositionLost):
        join(topic, group, kind, start=start).take(1)


def test_a_partition_added_while_no_member_was_there_is_read_from_its_beginning(cluster, join, group):
    topic = cluster.topic()
    first = join(topic, group, start="latest")
    first.has(1)
    first.close()
    cluster.grow(topic, 2)
    cluster.write(topic, b"early", partition=1)
    assert values(join(topic, group, start="latest").take(1)) == [b"early"]


def test_the_record_of_a_groups_start_is_not_read_again_while_no_partition_is_missing(cluster, join, group):
    topic = cluster.topic(2)
    cluster.write(topic, b"1")
    first = join(topic, group)
    first.take(1)
    ledger = cluster.ledgers[f"group/{group}/{topic}"]
    second = join(topic, group)
    share(first, second, topic, 2)
    second.until(second.is_sure)  # a reader makes sure once
    reads = ledger.reads
    second.close()
    first.has(2)
    assert (ledger.reads, len(ledger.all)) == (reads, 1)


def test_a_group_that_is_older_than_its_record_is_recorded(cluster, join, group):
    topic = cluster.topic()
    cluster.write(topic, *numbered(3))
    raw = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "log_level": 0})
    raw.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    raw.close()
    member = join(topic, group)
    assert values(member.take(2)) == [b"1", b"2"]
    member.until(lambda: cluster.ledgers[f"group/{group}/{topic}"].all)
    assert cluster.ledgers[f"group/{group}/{topic}"].all == [{"partitions": 1, "positions": [1]}]


def test_without_the_right_to_the_decision_log_a_group_reads_and_says_so_once(cluster, join, group, caplog):
    class Denied(Openings):
        def newest_opening(self, deadline):
            raise errors.AccessDenied("not for you")

    topics = cluster.topic(), cluster.topic()
    for topic in topics:
        cluster.ledgers[f"group/{group}/{topic}"] = Denied()
        cluster.write(topic, b"1")
    member = join(topics, group)
    assert values(member.take(2)) == [b"1", b"1"]
    member.until(member.is_sure)
    assert [r.message for r in caplog.records if "decision log" in r.message and group in r.message] != []
    assert len([r for r in caplog.records if r.name == "txnbridge"]) == 1


def test_another_members_record_in_between_is_no_error(cluster, join, group):
    class Contended(Openings):
        def open_behind(self, before, data, deadline):
            if not self.all:
                self.opened({"partitions": 2, "positions": [None, 7]}, deadline)
            return super().open_behind(before, data, deadline)

    topic = cluster.topic(2)
    cluster.ledgers[f"group/{group}/{topic}"] = ledger = Contended()
    cluster.write(topic, b"1")
    assert values(join(topic, group).take(1)) == [b"1"]
    assert ledger.all[-1] == {"partitions": 2, "positions": [0, 7]}


def test_trouble_with_the_decision_log_comes_out_of_the_poll_and_nothing_is_handed_out(cluster, join, group):
    class Full(Openings):
        full = True

        def opened(self, data, deadline):
            if self.full:
                raise errors.StorageFailed("disk full")
            return super().opened(data, deadline)

    topic = cluster.topic()
    cluster.ledgers[f"group/{group}/{topic}"] = ledger = Full()
    cluster.write(topic, b"1")
    member = join(topic, group)
    with pytest.raises(errors.StorageFailed):
        member.take(1)
    ledger.full = False
    assert values(member.take(1)) == [b"1"]
    assert [data["positions"] for data in ledger.all] == [[0]]


def test_messages_that_retention_removed_raise_position_lost_and_are_not_skipped(cluster, join, group):
    topic = cluster.topic(2)
    cluster.write(topic, *numbered(10))
    cluster.write(topic, b"other", partition=1)
    first = join(topic, group)
    messages = first.take(11)
    cluster.ack(first, *[m for m in messages if m.partition == 0][:3])
    first.close()
    cluster.trim(topic, 0, 6)
    member, alone, found = join(topic, group), join(topic, None), []
    with pytest.raises(errors.PositionLost, match=rf"is 3 in {topic}\[0\].* before 6"):
        while True:
            found += member.take(1)
    assert values(found) == [b"other"]
    assert member.positions()[topic, 0] == (3,)
    with pytest.raises(errors.PositionLost, match="before 6"):
        member.seek({(topic, 0): (5,)})
    member.seek({(topic, 0): (6,)})
    assert values(member.take(4)) == numbered(6, 10)
    assert [m.position for m in member.poll()] == []
    alone.take(5)
    cluster.trim(topic, 0, 8)
    alone.seek({(topic, 0): (8,)})
    with pytest.raises(errors.PositionLost, match="before 8"):
        alone.seek({(topic, 0): (2,)})
    assert values(alone.take(2)) == [b"8", b"9"]


def test_messages_that_retention_removes_under_a_reader_raise_position_lost(cluster, join):
    topic = cluster.topic()
    cluster.write(topic, *numbered(10))
    member = join(topic, None)
    member.take(10)
    member.seek({(topic, 0): (2,)})
    assert values(member.take(1)) == [b"2"]
    member.pause([(topic, 0)])
    cluster.trim(topic, 0, 6)
    member.resume([(topic, 0)])
    with pytest.raises(errors.PositionLost, match=r"is 3 .* before 6"):
        member.take(1)
    member.seek({(topic, 0): (6,)})
    assert values(member.take(4)) == numbered(6, 10)


def test_a_position_beyond_the_end_is_told(cluster, join):
    topic = cluster.topic()
    cluster.write(topic, b"1")
    member = join(topic, None)
    member.seek({(topic, 0): (100,)})
    with pytest.raises(errors.PositionLost, match=r"is 100 .* ends at 2"):
        member.take(1)


@ALL_KINDS
def test_after_a_seek_nothing_comes_that_was_fetched_before(cluster, join, group, kind):
    topic = cluster.topic(2)
    count = 3000
    for partition in range(2):
        for at in range(0, count, 1000):
            cluster.write(topic, *numbered(at, at + 1000), partition=partition)
    # The markers of three transactions stand between: offsets 1000, 2001 and 3002.
    offsets = [o for o in range(count + 2) if o not in (1000, 2001)]
    member = join(topic, None) if kind is None else join(topic, group, kind)
    member.has(2)
    member.seek({(topic, 0): (0,), (topic, 1): (0,)})
    chance = random.Random(7)
    expected = {0: 0, 1: 0}  # the index of the next message of each partition
    for _ in range(300):
        for message in member.poll(chance.choice([1, 10, 500]), chance.choice([0, 0.001, 0.05])):
            assert message.position == (offsets[expected[message.partition]],)
            expected[message.partition] += 1
        for partition in chance.sample([0, 1], chance.choice([0, 1, 2])):
            index = chance.randrange(count)
            member.seek({(topic, partition): (offsets[index],)})
            expected[partition] = index
            assert member.positions()[topic, partition] == (offsets[index],)
    left = sum(count - index for index in expected.values())
    for message in member.take(left):
        assert message.position == (offsets[expected[message.partition]],)
        expected[message.partition] += 1
    assert expected == {0: count, 1: count}


def test_a_time_is_found_among_the_markers_of_transactions(cluster, join):
    topic = cluster.topic()
    for number in range(3):  # their markers are stamped now
        cluster.write(topic, *numbered(2 * number, 2 * number + 2), timestamp=1_600_000_000_000 + number)
    member = join(topic, None, start=1_600_000_000_002)
    assert values(member.take(2)) == [b"4", b"5"]
    member.seek_to_time(1_600_000_000_003, Deadline(10))
    cluster.write(topic, b"early", timestamp=1)
    assert values(member.take(1)) == [b"early"]
    member.seek_to_time(1_600_000_000_001, Deadline(10))
    assert values(member.take(5)) == [*numbered(2, 6), b"early"]


@ALONE
def test_a_message_given_back_comes_again_with_those_behind_it(cluster, join, group, alone):
    topic = cluster.topic()
    cluster.write(topic, *numbered(5))
    member = join(topic, None if alone else group)
    member.take(4)
    member.nack({(topic, 0): [(3,), (1,)]})
    assert [(m.value, m.deliveries) for m in member.take(4)] == [(b"1", 2), (b"2", 2), (b"3", 2), (b"4", 1)]
    member.nack({(topic, 0): [(2,)], (topic, 7): [(0,)]})
    assert [(m.value, m.deliveries) for m in member.take(3)] == [(b"2", 3), (b"3", 3), (b"4", 2)]


def test_a_position_that_is_none_and_a_partition_that_is_not_here_are_refused(cluster, join):
    topic = cluster.topic()
    member = join(topic, None)
    with pytest.raises(errors.InvalidOption):
        member.seek({(topic, 0): (1, 2)})
    for call in (lambda: member.seek({(topic, 5): (0,)}), lambda: member.pause([(topic, 5)])):
        with pytest.raises(errors.InvalidState, match=rf"{topic}\[5\]"):
            call()


@ALL_KINDS
def test_a_paused_partition_delivers_nothing_until_it_is_resumed(cluster, join, group, kind):
    topic = cluster.topic(2)
    member = join(topic, None) if kind is None else join(topic, group, kind)
    member.has(2)
    chance = random.Random(11)
    read: dict[int, list[Any]] = {0: [], 1: []}
    written = 0

    def keep(messages, *partitions):
        for message in messages:
            assert message.partition in partitions
            read[message.partition].append(message.value)

    for _ in range(20):
        for partition in range(2):
            cluster.write(topic, *numbered(written, written + 50), partition=partition)
        written += 50
        keep(member.poll(30, chance.choice([0, 0.05])), 0, 1)
        member.pause([(topic, 0)])
        marker = len(read[1])
        while len(read[1]) < min(marker + 40, written):
            keep(member.poll(chance.choice([1, 30]), 1), 1)
        member.resume([(topic, 0)])
    while len(read[0]) + len(read[1]) < 2 * written:
        messages = member.take(1)
        keep(messages, 0, 1)
    assert read == {0: numbered(written), 1: numbered(written)}


@KINDS
def test_a_partition_stays_paused_when_the_group_is_shared_out_anew(cluster, join, group, kind):
    topic = cluster.topic(2)
    cluster.write(topic, b"0")
    cluster.write(topic, b"1", partition=1)
    first = join(topic, group, kind)
    first.take(2)
    first.pause([(topic, 0), (topic, 1)])
    second = join(topic, group, kind)
    share(first, second, topic, 2)
    with within(0):  # before the session of the one that left would have run out
        second.close()
        assert first.has(2) == []
    for partition in (1, 0):
        cluster.write(topic, b"new", partition=partition)
        first.resume([(topic, partition)])
        # What has come back begins again where the group stands; what has stayed does not.
        while (message := first.take(1)[0]).value != b"new":
            assert message.partition == partition
        assert message.partition == partition


def share(first, second, topic, partitions):
    """Poll two members until each partition is with one of them, and both have some."""
    everything = [(topic, number) for number in range(partitions)]
    deadline = Deadline(60)
    found: list[Any] = []
    while True:
        for member in (first, second):
            found += member.poll(timeout=0.02)
        shared = sorted([*first.positions(), *second.positions()])
        if shared == everything and first.positions() and second.positions():
            return found
        deadline.check(f"sharing {partitions} partitions")


@KINDS
def test_a_transaction_ends_before_its_partition_leaves(cluster, join, group, kind):
    topic = cluster.topic(2)
    cluster.write(topic, *numbered(2))
    cluster.write(topic, *numbered(2), partition=1)
    first = join(topic, group, kind)
    messages = first.take(4)

    def finish(partitions):
        cluster.ack(first, *messages)
        first.listener.on_revoking = None

    first.listener.on_revoking = finish
    second = join(topic, group, kind)
    assert share(first, second, topic, 2) == []
    wait_until(lambda: cluster.group(group) == {(topic, 0): 2, (topic, 1): 2})


@KINDS
def test_an_error_of_a_listener_comes_out_of_the_poll_and_the_partition_leaves_all_the_same(cluster, join, group, kind):
    class Failed(Exception):
        pass

    def fail(partitions):
        first.listener.on_revoking = None
        raise Failed

    topic = cluster.topic(2)
    first = join(topic, group, kind)
    first.has(2)
    first.listener.on_revoking = fail
    second = join(topic, group, kind)
    raised: list[Any] = []
    deadline = Deadline(60)
    while not (raised and first.positions() and second.positions()):
        for member in (first, second):
            try:
                member.poll(timeout=0.02)
            except Failed as error:
                raised.append(error)
        deadline.check("sharing")
    assert len(raised) == 1
    assert sorted([*first.positions(), *second.positions()]) == [(topic, 0), (topic, 1)]
    first.listener.here = dict.fromkeys(first.positions())


@pytest.mark.parametrize("kind", [COOPERATIVE, EAGER], ids=["cooperative", "eager"])
def test_a_member_that_was_thrown_out_cannot_acknowledge(cluster, join, group, kind):
    topic = cluster.topic(2)
    cluster.write(topic, *numbered(3))
    sleeper = join(topic, group, kind, **{"max.poll.interval.ms": 6000, "session.timeout.ms": 6000})
    slept = sleeper.take(3)
    other = join(topic, group, kind)
    # The one that sleeps polls no more: after six seconds its own client leaves the group.
    taken = other.take(3, timeout=60)
    assert values(taken) == numbered(3)
    with pytest.raises(KafkaException):
        cluster.ack(sleeper, *slept)
    cluster.ack(other, *taken[:1])
    wait_until(lambda: cluster.group(group)[topic, 0] == 1)
    share(sleeper, other, topic, 2)
    assert set(sleeper.listener.here) == set(sleeper.positions())


def test_a_new_owner_waits_until_the_acknowledgements_of_the_old_one_are_decided(cluster, join, group):
    topic = cluster.topic(2)
    for partition in range(2):
        cluster.write(topic, *numbered(3), partition=partition)
    first = join(topic, group)
    messages = first.take(6)
    producer = cluster.producer()
    producer.begin_transaction()
    mine = [m for m in messages if m.partition == 0]
    producer.send_offsets_to_transaction(behind(mine), first.ack_context().metadata, 20)
    first.close()
    second = join(topic, group)
    assert {m.partition for m in second.take(3)} == {1}
    assert list(second.positions()) == [(topic, 1)]
    producer.commit_transaction(20)
    cluster.write(topic, b"3")
    assert values(second.take(1)) == [b"3"]


@ALONE
def test_every_call_ends_by_its_deadline_while_the_broker_does_not_answer(start_kafka, group, alone, capfd):
    broker = start_kafka()
    cluster = Cluster(broker)
    topic = cluster.topic()
    cluster.write(topic, *numbered(10))
    member = Member(cluster, topic, None if alone else group, **{"session.timeout.ms": 6000})
    member.take(5)
    broker.pause()
    while member.poll(timeout=0.5):
        pass  # what was fetched before
    assert bounded(member.reader.poll, 10, Deadline(0.5)) == []
    with pytest.raises(errors.DeadlineExceeded):
        bounded(member.reader.lag, Deadline(0.5))
    with pytest.raises(errors.DeadlineExceeded):
        bounded(member.reader.seek_to_time, 0, Deadline(0.5))
    member.seek({(topic, 0): (2,)})  # within what was read: nothing is asked
    assert bounded(member.reader.poll, 10, Deadline(0.5)) == []
    broker.resume()
    assert values(member.take(8)) == numbered(2, 10)
    broker.kill()
    assert bounded(member.reader.poll, 10, Deadline(0.5)) == []
    bounded(member.closed_or_late)
    broker.start()
    again = Member(cluster, topic, None if alone else group)
    assert values(again.take(10, timeout=90)) == numbered(10)
    again.close()
    assert capfd.readouterr().err == ""


def bounded(call, *args):
    with within(0.5):
        return call(*args)
