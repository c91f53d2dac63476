"""Tests of decision logs on a live broker: the contract, and behaviour under faults."""

import json
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from click.testing import CliRunner
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import RequestCode, ResponseCode
from txnbridge_rocketmq.client.protocol.records import decode_records, unwrap
from txnbridge_rocketmq.client.protocol.send_requests import WireMessage, send
from txnbridge_rocketmq.cluster import identify_cluster
from txnbridge_rocketmq.decision_log import RocketMQDecisionLog

from tests.cluster_names import *  # noqa: F403
from tests.in_time import takes
from tests.keeping import keeping
from tests.log_contract import *  # noqa: F403
from tests.log_contract import append, bounds, read
from tests.log_faults import *  # noqa: F403
from tests.log_live import *  # noqa: F403
from tests.log_live import AnyName, outlive_kill_9
from tests.rocketmq.kit import LONG, FakeBroker, cluster_for, settings_for, stored
from txnbridge import Decision, errors
from txnbridge._decisions.decisions import Decisions
from txnbridge.cli import main
from txnbridge.cli._common import ExitCode
from txnbridge.spi import Deadline


class OpenLog(RocketMQDecisionLog):
    """Opens a log with connections of its own, as another process does."""

    def __init__(self, url, name, timeout=LONG, **given):
        self.cluster = cluster_for(url, timeout, **given)
        try:
            topic = self.cluster.settings.log_topic(name)
            super().__init__(self.cluster.client, self.cluster.topics.internal(topic, Deadline(timeout)))
        except BaseException:
            self.cluster.client.close()
            raise

    def close(self):
        super().close()
        self.cluster.client.close()


@pytest.fixture
def topic(name):
    """Return the name of the log's topic."""
    return f"_txnbridge-log-{name}"


@pytest.fixture
def opened():
    yield from keeping(OpenLog)


@pytest.fixture
def logs_broker(rocketmq_broker):
    return rocketmq_broker


@pytest.fixture
def append_request():
    return "SEND_MESSAGE_V2"


@pytest.fixture
def too_large():
    return 5_300_000, "MESSAGE_ILLEGAL"


@pytest.fixture
def made_with_two(rocketmq_broker, topic):
    rocketmq_broker.create_topic(topic, queues=2)
    return f"{topic} must have one queue"


@pytest.fixture
def remove_topic(log, topic):
    return lambda: delete_topic(log, topic)


@pytest.fixture
def stalled():
    return lambda used: [errors.OutcomeUnknown]


class TestNames(AnyName):
    endings = (" b", "/b", "ü", "%20b", ".b", "~", "|", "")


def test_a_reading_that_begins_behind_the_end_finds_nothing(log):
    append(log, b"0", b"1")
    assert read(log, (9,)) == []


def test_an_application_whose_name_no_topic_can_have_is_refused(rocketmq_broker):
    with pytest.raises(errors.InvalidOption, match="1 to 127"):
        OpenLog(rocketmq_broker.url, "x" * 120)


def test_a_trimmed_log_begins_later_for_all_and_what_is_before_can_still_be_read(log, open_named, name):
    at = append(log, b"0", b"1", b"2")
    log.trim(at[1], Deadline(LONG))
    for each in (log, open_named(name)):
        assert bounds(each) == (at[1], at[2])
        assert read(each) == [(at[1], b"1"), (at[2], b"2")]
        assert read(each, at[0]) == [(at[0], b"0"), (at[1], b"1"), (at[2], b"2")]


def test_a_log_that_was_trimmed_beyond_its_end_begins_where_it_did(log):
    at = append(log, b"0", b"1")
    log.trim((99,), Deadline(LONG))
    assert bounds(log) == (at[0], at[1])


def test_a_log_whose_topic_is_made_anew_begins_at_its_first_record(log, open_named, name, topic):
    at = append(log, b"0", b"1")
    log.trim(at[1], Deadline(LONG))
    log.cluster.topics.delete(topic, Deadline(LONG))
    anew = open_named(name)
    at = append(anew, b"new", b"next")
    assert at[0] == anew.origin
    assert bounds(anew) == (at[0], at[1])


