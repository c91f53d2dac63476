"""Tests of the promises of a decision log, one promise a test, on a log in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

from tests.core.decisions_kit import MemoryLog, decoded, follower_of, state_of
from tests.failing import fail_call, note_calls, raising
from tests.in_time import wait_until
from txnbridge import errors
from txnbridge._base.deadline import Deadline
from txnbridge._base.events import Emitter, Event
from txnbridge._base.messages import Position
from txnbridge._base.timing import Timing
from txnbridge._base.token import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge._decisions.records import MAX_RECORD_BYTES, Birth, BodyPart, Claimed, encode

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT
BATCH = ("query", "sink", 7, 0)


class FaultyLog(MemoryLog):
    """A log whose next operations fail as listed, one fault after the other; then the log works."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: list[Callable[[bytes], Position]] = []
        self.ends: list[Exception] = []

    def append(self, record, deadline=None):
        return self.appends.pop(0)(record) if self.appends else super().append(record)

    def end(self, deadline=None):
        if self.ends:
            raise self.ends.pop(0)
        return super().end()

    def lose_answer(self, record: bytes) -> Position:
        super().append(record)
        raise errors.OutcomeUnknown("no answer")

    lose_record, refuse, fill_up, deny = (
        staticmethod(raising(error))
        for error in (errors.OutcomeUnknown, errors.BrokerUnavailable, errors.StorageFailed, errors.AccessDenied)
    )


@pytest.fixture
def log():
    return FaultyLog()


class ForgetfulLog(MemoryLog):
    """Drops records by age, whatever is asked of it."""

    keeps = 0.5


@pytest.fixture
def join(log, clock):
    """Another process on the same log."""
    return lambda **settings: Decisions(log, **{"timeout": 30, "clock": clock, "lifetime": 900, **settings})


def kinds(log: MemoryLog) -> list[str]:
    return [record.kind for _, record in decoded(log.records)]


def refused(call: Callable[[], object], log: MemoryLog, error: type[errors.TxnBridgeError]) -> errors.TxnBridgeError:
    """The call raises, and leaves nothing in the log."""
    before = list(log.records)
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert log.records == before
    return raised.value


def test_claiming_again_changes_nothing_and_writes_nothing(join, log):
    decisions = join()
    first = decisions.claim("id", COMMIT)
    before = len(log.records)
    assert decisions.claim("id", ABORT) == first
    assert len(log.records) == before


@pytest.mark.parametrize(("nth", "told"), [(1, errors.OutcomeUnknown), (2, COMMIT)], ids=["judging", "tidying"])
def test_a_stored_claim_whose_deadline_passes_never_says_that_nothing_was_decided(join, monkeypatch, nth, told):
    """Another thread reads the log, and the broker keeps it waiting."""
    decisions = join()
    begin, follower = decisions.begin(), follower_of(decisions)
    records, reads = note_calls(monkeypatch, follower, "append"), errors.DeadlineExceeded("another thread reads")
    is_claimed = lambda _: any(isinstance(record, Claimed) for record, *_ in records)  # noqa: E731
    fail_call(monkeypatch, follower, "looking", reads, nth - 1, when=is_claimed)
    if told is COMMIT:
        assert decisions.claim("t", COMMIT, begin=begin).decision is COMMIT
    else:
        with pytest.raises(told, match="a claim on t is stored"):
            decisions.claim("t", COMMIT, begin=begin)
    assert decisions.read("t", begin=begin).claim.decision is COMMIT


def test_ids_that_look_alike_are_different_ids(join):
    decisions = join()
    decisions.claim(("q", 1), COMMIT)
    for other in ("q", ("q", "1"), ("q", 1, 0), "q/1"):
        assert decisions.read(other).claim is None


@pytest.mark.parametrize("id", ["", (), ("", 1), (7, "q"), ("q", 1.5), ("q", True), ("q", None), b"q", "x" * 2_000])
def test_an_id_that_is_none_is_refused(join, log, id):
    decisions = join()
    refused(lambda: decisions.claim(id, COMMIT), log, errors.InvalidOption)


