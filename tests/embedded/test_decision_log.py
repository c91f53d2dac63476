"""Decision logs."""

from __future__ import annotations

import pytest
from txnbridge_embedded.settings import Timing

from tests.embedded.kit import broker_of, open_broker, rows
from tests.embedded.test_writer import failing
from txnbridge import Decision, connect
from txnbridge.errors import EvidenceLost, OutcomeUnknown, PositionLost
from txnbridge.spi import Deadline
from txnbridge.testing import Child, tell


def log_of(broker, name="default"):
    return broker.decision_log(name, Deadline(5))


def append(log, *records):
    return [log.append(record, Deadline(5)) for record in records]


def read(log, first=None, last=None):
    return list(log.read(first, last, Deadline(5)))


def test_an_empty_log_has_no_begin_and_no_end(broker):
    log = log_of(broker)
    assert log.begin(Deadline(5)) is None
    assert log.end(Deadline(5)) is None
    assert read(log) == []


def test_records_come_back_in_their_order_from_anywhere(opened):
    log = log_of(opened())
    positions = append(log, b"a", b"", b"\x00c")
    assert positions == sorted(set(positions))
    assert (log.begin(Deadline(5)), log.end(Deadline(5))) == (positions[0], positions[2])
    other = log_of(opened())
    assert read(other) == list(zip(positions, [b"a", b"", b"\x00c"], strict=True))
    assert read(other, positions[1], positions[1]) == [(positions[1], b"")]
    assert read(other, positions[1]) == [(positions[1], b""), (positions[2], b"\x00c")]
    assert read(other, None, positions[0]) == [(positions[0], b"a")]
    assert read(other, positions[2], positions[0]) == []


def test_logs_of_different_names_are_different_logs(broker):
    one, other = log_of(broker, "one"), log_of(broker, "other")
    append(one, b"1")
    append(other, b"2")
    assert [record for _, record in read(one)] == [b"1"]
    assert [record for _, record in read(other)] == [b"2"]


def test_a_trimmed_log_begins_later_and_numbers_on(opened):
    broker = opened(timing=Timing(log_trim_rows=3))
    log = log_of(broker)
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


def test_whoever_trims_next_removes_what_a_dead_one_left(broker, monkeypatch):
    log = log_of(broker)
    positions = append(log, *[b"%d" % number for number in range(10)])
    with monkeypatch.context() as patch:
        patch.setattr(log, "_remove_batch", lambda *_: False)
        log.trim(positions[5], Deadline(5))
    assert rows(broker, "SELECT count(*) FROM log_records") == [(10,)]
    assert [record for _, record in read(log)] == [b"5", b"6", b"7", b"8", b"9"]
    log.trim(positions[6], Deadline(5))
    assert rows(broker, "SELECT count(*) FROM log_records") == [(4,)]


def test_a_log_that_is_trimmed_while_it_is_read_is_not_read_with_a_hole(opened):
    broker = opened(timing=Timing(log_read_rows=2))
    log = log_of(broker)
    positions = append(log, *[b"%d" % number for number in range(10)])
    reading = iter(log.read(None, None, Deadline(5)))
    assert next(reading) == (positions[0], b"0")
    log.trim(positions[6], Deadline(5))
    with pytest.raises(PositionLost):
        list(reading)


def test_records_that_come_while_it_is_read_are_left_for_the_next_reading(opened):
    broker = opened(timing=Timing(log_read_rows=2))
    log = log_of(broker)
    append(log, b"1", b"2", b"3")
    reading = iter(log.read(None, None, Deadline(5)))
    assert next(reading)[1] == b"1"
    append(log, b"4")
    assert [record for _, record in reading] == [b"2", b"3"]


@pytest.mark.parametrize("happens", [True, False])
def test_an_append_that_failed_in_the_middle_is_unknown_and_may_be_repeated(broker, happens):
    log = log_of(broker)
    failing(broker.store, happens=happens)
    with pytest.raises(OutcomeUnknown):
        log.append(b"claim", Deadline(5))
    log.append(b"claim", Deadline(5))
    assert [record for _, record in read(log)] == [b"claim"] * (2 if happens else 1)


def append_many(path, name):
    broker = open_broker(path)
    log = log_of(broker)
    for number in range(100):
        tell((log.append(b"%s %d" % (name, number), Deadline(10)), number))
    broker.close(Deadline(10))


def test_processes_that_append_at_once_make_one_order_that_all_see(opened, path):
    children = [Child(append_many, path, b"%d" % number) for number in range(4)]
    try:
        for child in children:
            child.result()
        told = {position: b"%d %d" % (n, number) for n, c in enumerate(children) for position, number in drain(c)}
    finally:
        for child in children:
            child.kill()
    found = read(log_of(opened()))
    assert dict(found) == told
    assert [position for position, _ in found] == [(number,) for number in range(400)]


def drain(child):
    return [child.told() for _ in range(100)]


def test_a_long_log_is_read_in_passing(broker):
    log = log_of(broker)
    with broker.session(Deadline(5)) as connection, broker.store.writing(connection, Deadline(5), "filling"):
        connection.executemany(
            "INSERT INTO log_records VALUES (?, ?)", ((log._base | n, b"x" * 100) for n in range(100_000))
        )
        connection.execute("UPDATE logs SET next = 100000")
    count = sum(1 for _ in log.read(None, None, Deadline(30)))
    assert count == 100_000
    assert len(read(log, (99_990,))) == 10


def test_a_log_whose_records_are_all_gone_is_not_taken_for_a_new_one(path):
    with connect(f"embedded:{path}") as bridge:
        bridge.decisions("l").claim("x", Decision.COMMIT)
        log = broker_of(bridge).decision_log("l", Deadline(5))
        log.trim((10,), Deadline(5))
        with pytest.raises(EvidenceLost):
            bridge.decisions("l").claim("x", Decision.ABORT)
