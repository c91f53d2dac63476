"""Reading from PySpark: what is committed, the same rows at each repetition, and nothing skipped in silence."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from itertools import chain
from typing import Any

import confluent_kafka.admin
import pyarrow as pa
import pytest
from pyspark_txnbridge import offsets_behind
from pyspark_txnbridge._read import fetch as _fetch
from pyspark_txnbridge._read import offset_ranges as _offset_ranges
from pyspark_txnbridge._read.source_options import SourceOptions
from txnbridge_conformance.observing import eventually
from txnbridge_embedded.client.schema import OFFSET_BITS
from txnbridge_pulsar import client as wire

import txnbridge
from tests.failing import on_call
from tests.pulsar.client_kit import service
from tests.pulsar.reading_kit import write, write_chunks
from tests.spark.kit import mostly_embedded, new_run, where_positions_are_numbers
from txnbridge import Admin, Capability, InvalidOption, Message, NotFound, NotSupported, PositionLost
from txnbridge._base.messages import columns_of
from txnbridge.spi import NO_HEADERS

pytest.importorskip("pyspark.sql", reason="needs PySpark")
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark_txnbridge._read.readers import BatchReader, StreamReader


@pytest.fixture(autouse=True)
def nothing_read():
    yield
    _fetch._feeds.clear()
    _offset_ranges.planners.clear()


@pytest.fixture
def topic(bridge):
    name = f"in-{new_run()}"
    bridge.admin.create_topic(name, partitions=2)
    return name


def send(bridge, topic, values, partition=None):
    """Commit numbers, and wait until readers see them: a broker may say that before."""
    with bridge.transaction() as txn:
        for value in values:
            txn.send(topic, str(value).encode(), partition=partition)
    last = str(values[-1]).encode()
    eventually(lambda: last in [message.value for message in bridge.read(topic, 1_000_000)], "it can be read")


def load(spark, url, **given):
    return spark.read.format("txnbridge").options(url=url, **given).load()


def numbers(frame):
    return sorted(int(row.value) for row in frame.select("value").collect())


def test_a_batch_reads_what_is_committed_now(spark, url, bridge, topic):
    send(bridge, topic, range(50), partition=0)
    send(bridge, topic, range(50, 70), partition=1)
    with bridge.transaction() as txn:
        txn.send(topic, b"-1", partition=0)
        txn.abort()
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"-2", partition=0)
    frame = load(spark, url, topic=topic)
    assert numbers(frame) == list(range(70))
    assert frame.rdd.getNumPartitions() == 2
    bridge.abort(txn.token)


@mostly_embedded
def test_the_columns_are_those_of_the_kafka_source(spark, url, bridge, topic):
    with bridge.transaction() as txn:
        headers = [("a", b"1"), ("a", b"\xff")]
        txn.send(topic, b"one", key=b"k", headers=headers, partition=1, timestamp=1_700_000_000_123)
        txn.send(topic, None, partition=1, timestamp=1_700_000_000_124)
    eventually(lambda: len(bridge.read(topic, 10)) == 2, "it can be read")
    frame = load(spark, url, topic=topic)
    assert frame.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    one, two = load(spark, url, subscribe=topic, includeHeaders="true").orderBy("offset").collect()
    assert (one.key, one.value, one.topic, one.partition, one.offset) == (b"k", b"one", topic, 1, 0)
    assert (one.timestamp.timestamp(), one.timestampType) == (1_700_000_000.123, None)
    assert [(pair.key, pair.value) for pair in one.headers] == [("a", b"1"), ("a", b"\xff")]
    assert (two.key, two.value, two.offset, two.headers) == (None, None, 1, None)


@mostly_embedded
def test_a_batch_reads_between_positions(spark, url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    send(bridge, topic, range(10, 20), partition=1)
    start = json.dumps({topic: {"0": 3, "1": "latest"}})
    end = json.dumps({topic: {"0": 7, "1": -1}})
    assert numbers(load(spark, url, topic=topic, startingOffsets=start, endingOffsets=end)) == [3, 4, 5, 6]


def test_a_pattern_finds_topics_also_those_that_are_made_later(url, bridge, topic):
    send(bridge, topic, [1])
    pattern = {"subscribePattern": f"{topic}(-.)?"}
    assert batch_of(url, **pattern) == [1]
    stream = Stream(url, **pattern)
    bridge.admin.create_topic(f"{topic}-2", partitions=1)
    bridge.admin.create_topic(f"{topic}-other", partitions=1)
    send(bridge, f"{topic}-2", [2])
    send(bridge, f"{topic}-other", [3])
    assert flat(stream.run()) == [2]
    with pytest.raises(NotFound, match="no topic that may be read has a name that subscribePattern=nothing matches"):
        batch_of(url, subscribePattern="nothing")


@mostly_embedded
def test_a_topic_that_fits_a_pattern_and_may_not_be_read_stops_nothing(url, bridge, topic, caplog, monkeypatch):
    send(bridge, topic, [1])
    bridge.ensure_topics(f"{topic}-secret")
    monkeypatch.setattr(Admin, "unreadable", lambda _, topics: [name for name in topics if name.endswith("-secret")])
    stream = Stream(url, subscribePattern=f"{topic}.*", startingOffsets="earliest")
    assert flat(stream.run()) == [1]
    assert stream.at.keys() == {topic}
    assert caplog.text.count(f"'{topic}-secret' fits subscribePattern, and is left out") == 1


@mostly_embedded
def test_a_topic_that_fits_a_pattern_and_is_deleted_before_its_ends_are_known_stops_nothing(
    url, bridge, topic, monkeypatch
):
    def delete(_, topics):
        if f"{topic}-gone" in topics:
            bridge.admin.delete_topic(f"{topic}-gone")

    send(bridge, topic, [1])
    bridge.ensure_topics(f"{topic}-gone")
    on_call(monkeypatch, Admin, "bounds", delete)
    assert batch_of(url, subscribePattern=f"{topic}.*") == [1]


def test_only_assigned_partitions_are_read(url, bridge, topic):
    send(bridge, topic, [1], partition=0)
    send(bridge, topic, [2], partition=1)
    assert batch_of(url, assign=json.dumps({topic: [1]})) == [2]
    with pytest.raises(NotFound, match=rf"assign names {topic}\[2\]"):
        batch_of(url, assign=json.dumps({topic: [1, 2]}))


def test_a_batch_reads_between_times(url, bridge, topic):
    if not bridge.capabilities[Capability.START_BY_TIME]:
        pytest.skip("this broker finds no message by its time")
    begin = 1_700_000_000_000
    for number in range(6):  # the first partition has the times 0, 2, 4, the second one 1, 3, 5
        with bridge.transaction() as txn:
            txn.send(topic, b"%d" % number, partition=number % 2, timestamp=begin + number)
    eventually(lambda: len(bridge.read(topic, 10)) == 6, "it can be read")
    assert batch_of(url, topic, startingTimestamp=str(begin + 2), endingTimestamp=str(begin + 4)) == [2, 3]
    assert batch_of(url, topic, startingTimestamp=str(begin + 3), endingTimestamp=str(begin + 9)) == [3, 4, 5]
    each = json.dumps({topic: {"0": begin + 4, "1": begin + 1}})
    assert batch_of(url, topic, startingOffsetsByTimestamp=each) == [1, 3, 4, 5]
    with pytest.raises(InvalidOption, match=rf"{topic}\[0\] has no message at or after {begin + 5}"):
        batch_of(url, topic, startingTimestamp=str(begin + 5))
    late = {"startingTimestamp": str(begin + 5), "startingOffsetsByTimestampStrategy": "latest"}
    assert batch_of(url, topic, **late) == [5]
    assert Stream(url, topic, **late).run() == [[5]]


@where_positions_are_numbers
@pytest.mark.parametrize(
    ("option", "least", "most"), [({"minPartitions": "6"}, 6, 40), ({"maxRecordsPerPartition": "10"}, 5, 10)]
)
def test_a_batch_is_divided_among_as_many_tasks_as_asked_for(url, bridge, topic, option, least, most):
    send(bridge, topic, range(40), partition=0)
    send(bridge, topic, range(40, 45), partition=1)
    stream = Stream(url, topic, startingOffsets="earliest", **option)
    batch = BatchReader(SourceOptions.parse({"url": url, "topic": topic, **option}))
    micro_batch = stream.reader.partitions(stream.at, stream.plan())
    for reader, tasks in [(batch, batch.partitions()), (stream.reader, micro_batch)]:
        rows = [values(reader, [task]) for task in tasks]
        assert len(rows) >= least and max(map(len, rows)) <= most
        assert sorted(flat(rows)) == list(range(45))


@mostly_embedded
def test_several_topics_are_read_together(spark, url, bridge, topic):
    other = f"in-{new_run()}"
    bridge.admin.create_topic(other, partitions=1)
    send(bridge, topic, range(3))
    send(bridge, other, range(3, 5))
    assert numbers(load(spark, url, subscribe=f"{topic}, {other}")) == list(range(5))


@mostly_embedded
def test_a_topic_without_messages_has_no_rows(spark, url, topic):
    assert load(spark, url, topic=topic).collect() == []


def batch_of(url, topic="", **given):
    """Return the values that a batch reads."""
    reader = BatchReader(SourceOptions.parse({"url": url, "topic": topic, **given}))
    return sorted(values(reader, reader.partitions()))


def values(reader, tasks):
    return [int(value) for task in tasks for part in reader.read(task) for value in part.column("value").to_pylist()]


class Stream:
    """A query that reads: where it stands is what Spark writes into its checkpoint."""

    def __init__(self, url, topic="", start=None, reader=None, **given):
        self.reader = reader or StreamReader(SourceOptions.parse({"url": url, "topic": topic, **given}))
        self.at = start or self.reader.initialOffset()

    def plan(self):
        return json.loads(json.dumps(self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())))

    def read(self, end):
        return sorted(values(self.reader, self.reader.partitions(self.at, end)))

    def step(self):
        """One micro-batch; None if there is nothing new."""
        end = self.plan()
        if end == self.at:
            return None
        found = self.read(end)
        self.at = end
        return found

    def run(self):
        """Every micro-batch that there is now."""
        return list(iter(self.step, None))


def flat(batches):
    return list(chain.from_iterable(batches))


def test_a_stream_goes_on_with_what_is_committed_since(url, bridge, topic):
    send(bridge, topic, [1], partition=0)
    stream = Stream(url, topic)
    assert stream.run() == []
    send(bridge, topic, range(10, 15), partition=0)
    send(bridge, topic, range(15, 20), partition=1)
    assert stream.run() == [list(range(10, 20))]
    assert Stream(url, topic, startingOffsets="earliest").run() == [[1, *range(10, 20)]]


@pytest.mark.parametrize("url", [pytest.param("pulsar", marks=pytest.mark.full)], indirect=True)
def test_a_message_in_chunks_is_in_the_batch_that_has_its_last_chunk(url, pulsar_broker, topic):
    stored, stream = f"persistent://public/default/{topic}-partition-0", Stream(url, topic, timeout="5")
    with wire.PulsarClient(service(pulsar_broker)) as client:
        write_chunks(client, stored, [b"0"], of=3)
        end = stream.plan()
        write_chunks(client, stored, [b"1", b"2"], first=1, of=3)
        write(client, stored, b"7")
        assert stream.read(end) == []
        stream.at = end
        assert stream.run() == [[7, 12]]
        write_chunks(client, stored, [b"its sender is dead"], of=3)
        assert flat(stream.run()) == []


def test_rows_behind_an_open_transaction_come_after_it_has_ended(url, bridge, topic):
    if not bridge.capabilities[Capability.ISOLATION]:
        pytest.skip("an open transaction holds nobody back here")
    stream = Stream(url, topic)
    send(bridge, topic, [1], partition=0)
    with bridge.transaction(prepare=True) as aborted:
        aborted.send(topic, b"-1", partition=0)
    with bridge.transaction(prepare=True) as committed:
        committed.send(topic, b"3", partition=0)
    with bridge.transaction() as txn:
        txn.send(topic, b"4", partition=0)
    send(bridge, topic, [2], partition=1)
    assert stream.run() == [[1, 2]]
    bridge.abort(aborted.token)
    assert flat(stream.run()) == []
    bridge.commit(committed.token)
    eventually(lambda: len(bridge.read(topic, 10)) == 4, "all of it can be read")
    assert flat(stream.run()) == [3, 4]


def test_a_batch_that_is_repeated_has_the_same_rows_whatever_was_committed_meanwhile(url, bridge, topic):
    stream = Stream(url, topic)
    send(bridge, topic, range(10))
    end = stream.plan()
    with bridge.transaction() as txn:
        txn.send(topic, b"-1")
        txn.abort()
    send(bridge, topic, range(10, 30))
    bridge.admin.grow_topic(topic, 3)
    assert Stream(url, topic, start=stream.at).read(end) == list(range(10)) == stream.read(end)


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
def test_a_first_batch_that_is_repeated_begins_where_it_was_planned_to(url, bridge, topic):
    """Spark stores no initial offset: it asks for one again."""
    send(bridge, topic, range(10), partition=0)
    end = Stream(url, topic, startingOffsets="earliest").plan()
    assert Stream(url, topic, startingOffsets="latest").read(end) == list(range(10))
    assert Stream(url, topic, start=end).plan() == end
    remove_before(url, topic, 4)
    with pytest.raises(PositionLost, match="everything before 4"):
        Stream(url, topic, startingOffsets="earliest").read(end)


@where_positions_are_numbers
def test_a_process_that_reads_ranges_again_and_again_reads_each_of_them_whole(url, bridge, topic):
    """Spark keeps its Python processes, and each keeps its connection: what it has read before says nothing."""
    for begin in range(0, 60, 20):  # each transaction leaves a mark behind it, which is no message
        send(bridge, topic, range(begin, begin + 20), partition=begin // 20 % 2)
    reader = BatchReader(SourceOptions.parse({"url": url, "topic": topic}))
    tasks = reader.partitions()
    whole = [values(reader, [task]) for task in tasks]
    assert sorted(flat(whole)) == list(range(60))
    for _ in range(4):
        assert [values(reader, [task]) for task in tasks] == whole
        for task, rows in zip(tasks, whole, strict=True):
            assert values(reader, [InputPartition(replace(task.value, start=(10,)))]) == rows[10:]


@where_positions_are_numbers
def test_a_micro_batch_is_no_larger_than_asked_for(url, bridge, topic):
    stream = Stream(url, topic, maxOffsetsPerTrigger="7")
    send(bridge, topic, range(40), partition=0)
    send(bridge, topic, range(40, 50), partition=1)
    found = stream.run()
    assert max(map(len, found)) <= 7 < len(found)
    assert sorted(flat(found)) == list(range(50))
    assert stream.reader.latestOffset(stream.at, ReadAllAvailable()) == stream.at


@mostly_embedded
def test_a_program_learns_from_the_progress_how_far_its_query_is_behind(spark, url, bridge, topic, tmp_path):
    send(bridge, topic, range(40), partition=0)
    send(bridge, topic, range(10), partition=1)
    options = {"url": url, "topic": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
    frame = spark.readStream.format("txnbridge").options(**options).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    first, *_, last = [offsets_behind(each.sources[0]) for each in query.recentProgress if each.numInputRows]
    # Behind the messages of a partition is a mark where brokers have such, and it is a position, too.
    assert first in (_behind(0, 30), _behind(1, 31)) and last == _behind(0, 0)


def _behind(least, most):
    average = (least + most) / 2
    return {"minOffsetsBehindLatest": least, "maxOffsetsBehindLatest": most, "avgOffsetsBehindLatest": average}


def test_partitions_that_a_topic_gets_are_read_from_their_beginning(url, bridge, topic):
    stream = Stream(url, topic)
    send(bridge, topic, [1], partition=0)
    assert stream.run() == [[1]]
    bridge.admin.grow_topic(topic, 3)
    with txnbridge.connect(url) as fresh:  # which knows of it
        send(fresh, topic, [2, 3], partition=2)
    end = stream.plan()
    (first, _end) = bridge.admin.bounds(topic)[topic, 2]
    assert end[topic]["2"] == _offset_ranges.to_json({(topic, 2): first})[topic]["2"]
    assert flat(stream.run()) == [2, 3]


@where_positions_are_numbers
def test_with_available_now_a_stream_ends_where_the_topic_ended_when_it_began(url, bridge, topic):
    stream = Stream(url, topic, maxOffsetsPerTrigger="4")
    send(bridge, topic, range(10), partition=0)
    stream.reader.prepareForTriggerAvailableNow()
    send(bridge, topic, range(10, 20), partition=0)
    bridge.admin.grow_topic(topic, 3)
    assert flat(stream.run()) == list(range(10))
    again = Stream(url, topic, start=stream.at)
    again.reader.prepareForTriggerAvailableNow()
    assert flat(again.run()) == list(range(10, 20))


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
@pytest.mark.parametrize("fail", ["true", "false"])
def test_with_available_now_a_new_stream_begins_at_the_end_of_a_topic_that_grows_meanwhile(url, bridge, topic, fail):
    send(bridge, topic, range(5), partition=0)
    reader = StreamReader(SourceOptions.parse({"url": url, "topic": topic, "failOnDataLoss": fail}))
    reader.prepareForTriggerAvailableNow()
    send(bridge, topic, range(5, 9), partition=0)
    bridge.admin.grow_topic(topic, 3)
    stream = Stream(url, topic, reader.initialOffset(), reader=reader)
    send(bridge, topic, [9], partition=0)
    assert stream.run() == []
    assert Stream(url, topic, start=stream.at).run() == [[9]]


# The others drop whole files or ledgers, when they like.
where_records_can_be_removed = pytest.mark.parametrize("url", ["embedded", "kafka"], indirect=True)


def remove_before(url, topic, offset):
    """Remove records of partition 0, as retention does."""
    if url.startswith("embedded"):
        with sqlite3.connect(url.removeprefix("embedded:")) as connection:
            ((id,),) = connection.execute(
                "SELECT p.id FROM partitions p JOIN topics t ON t.id = p.topic_id WHERE t.name = ? AND p.number = 0",
                (topic,),
            )
            connection.execute("UPDATE partitions SET first = ? WHERE id = ?", (offset, id))
            base = id << OFFSET_BITS
            connection.execute("DELETE FROM messages WHERE id >= ? AND id < ?", (base, base + offset))
        connection.close()
    else:
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": url.removeprefix("kafka://"), "log_level": 0})
        (answer,) = client.delete_records([TopicPartition(topic, 0, offset)]).values()
        answer.result(30)


@where_records_can_be_removed
def test_a_position_below_retention_stops_the_stream(url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    stream = Stream(url, topic, startingOffsets="earliest")
    end = stream.plan()
    remove_before(url, topic, 4)
    with pytest.raises(PositionLost, match=r"everything before 4\. Nothing was skipped; with failOnDataLoss=false"):
        stream.plan()
    with pytest.raises(PositionLost, match="everything before 4"):
        stream.read(end)
    with pytest.raises(PositionLost, match="everything before 4"):
        batch_of(url, topic, startingOffsets=json.dumps({topic: {"0": 0, "1": "earliest"}}))


@where_records_can_be_removed
def test_where_losses_are_accepted_the_stream_goes_on_and_says_so(url, bridge, topic, caplog):
    send(bridge, topic, range(10), partition=0)
    given = {"failOnDataLoss": "false", "startingOffsets": "earliest"}
    stream, planned = Stream(url, topic, **given), Stream(url, topic, **given)
    end = planned.plan()
    remove_before(url, topic, 4)
    assert flat(stream.run()) == list(range(4, 10))
    assert f"{topic}[0] cannot be read at 0: retention has removed everything before 4" in caplog.text
    assert planned.read(end) == list(range(4, 10))
    start = json.dumps({topic: {"0": 0, "1": "earliest"}})
    assert batch_of(url, topic, failOnDataLoss="false", startingOffsets=start) == list(range(4, 10))


@where_records_can_be_removed
def test_retention_that_passes_a_task_while_it_reads_is_noticed(url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    reader = BatchReader(SourceOptions.parse({"url": url, "topic": topic}))
    (task,) = reader.partitions()
    remove_before(url, topic, 4)
    with pytest.raises(PositionLost):
        values(reader, [task])
    accepting = BatchReader(SourceOptions.parse({"url": url, "topic": topic, "failOnDataLoss": "false"}))
    assert values(accepting, [task]) == list(range(4, 10))


@pytest.mark.offline
@pytest.mark.parametrize("url", ["embedded"], indirect=True)
def test_where_losses_are_accepted_a_truncated_log_is_not_read_again(url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    stream = Stream(url, topic, startingOffsets="earliest")
    stream.run()
    stream.at[topic]["0"] += 5
    with pytest.raises(PositionLost, match="can be read up to 10 only"):
        Stream(url, topic, start=stream.at).run()
    stream = Stream(url, topic, start=stream.at, failOnDataLoss="false")
    assert flat(stream.run()) == []
    send(bridge, topic, [10], partition=0)
    assert flat(stream.run()) == [10]


@where_positions_are_numbers
def test_a_topic_that_lost_its_last_messages_behind_the_plan_of_a_batch_stops_it(url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    reader = BatchReader(SourceOptions.parse({"url": url, "topic": topic}))
    (task,) = reader.partitions()
    planned = InputPartition(replace(task.value, end=(task.value.end[0] + 5,)))
    with pytest.raises(PositionLost, match="its last messages are lost"):
        values(reader, [planned])


@pytest.mark.parametrize("more", [1, 30], ids=["shorter", "longer"])
def test_a_topic_that_was_made_anew_stops_the_stream(url, bridge, topic, more):
    send(bridge, topic, range(10), partition=0)
    if more > 10 and not bridge.admin.topic_ids(topic):
        pytest.skip("this broker tells nothing by which a longer topic could be told from the one before")
    stream = Stream(url, topic, startingOffsets="earliest")
    assert stream.run() == [list(range(10))]
    bridge.admin.delete_topic(topic)
    eventually(lambda: topic not in [found.name for found in bridge.admin.topics()], "it is gone")
    with pytest.raises(NotFound, match=topic):
        stream.plan()
    with txnbridge.connect(url) as fresh:
        fresh.admin.create_topic(topic, partitions=2)
        send(fresh, topic, range(100, 100 + more), partition=0)
    with pytest.raises(PositionLost, match=r"recreated|retention has removed everything"):
        stream.plan()
    going_on = Stream(url, topic, start=stream.at, failOnDataLoss="false")
    assert flat(going_on.run()) == list(range(100, 100 + more))


@where_positions_are_numbers
def test_a_topic_that_is_made_anew_between_a_plan_and_its_tasks_stops_the_batch(url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    stream = Stream(url, topic, startingOffsets="earliest")
    end = stream.plan()
    reader = BatchReader(SourceOptions.parse({"url": url, "topic": topic}))
    (task,) = reader.partitions()
    if not bridge.admin.topic_ids(topic):
        pytest.skip("this broker tells nothing by which a longer topic could be told from the one before")
    bridge.admin.delete_topic(topic)
    eventually(lambda: topic not in [found.name for found in bridge.admin.topics()], "it is gone")
    with txnbridge.connect(url) as fresh:
        fresh.admin.create_topic(topic, partitions=2)
        send(fresh, topic, range(100, 130), partition=0)
    with pytest.raises(PositionLost, match="recreated"):
        stream.read(end)
    with pytest.raises(PositionLost, match="recreated"):
        values(reader, [task])
    accepting = BatchReader(SourceOptions.parse({"url": url, "topic": topic, "failOnDataLoss": "false"}))
    assert values(accepting, [task]) == []


@mostly_embedded
@pytest.mark.parametrize("is_shorter", [False, True], ids=["gone", "shorter"])
def test_where_losses_are_accepted_a_repeated_batch_reads_what_is_left(url, bridge, topic, is_shorter, monkeypatch):
    other = f"{topic}-other"
    bridge.ensure_topics(other)
    send(bridge, other, range(10), partition=0)
    send(bridge, topic, range(10), partition=0)
    stream = Stream(url, subscribePattern=f"{topic}.*", startingOffsets="earliest", failOnDataLoss="false")
    end = stream.plan()
    bridge.admin.delete_topic(topic)
    eventually(lambda: topic not in [found.name for found in bridge.admin.topics()], "it is gone")
    if is_shorter:
        monkeypatch.setattr(Admin, "topic_ids", lambda *_: {})  # such a broker tells nothing of a new topic
        with txnbridge.connect(url) as fresh:
            fresh.admin.create_topic(topic, partitions=2)
        stream.at[topic]["0"] = 5
    assert stream.read(end) == list(range(10))


@where_positions_are_numbers
def test_a_batch_that_ends_before_it_begins_is_refused(url, bridge, topic):
    send(bridge, topic, range(10), partition=0)
    start, end = json.dumps({topic: {"0": 7, "1": 0}}), json.dumps({topic: {"0": 3, "1": "latest"}})
    with pytest.raises(InvalidOption, match=r"the end of .*\[0\], 3, lies before its start, 7"):
        batch_of(url, topic, startingOffsets=start, endingOffsets=end)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topic": ""}, "say what to read, once"),
        ({"provider": "txnbridge", "owner": "me"}, "CREATE TEMPORARY VIEW"),
        ({"subscribe": "a,b"}, "say what to read, once"),
        ({"topic": "", "subscribe": "a,,b"}, "a name in the list of topics is empty"),
        ({"assign": '{"in": [0]}'}, "say what to read, once"),
        ({"topic": "", "assign": "in"}, "option assign names partitions"),
        ({"topic": "", "assign": '{"in": [-1]}'}, "option assign names partitions"),
        ({"topic": "", "assign": "{}"}, "option assign names partitions"),
        ({"topic": "", "subscribePattern": "in("}, "no regular expression"),
        ({"startingTimestamp": "today"}, "startingTimestamp is a whole number"),
        ({"startingOffsetsByTimestamp": '{"in": {"0": [1, 2]}}'}, "startingOffsetsByTimestamp is a time for each"),
        ({"startingOffsetsByTimestamp": "1"}, "startingOffsetsByTimestamp is a time for each"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "contradict each other"),
        ({"startingOffsetsByTimestampStrategy": "earliest"}, "is error or latest"),
        ({"minPartitions": "0"}, "at least 1"),
        ({"maxRecordsPerPartition": "0"}, "at least 1"),
        ({"startingOffset": "latest"}, "did you mean startingOffsets"),
        ({"startingOffsets": "soon"}, "startingOffsets is earliest or latest, or a position or word"),
        ({"startingOffsets": '{"in": {"0": -3}}'}, "startingOffsets is earliest or latest"),
        ({"endingOffsets": "earliest"}, "endingOffsets is latest, or"),
        ({"maxOffsetsPerTrigger": "many"}, "whole number"),
        ({"maxOffsetsPerTrigger": "0"}, "at least 1"),
        ({"failOnDataLoss": "perhaps"}, "true or false"),
        ({"path": "x"}, "takes no path"),
        ({"kafka.bootstrap.servers": "localhost:1"}, "say where to read, once"),
        ({"timeout.x": "1"}, "unknown; did you mean timeout"),
    ],
)
def test_a_wrong_option_is_refused_by_name(change, message):
    with pytest.raises(InvalidOption, match=message):
        SourceOptions.parse({"url": "embedded:nowhere", "topic": "in"} | change)


def test_options_that_make_no_sense_together_are_refused():
    given = {"url": "embedded:nowhere", "topic": "in"}
    with pytest.raises(InvalidOption, match="a stream has no end"):
        StreamReader(SourceOptions.parse({**given, "endingOffsets": '{"in": {"0": 3}}'}))
    with pytest.raises(InvalidOption, match="maxOffsetsPerTrigger is for streams"):
        BatchReader(SourceOptions.parse({**given, "maxOffsetsPerTrigger": "3"}))


@where_positions_are_numbers
def test_positions_have_to_be_about_the_partitions_that_are_read(url, topic):
    for positions, message in [
        ({"0": 0}, r"does not say anything about .*\[1\]"),
        ({"0": 0, "1": 0, "2": 0}, r"names a partition that is not read: .*\[2\]"),
    ]:
        with pytest.raises(InvalidOption, match=message):
            batch_of(url, topic, startingOffsets=json.dumps({topic: positions}))
    for name in ("startingOffsets", "endingOffsets"):
        with pytest.raises(PositionLost, match="can be read up to 0 only"):
            batch_of(url, topic, **{name: json.dumps({topic: {"0": 5, "1": 0}})})


def test_a_missing_topic_is_named(url):
    with pytest.raises(NotFound, match="in-missing"):
        batch_of(url, "in-missing")


def test_a_limit_is_shared_out_evenly_and_used_up():
    start: _offset_ranges.Offsets = {("in", number): (100,) for number in range(4)}
    end: _offset_ranges.Offsets = {
        ("in", 0): (102,),
        ("in", 1): (100,),
        ("in", 2): (150,),
        ("in", 3): (1100,),
        ("in", 4): (7,),
    }
    bounds: dict[Any, Any] = dict.fromkeys(end, ((0,), (2000,)))
    for most, shares in [(1, [1, 0, 0, 0]), (11, [2, 0, 5, 4]), (100, [2, 0, 49, 49]), (5000, [2, 0, 50, 1000])]:
        found = _offset_ranges.limit_offsets(start, end, bounds, most)
        assert [found["in", number][0] - 100 for number in range(4)] == shares
        assert found["in", 4] == (7,)  # new: it is only placed
    bounds["in", 3] = (1100,), (2000,)
    assert _offset_ranges.limit_offsets(start, end, bounds, 1)["in", 3] == (1100,)  # so is what has lost its position


def test_positions_of_any_kind_survive_a_checkpoint():
    offsets = {("b", 0): (5,), ("a", 10): (3, 4, 0), ("a", 2): (0, 0, 1)}
    told = _offset_ranges.to_json(offsets)
    assert json.dumps(told) == '{"a": {"2": [0, 0, 1], "10": [3, 4, 0]}, "b": {"0": 5}}'
    assert _offset_ranges.from_json(told) == offsets
    with pytest.raises(NotSupported, match="more than a number"):
        _offset_ranges.limit_offsets(offsets, offsets, {}, 5)
    options = SourceOptions("embedded:nowhere", min_tasks=2)
    with pytest.raises(NotSupported, match="more than a number"):
        _offset_ranges.divide([_offset_ranges.OffsetRange("a", 0, (0, 0, 1), (3, 4, 0))], options)


def test_positions_of_more_than_a_number_have_a_column_of_their_own():
    messages = [Message("a", 2, (3, number, -1), None, b"v", NO_HEADERS, 0, 1, None) for number in range(2)]
    found = _fetch.to_arrow(columns_of(messages), headers=False)
    assert found.column("position").to_pylist() == [[3, 0, -1], [3, 1, -1]]
    assert found.schema.names == [column.split()[0] for column in _fetch.columns((3, 0, -1), False).split(", ")]
    assert pa.types.is_int32(found.column("partition").type)


@pytest.mark.offline
def test_a_time_beyond_sparks_timestamps_names_its_message_and_may_be_null_or_clipped():
    times = 1_700_000_000_000, 1_700_000_000_000_000_000, -(1 << 62)  # the second one is in nanoseconds
    messages = [Message("a", 2, (7 + each,), None, b"v", NO_HEADERS, time, 1, None) for each, time in enumerate(times)]
    with pytest.raises(NotSupported, match=r"a\[2\] at 8 has the time 1700000000000000000.*timestamps=null"):
        _fetch.to_arrow(columns_of(messages), False)
    microseconds = pa.int64()
    for option, rest in ("null", [None, None]), ("clip", [9223372036854775000, -9223372036854775000]):
        found = _fetch.to_arrow(columns_of(messages), False, option).column("timestamp")
        assert found.cast(microseconds).to_pylist() == [times[0] * 1000, *rest]


@pytest.mark.parametrize("option", ["null", "clip"])
def test_a_query_reads_beyond_a_message_with_a_time_that_spark_cannot_hold(spark, url, option):
    topic = f"in-{new_run()}"
    if url.startswith("kafka"):  # version 4 refuses times in the future by default, earlier ones take them
        kafka: Any = confluent_kafka.admin  # its list of names has gaps
        config = {"message.timestamp.after.max.ms": str((1 << 63) - 1)}
        admin = kafka.AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
        admin.create_topics([kafka.NewTopic(topic, 1, config=config)])[topic].result()
    with txnbridge.connect(url, create_topics=1) as bridge, bridge.transaction() as txn:
        txn.send(topic, b"1", timestamp=1_700_000_000_000_000_000)
        txn.send(topic, b"2")
    rows = spark.read.format("txnbridge").options(url=url, topic=topic)
    with pytest.raises(Exception, match=rf"{topic}\[0\] at .+ has the time"):
        rows.load().collect()
    assert rows.option("timestamps", option).load().count() == 2