def test_a_call_that_would_decide_nothing_or_write_an_unreadable_record_is_refused(join, log):
    deep: dict[str, object] = {}
    for _ in range(100):
        deep = {"deeper": deep}
    decisions = join()
    decisions.ledger("X").opened({}, Deadline(5))
    decisions.begin()
    for call in (
        lambda: decisions.claim("id", Decision.UNDECIDED),
        lambda: decisions.claim("id", COMMIT, deep),
        lambda: decisions.claim("id", COMMIT, ["no mapping"]),
        lambda: decisions.claim("id", COMMIT, {"number": float("inf")}),
        lambda: decisions.open("X", deep),
        lambda: decisions.open("X", name=""),
        lambda: decisions.open("X", name=3),
        lambda: decisions.done("q", 1.5),
        lambda: decisions.done("q", True),
        lambda: decisions.ledger("X").record(b"prepare", "t1", {}, Deadline(5)),
        lambda: decisions.ledger("X").record("prepare", "t1", deep, Deadline(5)),
    ):
        refused(call, log, errors.InvalidOption)
    assert join().claim("id", COMMIT, {"as deep as": [[[["it may be"]]]]}).mine


def test_a_closed_log_says_so(join, log):
    decisions = join()
    decisions.close()
    decisions.close()
    refused(lambda: decisions.claim("id", COMMIT), log, errors.InvalidState)


def test_a_claim_is_repeated_until_a_clean_answer_gives_its_position(join, log):
    decisions = join()
    decisions.begin()
    log.appends = [log.lose_record, log.lose_answer, log.refuse, log.lose_answer]
    claim = decisions.claim("id", COMMIT)
    copies = [(position, record) for position, record in decoded(log.records) if isinstance(record, Claimed)]
    assert len(copies) == 3
    assert len({record.nonce for _, record in copies}) == 1
    assert claim.position == copies[0][0]


def test_without_any_answer_the_claim_is_unknown_and_known_as_ones_own_later(join, log):
    decisions = join()
    decisions.claim("other", COMMIT)
    log.appends = [log.lose_answer] + [log.lose_record] * 1_000
    with pytest.raises(errors.OutcomeUnknown, match="ask again"):
        decisions.claim("id", COMMIT, timeout=0.2)
    log.appends = []
    claim = decisions.claim("id", ABORT)
    assert (claim.decision, claim.mine) == (COMMIT, True)


def test_a_claim_that_was_certainly_not_stored_is_no_unknown_one(join, log):
    decisions = join()
    decisions.begin()
    log.appends = [log.refuse] * 1_000
    refused(lambda: decisions.claim("id", COMMIT, timeout=1), log, errors.BrokerUnavailable)
    log.appends = [log.fill_up]
    refused(lambda: decisions.claim("id", COMMIT), log, errors.StorageFailed)


@pytest.mark.parametrize("then", ["fill_up", "deny"])
def test_an_append_that_fails_for_good_after_a_lost_answer_leaves_the_claim_unknown(join, log, then):
    decisions = join()
    decisions.begin()
    log.appends = [log.lose_record, getattr(log, then)]
    refused(lambda: decisions.claim("id", COMMIT), log, errors.OutcomeUnknown)


@pytest.mark.parametrize("refused", [errors.BrokerUnavailable, errors.AccessDenied])
def test_a_claim_that_cannot_be_read_back_is_unknown(join, log, refused):
    decisions = join()
    decisions.begin()
    log.read = raising(refused("gone"))
    with pytest.raises(errors.OutcomeUnknown, match="read back"):
        decisions.claim("id", COMMIT)


def test_an_old_copy_of_the_log_decides_nothing(join, log):
    decisions = join()
    begin = decisions.begin()
    old = list(log.records)
    decisions.claim("id", COMMIT, begin=begin)
    log.read = lambda first, last, deadline: iter(r for r in old if r[0] >= (first or (0,)))
    with pytest.raises(errors.OutcomeUnknown):
        decisions.claim("other", COMMIT)
    log.end = lambda deadline: old[-1][0]
    with pytest.raises(errors.OutcomeUnknown, match="old copy"):
        decisions.read("id")
    del log.read, log.end
    assert decisions.read("id", begin=begin).claim is not None


