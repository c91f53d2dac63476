"""An outbox's rows are published exactly once, in order, whatever dies; those that no broker takes are set aside."""

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.conformance.broken import around
from tests.core.half.ends import EndedBridge, Ends
from tests.failing import EACH, fail_call, note_calls, raising
from tests.inside import connection_of
from tests.sql.outbox_programs import TOPIC, Shop, confuse_names, outbox, publish_all, relay_until_killed
from tests.sql.test_database_chaos import started
from txnbridge import Outcome, codecs
from txnbridge._admin import Admin
from txnbridge.cli import main
from txnbridge.errors import AccessDenied, DeadlineExceeded, DeliveryFailed, InvalidOption, InvalidState
from txnbridge.spi import Deadline
from txnbridge.sql import Outbox
from txnbridge.sql._database import DatabaseThread
from txnbridge.sql.decision_log import SqlLogs
from txnbridge.sql.relay import OutboxStore, Relay
from txnbridge.testing import Child

SOON = 60


@pytest.fixture
def engine(url, open_engine):
    engine = open_engine(url)
    outbox().create(engine)
    return engine


@pytest.fixture
def asynchronous(tmp_path, open_engine):
    """An asynchronous engine, and a synchronous one of the same database."""
    pytest.importorskip("aiosqlite")
    engine = open_engine(f"sqlite:///{tmp_path / 'async.db'}")
    outbox().create(engine)
    return create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'async.db'}"), engine


@pytest.fixture
def shop(url, engine, tmp_path):
    """A broker with two topics, and a database with an outbox."""
    address = f"embedded:{tmp_path / 'broker.db'}"
    with txnbridge.connect(address) as bridge:
        bridge.admin.create_topic(TOPIC, 3)
        bridge.admin.create_topic("small", 1)
    return Shop(address, url)


@pytest.fixture
def bridge(shop):
    with txnbridge.connect(shop.url, create_topics=0) as bridge:
        yield bridge


def send(engine, *values, topic=TOPIC, **more):
    with engine.begin() as connection:
        for value in values:
            outbox().send(connection, topic, value, **more)


def values(bridge, topic=TOPIC):
    return [message.value for message in bridge.read(topic, 100_000)]


def die_before_the_commit(shop):
    with Child(relay_until_killed, shop, kill="resolve/before") as child:
        child.stopped(SOON)


def settled(relay, waiting=0):
    eventually(lambda: relay.lag == waiting, f"more than {waiting} rows wait")


def relay_all(bridge, engine, **settings):
    with bridge.relay(outbox(), engine, **settings) as relay:
        settled(relay)


def test_a_message_is_published_if_its_database_transaction_commits_and_as_it_was_sent(engine, bridge):
    box, day = outbox(), datetime(1970, 1, 2, tzinfo=UTC)
    topic = txnbridge.Topic(TOPIC, codecs.json)
    with orm.Session(engine) as session, session.begin():
        box.send(session, topic, {"id": 1}, key="one", headers={"a": b"\xff", "b": None}, partition=2, timestamp=day)
        with session.begin_nested() as nested:
            box.send(session, TOPIC, b"in a savepoint that is rolled back")
            session.flush()
            nested.rollback()
        box.send(session, TOPIC, None, key=b"\x00")
    with orm.Session(engine) as session:
        box.send(session, TOPIC, b"rolled back")
        session.flush()
    send(engine, b"", b"x" * 1_000_000)
    with bridge.relay(box, engine) as relay:
        settled(relay)
    found = {message.value: message for message in bridge.read(topic.name, 10)}
    assert found.keys() == {b'{"id":1}', None, b"", b"x" * 1_000_000}
    first = found[b'{"id":1}']
    assert (first.key, first.partition, first.timestamp) == (b"one", 2, 86_400_000)
    assert list(first.headers.raw) == [("a", b"\xff"), ("b", None)]
    assert found[None].key == b"\x00"


class Base(orm.DeclarativeBase):
    pass


