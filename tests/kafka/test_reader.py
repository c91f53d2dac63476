"""Readers in groups and alone, against a live broker and a listener that stands in for the core."""

from __future__ import annotations

import time
import uuid

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from txnbridge.errors import AccessDenied, DeadlineExceeded, Fenced, InvalidOption, InvalidState, NotFound, PositionLost
from txnbridge.spi import Context, Deadline, Emitter, Ledger, Subscription
from txnbridge_kafka.reader import KafkaReader
from txnbridge_kafka.settings import Settings
from txnbridge_kafka.topics import Topics

COOPERATIVE = {"assignment": "cooperative-sticky"}
EAGER = {"assignment": "range"}
CONSUMER = {"group_protocol": "consumer"}
KINDS = pytest.mark.parametrize("kind", [COOPERATIVE, EAGER, CONSUMER], ids=["cooperative", "eager", "consumer"])
APPLICATION = "reader-tests"


class Openings(Ledger):
    """A ledger of openings, in memory."""

    def __init__(self):
        self.all = []
        self.reads = 0

    def opened(self, data, deadline):
        self.all.append(data)
        return str(len(self.all))

    def newest_opening(self, deadline):
        self.reads += 1
        return (str(len(self.all)), self.all[-1]) if self.all else None

    def begin(self, deadline):
        raise NotImplementedError

    def record(self, kind, transaction, data, deadline):
        raise NotImplementedError

    def find(self, transaction, deadline):
        raise NotImplementedError

    def entries(self, kind, deadline):
        raise NotImplementedError


class Listener:
    """What the core is told: partitions with this reader, and those that left."""

    def __init__(self):
        self.here = {}
        self.told = []
        self.on_revoking = None

    def assigned(self, partition):
        self.told.append(("assigned", partition))
        self.here[partition] = object()
        return self.here[partition]

    def revoking(self, partitions):
        if self.on_revoking is not None:
            self.on_revoking(partitions)
        for partition in partitions:
            self.told.append(("revoking", partition))
            del self.here[partition]

    def lost(self, partitions):
        for partition in partitions:
            self.told.append(("lost", partition))
            del self.here[partition]


class Member:
    """A reader with its listener."""

    def __init__(self, cluster, topics, group, kind=COOPERATIVE, start="earliest", **client):
        self.listener = Listener()
        self.settings = cluster.settings(**kind, consumer=client)
        topics = (topics,) if isinstance(topics, str) else topics
        subscription = Subscription(topics, group, start)
        context = Context(
            "test", Emitter("test", ()), APPLICATION, 30, None, None, {}, lambda _, id: cluster.ledger(id)
        )
        self.reader = KafkaReader(
            self.settings, subscription, self.listener, context, Topics(self.settings), Deadline(20)
        )

    def __getattr__(self, name):
        return getattr(self.reader, name)

    def poll(self, count=500, timeout=0.2):
        return self.reader.poll(count, Deadline(timeout))

    def take(self, count, timeout=30):
        """So many messages, no more."""
        found = []
        deadline = Deadline(timeout)
        while len(found) < count:
            found += self.reader.poll(count - len(found), deadline)
            deadline.check(f"{count} messages of which {len(found)} came")
        return found

    def until(self, true, timeout=40):
        """Poll until something has come about; what was read meanwhile."""
        found = []
        deadline = Deadline(timeout)
        while not true():
            found += self.poll(timeout=0.05)
            deadline.check("waiting")
        return found

    def has(self, count):
        """Poll until so many partitions are here."""
        return self.until(lambda: len(self.reader.positions()) == count)

    def lag(self):
        return self.reader.lag(Deadline(10))

    def close(self):
        self.reader.close(Deadline(20))


