"""Tests of decisions on a log that a broker or a database keeps: the core's own, and its worlds of processes.

They look into a log in memory, and change it behind everybody's back. So there is one, and beside it a real log with
the same records, from which every answer comes. A test module imports all of this and brings the fixture `mirror`,
which makes such a pair: `mirror(origin)`.
"""

import logging
import threading
from collections import Counter

import pytest

from tests.core.conftest import clock  # noqa: F401
from tests.core.decisions import test_decisions as core
from tests.core.decisions.test_decisions import *  # noqa: F403
from tests.core.decisions_kit import Chances, World
from txnbridge.spi import Deadline

SECONDS = 30


class Numbered(core.FaultyLog):
    """A mirror on a log that numbers its records from 0 without gaps, and drops the very ones that are trimmed.

    Each change to the log in memory is made to the real log, too.
    """

    def __init__(self, new, origin=None):
        """`new()` is an empty log that nobody else uses."""
        super().__init__()
        self.origin = origin
        self._new = new
        self._catching_up = threading.Lock()
        self._real = new()
        self._stored, self._following = [], 0

    def _build(self, records, following):
        """A new log with these records at their positions."""
        self._real.close()
        self._real = self._new()
        there = dict(records)
        for number in range(following):
            self._real.append(there.get((number,), b""), Deadline(SECONDS))
        self._trim(records, following)
        self._stored, self._following = records, following

    def _trim(self, records, following):
        first = records[0][0] if records else (following,)
        if first > (0,):
            self._real.trim(first, Deadline(SECONDS))

    def _catch_up(self):
        """Repeat the changes in memory since the last call on the real log."""
        with self._catching_up:
            records, following = list(self.records), self.next
            kept = [found for found in self._stored if not records or found[0] >= records[0][0]]
            if records[: len(kept)] != kept or following != self._following + len(records) - len(kept):
                self._build(records, following)
                return
            for position, record in records[len(kept) :]:
                assert self._real.append(record, Deadline(SECONDS)) == position
            if len(kept) < len(self._stored):
                self._trim(records, following)
            self._stored, self._following = records, following

    def append(self, record, deadline=None):
        position = super().append(record)
        self._catch_up()
        return position

    def begin(self, deadline=None):
        self._catch_up()
        return self._real.begin(Deadline(SECONDS))

    def end(self, deadline=None):
        super().end()  # it may be one that fails
        self._catch_up()
        return self._real.end(Deadline(SECONDS))

    def read(self, first, last, deadline=None):
        self._catch_up()
        for found in self._real.read(first, last, Deadline(SECONDS)):
            self.reads += 1
            yield found

    def close(self):
        self._real.close()


class Anywhere(core.FaultyLog):
    """A mirror on a log whose positions are its own, and which drops records when it likes.

    After each trim the rest becomes another log. All places there are `later` than those of the first log, as they
    would be in the same log.
    """

    def __init__(self, new, origin=None, beyond=(1 << 60, 0)):
        """`new()` is an empty log that nobody else uses; `beyond` is behind all positions."""
        super().__init__()
        self.origin = origin
        self._new = new
        self._beyond = beyond
        self._catching_up = threading.Lock()
        self._stored, self._places = [], {}
        self._real = new()

    def _catch_up(self):
        """Repeat the changes in memory since the last call on the real log."""
        with self._catching_up:
            records = list(self.records)
            if records[: len(self._stored)] != self._stored:
                self._real.close()
                self._real, self._stored = self._new(), []
            for position, record in records[len(self._stored) :]:
                self._places[position] = self._real.append(record, Deadline(SECONDS))
            self._stored = records

    def _place(self, position):
        """Return the position in the real log where a record stands, or would stand."""
        if position is None or position in self._places:
            return self._places.get(position)
        return (0, position[0]) if position < (self.next,) else self._beyond

    def _number(self, place):
        """The position in memory of what the real log says."""
        return place and next(position for position, _ in self._stored if self._places[position] == place)

    def append(self, record, deadline=None):
        position = super().append(record)
        self._catch_up()
        return position

    def begin(self, deadline=None):
        self._catch_up()
        return self._number(self._real.begin(Deadline(SECONDS)))

    def end(self, deadline=None):
        super().end()  # it may be one that fails
        self._catch_up()
        return self._number(self._real.end(Deadline(SECONDS)))

    def read(self, first, last, deadline=None):
        self._catch_up()
        numbers = {self._places[position]: position for position, _ in self._stored}
        for place, record in self._real.read(self._place(first), self._place(last), Deadline(SECONDS)):
            self.reads += 1
            yield numbers[place], record

    def close(self):
        self._real.close()


@pytest.fixture  # type: ignore[no-redef]  # instead of the one in memory
def log(mirror):
    log = mirror()
    yield log
    log.close()


@pytest.mark.full  # type: ignore[no-redef]  # ten thousand decisions take a minute or more here
def test_reads_stay_short_and_memory_flat_however_many_decisions_there_were(join, clock, log):  # noqa: F811
    core.test_reads_stay_short_and_memory_flat_however_many_decisions_there_were(join, clock, log)


@pytest.mark.parametrize(
    ("chances", "origin"), [(Chances(), None), (Chances(retention=0.01), (0,))], ids=["calm", "harsh"]
)
@pytest.mark.parametrize("worlds", [3, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_no_caller_is_ever_told_an_answer_that_does_not_count(mirror, chances, origin, worlds, caplog):
    caplog.set_level(logging.CRITICAL, logger="txnbridge")
    told: Counter[str] = Counter()
    for seed in range(worlds):
        world = World(seed, chances, origin=origin)
        world.log = mirror(origin)
        world.run()
        world.log.close()
        assert world.findings == [], seed
        told += world.told
    for answer in ("COMMIT", "ABORT", "undecided", "Fenced", "OutcomeUnknown", "killed"):
        assert told[answer] > 0, told
