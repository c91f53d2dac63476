"""Acknowledgements in a decision log: what two members of a group read is never acknowledged twice, and nothing is
left out, whoever slept and whatever was trimmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.decisions_kit import MemoryLog, decoded
from txnbridge._base.deadline import Deadline
from txnbridge._base.messages import Position
from txnbridge._base.token import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge._decisions.records import Claimed, Snapshot
from txnbridge.errors import Conflict, EvidenceLost, Fenced, InvalidOption
from txnbridge.spi import Ack, Ledger, LedgerClaim

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT
ORDERS, AUDIT = ("orders", 0), ("audit", 0)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def join(log, clock) -> Callable[..., Member]:
    """Another member of the group, a process of its own."""
    return lambda id="X", **settings: Member(
        Decisions(log, timeout=30, clock=clock, **{"lifetime": 900, **settings}), id
    )


def before_next(log: MemoryLog, kind: str, act: Callable[[bytes], object]) -> None:
    """Call `act` right before the next record of a kind is stored."""
    append = log.append

    def store(record, deadline=None):
        if f'"kind":"{kind}"'.encode() in record:
            log.append = append  # type: ignore[method-assign]
            act(record)
        return append(record)

    log.append = store  # type: ignore[method-assign]


class Member:
    """Reads where the group stands, and commits transactions that acknowledge from there."""

    def __init__(self, decisions: Decisions, id: str) -> None:
        self.decisions = decisions
        self.ledger: Ledger = decisions.ledger(id)
        self.known: dict[tuple[str, int], Position] = {}
        self.read_up_to: Position = (-1,)
        self.log: dict[str, object] = {}

    def look(self) -> dict[tuple[str, int], Position]:
        self.known, self.read_up_to = self.ledger.positions("g", Deadline(5))
        return self.known

    def begin(self, transaction: str) -> str:
        self.log = dict(self.ledger.begin(Deadline(5)))
        return transaction

    def ack(self, end: int, partition: tuple[str, int] = ORDERS) -> Ack:
        return Ack("g", partition, self.known.get(partition, (0,)), (end,), self.read_up_to)

    def claim(self, transaction: str, *acks: Ack, decision: Decision = COMMIT) -> LedgerClaim:
        return self.ledger.claim(transaction, decision, {}, Deadline(5), log=self.log, acks=acks)

    def commit(self, transaction: str, end: int) -> LedgerClaim:
        return self.claim(self.begin(transaction), self.ack(end))


def test_only_one_of_two_members_that_read_the_same_messages_commits_them(join):
    one, other = join("X"), join("Y")
    one.look(), other.look()
    other.commit("t2", 80)
    with pytest.raises(Conflict, match="another transaction"):
        one.commit("t1", 100)
    assert one.ledger.decided("t1", Deadline(5), log=one.log) is None
    assert one.claim("t1", decision=ABORT).decision is ABORT
    assert join().look() == {ORDERS: (80,)}


def test_an_acknowledgement_that_a_look_has_shown_is_no_obstacle(join):
    one, other = join("X"), join("Y")
    other.look()
    other.commit("t2", 80)
    one.look()
    assert one.commit("t1", 100).decision is COMMIT
    other.look()
    assert other.commit("t3", 120).decision is COMMIT


def test_other_partitions_and_other_groups_are_no_obstacle(join):
    one, other = join("X"), join("Y")
    one.look(), other.look()
    other.begin("t2")
    elsewhere = Ack("another group", ORDERS, (0,), (9,), other.read_up_to)
    other.claim("t2", other.ack(80, AUDIT), elsewhere)
    one.commit("t1", 100)
    assert join().look() == {ORDERS: (100,), AUDIT: (80,)}
    assert join().ledger.positions("another group", Deadline(5))[0] == {ORDERS: (9,)}


def test_a_claim_that_does_not_count_is_an_obstacle_all_the_same(join, log):
    """A process that reads from a later record cannot tell whether the claim counts, and all have to agree."""
    zombie, owner, other = join("X"), join("X"), join("Y")
    zombie.ledger.opened({}, Deadline(5))
    zombie.look(), zombie.begin("t1")
    owner.ledger.opened({}, Deadline(5))
    other.look()
    with pytest.raises(Fenced):
        zombie.claim("t1", zombie.ack(100))
    with pytest.raises(Conflict):
        other.commit("t2", 50)
    assert other.look() == {}
    assert other.commit("t3", 50).decision is COMMIT


def test_the_first_of_several_starts_counts(join):
    one, other = join("X"), join("Y")
    one.look(), other.look()
    one.claim(one.begin("s1"), Ack("g", ORDERS, (7,), (7,), one.read_up_to))
    with pytest.raises(Conflict):
        other.claim(other.begin("s2"), Ack("g", ORDERS, (9,), (9,), other.read_up_to))
    assert other.look() == {ORDERS: (7,)}


def test_claiming_again_acknowledges_once(join, log):
    one = join()
    one.look()
    one.commit("t1", 100)
    before = len(log.records)
    assert one.claim("t1", one.ack(100)).decision is COMMIT
    assert len(log.records) == before


def test_a_snapshot_that_was_made_while_a_claim_was_on_its_way_costs_another_append(join, log):
    one, other = join(), join("Y")
    one.look(), one.begin("t1")

    def make_snapshot(_):
        other.decisions.claim("id", COMMIT)
        other.decisions.tidy()

    before_next(log, "claim", make_snapshot)
    assert one.claim("t1", one.ack(100)).decision is COMMIT
    assert one.look() == join().look() == {ORDERS: (100,)}


@pytest.mark.parametrize("dropped_by_age", [False, True], ids=["trimmed", "dropped by age"])
def test_a_reader_that_cannot_see_what_stands_against_a_claim_does_not_trust_it(join, log, clock, dropped_by_age):
    """A transaction is aborted while a claim on it is on its way. The author of a snapshot with that abort sleeps until
    the claim has arrived and nobody needs any record in front of it."""
    one, sleeper, resolver = join(), join("Y"), join("Z")
    one.look(), one.begin("t1")
    resolver.log = one.log

    def abort(claim):
        resolver.claim("t1", decision=ABORT)
        resolver.decisions.claim("id", COMMIT)
        before_next(log, "snapshot", lambda _: arrive(claim))
        sleeper.decisions.tidy()

    def arrive(claim):
        log.append(claim)
        clock.now += 10_000

    before_next(log, "claim", abort)
    assert one.claim("t1", one.ack(100)).decision is ABORT
    if dropped_by_age:
        log.trim(next(record.covers for _, record in decoded(log.records) if isinstance(record, Snapshot)))
        with pytest.raises(EvidenceLost):
            join().look()
        one.decisions.tidy()
    assert one.look() == join().look() == {}


def test_a_prepared_transaction_acknowledges_whoever_commits_it_and_whenever(join):
    one = join("X")
    one.ledger.opened({}, Deadline(5))
    one.look(), one.begin("t1")
    one.ledger.record("prepare", "t1", {}, Deadline(5))
    join("X").ledger.opened({}, Deadline(5))
    assert one.claim("t1", one.ack(100)).decision is COMMIT
    assert join().look() == {ORDERS: (100,)}


def test_an_abort_that_acknowledges_is_a_mistake(join, log):
    one = join()
    one.look(), one.begin("t1")
    before = len(log.records)
    with pytest.raises(InvalidOption, match="acknowledge"):
        one.claim("t1", one.ack(100), decision=ABORT)
    assert len(log.records) == before


def test_an_owner_that_was_taken_over_commits_nothing_that_it_has_not_prepared_but_may_give_it_up(join):
    old, new = join("X"), join("X")
    old.ledger.opened({}, Deadline(5))
    old.begin("plain")
    new.ledger.opened({}, Deadline(5))
    with pytest.raises(Fenced):
        old.claim("plain")
    assert old.claim("plain", decision=ABORT).decision is ABORT
    new.log = old.log
    assert new.claim("plain").decision is ABORT


def test_any_process_claims_a_transaction_that_another_owner_left(join):
    owner, anybody = join("X"), join("Y")
    owner.ledger.opened({}, Deadline(5))
    owner.begin("t1")
    stranger = anybody.decisions.ledger("X")
    assert stranger.decided("t1", Deadline(5), log=owner.log) is None
    claim = stranger.claim("t1", ABORT, {"why": "late"}, Deadline(5), log=owner.log)
    assert claim == stranger.decided("t1", Deadline(5), log=owner.log) == LedgerClaim(ABORT, {"why": "late"}, None)
    assert owner.claim("t1") == claim


def test_an_opener_learns_what_owners_before_it_decided(join):
    old, new, stranger = join("X"), join("X"), join("Y")
    opening = old.ledger.opened({}, Deadline(5))
    old.begin("")

    def commit(member, transaction, writer):
        member.ledger.claim(transaction, COMMIT, {"writer": writer}, Deadline(5), log=old.log)

    commit(old, "t1", 0)
    commit(old, "t2", 1)
    stranger.log = old.log
    stranger.claim("t3", decision=ABORT)
    commit(old, "t4", 0)  # so this writer has finished the one before
    claims = [(transaction, LedgerClaim(COMMIT, {"writer": w}, opening)) for transaction, w in (("t2", 1), ("t4", 0))]
    newer = new.ledger.opened({}, Deadline(5))
    assert new.ledger.claims(Deadline(5)) == join("X").ledger.claims(Deadline(5)) == claims
    assert stranger.ledger.claims(Deadline(5)) == []
    new.log = old.log
    commit(new, "t5", 2)  # so the newer owner has finished what the older one left
    assert join("X").ledger.claims(Deadline(5)) == [("t5", LedgerClaim(COMMIT, {"writer": 2}, newer))]


def test_a_member_that_has_read_a_claim_on_its_transaction_does_not_claim_it_again(join, log):
    """A process that begins to read behind a claim with acknowledgements relies on that: they count."""
    one, two = join("X"), join("Y")
    one.begin("t1")
    two.log = one.log
    two.claim("t1", decision=ABORT)
    two.look()  # and tells the first member about it, which has not read so far
    claims = count(log, Claimed)
    assert one.claim("t1", two.ack(100)).decision is ABORT
    assert count(log, Claimed) == claims


def test_a_member_that_takes_over_a_partition_learns_which_transaction_moved_the_group_last(join, log):
    one, two = join("X"), join("Y")
    opening = one.ledger.opened({}, Deadline(5))
    one.look()
    one.claim(one.begin("t1"), one.ack(100), one.ack(7, AUDIT))
    one.look()
    one.claim(one.begin("t2"), one.ack(200))
    two.look()
    one.look()
    assert one.claim(one.begin("t3"), one.ack(300)) == LedgerClaim(COMMIT, {}, opening)
    with pytest.raises(Conflict):
        two.claim(two.begin("t4"), two.ack(300))
    two.claim(two.begin("t5"))
    known = {ORDERS: ("t3", LedgerClaim(COMMIT, {}, opening)), AUDIT: ("t1", LedgerClaim(COMMIT, {}, opening))}
    for member in (one, two, join("Z")):
        assert member.ledger.acknowledged("g", Deadline(5)) == known
        assert member.ledger.acknowledged("another", Deadline(5)) == {}


def test_the_last_transaction_that_moved_a_group_is_known_as_long_as_a_transaction_lives(join, log, clock):
    one = join("X")
    one.look()
    one.claim(one.begin("t1"), one.ack(100))
    one.decisions.tidy(timeout=5)
    assert "t1" in str(join().ledger.acknowledged("g", Deadline(5)))
    clock.now += 10_000
    one.decisions.tidy(timeout=5)
    later = join()
    assert later.look() == {ORDERS: (100,)}
    assert later.ledger.acknowledged("g", Deadline(5)) == {}


def count(log: MemoryLog, kind: type) -> int:
    return sum(isinstance(record, kind) for _, record in decoded(log.records))
