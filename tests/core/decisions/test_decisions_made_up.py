"""Ids that processes make up for themselves: nobody else opens them, and the log forgets them in time."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

import txnbridge
from tests.core.decisions_kit import MemoryLog, decoded, state_of
from tests.inside import connection_of, logs_of
from txnbridge._base.deadline import Deadline
from txnbridge._base.timing import TIMING, Timing
from txnbridge._base.token import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge._decisions.records import Opened, Snapshot

COMMIT = Decision.COMMIT
DAY = 86_400


@pytest.fixture
def log():
    return MemoryLog()


class Process:
    """A bridge without an id, as the log sees it."""

    now = 1_700_000_000.0

    def __init__(self, log: MemoryLog, id: str = "", tidy_after: int = 10_000, timing: Timing = TIMING) -> None:
        clock = lambda: Process.now  # noqa: E731
        self.decisions = Decisions(log, lifetime=600, tidy_after=tidy_after, clock=clock, timing=timing)
        self.ledger = self.decisions.ledger(id, made_up=True) if id else self.decisions.ledger("X")

    def open(self) -> Process:
        self.ledger.opened({"host": "h"}, Deadline(60))
        return self

    def prepare(self, transaction: str) -> dict[str, object]:
        begin = dict(self.ledger.begin(Deadline(60)))
        self.ledger.record("prepare", transaction, {}, Deadline(60))
        return begin


def openings(log: MemoryLog) -> list[str]:
    """The ids of which the newest snapshot knows an opening."""
    newest = [record for _, record in decoded(log.records) if isinstance(record, Snapshot)][-1]
    assert newest.body is not None
    return [under["id"][0] for under, *_ in newest.body["opened"]]


@pytest.mark.parametrize("ids", [240, pytest.param(4_000, marks=pytest.mark.full)])
def test_ids_that_come_and_go_leave_nothing_in_snapshots_for_ever(log, ids):
    sizes = []
    for number in range(ids):
        process = Process(log, f"made-up-{number}", tidy_after=50).open()
        begin = process.prepare(f"t{number}")
        process.ledger.claim(f"t{number}", COMMIT, {}, Deadline(60), log=begin)
        Process.now += 60
        log.archive.clear()
        if number % 80 == 79:
            process.decisions.tidy()
            sizes.append(max(len(json.dumps(r.body)) for _, r in decoded(log.records) if isinstance(r, Snapshot)))
    assert max(sizes) < 1.2 * sizes[0] < 20_000


def test_a_process_that_lives_on_keeps_no_ids_that_come_and_go_in_memory(log):
    onlooker = Process(log, timing=Timing(forget_after=60))
    for number in range(120):
        Process(log, f"made-up-{number}").open().prepare(f"t{number}")
        Process.now += 60
    onlooker.decisions.begin()
    known = state_of(onlooker.decisions)
    assert max(len(known.ids.openings), len(known.tokens.openings)) < 60


def test_an_owner_of_an_id_that_others_have_forgotten_goes_on(log):
    owner = Process(log, "made-up").open()
    owner.prepare("before")
    Process.now += DAY
    other = Process(log)
    other.decisions.begin()
    other.decisions.tidy()
    assert openings(log) == []
    assert owner.ledger.newest_opening(Deadline(60)) == ("made-up", {"host": "h"})
    begin = owner.prepare("after")
    for reader in (other, Process(log)):
        (entry,) = reader.decisions.ledger("made-up").find("after", Deadline(60), log=begin)
        assert (entry.kind, entry.opening) == ("prepare", "made-up")


def test_a_bridge_without_an_id_makes_one_up(tmp_path):
    for id, number in ((None, 0), ("billing", 1)):
        with txnbridge.connect(f"embedded:{tmp_path}/{number}.db", transactional_id=id) as bridge:
            name = logs_of(bridge).own_ledger().opened({}, Deadline(60))
            with closing(bridge.decisions()) as decisions:
                opening = decisions.read(connection_of(bridge).identity.name).opening
            assert opening is not None and (opening.name, opening.number) == (name, number)


def test_every_copy_of_the_opening_of_a_made_up_id_is_the_same_opening(log):
    owner = Process(log, "made-up").open().open()
    owner.prepare("t")
    assert len({record.under for _, record in decoded(log.records) if isinstance(record, Opened)}) == 1
    assert owner.ledger.newest_opening(Deadline(60)) == ("made-up", {"host": "h"})