class Sale(Base):
    __tablename__ = "sales"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


def count(engine):
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(outbox().rows))


def test_a_send_stores_its_message_at_once_and_flushes_no_object_of_the_program(engine):
    with orm.Session(engine) as session:
        session.add(Sale(id=1))
        outbox().send(session, TOPIC, b"1")
        outbox().send(session, TOPIC, b"2", key="a key")
        assert session.new
        session.expunge_all()
        session.commit()
    assert count(engine) == 2


@pytest.mark.parametrize("in_a_session", [True, False])
def test_a_connection_that_commits_each_statement_is_refused(engine, bridge, in_a_session):
    careless = engine.execution_options(isolation_level="AUTOCOMMIT")
    with orm.Session(careless) if in_a_session else careless.connect() as to:
        for key in (None, "key"):
            with pytest.raises(InvalidOption, match="AUTOCOMMIT"):
                outbox().send(to, TOPIC, b"1", key=key)
    assert count(engine) == 0
    with pytest.raises(InvalidOption, match="AUTOCOMMIT"):
        bridge.relay(outbox(), careless).run()
    assert count(engine) == 0
    if engine.dialect.name != "postgresql":  # which compares exactly
        outbox().rows.drop(engine)
        confuse_names(engine.url.render_as_string(hide_password=False), outbox().rows)
        with pytest.raises(InvalidOption, match="exactly"):
            bridge.relay(outbox(), engine).run()


@pytest.mark.parametrize("sent_first", [True, False])
def test_a_session_with_two_databases_is_refused(engine, open_engine, tmp_path, sent_first):
    other = open_engine(f"sqlite:///{tmp_path / 'sales.db'}")
    Base.metadata.create_all(other)
    with orm.Session(engine, binds={Sale: other}) as session, pytest.raises(InvalidOption, match="two databases"):
        if sent_first:
            outbox().send(session, TOPIC, b"1")
        session.add(Sale(id=1))
        session.flush()
        if not sent_first:
            outbox().send(session, TOPIC, b"1")
    assert count(engine) == 0


@pytest.mark.parametrize(("level", "says"), [("AUTOCOMMIT", "AUTOCOMMIT"), ("SERIALIZABLE", "two databases")])
def test_an_async_session_that_commits_each_statement_or_twice_is_refused(asynchronous, tmp_path, level, says):
    own, engine = asynchronous
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'sales.db'}")

    async def order():
        async with AsyncSession(own.execution_options(isolation_level=level), binds={Sale: other}) as session:
            await session.execute(sa.select(1), bind_arguments={"mapper": Sale})
            outbox().send(session, TOPIC, b"1")
            with pytest.raises(InvalidOption, match=says):
                await session.commit()
        await asyncio.gather(own.dispose(), other.dispose())

    asyncio.run(order())
    assert count(engine) == 0


def test_an_async_session_commits_no_message_that_it_was_told_to_forget(asynchronous):
    own, engine = asynchronous

    async def order():
        async with AsyncSession(own) as session:
            outbox().send(session, TOPIC, b"1")
            session.expunge_all()
            outbox().send(session, TOPIC, b"flushed")
            await session.flush()
            for _ in range(2):
                with pytest.raises(InvalidState, match="forget"):
                    await session.commit()
            await session.rollback()
            outbox().send(session, TOPIC, b"2")
            savepoint = await session.begin_nested()
            outbox().send(session, TOPIC, b"rolled back")
            await savepoint.rollback()
            await session.run_sync(outbox().send, TOPIC, b"3")
            session.expunge_all()
            await session.commit()
        await own.dispose()

    asyncio.run(order())
    with engine.connect() as connection:
        assert sorted(connection.scalars(sa.select(outbox().rows.c.value))) == [b"2", b"3"]