@contextmanager
def log_on(reply):
    """Return a log on a broker that answers requests so."""

    def answer(peer, command):
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            table = {"brokerAddrTable": {"b": {"brokerName": "b", "brokerAddrs": {"0": broker.address}}}}
            peer.answer(command, body=json.dumps(table).encode())
        else:
            reply(peer, command)

    with FakeBroker(answer) as broker, RemotingClient([broker.address]) as client:
        yield RocketMQDecisionLog(client, Queue("log", "b", 0))


def answer_pull(peer, command, code, following, bounds, records):
    """Answer a pull with records, each by its offset; the next pull begins at `following`."""
    body = b"".join(stored(value, "log", queue=0, queue_offset=offset) for offset, value in records.items())
    told = {"nextBeginOffset": following, "minOffset": bounds[0], "maxOffset": bounds[1]}
    peer.answer(command, int(code), fields={name: str(value) for name, value in told.items()}, body=body)


def trimmed(first, end, pulls):
    """Return a log on a broker whose queue has lost records; `pulls` has the answer to a pull by its offset."""
    told = {RequestCode.GET_MIN_OFFSET: first, RequestCode.GET_MAX_OFFSET: end}

    def reply(peer, command):
        if command.code in told:
            peer.answer(command, fields={"offset": str(told[command.code])})
        elif command.code == RequestCode.QUERY_CONSUMER_OFFSET:
            peer.answer(command, int(ResponseCode.QUERY_NOT_FOUND))
        else:
            at = int(command.fields["queueOffset"])
            code, following, offsets = pulls.get(at, (ResponseCode.PULL_NOT_FOUND, at, []))
            answer_pull(peer, command, code, following, (first, end), {each: b"%d" % each for each in offsets})

    return log_on(reply)


LOST = {
    "dropped in front": {3: (ResponseCode.PULL_OFFSET_MOVED, 5, []), 5: (ResponseCode.SUCCESS, 8, [5, 6, 7])},
    "dropped, and not yet counted as dropped": {
        3: (ResponseCode.PULL_RETRY_IMMEDIATELY, 5, []),
        5: (ResponseCode.SUCCESS, 8, [5]),
    },
    "dropped on the way": {3: (ResponseCode.SUCCESS, 5, [3, 4]), 5: (ResponseCode.PULL_RETRY_IMMEDIATELY, 7, [])},
    "dropped within an answer": {3: (ResponseCode.SUCCESS, 8, [3, 5])},
}


@pytest.mark.parametrize("pulls", LOST.values(), ids=LOST)
def test_a_log_with_a_hole_is_not_read_over_it(pulls):
    with trimmed(3, 8, pulls) as log, pytest.raises(errors.PositionLost, match=r"has dropped record [345]"):
        read(log, (3,))


def test_a_log_begins_with_the_first_record_that_is_there():
    pulls = {3: (ResponseCode.PULL_RETRY_IMMEDIATELY, 5, []), 5: (ResponseCode.SUCCESS, 6, [5])}
    with trimmed(3, 8, pulls) as log:
        assert bounds(log) == ((5,), (7,))


def test_a_log_of_which_nothing_is_left_has_no_begin():
    with trimmed(8, 8, {}) as log:
        assert bounds(log) == (None, None)
        assert read(log) == []
        assert log.was_used(Deadline(LONG))


def test_a_log_that_became_shorter_while_it_was_read_ends_early():
    pulls = {3: (ResponseCode.SUCCESS, 5, [3, 4]), 5: (ResponseCode.PULL_NOT_FOUND, 5, [])}
    with trimmed(3, 8, pulls) as log:
        assert read(log) == [((3,), b"3"), ((4,), b"4")]


def test_a_record_that_is_not_as_safe_as_the_broker_was_told_to_make_it_is_not_decided(log, settings):
    """Without its replica the broker stores the record, and answers that it is not replicated."""
    append(log, b"0")
    settings(brokerRole="SYNC_MASTER", inSyncReplicas=2, minInSyncReplicas=1, slaveTimeout=200)
    with pytest.raises(errors.OutcomeUnknown, match=r"SLAVE_NOT_AVAILABLE|FLUSH_SLAVE_TIMEOUT|IN_SYNC"):
        log.append(b"1", Deadline(LONG))


