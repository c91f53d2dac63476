"""Threads take turns: first come, first served, and nobody keeps others waiting."""

import threading

import pytest

from tests.in_time import wait_until
from tests.inside import queued
from txnbridge._base.fair_semaphore import FairSemaphore
from txnbridge.spi import Deadline


@pytest.fixture
def turns():
    return FairSemaphore(1, 0.002)


class Waiting:
    """Threads that wait for the turn, note that they have it, and give it up."""

    def __init__(self, turns):
        self.turns = turns
        self.came = []
        self.threads = []

    def add(self, name):
        def wait():
            place = self.turns.place()
            assert place.enter(Deadline(60))
            self.came.append(name)
            place.leave()

        self.threads.append(threading.Thread(target=wait))
        before = queued(self.turns)
        self.threads[-1].start()
        wait_until(lambda: queued(self.turns) != before)

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def taken(turns):
    """A place that is taken."""
    place = turns.place()
    assert place.enter(Deadline(60))
    return place


def test_a_waiter_that_gives_up_for_a_moment_keeps_its_position_in_the_queue(turns):
    place, patient = taken(turns), turns.place()
    assert not patient.enter(Deadline(0.01))
    waiting = Waiting(turns)
    waiting.add("came later")
    assert not patient.enter(Deadline(0.01))
    place.leave()
    assert patient.enter(Deadline(60)) and not waiting.came
    patient.leave()
    waiting.join()


def test_a_thread_that_enters_again_and_again_lets_waiting_threads_come_in_between(turns):
    waiting = Waiting(turns)
    place = taken(turns)
    waiting.add("waited")
    deadline = Deadline(60)
    while not waiting.came:
        deadline.check("waiting for the other thread to have its turn")
        place.leave()
        place = taken(turns)
    place.leave()
    waiting.join()


def test_an_owner_that_does_not_come_back_keeps_nobody_waiting():
    turns = FairSemaphore(1, 3600)
    waiting = Waiting(turns)
    place = taken(turns)
    waiting.add("first")
    waiting.add("second")
    place.leave()
    waiting.join()
    assert waiting.came == ["first", "second"]


def test_a_thread_that_waits_too_long_gives_up_and_the_next_one_has_its_turn(turns):
    waiting = Waiting(turns)
    place = taken(turns)
    refused = []

    def wait_in_vain():
        impatient = turns.place()
        refused.append(impatient.enter(Deadline(0.1)))
        impatient.leave()

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    thread.join(60)
    assert refused == [False]
    waiting.add("patient")
    place.leave()
    waiting.join()
    assert waiting.came == ["patient"]


def test_a_place_and_a_wait_whose_objects_are_gone_are_given_back(turns):
    place, waiting = taken(turns), turns.place()
    assert not waiting.enter(Deadline(0.01))
    del place, waiting
    assert turns.busy == 0 and not queued(turns)
    taken(turns)


def test_a_semaphore_admits_as_many_holders_as_it_has_places():
    turns = FairSemaphore(2, 0.002)
    first, second, third = taken(turns), taken(turns), turns.place()
    assert not third.enter(Deadline(0.05))
    first.leave()
    first.leave()
    assert third.enter(Deadline(60))
    assert turns.busy == 2
    second.leave()
    assert turns.busy == 1
