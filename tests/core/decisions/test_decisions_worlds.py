"""Several processes, faults and trimming, step by step: whatever happens, nobody is told what does not count.

Each rule is then taken away, one at a time, and the same worlds must show what it was there for.
"""

import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.core.decisions_kit import SMALL_RECORDS, Chances, MemoryLog, World, _StepLog, decoded, explore
from tests.failing import replace_method
from txnbridge._base.token import Decision
from txnbridge._decisions import conclusions
from txnbridge._decisions.completeness import Completeness
from txnbridge._decisions.conclusions import Openings
from txnbridge._decisions.decisions import Decisions
from txnbridge._decisions.fold import LogState
from txnbridge._decisions.follower import Follower
from txnbridge._decisions.records import (
    AckRange,
    Birth,
    ClaimAcks,
    Claimed,
    EvidenceBegin,
    Presence,
    Snapshot,
    digest,
    encode,
)
from txnbridge._decisions.token_fold import AckHistory, TokenFold
from txnbridge._decisions.tokenless_fold import IdFold

pytestmark = pytest.mark.timeout(300)  # seconds when the machine is idle, but each of them is the processor's

CALM = Chances()
# The broker drops what it likes. Then only the position that every first record has tells a log's beginning.
HARSH = Chances(retention=0.01)
# And an operator begins the log anew while everybody goes on: nobody's records of before count then.
RENEWED = Chances(retention=0.01, renewed=0.1)
# Processes without an id come and go, and time passes beyond what they need.
MADE_UP = Chances(clock=0.1, made_up=0.5)
ORIGIN = (0,)
MANY = 3_000
# As few as show what each rule is there for: without it, one of these worlds goes wrong. In the last five more callers
# get the rarest answers.
FEW = [15, 224, 834, 36, 10, 14, 3, 5, 92, 320, 0, 1, 2, 7, 12]
SEEDS = pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(range(MANY), marks=[pytest.mark.full, pytest.mark.timeout(1800)])], ids=["few", "many"]
)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="txnbridge")


@pytest.mark.parametrize(("chances", "origin"), [(CALM, None), (HARSH, ORIGIN)], ids=["calm", "harsh"])
@SEEDS
def test_no_caller_is_ever_told_an_answer_that_does_not_count(chances, origin, seeds):
    findings, told = explore(seeds, chances, origin=origin)
    assert findings == []
    # Nothing told is no pass: each kind of answer came, and each kind of fault.
    faults = {"Fenced", "OutcomeUnknown", "InvalidState", "killed", "Conflict"}
    for answer in {"COMMIT", "ABORT", "undecided", "looked", *faults}:
        assert told[answer] >= 2, told


@SEEDS
@pytest.mark.parametrize(
    ("chances", "origin", "near_end"), [(CALM, None, 15), (HARSH, ORIGIN, 4)], ids=["calm", "harsh"]
)
def test_a_process_that_reads_the_last_records_only_tells_no_answer_that_is_void(chances, origin, near_end, seeds):
    timing = replace(SMALL_RECORDS, near_end=near_end, forget_after=near_end)
    # In the last two, such a process has not read the snapshot by which a claim is void, or a part of a commit.
    findings, told = explore([*seeds, 1_241, 2_811], chances, origin=origin, numbered=True, timing=timing)
    assert findings == []
    for answer in ("COMMIT", "ABORT", "undecided", "Fenced", "Conflict", "looked", "learnt"):
        assert told[answer] >= 2, told


@SEEDS
@pytest.mark.parametrize("near_end", [None, 5], ids=["all", "near-end"])
def test_a_log_renewed_while_all_go_on_gives_no_answer_that_does_not_count(near_end, seeds):
    timing = replace(SMALL_RECORDS, near_end=near_end, forget_after=near_end) if near_end else SMALL_RECORDS
    findings, told = explore(seeds, RENEWED, origin=ORIGIN, numbered=near_end is not None, timing=timing)
    assert findings == []
    for answer in ("COMMIT", "ABORT", "undecided", "Fenced", "EvidenceLost", "looked", "learnt", "renewed"):
        assert told[answer] >= 2, told


@SEEDS
@pytest.mark.parametrize("near_end", [None, 5], ids=["all", "near-end"])
def test_processes_that_make_up_forgotten_ids_give_no_answer_that_does_not_count(near_end, seeds, monkeypatch):
    timing = replace(SMALL_RECORDS, near_end=near_end or SMALL_RECORDS.near_end, forget_after=near_end or 15)
    forgotten = set()

    def look_at(is_kept, opener, since):
        if not (kept := is_kept(opener, since)):
            forgotten.add(opener.under)
        return kept

    replace_method(monkeypatch, conclusions, "_is_kept", look_at)
    findings, told = explore(seeds, MADE_UP, origin=ORIGIN, numbered=near_end is not None, timing=timing)
    assert findings == []
    for answer in ("COMMIT", "ABORT", "undecided", "Fenced", "Conflict", "looked", "made up"):
        assert told[answer] >= 2, told
    assert len(forgotten) >= 2