def test_a_log_outlives_kill_9_of_its_broker(start_rocketmq, opened):
    broker = start_rocketmq(settings={"autoCreateTopicEnable": "true"})
    log = opened(broker.url, "kept")
    outlive_kill_9(broker, log, rounds=1)
    # This broker creates topics at the first message, with many queues. It must not create a deleted log so.
    delete_topic(log, "_txnbridge-log-kept")
    takes(0.5, errors.DeadlineExceeded, lambda deadline: log.append(b"never", deadline))
    assert log.cluster.topics.existing_queues("_txnbridge-log-kept", Deadline(LONG)) == ()


@pytest.mark.full
def test_records_that_a_broker_has_dropped_are_missed(start_rocketmq, opened):
    """By default a broker drops records after three days; this broker drops them at once, file by file."""
    hours = ";".join(f"{hour:02}" for hour in range(24))
    dropped = {"fileReservedTime": "0", "deleteWhen": hours, "cleanResourceInterval": "500"}
    broker = start_rocketmq(settings={"mappedFileSizeCommitLog": str(8 << 20), **dropped})
    log = opened(broker.url, "dropped")
    large = b"x" * 900_000
    at = append(log, b"first", *[large] * 40)
    deadline = Deadline(200)  # the broker first drops files after a minute
    while log.begin(Deadline(LONG)) == at[0]:
        deadline.check("waiting for the broker to drop the first file")
        time.sleep(0.5)
    with pytest.raises(errors.PositionLost):
        read(log, at[0])
    while True:
        begin, end = bounds(log)
        assert at[0] < begin <= end == at[-1]
        with suppress(errors.PositionLost):  # of a file that the broker drops meanwhile
            assert [position for position, _ in read(log)] == at[at.index(begin) :]
            break
    # No process takes the log for a new one.
    with pytest.raises((errors.EvidenceLost, errors.OutcomeUnknown)):
        Decisions(log, timeout=20).claim("id", Decision.COMMIT)


def store_and_forget(peer, command):
    """Store records, and do not answer where their queue ends."""
    if command.code == RequestCode.SEND_MESSAGE_V2:
        peer.answer(command, fields={"msgId": "7F0000010000000100000000000000FF", "queueId": "0", "queueOffset": "3"})
    else:
        peer.answer(command, int(ResponseCode.SYSTEM_BUSY), remark="no")


def test_an_append_that_stored_its_record_never_says_that_nothing_was_stored():
    """If it did, a commit that counts would be taken for one that was never claimed, and would be run again."""
    with log_on(store_and_forget) as log:
        takes(0.5, errors.OutcomeUnknown, lambda deadline: log.append(b"stored", deadline))


class MemoryQueue:
    """A broker with one queue, whose messages can be read a little after they were stored. It counts requests."""

    def __init__(self):
        self.records, self.visible_at = [], []
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def __call__(self, peer, command):
        with self.lock:
            self.counts[RequestCode(command.code).name] += 1
            end = sum(at <= time.monotonic() for at in self.visible_at)
            if command.code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
                return peer.answer(command, fields=self.store(command))
            if command.code == RequestCode.PULL_MESSAGE:
                return self.pull(peer, command, end)
        offset = end if command.code == RequestCode.GET_MAX_OFFSET else 0
        return peer.answer(command, fields={"offset": str(offset)})

    def store(self, command):
        bodies, batch = [command.body], stored(command.body, "log", system_flag=0)
        if command.code == RequestCode.SEND_BATCH_MESSAGE:
            bodies = [each.body for each in unwrap(decode_records(batch)[0])]
        first = len(self.records)
        self.records += bodies
        self.visible_at += [time.monotonic() + 0.003] * len(bodies)
        return {"msgId": "7F00000100002A9F00000000000000FF", "queueId": "0", "queueOffset": str(first)}

    def pull(self, peer, command, end):
        at = int(command.fields["queueOffset"])
        found = {each: self.records[each] for each in range(at, min(end, at + int(command.fields["maxMsgNums"])))}
        code = ResponseCode.SUCCESS if found else ResponseCode.PULL_NOT_FOUND
        answer_pull(peer, command, code, at + len(found), (0, end), found)


