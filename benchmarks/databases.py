"""Kafka with a database: an outbox with its relay, and a processor with `db=`, beside what programs write by hand."""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import confluent_kafka
import psycopg
import sqlalchemy as sa
from confluent_kafka import TopicPartition
from sqlalchemy import orm

from benchmarks._harness import (
    Lap,
    Report,
    Round,
    Settings,
    Turn,
    alternate,
    at_least,
    background,
    child,
    contender,
    estimate,
    in_turn,
    quantile,
    unique,
)
from benchmarks._kafka import FETCHING, idempotent_producer, new_topic, plain_consumer
from benchmarks._kafka import broker as kafka
from benchmarks._ours import AT_ONCE, fill
from tests.sql.postgres import Postgres
from txnbridge import Batch, Bridge, Processor, connect
from txnbridge.sql import Outbox

# --- outbox ----------------------------------------------------------------------------------------------------------

BATCH = 1000  # rows; also the relay's default
BACKLOG = 20_000  # rows
HOLD = 10.0  # the relay's default, too
VALUE = b"x" * 100
STORED = 50  # transactions of each thread in a lap
# A message of the relay by hand waits up to a second, so a round has few of them.
WAITED = {"by hand": 10, "ours": 40}
# The largest pause between two messages, so that they come at any time of the relay's sleep.
PAUSE = {"by hand": 1.0, "ours": 0.1}


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, primary_key=True)
    item: orm.Mapped[str] = orm.mapped_column(sa.Text)


class Message(Base):
    """A row of the outbox by hand."""

    __tablename__ = "messages"
    id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, primary_key=True)
    topic: orm.Mapped[str] = orm.mapped_column(sa.Text)
    key: orm.Mapped[bytes | None]
    value: orm.Mapped[bytes | None]


OUTBOX = Outbox("shop", Base.metadata)
ORDERS, MESSAGES = Base.metadata.tables["orders"], Base.metadata.tables["messages"]

Store = Callable[[sa.Engine, str, str], None]  # one database transaction with an order and a message


def core_ours(engine: sa.Engine, topic: str, key: str) -> None:
    with engine.begin() as connection:
        connection.execute(sa.insert(ORDERS), {"item": "book"})
        OUTBOX.send(connection, topic, VALUE, key=key)


def core_by_hand(engine: sa.Engine, topic: str, key: str) -> None:
    with engine.begin() as connection:
        connection.execute(sa.insert(ORDERS), {"item": "book"})
        connection.execute(sa.insert(MESSAGES), {"topic": topic, "key": key.encode(), "value": VALUE})


def session_ours(engine: sa.Engine, topic: str, key: str) -> None:
    with orm.Session(engine) as session, session.begin():
        session.add(Order(item="book"))
        OUTBOX.send(session, topic, VALUE, key=key)


def session_by_hand(engine: sa.Engine, topic: str, key: str) -> None:
    with orm.Session(engine) as session, session.begin():
        session.add(Order(item="book"))
        session.add(Message(topic=topic, key=key.encode(), value=VALUE))


@contender
def storing(engine: sa.Engine, store: Store, threads: int) -> Iterator[Lap]:
    """A lap is transactions in `threads` threads at once, each with a key of its own."""
    empty(engine)
    keys = itertools.count()

    def transactions(count: int) -> None:
        for _ in range(count):
            store(engine, "orders", str(next(keys)))

    with ThreadPoolExecutor(threads) as pool:

        def lap() -> int:
            list(pool.map(transactions, [STORED] * threads))
            return STORED * threads

        yield lap


def empty(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("TRUNCATE orders, messages, shop_outbox"))


def measure_storing(settings: Settings, engine: sa.Engine) -> None:
    report = Report(settings, "PostgreSQL: an order and a message in a transaction, no relay runs")
    stores = {"Core": (core_ours, core_by_hand), "ORM session": (session_ours, session_by_hand)}
    for way, (ours, by_hand) in stores.items():
        for threads in (1, 16):
            contenders = {"ours": storing(engine, ours, threads), "by hand": storing(engine, by_hand, threads)}
            found = alternate(settings, contenders)
            name = f"{way}, {threads} thread{'s' if threads > 1 else ''}"
            report.ratio(f"{name}: ours / by hand", found["ours"], found["by hand"], at_least(0.9))
            for whose, rounds in found.items():
                report.rate(f"{name}: {whose}, transactions a second", rounds)