def test_the_token_of_one_process_is_decided_by_another(join):
    begin = join(name="log-billing").begin()
    assert begin["log"] == "log-billing"
    assert join().claim("t1", COMMIT, begin=begin).decision is COMMIT
    assert join().claim("t1", ABORT, begin=begin).decision is COMMIT
    assert join().read("t1", begin=begin).claim.decision is COMMIT


def test_another_record_at_the_presences_position_proves_nothing(join, log):
    begin = join().begin()
    refused(lambda: join().claim("t1", ABORT, begin={**begin, "id": "another"}), log, errors.EvidenceLost)


def test_a_log_that_ends_before_the_presence_proves_nothing(join, log):
    join().claim("id", COMMIT)
    begin = join().begin()
    log.truncate(log.records[-2][0])
    refused(lambda: join().claim("t1", ABORT, begin=begin), log, errors.OutcomeUnknown)
    refused(lambda: join().read("t1", begin=begin), log, errors.OutcomeUnknown)


def test_a_log_that_lost_its_end_and_grew_again_is_noticed_by_a_process_that_had_read_it(join, log):
    owner, other = join(), join()
    begin = owner.begin()
    kept = log.records[-1][0]
    other.claim("t1", COMMIT, begin=begin)
    log.truncate(kept)
    newcomer = join()
    for number in range(5):
        newcomer.claim(f"new-{number}", COMMIT)
    with pytest.raises(errors.EvidenceLost, match="truncated"):
        other.claim("t2", ABORT, begin=begin)
    refused(lambda: other.claim("t2", ABORT), log, errors.EvidenceLost)


def test_a_recreated_log_proves_nothing_to_a_process_that_knew_the_old_one(join, log):
    owner = join()
    begin = owner.begin()
    log.records, log.next = [], 0
    refused(lambda: owner.read("id"), log, errors.OutcomeUnknown)
    refused(lambda: join().claim("t1", ABORT, begin=begin), log, errors.EvidenceLost)
    join().claim("id", COMMIT)
    join().claim("another", COMMIT)
    refused(lambda: join().claim("t1", ABORT, begin=begin), log, errors.EvidenceLost)
    with pytest.raises(errors.EvidenceLost):
        owner.read("id")


def test_an_id_that_a_token_carries_is_not_decided_a_second_time_without_it(join, log):
    begin = join().begin()
    join().claim("t1", COMMIT, begin=begin)
    decisions = join()
    decisions.begin()
    refused(lambda: decisions.claim("t1", ABORT), log, errors.InvalidOption)
    refused(lambda: decisions.read("t1"), log, errors.InvalidOption)


def test_a_question_about_a_token_does_not_begin_a_log(join, log):
    refused(lambda: join().read("t1", begin={"at": [3], "id": "gone"}), log, errors.EvidenceLost)
    assert log.records == []


@pytest.mark.parametrize(
    "begin", [{}, {"at": 3, "id": "x"}, {"at": [3]}, {"at": ["3"], "id": "x"}, {"at": [3], "id": 3}]
)
def test_a_begin_that_is_none_is_refused(join, log, begin):
    refused(lambda: join().claim("t1", COMMIT, begin=begin), log, errors.InvalidToken)


def test_ids_without_a_token_need_the_log_from_its_birth_record_on(join, log):
    join().claim(BATCH, COMMIT)
    owner = join()
    begin = owner.begin()
    log.trim(log.records[-1][0])
    newcomer = join()
    refused(lambda: newcomer.claim(BATCH, ABORT), log, errors.EvidenceLost)
    refused(lambda: newcomer.read(BATCH), log, errors.EvidenceLost)
    refused(lambda: newcomer.claims("query"), log, errors.EvidenceLost)
    refused(lambda: newcomer.done(("query", "sink"), 7), log, errors.EvidenceLost)
    refused(lambda: newcomer.open("query"), log, errors.EvidenceLost)
    refused(lambda: newcomer.tidy(), log, errors.EvidenceLost)
    # What a token's evidence covers can still be decided.
    assert newcomer.claim("t1", COMMIT, begin=begin).decision is COMMIT


