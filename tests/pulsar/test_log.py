"""Decision logs on a live broker: the contract, and what faults make of it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance.brokers.plugin import pulsar_or_skip
from txnbridge_conformance.looking import eventually
from txnbridge_pulsar.log import PulsarLog, cluster_id

from tests.in_time import paused, takes, within
from tests.log_contract import *  # noqa: F403
from tests.log_contract import append, bounds, keeping, read
from tests.log_faults import *  # noqa: F403
from tests.pulsar.kit import SOON, Connection
from tests.pulsar.wire_kit import admin
from txnbridge import Decision
from txnbridge._decisions import Decisions
from txnbridge.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    EvidenceLost,
    InvalidOption,
    OutcomeUnknown,
    PositionLost,
    StorageFailed,
    TxnBridgeError,
)
from txnbridge.spi import Deadline, Emitter

# Not that of bridges: the cluster is named before anything else of theirs is made.
PREFIX = "_logs-"


class OpenLog(PulsarLog):
    """With a connection of its own, as another process has it."""

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
    """Of its topic, in the REST interface."""
    return f"persistent/public/default/{PREFIX}log-{name}"


@pytest.fixture
def opened():
    yield from keeping(OpenLog)


@pytest.fixture
def open_named(pulsar_broker, opened):
    return lambda name, url=pulsar_broker.url: opened(url, name)


@pytest.fixture
def logs_broker(pulsar_broker):
    return pulsar_broker


@pytest.fixture
def append_request():
    return "SEND"


# --- the contract ---------------------------------------------------------------------------------------------------


def test_a_record_of_the_largest_size_is_stored_and_one_that_is_too_large_refused(log):
    largest = os.urandom(900_000)
    append(log, largest)
    with pytest.raises(InvalidOption, match="the broker takes"):
        append(log, b"x" * 5_300_000)
    append(log, b"next")
    assert [record for _, record in read(log)] == [largest, b"next"]


def test_any_application_has_a_log(pulsar_broker, opened, name):
    logs = [opened(pulsar_broker.url, f"{name}{rest}") for rest in (" b", "/b", "ü", "=20b", "-partition-0", "%2Fb")]
    for number, log in enumerate(logs):
        append(log, b"%d" % number)
    assert [[record for _, record in read(log)] for log in logs] == [[b"%d" % number] for number in range(6)]


# --- its topic ------------------------------------------------------------------------------------------------------


def test_the_topic_has_a_durable_subscription_before_its_first_record(pulsar_broker, log, path):
    (subscription,) = admin(pulsar_broker, "GET", f"{path}/stats")["subscriptions"].items()
    assert subscription[0] == "txnbridge"
    assert subscription[1]["durable"]


def test_a_topic_with_partitions_is_no_log(pulsar_broker, name, path):
    admin(pulsar_broker, "PUT", f"{path}/partitions", 2)
    with pytest.raises(InvalidOption, match="partitions"):
        OpenLog(pulsar_broker.url, name)


def close_ledger(broker, path):
    """What follows goes into another ledger.

    A broker answers an acknowledgement before there is a ledger that keeps a subscription's place. If it lets go of the
    topic before there is, it has forgotten it.
    """
    eventually(lambda: state_of_subscription(broker, path) != "SwitchingLedger", "its place is kept")
    admin(broker, "PUT", f"{path}/unload")


def state_of_subscription(broker, path):
    return admin(broker, "GET", f"{path}/internalStats")["cursors"]["txnbridge"]["state"]


@pytest.fixture(scope="module")
def forgetful_broker():
    """It keeps nothing longer than subscriptions need it; not even what may be needed to tell duplicates."""
    with pulsar_or_skip(delete_unused=True, settings={"brokerDeduplicationEnabled": "false"}) as broker:
        yield broker


@pytest.fixture
def forgetful_log(forgetful_broker, name, opened):
    return opened(forgetful_broker.url, name)


@pytest.fixture
def drop_unneeded(forgetful_broker, path):
    """What a broker does by itself now and then."""

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


def test_nothing_is_dropped_that_was_not_trimmed(forgetful_log, drop_unneeded):
    append(forgetful_log, b"0", b"1")
    for _ in range(3):
        drop_unneeded()
        append(forgetful_log, b"more")
    assert [record for _, record in read(forgetful_log)] == [b"0", b"1", b"more", b"more", b"more"]


def test_what_is_trimmed_is_dropped_by_whole_ledgers_and_the_rest_stays(forgetful_log, drop_unneeded):
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
        with pytest.raises(PositionLost):
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
    with pytest.raises(PositionLost):
        seen.extend(position for position, _ in reading)
    assert len(seen) < 25


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [True, False], ids=["used", "new"])
def test_nothing_hangs_while_the_broker_does(pulsar_broker, log, used):
    first, before = (0, 0), [b"0", b"1"] if used else []
    if used:
        first, _ = append(log, *before)
        read(log)
    with paused(pulsar_broker):
        takes(0.5, DeadlineExceeded, log.begin)
        takes(0.5, DeadlineExceeded, log.end)
        takes(0.5, DeadlineExceeded, lambda deadline: list(log.read(first, first, deadline)))
        takes(0.5, DeadlineExceeded, lambda deadline: list(log.read(None, None, deadline)))
        takes(0.5, DeadlineExceeded, lambda deadline: log.trim(first, deadline))
        # A record that was handed to a connection may be stored; one that found no broker is not.
        takes(0.5, OutcomeUnknown if used else DeadlineExceeded, lambda deadline: log.append(b"maybe", deadline))
        takes(0.5, DeadlineExceeded, lambda deadline: OpenLog(pulsar_broker.url, "other", deadline.seconds))
        with within(2):
            log.close()
    log = OpenLog(pulsar_broker.url, log._name.removeprefix(f"{PREFIX}log-"))
    position, *_ = append(log, b"last")
    assert [record for _, record in read(log, None, position) if record != b"maybe"] == [*before, b"last"]
    log.close()


def test_a_log_outlives_kill_9_of_its_broker(start_pulsar, opened):
    broker = start_pulsar()
    log = opened(broker.url, "kept")
    stored = dict(zip(append(log, b"0", b"1"), (b"0", b"1"), strict=True))
    maybe = set()
    for round in range(2):
        reading = iter(log.read(None, None, Deadline(90)))
        seen = [next(reading)]
        broker.kill()
        for number in range(3):
            record = b"%d-%d" % (round, number)
            maybe.add(record)
            with pytest.raises((OutcomeUnknown, BrokerUnavailable)):
                log.append(record, Deadline(0.3))
        with pytest.raises(DeadlineExceeded):
            log.end(Deadline(0.3))
        with ThreadPoolExecutor(3) as pool:  # they wait for the broker to come back
            appending = pool.submit(log.append, b"back-%d" % round, Deadline(90))
            ending = pool.submit(log.end, Deadline(90))
            broker.start()
            stored[appending.result(90)] = b"back-%d" % round
            assert ending.result(90) is not None
        seen += reading
        assert dict(seen).items() <= dict(read(log)).items()
    found = dict(read(log))
    assert stored.items() <= found.items()
    assert set(found.values()) <= {*stored.values(), *maybe}


def test_a_log_outlives_a_broker_that_deletes_what_nobody_uses(start_pulsar, opened):
    """As Pulsar comes, it keeps nothing that no subscription needs, and deletes topics without one."""
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
    deadline = Deadline(SOON)
    while with_nobody in connection.client.topics("public/default", SOON):
        deadline.check("waiting for the broker to delete a topic that nobody uses")
        time.sleep(0.2)
    connection.close()
    for _ in range(2):
        broker.kill()
        broker.start()
    again = opened(broker.url, "kept")
    append(again, b"2")
    assert [record for _, record in read(again)] == [b"0", b"1", b"2"]


# --- a topic that is not the same any more --------------------------------------------------------------------------


def test_a_log_whose_topic_is_deleted_says_so_or_is_empty(pulsar_broker, log, path):
    append(log, b"0")
    read(log)
    admin(pulsar_broker, "DELETE", f"{path}?force=true")
    (first,) = append(log, b"1")  # the broker makes it anew for whoever writes
    assert bounds(log) == (first, first)


def test_a_process_that_knows_a_log_is_not_misled_by_a_new_one_of_its_name(pulsar_broker, log, name, path, opened):
    old = Decisions(log, timeout=20)
    old.claim("id", Decision.COMMIT)
    old.claim("other", Decision.COMMIT)
    begin = old.begin()
    admin(pulsar_broker, "DELETE", f"{path}?force=true")
    young = Decisions(opened(pulsar_broker.url, name), timeout=20)
    assert young.claim("id", Decision.ABORT).decision is Decision.ABORT
    with pytest.raises((EvidenceLost, OutcomeUnknown)):
        old.claim("more", Decision.COMMIT)
    for ask in (
        lambda: old.read("other"),
        lambda: young.read("token", begin=begin),
        # A record of the old one stands in the new log now: nobody can tell any more which of the two is true.
        lambda: young.claim("grow", Decision.COMMIT),
    ):
        with pytest.raises(EvidenceLost):
            ask()


# --- the cluster's own name -----------------------------------------------------------------------------------------


def named(url, **given):
    connection = Connection(url, **given)
    try:
        return cluster_id(connection.settings, connection.client, connection.topics, Deadline(SOON))
    finally:
        connection.close()


def test_all_who_ask_at_once_are_told_one_name(pulsar_broker, name):
    prefix = f"{name}-"
    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(lambda _: named(pulsar_broker.url, prefix=prefix), range(8)))
    assert len(names) == 1
    assert names == {named(pulsar_broker.url, prefix=prefix)}
    assert named(pulsar_broker.url, prefix=f"{name}x-") not in names


def test_a_lost_name_is_not_made_up_anew_beside_other_topics_of_ours(pulsar_broker, name, opened):
    prefix = f"{name}-"
    named(pulsar_broker.url, prefix=prefix)
    opened(pulsar_broker.url, "here", prefix=prefix)
    admin(pulsar_broker, "DELETE", f"persistent/public/default/{prefix}cluster?force=true")
    with pytest.raises(StorageFailed, match=f"{prefix}cluster"):
        named(pulsar_broker.url, prefix=prefix)


def test_a_foreign_record_is_no_name(pulsar_broker, name, client):
    producer = client.create_producer(f"persistent://public/default/{name}-cluster", timeout=SOON)
    from txnbridge_pulsar.wire import Single

    producer.send(Single(b"something else"), timeout=SOON).result(SOON)
    with pytest.raises(TxnBridgeError, match="prefix"):
        named(pulsar_broker.url, prefix=f"{name}-")