def fill_outboxes(engine: sa.Engine, topic: str, count: int) -> None:
    """Insert the same number of rows into both outboxes."""
    empty(engine)
    rows = "FROM generate_series(1, :count) AS n"
    given = {"topic": topic, "value": VALUE, "count": count}
    message = "CAST(:topic AS text), CAST(CAST(n AS text) AS bytea), CAST(:value AS bytea)"
    with engine.begin() as connection:
        connection.execute(sa.text(f"INSERT INTO messages (topic, key, value) SELECT {message} {rows}"), given)
        ours = f"INSERT INTO shop_outbox (topic, key, value, state, changed_at) SELECT {message}, 0, 0 {rows}"
        connection.execute(sa.text(ours), given)


class RelayByHand:
    """A relay written by hand: it publishes each row at least once."""

    _NEXT = sa.select(MESSAGES).order_by(MESSAGES.c.id).limit(BATCH)
    _DELETE = sa.text("DELETE FROM messages WHERE id = ANY(:ids)")

    def __init__(self, engine: sa.Engine, url: str) -> None:
        self._engine = engine
        self._failed: list[object] = []
        self._producer = idempotent_producer(url, self._failed.append)

    def publish_all(self, count: int) -> None:
        published = 0
        while found := self.publish():
            published += found
        assert published == count

    def publish(self) -> int:
        """Publish the next rows, and return their number."""
        with self._engine.begin() as connection:
            rows = connection.execute(self._NEXT).all()
            if rows:
                for row in rows:
                    self._producer.produce(row.topic, row.value, row.key)
                self._producer.flush()
                if self._failed:
                    raise RuntimeError(f"a message was not delivered: {self._failed[0]}")
                connection.execute(self._DELETE, {"ids": [row.id for row in rows]})
        return len(rows)

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if not self.publish():
                stop.wait(1)


def publishing(settings: Settings, engine: sa.Engine, topic: str, publish: Callable[[int], None]) -> Turn:
    """Return a round in which `publish` publishes a whole backlog, again and again."""
    count = BATCH if settings.quick else BACKLOG

    def lap() -> float:
        fill_outboxes(engine, topic, count)
        begin = time.perf_counter()
        publish(count)
        return time.perf_counter() - begin

    def turn() -> Round:
        laps = [lap()]
        while sum(laps) < settings.seconds:
            laps.append(lap())
        return Round(laps, count * len(laps))

    return turn


def publish_ours(bridge: Bridge, engine: sa.Engine, batch: int, count: int) -> None:
    with bridge.relay(OUTBOX, engine, batch=batch, hold=HOLD) as relay:
        while relay.stats.published < count:
            time.sleep(0.001)


def measure_publishing(settings: Settings, engine: sa.Engine, url: str) -> None:
    report = Report(settings, f"From PostgreSQL to Kafka: a backlog of {BACKLOG:,} x 100 B, {BATCH:,} a batch")
    topic = new_topic(url)
    with connect(url, transactional_id=unique("relay"), hold=HOLD) as bridge:
        ways: dict[str, Callable[[int], None]] = {
            "ours": partial(publish_ours, bridge, engine, BATCH),
            "ours, 10 times as many a batch": partial(publish_ours, bridge, engine, 10 * BATCH),
            "by hand": RelayByHand(engine, url).publish_all,
        }
        turns = {name: publishing(settings, engine, topic, publish) for name, publish in ways.items()}
        in_turn(turns, 1)  # it fills caches and does not count
        found = in_turn(turns, settings.rounds)
    report.ratio("ours / by hand", found["ours"], found["by hand"], at_least(1.0))
    larger = "ours, 10 times as many a batch"
    report.ratio(f"{larger} / by hand", found[larger], found["by hand"])
    report.rates(found, "rows")