def test_the_numbers_of_deleted_rows_are_not_used_again(engine):
    """A batch names its rows by their numbers, and a relay deletes them after the commit."""
    send(engine, b"1", b"2")
    with engine.begin() as connection:
        numbers = connection.scalars(sa.select(outbox().rows.c.id)).all()
        connection.execute(sa.delete(outbox().rows))
    send(engine, b"3")
    with engine.connect() as connection:
        assert connection.scalar(sa.select(outbox().rows.c.id)) > max(numbers)


def test_a_wrong_call_says_what_is_wrong(engine, bridge):
    metadata = sa.MetaData()
    box = Outbox("shop", metadata)
    with engine.connect() as connection:
        for wrong, says in (
            (lambda: Outbox("My Shop"), "small letters"),
            (lambda: Outbox("shop", metadata), "has an outbox"),
            (lambda: box.send(engine, TOPIC, b""), "Session, AsyncSession or Connection"),
            (lambda: box.send(connection, TOPIC, {}), "bytes"),
            (lambda: box.send(connection, TOPIC, b"", partition=-1), "partition="),
            (lambda: box.send(connection, TOPIC, b"", partition=1 << 63), "partition="),
            (lambda: box.send(connection, "\ud800", b""), "UTF-8"),
            (lambda: box.send(connection, TOPIC, b"", timestamp=-1), "timestamp="),
            (lambda: bridge.relay("shop", engine), "Outbox"),
            (lambda: bridge.relay(box, engine, batch=0), "batch="),
            (lambda: bridge.relay(box, "sqlite://"), "outlives this process"),
            (lambda: bridge.relay(box, "sqlite+aiosqlite:///some.db"), "synchronous driver"),
            (lambda: bridge.relay(box, object()), "synchronous driver"),
        ):
            with pytest.raises(InvalidOption, match=says):
                wrong()


def by_connection(engine, sent):
    with engine.connect() as connection:
        sent(connection)
        connection.commit()


def by_session(engine, sent):
    with orm.Session(engine) as session:
        sent(session)
        session.commit()


def by_async_session(engine, sent):
    async def run():
        own = create_async_engine(engine.url, poolclass=sa.NullPool)
        async with AsyncSession(own) as session:
            await session.run_sync(sent)
            await session.commit()

    asyncio.run(run())


@pytest.mark.parametrize("by", [by_connection, by_session, by_async_session])
def test_messages_of_a_key_are_published_in_the_order_of_commits(engine, bridge, by):
    """Two transactions send the same key; the one that sent first commits first, and no other order can come about."""
    sqlite = engine.dialect.name == "sqlite"
    if engine.dialect.name == "mysql":
        pytest.skip("on MariaDB the order is that of the numbers")
    if sqlite and by is by_async_session:
        pytest.skip("SQLite has one writer at a time, whatever the session")
    numbers = itertools.count()
    committed = []

    def sent(to):
        number = next(numbers)
        outbox().send(to, TOPIC, b"%d" % number, key="k")
        if by is not by_connection:
            to.flush()
        time.sleep(0.001 * (number % 3))
        committed.append(b"%d" % number)  # other transactions of this key wait until the commit

    def shopping():
        for _ in range(20):
            by(engine, sent)

    # SQLite has one writer at a time, and gives numbers in its order.
    threads = [threading.Thread(target=shopping) for _ in range(1 if sqlite else 4)]
    for thread in threads:
        thread.start()
    with bridge.relay(outbox(), engine, batch=7) as relay:
        for thread in threads:
            thread.join()
        settled(relay)
    assert values(bridge) == committed and len(committed) == 20 * len(threads)


