"""A log whose evidence is gone is begun anew by an operator: what was before is forgotten, and never guessed."""

import pytest

from tests.core.decisions.test_decisions_long import Process
from tests.core.decisions_kit import MemoryLog, decoded
from tests.core.read.test_acks import before_next
from txnbridge._base.deadline import Deadline
from txnbridge._base.token import Decision
from txnbridge._decisions.records import Claimed, Renewed
from txnbridge.errors import EvidenceLost, InvalidState, OutcomeUnknown
from txnbridge.spi import Ack

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT
ORIGIN = (0,)


@pytest.fixture(params=[ORIGIN, None], ids=["origin", "no-origin"])
def log(request):
    return MemoryLog(origin=request.param)


def trimmed(log):
    """Return the log without its first record, which no snapshot covers."""
    log.records = log.records[1:]
    return log


def test_openings_and_transactions_go_on_after_a_renewal_of_the_log(log):
    Process(log).open().commit_many(3)
    operator = Process(trimmed(log))
    with pytest.raises(EvidenceLost, match="log renew"):
        operator.open()
    operator.decisions.renew(timeout=5)
    for process in (operator, Process(log)):
        assert process.claim("new", process.open().begin()) is COMMIT
        assert process.unfinished() == ["new"]


def test_a_token_from_before_a_renewal_stays_unknown_and_its_error_names_the_renewal(log):
    owner = Process(log).open()
    begin = owner.begin()
    owner.claim("old", begin)
    Process(trimmed(log)).decisions.renew(timeout=5)
    for process in (Process(log), Process(log).open()):
        for ask in (lambda p: p.decided("old", begin), lambda p: p.claim("old", begin, ABORT)):
            with pytest.raises(EvidenceLost, match="began it anew at 2023-11-14"):
                ask(process)
    assert [record.id for _, record in decoded(log.records) if isinstance(record, Claimed)] == [("old",)]


def test_a_process_from_before_a_renewal_is_told_and_none_of_its_records_counts(log):
    owner, idle = Process(log).open(), Process(log, "Y").open()
    begin = owner.begin()
    Process(trimmed(log)).decisions.renew(timeout=5)
    newcomer = Process(log).open()
    for old in (owner, idle):
        with pytest.raises(EvidenceLost):
            old.claim("late", begin)
        stored = list(log.records)
        for call in (old.begin, old.open, lambda old=old: old.claim("later", begin)):
            with pytest.raises(EvidenceLost):
                call()
        assert log.records == stored
    # What they wrote before they could be told stands behind the renewal, and is passed over.
    for process in (newcomer, Process(log)):
        assert process.claim("new", process.open().begin()) is COMMIT
        with pytest.raises(EvidenceLost):
            process.decided("late", begin)


def test_an_acknowledgement_by_a_member_that_has_not_read_the_renewal_moves_no_group(log):
    member = Process(log)
    begin = member.begin()
    ack = Ack("g", ("orders", 0), (0,), (7,), log.end())
    operator = Process(trimmed(log))
    unaware = Process(log)
    with pytest.raises(EvidenceLost):
        unaware.ledger.positions("g", Deadline(5))
    before_next(log, "claim", lambda record: operator.decisions.renew(timeout=5))
    with pytest.raises(EvidenceLost):
        unaware.claim("prepared", begin, acks=[ack])
    assert Process(log).ledger.positions("g", Deadline(5))[0] == {}
    assert Process(log).ledger.acknowledged("g", Deadline(5)) == {}


def test_a_log_that_lost_nothing_is_not_renewed(log):
    with pytest.raises(InvalidState, match="nothing to renew"):
        Process(log).decisions.renew(timeout=5)
    assert log.records == []
    Process(log).open()
    operator = Process(log)
    assert operator.decisions.lost(timeout=5) is None
    with pytest.raises(InvalidState, match="nothing to renew"):
        operator.decisions.renew(timeout=5)
    Process(trimmed(log)).decisions.renew(timeout=5)
    with pytest.raises(InvalidState, match="nothing to renew"):
        Process(log).decisions.renew(timeout=5)