def test_a_log_that_lost_its_first_records_is_mended_by_a_process_that_has_read_them(join, log):
    follower = join()
    follower.claim(BATCH, COMMIT)
    follower.begin()
    log.trim(log.records[-1][0])
    follower.tidy()
    assert join().read(BATCH).claim.decision is COMMIT


def test_creating_a_log_may_race_and_its_first_birth_record_counts(join, log):
    one, other = join(), join()
    end, log.end = log.end, lambda deadline=None: None
    one_birth, other_birth = (follower_of(each)._end(Deadline(5), True) for each in (one, other))
    log.end = end
    assert one_birth < other_birth
    one.claim("id", COMMIT)
    other.claim("id", ABORT)
    assert {record.log for _, record in decoded(log.records) if not isinstance(record, Birth)} == {
        decoded(log.records)[0][1].log
    }
    assert join().read("id").claim.decision is COMMIT


def test_a_late_birth_record_is_not_taken_for_the_beginning(join, log):
    """The log's first records are trimmed up to the birth record of a process that came second."""
    one = join()
    one.claim("id", COMMIT)
    late = log.append(log.records[0][1])
    one.tidy()
    log.trim(late)
    assert kinds(log)[0] == "birth"
    assert join().read("id").claim.decision is COMMIT


def test_records_of_a_log_that_was_there_before_do_not_count_in_this_one(join, log):
    """A process that slept while the log was recreated appends to the new one what it meant for the old one."""
    log.origin = (0,)
    sleeper = join()
    opening = sleeper.open("X")
    sleeper.claim("id", COMMIT, opening=opening)
    log.records, log.next = [], 0
    newcomer = join()
    newcomer.open("X")
    for number in range(5):
        newcomer.claim(("q", number), COMMIT)
    with pytest.raises(errors.EvidenceLost):
        sleeper.claim("other", ABORT, opening=opening)
    assert kinds(log)[-1] == "claim"
    for process in (newcomer, join()):
        assert process.read("other").claim is None
    assert newcomer.claim("other", COMMIT).decision is COMMIT


def test_an_owner_that_was_replaced_gets_no_new_begin(join, clock):
    owner = join(lifetime=30)
    opening = owner.open("X")
    assert owner.begin(opening=opening) == owner.begin(opening=opening)
    join().open("X")
    clock.now += 10_000  # its presence must be renewed, and that takes reading on
    with pytest.raises(errors.Fenced):
        owner.begin(opening=opening)


def test_an_owner_that_cannot_read_what_happened_meanwhile_gets_no_new_begin(join, log, clock):
    owner = join(lifetime=30)
    opening = owner.open("X")
    owner.begin(opening=opening)
    newer = join()
    newer.open("X")
    newer.begin()
    log.trim(log.records[-1][0])  # by age, and no snapshot
    clock.now += 10_000
    with pytest.raises(errors.EvidenceLost):
        owner.begin(opening=opening)


def test_a_presence_is_renewed_before_it_ends_and_not_before(join, clock, log):
    decisions = join(lifetime=900)
    first = decisions.begin()
    clock.now += 899
    assert decisions.begin() == first
    clock.now += 2
    second = decisions.begin()
    assert second != first
    assert kinds(log).count("presence") == 2
    # Whoever asks at the very end of the first token's life finds its evidence.
    clock.now += 899
    join().tidy()
    assert join().read("t1", begin=second).claim is None


def test_a_run_is_one_opening_however_many_tasks_open_it(join):
    assert {join().open("query", name="run-1").number for _ in range(3)} == {1}
    assert join().open("query", name="run-2").number == 2
    with pytest.raises(errors.Fenced):
        join().open("query", name="run-1")  # a late task


def test_a_late_task_is_told_so_also_after_its_runs_opening_was_trimmed(join, clock):
    for number in (1, 2):
        join().open("query", name=f"run-{number}")
    clock.now += 10_000
    join().tidy()
    join().tidy()
    with pytest.raises(errors.Fenced):
        join().open("query", name="run-1")


