"""A span with a database: rows and all brokers' messages, or nothing, wherever its process dies."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from txnbridge_embedded.admin.admin import EmbeddedAdmin

import txnbridge
from tests.core.half.ends import Ends, addresses, failing, no_checks, span_pair
from tests.core.test_fork import in_child
from tests.failing import answer_calls, note_calls, on_call, replace_method
from tests.in_time import wait_until
from tests.interrupts import interrupted_everywhere
from tests.kill_walk import KillWalk
from tests.sql.outbox_programs import scalars
from tests.sql.span_programs import Shop, rows, sell_all, sell_one
from txnbridge import Bridge, Decision, Outcome, errors, spanning
from txnbridge._half.span import spans_over
from txnbridge.spi import Advice, Half
from txnbridge.sql.barrier import BarrierTable
from txnbridge.sql.span import SpanResolver
from txnbridge.testing import Child

Pair = tuple[Bridge, Bridge]


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def pair(tmp_path: Path, ends: Ends, broken_broker) -> Iterator[Pair]:
    with span_pair(f"{broken_broker(**ends.parts())}:{tmp_path}", ends) as pair:
        yield pair


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    found = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with found.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE sales (number INTEGER)")
    yield found
    found.dispose()


def sell(pair: Pair, engine: sa.Engine, number: int, **settings: float) -> txnbridge.Span:
    with spanning(*pair, db=engine, **settings) as span:
        span.db.exec_driver_sql(f"INSERT INTO sales VALUES ({number})")
        for bridge in pair:
            span.on(bridge).send("sales", b"%d" % number)
    return span


def found(pair: Pair, engine: sa.Engine) -> list[list[int]]:
    return [rows(engine), *([int(message.value) for message in bridge.read("sales", 100)] for bridge in pair)]


def test_rows_and_messages_are_committed_together_or_not_at_all(pair, engine):
    assert sell(pair, engine, 1).outcome is Outcome.COMMITTED
    assert found(pair, engine) == [[1]] * 3
    with pytest.raises(ValueError, match="a test says so"), spanning(*pair, db=engine) as span:
        span.db.exec_driver_sql("INSERT INTO sales VALUES (2)")
        span.on(pair[0]).send("sales", b"2")
        raise ValueError("a test says so")
    assert span.outcome is Outcome.ABORTED
    with pytest.raises(errors.TransactionAborted), spanning(*pair, db=engine) as span:
        span.db.exec_driver_sql("INSERT INTO sales VALUES (3)")
        span.on(pair[0]).send("sales", b"3")
        span.on(pair[0]).abort()
    with spanning(pair[0], db=engine) as span:
        span.db.exec_driver_sql("INSERT INTO sales VALUES (4)")
    assert found(pair, engine) == [[1, 4], [1], [1]]
    assert [each for bridge in pair for each in bridge.admin.transactions()] == []


def test_the_ids_of_the_parts_begin_with_their_owner_as_other_ids_do(pair, engine):
    with spanning(*pair, db=engine) as span:
        parts = [span.on(bridge).id for bridge in pair]
    for bridge, part in zip(pair, parts, strict=True):
        with bridge.transaction() as txn:
            assert part.rsplit("/", 2)[0] == txn.id.rsplit("/", 2)[0]


def test_an_exception_of_a_signal_handler_at_the_end_of_a_span_leaves_no_database_transaction_open(pair, engine):
    spans = list[txnbridge.Span]()

    def begin() -> None:
        wait_until(lambda: engine.pool.checkedout() == 0)
        spans.append(spanning(*pair, db=engine).__enter__())

    begin()
    assert interrupted_everywhere(lambda: spans[-1].__exit__(None, None, None), begin, ["_half/span.py"])


LOST = sa.exc.OperationalError("COMMIT", None, ConnectionError("the answer is lost"))


ITS_OWN = "SAVEPOINT txnbridge_guard"  # by which a span begins with its connection


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_of_the_database_ends_the_parts_as_the_database_did(pair, engine, fail_commits, committed):
    failed = fail_commits(LOST, ITS_OWN, happens=committed)
    if committed:
        assert sell(pair, engine, 1).outcome is Outcome.COMMITTED
    else:
        with pytest.raises(errors.TransactionAborted):
            sell(pair, engine, 1)
    assert failed and found(pair, engine) == [[1] * committed] * 3


def test_a_lost_answer_of_the_database_and_a_broker_that_is_away_make_an_unknown_outcome(
    pair, engine, monkeypatch, ends, fail_commits
):
    fail_commits(LOST, ITS_OWN, times=2)
    ends.by["abort"] = failing(errors.BrokerUnavailable("a test says so"))
    settled = [Decision.ABORT]
    replace_method(monkeypatch, BarrierTable, "settle", lambda *_: settled[-1])
    with pytest.raises(errors.OutcomeUnknown) as caught, spanning(*pair, db=engine) as span:
        span.on(pair[0]).send("sales", b"1")
    assert span.outcome is Outcome.UNKNOWN
    assert caught.value.token == str(span.token)
    settled.append(Decision.UNDECIDED)
    with pytest.raises(errors.OutcomeUnknown) as caught, spanning(*pair, db=engine):
        pass  # without a message there is no token
    assert caught.value.token is None


def test_a_session_of_asyncio_is_refused_because_no_resolver_could_use_its_engine(pair, tmp_path):
    aio = pytest.importorskip("sqlalchemy.ext.asyncio")
    pytest.importorskip("aiosqlite")

    def work(session: orm.Session) -> None:
        with pytest.raises(errors.NotSupported, match="asyncio"):
            spanning(*pair, db=session)

    async def sell_one() -> None:
        engine = aio.create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        async with aio.AsyncSession(engine) as session:
            await session.run_sync(work)
        await engine.dispose()

    asyncio.run(sell_one())


def waiting(pair: Pair) -> int:
    return sum(len(bridge.admin.transactions()) for bridge in pair)


def die(pair: Pair, engine: sa.Engine, at: str, left: int, hold: float | None = None) -> None:
    """Kill a process that sells one thing at this event, behind which it leaves so many prepared parts."""
    first, second = addresses(pair)
    shop = Shop(first, second, engine.url.render_as_string(hide_password=False), hold)
    with Child(sell_one, shop, kill=at) as dead:
        dead.stopped()
    assert waiting(pair) == left


def test_no_resolver_of_other_half_messages_ends_the_record_of_a_span(pair, engine, quick_sweep):
    """Decided by the row, or by a check, it would be published or dropped, and nobody would end the parts by it."""
    die(pair, engine, "database.commit/after", 2)
    group = f"spans-default-{spans_over(pair, least=1).clusters}"
    for bridge in pair:
        with pytest.raises(errors.InvalidOption, match="spans run"), bridge.resolver(group, db=engine) as resolver:
            wait_until(lambda: resolver.stats.committed)
        with pytest.raises(errors.InvalidOption, match="spans run"):
            bridge.resolver(group, check=lambda *_: Decision.ABORT)
        for decision in (Decision.COMMIT, Decision.ABORT):
            with pytest.raises(errors.InvalidOption, match="spans run"):
                bridge.admin.end_parked(f"{group}-db-01234567", "a record", decision)
    with spanning(*pair, db=engine):
        pass
    wait_until(lambda: waiting(pair) == 0)
    assert found(pair, engine) == [[0]] * 3


def test_the_doctor_names_the_resolver_of_spans_for_their_records(pair, monkeypatch):
    group = f"spans-default-{spans_over(pair, least=1).clusters}"
    told = f"txnbridge resolver run --group {group} --application default --database URL"
    advice = Advice("warning", "half messages", "no process of the group is open", told)
    other = replace(advice, remedy="txnbridge resolver run --group spans-of-mine --check MODULE:NAME")
    monkeypatch.setattr(EmbeddedAdmin, "check", lambda *_: [advice, other])
    first, second = pair[0].admin.doctor()
    assert "spans run" in first.remedy and "resolver run" not in first.remedy
    assert second == other


@pytest.mark.parametrize(
    ("at", "left", "sold"), [("prepare/after", 1, []), ("half.store/before", 2, []), ("database.commit/after", 2, [0])]
)
def test_a_sweep_ends_parts_of_a_dead_process_as_the_row_says(pair, engine, ends, quick_sweep, at, left, sold):
    ends.by["checks"] = no_checks  # no resolver is asked about a record
    die(pair, engine, at, left)
    with spanning(*pair, db=engine):
        pass
    wait_until(lambda: waiting(pair) == 0)
    assert found(pair, engine) == [sold] * 3


def test_a_decision_of_the_database_leaves_time_for_all_parts_as_that_of_a_part_does_for_the_others(pair, engine):
    die(pair, engine, "database.commit/after", 2, hold=0)
    time.sleep(2)  # the span's timeout is over
    with spanning(*pair, db=engine):
        pass
    wait_until(lambda: waiting(pair) == 0)
    assert found(pair, engine) == [[0]] * 3


def test_the_database_takes_no_commit_behind_the_time_of_the_span(pair, engine, monkeypatch):
    told = note_calls(monkeypatch, BarrierTable, "commit_row", lambda table, name, deadline_at: deadline_at)
    span = spanning(*pair, db=engine, timeout=20, hold=0)
    time.sleep(1)  # as for a connection of a busy pool
    with span:
        span.on(pair[0]).send("sales", b"1")
    (token,) = span.tokens
    assert token.expires_at is not None and token.expires_at - told[0] > 60_000 - 500


def test_a_sweep_leaves_parts_alone_whose_database_or_application_it_does_not_know(pair, engine, tmp_path, quick_sweep):
    die(pair, engine, "half.store/before", 2)
    other = sa.create_engine(f"sqlite:///{tmp_path}/other.db")
    strangers = [txnbridge.connect(url, application="other") for url in addresses(pair)]
    with strangers[0], strangers[1]:
        for bridges, db in ((pair, other), (pair, None), (strangers, engine)):
            with spanning(*bridges, db=db):
                pass
        time.sleep(2)
        assert waiting(pair) == 2
        with spanning(*pair, db=engine):
            pass
        wait_until(lambda: waiting(pair) == 0)
    other.dispose()


def test_a_sweep_with_a_clock_that_is_ahead_aborts_and_the_late_commit_fails(
    pair, engine, monkeypatch, quick_sweep, with_timing
):
    def come_late(*_: object) -> None:
        with_timing(sweep_margin=-3600.0)
        wait_until(lambda: waiting(pair) == 0)

    on_call(monkeypatch, BarrierTable, "commit_row", come_late)
    with pytest.raises(errors.TransactionAborted), spanning(*pair, db=engine) as span:
        for bridge in pair:
            span.on(bridge).send("sales", b"1")
    assert span.outcome is Outcome.ABORTED
    assert found(pair, engine) == [[]] * 3


def test_a_sweep_waits_for_a_row_that_a_paused_process_has_locked(pair, engine, fail_commits, quick_sweep, with_timing):
    paused: list[sa.Connection] = []

    def pause(connection: sa.Connection) -> None:
        if not paused:
            paused.append(connection)
            with_timing(sweep_margin=-3600.0)
            time.sleep(3)
            assert waiting(pair) == 2

    fail_commits(LOST, ITS_OWN, when=pause)
    assert sell(pair, engine, 1).outcome is Outcome.COMMITTED and paused
    assert found(pair, engine) == [[1]] * 3


def test_a_resolver_that_was_paused_until_all_was_done_reports_no_torn_span(pair, engine, monkeypatch, ends, caplog):
    seen: list[Half] = []

    def note(number: int, put: Callable[[], Half]) -> Half:
        seen.append(put())
        return seen[0]

    ends.by["put"] = note
    decide = SpanResolver._decide
    decided = answer_calls(monkeypatch, SpanResolver, "_decide", Decision.UNDECIDED)
    ends.by["checks"] = lambda *_: [*seen, *no_checks()][:1]
    with caplog.at_level("ERROR", "txnbridge"):
        sell(pair, engine, 1)
        wait_until(lambda: decided)
        assert found(pair, engine) == [[1]] * 3
        kept: sa.Select[Any] = sa.select(sa.column("decision")).select_from(sa.table("txnbridge_barrier"))
        wait_until(lambda: scalars(str(engine.url), kept) == [])
        assert decide(decided[0][0], replace(seen[0], deadline_at=0)) is Decision.ABORT
    assert caplog.text == ""


@pytest.mark.parametrize("new_database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.live)], indirect=True)
def test_everything_is_sold_once_wherever_its_process_dies(tmp_path, new_database, kill_walk: KillWalk):
    numbers = count()

    def fresh() -> Shop:
        name, database = f"{tmp_path}/{next(numbers)}", new_database()
        engine = sa.create_engine(database)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE sales (number INTEGER)")
        engine.dispose()
        return Shop(f"embedded:{name}-a.db", f"embedded:{name}-b.db", database)

    def check(shop: Shop) -> None:
        engine = sa.create_engine(shop.database)
        with txnbridge.connect(shop.first) as a, txnbridge.connect(shop.second) as b:
            wait_until(lambda: found((a, b), engine) == [[0, 1]] * 3)
        engine.dispose()

    steps = ("prepare", "half.store", "database.barrier", "database.commit", "resolve", "half.end")
    kill_walk(sell_all, check, fresh, {f"{step}/{phase}" for step in steps for phase in ("before", "after")})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # 3.12 warns of forks in threaded programs
def test_a_child_of_a_fork_rolls_nothing_of_its_parent_back(pair, engine, caplog):
    def check() -> None:
        spans.pop().__exit__(ValueError, ValueError(), None)
        gc.collect()

    spans = [spanning(*pair, db=engine)]
    spans[0].__enter__().db.exec_driver_sql("INSERT INTO sales VALUES (1)")
    for bridge in pair:
        spans[0].on(bridge).send("sales", b"1")
    assert in_child(check) == 0
    spans[0].__exit__(None, None, None)
    assert (found(pair, engine), caplog.text) == ([[1]] * 3, "")