def test_a_row_that_commits_late_behind_a_higher_number_is_published(engine, bridge):
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    with engine.connect() as late, bridge.relay(outbox(), engine) as relay:
        outbox().send(late, TOPIC, b"late")
        send(engine, b"early")
        eventually(lambda: values(bridge) == [b"early"], "the early row is not published")
        late.commit()
        eventually(lambda: sorted(values(bridge)) == [b"early", b"late"], "the late row is not published")
        settled(relay)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_row_that_the_broker_refuses_is_parked_and_holds_back_at_most_its_key(engine, bridge, ordered):
    rows = [("nowhere", b"1", "k"), ("nowhere", b"2", "k"), (TOPIC, b"3", "k"), ("nowhere", b"4", None)]
    for topic, value, key in rows:
        send(engine, value, topic=topic, key=key)
    send(engine, *(b"%d" % number for number in range(5, 105)))
    with bridge.relay(outbox(), engine, ordered=ordered) as relay:
        settled(relay, waiting=1 if ordered else 0)
        eventually(lambda: relay.stats.parked == (2 if ordered else 3), "they are not counted")
        assert sorted(values(bridge), key=int) == [b"3", *(b"%d" % number for number in range(5, 105))]
        store = OutboxStore(outbox(), engine)
        assert {(row.topic, "nowhere" in row.reason) for row in store.parked(Deadline(SOON))} == {("nowhere", True)}
        bridge.admin.create_topic("nowhere", 1)
        assert store.unpark(None, False, Deadline(SOON)) == relay.stats.parked
        settled(relay)
    assert sorted(values(bridge, "nowhere")) == [b"1", b"2", b"4"]
    if ordered:
        assert [value for value in values(bridge, "nowhere") if value != b"4"] == [b"1", b"2"]


@pytest.mark.parametrize("headers", ["{", '[["a"]]', '[["a", 7]]', '[["a", "\\u0416"]]', '[["\\ud800", ""]]', "7"])
def test_a_row_with_damaged_headers_is_parked_and_the_others_are_published(engine, bridge, headers):
    send(engine, b"1", b"2", b"3")
    rows = outbox().rows
    with engine.begin() as connection:
        connection.execute(sa.update(rows).where(rows.c.value == b"2").values(headers=headers))
    check_parked(bridge, engine, "damaged", [b"1", b"3"])


def check_parked(bridge, engine, reason, published):
    """Check that a relay parks one row, for this reason, and publishes the others."""
    relay_all(bridge, engine)
    (parked,) = OutboxStore(outbox(), engine).parked(Deadline(SOON))
    assert reason in parked.reason
    assert sorted(values(bridge)) == published


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("column", ["topic", "headers"])
def test_a_row_whose_text_is_not_utf_8_is_parked_and_the_others_are_published(engine, bridge, column):
    send(engine, b"1", b"2", b"3")
    rows = outbox().rows
    with engine.begin() as connection:
        text: sa.ColumnElement[str] = sa.literal_column("CAST(x'5b5b22ff222c6e756c6c5d5d' AS TEXT)")  # [["\xff",null]]
        connection.execute(sa.update(rows).where(rows.c.value == b"2").values({column: text}))
        connection.execute(sa.update(rows).where(rows.c.value == b"3").values(value=sa.literal_column("'text'")))
    check_parked(bridge, engine, "damaged" if column == "headers" else "UTF-8", [b"1", b"text"])


def test_rows_that_were_inserted_by_hand_with_negative_numbers_are_published_and_deleted(engine, bridge):
    with engine.begin() as connection:
        for number in (-4, -2, -1):
            row = {"id": number, "topic": TOPIC, "value": b"%d" % number, "state": 0, "changed_at": 0}
            connection.execute(outbox().rows.insert(), row)
    relay_all(bridge, engine)
    assert sorted(values(bridge)) == [b"-1", b"-2", b"-4"]


def insert_parked(engine, parked, followers):
    """Park this many rows, each of a key of its own, and let as many rows follow as are to, behind the first keys."""
    row = {"topic": TOPIC, "value": b"", "changed_at": 0}
    rows = [row | {"key": b"%d" % each, "state": 2, "reason": ""} for each in range(parked)]
    rows += [row | {"key": b"%d" % (each % parked), "state": 0, "reason": None} for each in range(followers)]
    with engine.begin() as connection:
        connection.execute(outbox().rows.insert(), rows)
        connection.execute(outbox().state.insert().values(number=1, version=0, parked=parked))