def test_a_run_claims_for_the_batch_until_a_newer_run_opens(join):
    old, new = join(), join()
    first = old.open("query", name="run-1")
    old.claim(("query", "sink", 0, 0), COMMIT, opening=first)
    second = new.open("query", name="run-2")
    with pytest.raises(errors.Fenced):
        old.claim(("query", "sink", 1, 0), ABORT, opening=first)
    assert old.claim(("query", "sink", 0, 0), ABORT, opening=first).decision is COMMIT
    claim = new.claim(("query", "sink", 1, 0), COMMIT, opening=second)
    assert (claim.decision, claim.opening) == (COMMIT, "run-2")


def test_openings_that_race_are_put_in_a_row(join, log):
    one, other = join(), join()
    one.read("X")
    other.read("X")
    end = log.end
    log.end = lambda deadline=None: state_of(one).cursor[0]  # both believe that nobody opened X
    winner = one.open("X")
    log.end = end
    assert other.open("X").number == 2
    with pytest.raises(errors.Fenced):
        one.begin(opening=winner, timeout=Deadline(5)) if one.read("X") else None


def test_calls_in_one_reading_answer_as_of_its_begin_and_with_what_they_append(join, log):
    one, other = join(), join()
    with one.reading_once():
        other.claim("seen later", COMMIT)
        log.ends.append(errors.BrokerUnavailable("asked for the log's end again"))
        assert one.read("seen later").claim is None and not one.claims("seen later")
        assert one.open("query", name="run-1").number == 1
        assert one.claim("seen later", ABORT).decision is COMMIT
        log.ends.clear()
    other.claim("later still", ABORT)
    assert one.read("later still").claim.decision is ABORT


def test_another_thread_waits_for_the_end_of_a_reading(join):
    decisions = join()
    refused: list[errors.TxnBridgeError] = []

    def read():
        with pytest.raises(errors.DeadlineExceeded) as raised:
            decisions.read(BATCH, timeout=0.01)
        refused.append(raised.value)

    with decisions.reading_once():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert refused and decisions.read(BATCH).claim is None


def test_a_done_mark_settles_every_id_up_to_it(join):
    decisions = join()
    for batch in range(3):
        decisions.claim(("query", "sink", batch, 0), COMMIT)
    decisions.claim(("query", "other", 0, 0), COMMIT)
    decisions.done(("query", "sink"), 1)
    reader = join()
    assert reader.read(("query", "sink")).done_up_to == 1
    assert [reader.read(("query", "sink", batch, 0)).done for batch in range(3)] == [True, True, False]
    assert reader.read(("query", "sink", 0, 5)).done
    assert not reader.read(("query", "other", 0, 0)).done
    assert reader.read(("query", "sink", 0, 0)).claim is None
    assert [claim.id for claim in reader.claims("query")] == [("query", "sink", 2, 0), ("query", "other", 0, 0)]
    assert [claim.id for claim in reader.claims(("query", "sink"))] == [("query", "sink", 2, 0)]


def test_a_done_mark_never_goes_back_and_refuses_claims_up_to_it(join, log):
    decisions = join()
    decisions.done(("query", "sink"), 5)
    before = len(log.records)
    decisions.done(("query", "sink"), 3)
    decisions.done(("query", "sink"), 5)
    assert len(log.records) == before
    assert join().read(("query", "sink")).done_up_to == 5
    refused(lambda: decisions.claim(("query", "sink", 5, 0), COMMIT), log, errors.InvalidState)


TOKENS = {"tokens": [f"{number:0>400}" for number in range(5_000)]}


def test_data_too_large_for_a_record_goes_in_parts(join, log):
    assert join().claim(BATCH, COMMIT, TOKENS).data == TOKENS
    assert kinds(log).count("part") == 3
    assert max(len(raw) for _, raw in log.records) <= MAX_RECORD_BYTES
    assert join().claim(BATCH, ABORT).data == TOKENS


def test_parts_whose_answers_were_lost_are_none_the_worse(join, log):
    decisions = join()
    decisions.begin()
    log.appends = [log.lose_answer, log.lose_record] * 2
    assert decisions.claim(BATCH, COMMIT, TOKENS).data == TOKENS
    assert join().read(BATCH).claim.data == TOKENS