def read(pipe: Connection, url: str, topic: str) -> None:
    """Answer each message with the time at which it came."""
    consumer = plain_consumer(url, unique("reader"), FETCHING)
    consumer.assign([TopicPartition(topic, 0, confluent_kafka.OFFSET_BEGINNING)])
    consumer.poll(1)
    pipe.send("ready")
    while True:
        message = consumer.poll(60)
        assert message is not None and message.error() is None
        if message.value() == b"stop":
            return
        pipe.send(time.monotonic())


def measure_waiting(settings: Settings, engine: sa.Engine, url: str) -> None:
    """Measure from the answer to a database commit until the reader has its message."""
    report = Report(settings, "From the database commit until a reader in another process has the message")
    topic = new_topic(url)
    by_hand = RelayByHand(engine, url)
    dices = {name: random.Random(1) for name in PAUSE}

    def wait_once(name: str, store: Store) -> float:
        time.sleep(dices[name].uniform(0, PAUSE[name]))
        store(engine, topic, "key")
        stored = time.monotonic()
        return float(reader.recv()) - stored

    def turn(name: str, store: Store, running: Callable[[], AbstractContextManager[object]]) -> Round:
        count = 2 if settings.quick else WAITED[name]
        empty(engine)
        with running():
            wait_once(name, store)  # it fills caches and does not count
            return Round([wait_once(name, store) for _ in range(count)], count)

    with child(read, url, topic) as reader, connect(url, transactional_id=unique("relay"), hold=HOLD) as bridge:
        reader.recv()
        turns = {
            "ours": partial(turn, "ours", core_ours, lambda: bridge.relay(OUTBOX, engine)),
            "by hand": partial(turn, "by hand", core_by_hand, lambda: background(by_hand.run)),
        }
        found = in_turn(turns, settings.rounds)
        with background(by_hand.run), engine.begin() as connection:
            connection.execute(sa.insert(MESSAGES), {"topic": topic, "value": b"stop"})
    pairs = list(zip(found["ours"], found["by hand"], strict=True))
    for part in (0.5, 0.99):
        parts = [quantile(hand.laps, part) / quantile(ours.laps, part) for ours, hand in pairs]
        report.figure(f"by hand / ours, p{100 * part:g}", estimate(parts), "", at_least(10))
    for name, rounds in found.items():
        report.milliseconds(f"{name}, p50", rounds, 0.5)
        of_all = quantile([lap for each in rounds for lap in each.laps], 0.99)
        report.single(f"{name}, p99 of all", 1e3 * of_all, "ms")


def outbox(settings: Settings, broker: str) -> None:
    """Measure an outbox on PostgreSQL whose relay publishes to Kafka, beside an outbox and a relay written by hand.

    By hand there is a table, an INSERT into it in the program's transaction, and a loop with confluent-kafka that
    publishes at least once: select 1,000 rows, produce, flush, delete, commit; a sleep of one second when the table
    was empty.
    """
    with Postgres() as postgres, kafka(settings) as url:
        engine = sa.create_engine(postgres.new_database(), pool_size=16)
        Base.metadata.create_all(engine)
        with engine.connect() as connection:
            database = connection.exec_driver_sql("SHOW server_version").scalar()
        versions = f"psycopg {version('psycopg')}, confluent-kafka {version('confluent-kafka')}"
        print(f"PostgreSQL {database}, SQLAlchemy {sa.__version__}, {versions}")
        measure_storing(settings, engine)
        measure_publishing(settings, engine, url)
        measure_waiting(settings, engine, url)
        engine.dispose()


# --- processor -------------------------------------------------------------------------------------------------------

SIZE = 100
SHIPPED, ONE_BY_ONE = 100_000, 1000  # messages of a round, 500 a transaction and one by one
INSERTS = {
    "postgresql": "INSERT INTO shipments (value) VALUES (%s)",
    "sqlite": "INSERT INTO shipments (value) VALUES (?)",
}

SHIPMENTS = sa.Table(
    "shipments",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)


