"""A processor that writes to a database: each message has its effect there once, whatever dies, is paused or fails."""

import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.conformance.broken import around
from tests.core.processor_kit import LEASE_SECONDS, numbers, send, values
from tests.failing import fail_call, raising
from tests.sql.outbox_programs import Shop, confuse_names, scalars
from tests.sql.test_database_chaos import started
from txnbridge.sql import Outbox
from txnbridge.sql._database import is_failure, refuses_commit
from txnbridge.sql.processing import _positions
from txnbridge.testing import Child, listening, next_commit

SOON = 60
BOX = Outbox("shop")
DONE = sa.Table("done", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("value", sa.String(20)))

CUSTOMERS = sa.Table("customers", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
BOUGHT = sa.Table(
    "bought",
    CUSTOMERS.metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("by", sa.ForeignKey(CUSTOMERS.c.id, deferrable=True, initially="DEFERRED"), nullable=False),
)


def is_poison(value: bytes) -> bool:
    return int(value) % 3 == 2


def record(message: txnbridge.Message, db: sa.Connection) -> None:
    db.execute(DONE.insert().values(value=message.value.decode()))


def record_and_send(message: txnbridge.Message, db: sa.Connection) -> None:
    record(message, db)
    BOX.send(db, "out", message.value)
    if is_poison(message.value):
        raise txnbridge.Poison("a test says so")


SMALL_BATCHES: Any = {"group": "g", "dead_letter": "dead", "outbox": BOX, "max_messages": 2}


def process(shop: Shop):
    settings = SMALL_BATCHES | {"max_dead_letters_in_a_row": None}
    with txnbridge.connect(shop.url) as bridge:
        processor = bridge.processor("in", each=record_and_send, db=shop.database, **settings)
        processor.run(until_idle=True)
    return processor.stats


def fail_a_third(message: txnbridge.Message, db: sa.Connection) -> None:
    record(message, db)
    if is_poison(message.value):
        raise ValueError


def process_with_retries(shop: Shop) -> None:
    """Process until all messages are done or dead, with a relay that takes those that wait to their retry topic."""
    with txnbridge.connect(shop.url) as bridge, bridge.relay(BOX, shop.database) as relay:
        settings = SMALL_BATCHES | {"retry": [0.001]}
        while not values(bridge, "dead"):
            bridge.processor("in", each=fail_a_third, db=shop.database, **settings).run(until_idle=True)
            eventually(lambda: relay.lag == 0, "rows wait")


def process_plainly(shop: Shop):
    """Process without an outbox and in larger batches, also after another member has taken over."""
    with txnbridge.connect(shop.url) as bridge:
        processor = bridge.processor("in", group="g", each=record, db=shop.database)
        processor.run(until_idle=True)
    return processor.stats


def feed(bridge, *messages):
    with bridge.transaction() as txn:
        for number, value in enumerate(messages):
            txn.send("in", value, partition=number % 2)


def relay_all(bridge, shop):
    with bridge.relay(BOX, shop.database) as relay:
        eventually(lambda: relay.lag == 0, "rows wait")


def all_is_acknowledged(bridge):
    with bridge.consumer("in", group="g") as consumer:
        return not consumer.poll(timeout=0.3)


def done(database):
    return [value.encode() for value in scalars(database, sa.select(DONE.c.value).order_by(DONE.c.id))]


@pytest.fixture
def fresh(new_database, tmp_path):
    """Make a broker with topics and messages, and a database with tables."""
    brokers = itertools.count()

    def make(messages=()):
        address = f"embedded:{tmp_path / f'broker{next(brokers)}.db'}?lease_seconds={LEASE_SECONDS}"
        database = new_database()
        with txnbridge.connect(address) as bridge:
            for topic in ("in", "out", "dead"):
                bridge.admin.create_topic(topic, 2)
            feed(bridge, *messages)
        engine = sa.create_engine(database, poolclass=sa.NullPool)
        DONE.create(engine)
        BOX.create(engine)
        return Shop(address, database)

    return make


@pytest.fixture
def run(shop, bridge):
    """Run a processor with this handler for each message until all is read; return its stats."""

    def run_one(each, bridge=bridge, **settings):
        settings = {"db": shop.database, "backoff": (0.01, 0.1)} | settings
        processor = bridge.processor("in", group="g", each=each, **settings)
        processor.run(until_idle=True)
        return processor.stats

    return run_one


@pytest.mark.timeout(400)
def test_each_message_has_its_effect_once_wherever_its_processor_dies(fresh, kill_walk):
    fed = numbers(4)

    def check(shop):
        good = [value for value in fed if not is_poison(value)]
        assert sorted(done(shop.database)) == good
        with txnbridge.connect(shop.url) as bridge:
            relay_all(bridge, shop)
            assert sorted(values(bridge, "out")) == good
            assert values(bridge, "dead") == [b"2"]
            assert all_is_acknowledged(bridge)

    wanted = {f"{name}/{phase}" for name in ("database.read", "database.commit") for phase in ("before", "after")}
    least = wanted | {"reader.poll/after", "ack/after", "commit/before", "commit/after"}
    kill_walk(process, check, lambda: fresh(fed), least, at_once=2)


@pytest.mark.timeout(400)
def test_a_message_that_waits_for_a_retry_is_in_one_place_wherever_its_processor_dies(fresh, kill_walk):
    def check(shop):
        assert sorted(done(shop.database)) == [b"0", b"1", b"3"]
        with txnbridge.connect(shop.url) as bridge:
            assert values(bridge, "g-retry-1ms") == values(bridge, "dead") == [b"2"]
            assert bridge.read("dead", 1)[0].headers["txnbridge-dead-topic"] == "in"

    least = {"database.commit/before", "database.commit/after", "ack/before", "commit/after"}
    kill_walk(process_with_retries, check, lambda: fresh(numbers(4)), least)


@pytest.mark.parametrize("where", ["reader.poll/after", "database.read/after", "database.commit/before", "ack/before"])
def test_a_member_that_was_paused_while_another_took_over_changes_nothing(shop, bridge, where):
    if where == "database.commit/before" and shop.database.startswith("sqlite"):
        pytest.skip("it holds the lock by which SQLite has one writer at a time")
    fed = numbers(9)
    feed(bridge, *fed[:2])
    process_plainly(shop)
    feed(bridge, *fed[2:8])
    with Child(process_plainly, shop, pause=where) as paused:
        paused.stopped(SOON)
        time.sleep(1)  # until its lease is over
        process_plainly(shop)
        assert sorted(done(shop.database)) == fed[:8]
        feed(bridge, fed[8])
        paused.resume()
        # It was told so, or skipped what it had polled, or had committed before.
        assert paused.result(SOON).retries > 0 or where in ("reader.poll/after", "ack/before")
    assert sorted(done(shop.database)) == fed


@pytest.mark.parametrize("committed", ["yes", "no", "later"])
def test_a_lost_answer_to_the_commit_neither_loses_nor_doubles(bridge, shop, run, fail_commits, committed):
    seen = []

    def each(message, db):
        record(message, db)
        if message.value == b"3":
            seen.append(message)

    def seen_by_now(_):
        if seen and not failed and committed == "later":
            time.sleep(1)
        return seen

    lost = sa.exc.OperationalError("COMMIT", {}, ConnectionError("lost"))
    failed = fail_commits(lost, happens=committed != "no", when=seen_by_now)
    feed(bridge, *numbers(6))
    assert run(each, timeout=0.5, max_messages=2).retries > 0
    assert sorted(done(shop.database)) == numbers(6)


@pytest.mark.parametrize("outcome", [txnbridge.Outcome.ABORTED, txnbridge.Outcome.UNKNOWN])
def test_messages_whose_acknowledgement_fails_are_not_processed_again(
    bridge, shop, run, with_timing, monkeypatch, outcome
):
    with_timing(database_acks=1.0)
    seen = []

    def each(message, db):
        seen.append(message)
        record(message, db)
        assert len(seen) != 2  # so the first pass has two commits, and the first of them an acknowledgement

    feed(bridge, *numbers(6))
    fail_call(monkeypatch, bridge, "transaction", txnbridge.BrokerUnavailable("a test says so"), number=1)
    with next_commit(bridge, outcome, happened=False):
        assert run(each, max_messages=2).messages == 6
    assert sorted(done(shop.database)) == numbers(6)
    assert all_is_acknowledged(bridge)
    bridge.admin.reset_group("g", "earliest")
    assert run(record).messages == 0
    assert all_is_acknowledged(bridge)


def test_commits_share_an_acknowledgement_also_if_the_handler_fails_now_and_then(
    bridge, shop, run, broken_broker, with_timing
):
    with_timing(database_acks=SOON)
    failed, acknowledged = set(), []

    def ack(inner, context, positions):
        acknowledged.append(sum(map(len, positions.values())))
        inner.ack(context, positions)

    def each(message, db):
        record(message, db)
        if is_poison(message.value) and message.value not in failed:
            failed.add(message.value)
            raise ValueError

    feed(bridge, *numbers(9))
    with txnbridge.connect(shop.url.replace("embedded", broken_broker(Writer=around(ack=ack)))) as other:
        assert run(each, other, max_messages=1).transactions == 9
    assert sorted(done(shop.database)) == numbers(9)
    # The first one at once, the others before what failed is polled again, and at the end.
    assert sum(acknowledged) == 9
    assert len(acknowledged) <= 1 + len(failed) + 1
    assert all_is_acknowledged(bridge)


def test_a_topic_that_is_made_anew_is_processed_from_its_beginning(bridge, shop, run):
    feed(bridge, *numbers(4))
    run(record)
    bridge.admin.delete_topic("in")
    bridge.admin.create_topic("in", 2)
    feed(bridge, b"4", b"5")
    run(record)
    assert sorted(done(shop.database)) == numbers(6)


def test_messages_of_a_topic_made_anew_meanwhile_are_not_taken_for_those_of_the_new_one(bridge, shop, run):
    renewed: list[object] = []

    def renew(event):
        if event.name == "database.read" and not renewed:
            renewed.append(event)
            bridge.admin.delete_topic("in")
            bridge.admin.create_topic("in", 2)
            feed(bridge, b"4", b"5")

    feed(bridge, *numbers(4))
    with listening(renew), txnbridge.connect(shop.url) as other:
        run(record, other)
    assert sorted(done(shop.database)) == [b"4", b"5"]


def test_a_reader_that_reads_on_in_a_topic_that_was_made_anew_processes_nothing_there(shop, run, broken_broker):
    """Kafka's reader hands out messages of the new topic for a tenth of a second, before it notices."""
    ids = {"in": "old"}
    tells = around(topic_ids=lambda inner, topics, deadline: dict(ids))
    scheme = broken_broker(notices_renewed_topics_late=True, Administering=tells)

    def each(message, db):
        record(message, db)
        ids["in"] = "new"

    with txnbridge.connect(shop.url.replace("embedded", scheme)) as bridge:
        send(bridge, "in", *numbers(4), key=b"key")
        with pytest.raises(txnbridge.TransactionAborted, match="recreated"):
            run(each, bridge, max_messages=2, retry_for=0.3)
        assert done(shop.database) == numbers(2)
        bridge.admin.reset_group("g", "earliest")
        run(record, bridge)  # another assignment reads the new topic
    assert done(shop.database) == [*numbers(2), *numbers(4)]
    assert scalars(shop.database, sa.select(_positions.c.topic_id)) == ["new"]


def test_after_a_restore_or_on_purpose_messages_are_processed_again_and_no_others(bridge, shop, run, open_engine):
    engine = open_engine(shop.database)

    def restore(contents):
        with engine.begin() as connection:
            for table, rows in contents.items():
                connection.execute(table.delete())
                if rows:
                    connection.execute(table.insert(), [dict(row) for row in rows])
        bridge.admin.reset_group("g", "earliest")

    feed(bridge, *numbers(4))
    run(record)
    with engine.connect() as connection:
        backup = {table: connection.execute(table.select()).mappings().all() for table in (DONE, _positions)}
    feed(bridge, b"4", b"5")
    run(record)
    restore(backup)
    assert run(record).messages == 2
    assert sorted(done(shop.database)) == numbers(6)
    restore({_positions: []})
    assert run(record).messages == 6


@pytest.mark.live
def test_without_the_right_to_make_tables_the_error_has_the_statements_that_help(postgres, bridge, run, open_engine):
    url = postgres.new_database()
    guest = postgres.guest(url)
    feed(bridge, *numbers(4))
    with pytest.raises(txnbridge.AccessDenied, match="CREATE TABLE") as refused:
        run(record, db=guest)
    DONE.create(open_engine(url))
    postgres.run(url, *str(refused.value).partition("delete on them:")[2].split(";"))
    postgres.run(url, *(f"GRANT ALL ON ALL {what} IN SCHEMA public TO guest" for what in ("TABLES", "SEQUENCES")))
    run(record, db=guest)
    assert sorted(done(url)) == numbers(4)


@pytest.mark.live
@pytest.mark.parametrize("name", ["kafka", "pulsar", "rocketmq"])
def test_each_message_has_its_effect_once_on_real_brokers(postgres, open_engine, tmp_path, name):
    fed = numbers(60)
    with started(name, tmp_path) as (address, _), txnbridge.connect(address) as bridge:
        shop = Shop(address, postgres.new_database())
        DONE.create(open_engine(shop.database))
        for topic in ("in", "out", "dead"):
            bridge.admin.create_topic(topic, 2)
        feed(bridge, *fed)
        for where in ("database.commit/before", "database.commit/after"):
            with Child(process, shop, kill=where) as child:
                child.stopped(SOON)
        with Child(process, shop) as child:
            child.result(2 * SOON)
        relay_all(bridge, shop)
        good = [value for value in fed if not is_poison(value)]
        assert sorted(done(shop.database)) == sorted(values(bridge, "out")) == sorted(good)
        assert sorted(values(bridge, "dead")) == sorted(set(fed) - set(good))


def test_an_error_of_the_handler_rolls_its_writes_back(bridge, shop, run):
    failed: Counter[bytes] = Counter()

    def each(message, db):
        with db.begin_nested():  # a savepoint of its own commits nothing
            record(message, db)
        with orm.Session(db) as session:
            session.execute(DONE.insert().values(value=f"{message.value.decode()}0"))
            session.commit()
        failed[message.value] += 1
        if message.value == b"2" and failed[b"2"] < 4:
            raise (RuntimeError, txnbridge.Abort, sa.exc.OperationalError("", {}, OSError()))[failed[b"2"] - 1]

    feed(bridge, b"1", b"1", b"2", b"3")
    assert run(each, max_attempts=2).retries == 2  # neither the first one, behind others, nor that of the database
    assert sorted(done(shop.database)) == [b"1", b"1", b"10", b"10", b"2", b"20", b"3", b"30"]


@pytest.mark.parametrize("whole_batches", [False, True])
def test_poison_found_by_the_database_goes_to_the_outbox_and_good_messages_are_kept(bridge, shop, run, whole_batches):
    def each(message, db):
        db.execute(DONE.insert().values(id=int(message.value), value=message.value.decode()))

    def batch(messages, db):
        for message in messages:
            each(message, db)

    feed(bridge, b"1", b"2", b"1", b"3", b"2", b"4")
    handler = {"batch": batch, "each": None} if whole_batches else {"each": each}
    stats = run(**handler, dead_letter="dead", poison=sa.exc.IntegrityError, outbox=BOX)
    assert (stats.messages, stats.dead_letters) == (6, 2)
    assert done(shop.database) == [b"1", b"2", b"3", b"4"]
    relay_all(bridge, shop)
    dead = bridge.read("dead", 10)
    assert sorted(message.value for message in dead) == [b"1", b"2"]
    assert {message.headers["txnbridge-dead-group"] for message in dead} == {"g"}


def test_a_message_behind_poison_is_not_judged_by_what_the_poison_has_written(bridge, shop, run):
    def each(message, db):
        db.execute(DONE.insert().values(id=7, value=message.value.decode()))
        if message.value == b"1":
            raise txnbridge.Poison("a test says so")

    send(bridge, "in", b"1", b"2", key=b"key")
    settings = {"poison": sa.exc.IntegrityError, "dead_letter": "dead", "outbox": BOX}
    assert run(each, **settings).dead_letters == 1
    assert done(shop.database) == [b"2"]


@pytest.fixture
def customers(shop, open_engine):
    """Make customers 1, 2 and 4, and let each row of the table `bought` need one when its transaction commits."""
    if shop.database.startswith("mysql"):
        pytest.skip("MariaDB checks no constraint at the commit")
    engine = open_engine(shop.database)
    if shop.database.startswith("sqlite"):
        sa.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
    CUSTOMERS.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(CUSTOMERS.insert(), [{"id": 1}, {"id": 2}, {"id": 4}])
    return engine


def buy(message: txnbridge.Message, db: sa.Connection) -> None:
    record(message, db)
    db.execute(BOUGHT.insert().values(by=int(message.value)))


@pytest.mark.parametrize("whole_batches", [False, True])
@pytest.mark.parametrize("settings", [{"poison": sa.exc.IntegrityError}, {"max_attempts": 3}], ids=str)
def test_a_message_whose_commit_the_database_refuses_is_found_and_the_others_are_kept(
    bridge, shop, customers, run, whole_batches, settings
):
    def batch(messages, db):
        for message in messages:
            buy(message, db)

    feed(bridge, b"1", b"2", b"3", b"4", b"1", b"2")
    handler = {"batch": batch, "each": None} if whole_batches else {"each": buy}
    stats = run(**handler, **settings, dead_letter="dead", db=customers, outbox=BOX)
    assert (stats.messages, stats.dead_letters) == (6, 1)
    assert sorted(done(shop.database)) == [b"1", b"1", b"2", b"2", b"4"]
    relay_all(bridge, shop)
    (dead,) = bridge.read("dead", 10)
    assert dead.value == b"3" and "IntegrityError" in dead.headers["txnbridge-dead-reason"]
    assert all_is_acknowledged(bridge)


def test_a_refused_commit_is_tried_again_until_its_message_has_had_its_attempts(bridge, shop, customers, run):
    feed(bridge, b"3")
    with pytest.raises(txnbridge.Poison, match=r"IntegrityError .*3 attempts"):
        run(buy, db=customers, max_attempts=3)
    tried: Counter[bytes] = Counter()

    def each(message, db):
        buy(message, db)
        tried[message.value] += 1
        if tried[b"3"] == 3:
            db.execute(CUSTOMERS.insert().values(id=3))

    assert run(each, db=customers).retries == 2
    assert done(shop.database) == [b"3"]


def test_a_database_that_fails_while_a_message_is_set_aside_is_asked_again(bridge, run, monkeypatch):
    fail_call(monkeypatch, Outbox, "send", sa.exc.OperationalError("INSERT", {}, ValueError("database is locked")))
    feed(bridge, b"1")
    stats = run(raising(txnbridge.Poison("a test says so")), dead_letter="dead", outbox=BOX)
    assert (stats.dead_letters, stats.retries) == (1, 1)


def test_dead_letters_that_the_database_refuses_stop_the_processor(bridge, run, fail_commits):
    refused = sa.exc.IntegrityError("COMMIT", {}, ValueError("refused"))

    def each(message, db):
        fail_commits(refused, times=1000)
        raise txnbridge.Poison("a test says so")

    feed(bridge, b"1")
    with pytest.raises(sa.exc.IntegrityError, match="refused"):
        run(each, poison=sa.exc.IntegrityError, dead_letter="dead", outbox=BOX, retry_for=5)


@pytest.mark.parametrize("code", ["P0001", "22012", "54001", "XX000"])
def test_an_error_of_a_trigger_at_the_commit_is_the_handlers_as_well(bridge, shop, run, open_engine, code):
    if not shop.database.startswith("postgresql"):
        pytest.skip("only PostgreSQL has triggers at the commit")
    engine = open_engine(shop.database)
    with engine.begin() as connection:
        for statement in (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            f" 'BEGIN RAISE EXCEPTION ''no'' USING ERRCODE = ''{code}''; END'",
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON done DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            " WHEN (NEW.value = '2') EXECUTE FUNCTION refuse()",
        ):
            connection.exec_driver_sql(statement)
    feed(bridge, b"1", b"2", b"3")
    settings = {"poison": sa.exc.DBAPIError, "dead_letter": "dead", "outbox": BOX, "retry_for": 10}
    assert run(record, db=engine, **settings).dead_letters == 1
    assert sorted(done(shop.database)) == [b"1", b"3"]


@pytest.mark.parametrize("end", [sa.Connection.commit, sa.Connection.rollback])
def test_a_handler_that_ends_the_transaction_itself_is_refused(bridge, shop, open_engine, run, end):
    engine = open_engine(shop.database)

    def each(message, db):
        record(message, db)
        end(db)

    feed(bridge, b"1")
    with pytest.raises(txnbridge.InvalidState, match="the handler"):
        run(each, db=engine)
    with engine.begin() as connection:  # from the same pool
        assert connection.execute(sa.select(DONE)).all() == []


def end_by_text(db):
    db.execute(sa.text("ROLLBACK"))


def end_by_conflict(db):
    with suppress(sa.exc.IntegrityError):
        db.execute(sa.text("INSERT OR ROLLBACK INTO done (id, value) VALUES (1, '1')"))


def end_by_definition(db):
    db.execute(sa.text("CREATE TABLE more (id INTEGER)"))


@pytest.mark.parametrize("writes_on", [False, True])
@pytest.mark.parametrize("end", [end_by_text, end_by_conflict, end_by_definition])
def test_a_statement_that_ends_the_transaction_behind_sqlalchemy_stops_the_processor(bridge, shop, run, end, writes_on):
    needed = {end_by_conflict: "sqlite", end_by_definition: "mysql"}.get(end, "")
    if not shop.database.startswith(needed):
        pytest.skip("another database does so")

    def each(message, db):
        record(message, db)
        if message.value == b"2":
            end(db)
            if writes_on:  # in the transaction that the driver begins by itself
                record(message, db)

    send(bridge, "in", *numbers(3), key=b"key")
    with pytest.raises(txnbridge.InvalidState, match="has ended the database transaction"):
        run(each)
    assert done(shop.database) == (numbers(3) if end is end_by_definition else [])
    with bridge.consumer("in", group="g") as consumer:
        assert len(consumer.poll(timeout=SOON)) == 3


def test_groups_whose_names_differ_by_case_both_handle_all_messages(bridge, shop):
    feed(bridge, *numbers(5))
    for group in ("shipping", "Shipping", "shipping "):
        processor = bridge.processor("in", group=group, each=record, db=shop.database)
        processor.run(until_idle=True)
        assert processor.stats.messages == 5
    assert sorted(done(shop.database)) == sorted(3 * numbers(5))


def test_a_transaction_that_begins_too_late_does_not_keep_its_connection(shop, open_engine):
    engine = open_engine(shop.database, pool_size=1, max_overflow=0)
    late: list[sa.Connection] = []

    def be_late(connection, _, statement, *__):
        if statement.startswith("SAVEPOINT") and not late:
            late.append(connection)
            time.sleep(1.5)

    sa.event.listen(engine, "before_cursor_execute", be_late)
    with txnbridge.connect(shop.url, timeout=1) as bridge:
        feed(bridge, b"1")
        processor = bridge.processor("in", group="g", each=record, db=engine)
        with ThreadPoolExecutor() as pool:
            pool.submit(processor.run)
            try:
                eventually(lambda: done(shop.database) == [b"1"], "nothing is processed")
            finally:
                processor.stop()


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
def test_a_value_that_a_function_of_sqlite_refuses_is_the_fault_of_its_message(bridge, run):
    attempts = itertools.count()

    def each(message, db):
        if next(attempts) < 10:
            db.execute(sa.select(sa.func.json(message.value.decode())))

    feed(bridge, b"{}", b"{", b"{}")
    stats = run(each, dead_letter="dead", outbox=BOX, max_attempts=1)
    assert (stats.messages, stats.dead_letters) == (3, 1)


@pytest.mark.parametrize("new_database", [pytest.param("postgresql", marks=pytest.mark.live)], indirect=True, ids=str)
@pytest.mark.parametrize("code", ["25P03", "25006", "25P02"])
def test_a_transaction_that_postgresql_cannot_go_on_with_is_not_the_fault_of_a_message(bridge, shop, run, code):
    failures = [code]

    def each(message, db):
        if failures:
            failures.pop()
            if code == "25P03":
                db.execute(sa.text("SET idle_in_transaction_session_timeout = 100"))
                time.sleep(0.5)
            elif code == "25006":
                db.execute(sa.text("SET TRANSACTION READ ONLY"))
            else:
                with suppress(sa.exc.DBAPIError):
                    db.execute(sa.text("SELECT 1/0"))
        record(message, db)

    feed(bridge, b"1")
    stats = run(each, dead_letter="dead", outbox=BOX, max_attempts=1)
    assert (stats.dead_letters, done(shop.database)) == (0, [b"1"])


@pytest.mark.parametrize(
    ("error", "fails", "refuses"),
    [
        ("22012", False, True),
        ("54001", False, True),
        ("XX000", False, True),
        ("P0001", False, True),
        ("25P02", True, False),
        ("25P03", True, False),
        ("25006", True, False),
        ("40001", True, False),
        ("57P01", True, False),
        ("08006", True, False),
    ],
)
def test_an_answer_of_postgresql_says_whose_fault_it_is_and_whether_a_commit_happened(error, fails, refuses):
    errors = pytest.importorskip("psycopg.errors")
    given = sa.exc.DBAPIError.instance("COMMIT", {}, errors.lookup(error)("text"), errors.Error)
    assert (is_failure(given), refuses_commit(given)) == (fails, refuses)
    lost = sa.exc.OperationalError("COMMIT", {}, errors.OperationalError("the connection is lost"))
    assert (is_failure(lost), refuses_commit(lost)) == (True, False)


@pytest.mark.parametrize(("number", "fails"), [(1213, True), (2013, True), (1366, False), (1644, False), (4025, False)])
def test_an_answer_of_mariadb_by_a_driver_that_tells_no_sqlstate_says_whose_fault_it_is(number, fails):
    assert is_failure(sa.exc.OperationalError("INSERT", {}, Exception(number, "text"))) == fails


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"db": 7}, "db="),
        ({"db": "sqlite://"}, "outlives"),
        ({"db": "sqlite+aiosqlite:///some.db"}, "synchronous driver"),
        ({"dead_letter": "dead"}, "outbox="),
        ({"retry": [10]}, "outbox="),
        ({"outbox": "shop"}, "outbox="),
        ({"outbox": BOX, "db": None}, "outbox="),
    ],
)
def test_a_wrong_setting_is_refused(bridge, shop, run, settings, match):
    with pytest.raises(txnbridge.InvalidOption, match=match):
        run(record, **settings)


def test_a_database_that_confuses_names_commits_each_statement_or_waits_for_no_disk_is_refused(
    shop, run, open_engine, careless
):
    if not shop.database.startswith("postgresql"):  # which compares exactly
        confuse_names(shop.database, _positions)
        with pytest.raises(txnbridge.InvalidOption, match="exactly"):
            run(record)
    with pytest.raises(txnbridge.InvalidOption, match="AUTOCOMMIT"):
        run(record, db=open_engine(shop.database, isolation_level="AUTOCOMMIT"))
    with pytest.raises(txnbridge.InvalidOption, match="synchronous"):
        run(record, db=careless)
