"""Transactions with `db=`: rows and messages are both there or neither, whatever dies, is paused or fails."""

import asyncio
import itertools
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as aio
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.conformance.broken import around
from tests.core import half_topic_backend
from tests.core.processor_kit import numbers, values
from tests.failing import fail_call, raising, replace_method
from tests.inside import broker_of, connection_of
from tests.interrupts import interrupted_everywhere
from tests.sql.outbox_programs import Shop, scalars
from tests.sql.test_database_chaos import started
from txnbridge import Abort, BrokerUnavailable, Decision, InvalidOption, InvalidState, Outcome, OutcomeUnknown, plugins
from txnbridge._base.deadline import Wake
from txnbridge.errors import NotFound, NotSupported, TransactionAborted, TransactionTimedOut, TxnBridgeError
from txnbridge.spi import Deadline
from txnbridge.sql import _database
from txnbridge.sql._database import Database
from txnbridge.sql.barrier import BarrierResolver, BarrierTable
from txnbridge.testing import Child, crash_everywhere, listening

SOON = 60
# The time of a transaction whose process dies or is paused; then a resolver may abort it.
SHORT = 2.0
DAY_MS = 86_400_000
ROWS = sa.Table("done", sa.MetaData(), sa.Column("value", sa.String(40), primary_key=True))
BARRIER = sa.table("txnbridge_barrier", *map(sa.column, ("group", "transaction", "decision", "ended_at")))


ON_POSTGRESQL = pytest.mark.parametrize(
    "new_database", [pytest.param("postgresql", marks=pytest.mark.live)], indirect=True
)


def insert(value: bytes) -> sa.Insert:
    return ROWS.insert().values(value=value.decode())


def sell(bridge, db, value, *, timeout=SOON):
    with bridge.transaction(db=db, group="shop", timeout=timeout) as txn:
        txn.db.execute(insert(value))
        txn.send("orders", value, key="k")
        txn.send("audit", value)
    return txn


def sell_one(shop: Shop) -> None:
    """Sell once, as a program does that begins again after its death."""
    engine = sa.create_engine(shop.database)
    with txnbridge.connect(shop.url) as bridge:
        while sold(shop.database) == []:
            with suppress(TransactionAborted):  # the machine may be too busy for the timeout
                sell(bridge, engine, b"0", timeout=SHORT)


def try_to_sell(shop: Shop, writes: bool) -> tuple[str, Outcome | None]:
    engine = sa.create_engine(shop.database)
    with txnbridge.connect(shop.url) as bridge:
        txn = bridge.transaction(db=engine, group="shop", timeout=SHORT)
        try:
            with txn:
                if writes:
                    txn.db.execute(insert(b"0"))
                txn.send("orders", b"0")
                txn.send("audit", b"0")
        except TxnBridgeError as error:
            return type(error).__name__, txn.outcome
    return "", txn.outcome


def sold(database):
    return sorted(value.encode() for value in scalars(database, sa.select(ROWS.c.value)))


def barrier_rows(database):
    return scalars(database, sa.select(BARRIER.c.decision))


def waiting(bridge):
    """Return how many transactions are stored at the embedded broker and have not ended."""
    broker = broker_of(bridge)
    with broker.session(Deadline(SOON)) as connection, broker.store.reading(connection, Deadline(SOON)):
        return connection.execute("SELECT count(*) FROM halves WHERE ended_at IS NULL").fetchone()[0]


def one_for_one(shop, bridge):
    """Let a resolver end what is left, and return the messages, which have to be those of the rows."""
    if waiting(bridge):
        with bridge.resolver("shop", db=shop.database):
            eventually(lambda: waiting(bridge) == 0, "half messages wait")
    found = sold(shop.database)
    assert sorted(values(bridge, "orders")) == sorted(values(bridge, "audit")) == found
    return found


@pytest.fixture(autouse=True)
def quick_stop(with_timing):
    """Let resolvers of this process stop at once."""
    with_timing(check_wait=0.1)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.live)])
