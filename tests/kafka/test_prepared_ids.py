"""The pool of ids for prepared transactions opens each id once, if transactions ask for the same time-out."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from txnbridge_kafka.admin.admin import KafkaAdmin
from txnbridge_kafka.client.protocol_types import EndTxnResult, TransactionDescription
from txnbridge_kafka.write.owner import KafkaOwner
from txnbridge_kafka.write.prepared import PreparedIdPool, prepares_for
from txnbridge_kafka.write.replaceable_producer import ProducerSession

from tests.in_time import Hold
from tests.interrupts import interrupted_everywhere
from tests.kafka.kit import opened_ahead
from txnbridge import DeadlineExceeded
from txnbridge.spi import Begin, Deadline, Identity

pytestmark = pytest.mark.offline

LONGEST_MS = 900_000
Run = Callable[[float | None], None]


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the ids that are opened from now on, each with its time-out in milliseconds. No broker is asked."""
    opened: list[tuple[str, int]] = []

    def open(session: ProducerSession, deadline: Deadline) -> None:
        opened.append((session.id, session.timeout_ms))
        producer: Any = SimpleNamespace(begin=lambda: None, drop=lambda: None, taint_reason=lambda: "")
        producer.flush = lambda deadline: None
        session.producer, session.stale = producer, ""

    monkeypatch.setattr(ProducerSession, "open", open)
    monkeypatch.setattr(ProducerSession, "_is_complete", lambda *asked: True)
    return opened


def make_pool(
    prepared_ids: int,
    common_logs: bool = True,
    longest_ms: int = LONGEST_MS,
    describe: Callable[..., Any] = lambda *asked: {},
    default_ms: int = LONGEST_MS,
    **more: Callable[..., Any],
) -> PreparedIdPool:
    nothing = SimpleNamespace(describe=describe, add_offsets=lambda *asked: None, **more)
    owner: Any = SimpleNamespace(name="shop", opening=None, prepared_ids=prepared_ids, inherited_ids=[], denied="")
    owner.check = owner.open_once = lambda deadline: None
    owner.ledger = SimpleNamespace(record=lambda *record: None)
    events = SimpleNamespace(step=lambda *step, **data: nullcontext())
    settings = SimpleNamespace(common_logs=common_logs, prefix="")
    cluster: Any = SimpleNamespace(requests=nothing, settings=settings, events=events)
    return PreparedIdPool(cluster, owner, min(default_ms, longest_ms), longest_ms)


@pytest.fixture
def run(openings: list[tuple[str, int]]) -> Run:
    """Begin and end a prepared transaction with this hold, and wait until the next id is opened."""
    pool = make_pool(4)

    def run_one(hold: float | None) -> None:
        writer = pool.take(Deadline(30))
        writer.begin(Begin("txn", Deadline(30), prepare=True, hold=hold))
        assert writer.session.timeout_ms == (LONGEST_MS if hold is None else (30 + hold) * 1000)
        writer.close()
        assert opened_ahead(pool)
        for thread in opened_ahead(pool):
            thread.join(30)

    return run_one


@pytest.mark.parametrize("hold", [None, 10.0])
def test_an_id_is_opened_ahead_with_the_time_out_that_was_last_asked_for(run, openings, hold):
    run(hold)
    openings.clear()
    for _ in range(5):
        run(hold)
    assert [timeout_ms for _, timeout_ms in openings] == [LONGEST_MS if hold is None else 40_000] * 5
    assert [id for id, _ in openings[:4]] == ["shop.None.p2", "shop.None.p3", "shop.None.p0", "shop.None.p1"]


@pytest.mark.parametrize("hold", [None, 0.0, 0.5])
def test_a_short_hold_is_rounded_up_to_a_time_out_that_the_client_takes(hold):
    assert make_pool(4, default_ms=1500).timeout_ms(Begin("txn", Deadline(1), prepare=True, hold=hold)) == 2000


def test_a_part_of_a_span_tells_by_its_time_out_how_long_its_process_may_prepare_it() -> None:
    pool, told = make_pool(4), []
    for timeout, hold in [(29.2, 600.0), (0.5, 10.0), (1200, 0), (30, 900)]:
        begin = Begin("txn", Deadline(timeout), prepare=True, hold=hold, in_span=True)
        told.append((pool.timeout_ms(begin), prepares_for(pool.timeout_ms(begin))))
    assert told == [(630_030, 30), (11_001, 1), (LONGEST_MS, None), (LONGEST_MS, None)]


def test_a_part_whose_prepare_record_others_might_not_find_does_not_tell() -> None:
    begin = Begin("txn", Deadline(30), prepare=True, hold=600.0, in_span=True)
    assert make_pool(4, common_logs=False).timeout_ms(begin) == 630_000


@pytest.mark.parametrize(
    ("listed", "until"),
    [
        ({}, 30_000),
        ({"common_logs": False}, None),
        # It may be prepared, and the log that says so is of an application whose topics this bridge does not see.
        ({"known": False}, None),
        # An id without an opening is not one of a part.
        ({"id": "payments.p1", "timeout_ms": 900_010}, None),
    ],
    ids=str,
)
def test_a_part_tells_in_the_list_until_when_it_may_be_prepared_if_its_log_can_be_read(listed, until):
    assert listed_until(**listed) == until