def test_thousands_of_parked_rows_hold_back_their_keys_and_no_other_row(engine, bridge):
    insert_parked(engine, 10_000, 1_000)
    row = {"topic": TOPIC, "value": b"", "state": 0, "changed_at": 0}
    with engine.begin() as connection:
        connection.execute(outbox().rows.insert(), [row | {"key": b"other %d" % each} for each in range(8_000)])
    send(engine, b"1", key=b"17")
    send(engine, b"2")
    steps: list[None] = []
    if engine.dialect.name == "sqlite":  # which tells its steps, here by the million
        sa.event.listen(engine, "checkout", lambda db, *_: db.set_progress_handler(lambda: steps.append(None), 10**6))
    with bridge.relay(outbox(), engine) as relay:
        settled(relay, waiting=1_001)
    assert len(steps) < 100
    assert sorted(values(bridge)) == 8_000 * [b""] + [b"2"]


def test_a_relay_that_can_publish_nothing_rests_longer_than_it_looks(engine, bridge):
    insert_parked(engine, 1, 1)
    looks = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def look_slowly(connection, cursor, statement, *_):
        if "EXISTS" in statement:
            looks.append(statement)
            time.sleep(0.2)

    with bridge.relay(outbox(), engine):
        time.sleep(2)
    assert 0 < len(looks) <= 4


def test_rows_that_take_too_long_to_read_are_read_in_smaller_batches(engine, bridge, monkeypatch):
    too_long = DeadlineExceeded("a test says so")
    fail_call(monkeypatch, OutboxStore, "waiting", too_long, EACH, when=lambda *asked: asked[-1].seconds < 6)
    send(engine, b"1", b"2", b"3")
    relay_all(bridge, engine, batch=4)


def test_a_look_reads_no_more_bytes_than_a_batch_takes(engine, bridge, monkeypatch):
    monkeypatch.setattr("txnbridge.sql.relay._BATCH_BYTES", 1_000)
    read = note_calls(monkeypatch, Relay, "_publish", lambda relay, version, rows: len(rows))
    send(engine, *(b"%3d" % number * 100 for number in range(50)), b"x" * 5_000)
    relay_all(bridge, engine)
    assert len(values(bridge)) == 51
    assert max(read) <= 4


@pytest.mark.parametrize(("error", "failures", "parked"), [(DeliveryFailed, 3, 1), (AccessDenied, 4, 0)])
def test_an_undeliverable_row_is_parked_after_three_attempts_but_a_missing_right_is_waited_for(
    engine, shop, bridge, broken_broker, monkeypatch, error, failures, parked
):
    fail_call(monkeypatch, Admin, "topics", AccessDenied("not for this role"), EACH)  # whose broker answers
    failed: list[object] = []

    def fail_first(inner, *message):
        if len(failed) < failures:
            failed.append(message)
            raise error("a test says so")
        inner.send(*message)

    scheme = broken_broker(Preparing=around(send=fail_first))
    send(engine, b"1")
    with txnbridge.connect(shop.url.replace("embedded", scheme)) as other, other.relay(outbox(), engine) as relay:
        settled(relay)
        eventually(lambda: relay.stats.parked == parked, "it is not counted")  # behind the change of the row
        assert len(failed) == failures
    assert values(bridge) == ([] if parked else [b"1"])


def test_no_row_is_parked_for_a_wrong_setting_by_which_no_transaction_begins(engine, bridge, monkeypatch):
    wrong = InvalidOption("the topic of the decision log would lose decisions; let an administrator change it")
    failed = fail_call(monkeypatch, type(connection_of(bridge).broker), "prepare_writer", wrong, range(3))
    send(engine, b"1", b"2")
    with bridge.relay(outbox(), engine) as relay:
        settled(relay)
        assert (len(failed), relay.stats.parked) == (3, 0)
    assert sorted(values(bridge)) == [b"1", b"2"]