def new_database(request, tmp_path):
    """Make a database of the test's own, of a kind that `db=` takes, and return its URL."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").new_database
    numbers = itertools.count()
    return lambda: f"sqlite:///{tmp_path / f'database{next(numbers)}.db'}"


@pytest.fixture
def fresh(new_database, tmp_path):
    """Make a broker with topics, and a database with a table."""
    brokers = itertools.count()

    def make():
        address = f"embedded:{tmp_path / f'broker{next(brokers)}.db'}?half_check_seconds=0.2&half_checks=1000"
        database = new_database()
        with txnbridge.connect(address) as bridge:
            bridge.ensure_topics("orders", "audit")
        ROWS.create(sa.create_engine(database, poolclass=sa.NullPool))
        return Shop(address, database)

    return make


@pytest.fixture
def engine(shop, open_engine):
    return open_engine(shop.database)


@pytest.fixture
def barrier(engine):
    return BarrierTable.open(engine, "shop", Deadline(SOON))


@pytest.mark.parametrize("form", ["engine", "session", "sessionmaker", "scoped_session"])
def test_rows_and_messages_are_committed_together(shop, engine, bridge, form):
    maker = orm.sessionmaker(engine)
    db = {"engine": engine, "session": maker(), "sessionmaker": maker, "scoped_session": orm.scoped_session(maker)}[
        form
    ]
    for value in numbers(2):
        with bridge.transaction(db=db, group="shop") as txn:
            with txn.db.begin_nested() as savepoint:
                txn.db.execute(insert(b"undone"))
                savepoint.rollback()
            txn.db.execute(insert(value))
            txn.send("orders", value, key="k", headers={"h": "1"})
            txn.send_many("audit", [value])
            assert values(bridge, "orders") == numbers(int(value))
        assert txn.outcome is Outcome.COMMITTED
        with pytest.raises(InvalidState):
            _ = txn.db
    assert one_for_one(shop, bridge) == numbers(2)
    message = bridge.read("orders", 1)[0]
    assert (message.key, message.headers["h"]) == (b"k", "1")
    eventually(lambda: barrier_rows(shop.database) == [], "the rows are deleted")
    if form != "engine":
        with maker() as session, session.begin():
            session.execute(insert(b"later"))  # the engine and its sessions are free again
    if form == "session":
        assert not db.in_transaction()
        db.execute(insert(b"last"))
        db.commit()


@pytest.mark.parametrize("error", [Abort, ZeroDivisionError, sa.exc.IntegrityError, NotFound])
def test_an_error_in_the_block_or_at_the_broker_rolls_both_back(shop, engine, bridge, error):
    sell(bridge, engine, b"0")
    session = orm.Session(engine)
    raised = None
    try:
        with bridge.transaction(db=session, group="shop") as txn:
            with session.begin_nested():  # a savepoint of its own commits nothing
                session.execute(insert(b"1"))
            txn.send("orders", b"1", partition=7 if error is NotFound else None)
            if error is sa.exc.IntegrityError:
                session.execute(insert(b"0"))
            elif error is not NotFound:
                raise error
    except Exception as given:
        raised = type(given)
    assert (raised, txn.outcome) == (None if error is Abort else error, Outcome.ABORTED)
    assert not session.in_transaction()
    assert one_for_one(shop, bridge) == [b"0"]


def test_a_transaction_without_messages_is_one_of_the_database(shop, engine, bridge):
    with bridge.transaction(db=engine) as txn:
        txn.db.execute(insert(b"0"))
    assert (txn.outcome, sold(shop.database)) == (Outcome.COMMITTED, [b"0"])


def swallowed_commit(db):
    with pytest.raises(InvalidState):
        db.commit()


def second_transaction(db):
    db.rollback()
    db.execute(insert(b"2"))
    db.commit()


@pytest.mark.parametrize("form", ["engine", "session"])
def test_a_block_that_ends_or_splits_its_database_transaction_does_nothing(shop, engine, bridge, form):
    db = engine if form == "engine" else orm.Session(engine)
    commit, roll_back, open_savepoint = map(methodcaller, ("commit", "rollback", "begin_nested"))
    for misuse in (commit, swallowed_commit, roll_back, second_transaction, open_savepoint):
        with pytest.raises(InvalidState, match="rolled back"), bridge.transaction(db=db, group="shop") as txn:
            txn.db.execute(insert(b"1"))
            txn.send("orders", b"1")
            misuse(txn.db)
        assert txn.outcome is Outcome.ABORTED
        assert form == "engine" or not db.in_transaction()
        assert one_for_one(shop, bridge) == []
    sell(bridge, db, b"1")
    assert one_for_one(shop, bridge) == [b"1"]


def end_by_text(db):
    db.execute(sa.text("ROLLBACK"))
    db.execute(insert(b"2"))


def end_by_conflict(db):
    with suppress(sa.exc.IntegrityError):
        db.execute(sa.text("INSERT OR ROLLBACK INTO done VALUES ('1')"))
    db.execute(insert(b"2"))


def end_by_trigger(db):
    with suppress(sa.exc.IntegrityError):
        db.execute(insert(b"end"))


@pytest.mark.parametrize("form", ["engine", "session"])
@pytest.mark.parametrize("end", [end_by_text, end_by_conflict, end_by_trigger])
def test_a_statement_that_ends_the_transaction_behind_sqlalchemy_publishes_nothing(shop, engine, bridge, form, end):
    if engine.dialect.name != "sqlite" and end is not end_by_text:
        pytest.skip("only SQLite's statements do so")
    if end is end_by_trigger:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE INSERT ON done WHEN NEW.value = 'end'"
                " BEGIN SELECT RAISE(ROLLBACK, 'no'); END"
            )
    db = engine if form == "engine" else orm.Session(engine)
    with pytest.raises(InvalidState, match="has ended the database transaction"):
        with bridge.transaction(db=db, group="shop") as txn:
            txn.db.execute(insert(b"1"))
            txn.send("orders", b"1")
            end(txn.db)
    assert txn.outcome is Outcome.ABORTED
    assert one_for_one(shop, bridge) == []
    sell(bridge, db, b"1")
    assert one_for_one(shop, bridge) == [b"1"]


def test_a_session_does_not_write_to_a_second_database_in_the_block(shop, engine, bridge, open_engine, fresh):
    other = open_engine(fresh().database)
    session = orm.Session(engine)
    with pytest.raises(InvalidState, match="second"), bridge.transaction(db=session) as txn:
        txn.send("orders", b"1")
        session.execute(insert(b"1"), bind_arguments={"bind": other})
    assert sold(other.url.render_as_string(hide_password=False)) == one_for_one(shop, bridge) == []


class Held:
    """Another thread's work for this thread, held at a statement; until it goes on, waits for it are interrupted."""

    def __init__(self, begin_of_statement, times):
        self.begin_of_statement, self.left, self.caller = begin_of_statement, times, threading.get_ident()
        self.begins, self.goes_on, self.ended = threading.Event(), threading.Event(), threading.Event()

    def hold(self, *context):
        if context[2].startswith(self.begin_of_statement) and not self.begins.is_set():
            self.begins.set()
            assert self.goes_on.wait(SOON)

    def work(self, work):
        try:
            return work()
        finally:
            if self.begins.is_set():
                self.ended.set()

    def wait(self, wait, seconds):
        if self.begins.is_set() and threading.get_ident() == self.caller:
            self.left -= 1
            if self.left >= 0:
                raise KeyboardInterrupt
            self.goes_on.set()
        wait(seconds)

    def go_on(self):
        self.goes_on.set()
        assert self.ended.wait(SOON)


