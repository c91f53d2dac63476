"""Decision logs."""

import pytest
from txnbridge_embedded.settings import Timing

from tests.embedded.kit import rows
from tests.embedded.test_writer import failing
from tests.inside import broker_of
from tests.log_contract import *  # noqa: F403
from tests.log_contract import append, read
from txnbridge import Decision, connect
from txnbridge.errors import EvidenceLost, OutcomeUnknown, PositionLost
from txnbridge.spi import Deadline


@pytest.fixture
def open_named(opened):
    return lambda name: opened().decision_log(name, Deadline(5))


def test_a_trimmed_log_begins_later_and_numbers_on(opened):
    broker = opened(timing=Timing(log_trim_rows=3))
    log = broker.decision_log("default", Deadline(5))
    positions = append(log, *[b"%d" % number for number in range(10)])
    log.trim(positions[7], Deadline(5))
    assert log.begin(Deadline(5)) == positions[7]
    assert read(log, positions[2])[0] == (positions[7], b"7")
    assert rows(broker, "SELECT count(*) FROM log_records") == [(3,)]
    log.trim(positions[3], Deadline(5))  # trimming less than before brings nothing back
    assert log.begin(Deadline(5)) == positions[7]
    log.trim((positions[9][0] + 5,), Deadline(5))
    assert log.begin(Deadline(5)) is log.end(Deadline(5)) is None
    assert append(log, b"next") == [(positions[9][0] + 1,)]
    assert read(log) == [((positions[9][0] + 1,), b"next")]


def test_the_next_trim_removes_the_records_for_which_there_was_no_time(opened):
    broker = opened(timing=Timing(log_trim_rows=2))
    log = broker.decision_log("default", Deadline(5))
    positions = append(log, *[b"%d" % number for number in range(10)])
    log.trim(positions[5], Deadline(0))
    assert rows(broker, "SELECT count(*) FROM log_records") == [(8,)]
    assert [record for _, record in read(log)] == [b"5", b"6", b"7", b"8", b"9"]
    log.trim(positions[6], Deadline(5))
    assert rows(broker, "SELECT count(*) FROM log_records") == [(4,)]


def test_a_log_that_is_trimmed_while_it_is_read_is_not_read_with_a_hole(opened):
    broker = opened(timing=Timing(log_read_rows=2))
    log = broker.decision_log("default", Deadline(5))
    positions = append(log, *[b"%d" % number for number in range(10)])
    reading = iter(log.read(None, None, Deadline(5)))
    assert next(reading) == (positions[0], b"0")
    log.trim(positions[6], Deadline(5))
    with pytest.raises(PositionLost):
        list(reading)


@pytest.mark.parametrize("happens", [True, False])
def test_an_append_that_failed_in_the_middle_is_unknown_and_may_be_repeated(broker, happens):
    log = broker.decision_log("default", Deadline(5))
    failing(broker.store, happens=happens)
    with pytest.raises(OutcomeUnknown):
        log.append(b"claim", Deadline(5))
    log.append(b"claim", Deadline(5))
    assert [record for _, record in read(log)] == [b"claim"] * (2 if happens else 1)


def test_a_long_log_is_read_in_passing(broker):
    log = broker.decision_log("default", Deadline(5))
    with broker.session(Deadline(5)) as connection, broker.store.writing(connection, Deadline(5), "filling"):
        connection.executemany(
            "INSERT INTO log_records VALUES (?, ?)", ((log._base | n, b"x" * 100) for n in range(100_000))
        )
        connection.execute("UPDATE logs SET next = 100000")
    assert sum(1 for _ in log.read(None, None, Deadline(30))) == 100_000
    assert len(read(log, (99_990,))) == 10


def test_a_log_whose_records_are_all_gone_is_not_taken_for_a_new_one(path):
    with connect(f"embedded:{path}") as bridge:
        bridge.decisions("l").claim("x", Decision.COMMIT)
        log = broker_of(bridge).decision_log("l", Deadline(5))
        log.trim((10,), Deadline(5))
        with pytest.raises(EvidenceLost):
            bridge.decisions("l").claim("x", Decision.ABORT)