class Stopwatch:
    """Measures from the first batch to the first one behind `wanted` messages, both before they are handled."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._handled: list[int] = []
        self._began = self._ended = 0.0

    def handle(self, messages: Sequence[object]) -> None:
        self._ended = time.perf_counter()
        self._began = self._began or self._ended
        self._handled.append(len(messages))

    @property
    def done(self) -> bool:
        return sum(self._handled[:-1]) >= self._wanted

    def round(self, engine: sa.Engine) -> Round:
        """Return what was measured. Every message that was handled has to have its row."""
        with engine.begin() as connection:
            stored = connection.scalar(sa.select(sa.func.count()).select_from(SHIPMENTS))
            connection.execute(sa.delete(SHIPMENTS))
        assert stored == sum(self._handled)
        return Round([self._ended - self._began], sum(self._handled[:-1]))


def ship_ours(url: str, topic: str, engine: sa.Engine, wanted: int, at_once: int) -> Round:
    watch, insert = Stopwatch(wanted), INSERTS[engine.dialect.name]

    def ship(messages: Batch, db: sa.Connection) -> None:
        watch.handle(messages)
        db.exec_driver_sql(insert, [(message.value,) for message in messages])
        if watch.done:
            processor.stop()

    with connect(url) as bridge:
        processor: Processor = bridge.processor(
            topic, group=unique("ours"), batch=ship, db=engine, max_messages=at_once
        )
        processor.run()
    return watch.round(engine)


def ship_by_hand(url: str, topic: str, engine: sa.Engine, wanted: int, at_once: int) -> Round:
    watch, insert = Stopwatch(wanted), INSERTS[engine.dialect.name]
    consumer = plain_consumer(url, unique("plain"), FETCHING)
    consumer.subscribe([topic])
    with closing(driver(engine)) as connection:
        cursor = connection.cursor()
        while not watch.done:
            if messages := consumer.consume(at_once, 1):
                watch.handle(messages)
                cursor.executemany(insert, [(message.value(),) for message in messages])
                connection.commit()
                consumer.commit(asynchronous=False)
    consumer.close()
    return watch.round(engine)


def driver(engine: sa.Engine) -> Any:
    """Return a connection of the database's own driver."""
    if engine.dialect.name == "sqlite":
        return sqlite3.connect(str(engine.url.database))
    return psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False))


Way = Callable[[str, str, sa.Engine, int, int], Round]
WAYS: dict[str, Way] = {"by hand": ship_by_hand, "ours": ship_ours}


def measure_shipping(settings: Settings, url: str, topic: str, engine: sa.Engine, wanted: int, at_once: int) -> None:
    report = Report(settings, f"From Kafka to {engine.dialect.name}: {wanted:,} x {SIZE} B, {at_once:,} a transaction")
    turns: dict[str, Turn] = {name: partial(way, url, topic, engine, wanted, at_once) for name, way in WAYS.items()}
    found = in_turn(turns, settings.rounds)
    report.ratio("processor / loop by hand", found["ours"], found["by hand"])
    report.rates(found, "messages")


def sqlite(settings: Settings) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{settings.folder / 'shipments.db'}")
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")  # the file keeps it; each commit reaches the disk
    return engine


def processor_db(settings: Settings, broker: str) -> None:
    """Measure a processor on Kafka that writes to a database (`db=`), beside the loop that programs have by hand.

    By hand there is a loop with confluent-kafka and the database's driver, which does everything at least once:
    consume, insert a row for each message, commit the rows, commit the offsets. The handler of the processor inserts by
    the same statement. Both are members of a group that has never read, and are measured once they receive messages.
    """
    count, few = (2 * AT_ONCE, 5) if settings.quick else (SHIPPED, ONE_BY_ONE)
    with Postgres() as postgres, kafka(settings) as url:
        topic = new_topic(url)
        fill(url, topic, SIZE, count + 10 * AT_ONCE, AT_ONCE)
        print(f"psycopg {version('psycopg')}, SQLAlchemy {sa.__version__}, SQLite {sqlite3.sqlite_version}")
        for engine in (sa.create_engine(postgres.new_database()), sqlite(settings)):
            SHIPMENTS.metadata.create_all(engine)
            measure_shipping(settings, url, topic, engine, count, AT_ONCE)
            measure_shipping(settings, url, topic, engine, few, 1)
            engine.dispose()