@pytest.fixture
def interrupted(engine, monkeypatch):
    """Make a block in which this thread is interrupted so many times as it waits for a statement of another thread."""
    run = Database.run

    @contextmanager
    def interrupted(begin_of_statement, times):
        held = Held(begin_of_statement, times)
        sa.event.listen(engine, "before_cursor_execute", held.hold)

        class Interrupted(Wake):
            def wait(self, seconds):
                held.wait(super().wait, seconds)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Database, "run", lambda db, what, work, *rest: run(db, what, partial(held.work, work), *rest))
            patch.setattr(_database, "Wake", Interrupted)
            yield held.go_on

    return interrupted


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_the_block_begins_leaves_no_database_transaction_open(engine, bridge, interrupted, times):
    txn = bridge.transaction(db=engine, group="shop")
    with interrupted("SAVEPOINT", times) as go_on, txn:
        pass
    go_on()
    eventually(lambda: engine.pool.checkedout() == 0, "a connection is in use")


@pytest.mark.parametrize("times", [1, 2])
def test_a_session_may_be_in_another_transaction_after_an_interrupted_begin(shop, engine, bridge, interrupted, times):
    session = orm.Session(engine)
    txn = bridge.transaction(db=session, group="shop")
    with interrupted("SAVEPOINT", times) as go_on, txn:
        pass
    session.rollback()
    session.execute(insert(b"1"))
    go_on()
    session.commit()
    assert sold(shop.database) == [b"1"]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("act", [orm.Session.close, orm.Session.commit])
def test_rows_and_messages_agree_whatever_the_program_does_with_its_session_after_an_interrupt(
    shop, engine, bridge, interrupted, act, times
):
    session = orm.Session(engine)
    txn = bridge.transaction(db=session, group="shop", timeout=5)
    with interrupted("INSERT INTO txnbridge_barrier", times) as go_on, txn:
        session.execute(insert(b"0"))
        txn.send("orders", b"0")
        txn.send("audit", b"0")
    assert times == 2 or not session.in_transaction()
    with suppress(InvalidState):
        act(session)
    go_on()
    session.close()
    for value in numbers(3)[1:]:
        sell(bridge, engine, value)
    assert one_for_one(shop, bridge) == numbers(3)[1:]


