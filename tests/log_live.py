"""Tests of a decision log on a live broker, besides those of all logs: a test module imports all of this.

It brings the fixtures `opened(url, name)` and `logs_broker`, and what differs from broker to broker: `too_large` (bytes
that no record may have, and the refusal's words), `made_with_two` (makes the log's topic with two partitions, and gives
the refusal's words), `remove_topic()`, and `stalled(used)`: what appends raise while the broker stands still, one after
the other. It may bring its own `open_named` and `pausing()`: the broker stands still for a block.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.in_time import paused, takes, within
from tests.log_contract import append, read
from tests.log_faults import append_until_clear
from txnbridge import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, EvidenceLost, InvalidOption, OutcomeUnknown
from txnbridge.spi import Deadline

# A broker that was killed is back within twenty seconds, also on a busy machine.
BACK = 90.0


@pytest.fixture
def open_named(logs_broker, opened):
    return lambda name, url=logs_broker.url: opened(url, name)


@pytest.fixture
def pausing(logs_broker):
    return lambda: paused(logs_broker)


def test_a_record_of_the_largest_size_is_stored_and_one_that_is_too_large_refused(log, too_large):
    largest, (size, words) = os.urandom(900_000), too_large
    append(log, largest)
    with pytest.raises(InvalidOption, match=words):
        append(log, b"x" * size)
    append(log, b"next")
    assert [record for _, record in read(log)] == [largest, b"next"]


def test_a_topic_with_two_partitions_is_no_log(logs_broker, opened, name, made_with_two):
    with pytest.raises(InvalidOption, match=made_with_two):
        opened(logs_broker.url, name)


class AnyName:
    """Tests of brokers where an application may have any name: a class inherits it, and brings `endings` of names."""

    endings: tuple[str, ...] = ()

    def test_any_application_has_a_log(self, logs_broker, opened, name):
        logs = [opened(logs_broker.url, f"{name}{ending}") for ending in self.endings]
        for number, log in enumerate(logs):
            append(log, b"%d" % number)
        found = [[record for _, record in read(log)] for log in logs]
        assert found == [[b"%d" % number] for number in range(len(self.endings))]


@pytest.mark.parametrize("used", [True, False], ids=["used", "new"])
def test_no_call_hangs_while_the_broker_does(logs_broker, log, name, opened, pausing, stalled, used):
    before = [b"0", b"1"] if used else []
    first = append(log, *before)[0] if used else log.origin or (0, 0)
    read(log)
    errors = stalled(used)
    with pausing():
        takes(0.5, DeadlineExceeded, log.begin)
        takes(0.5, DeadlineExceeded, log.end)
        takes(0.5, DeadlineExceeded, lambda deadline: list(log.read(first, first, deadline)))
        takes(0.5, DeadlineExceeded, lambda deadline: list(log.read(None, None, deadline)))
        takes(0.5, DeadlineExceeded, lambda deadline: log.trim(first, deadline))
        for number, error in enumerate(errors):
            takes(0.5, error, partial(log.append, b"maybe-%d" % number))
        takes(0.5, DeadlineExceeded, lambda deadline: opened(logs_broker.url, "other", deadline.seconds))
        with within(2):
            log.close()
    again = opened(logs_broker.url, name)
    position = append_until_clear(again, b"last")
    found = [record for _, record in read(again, None, position)]
    # A record that was handed to a connection may be stored, and one that found no broker is not.
    maybe = {b"maybe-%d" % number for number, error in enumerate(errors) if error is OutcomeUnknown}
    assert [record for record in found if record not in maybe] == [*before, b"last"]


def outlive_kill_9(broker, log, rounds=2):
    """Kill a broker under its log, and have it back; what is in the log then."""
    stored = dict(zip(append(log, b"0", b"1"), (b"0", b"1"), strict=True))
    maybe = set()
    for round in range(rounds):
        reading = iter(log.read(None, None, Deadline(BACK)))
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
            appending = pool.submit(log.append, b"back-%d" % round, Deadline(BACK))
            ending = pool.submit(log.end, Deadline(BACK))
            broker.start()
            stored[appending.result(BACK)] = b"back-%d" % round
            assert ending.result(BACK) is not None
        seen += reading
        assert dict(seen).items() <= dict(read(log)).items()
    found = dict(read(log))
    assert stored.items() <= found.items()
    assert set(found.values()) <= {*stored.values(), *maybe}
    return found


def test_a_process_that_knows_a_log_is_not_misled_by_a_new_one_of_its_name(
    logs_broker, log, name, opened, remove_topic
):
    old = Decisions(log, timeout=20)
    old.claim("id", Decision.COMMIT)
    old.claim("other", Decision.COMMIT)
    begin = old.begin()
    remove_topic()
    young = Decisions(opened(logs_broker.url, name), timeout=20)
    assert young.claim("id", Decision.ABORT).decision is Decision.ABORT
    with pytest.raises((EvidenceLost, OutcomeUnknown)):
        old.claim("more", Decision.COMMIT)
    if log.origin is not None:
        for number in range(20):  # it grows beyond what the old one has read
            young.claim(("grow", number), Decision.COMMIT)
    for ask in (lambda: old.read("other"), lambda: young.read("token", begin=begin)):
        with pytest.raises(EvidenceLost):
            ask()
    if log.origin is not None:
        assert young.claim("id", Decision.COMMIT).decision is Decision.ABORT
    else:  # a record of the old one stands in the new log now: nobody can tell any more which of the two is true
        with pytest.raises(EvidenceLost):
            young.claim("grow", Decision.COMMIT)
