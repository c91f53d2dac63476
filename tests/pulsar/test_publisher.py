"""Sends without a transaction on a live broker: once each and in order, through all that goes wrong."""

import os
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import faults
from txnbridge_pulsar.write.publisher import PulsarPublisher

from tests.in_time import takes
from tests.pulsar.client_kit import admin, everything
from tests.pulsar.kit import SOON, Connection, Kept, open_cluster
from txnbridge import errors
from txnbridge.spi import Deadline


@pytest.fixture
def name():
    return f"published-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def ledgers() -> Mapping[str, Kept]:
    return defaultdict(Kept)


@pytest.fixture
def publisher(pulsar_broker, ledgers):
    """Open a publisher; its connection is closed in the end."""
    connections = []

    def opened(name=None, url=None, admin_url=None, **given):
        given["admin_url"] = pulsar_broker.admin_url if admin_url is None else admin_url
        connections.append(Connection(url or pulsar_broker.url, **given))
        return PulsarPublisher(open_cluster(connections[-1]), name, lambda id: ledgers[id])

    yield opened
    for connection in connections:
        connection.close()


@pytest.fixture
def new_topic(pulsar_broker, name):
    def create(partitions=1, name=name):
        admin(pulsar_broker, "PUT", f"persistent/public/default/{name}/partitions", partitions)
        return name

    return create


def send(publisher, topic, value, *, key=None, partition=None, sequence=None, seconds=SOON):
    publisher.send(topic, value, key, None, partition, None, sequence, Deadline(seconds))


def stored(client, topic, partition=0):
    return everything(client, f"persistent://public/default/{topic}-partition-{partition}")


def numbered(count, first=0):
    return [b"%d" % number for number in range(first, count)]


def send_all(publisher, topic, values, sequences=False):
    for value in values:
        send(publisher, topic, value, sequence=int(value) if sequences else None)
    publisher.flush(Deadline(SOON))


def test_lost_connections_make_no_duplicates_and_no_gaps(pulsar_broker, publisher, new_topic, client):
    topic = new_topic()
    with faults.proxy(pulsar_broker) as proxy:
        plain = publisher(url=proxy.url)
        for value in numbered(300):
            send(plain, topic, value)
            if value in (b"50", b"200"):
                proxy.cut()
        plain.flush(Deadline(SOON))
    assert stored(client, topic) == numbered(300)


def test_a_lost_answer_makes_no_copy(pulsar_broker, publisher, new_topic, client):
    topic = new_topic()
    with faults.proxy(pulsar_broker) as proxy:
        plain = publisher(url=proxy.url)
        send_all(plain, topic, [b"0"])
        hold = proxy.hold(answers="SEND")
        send(plain, topic, b"1")
        hold.answered()
        proxy.cut()
        hold.drop()
        plain.flush(Deadline(SOON))
    assert stored(client, topic) == [b"0", b"1"]


def test_a_lost_answer_is_a_failure_where_the_broker_would_keep_a_copy(pulsar_broker, publisher, client, name):
    admin(pulsar_broker, "PUT", f"namespaces/public/{name}")
    admin(pulsar_broker, "POST", f"namespaces/public/{name}/deduplication", False)
    admin(pulsar_broker, "PUT", f"persistent/public/{name}/t/partitions", 1)
    with faults.proxy(pulsar_broker) as proxy:
        plain = publisher(url=proxy.url.replace("/default", f"/{name}"))
        hold = proxy.hold(answers="SEND")
        send(plain, "t", b"0")
        hold.answered()
        proxy.cut()
        hold.drop()
        for _ in range(2):
            with pytest.raises(errors.DeliveryFailed, match="removes duplicates"):
                plain.flush(Deadline(SOON))
        with pytest.raises(errors.DeliveryFailed):
            send(plain, "t", b"1")
    assert everything(client, f"persistent://public/{name}/t-partition-0") == [b"0"]
    named = publisher("name", url=pulsar_broker.url.replace("/default", f"/{name}"))
    with pytest.raises(errors.NotSupported, match="brokerDeduplicationEnabled"):
        send(named, "t", b"1", sequence=1)


def test_a_sequence_goes_on_behind_a_publisher_that_was_cut_off(pulsar_broker, publisher, new_topic, client, name):
    topic = new_topic()
    with faults.proxy(pulsar_broker) as proxy:
        first = publisher(name, url=proxy.url)
        send_all(first, topic, numbered(10), sequences=True)
        hold = proxy.hold(answers="SEND")
        send(first, topic, b"10", sequence=10)
        hold.answered()  # it is stored, and its publisher does not know
        proxy.cut()
        hold.drop()
        second = publisher(name)
        assert second.last_sequence(topic, Deadline(SOON)) == 10
        send_all(second, topic, numbered(15), sequences=True)
    assert stored(client, topic) == numbered(15)