def test_a_session_begins_no_second_transaction_behind_the_deadline_of_a_block_that_has_not_ended(shop, engine, bridge):
    session = orm.Session(engine)
    with (
        pytest.raises(InvalidState, match="rolled back"),
        bridge.transaction(db=session, group="shop", timeout=SHORT) as txn,
    ):
        txn.send("orders", b"2")
        time.sleep(txn.deadline)
        with pytest.raises(InvalidState, match="another session"):  # as in a loop that tries again after any error
            second_transaction(session)
        second_transaction(session)
    assert one_for_one(shop, bridge) == []
    second_transaction(session)
    assert sold(shop.database) == [b"2"]


def test_an_interrupt_before_the_commit_leaves_no_database_transaction_open(shop, engine, bridge, monkeypatch):
    is_commit = lambda database, what, *_: what.startswith("the commit")  # noqa: E731
    fail_call(monkeypatch, Database, "run", KeyboardInterrupt, when=is_commit)
    with pytest.raises(KeyboardInterrupt):
        sell(bridge, engine, b"0", timeout=SHORT)
    eventually(lambda: engine.pool.checkedout() == 0, "a connection is in use")
    sell(bridge, engine, b"1")
    assert one_for_one(shop, bridge) == [b"1"]


def in_transaction(connection):
    session = orm.Session(connection.engine)
    session.execute(insert(b"1"))
    return session


def in_savepoint(connection):
    session = in_transaction(connection)
    session.begin_nested()
    return session


def test_a_block_whose_commit_gets_no_thread_leaves_nothing_to_commit(shop, engine, bridge, no_threads, monkeypatch):
    with orm.Session(engine) as session:
        with pytest.raises(TransactionAborted), bridge.transaction(db=session, group="shop") as txn:
            txn.db.execute(insert(b"1"))
            txn.send("orders", b"1")
            monkeypatch.setattr(_database.DatabaseThread, "idle", deque())
            refused = no_threads(when=lambda thread: thread.name == "txnbridge-sql")
        session.commit()
    assert refused and sold(shop.database) == values(bridge, "orders") == []


def test_a_resolver_whose_thread_could_not_be_started_is_started_by_the_next_transaction(engine, bridge, no_threads):
    no_threads(0, when=lambda thread: thread.name.startswith("txnbridge resolver"))
    with pytest.raises(RuntimeError):
        sell(bridge, engine, b"1")
    sell(bridge, engine, b"1")
    eventually(lambda: connection_of(bridge).services, "no resolver runs")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (in_transaction, InvalidState, "in no transaction"),
        (in_savepoint, InvalidState, "in no transaction"),
        (lambda c: c.engine.execution_options(isolation_level="AUTOCOMMIT"), InvalidOption, "AUTOCOMMIT"),
        (lambda c: orm.Session(c.engine, twophase=True), InvalidOption, "twophase"),
        (orm.Session, InvalidOption, "not on a Connection"),
        (lambda _: orm.Session(), InvalidOption, "one database"),
        (lambda c: c, InvalidOption, "not Connection"),
        (lambda _: sa.create_engine("sqlite://"), InvalidOption, "outlives"),
    ],
)
def test_a_session_that_no_commit_of_ours_would_end_is_refused(engine, bridge, make, error, match):
    with engine.connect() as connection, pytest.raises(error, match=match), bridge.transaction(db=make(connection)):
        raise AssertionError("the block runs")


def test_settings_that_do_not_go_together_are_refused(engine, bridge):
    for settings in ({"prepare": True}, {"hold": 1}, {"fingerprint": True}):
        with pytest.raises(InvalidOption, match="db="):
            bridge.transaction(db=engine, **settings)
    with pytest.raises(InvalidOption, match="group="):
        bridge.transaction(group="shop")
    with pytest.raises(InvalidOption, match="either"):
        bridge.resolver("shop")
    with pytest.raises(NotSupported, match="processor"), bridge.transaction(db=engine) as txn:
        txn.ack([])


async def in_async_session(shop, work, note=lambda *_: None):
    """Call `work` with a session of an asynchronous engine, each of whose statements `note` is told of."""
    pytest.importorskip("aiosqlite")
    engine = aio.create_async_engine(shop.database.replace("sqlite:", "sqlite+aiosqlite:"))
    sa.event.listen(engine.sync_engine, "before_cursor_execute", note)
    async with aio.AsyncSession(engine) as session:
        await session.run_sync(work)
    await engine.dispose()


