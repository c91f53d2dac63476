"""Decision logs on a live broker: the contract, and what faults make of it."""

from contextlib import closing
from functools import partial

import pytest
from txnbridge_conformance.brokers.plugin import pulsar_or_skip
from txnbridge_conformance.observing import eventually
from txnbridge_pulsar.client import Single
from txnbridge_pulsar.decision_log import PulsarLog, cluster_id

from tests.cluster_names import *  # noqa: F403
from tests.keeping import keeping
from tests.log_contract import *  # noqa: F403
from tests.log_contract import append, bounds, read
from tests.log_faults import *  # noqa: F403
from tests.log_live import *  # noqa: F403
from tests.log_live import AnyName, outlive_kill_9
from tests.pulsar.client_kit import admin
from tests.pulsar.kit import SOON, Connection
from txnbridge import errors
from txnbridge.spi import Deadline, Emitter

# Not that of bridges: the cluster is named before anything else of theirs is made.
PREFIX = "_logs-"


class OpenLog(PulsarLog):
    """A log with a connection of its own, as another process has it."""

    def __init__(self, url, name, timeout=SOON, **given):
        self.connection = Connection(url, **{"prefix": PREFIX, **given})
        try:
            topic = self.connection.settings.log_topic(name)
            super().__init__(
                self.connection.client, self.connection.topics, topic, Deadline(timeout), Emitter("tests", ())
            )
        except BaseException:
            self.connection.close()
            raise

    def close(self):
        super().close()
        self.connection.close()


@pytest.fixture
def path(name):
    """Return the path of the log's topic in the REST interface."""
    return f"persistent/public/default/{PREFIX}log-{name}"


@pytest.fixture
def opened():
    yield from keeping(OpenLog)


@pytest.fixture
def logs_broker(pulsar_broker):
    return pulsar_broker


@pytest.fixture
def append_request():
    return "SEND"


@pytest.fixture
def too_large():
    return 5_300_000, "the broker takes"


@pytest.fixture
def made_with_two(pulsar_broker, path):
    admin(pulsar_broker, "PUT", f"{path}/partitions", 2)
    return "partitions"


@pytest.fixture
def remove_topic(pulsar_broker, path):
    return lambda: admin(pulsar_broker, "DELETE", f"{path}?force=true")


@pytest.fixture
def stalled():
    return lambda used: [errors.OutcomeUnknown if used else errors.DeadlineExceeded]


class TestNames(AnyName):
    endings = (" b", "/b", "ü", "=20b", "-partition-0", "%2Fb")


def test_the_topic_has_a_durable_subscription_before_its_first_record(pulsar_broker, log, path):
    (subscription,) = admin(pulsar_broker, "GET", f"{path}/stats")["subscriptions"].items()
    assert subscription[0] == "txnbridge"
    assert subscription[1]["durable"]


def close_ledger(broker, path):
    """Make the broker write later records into another ledger.

    A broker answers an acknowledgement before there is a ledger that keeps a subscription's place. If it lets go of the
    topic before there is, it has forgotten it.
    """
    eventually(lambda: state_of_subscription(broker, path) != "SwitchingLedger", "its place is kept")
    admin(broker, "PUT", f"{path}/unload")


def state_of_subscription(broker, path):
    return admin(broker, "GET", f"{path}/internalStats")["cursors"]["txnbridge"]["state"]


@pytest.fixture(scope="module")
def forgetful_broker():
    """A broker that keeps no record longer than subscriptions need it, not even to recognize duplicates."""
    with pulsar_or_skip(delete_unused=True, settings={"brokerDeduplicationEnabled": "false"}) as broker:
        yield broker


@pytest.fixture
def forgetful_log(forgetful_broker, name, opened):
    return opened(forgetful_broker.url, name)


@pytest.fixture
def drop_unneeded(forgetful_broker, path):
    """Return a function that drops unneeded ledgers, as a broker does by itself now and then."""

    def drop():
        close_ledger(forgetful_broker, path)
        admin(forgetful_broker, "GET", f"{path}/stats")  # it is loaded again
        admin(forgetful_broker, "POST", f"{path}/trim")

    return drop


def wait_for_begin(log, position, drop):
    deadline = Deadline(4 * SOON)  # each look unloads the topic, which takes seconds on a busy machine
    while log.begin(deadline) != position:
        deadline.check(f"waiting for {position}")
        drop()


def test_a_log_goes_on_in_another_ledger(pulsar_broker, log, path):
    before = append(log, b"0", b"1")
    close_ledger(pulsar_broker, path)
    after = append(log, b"2", b"3")
    assert after[0][0] > before[0][0]
    assert [record for _, record in read(log)] == [b"0", b"1", b"2", b"3"]
    assert [record for _, record in read(log, before[1], after[0])] == [b"1", b"2"]
    assert bounds(log) == (before[0], after[1])