def test_a_large_claim_outlives_trimming_until_it_is_done(join, clock, log):
    join().claim(BATCH, COMMIT, TOKENS)
    for _ in range(2):
        clock.now += 10_000
        join().tidy()
        assert join().read(BATCH).claim.data == TOKENS
    assert kinds(log).count("claim") == 0
    join().done(("query", "sink"), 7)
    clock.now += 10_000
    join().tidy()
    join().tidy()
    assert kinds(log).count("part") == 0


def test_the_parts_of_a_claim_are_safe_from_a_trim_before_the_claim_stands(join, log):
    claimer = join()
    original = log.append

    def append(record, deadline=None):
        position = original(record)
        if isinstance(decoded([(position, record)])[0][1], BodyPart):
            join().tidy()
        return position

    log.append = append
    assert claimer.claim(BATCH, COMMIT, TOKENS).data == TOKENS
    log.append = original
    assert join().read(BATCH).claim.data == TOKENS


def test_a_decision_whose_parts_are_gone_is_not_given_without_its_data(join, log):
    join().claim(BATCH, COMMIT, TOKENS)
    log.records = [
        (position, encode(Birth(log=record.log, nonce=record.nonce, at=0)) if isinstance(record, BodyPart) else raw)
        for (position, raw), (_, record) in zip(log.records, decoded(log.records), strict=True)
    ]
    with pytest.raises(errors.EvidenceLost, match="decided to commit"):
        join().read(BATCH)


def test_a_log_is_tidied_by_itself_after_many_records(join, clock, log):
    for number in range(300):
        decisions = join(tidy_after=50)
        decisions.claim(("q", number), COMMIT)
        decisions.done("q", number)
        clock.now += 60
    assert len(log.records) < 120
    assert join().read("q").done_up_to == 299


def test_a_log_is_tidied_by_itself_before_brokers_drop_records_by_age(join, clock, log):
    join().claim("id", COMMIT)
    clock.now += 7 * 3600
    join().claim("other", COMMIT)
    assert kinds(log).count("snapshot") == 1


def test_a_decision_stands_also_if_the_log_cannot_be_tidied(join, log, caplog):
    log.trim = raising(errors.BrokerUnavailable("no"))
    assert join(tidy_after=1).claim("id", COMMIT).mine
    assert "could not be tidied" in caplog.text


def test_a_follower_of_the_log_reads_only_new_records(join, log):
    writer, follower = join(), join()
    for number in range(50):
        writer.claim(("q", number), COMMIT)
    follower.read("q")
    log.reads = 0
    for number in range(50, 60):
        writer.claim(("q", number), COMMIT)
    reads_of_writer = log.reads
    log.reads = 0
    follower.read("q")
    assert log.reads == 11  # ten new ones, and the last known one to see that it is still there
    assert reads_of_writer == 20


def test_reads_stay_short_and_memory_flat_however_many_decisions_there_were(join, clock, log):
    log.archive = _Nowhere()
    decisions = join(lifetime=30, tidy_after=500, timing=Timing(forget_after=500))
    opening = decisions.open("X")
    lengths, known = [], []
    for number in range(1, 3_001):
        begin = decisions.begin(opening=opening)
        decisions.claim(f"t{number}", COMMIT, begin=begin, opening=opening)
        if number % 10 == 0:
            decisions.claim(("q", number), COMMIT)
            decisions.done("q", number)
        clock.now += 1
        if number % 500 == 0:
            lengths.append(len(log.records))
            tokens = state_of(decisions).tokens
            known.append(len(tokens.claims) + len(tokens.presences))
    assert max(lengths[1:]) < 1.5 * lengths[1]
    assert max(known) < 1_500
    log.reads = 0
    newcomer = join()
    assert newcomer.claim(("q", 3_001), COMMIT).mine
    assert newcomer.read("q").done_up_to == 3_000
    assert newcomer.claim("t3000", ABORT, begin=begin).decision is COMMIT
    assert log.reads < 1_500


class _Nowhere(list):  # type: ignore[type-arg]
    def append(self, _):
        pass