def test_no_process_is_left_without_an_answer_in_a_world_without_faults():
    peace = Chances(unclean=0, refused=0, killed=0, clock=0)
    findings, told = explore(range(10), peace)
    assert findings == []
    assert told["COMMIT"] > 10
    assert told["EvidenceLost"] == told["OutcomeUnknown"] == told["BrokerUnavailable"] == 0


def test_a_snapshot_says_the_same_as_all_that_it_covers():
    """A reader that begins at or in front of the record that a snapshot covers ends up knowing the same ids."""
    compared = 0
    for seed in range(8):
        archive = World(seed, CALM).run().log.archive
        whole = fold(archive)
        covered = {record.covers for _, record in decoded(archive) if isinstance(record, Snapshot)}
        for index, (position, _) in enumerate(archive):
            if index and position in covered:
                part = fold(archive[index:])
                if part.oldest_ack_window() and part.oldest_ack_window() < part.start:
                    continue  # trimming spares what these acknowledgements are judged by
                assert knowledge(part) == knowledge(whole)
                compared += 1
    assert compared > 20


def knowledge(folded):
    """Return the known ids without the data of claims, whose parts may be in front of where this reading began."""
    known = folded.ids.to_json(folded.completeness.log)
    known["opened"] = [each for each in known["opened"] if each[0]["number"] > 0]  # those of made-up ids are forgotten
    for kind in ("commits", "owners", "movers", "holds"):  # they are dropped when no transaction can need them any more
        del known[kind]
    return {**known, "claims": [claim[:-1] for claim in known["claims"]], "born": folded.completeness.born}


def test_a_claim_void_by_an_unseen_snapshot_does_not_stand_before_its_authors_next_claim():
    lists = "opened", "done", "claims", "groups", "living", "holds", "commits", "owners", "movers"
    known = {"log": "a", **{name: [] for name in lists}}
    records = [encode(Birth(log="a", nonce="birth", at=0)), encode(Presence(log="a", nonce="begin", until=10**15))]

    def snapshot() -> None:
        at = len(records) - 1
        covers: Any = {"born": (0,), "covers": (at,), "digest": digest(records[at]), "at": at}
        records.append(encode(Snapshot(log="a", nonce=f"snapshot {at}", body=known, stored=None, **covers)))

    def claim(read_up_to: int) -> None:
        acked = ClaimAcks((read_up_to,), (AckRange("g", ("t", 0), (0,), (5,)),))
        fields: Any = {
            "id": ("c",),
            "decision": Decision.COMMIT,
            "begin": EvidenceBegin((1,), "begin"),
            "by": None,
            "body": {},
        }
        records.append(encode(Claimed(log="a", nonce=f"up to {read_up_to}", acked=acked, stored=None, **fields)))

    records.append(encode(Presence(log="a", nonce="other", until=10**15)))
    snapshot()
    claim(read_up_to=1)  # too late: the snapshot covers more
    snapshot()
    claim(read_up_to=5)
    log = [((number,), raw) for number, raw in enumerate(records)]
    (stands,) = {str(fold(log[first:]).ids.groups) for first in (0, 2, 3, 4)}
    assert stands == str({("g", ("t", 0)): (5,)})


def test_a_commit_that_somebody_may_have_to_carry_out_is_not_forgotten():
    """A reader that begins at a snapshot knows the last commits as one that has read all, while they matter."""
    compared = 0
    for seed in range(8):
        archive = World(seed, CALM).run().log.archive
        whole = last_commits(fold(archive))
        for number, (_, record) in enumerate(decoded(archive)):
            if not isinstance(record, Snapshot):
                continue
            oldest = fold(archive[: number + 1]).oldest_living(record.at)
            needed = {key: at for key, at in whole.items() if oldest is not None and at >= oldest}
            part = fold([each for each in archive if each[0] >= record.covers])
            founding = part.completeness.founding_snapshot
            if founding is None or founding[0] != record:
                continue  # it did not suffice, and a later snapshot does not list what has expired since
            assert {key: at for key, at in last_commits(part).items() if key in needed} == needed
            compared += len(needed)
    assert compared > 20


def last_commits(folded):
    """Return the positions of the last commit of each owner's writers, and of each partition of a group."""
    owners = {(id, writer): c for id, last in folded.ids.commits.items() for writer, c in last.items()}
    commits = {key: commit.claim.position for key, commit in {**owners, **folded.ids.last_ackers}.items()}
    return {
        **commits,
        **{("hold", place, hold.id): hold.begin.at for place, held in folded.ids.holds.items() for hold in held},
    }