@pytest.fixture
def memory_queue():
    reply = MemoryQueue()
    with log_on(reply) as log:
        yield reply, log


@pytest.mark.offline
def test_an_append_is_one_request_and_reading_it_back_begins_with_the_last_known_record(memory_queue):
    queue, log = memory_queue
    (first,) = append(log, b"0")
    assert read(log, first, first) == [((0,), b"0")]
    queue.counts.clear()
    (second,) = append(log, b"1")
    pulls = queue.counts["PULL_MESSAGE"]
    assert read(log, first, second) == [((0,), b"0"), ((1,), b"1")]
    assert queue.counts == {"SEND_MESSAGE_V2": 1, "PULL_MESSAGE": pulls}
    # What was read once is read anew, because the log may have been recreated.
    queue.records[0] = b"other"
    assert read(log, first, second) == [((0,), b"other"), ((1,), b"1")]
    append(log, b"2")
    assert read(log, second, (2,))[0] == (second, b"1")
    queue.records[2] = b"other"
    append(log, b"3")
    assert read(log, (2,), (3,)) == [((2,), b"other"), ((3,), b"3")]


@pytest.mark.offline
def test_records_that_an_append_has_read_are_read_again_a_second_later(memory_queue):
    queue, log = memory_queue
    (at,) = append(log, b"0")
    queue.records[0] = b"other"
    time.sleep(1)
    assert read(log, at, at) == [(at, b"other")]


@pytest.mark.offline
def test_threads_that_append_at_once_share_requests_and_each_finds_its_record(memory_queue):
    queue, log = memory_queue
    decisions = Decisions(log, timeout=30)
    begin = decisions.begin()
    queue.counts.clear()

    def claim(number):
        return decisions.claim(f"id-{number}", Decision.COMMIT, {"number": number}, begin=begin)

    with ThreadPoolExecutor(16) as pool:
        claims = list(pool.map(claim, range(160)))
    assert all(each.mine and each.data == {"number": number} for number, each in enumerate(claims))
    assert len({each.position for each in claims}) == 160
    assert queue.counts["SEND_BATCH_MESSAGE"] and queue.counts.total() < 160


def delete_topic(log, topic):
    log.cluster.topics.delete(topic, Deadline(LONG))


def test_a_log_whose_topic_is_deleted_is_empty_and_not_made_anew_by_a_record(log, topic):
    append(log, b"0")
    delete_topic(log, topic)
    assert bounds(log) == (None, None)
    error = takes(2, errors.DeadlineExceeded, lambda deadline: log.append(b"1", deadline))
    assert "the topic is missing" in str(error)
    assert log.cluster.topics.existing_queues(topic, Deadline(LONG)) == ()


def test_a_log_that_nobody_can_use_any_more_is_renewed(rocketmq_broker, log, name, topic, opened):
    """The first record in the new log is from a process that still uses the old one."""
    old = Decisions(log, timeout=20)
    begin = old.begin(opening=old.open("owner"))
    old.claim("token", Decision.COMMIT, begin=begin)
    delete_topic(log, topic)
    opened(rocketmq_broker.url, name)
    with pytest.raises((errors.EvidenceLost, errors.OutcomeUnknown)):
        old.claim("more", Decision.COMMIT)
    with pytest.raises(errors.EvidenceLost, match="txnbridge log renew"):
        Decisions(opened(rocketmq_broker.url, name), timeout=20).open("owner")
    renew = ["log", "renew", "--url", rocketmq_broker.url, "--application", name]
    assert CliRunner().invoke(main, renew).exit_code == ExitCode.USAGE
    done = CliRunner().invoke(main, [*renew, "--yes"])
    assert done.exit_code == ExitCode.OK, done.output
    new_log = opened(rocketmq_broker.url, name)
    young = Decisions(new_log, timeout=20)
    opening = young.open("owner")
    for number in range(9):  # more records than a reader of the old log has read
        new = young.begin(opening=opening)
        assert young.claim(f"new-{number}", Decision.COMMIT, begin=new, opening=opening).mine
    with pytest.raises(errors.EvidenceLost, match="began it anew"):
        young.read("token", begin=begin)
    end = new_log.end(Deadline(LONG))
    for call in (old.begin, lambda: old.open("owner"), lambda: old.claim("late", Decision.COMMIT, begin=begin)):
        with pytest.raises(errors.EvidenceLost):
            call()
    assert new_log.end(Deadline(LONG)) == end


