"""Sends without a transaction."""

import gc
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest

from tests.embedded.kit import busy, read, values
from tests.embedded.test_writer import failing, failing_and_gone, give_up
from tests.in_time import wait_until
from tests.interrupts import interrupted_at
from txnbridge.errors import DeadlineExceeded, DeliveryFailed, Fenced, InvalidOption, NotFound, OutcomeUnknown
from txnbridge.spi import Deadline


@pytest.fixture
def publisher(broker):
    """A publisher without a name, and a topic for it."""
    broker.admin.create_topic("orders", 1, Deadline(5))
    return broker.publisher(None, Deadline(5))


def publish(publisher, topic, value, sequence=None, timeout=10, partition=None):
    publisher.send(topic, value, None, None, partition, None, sequence, Deadline(timeout))


def test_closing_the_broker_stores_the_messages_that_are_left(opened):
    broker = opened()
    publisher = broker.publisher(None, Deadline(5))
    publish(publisher, "orders", b"1")
    broker.close(Deadline(5))
    assert values(opened(), "orders") == [b"1"]


def test_a_message_becomes_visible_without_a_flush_and_a_closed_publisher_leaves_nothing_behind(broker):
    before = threading.active_count()
    publisher = broker.publisher(None, Deadline(5))
    publish(publisher, "orders", b"1")
    wait_until(lambda: values(broker, "orders") == [b"1"])
    publisher.close(Deadline(5))
    assert threading.active_count() == before
    kept = weakref.ref(publisher)
    del publisher
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("name", [None, "meter"])
def test_a_publisher_that_was_idle_for_so_long_that_it_was_forgotten_goes_on(broker, name):
    publisher = broker.publisher(name, Deadline(5))
    publish(publisher, "orders", b"1")
    publisher.flush(Deadline(5))
    give_up(broker, "DELETE FROM writers")
    publish(publisher, "orders", b"2")
    publisher.flush(Deadline(5))
    assert values(broker, "orders") == [b"1", b"2"]


def test_a_message_that_cannot_be_sent_is_refused_at_once_and_the_others_go_on(opened):
    broker = opened(max_message_bytes=100, create_topics=0)
    broker.admin.create_topic("orders", 1, Deadline(5))
    publisher = broker.publisher(None, Deadline(5))
    publish(publisher, "orders", b"1")
    with pytest.raises(InvalidOption):
        publish(publisher, "orders", bytes(101))
    with pytest.raises(NotFound):
        publish(publisher, "nowhere", b"")
    with pytest.raises(NotFound):
        publish(publisher, "orders", b"", partition=1)
    publish(publisher, "orders", b"2")
    publisher.flush(Deadline(5))
    assert values(broker, "orders") == [b"1", b"2"]


def test_a_newer_publisher_of_the_same_name_shuts_out_the_older(opened):
    broker = opened()
    old = broker.publisher("import", Deadline(5))
    publish(old, "orders", b"old", 0)
    old.flush(Deadline(5))
    new = opened().publisher("import", Deadline(5))
    publish(old, "orders", b"zombie", 1)
    with pytest.raises(Fenced):
        old.flush(Deadline(5))
    with pytest.raises(Fenced):
        publish(old, "orders", b"zombie", 2)
    publish(new, "orders", b"new", 1)
    new.flush(Deadline(5))
    assert values(broker, "orders") == [b"old", b"new"]
    with pytest.raises(Fenced):
        old.close(Deadline(5))


@pytest.mark.parametrize("happens", [True, False])
def test_a_store_that_failed_in_the_middle_is_never_done_twice_and_never_taken_for_done(broker, happens):
    publisher = broker.publisher("import", Deadline(5))
    for number in range(3):  # the first batch has no row of its own yet, later ones have
        if number:
            publish(publisher, "orders", b"%d" % number, number)
            publisher.flush(Deadline(5))
    failing(broker.store, happens=happens)
    publish(publisher, "orders", b"3", 3)
    if happens:
        publisher.flush(Deadline(5))
        publish(publisher, "orders", b"4", 4)
        publisher.flush(Deadline(5))
        assert values(broker, "orders") == [b"1", b"2", b"3", b"4"]
        return
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match="the disk refuses"):
            publisher.flush(Deadline(5))
    with pytest.raises(DeliveryFailed):
        publish(publisher, "orders", b"4", 4)
    assert values(broker, "orders") == [b"1", b"2"]