def test_an_idle_process_repeats_snapshots_where_records_are_dropped_by_age():
    log = ForgetfulLog()
    with closing(Decisions(log)) as idle, closing(Decisions(log)) as onlooker:
        opening = idle.open("X")
        assert onlooker.read("X").opening == opening
        wait_until(lambda: sum(record.kind == "snapshot" for _, record in decoded(log.archive)) >= 3)
        idle.close()
        log.trim(log.records[-2][0])  # by age: what is left is the newest snapshot, and the record that it covers
        with closing(Decisions(log)) as later:
            assert later.read("X").opening == opening


def test_a_decision_in_front_of_an_unreadable_record_stands(join, log):
    decisions = join()
    begin = decisions.begin()
    decisions.claim("t1", COMMIT, begin=begin)
    decisions.claim("id", COMMIT)
    decisions.done("q", 1)
    log.append(b"hello")
    for process in (decisions, join()):
        assert process.claim("t1", ABORT, begin=begin).decision is COMMIT
        assert process.claim("id", ABORT).decision is COMMIT


def test_behind_an_unreadable_record_nobody_claims_or_answers(join, log):
    decisions = join()
    begin = decisions.begin()
    log.append(b"hello")
    for process in (join(), decisions):
        error = refused(partial(process.read, "id"), log, errors.OutcomeUnknown)
        assert str(list(log.end())) in str(error)
        assert "not written by txnbridge" in str(error)
        refused(partial(process.claim, "t1", COMMIT, begin=begin), log, errors.OutcomeUnknown)
        refused(partial(process.claims, "q"), log, errors.OutcomeUnknown)
        refused(partial(process.open, "X"), log, errors.OutcomeUnknown)
        refused(partial(process.done, "q", 3), log, errors.OutcomeUnknown)
        refused(process.tidy, log, errors.OutcomeUnknown)
        refused(partial(process.ledger("X").find, "t1", Deadline(5)), log, errors.OutcomeUnknown)


def test_a_record_of_a_newer_version_stops_a_process_that_cannot_read_it(join, log):
    raw = encode(Birth(log="x", nonce="y", at=1)).replace(b'{"txnbridge":2', b'{"txnbridge":3')
    join().claim("id", COMMIT)
    log.append(raw)
    assert "upgrade" in str(refused(lambda: join().claim("other", COMMIT), log, errors.OutcomeUnknown))


def test_a_log_that_begins_with_something_else_is_not_ours(join, log):
    log.append(b"somebody else's message")
    refused(lambda: join().claim("id", COMMIT), log, errors.OutcomeUnknown)
    refused(lambda: join().read("id"), log, errors.OutcomeUnknown)


def test_a_ledger_keeps_what_a_backend_records_about_a_transaction(join):
    owner = join(host="a")
    ledger = owner.ledger("X")
    assert ledger.newest_opening(Deadline(5)) is None
    name = ledger.opened({"writers": 4}, Deadline(5))
    assert ledger.newest_opening(Deadline(5)) == (name, {"writers": 4})
    begin = owner.begin()
    ledger.record("announce", "t1", {"topics": ["a"]}, Deadline(5))
    ledger.record("prepare", "t1", {"pid": 7}, Deadline(5))
    ledger.record("prepare", "t2", {}, Deadline(5))
    for ask in (join().ledger("X"), join().ledger("X", begin)):
        found = ask.find("t1", Deadline(5))
        assert [(entry.kind, entry.data, entry.opening) for entry in found] == [
            ("announce", {"topics": ["a"]}, name),
            ("prepare", {"pid": 7}, name),
        ]
    assert join().ledger("Y").find("t1", Deadline(5)) == []


