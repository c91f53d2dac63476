"""Decision logs on a live broker: the contract, and what faults make of it."""

import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.cimpl import NewTopic
from txnbridge_kafka.decision_log import KafkaDecisionLog
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.settings.security import Access

from tests.in_time import takes, wait_until
from tests.kafka.kit import configure, kafka_names, plain_admin, plain_producer, topics_of, write
from tests.kafka.test_admin import as_guest, grant, guarded  # noqa: F401
from tests.keeping import keeping
from tests.log_contract import *  # noqa: F403
from tests.log_contract import ExactTrimming, append, bounds, read
from tests.log_faults import append_until_clear
from tests.log_live import *  # noqa: F403
from tests.log_live import outlive_kill_9
from txnbridge.errors import AccessDenied, DeadlineExceeded, InvalidOption, OutcomeUnknown, PositionLost, TxnBridgeError
from txnbridge.spi import Deadline, Emitter


def settings_for(url, access=None, **client):
    bootstrap = url.removeprefix("kafka://")
    quick = {"reconnect.backoff.max.ms": "200"}  # what waits for a broker that comes back need not wait longer
    return KafkaSettings(
        bootstrap, {"bootstrap.servers": bootstrap, **quick, **client}, access or Access(), 30, None, "tests", 0
    )


def open_log(url, name, timeout=30, access=None, **client):
    settings = settings_for(url, access, **client)
    return KafkaDecisionLog(settings, name, Deadline(timeout), Emitter("tests", []), topics_of(settings))


@pytest.fixture
def topic(name):
    return f"_txnbridge-log-{name}"


@pytest.fixture
def opened():
    yield from keeping(open_log)


@pytest.fixture
def logs_broker(kafka_broker):
    return kafka_broker


@pytest.fixture
def too_large():
    return 1_100_000, "too large"


@pytest.fixture
def made_with_two(admin, topic):
    create(admin, topic, partitions=2)
    return "2 partitions"


@pytest.fixture
def remove_topic(admin, topic):
    return lambda: delete(admin, topic)


@pytest.fixture
def stalled():
    """A record that was handed to a client with a connection may be stored."""
    return lambda used: [OutcomeUnknown if used else DeadlineExceeded, DeadlineExceeded]


@pytest.fixture  # type: ignore[no-redef]
def pausing(kafka_broker, admin):
    @contextmanager
    def pause():
        kafka_broker.pause()
        try:
            with pytest.raises(KafkaException):  # it may take a moment until all its threads stand still
                while True:
                    admin.list_topics(timeout=0.2)
            yield
        finally:
            kafka_broker.resume()

    return pause


def create(admin, topic, partitions=1, **config):
    config = {key.replace("_", "."): value for key, value in config.items()}
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result()


def configs(admin, topic):
    resource = kafka_names.ConfigResource(kafka_names.ResourceType.TOPIC, topic)
    return {entry.name: entry.value for entry in admin.describe_configs([resource])[resource].result().values()}


class TestTrimming(ExactTrimming):
    pass


def test_a_log_that_is_trimmed_while_it_is_read_is_not_read_with_a_hole(kafka_broker, name, opened):
    # Little is fetched ahead, so that the trimmed part was not here already.
    log = opened(kafka_broker.url, name, **{"fetch.message.max.bytes": "10000", "queued.min.messages": "1"})
    append(log, *(b"%d" % number + b"x" * 1000 for number in range(300)))
    reading = iter(log.read(None, None, Deadline(30)))
    assert next(reading)[0] == (0,)
    log.trim((299,), Deadline(30))
    seen = [0]
    with pytest.raises(PositionLost):
        seen.extend(position[0] for position, _ in reading)
    assert seen == list(range(len(seen)))
    assert len(seen) < 299


def test_a_record_that_the_broker_refuses_is_not_stored(kafka_broker, admin, log, topic):
    configure(admin, topic, "max.message.bytes", "1000")
    with pytest.raises(InvalidOption, match=rf"{topic}.*too large"):
        append(log, b"x" * 2000)
    append(log, b"small")
    assert read(log) == [((0,), b"small")]


def test_the_topic_keeps_everything(log, admin, topic):
    found = configs(admin, topic)
    assert found["cleanup.policy"] == "delete"
    assert found["retention.ms"] == found["retention.bytes"] == "-1"
    assert found["unclean.leader.election.enable"] == "false"
    assert found["min.insync.replicas"] == "1"  # of one broker
    assert len(admin.list_topics(topic).topics[topic].partitions) == 1


@pytest.mark.parametrize("name", ["a b", "a/b", "ü", "x" * 250], ids=ascii)
def test_a_name_that_no_topic_can_have_is_refused(kafka_broker, name):
    with pytest.raises(InvalidOption, match="application"):
        open_log(kafka_broker.url, name)