@pytest.mark.parametrize("happens", [True, False])
def test_the_first_store_that_failed_in_the_middle_is_looked_up_too(broker, happens, publisher):
    failing(broker.store, happens=happens)
    publish(publisher, "orders", b"1")
    if happens:
        publisher.flush(Deadline(5))
    else:
        with pytest.raises(DeliveryFailed):
            publisher.flush(Deadline(5))
    assert values(broker, "orders") == ([b"1"] if happens else [])


def test_a_flush_whose_store_cannot_be_looked_up_is_of_unknown_outcome(broker, publisher):
    with failing_and_gone(broker.store, happens=True), pytest.raises(OutcomeUnknown):
        publish(publisher, "orders", b"1")
        publisher.flush(Deadline(5))


def test_a_full_memory_makes_the_sender_wait_and_a_deadline_ends_that(opened):
    broker = opened(spill_bytes=1000)
    publisher = broker.publisher(None, Deadline(5))
    publish(publisher, "orders", b"first")
    publisher.flush(Deadline(5))
    taken = 0
    with busy(broker), pytest.raises(DeadlineExceeded):
        for _ in range(100):
            publish(publisher, "orders", b"x" * 100, timeout=0.3 if taken > 10 else 10)
            taken += 1
    publisher.flush(Deadline(5))
    assert len(values(broker, "orders")) == 1 + taken  # what was refused was not taken
    assert taken < 30


def test_a_message_that_is_not_stored_by_its_deadline_fails_the_publisher(broker, publisher):
    with busy(broker):
        publish(publisher, "orders", b"1", timeout=0.1)
        with pytest.raises(DeliveryFailed):
            publisher.flush(Deadline(10))
    assert values(broker, "orders") == []


def test_a_bug_in_the_publishers_thread_is_told_and_does_not_hang_the_sender(broker, publisher):
    failing(broker.store, happens=False, error=ZeroDivisionError())
    publish(publisher, "orders", b"1")
    with pytest.raises(DeliveryFailed, match="ZeroDivisionError"):
        publisher.flush(Deadline(10))


def test_a_flush_ends_at_its_deadline(broker, publisher):
    with busy(broker):
        publish(publisher, "orders", b"1")
        with pytest.raises(DeadlineExceeded):
            publisher.flush(Deadline(0.1))
    publisher.flush(Deadline(10))
    assert values(broker, "orders") == [b"1"]


def test_an_interrupted_send_mixes_no_messages_up_and_a_newer_publisher_resumes(broker):
    def send(publisher, numbers):
        for number in numbers:
            publisher.send(name, b"%d" % number, b"%d" % number, None, None, None, number, Deadline(10))

    point, where = 0, "the first point"
    while where:
        point += 1
        name = f"import-{point}"
        broker.admin.create_topic(name, 1, Deadline(5))
        publisher = broker.publisher(name, Deadline(5))
        with busy(broker):  # so that the messages stay in memory
            send(publisher, range(3))
            where = interrupted_at(partial(send, publisher, [3]), point)
            with suppress(DeliveryFailed):
                send(publisher, range(3, 6))
        with suppress(DeliveryFailed):
            publisher.flush(Deadline(10))
        newer = broker.publisher(name, Deadline(5))
        last = newer.last_sequence(name, Deadline(5))
        send(newer, range(0 if last is None else last + 1, 6))
        newer.flush(Deadline(10))
        assert [(m.value, m.key) for m in read(broker, name)] == [(b"%d" % n, b"%d" % n) for n in range(6)], where
    assert point > 5