class Cluster:
    """A broker, with the raw client's means to bring about what is to be read."""

    def __init__(self, broker):
        self.bootstrap = broker.url.removeprefix("kafka://")
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        self.ledgers = {}
        self._producers = []

    def settings(self, **options):
        client = {"bootstrap.servers": self.bootstrap}
        return Settings(self.bootstrap, client, {}, 30, None, APPLICATION, 0, **options)

    def ledger(self, id):
        return self.ledgers.setdefault(id, Openings())

    def topic(self, partitions=1):
        name = f"reader-{uuid.uuid4().hex[:12]}"
        for made in self.admin.create_topics([NewTopic(name, partitions, 1)]).values():
            made.result(20)
        return name

    def producer(self):
        """One that may be in a transaction while another one is."""
        made = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": uuid.uuid4().hex, "log_level": 0})
        made.init_transactions(30)
        self._producers.append(made)
        return made

    def write(self, topic, *values, partition=0, commit=True, **options):
        """One transaction."""
        if not self._producers:
            self.producer()
        producer = self._producers[0]
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=partition, **options)
        producer.flush(20)
        (producer.commit_transaction if commit else producer.abort_transaction)(20)

    def ack(self, member, *messages):
        """Acknowledge in a transaction, as a writer does."""
        if not self._producers:
            self.producer()
        producer = self._producers[0]
        producer.begin_transaction()
        context = member.ack_context()
        producer.send_offsets_to_transaction(behind(messages), context.metadata, 20)
        producer.commit_transaction(20)

    def group(self, group):
        """The positions that a group has, by partition."""
        asked = self.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        found = asked[group].result(20).topic_partitions
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}


def behind(messages):
    last = {(message.topic, message.partition): message.position[0] for message in messages}
    return [TopicPartition(*partition, offset + 1) for partition, offset in last.items()]


def values(messages):
    return [message.value for message in messages]


def numbered(start, stop=None):
    return [b"%d" % number for number in (range(start) if stop is None else range(start, stop))]


@pytest.fixture(scope="session")
def cluster(kafka_broker):
    return Cluster(kafka_broker)


@pytest.fixture
def group():
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def join(cluster):
    """Let members join, which leave at the end."""
    members = []

    def join_one(*args, **options):
        members.append(Member(options.pop("cluster", cluster), *args, **options))
        return members[-1]

    yield join_one
    for member in members:
        member.close()


# --- alone --------------------------------------------------------------------------------------------------------------


def test_without_a_group_every_partition_is_read_from_the_start(cluster, join):
    topic = cluster.topic(3)
    for partition in range(3):
        cluster.write(topic, b"%d" % partition, partition=partition)
    member = join(topic, None)
    assert sorted(member.positions().items()) == [((topic, number), (0,)) for number in range(3)]
    assert sorted((m.partition, m.value) for m in member.take(3)) == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert sorted(member.positions().values()) == [(1,), (1,), (1,)]


def test_a_message_comes_with_all_its_fields(cluster, join):
    topic = cluster.topic()
    headers = [("a", b"1"), ("none", None), ("a", b"\xff\x00"), ("empty", b"")]
    cluster.write(topic, b"value", key=b"key", headers=headers, timestamp=1_600_000_000_000)
    cluster.write(topic, None, key=b"gone")
    cluster.write(topic, b"")
    member = join(topic, None)
    full, tombstone, empty = member.take(3)
    assert (full.topic, full.partition, full.position) == (topic, 0, (0,))
    assert (full.key, full.value, full.timestamp, full.deliveries) == (b"key", b"value", 1_600_000_000_000, 1)
    assert full.headers.raw == (("a", b"1"), ("none", b""), ("a", b"\xff\x00"), ("empty", b""))
    assert full.source is member.listener.here[topic, 0]
    assert (tombstone.key, tombstone.value, len(tombstone.headers)) == (b"gone", None, 0)
    assert (empty.key, empty.value) == (None, b"")


def test_an_aborted_message_is_never_seen(cluster, join):
    topic = cluster.topic()
    cluster.write(topic, b"1")
    cluster.write(topic, b"bad", commit=False)
    cluster.write(topic, b"2")
    assert values(join(topic, None).take(2)) == [b"1", b"2"]


def test_a_group_goes_on_behind_what_it_acknowledged(cluster, join, group):
    topic = cluster.topic()
    cluster.write(topic, *numbered(10))
    first = join(topic, group)
    messages = first.take(6)
    cluster.ack(first, *messages[:4])
    first.close()
    assert values(join(topic, group).take(6)) == numbered(4, 10)