def test_a_name_that_the_broker_has_forgotten_publishes_no_copy(pulsar_broker, publisher, new_topic, client, name):
    """A broker forgets a name that was not used for hours; one that recreated the topic answers as well that it knows
    nothing.
    """
    topic = new_topic()
    first = publisher(name)
    send_all(first, topic, numbered(3), sequences=True)
    first.close(Deadline(SOON))
    admin(pulsar_broker, "DELETE", f"persistent/public/default/{topic}/partitions?force=true")
    new_topic()
    later = publisher(name)
    with pytest.raises(errors.EvidenceLost, match="under another name"):
        later.last_sequence(topic, Deadline(SOON))
    with pytest.raises(errors.EvidenceLost, match="under another name"):
        send(later, topic, b"0", sequence=0)
    later.close(Deadline(SOON))
    other = publisher(f"{name}-2")
    send_all(other, topic, numbered(5, 3), sequences=True)
    assert stored(client, topic) == numbered(5, 3)


def test_a_publishers_first_flush_and_its_close_note_the_stored_sequence(publisher, ledgers, new_topic, name):
    topic = new_topic()
    dead = publisher(name)
    send_all(dead, topic, numbered(3), sequences=True)
    assert [ledger.newest[1] for ledger in ledgers.values()] == [{"stored": 2}]
    send_all(dead, topic, numbered(5, 3), sequences=True)
    assert [ledger.newest[1] for ledger in ledgers.values()] == [{"stored": 2}]
    dead.close(Deadline(SOON))
    assert [ledger.newest[1] for ledger in ledgers.values()] == [{"stored": 4}]


def test_sequences_count_over_all_partitions(publisher, new_topic, client, name):
    topic = new_topic(3)
    first = publisher(name)
    for number in range(30):
        send(first, topic, b"%d" % number, partition=number % 3, sequence=number)
    first.close(Deadline(SOON))
    second = publisher(name)
    assert second.last_sequence(topic, Deadline(SOON)) == 29
    for number in range(35):  # another way to share them
        send(second, topic, b"%d" % number, partition=number % 2, sequence=number)
    second.flush(Deadline(SOON))
    found = [int(value) for partition in range(3) for value in stored(client, topic, partition)]
    assert sorted(found) == list(range(35))


def test_a_sequence_needs_a_rest_interface(publisher, new_topic, name):
    topic = new_topic()
    with pytest.raises(errors.NotSupported, match="admin_url"):
        send(publisher(name, admin_url=""), topic, b"0", sequence=0)


def test_a_name_is_used_by_one_publisher_at_a_time(publisher, new_topic, name):
    topic = new_topic()
    send_all(publisher(name), topic, [b"0"], sequences=True)
    late = publisher(name)
    error = takes(1, errors.DeadlineExceeded, lambda deadline: late.last_sequence(topic, deadline))
    assert "in use" in str(error)


def test_no_call_hangs_while_the_broker_does(pulsar_broker, publisher, new_topic, client):
    topic = new_topic()
    plain = publisher()
    send_all(plain, topic, [b"0"])
    pulsar_broker.pause()
    try:
        send(plain, topic, b"1")
        takes(0.5, errors.DeadlineExceeded, plain.flush)
        takes(0.5, errors.DeadlineExceeded, plain.close)
        takes(1, errors.InvalidState, plain.flush)
    finally:
        pulsar_broker.resume()


def test_a_missing_topic_or_partition_is_named(publisher, new_topic):
    plain = publisher()
    with pytest.raises(errors.NotFound, match="nowhere"):
        send(plain, "nowhere", b"0")
    topic = new_topic(2)
    with pytest.raises(errors.NotFound, match="partition 2"):
        send(plain, topic, b"0", partition=2)
    send_all(plain, topic, [b"0"])


def test_a_message_that_is_too_large_leaves_the_publisher_as_it_was(publisher, new_topic, client):
    topic = new_topic()
    plain = publisher()
    with pytest.raises(errors.InvalidOption):
        send(plain, topic, b"x" * 6_000_000)
    send_all(plain, topic, [b"0"])
    assert stored(client, topic) == [b"0"]


PUBLISHING = """
import sys
from tests.pulsar.kit import Connection, Kept, open_cluster
from tests.pulsar.test_publisher import send
from txnbridge.spi import Deadline
from txnbridge_pulsar.write.publisher import PulsarPublisher
url, admin_url, topic, name, count = sys.argv[1:]
publisher = PulsarPublisher(open_cluster(Connection(url, admin_url=admin_url)), name, lambda id: Kept())
last = publisher.last_sequence(topic, Deadline(90))
for number in range(0 if last is None else last + 1, int(count)):
    send(publisher, topic, b"%d" % number, sequence=number, seconds=90)
    if number % 100 == 0:
        print(number, flush=True)
publisher.close(Deadline(90))
"""


@pytest.mark.full
def test_exactly_once_through_kill_9_of_both_sides(start_pulsar):
    broker = start_pulsar()
    name, count = "survivor", 4000
    admin(broker, "PUT", f"persistent/public/default/{name}/partitions", 1)
    command = [sys.executable, "-W", "ignore", "-c", PUBLISHING, broker.url, broker.admin_url, name, name, str(count)]
    for dies_at in (500, 1500):  # the publisher
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) >= dies_at:
                    break
            os.kill(process.pid, signal.SIGKILL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ThreadPoolExecutor(1) as pool:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 2500:
                break
        broker.kill()  # while messages are on their way
        pool.submit(broker.start).result()
        process.communicate(timeout=120)
        assert process.returncode == 0
    connection = Connection(broker.url)
    assert stored(connection.client, name) == numbered(count)
    connection.close()
