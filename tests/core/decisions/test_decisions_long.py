"""A long decision log: who opens it reads the last records alone, and says the same as one who has read all of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.decisions_kit import MemoryLog, decoded, follower_of
from txnbridge._base.deadline import Deadline
from txnbridge._base.timing import Timing
from txnbridge._base.token import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge._decisions.records import Claimed, EvidenceBegin, Presence, Snapshot, encode
from txnbridge.errors import EvidenceLost, OutcomeUnknown
from txnbridge.spi import Ack

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT
NEAR_END = 40
NOW = 1_700_000_000.0


@pytest.fixture
def log():
    log = MemoryLog(origin=(0,))
    log.numbered = True
    return log


class Process:
    """A process that owns an id, or none, and commits by its ledger."""

    def __init__(self, log: MemoryLog, id: str = "X", now: float = NOW, **timing: Any) -> None:
        self.now = now
        limits = Timing(near_end=NEAR_END, **timing)
        clock = lambda: self.now  # noqa: E731
        self.decisions = Decisions(log, timeout=30, tidy_after=10, lifetime=900, clock=clock, timing=limits)
        self.ledger = self.decisions.ledger(id)

    def open(self) -> Process:
        self.ledger.opened({}, Deadline(5))
        return self

    def begin(self):
        return dict(self.ledger.begin(Deadline(5)))

    def claim(self, transaction, begin, decision=COMMIT, acks=(), writer=0):
        data = {"writer": writer, "of": transaction}
        return self.ledger.claim(transaction, decision, data, Deadline(5), log=begin, acks=acks).decision

    def decided(self, transaction, begin):
        claim = self.ledger.decided(transaction, Deadline(5), log=begin)
        return claim and claim.decision

    def commit_many(self, count: int, prefix: str = "t") -> Process:
        for number in range(count):
            self.claim(f"{prefix}{number}", self.begin())
        return self

    def unfinished(self) -> list[str]:
        return [transaction for transaction, _ in self.ledger.claims(Deadline(5))]


def test_a_process_that_opens_a_long_log_reads_only_its_last_records(log):
    Process(log).open().commit_many(300)
    log.reads = 0
    assert Process(log).open().unfinished() == ["t299"]
    assert log.reads < 3 * NEAR_END < len(log.records)


def test_claims_that_are_kept_cost_snapshots_no_longer_than_they_are_and_a_reading_back_to_the_last_one(log):
    owner = Process(log)
    for number in range(500):
        owner.decisions.claim(("kept", number), COMMIT)
    assert sum(len(encode(each)) for each in snapshots(log)) < sum(len(raw) for _, raw in log.records) / 2
    log.reads = 0
    assert Process(log).decisions.claim(("kept", 7), ABORT).decision is COMMIT
    assert log.reads < len(log.records)


def test_a_token_from_long_before_is_answered_for_as_truly_as_a_new_one(log):
    owner = Process(log).open()
    begin = owner.begin()
    owner.claim("old", begin)
    owner.claim("given-up", begin, ABORT)
    owner.commit_many(100)
    newcomer = Process(log, "Y")
    newcomer.begin()
    assert newcomer.decided("old", begin) is COMMIT
    assert newcomer.claim("old", begin, ABORT) is COMMIT
    assert newcomer.claim("given-up", begin) is ABORT
    assert newcomer.ledger.decided("open", Deadline(5), log=begin) is None
    assert newcomer.claim("open", begin, ABORT) is ABORT
    assert owner.claim("open", begin) is ABORT


def test_many_questions_that_go_ever_further_back_take_two_readings_at_most(log):
    owner = Process(log).open()
    begins = []
    for number in range(10):
        begins.append(owner.begin())
        owner.claim(f"old-{number}", begins[-1])
        owner.commit_many(30, f"{number}-")
    newcomer = Process(log, "Y")
    newcomer.begin()
    log.reads = 0
    for number, begin in reversed(list(enumerate(begins))):
        assert newcomer.decided(f"old-{number}", begin) is COMMIT
    assert log.reads < 2 * len(log.records)


def test_a_transaction_prepared_long_before_is_known_as_prepared(log):
    owner = Process(log).open()
    begin = owner.begin()
    owner.ledger.record("prepare", "held", {}, Deadline(5))
    owner.commit_many(100)
    newcomer = Process(log).open()
    for found in (
        newcomer.ledger.find("held", Deadline(5)),
        newcomer.ledger.find("held", Deadline(5), log=begin),
        newcomer.ledger.entries("prepare", Deadline(5)),
        newcomer.decisions.ledger("X", begin).find("held", Deadline(5)),
    ):
        assert [entry.kind for entry in found] == ["prepare"]
    assert newcomer.claim("held", begin) is COMMIT


def test_a_commit_that_came_after_an_abort_is_not_carried_out_by_the_next_owner(log):
    owner, resolver, others = Process(log).open(), Process(log, "R"), Process(log, "Y")
    begin = owner.begin()
    resolver.claim("late", begin, ABORT)
    others.commit_many(100)
    # The owner slept, and its claim was under way before it could read that somebody gave its transaction up.
    by = owner.decisions._engine.owned["X",]
    since = EvidenceBegin(tuple(begin["at"]), begin["id"])
    late = Claimed(log=None, nonce="late", id=("late",), decision=COMMIT, begin=since, by=by, body={}, stored=None)
    log.append(encode(late))
    assert Process(log).open().unfinished() == []


def test_each_writers_last_commit_is_carried_out_however_long_ago_it_was(log):
    owner, others = Process(log).open(), Process(log, "Y")
    begin = owner.begin()
    for transaction, writer in (("a", 0), ("b", 1), ("c", 0)):
        owner.claim(transaction, begin, writer=writer)
    others.commit_many(100)
    newcomer = Process(log).open()
    log.reads = 0
    assert newcomer.unfinished() == ["b", "c"]
    assert log.reads < NEAR_END  # the snapshot vouches for them


def test_a_snapshot_tells_where_a_group_stands_and_which_transaction_moved_it_last(log):
    member = Process(log)
    place = ("orders", 0)
    begin = member.begin()
    _, read_up_to = member.ledger.positions("g", Deadline(5))
    member.claim("moves", begin, acks=[Ack("g", place, (0,), (7,), read_up_to)])
    member.commit_many(100)
    newcomer = Process(log, "Y")
    assert newcomer.ledger.positions("g", Deadline(5))[0] == {place: (7,)}
    ((transaction, claim),) = newcomer.ledger.acknowledged("g", Deadline(5)).values()
    assert (transaction, claim.data["of"]) == ("moves", "moves")


def test_no_needed_presence_is_dropped_by_a_process_that_has_not_read_it(log):
    owner = Process(log).open()
    begin = owner.begin()
    owner.claim("old", begin)
    owner.commit_many(100)
    newcomer = Process(log, "Y")
    newcomer.commit_many(30, "n")
    newcomer.decisions.tidy(timeout=5)
    assert log.begin() <= tuple(begin["at"])
    assert Process(log).decided("old", begin) is COMMIT
    newcomer.now += 24 * 3600  # and when nobody can ask any more, it goes
    newcomer.commit_many(30, "m")
    newcomer.decisions.tidy(timeout=5)
    assert log.begin() > tuple(begin["at"])
    with pytest.raises(EvidenceLost):
        Process(log).ledger.decided("old", Deadline(5), log=begin)


def test_a_snapshot_names_only_the_oldest_of_presences_that_end_in_the_same_hour(log):
    owner = Process(log).open().commit_many(300)
    presences = [at for at, record in decoded(log.records) if isinstance(record, Presence)]
    owner.decisions.tidy(timeout=5)
    living = snapshots(log)[-1].body["living"]
    assert len(presences) > 10
    assert len(living) <= 2
    assert tuple(living[0][0]) == presences[0]


def snapshots(log):
    return [record for _, record in decoded(log.records) if isinstance(record, Snapshot)]


def test_a_process_keeps_in_memory_only_what_is_behind_the_last_snapshots(log):
    owner = Process(log, forget_after=20).open()
    begin = owner.begin()
    owner.commit_many(300)
    with follower_of(owner.decisions).looking(Deadline(5)) as state:
        assert len(state.tokens.claims) < 80
    assert owner.decided("t0", begin) is COMMIT
    assert owner.claim("t0", begin, ABORT) is COMMIT


def test_with_a_record_of_another_log_of_the_same_name_in_front_of_the_snapshot_all_is_read(log):
    Process(log).open().commit_many(100)
    at = log.append(encode(Presence(log="another", nonce="stranger", until=0)))
    other = Process(log, "Y")
    while log.end()[0] - at[0] < NEAR_END - 5:
        other.commit_many(1, f"y{log.next}-")
    log.reads = 0
    assert Process(log).open().unfinished() == ["t99"]
    assert log.reads >= len(log.records)


def test_a_record_near_the_end_that_cannot_be_read_stops_everybody_at_the_same_place(log):
    Process(log).open().commit_many(100)
    log.append(b"stray")
    with pytest.raises(OutcomeUnknown, match="cannot be judged"):
        Process(log).open()


def test_a_log_whose_positions_are_no_numbers_is_read_from_its_first_record(log):
    Process(log).open().commit_many(100)
    log.numbered = False
    log.reads = 0
    assert Process(log).open().unfinished() == ["t99"]
    assert log.reads >= len(log.records) - 1