WALKED = [
    pytest.param("embedded", "sqlite"),
    *(pytest.param("embedded", name, marks=pytest.mark.live) for name in ("postgresql", "mariadb")),
]
WALKED += [
    pytest.param(name, "sqlite", marks=[pytest.mark.full, pytest.mark.live, pytest.mark.timeout(1800)])
    for name in ("kafka", "pulsar", "rocketmq")
]


@pytest.mark.parametrize(("name", "new_database"), WALKED, indirect=["new_database"])
def test_every_row_is_published_once_wherever_its_relay_dies(name, new_database, tmp_path, kill_walk):
    topics: dict[str, str] = {}

    def fresh():
        database = new_database()
        topic = topics[database] = f"orders{len(topics)}"
        engine = sa.create_engine(database, poolclass=sa.NullPool)
        outbox().create(engine)
        send(engine, *(b"%d" % number for number in range(4)), topic=topic)
        bridge.admin.create_topic(topic, 3)
        return Shop(address, database)

    def check(shop):
        # A batch that is prepared and not stored holds back readers until its deadline.
        topic = topics[shop.database]
        eventually(lambda: len(values(bridge, topic)) >= 4, "a row is not published")
        assert sorted(values(bridge, topic)) == [b"0", b"1", b"2", b"3"]

    with started(name, tmp_path) as (address, _), txnbridge.connect(address) as bridge:
        steps = ("message.send", "prepare", "outbox.store", "resolve", "outbox.delete")
        least = {f"{step}/{phase}" for step in steps for phase in ("before", "after")}
        kill_walk(publish_all, check, fresh, least, at_once=2, timeout=120)


@pytest.mark.parametrize("where", ["outbox.store/before", "outbox.store/after", "resolve/after"])
def test_a_relay_that_was_paused_while_another_took_over_publishes_nothing_twice(engine, shop, bridge, where):
    with Child(relay_until_killed, shop, pause=where) as paused:
        paused.told(SOON)
        send(engine, b"1", b"2")
        paused.stopped(SOON)
        with bridge.relay(outbox(), engine, takeover=0.5) as relay:
            settled(relay)
            paused.resume()
            send(engine, b"3")
            settled(relay)
        paused.kill()
    assert sorted(values(bridge)) == [b"1", b"2", b"3"]


def test_two_relays_at_once_publish_every_row_once(engine, bridge, shop):
    with txnbridge.connect(shop.url) as other:
        with bridge.relay(outbox(), engine, takeover=0, batch=5), other.relay(outbox(), engine, takeover=0, batch=3):
            for number in range(60):
                send(engine, b"%d" % number)
            eventually(lambda: len(values(bridge)) >= 60, "rows are not published")
    assert sorted(map(int, values(bridge))) == list(range(60))


@pytest.mark.parametrize("stored", [True, False])
def test_a_lost_answer_of_the_database_neither_loses_nor_doubles(engine, bridge, fail_commits, stored):
    lost = sa.exc.OperationalError("COMMIT", {}, ConnectionError("lost"))
    failed = fail_commits(lost, f"UPDATE {outbox().state.name}", happens=stored)
    send(engine, b"1", b"2")
    relay_all(bridge, engine)
    assert failed and sorted(values(bridge)) == [b"1", b"2"]
    assert bridge.admin.transactions() == []


def test_a_batch_that_an_administrator_has_aborted_is_published_again(engine, shop, bridge):
    send(engine, b"1", b"2")
    die_before_the_commit(shop)
    (prepared,) = bridge.admin.transactions()
    assert bridge.admin.abort(prepared.transaction, reason="test") is Outcome.ABORTED
    with bridge.relay(outbox(), engine, takeover=0.1) as relay:
        settled(relay)
        eventually(lambda: (relay.stats.aborted, relay.stats.published) == (1, 2), "it does not count them")
    assert sorted(values(bridge)) == [b"1", b"2"]