def test_a_ledger_lists_the_entries_of_a_kind_that_count_in_their_order(join):
    owner = join()
    ledger = owner.ledger("X")
    ledger.opened({}, Deadline(5))
    for transaction in ("t2", "t1", "t3"):
        ledger.record("prepare", transaction, {"of": transaction}, Deadline(5))
    ledger.record("outcome", "t1", {}, Deadline(5))
    newer = join().ledger("X")
    newer.opened({}, Deadline(5))
    with pytest.raises(errors.Fenced):
        ledger.record("prepare", "t4", {}, Deadline(5))
    newer.record("prepare", "t5", {}, Deadline(5))
    found = join().ledger("X").entries("prepare", Deadline(5))
    assert [entry.transaction for entry in found] == ["t2", "t1", "t3", "t5"]
    assert found[1].data == {"of": "t1"}
    assert join().ledger("Y").entries("prepare", Deadline(5)) == []


def test_a_ledger_entry_whose_answer_was_lost_is_kept_once(join, log):
    owner = join()
    owner.ledger("X").opened({}, Deadline(5))
    log.appends = [log.lose_answer, log.lose_answer]
    owner.ledger("X").record("prepare", "t1", {}, Deadline(5))
    assert len(join().ledger("X").find("t1", Deadline(5))) == 1


def test_only_the_process_that_opened_an_id_records_for_the_id(join):
    join().ledger("X").opened({}, Deadline(5))
    with pytest.raises(errors.InvalidState, match="not opened by this process"):
        join().ledger("X").record("prepare", "t1", {}, Deadline(5))


def test_ledger_entries_live_as_long_as_a_token_may_be_asked_about(join, clock):
    owner = join(lifetime=900)
    owner.ledger("X").opened({}, Deadline(5))
    begin = owner.begin()
    owner.ledger("X").record("outcome", "t1", {"state": "aborted"}, Deadline(5))
    clock.now += 899
    join().tidy()
    assert len(join().ledger("X", begin).find("t1", Deadline(5))) == 1
    clock.now += 10_000
    join().tidy()
    join().tidy()
    assert join().ledger("X").find("t1", Deadline(5)) == []
    with pytest.raises(errors.EvidenceLost):
        join().ledger("X", begin).find("t1", Deadline(5))


def test_threads_of_one_process_race_and_agree(join, log):
    decisions = join(tidy_after=40)
    answers: dict[int, set[Decision]] = {number: set() for number in range(60)}

    def race(choice: Decision) -> None:
        for number in range(60):
            answers[number].add(decisions.claim(("q", number), choice).decision)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(race, (COMMIT, ABORT, COMMIT, ABORT)))
    assert all(len(seen) == 1 for seen in answers.values())
    assert {next(iter(seen)) for seen in answers.values()} <= {COMMIT, ABORT}
    assert kinds(log).count("presence") == 1


def test_every_append_and_read_is_told_to_listeners(log, clock):
    told: list[Event] = []
    decisions = Decisions(log, clock=clock, events=Emitter("bridge", [told.append]))
    decisions.claim("t1", COMMIT, {"secret": "body"})
    log.appends = [log.lose_answer]
    decisions.claim("t2", ABORT)
    stored = [(phase, kind) for kind in ("birth", "presence", "claim") for phase in ("before", "after")]
    stored_again = [(phase, "claim") for phase in ("before", "failed", "before", "after")]
    appends = [(e.phase, e.data["kind"]) for e in told if e.name == "decision.append"]
    assert appends == [*stored, *stored_again]
    assert [e.transaction for e in told if e.data.get("kind") == "claim"] == ["t1"] * 2 + ["t2"] * 4
    reads = [e for e in told if e.name == "decision.read"]
    assert [e.phase for e in reads] == ["before", "after"] * (len(reads) // 2)
    assert sum(e.data.get("records", 0) for e in reads) == log.reads
    assert "body" not in repr(told)


def test_a_before_event_comes_before_anything_is_sent(log, clock):
    class Dies(BaseException):
        pass

    class Deadly(Emitter):
        __slots__ = ()

        def emit(self, name, phase, transaction=None, **data):
            if (name, phase, data.get("kind")) == ("decision.append", "before", "claim"):
                raise Dies

    decisions = Decisions(log, clock=clock, events=Deadly("bridge", [print]))
    with pytest.raises(Dies):
        decisions.claim("t1", COMMIT)
    assert "claim" not in kinds(log)
    assert Decisions(log, clock=clock).claim("t1", ABORT).decision is ABORT