def test_a_log_that_cannot_be_read_is_not_renewed(log):
    Process(log).open()
    log.append(b"stray")
    for call in (Process(trimmed(log)).decisions.renew, Process(log).decisions.lost):
        with pytest.raises(OutcomeUnknown, match="cannot be judged"):
            call(timeout=5)


def test_the_operator_learns_what_will_be_forgotten(log):
    owner = Process(log).open()
    begin = owner.begin()
    owner.decisions.claim(("query", 7), COMMIT, {})
    _, read_up_to = owner.ledger.positions("g", Deadline(5))
    owner.claim("moves", begin, acks=[Ack("g", ("orders", 0), (0,), (7,), read_up_to)])
    lost = Process(trimmed(log)).decisions.lost(timeout=5)
    assert lost is not None
    assert "not its birth record" in lost.reason
    assert set(lost.ids) == {"X", ("query", 7)}
    assert lost.positions == {("g", ("orders", 0)): (7,)}
    assert lost.decided == 1


def test_a_renewal_stays_known_when_the_log_is_trimmed_and_long(log):
    log.numbered = True
    owner = Process(log).open()
    begin = owner.begin()
    Process(trimmed(log)).decisions.renew(timeout=5)
    assert Process(log).open().commit_many(100).decisions.tidy(timeout=5) > tuple(begin["at"])
    newcomer = Process(log).open()
    assert newcomer.unfinished() == ["t99"]
    with pytest.raises(EvidenceLost, match="began it anew"):
        newcomer.decided("old", begin)
    with pytest.raises(EvidenceLost):
        owner.claim("late", begin)
    assert Process(log).open().unfinished() == ["t99"]


def test_a_renewal_whose_answer_was_lost_returns_the_position_where_the_log_begins(log):
    Process(log).open()
    operator, append, stored = Process(trimmed(log)), log.append, list[object]()

    def without_an_answer(record, deadline=None):
        position = append(record)
        if b'"kind":"renewed"' in record and not stored:
            stored.append(position)
            raise OutcomeUnknown("no answer")
        return position

    log.append = without_an_answer
    assert [operator.decisions.renew(timeout=5)] == stored
    assert len([1 for _, record in decoded(log.records) if isinstance(record, Renewed)]) == 2


@pytest.mark.parametrize("again", [False, True], ids=["first", "late-copy"])
def test_a_snapshot_may_cover_just_the_renewal_and_the_log_be_trimmed_up_to_it(log, again):
    Process(log).open()
    operator = Process(trimmed(log))
    operator.decisions.renew(timeout=5)
    if again:
        renewal = log.records[-1][1]
        operator.open()
        log.append(renewal)
    operator.decisions.tidy(timeout=5)
    assert isinstance(decoded(log.records)[0][1], Renewed)
    assert Process(log).open().claim("new", Process(log).begin()) is COMMIT


@pytest.mark.parametrize("how", ["renewed", "made-anew"])
def test_a_reader_that_starts_at_a_snapshot_ignores_the_claims_that_others_ignored(how):
    """A member of before acknowledges between what a newer one had read and its claim: it is no rival, for nobody."""
    log = MemoryLog(origin=ORIGIN)
    old = Process(log, "Y").open()
    begin, read_up_to = old.begin(), old.ledger.positions("g", Deadline(5))[1]
    if how == "renewed":
        Process(trimmed(log)).decisions.renew(timeout=5)
    else:
        log.records, log.next = [], 0
    member = Process(log, "Z")
    token, known = member.begin(), member.ledger.positions("g", Deadline(5))[1]
    with pytest.raises(EvidenceLost):
        old.claim("late", begin, acks=[Ack("g", ("orders", 0), (0,), (7,), read_up_to)])
    log.append(log.archive[0][1])  # a late copy of a birth record stays where it is, and is none
    assert member.claim("new", token, acks=[Ack("g", ("orders", 0), (0,), (3,), known)]) is COMMIT
    member.decisions.tidy(timeout=5)
    newcomer = Process(log)
    assert newcomer.decided("new", token) is COMMIT
    assert newcomer.claim("new", token, ABORT) is COMMIT
    assert newcomer.ledger.positions("g", Deadline(5))[0] == {("orders", 0): (3,)}