def remove(cluster, *topics):
    for topic in topics:
        cluster.topics.delete(topic, Deadline(LONG))


@pytest.fixture
def named(rocketmq_broker):
    def identify(prefix):
        settings = settings_for(rocketmq_broker.url, prefix=prefix)
        with RemotingClient(settings.name_servers) as client:
            return identify_cluster(settings, client, Deadline(LONG))

    return identify


@pytest.fixture
def open_log(of_the_prefix):
    return lambda prefix: of_the_prefix.topics.internal(f"{prefix}log-here", Deadline(LONG))


@pytest.fixture
def lose_name(of_the_prefix):
    return lambda prefix: remove(of_the_prefix, of_the_prefix.settings.cluster_topic, repeated(of_the_prefix))


@pytest.fixture
def write_foreign_name(rocketmq_broker, client):
    def write(prefix):
        rocketmq_broker.create_topic(f"{prefix}cluster", queues=1)
        client.call("broker-1", send(WireMessage(f"{prefix}cluster", b"something else"), "other", 0), LONG)

    return write


@pytest.fixture
def of_the_prefix(rocketmq_broker, name):
    """Return a cluster under a prefix that no other test uses, so that it has an id of its own."""
    cluster = cluster_for(rocketmq_broker.url, prefix=f"{name}-")
    yield cluster
    cluster.client.close()


def repeated(cluster):
    return f"{cluster.settings.cluster_topic}-{cluster.id}-{cluster.topics.home}"


def test_a_name_outlives_the_record_that_made_it(named, of_the_prefix, name):
    remove(of_the_prefix, of_the_prefix.settings.cluster_topic)
    assert named(f"{name}-").id == of_the_prefix.id


def test_a_name_outlives_the_topic_that_repeats_it(named, of_the_prefix, name):
    remove(of_the_prefix, repeated(of_the_prefix))
    assert named(f"{name}-").id == of_the_prefix.id
    assert repeated(of_the_prefix) in of_the_prefix.topics.all(Deadline(LONG))


def test_neither_of_two_cluster_ids_is_believed(rocketmq_broker, named, of_the_prefix, name):
    rocketmq_broker.create_topic(f"{name}-cluster-{uuid.uuid4().hex}-broker-1", queues=1)
    with pytest.raises(errors.StorageFailed, match="several ids"):
        named(f"{name}-")


@pytest.mark.full
def test_with_two_brokers_a_log_stays_on_one_and_is_not_begun_anew_on_the_other(start_rocketmq, opened):
    broker = start_rocketmq(nodes=2)
    log = opened(broker.url, "home")
    assert log.cluster.topics.home == "broker-1"
    append(log, b"0")
    # The topic of the log is on both brokers, which is refused.
    broker.create_topic("_txnbridge-log-both", queues=1)
    with pytest.raises(
        errors.InvalidOption, match=r"_txnbridge-log-both must have one queue.*broker-1\[0\], broker-2\[0\]"
    ):
        OpenLog(broker.url, "both")
    broker.kill(1)
    with RemotingClient(settings_for(broker.url).name_servers) as client:
        deadline = Deadline(180)
        while "broker-1" in client.brokers(LONG):
            deadline.check("waiting until the name server forgets the broker")
            time.sleep(0.1)
    # A bridge that connects now knows the home broker, and uses it once it is up again.
    takes(1, errors.DeadlineExceeded, lambda deadline: OpenLog(broker.url, "home", deadline.seconds))
    broker.start(1)
    again = opened(broker.url, "home", 90)
    assert again.cluster.id == log.cluster.id
    append(again, b"1")
    assert [record for _, record in read(again)] == [b"0", b"1"]