def test_rows_of_a_batch_of_unknown_outcome_stay_and_are_not_published_twice(engine, shop, caplog):
    ends = Ends()
    ends.by["commit"] = lambda *_: Outcome.UNKNOWN
    with txnbridge.connect(shop.url, timeout=6) as bridge:
        send(engine, b"1", b"2")
        ended: Any = EndedBridge(bridge, ends)
        with Relay(connection_of(bridge), ended, outbox(), engine) as relay:
            eventually(lambda: "not known yet" in caplog.text, "it does not say so")
            eventually(lambda: not relay.healthy, "it counts as healthy")
            send(engine, b"3")
            assert (relay.lag, values(bridge)) == (3, [])
            ends.by.clear()
            settled(relay)
            eventually(lambda: relay.healthy, "it does not count as healthy")
        assert sorted(values(bridge)) == [b"1", b"2", b"3"]


def test_a_batch_prepared_on_another_cluster_is_not_published_on_this_one(engine, shop, bridge, tmp_path, caplog):
    send(engine, b"1")
    die_before_the_commit(shop)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM txnbridge_outbox_clusters")
    with txnbridge.connect(f"embedded:{tmp_path / 'other.db'}") as other:
        other.admin.create_topic(TOPIC, 3)
        with other.relay(outbox(), engine, takeover=0.1) as relay:
            eventually(lambda: "stands still" in caplog.text, "it does not say so")
            assert (relay.healthy, relay.lag, values(other)) == (False, 1, [])
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM txnbridge_outbox_clusters")
    relay_all(bridge, engine, takeover=0.1)
    assert values(bridge) == [b"1"]


def test_a_relay_publishes_nothing_on_another_cluster_than_the_first(engine, shop, bridge, tmp_path):
    with bridge.relay(outbox(), engine) as relay:
        settled(relay)
        eventually(lambda: OutboxStore(outbox(), engine).exists(Deadline(SOON)), "it has not opened the outbox")
    send(engine, b"1")
    with txnbridge.connect(f"embedded:{tmp_path / 'other.db'}") as other:
        other.admin.create_topic(TOPIC, 3)
        relay = other.relay(outbox(), engine)
        with pytest.raises(InvalidOption, match="another"):
            relay.run()
        assert not relay.healthy and values(other) == []
    relay_all(bridge, engine)
    assert values(bridge) == [b"1"]


