"""Tests of every decision log, whatever keeps it: a test module imports all of this and brings the fixtures.

`open_named(name)` opens a log as another process would have it open, and `log` is one of the test's own `name`.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from txnbridge.errors import PositionLost
from txnbridge.spi import Deadline

SOON = 30.0


def append(log, *records):
    return [log.append(record, Deadline(SOON)) for record in records]


def read(log, first=None, last=None):
    return list(log.read(first, last, Deadline(SOON)))


def bounds(log):
    return log.begin(Deadline(SOON)), log.end(Deadline(SOON))


def place_of(kind, request, tmp_path):
    """Return a place for decisions, as `decision_log` takes it: a file, or the running broker of that kind."""
    files = {"sqlite": f"sqlite:///{tmp_path / 'decisions.db'}", "embedded": f"embedded:{tmp_path / 'other.db'}"}
    return files.get(kind) or request.getfixturevalue(f"{kind}_broker").url


@pytest.fixture
def name():
    return uuid.uuid4().hex[:12]


@pytest.fixture
def log(open_named, name):
    return open_named(name)


def test_an_empty_log_has_no_begin_and_no_end(log):
    assert bounds(log) == (None, None)
    assert read(log) == []


def test_records_come_back_in_their_order_from_anywhere(log):
    at = append(log, b"0", b"1", b"", b"3", b"4")
    assert at == sorted(set(at))
    if log.origin is not None:
        assert at[0] == log.origin
    assert bounds(log) == (at[0], at[4])
    everything = list(zip(at, (b"0", b"1", b"", b"3", b"4"), strict=True))
    assert read(log) == everything
    assert read(log, at[1], at[3]) == everything[1:4]
    assert read(log, at[4]) == everything[4:]
    assert read(log, None, at[0]) == everything[:1]
    assert read(log, at[3], at[2]) == []


def test_a_record_is_seen_by_others_as_soon_as_it_is_appended(log, name, open_named):
    other = open_named(name)
    for number in range(20):
        (position,) = append(log, b"%d" % number)
        assert other.end(Deadline(SOON)) == position
        assert read(other, position, position) == [(position, b"%d" % number)]


def test_logs_of_different_names_are_different_logs(log, name, open_named):
    other = open_named(f"{name}-other")
    append(log, b"here")
    assert bounds(other) == (None, None)


def test_records_that_come_while_it_is_read_are_left_for_the_next_reading(log):
    first, second = append(log, b"0", b"1")
    reading = iter(log.read(None, None, Deadline(SOON)))
    assert next(reading) == (first, b"0")
    append(log, b"2")
    assert list(reading) == [(second, b"1")]


def test_reading_ends_where_the_log_ends(log):
    first, second = append(log, b"0", b"1")
    assert read(log, first, (second[0] + 7, *(0 for _ in second[1:]))) == [(first, b"0"), (second, b"1")]


def test_a_reading_that_nobody_finishes_does_not_disturb_the_next(log):
    at = append(log, *(b"%d" % number for number in range(300)))
    for _ in range(3):
        reading = iter(log.read(None, None, Deadline(SOON)))
        assert next(reading) == (at[0], b"0")
        del reading
        assert read(log, at[200], at[201]) == [(at[200], b"200"), (at[201], b"201")]


def test_two_readings_at_once_do_not_disturb_each_other(log):
    at = append(log, *(b"%d" % number for number in range(400)))
    one, other = (iter(log.read(at[first], None, Deadline(SOON))) for first in (0, 200))
    assert [(next(one)[0], next(other)[0]) for _ in range(200)] == list(zip(at[:200], at[200:], strict=True))


def test_many_threads_append_and_read_one_order(log):
    (first,) = append(log, b"first")

    def work(number):
        mine = [log.append(b"%d-%d" % (number, count), Deadline(SOON)) for count in range(50)]
        return mine, read(log, first, mine[-1])

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(work, range(8)))
    everything = read(log)
    assert len(everything) == 401
    for number, (mine, seen) in enumerate(told):
        assert [dict(everything)[position] for position in mine] == [b"%d-%d" % (number, count) for count in range(50)]
        assert seen == everything[: len(seen)]


def test_many_may_open_a_new_log_at_once_and_it_is_one_log(name, open_named):
    with ThreadPoolExecutor(6) as pool:
        logs = list(pool.map(lambda _: open_named(name), range(6)))
    positions = [position for log in logs for position in append(log, b"one of six")]
    assert [position for position, _ in read(logs[0])] == positions


class ExactTrimming:
    """Tests of logs that drop the very records that are trimmed: a test class inherits these."""

    def test_a_trimmed_log_begins_later_and_numbers_on(self, log):
        at = append(log, *(b"%d" % number for number in range(5)))
        log.trim(at[3], Deadline(SOON))
        assert bounds(log) == (at[3], at[4])
        assert read(log) == [(at[3], b"3"), (at[4], b"4")]
        for first in (at[0], at[2]):
            with pytest.raises(PositionLost):
                read(log, first, at[4])
        (next_one,) = append(log, b"5")
        assert next_one > at[4]
        log.trim(at[1], Deadline(SOON))  # nothing is left in front of it
        assert log.begin(Deadline(SOON)) == at[3]

    def test_trimming_beyond_the_end_leaves_an_empty_log_that_numbers_on(self, log):
        at = append(log, b"0", b"1")
        log.trim((99,), Deadline(SOON))
        assert bounds(log) == (None, None)
        (next_one,) = append(log, b"2")
        assert next_one > at[1]
        assert bounds(log) == (next_one, next_one)
