"""Threads take turns: first come, first served, and nobody keeps others waiting."""

from __future__ import annotations

import threading

import pytest

from txnbridge._turns import Turns
from txnbridge.spi import Deadline


@pytest.fixture
def turns():
    return Turns(1, 0.002)


class Waiting:
    """Threads that wait for the turn, note that they have it, and give it up."""

    def __init__(self, turns):
        self.turns = turns
        self.came = []
        self.threads = []

    def add(self, name):
        def wait():
            assert self.turns.enter(Deadline(60))
            self.came.append(name)
            self.turns.leave()

        self.threads.append(threading.Thread(target=wait))
        before = len(self.turns._waiting)
        self.threads[-1].start()
        deadline = Deadline(60)
        while len(self.turns._waiting) == before:
            deadline.check("waiting for a thread to queue up")

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_the_first_to_come_is_the_first_to_write(turns):
    waiting = Waiting(turns)
    assert turns.enter(Deadline(60))
    for number in range(5):
        waiting.add(number)
    turns.leave()
    waiting.join()
    assert waiting.came == [0, 1, 2, 3, 4]


def test_who_writes_again_and_again_lets_those_who_wait_come_in_between(turns):
    waiting = Waiting(turns)
    assert turns.enter(Deadline(60))
    waiting.add("waited")
    deadline = Deadline(60)
    while not waiting.came:
        deadline.check("waiting for the other thread to have its turn")
        turns.leave()
        assert turns.enter(Deadline(60))
    turns.leave()
    waiting.join()


def test_an_owner_that_does_not_come_back_keeps_nobody_waiting():
    turns = Turns(1, 3600)
    waiting = Waiting(turns)
    assert turns.enter(Deadline(60))
    waiting.add("first")
    waiting.add("second")
    turns.leave()
    waiting.join()
    assert waiting.came == ["first", "second"]


def test_who_waits_too_long_gives_up_and_the_next_one_has_its_turn(turns):
    waiting = Waiting(turns)
    assert turns.enter(Deadline(60))
    refused = []
    impatient = threading.Thread(target=lambda: refused.append(turns.enter(Deadline(0.1))))
    impatient.start()
    impatient.join(60)
    assert refused == [False]
    waiting.add("patient")
    turns.leave()
    waiting.join()
    assert waiting.came == ["patient"]


def test_a_wait_that_is_interrupted_leaves_the_queue_as_it_was(turns, monkeypatch):
    assert turns.enter(Deadline(60))

    def interrupt(waiter, deadline):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(turns, "_is_granted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            turns.enter(Deadline(60))
    assert not turns._waiting
    turns.leave()
    assert turns.enter(Deadline(60))


def test_as_many_are_in_as_there_are_places():
    turns = Turns(2, 0.002)
    assert turns.enter(Deadline(60)) and turns.enter(Deadline(60))
    assert not turns.enter(Deadline(0.05))
    turns.leave()
    assert turns.busy == 1
    assert turns.enter(Deadline(60))