def test_a_relay_whose_run_has_died_is_not_healthy(engine, bridge):
    relay = bridge.relay(outbox(), engine)
    sa.event.listen(engine, "before_cursor_execute", raising(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        relay.run()
    assert not relay.healthy


def test_a_relay_goes_on_after_a_moment_in_which_no_thread_can_be_started(engine, bridge, no_threads, monkeypatch):
    send(engine, b"1")
    relay = bridge.relay(outbox(), engine)
    monkeypatch.setattr(DatabaseThread, "idle", deque())
    refused = no_threads(range(2), when=lambda thread: thread.name == "txnbridge-sql")
    with relay:
        eventually(lambda: values(bridge) == [b"1"], "it has ended")
    assert len(refused) == 2


def test_a_relay_refuses_a_database_that_does_not_wait_for_the_disk(careless, bridge):
    outbox().create(careless)
    send(careless, b"1")
    with pytest.raises(InvalidOption, match="synchronous"):
        bridge.relay(outbox(), careless).run()
    assert values(bridge) == []


def test_published_rows_are_kept_as_long_as_asked_and_then_deleted_a_few_at_a_time(engine, bridge, monkeypatch):
    monkeypatch.setattr("txnbridge.sql.relay._PURGE_ROWS", 2, raising=False)
    purged = note_calls(monkeypatch, OutboxStore, "purge", lambda *_: count(engine))
    send(engine, *(b"%d" % number for number in range(6)))
    relay_all(bridge, engine, keep=600)
    assert count(engine) == 6
    with bridge.relay(outbox(), engine, keep=0):
        eventually(lambda: count(engine) == 0, "a published row stays")
    assert purged[-3:] == [6, 4, 2]
    assert sorted(values(bridge)) == [b"%d" % number for number in range(6)]


def test_a_relay_waits_for_its_database_and_stops_meanwhile(bridge, caplog):
    relay = bridge.relay(outbox(), "postgresql+psycopg://nobody@127.0.0.1:9/none")
    with relay:
        eventually(lambda: " retries in " in caplog.text, "it does not notice")
    assert not relay.healthy


@pytest.fixture
def invoke(shop):
    """Return a function that calls a command of relays for the shop's outbox."""
    given = ["--database", shop.database, "--outbox", "shop"]
    return lambda command, *more: CliRunner().invoke(main, ["relay", command, *given, *more])


def test_the_commands_publish_list_and_change_rows(engine, shop, bridge, invoke, tmp_path):
    mistyped = tmp_path / "mistyped.db"
    assert (invoke("status", "--database", f"sqlite:///{mistyped}").exit_code, mistyped.exists()) == (2, False)
    assert (invoke("parked").exit_code, invoke("status").exit_code) == (2, 2)  # no relay has opened it
    send(engine, b"1")
    send(engine, b"2", topic="nowhere")
    with Child(run_command, shop) as child:
        eventually(lambda: "1 are parked" in invoke("status").output, "nothing is parked")
        os.kill(child.pid, signal.SIGTERM)
        assert "1 published in 1 batches, 1 parked" in child.result(SOON)
    assert "there is no topic 'nowhere'" in invoke("parked").output
    assert (invoke("resume").exit_code, json.loads(invoke("resume", "--all", "--json").stdout)["rows"]) == (2, 1)
    assert "1 rows were resumed" in invoke("resume", "--all", "--yes").output
    with bridge.relay(outbox(), engine):
        eventually(lambda: "1 are parked" in invoke("status").output, "nothing is parked")
    (row,) = OutboxStore(outbox(), engine).parked(Deadline(SOON))
    assert "1 rows were deleted" in invoke("drop", str(row.id), "--yes").output
    assert "nothing is parked" in invoke("parked").output


@pytest.mark.parametrize("how", ["--published", "--again"])
def test_a_batch_whose_outcome_can_never_be_known_is_ended_by_hand(engine, shop, bridge, invoke, how):
    send(engine, b"1")
    die_before_the_commit(shop)
    token = str(OutboxStore(outbox(), engine).state(Deadline(SOON)).token)
    assert invoke("end-batch", how, "another token", "--yes").exit_code == 2
    would, done = (invoke("end-batch", how, token, "--json", *more) for more in ([], ["--yes"]))
    assert [json.loads(each.stdout)["published"] for each in (would, done)] == 2 * [how == "--published"]
    bridge.abort(token)  # it would hold back readers
    relay_all(bridge, engine)
    assert values(bridge) == ([] if how == "--published" else [b"1"])


@pytest.mark.parametrize("batch", [None, "", "1-x"])
def test_a_batch_whose_rows_the_database_has_lost_stays_until_it_is_ended_by_hand(
    engine, shop, bridge, invoke, caplog, batch
):
    send(engine, b"1")
    die_before_the_commit(shop)
    with engine.begin() as connection:
        connection.execute(sa.update(outbox().state).values(batch=batch))
    with bridge.relay(outbox(), engine, takeover=0.1) as relay:
        eventually(lambda: "end-batch" in caplog.text, "it does not say so")
        assert (relay.lag, values(bridge)) == (1, [b"1"])
    token = str(OutboxStore(outbox(), engine).state(Deadline(SOON)).token)
    codes = [invoke("end-batch", "--yes", how, token).exit_code for how in ("--published", "--again")]
    assert codes == [3, 0]


def run_command(shop):
    given = ["relay", "run", "--url", shop.url, "--database", shop.database, "--outbox", "shop"]
    return CliRunner().invoke(main, given).output


def test_an_outbox_and_a_decision_log_share_a_database(engine, shop):
    with txnbridge.connect(shop.url, decision_log=engine) as bridge, bridge.relay(outbox(), engine) as relay:
        send(engine, b"1")
        settled(relay)
        assert values(bridge) == [b"1"]
    SqlLogs(engine).close()