def test_a_record_that_was_not_trimmed_is_not_dropped(forgetful_log, drop_unneeded):
    append(forgetful_log, b"0", b"1")
    for _ in range(3):
        drop_unneeded()
        append(forgetful_log, b"more")
    assert [record for _, record in read(forgetful_log)] == [b"0", b"1", b"more", b"more", b"more"]


def test_trimmed_records_are_dropped_by_whole_ledgers_and_the_rest_stays(forgetful_log, drop_unneeded):
    log = forgetful_log
    old = append(log, b"0", b"1")
    drop_unneeded()
    new = append(log, b"2", b"3", b"4")
    log.trim(new[1], Deadline(SOON))
    drop_unneeded()
    (last,) = append(log, b"5")
    wait_for_begin(log, new[0], drop_unneeded)
    assert read(log) == [(new[0], b"2"), (new[1], b"3"), (new[2], b"4"), (last, b"5")]
    for first in old:
        with pytest.raises(errors.PositionLost):
            read(log, first, last)
    log.trim(old[1], Deadline(SOON))  # nothing is left in front of it
    assert log.begin(Deadline(SOON)) == new[0]


def test_a_log_that_was_trimmed_to_its_end_keeps_its_last_record(forgetful_log, drop_unneeded):
    log = forgetful_log
    at = append(log, b"0", b"1", b"2")
    log.trim((at[2][0] + 99, 0), Deadline(SOON))
    for _ in range(2):
        drop_unneeded()
    assert log.end(Deadline(SOON)) == at[2]
    assert read(log)[-1] == (at[2], b"2")
    (next_one,) = append(log, b"3")
    assert read(log, at[2]) == [(at[2], b"2"), (next_one, b"3")]


def test_a_log_that_is_trimmed_while_it_is_read_is_not_read_with_a_hole(forgetful_log, drop_unneeded):
    log = forgetful_log
    large = b"x" * 900_000  # so that little is fetched ahead
    for _ in range(4):
        last = append(log, *[large] * 8)[-1]
        drop_unneeded()
    reading = iter(log.read(None, None, Deadline(SOON)))
    first, _ = next(reading)
    log.trim(last, Deadline(SOON))
    drop_unneeded()
    wait_for_begin(log, (last[0], 0), drop_unneeded)
    seen = [first]
    with pytest.raises(errors.PositionLost):
        seen.extend(position for position, _ in reading)
    assert len(seen) < 25


def test_a_log_outlives_kill_9_of_its_broker(start_pulsar, opened):
    broker = start_pulsar()
    outlive_kill_9(broker, opened(broker.url, "kept"))


def test_a_log_outlives_a_broker_that_deletes_what_nobody_uses(start_pulsar, opened):
    """By default Pulsar keeps nothing that no subscription needs, and deletes topics without a subscription."""
    settings = {
        "brokerDeleteInactiveTopicsFrequencySeconds": "1",
        "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds": "1",
    }
    broker = start_pulsar(delete_unused=True, settings=settings)
    log = opened(broker.url, "kept")
    append(log, b"0", b"1")
    log.close()
    with_nobody = "persistent://public/default/nobody-reads-this"
    connection = Connection(broker.url)
    connection.client.create_producer(with_nobody, timeout=SOON).close(SOON)
    topics = partial(connection.client.topics, "public/default", SOON)
    eventually(lambda: with_nobody not in topics(), "the broker deletes a topic that nobody uses")
    connection.close()
    for _ in range(2):
        broker.restart()
    again = opened(broker.url, "kept")
    append(again, b"2")
    assert [record for _, record in read(again)] == [b"0", b"1", b"2"]


def test_a_log_whose_topic_is_deleted_says_so_or_is_empty(pulsar_broker, log, path):
    append(log, b"0")
    read(log)
    admin(pulsar_broker, "DELETE", f"{path}?force=true")
    (first,) = append(log, b"1")  # the broker makes it anew for whoever writes
    assert bounds(log) == (first, first)


@pytest.fixture
def named(pulsar_broker):
    def ask(prefix):
        with closing(Connection(pulsar_broker.url, prefix=prefix)) as connection:
            return cluster_id(connection.settings, connection.client, connection.topics, Deadline(SOON))

    return ask


@pytest.fixture
def open_log(pulsar_broker, opened):
    return lambda prefix: opened(pulsar_broker.url, "here", prefix=prefix)


@pytest.fixture
def lose_name(pulsar_broker):
    return lambda prefix: admin(pulsar_broker, "DELETE", f"persistent/public/default/{prefix}cluster?force=true")


@pytest.fixture
def write_foreign_name(client):
    def write(prefix):
        producer = client.create_producer(f"persistent://public/default/{prefix}cluster", timeout=SOON)
        producer.send(Single(b"something else"), timeout=SOON).result(SOON)

    return write