@pytest.mark.parametrize(
    "config",
    [
        {"cleanup_policy": "compact"},
        {"cleanup_policy": "compact,delete"},
        {"retention_ms": "604800000"},
        {"retention_bytes": "1000000"},
        {"unclean_leader_election_enable": "true"},
    ],
    ids=str,
)
def test_a_topic_that_would_lose_records_is_refused_by_name(kafka_broker, admin, name, topic, config):
    safe = {"retention_ms": "-1", "cleanup_policy": "delete"}
    create(admin, topic, **{**safe, **config})
    ((setting, _),) = config.items()
    with pytest.raises(InvalidOption, match=rf"(?s){topic}.*{setting.replace('_', '.')}=.*kafka-configs\.sh"):
        open_log(kafka_broker.url, name)


def end_a_transaction_in(topic, broker, *, commit, records):
    write(producer := plain_producer(broker, uuid.uuid4().hex), topic, *records)
    (producer.commit_transaction if commit else producer.abort_transaction)(30)


def test_the_end_of_somebodys_transaction_is_no_record_and_no_gap(kafka_broker, log, topic):
    append(log, b"0")
    end_a_transaction_in(topic, kafka_broker, commit=True, records=[b"1"])
    wait_for_end(log, (2,))
    assert read(log) == [((0,), b"0"), ((1,), b"1")]
    append(log, b"3")
    end_a_transaction_in(topic, kafka_broker, commit=False, records=[b"4"])
    wait_for_end(log, (5,))
    everything = [((0,), b"0"), ((1,), b"1"), ((3,), b"3"), ((4,), b"4")]
    assert read(log) == everything  # read without isolation
    assert read(log, (2,), (3,)) == everything[2:3]
    assert read(log, (2,), (2,)) == []


def test_a_gap_in_a_topic_that_is_compacted_by_now_is_not_passed_over(kafka_broker, log, admin, topic):
    append(log, b"0")
    end_a_transaction_in(topic, kafka_broker, commit=True, records=[b"1"])
    wait_for_end(log, (2,))
    append(log, b"3")
    configure(admin, topic, "cleanup.policy", "compact,delete")
    with pytest.raises(InvalidOption, match=r"cleanup\.policy=compact,delete"):
        read(log)
    assert read(log, (0,), (1,)) == [((0,), b"0"), ((1,), b"1")]


def wait_for_end(log, position):
    """The end of a transaction is written after its producer was told of it."""
    wait_until(lambda: log.end(Deadline(30)) == position)


def test_a_reading_that_is_never_short_of_records_ends_at_its_deadline_too(log):
    append(log, *(b"%d" % number for number in range(1000)))  # more than one answer has
    reading = iter(log.read(None, None, Deadline(0.5)))
    assert next(reading) == ((0,), b"0")
    time.sleep(0.6)
    with pytest.raises(DeadlineExceeded):
        list(reading)


def test_an_append_whose_answer_is_lost_is_unknown_and_the_next_one_is_not(proxy, name, opened):
    log = opened(proxy.url, name)
    append(log, b"0")
    hold = proxy.hold(answers="Produce")
    takes(1, OutcomeUnknown, lambda deadline: log.append(b"1", deadline))
    hold.answered()
    # What was given up is not sent again by a client that nobody asked to: only what is appended is added.
    assert append(log, b"2") == [(2,)]
    hold.drop()
    proxy.cut()
    assert append(log, b"3") == [(3,)]
    assert [record for _, record in read(log)] == [b"0", b"1", b"2", b"3"]


def test_an_append_whose_request_is_held_may_come_late_and_is_not_sent_twice(proxy, name, opened):
    log = opened(proxy.url, name)
    append(log, b"0")
    hold = proxy.hold(requests="Produce")
    takes(1, OutcomeUnknown, lambda deadline: log.append(b"late", deadline))
    assert append(log, b"1") == [(1,)]
    hold.release()
    hold.answered()
    assert append(log, b"2") == [(3,)]
    assert [record for _, record in read(log)] == [b"0", b"1", b"late", b"2"]


def test_an_append_whose_connection_drops_is_unknown_and_its_repetition_has_a_copy_in_front(proxy, name, opened):
    log = opened(proxy.url, name)
    append(log, b"0")
    hold = proxy.hold(answers="Produce")
    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(log.append, b"1", Deadline(30))
        hold.answered()
        hold.drop()
        proxy.cut()
        with pytest.raises(OutcomeUnknown):
            appending.result(30)
    assert log.append(b"1", Deadline(30)) == (2,)
    assert [record for _, record in read(log)] == [b"0", b"1", b"1"]


def test_a_reading_goes_on_when_its_connection_drops(proxy, name, opened):
    log = opened(proxy.url, name, **{"fetch.message.max.bytes": "10000", "queued.min.messages": "1"})
    append(log, *(b"%d" % number + b"x" * 1000 for number in range(100)))
    seen = []
    for position, _ in log.read(None, None, Deadline(30)):
        seen.append(position[0])
        if len(seen) in (10, 60):
            proxy.cut()
    assert seen == list(range(100))