def test_a_session_of_asyncio_works_inside_run_sync_and_an_engine_beside_it_has_a_resolver(shop, engine, bridge):
    def work(session):
        sell(bridge, session, b"0")
        with pytest.raises(InvalidState), bridge.transaction(db=session, group="shop"):
            session.execute(insert(b"1"))
            session.commit()

    asyncio.run(in_async_session(shop, work))
    assert one_for_one(shop, bridge) == [b"0"]
    assert barrier_rows(shop.database) == []
    sell(bridge, engine, b"1")
    assert one_for_one(shop, bridge) == [b"0", b"1"]
    eventually(lambda: barrier_rows(shop.database) == [], "no resolver deletes the row")


def test_a_session_of_another_event_loop_deletes_its_row_by_its_own_engine(shop, bridge):
    used = []
    for value in numbers(2):
        work = lambda session: sell(bridge, session, value)  # noqa: B023, E731
        asyncio.run(in_async_session(shop, work, lambda *_: used.append(value)))  # noqa: B023
    assert used == sorted(used)
    assert barrier_rows(shop.database) == []


STEPS = [
    f"{step}/{phase}"
    for step in ("half.store", "database.barrier", "database.commit", "half.end")
    for phase in ("before", "after")
]


def test_rows_and_messages_agree_where_their_process_dies(fresh):
    def die(where):
        shop = fresh()
        with Child(try_to_sell, shop, True, kill=where) as child:
            child.stopped(SOON)
        with txnbridge.connect(shop.url) as bridge:
            return one_for_one(shop, bridge) == [b"0"]

    with ThreadPoolExecutor(len(STEPS)) as threads:
        committed = [where for where, happened in zip(STEPS, threads.map(die, STEPS), strict=True) if happened]
    assert committed == ["database.commit/after", "half.end/before", "half.end/after"]


@pytest.mark.live
@pytest.mark.timeout(400)
def test_rows_and_messages_agree_wherever_their_process_dies_and_begins_again(fresh):
    def check(shop):
        with txnbridge.connect(shop.url) as bridge:
            assert one_for_one(shop, bridge) == [b"0"]

    died_at = {point.event for point in crash_everywhere(sell_one, check, fresh=fresh, at_once=4)}
    assert set(STEPS) <= died_at


