"""What a decision log promises, on a log of Kafka: the core's own tests, and its worlds of processes and faults.

They look into a log in memory, and change it behind everybody's back. So there is one, and beside it a topic that has
the same records at the same positions, from which every answer comes.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter

import pytest

from tests.core import test_decisions as core
from tests.core.decisions_kit import SMALL_RECORDS, Chances, World
from tests.core.test_decisions import *  # noqa: F403
from tests.kafka.test_log import open_log
from txnbridge import _decision_follower as follower
from txnbridge import _decisions
from txnbridge.spi import Deadline

SECONDS = 30


class OnKafka(core.FaultyLog):
    """What is done to the log in memory is done to a topic, and what is asked is answered from there."""

    def __init__(self, url, origin=None):
        super().__init__()
        self.origin = origin
        self._url = url
        self._catching_up = threading.Lock()
        self._kafka = self._new()
        self._stored, self._following = [], 0

    def _new(self):
        return open_log(self._url, uuid.uuid4().hex[:12])

    def _build(self, records, following):
        """A new topic with these records at their positions."""
        self._kafka.close()
        self._kafka = self._new()
        there = dict(records)
        for number in range(following):
            self._kafka.append(there.get((number,), b""), Deadline(SECONDS))
        self._trim(records, following)
        self._stored, self._following = records, following

    def _trim(self, records, following):
        first = records[0][0] if records else (following,)
        if first > (0,):
            self._kafka.trim(first, Deadline(SECONDS))

    def _catch_up(self):
        """What was done in memory since."""
        with self._catching_up:
            records, following = list(self.records), self.next
            kept = [found for found in self._stored if not records or found[0] >= records[0][0]]
            if records[: len(kept)] != kept or following != self._following + len(records) - len(kept):
                self._build(records, following)
                return
            for position, record in records[len(kept) :]:
                assert self._kafka.append(record, Deadline(SECONDS)) == position
            if len(kept) < len(self._stored):
                self._trim(records, following)
            self._stored, self._following = records, following

    def append(self, record, deadline=None):
        position = super().append(record)
        self._catch_up()
        return position

    def begin(self, deadline=None):
        self._catch_up()
        return self._kafka.begin(Deadline(SECONDS))

    def end(self, deadline=None):
        super().end()  # it may be one that fails
        self._catch_up()
        return self._kafka.end(Deadline(SECONDS))

    def read(self, first, last, deadline=None):
        self._catch_up()
        for found in self._kafka.read(first, last, Deadline(SECONDS)):
            self.reads += 1
            yield found

    def close(self):
        self._kafka.close()


@pytest.fixture  # type: ignore[no-redef]  # instead of the one in memory
def log(kafka_broker):
    log = OnKafka(kafka_broker.url)
    yield log
    log.close()


@pytest.mark.full  # type: ignore[no-redef]  # ten thousand decisions take a minute here
def test_reads_stay_short_and_memory_flat_however_many_decisions_there_were(join, clock, log):
    core.test_reads_stay_short_and_memory_flat_however_many_decisions_there_were(join, clock, log)


# --- worlds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chances", "origin"), [(Chances(), None), (Chances(retention=0.01), (0,))], ids=["calm", "harsh"]
)
@pytest.mark.parametrize("worlds", [3, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_nobody_is_ever_told_what_does_not_count(kafka_broker, chances, origin, worlds, monkeypatch, caplog):
    monkeypatch.setattr(follower, "_FIRST_PAUSE", 0)
    for name, size in SMALL_RECORDS.items():
        monkeypatch.setattr(_decisions, name, size)
    caplog.set_level(logging.CRITICAL, logger="txnbridge")
    told: Counter[str] = Counter()
    for seed in range(worlds):
        world = World(seed, chances, origin=origin)
        world.log = OnKafka(kafka_broker.url, origin)
        world.run()
        world.log.close()
        assert world.findings == [], seed
        told += world.told
    for answer in ("COMMIT", "ABORT", "undecided", "Fenced", "OutcomeUnknown", "killed"):
        assert told[answer] > 0, told