@pytest.mark.full  # test_log_processes.py kills one in every run
def test_a_log_outlives_kill_9_of_its_broker(start_kafka, opened):
    broker = start_kafka()
    found = outlive_kill_9(broker, opened(broker.url, "kept"))
    assert [position[0] for position in found] == list(range(len(found)))


def delete(admin, topic):
    admin.delete_topics([topic])[topic].result()
    wait_until(lambda: topic not in admin.list_topics(timeout=10).topics)


def test_a_log_whose_topic_is_deleted_says_so_by_its_deadline(log, admin, topic):
    append(log, b"0")
    read(log)
    delete(admin, topic)
    until = Deadline(30)
    while answers(log):  # a busy broker lets go of it a moment later than it is out of the list
        until.check("deleting a topic")
    for call in (log.begin, log.end, lambda deadline: list(log.read((0,), (0,), deadline))):
        error = takes(1, DeadlineExceeded, call)
    takes(1, TxnBridgeError, lambda deadline: log.append(b"1", deadline))
    assert topic in str(error)


def answers(log):
    try:
        log.begin(Deadline(1))
    except DeadlineExceeded:
        return False
    return True


FORKING = """
import gc, os, sys
from tests.kafka.test_decision_log import append, open_log, read
log = open_log(sys.argv[1], sys.argv[2])
append(log, b"parent")
assert len(read(log)) == 1
child = os.fork()
if child == 0:
    del log
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
append(log, b"parent again")
assert len(read(log)) == 2
"""


def test_a_forked_child_forgets_the_parents_clients_and_the_parent_goes_on(kafka_broker, name):
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING, kafka_broker.url, name], check=True, timeout=60)


def test_each_right_that_is_missing_is_told_and_a_log_is_read_without_one_to_a_group(guarded, name, topic):  # noqa: F811
    broker, proxy = guarded
    admins = open_log(broker.url, name)
    append(admins, b"0", b"1")
    guest = as_guest(proxy)
    sasl = {key: value for key, value in guest["client"].items() if key != "bootstrap.servers"}
    with pytest.raises(AccessDenied, match=rf"(?s){topic}.*kafka-topics\.sh.*kafka-acls\.sh"):
        open_log(proxy.url, name, access=guest["access"], **sasl)
    grant(broker, topic, ["DESCRIBE"])
    log = open_log(proxy.url, name, access=guest["access"], **sasl)  # its settings it may not read
    assert bounds(log) == ((0,), (1,))
    granting = rf"(?s){topic}.*kafka-acls\.sh .* --topic {topic}"
    with pytest.raises(AccessDenied, match=granting):
        append(log, b"never")
    with pytest.raises(AccessDenied, match=granting):
        read(log)
    with pytest.raises(AccessDenied, match=granting):
        log.trim((1,), Deadline(30))
    grant(broker, topic, ["READ", "WRITE"])
    append(log, b"2")
    for _ in range(3):
        assert read(log) == [((0,), b"0"), ((1,), b"1"), ((2,), b"2")]
    # Whether the topic is compacted it may not see, so it cannot tell what a gap is.
    end_a_transaction_in(topic, broker, commit=True, records=[b"3"])
    wait_for_end(log, (4,))
    append(log, b"5")
    assert read(log, (0,), (2,)) == read(admins, (0,), (2,))
    assert [record for _, record in read(admins)] == [b"0", b"1", b"2", b"3", b"5"]
    with pytest.raises(PositionLost, match="compacted"):
        read(log)
    log.close()
    admins.close()


@pytest.mark.full
def test_a_log_on_three_nodes_outlives_the_leader_of_its_topic(start_kafka):
    cluster = start_kafka(nodes=3)
    admin = plain_admin(cluster)
    log = open_log(cluster.url, "three")
    topic = "_txnbridge-log-three"
    (partition,) = admin.list_topics(topic).topics[topic].partitions.values()
    assert len(partition.replicas) == 3
    assert configs(admin, topic)["min.insync.replicas"] == "2"
    stored, leaders = {}, []
    for number in range(300):
        record = b"%d" % number
        position = append_until_clear(log, record, 120)
        stored[position] = record
        if number % 100 == 50:  # whoever leads next may know the end of the log later than this one did
            leaders.append(admin.list_topics(topic).topics[topic].partitions[0].leader)
            cluster.kill(leaders[-1])
        *_, last = log.read((max(0, position[0] - 5),), position, Deadline(120))
        assert last == (position, record)
        if number % 100 == 99:
            cluster.start(leaders[-1])
    assert len(leaders) == 3
    found = dict(read(log))
    assert stored.items() <= found.items()
    assert set(found.values()) == set(stored.values())
    assert [position[0] for position in found] == list(range(len(found)))
    log.close()