@pytest.mark.parametrize("hold", [None, 900.0])
def test_a_brokers_largest_time_out_with_odd_milliseconds_tells_nothing(hold: float | None) -> None:
    begin = Begin("txn", Deadline(300), prepare=True, hold=hold, in_span=hold is not None)
    assert make_pool(4, longest_ms=900_010).timeout_ms(begin) == 900_000


PART = f"shop.{16 * 'a'}.p0"


def listed_until(id: str = PART, timeout_ms: int = 630_030, common_logs: bool = True, known: bool = True) -> int | None:
    """Return the time until which an open transaction that began at 0 may be prepared, as it is listed."""
    last = TransactionDescription(id, "Ongoing", 1, 0, 0, timeout_ms, ())
    requests = SimpleNamespace(cluster_id=lambda _: "c", transactions=lambda *_: [last], describe=lambda *_: {id: last})
    settings = SimpleNamespace(common_logs=common_logs, log_topic=str)
    topics = SimpleNamespace(all=lambda deadline: {"log": 1})
    cluster: Any = SimpleNamespace(requests=requests, settings=settings, topics=topics)
    ledger = SimpleNamespace(entries=lambda *_: [], newest_opening=lambda deadline: ("aa", {}) if known else None)
    context: Any = SimpleNamespace(ledger=lambda application, id: ledger)
    (listed,) = KafkaAdmin(cluster, context).transactions(Deadline(30))
    return listed.prepares_until


def test_a_transaction_that_asks_for_another_time_out_opens_its_id_again(run: Run, openings: list[tuple[str, int]]):
    run(10.0)
    openings.clear()
    run(20.0)
    run(20.0)
    assert openings == [("shop.None.p1", 50_000), ("shop.None.p2", 50_000), ("shop.None.p3", 50_000)]


def test_transactions_that_come_faster_than_ids_are_opened_find_more_of_them_open(monkeypatch, openings):
    open_at_once, may_open = ProducerSession.open, threading.Semaphore(0)

    def open_when_told(session: ProducerSession, deadline: Deadline) -> None:
        if threading.current_thread() is not threading.main_thread():
            may_open.acquire(timeout=30)
        open_at_once(session, deadline)

    monkeypatch.setattr(ProducerSession, "open", open_when_told)
    pool = make_pool(64)
    found = []
    for number in range(8):
        pool.take(Deadline(30)).begin(Begin(f"txn {number}", Deadline(30), prepare=True, hold=None))
        found.append(len(opened_ahead(pool)))
    may_open.release(64)
    pool.close(Deadline(30))
    assert found == [1, 2, 3, 4, 4, 4, 4, 4]
    assert len({id for id, _ in openings}) == len(openings) == 12


def test_transactions_begin_where_no_thread_can_be_started_that_opens_ids_ahead(openings, no_threads):
    refused, pool = no_threads(), make_pool(4)
    for _ in range(2):
        pool.take(Deadline(30)).begin(Begin("txn", Deadline(30), prepare=True, hold=None))
    assert len(refused) == len(openings) == 2


def test_an_exception_of_a_signal_handler_takes_no_id_from_the_pool(openings):
    pool = make_pool(1)

    def take() -> None:
        pool.take(Deadline(5)).close()

    assert interrupted_everywhere(take, take, ["prepared.py"])


def test_a_transaction_that_is_interrupted_right_after_it_was_prepared_is_aborted(openings):
    ended, last = list[bool](), TransactionDescription("", "Ongoing", 1, 0, 5, 1, ())

    def end(id: str, pid: int, epoch: int, commit: bool, deadline: Deadline) -> EndTxnResult:
        ended.append(commit)
        return EndTxnResult(0, pid, epoch)

    writer = make_pool(1, describe=lambda ids, deadline: dict.fromkeys(ids, last), end=end).take(Deadline(30))
    writer.begin(Begin("txn", Deadline(30), prepare=True, hold=None))
    writer.session.opened = last
    writer.prepare(Deadline(30))
    writer.abort(Deadline(30))
    assert ended == [False]


def test_a_thread_that_waits_for_anothers_opening_of_the_owners_id_keeps_its_deadline():
    hold = Hold()
    ledger: Any = SimpleNamespace(newest_opening=hold)
    owner = KafkaOwner(Identity("shop", False, "shop", ""), ledger, 1)
    with hold.asked_by(lambda: owner.open_once(Deadline(60))), pytest.raises(DeadlineExceeded):
        owner.open_once(Deadline(0.1))


def test_an_id_that_another_thread_replaces_while_its_state_is_asked_is_not_taken(openings: list[tuple[str, int]]):
    def describe(ids: list[str], deadline: Deadline) -> dict[str, Any]:
        pool.replace_id(ids[0])
        return {}

    pool = make_pool(2, describe=describe)
    for _ in range(3):
        pool.take(Deadline(30)).close()
    assert [id for id, _ in openings] == ["shop.None.p0", "shop.None.p1", "shop.None.p1"]
