"""Tests of a decision log over a faulty network, whose client sends each append once: import all of this.

It brings the fixtures `open_named(name, url=...)`, `logs_broker`, and `append_request`: what the proxy calls an append.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from txnbridge_conformance import faults

from tests.log_contract import SOON, append, read
from txnbridge.errors import DeadlineExceeded, OutcomeUnknown
from txnbridge.spi import Deadline


def append_until_clear(log, record, seconds=SOON):
    deadline = Deadline(seconds)
    while True:
        try:
            return log.append(record, deadline)
        except OutcomeUnknown:
            deadline.check("appending")


@pytest.fixture
def proxied(logs_broker, open_named, name):
    """A proxy, and a log behind it with one record."""
    with faults.proxy(logs_broker) as proxy:
        log = open_named(name, proxy.url)
        append(log, b"0")
        yield proxy, log


def give_up_appending(log, record):
    with pytest.raises(OutcomeUnknown):
        log.append(record, Deadline(1))


def records(log):
    return [record for _, record in read(log)]


def test_an_append_whose_answer_is_lost_is_unknown_and_the_next_one_is_not(proxied, append_request):
    proxy, log = proxied
    hold = proxy.hold(answers=append_request)
    give_up_appending(log, b"1")
    hold.answered()
    hold.drop()
    append_until_clear(log, b"2")  # the connection is as good as dead, and nobody was told
    proxy.cut()
    append_until_clear(log, b"3")  # it may be written to a connection that ends
    assert list(dict.fromkeys(records(log))) == [b"0", b"1", b"2", b"3"]


def test_an_append_whose_request_is_held_may_come_late_and_is_not_sent_twice(proxied, append_request):
    proxy, log = proxied
    hold = proxy.hold(requests=append_request)
    give_up_appending(log, b"late")
    hold.release()
    hold.answered()
    append(log, b"1")
    assert records(log) == [b"0", b"late", b"1"]


def test_an_append_whose_connection_drops_is_unknown_at_once(proxied, append_request):
    proxy, log = proxied
    hold = proxy.hold(answers=append_request)
    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(log.append, b"1", Deadline(SOON))
        hold.answered()
        proxy.cut()
        with pytest.raises(OutcomeUnknown):
            appending.result(10)
    hold.drop()
    append_until_clear(log, b"2")
    assert records(log) == [b"0", b"1", b"2"]


def test_a_reading_goes_on_when_its_connection_drops(proxied):
    proxy, log = proxied
    at = append(log, *(b"%d" % number + b"x" * 100_000 for number in range(100)))
    seen = []
    for position, _ in log.read(at[0], None, Deadline(SOON)):
        seen.append(position)
        if len(seen) in (10, 60):
            proxy.cut()
    assert seen == at


def test_a_reading_that_is_never_short_of_records_ends_at_its_deadline_too(log):
    first, *_ = append(log, *(b"%d" % number for number in range(100)))
    reading = iter(log.read(None, None, Deadline(0.5)))
    assert next(reading) == (first, b"0")
    time.sleep(0.6)
    with pytest.raises(DeadlineExceeded):
        list(reading)