def fold(records):
    folded = LogState(lambda nonce, position, counts: None, Completeness(None, records[0][0] == (0,)))
    for position, raw in records:
        assert folded.take(position, raw)
    return folded


def test_a_seed_is_one_interleaving():
    first, second = (World(7, CALM).run() for _ in range(2))
    assert [kind.kind for _, kind in decoded(first.log.archive)] == [k.kind for _, k in decoded(second.log.archive)]
    assert first.told == second.told


# Each of these functions stands in the place of a rule's, which it is given first.


def last_record_wins(_, self, begin, record, winner, covered):
    self.claims.setdefault(record.id, {})[begin] = winner
    return True


def opens_again(_, self, under):
    newest = self.get(under.id)
    return newest is None or newest.under != under


def begin_at_the_end(_, self, *, opening=None, timeout=None):
    presence = self._engine._be_present(self._engine._lifetime, self._deadline(timeout))
    return {"at": list(presence.at), "id": presence.id}


def begin_anywhere(_, self, position, record):
    self.complete, self.log, self.born = True, record.log, position


def trim_up_to_the_snapshot(_, self, before, deadline):
    self._step()
    snapshots = [position for position, record in decoded(self._log.records) if isinstance(record, Snapshot)]
    self._log.trim(snapshots[-1])


def read_what_is_there(read, self, first, last, deadline=None):
    begin = self.begin()
    yield from read(self, begin if first is None or begin is None else max(first, begin), last)


def take_over_gaps(_, self, cursor, records):
    for position, raw in records:
        if cursor is None or position > cursor[0]:
            self._state.take(position, raw)
    return True


def renew_anywhere(_, self, position, raw, record):
    if self.cursor is None:
        self._take_first(position, record)
    self._renew(position, record)
    self._report(record.nonce, position, True)


def is_known(_, self, under):
    newest = self.get(under.id)
    return newest is not None and newest.under == under


any_snapshot_is_believed = Completeness, "has_covered_record", lambda *_: True
RULES = {
    "last_record_wins": (CALM, [(TokenFold, "claim", last_record_wins)]),
    "no_look_at_the_presence_record": (HARSH, [(LogState, "holds", lambda _, state, begin: state.cursor is not None)]),
    "openings_void_nothing": (
        CALM,
        [(Openings, "is_void", lambda *_: False), (Openings, "is_newest", lambda *_: True)],
    ),
    "openings_also_void_claims_on_what_is_prepared": (CALM, [(TokenFold, "is_prepared", lambda *_: False)]),
    "late_copies_of_openings_count_again": (CALM, [(Openings, "is_next", opens_again)]),
    "begin_taken_from_the_end": (CALM, [(Decisions, "begin", begin_at_the_end)]),
    "any_first_record_is_a_beginning": (HARSH, [(Completeness, "begin", begin_anywhere)]),
    "any_snapshot_is_believed": (HARSH, [any_snapshot_is_believed]),
    "trimmed_up_to_the_snapshot_itself": (
        CALM,
        [(_StepLog, "trim", trim_up_to_the_snapshot), any_snapshot_is_believed],
    ),
    "gaps_are_read_over": (CALM, [(MemoryLog, "read", read_what_is_there), (Follower, "_take", take_over_gaps)]),
    "done_marks_are_not_in_snapshots": (
        CALM,
        [(IdFold, "to_json", lambda to_json, *given: {**to_json(*given), "done": []})],
    ),
    "positions_are_not_in_snapshots": (
        CALM,
        [(IdFold, "to_json", lambda to_json, *given: {**to_json(*given), "groups": []})],
    ),
    "nobody_looks_who_else_acknowledged": (CALM, [(AckHistory, "rival_behind", lambda *_: False)]),
    "nobody_looks_what_prepared_transactions_hold": (CALM, [(TokenFold, "hold", lambda *_: None)]),
    "late_copies_of_acknowledgements_count_again": (
        CALM,
        [(TokenFold, "_acknowledge", lambda acknowledge, *given: acknowledge(*given[:-1], None))],
    ),
    "renewals_count_wherever_they_stand": (RENEWED, [(LogState, "_take_renewal", renew_anywhere)]),
    "made_up_ids_count_only_while_their_opening_is_known": (MADE_UP, [(Openings, "is_newest", is_known)]),
}


@pytest.mark.parametrize(("chances", "changes"), RULES.values(), ids=RULES)
def test_a_process_without_this_rule_is_told_an_answer_that_does_not_count(monkeypatch, chances, changes):
    for owner, name, by in changes:
        replace_method(monkeypatch, owner, name, by)
    findings, _ = explore([*FEW, *range(MANY)], chances, stop=True, origin=ORIGIN)
    assert findings
