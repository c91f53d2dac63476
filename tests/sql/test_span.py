"""A span with a database: rows and all brokers' messages, or nothing, wherever its process dies."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

import txnbridge
from tests.in_time import wait_until
from tests.kill_walk import KillWalk
from tests.sql.span_programs import Shop, rows, sell_all
from txnbridge import (
    Bridge,
    BrokerUnavailable,
    Decision,
    NotSupported,
    Outcome,
    OutcomeUnknown,
    TransactionAborted,
    spanning,
)
from txnbridge.sql.barrier import BarrierTable

Pair = tuple[Bridge, Bridge]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with txnbridge.connect(f"embedded:{tmp_path}/a.db") as a, txnbridge.connect(f"embedded:{tmp_path}/b.db") as b:
        yield a, b


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
    with pytest.raises(TransactionAborted), spanning(*pair, db=engine) as span:
        span.db.exec_driver_sql("INSERT INTO sales VALUES (3)")
        span.on(pair[0]).send("sales", b"3")
        span.on(pair[0]).abort()
    with spanning(pair[0], db=engine) as span:
        span.db.exec_driver_sql("INSERT INTO sales VALUES (4)")
    assert found(pair, engine) == [[1, 4], [1], [1]]
    assert [each for bridge in pair for each in bridge.admin.transactions()] == []


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_of_the_database_ends_the_parts_as_the_database_did(pair, engine, monkeypatch, committed):
    commit = sa.Connection.commit

    def lose(self: sa.Connection) -> None:
        monkeypatch.undo()
        if committed:
            commit(self)
        raise sa.exc.OperationalError("COMMIT", None, ConnectionError("the answer is lost"))

    before = BarrierTable.commit_row

    def arm(self: BarrierTable, transaction: str, deadline_at: int) -> sa.Insert:
        monkeypatch.setattr(sa.Connection, "commit", lose)
        return before(self, transaction, deadline_at)

    monkeypatch.setattr(BarrierTable, "commit_row", arm)
    if committed:
        assert sell(pair, engine, 1).outcome is Outcome.COMMITTED
    else:
        with pytest.raises(TransactionAborted):
            sell(pair, engine, 1)
    assert found(pair, engine) == [[1] * committed] * 3


def test_a_lost_answer_of_the_database_and_a_broker_that_is_away_make_an_unknown_outcome(pair, engine, monkeypatch):
    def lose(self: sa.Connection) -> None:
        raise sa.exc.OperationalError("COMMIT", None, ConnectionError("the answer is lost"))

    def away(*_: object) -> Outcome:
        raise BrokerUnavailable("a test says so")

    before = BarrierTable.commit_row

    def arm(self: BarrierTable, transaction: str, deadline_at: int) -> sa.Insert:
        monkeypatch.setattr(sa.Connection, "commit", lose)
        return before(self, transaction, deadline_at)

    def settle(*_: object) -> Decision:
        monkeypatch.undo()
        monkeypatch.setattr(Bridge, "abort", away)
        return Decision.ABORT

    monkeypatch.setattr(BarrierTable, "commit_row", arm)
    monkeypatch.setattr(BarrierTable, "settle", settle)
    with pytest.raises(OutcomeUnknown), spanning(*pair, db=engine) as span:
        span.on(pair[0]).send("sales", b"1")
    assert span.outcome is Outcome.UNKNOWN


def test_a_session_of_asyncio_is_refused_because_no_resolver_could_use_its_engine(pair, tmp_path):
    aio = pytest.importorskip("sqlalchemy.ext.asyncio")
    pytest.importorskip("aiosqlite")

    def work(session: orm.Session) -> None:
        with pytest.raises(NotSupported, match="asyncio"):
            spanning(*pair, db=session)

    async def sell_one() -> None:
        engine = aio.create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        async with aio.AsyncSession(engine) as session:
            await session.run_sync(work)
        await engine.dispose()

    asyncio.run(sell_one())


def test_everything_is_sold_once_wherever_its_process_dies(tmp_path, kill_walk: KillWalk):
    numbers = count()

    def fresh() -> Shop:
        name = f"{tmp_path}/{next(numbers)}"
        engine = sa.create_engine(f"sqlite:///{name}.db")
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE sales (number INTEGER)")
        engine.dispose()
        return Shop(f"embedded:{name}-a.db", f"embedded:{name}-b.db", f"sqlite:///{name}.db")

    def check(shop: Shop) -> None:
        engine = sa.create_engine(shop.database)
        with txnbridge.connect(shop.first) as a, txnbridge.connect(shop.second) as b:
            wait_until(lambda: found((a, b), engine) == [[0, 1]] * 3)
        engine.dispose()

    steps = ("prepare", "half.store", "database.barrier", "database.commit", "resolve", "half.end")
    kill_walk(sell_all, check, fresh, {f"{step}/{phase}" for step in steps for phase in ("before", "after")})