@pytest.mark.parametrize("writes", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_process_that_sleeps_beyond_its_deadline_commits_nothing(shop, bridge, writes):
    with Child(try_to_sell, shop, writes, pause="half.store/after") as zombie:
        zombie.stopped(SOON)
        with bridge.resolver("shop", db=shop.database) as resolver:
            locks = writes and shop.database.startswith("sqlite")  # SQLite's one write lock is the zombie's
            eventually(lambda: resolver.stats.checks if locks else resolver.stats.aborted, "a resolver answers")
            assert barrier_rows(shop.database) == ([] if locks else ["abort"])
            zombie.resume()
            assert zombie.result(SOON) in {
                ("TransactionTimedOut", Outcome.ABORTED),
                ("TransactionAborted", Outcome.ABORTED),
            }
    assert one_for_one(shop, bridge) == []


@pytest.mark.parametrize("wakes", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_resolver_answers_nothing_while_the_row_is_not_committed(shop, bridge, wakes):
    with Child(try_to_sell, shop, True, pause="database.commit/before") as zombie:
        zombie.stopped(SOON)
        with bridge.resolver("shop", db=shop.database) as resolver:
            eventually(lambda: resolver.stats.checks > 0, "a resolver answers")
            assert waiting(bridge) == 1
            assert (resolver.stats.committed, resolver.stats.aborted, resolver.stats.failed) == (0, 0, 0)
            if wakes:
                zombie.resume()
                told, outcome = zombie.result(SOON)
            else:
                zombie.kill()
    committed = sold(shop.database) == [b"0"]
    if wakes:
        assert outcome is (Outcome.COMMITTED if committed else Outcome.ABORTED), told
    with bridge.resolver("shop", db=shop.database):
        eventually(lambda: waiting(bridge) == 0, "half messages wait")
    assert sold(shop.database) == values(bridge, "orders") == ([b"0"] if committed else [])


def test_the_database_refuses_the_row_of_a_machine_that_slept_beyond_the_deadline(shop, engine, bridge):
    with pytest.raises(TransactionTimedOut), bridge.transaction(db=engine, group="shop", timeout=0.3) as txn:
        txn.db.execute(insert(b"0"))
        txn.send("orders", b"0")
        for service in list[Any](connection_of(bridge).services):
            service.close()  # no resolver aborts it
        txn._deadline.at += SOON  # the clock that does not go on while a machine is suspended
        time.sleep(0.4)
    assert txn.outcome is Outcome.ABORTED
    assert barrier_rows(shop.database) == one_for_one(shop, bridge) == []


def test_a_transaction_that_takes_long_is_asked_about_and_not_aborted(shop, engine, with_timing):
    with_timing(first_check=0.1)
    asked = threading.Event()

    def wait(event):
        if (event.name, event.phase) == ("half.check", "after"):
            asked.set()
        elif (event.name, event.phase) == ("half.store", "after"):
            asked.wait(SOON)

    with listening(wait), txnbridge.connect(shop.url) as bridge:
        with bridge.transaction(db=engine, group="shop", timeout=SOON) as txn:
            txn.send("orders", b"0")  # it locks no row
        assert asked.is_set()
        assert (txn.outcome, values(bridge, "orders")) == (Outcome.COMMITTED, [b"0"])


def test_two_resolvers_give_the_same_answer(barrier):
    past = int(time.time() * 1000)
    with ThreadPoolExecutor(4) as threads:
        for number in range(10):
            id = f"txn {number}"
            won = list(threads.map(lambda _: barrier.insert_abort(id, past, Deadline(SOON)), range(4)))  # noqa: B023
            assert sorted(won) == [False, False, False, True]
            assert barrier.check(id, []) is Decision.ABORT


def test_a_row_that_is_locked_is_waited_for_only_briefly(engine, barrier):
    future = int(time.time() * 1000) + DAY_MS
    with engine.connect() as writer:
        assert writer.execute(barrier.commit_row("1", future)).connection is writer
        began = time.monotonic()
        assert barrier.insert_abort("1", future, Deadline(SOON)) is False
        assert time.monotonic() - began < 4
        assert barrier.check("1", []) is Decision.UNDECIDED
        writer.commit()
    assert barrier.insert_abort("1", future, Deadline(SOON)) is False
    assert barrier.check("1", []) is Decision.COMMIT
    with engine.connect() as connection, pytest.raises(sa.exc.IntegrityError):
        assert barrier.insert_abort("2", future, Deadline(SOON))
        connection.execute(barrier.commit_row("2", future))


def test_a_bridge_publishes_what_another_process_has_left_and_no_other_database_is_asked(shop, engine, bridge, fresh):
    other = fresh().database
    with Child(try_to_sell, shop, True, kill="database.commit/after") as child:
        child.stopped(SOON)
    with bridge.resolver("shop", db=other) as wrong:
        time.sleep(SHORT + 1)
        with bridge.transaction(db=engine, group="shop"):
            pass  # the bridge runs a resolver from now on
        eventually(lambda: values(bridge, "orders") == [b"0"], "it is published")
        eventually(lambda: barrier_rows(shop.database) == [], "the row is deleted")
    assert wrong.stats.checks == 0 and barrier_rows(other) == []


def test_a_row_stays_until_its_messages_are_published(shop, engine, bridge, broken_broker):
    away = broken_broker(Halving=around(end=raising(BrokerUnavailable("it is away"))))
    with txnbridge.connect(shop.url.replace("embedded", away), timeout=3) as other:
        assert sell(other, engine, b"0", timeout=SHORT).outcome is Outcome.COMMITTED
        time.sleep(1.2)  # longer than a resolver takes to delete rows
        assert barrier_rows(shop.database) == ["commit"]
    with bridge.transaction(db=engine, group="shop"):
        pass  # the bridge runs a resolver from now on
    eventually(lambda: barrier_rows(shop.database) == [], "the row is deleted")
    assert one_for_one(shop, bridge) == [b"0"]


def test_an_exception_of_a_signal_handler_keeps_no_later_rows_from_being_deleted(shop, engine, bridge):
    with bridge.transaction(db=engine, group="shop") as txn:
        txn.send("orders", b"0")
    resolver: Any = next(iter(connection_of(bridge).services))
    resolver.close()  # from now on each call that forgets a transaction deletes its row

    def sell_one():
        with engine.begin() as connection:
            connection.execute(resolver.barrier.commit_row("1", DAY_MS * 100_000))
        resolver.forget("1")

    def look():
        resolver.forget("1")
        assert barrier_rows(shop.database) == []

    assert interrupted_everywhere(sell_one, look, ["barrier.py", "/deadline.py"])


def test_an_abort_row_stays_a_day_longer_than_the_deadline(engine, barrier):
    now = int(time.time() * 1000)
    for id, deadline_at in (("past", now - 2 * DAY_MS), ("future", now + 2 * DAY_MS)):
        assert barrier.insert_abort(id, deadline_at, Deadline(SOON))
    with engine.begin() as connection:
        connection.execute(barrier.commit_row("commit", now + DAY_MS))

    def left(age_ms):
        with engine.begin() as connection:
            connection.execute(sa.update(BARRIER).values(ended_at=BARRIER.c.ended_at - age_ms))
        barrier.delete_commits(["past", "future"], Deadline(SOON))
        barrier.delete_old_aborts(Deadline(SOON))
        with engine.connect() as connection:
            return sorted(connection.scalars(sa.select(BARRIER.c.transaction)))

    assert left(DAY_MS - 60_000) == ["commit", "future", "past"]  # counted from the insert, if that is later
    assert left(120_000) == ["commit", "future"]
    assert left(2 * DAY_MS) == ["commit"]


LOST = sa.exc.OperationalError("COMMIT", {}, ConnectionError("lost"))


@pytest.mark.parametrize("committed", ["yes", "no", "later"])
def test_a_lost_answer_to_the_commit_is_found_by_the_row(shop, engine, bridge, fail_commits, committed):
    armed: list[sa.Connection] = []

    def arms(connection):  # a resolver commits as well
        if connection in armed and committed == "later":
            time.sleep(SHORT + 0.5)
        return connection in armed

    fail_commits(LOST, happens=committed != "no", when=arms)
    with suppress(TransactionAborted, OutcomeUnknown):
        with bridge.transaction(db=engine, group="shop", timeout=SHORT if committed == "later" else SOON) as txn:
            txn.db.execute(insert(b"0"))
            txn.send("orders", b"0")
            txn.send("audit", b"0")
            armed.append(txn.db)
        assert committed != "no"
    told = {"yes": "committed", "no": "aborted", "later": "unknown committed aborted"}  # aborted by a slow machine
    assert txn.outcome.value in told[committed].split()
    assert one_for_one(shop, bridge) == ([] if txn.outcome is Outcome.ABORTED else [b"0"])


def test_an_error_of_a_hook_after_the_commit_is_logged_and_leaves_the_session_free(shop, engine, bridge, caplog):
    session = orm.Session(engine)
    sa.event.listen(session, "after_commit", raising(ZeroDivisionError), once=True)
    assert sell(bridge, session, b"0").outcome is Outcome.COMMITTED
    assert "is committed, in spite of ZeroDivisionError" in caplog.text
    sell(bridge, session, b"1")
    assert one_for_one(shop, bridge) == numbers(2)


def test_a_database_gone_after_its_commit_leaves_the_outcome_to_a_resolver(shop, open_engine, bridge, fail_commits):
    engine = open_engine(shop.database, poolclass=sa.NullPool)
    lost: list[sa.Connection] = []

    def refuse(*_):
        if lost:
            raise ConnectionRefusedError  # SQLAlchemy leaves the error as it is, as it does with asyncpg's

    sa.event.listen(engine, "do_connect", refuse)
    fail_commits(LOST, happens=True, when=lambda one: one in lost)
    with pytest.raises(OutcomeUnknown, match="a resolver"):
        with bridge.transaction(db=engine, group="shop", timeout=2 * SHORT) as txn:
            txn.db.execute(insert(b"0"))
            txn.send("orders", b"0")
            txn.send("audit", b"0")
            lost.append(txn.db)
    assert txn.outcome is Outcome.UNKNOWN
    lost.clear()
    assert one_for_one(shop, bridge) == [b"0"]


def test_a_row_that_a_resolver_has_deleted_is_not_taken_for_an_abort(shop, engine, bridge, monkeypatch, fail_commits):
    def settle_late(settle, table, transaction, deadline_at, _):
        eventually(lambda: waiting(bridge) == 0 and barrier_rows(shop.database) == [], "a resolver publishes")
        return settle(table, transaction, deadline_at, Deadline(SOON))

    replace_method(monkeypatch, BarrierTable, "settle", settle_late)
    failed = fail_commits(LOST, "SAVEPOINT txnbridge_guard", happens=True)
    assert sell(bridge, engine, b"0", timeout=SHORT).outcome is Outcome.COMMITTED
    assert failed and one_for_one(shop, bridge) == [b"0"]


def test_a_constraint_that_fails_at_the_commit_aborts(shop, engine, bridge):
    table = sa.Table(
        "child", sa.MetaData(), sa.Column("of", sa.ForeignKey(ROWS.c.value, deferrable=True, initially="DEFERRED"))
    )
    table.create(engine)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys = on"))
        engine.dispose()
    with pytest.raises(TransactionAborted, match="rolled back"), bridge.transaction(db=engine, group="shop") as txn:
        txn.db.execute(table.insert().values(of="nothing"))
        txn.send("orders", b"0")
    assert (txn.outcome, one_for_one(shop, bridge)) == (Outcome.ABORTED, [])


@pytest.mark.parametrize("phase", ["before", "after"])
@ON_POSTGRESQL
def test_a_database_that_is_killed_around_the_commit_loses_and_doubles_nothing(postgres, shop, engine, phase):
    def restart(event):
        if (event.name, event.phase) == ("database.commit", phase):
            postgres.kill()
            postgres.start()

    with listening(restart), txnbridge.connect(shop.url) as bridge:
        if phase == "before":
            with pytest.raises(TransactionAborted):
                sell(bridge, engine, b"0")
        else:
            assert sell(bridge, engine, b"0").outcome is Outcome.COMMITTED
        assert one_for_one(shop, bridge) == ([] if phase == "before" else [b"0"])


@ON_POSTGRESQL
def test_a_silent_database_holds_no_call_beyond_its_deadline(postgres, shop, engine):
    def silence(event):
        if (event.name, event.phase) == ("database.commit", "before"):
            postgres.pause()

    with listening(silence), txnbridge.connect(shop.url) as bridge:
        began = time.monotonic()
        try:
            with pytest.raises(OutcomeUnknown):
                sell(bridge, engine, b"0", timeout=SHORT)
            assert time.monotonic() - began < 20
        finally:
            postgres.resume()
        assert len(one_for_one(shop, bridge)) < 2


def test_a_bridge_whose_resolver_alone_publishes_does_so_before_it_is_closed(shop, engine, monkeypatch):
    def idle(*_):
        time.sleep(0.05)
        return []

    monkeypatch.setattr(BarrierResolver, "_due", idle)  # it publishes only at its end
    address = shop.url.replace("embedded:", "half-topic:") + "&lease_seconds=1"
    with plugins.registered(half_topic_backend):
        with txnbridge.connect(address) as bridge:
            assert sell(bridge, engine, b"1").outcome is Outcome.COMMITTED
        monkeypatch.undo()
        with txnbridge.connect(address) as bridge:
            assert values(bridge, "orders") == values(bridge, "audit") == [b"1"]
            for step in ("half.store/after", "database.commit/after"):
                with Child(try_to_sell, shop._replace(url=address), True, kill=step) as child:
                    child.stopped(SOON)
            with bridge.resolver("shop", db=shop.database) as resolver:
                eventually(lambda: sorted(values(bridge, "orders")) == sold(shop.database) == [b"0", b"1"], "published")
                eventually(lambda: resolver.stats.aborted == 1, "the other one is aborted")


@pytest.mark.live
@pytest.mark.parametrize("name", ["kafka", "pulsar", "rocketmq"])
def test_rows_and_messages_agree_on_real_brokers(postgres, open_engine, tmp_path, name):
    with started(name, tmp_path) as (address, _), txnbridge.connect(address, application="shop") as bridge:
        shop = Shop(address, postgres.new_database())
        engine = open_engine(shop.database)
        ROWS.create(engine)
        for topic in ("orders", "audit"):
            bridge.admin.create_topic(topic, 2)
        for value in numbers(20):
            assert sell(bridge, engine, value).outcome is Outcome.COMMITTED
        with pytest.raises(ZeroDivisionError), bridge.transaction(db=engine, group="shop") as txn:
            txn.db.execute(insert(b"no"))
            txn.send("orders", b"no")
            raise ZeroDivisionError
        for where in ("half.store/after", "database.commit/before", "database.commit/after"):
            with Child(sell_as, shop, where, kill=where) as child:
                child.stopped(SOON)
        expected = sorted([*numbers(20), b"database.commit/after"])
        assert sold(shop.database) == expected
        eventually(lambda: sorted(values(bridge, "orders")) == expected, "it is published")
        eventually(lambda: sorted(values(bridge, "audit")) == expected, "it is published")


def sell_as(shop: Shop, name: str) -> None:
    with txnbridge.connect(shop.url, application="shop") as bridge:
        sell(bridge, sa.create_engine(shop.database), name.encode(), timeout=5)
