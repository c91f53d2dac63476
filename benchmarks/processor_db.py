"""A processor on Kafka that writes to a database (`db=`), beside the loop that programs have by hand.

By hand there is a loop with confluent-kafka and the database's driver, which does everything at least once: consume,
insert a row for each message, commit the rows, commit the offsets. The handler of the processor inserts by the same
statement. Both are members of a group that has never read, and are measured once they receive messages.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from typing import Any

import psycopg
import sqlalchemy as sa

from benchmarks._harness import Report, Round, Settings, Turn, in_turn, unique
from benchmarks._kafka import FETCHING, new_topic, plain_consumer
from benchmarks._kafka import broker as kafka
from benchmarks._ours import AT_ONCE, fill
from tests.sql.postgres import Postgres
from txnbridge import Batch, Processor, connect

SIZE = 100
MESSAGES = 100_000
ONE_BY_ONE = 1000
INSERTS = {
    "postgresql": "INSERT INTO shipments (value) VALUES (%s)",
    "sqlite": "INSERT INTO shipments (value) VALUES (?)",
}

metadata = sa.MetaData()
shipments = sa.Table(
    "shipments",
    metadata,
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
            stored = connection.scalar(sa.select(sa.func.count()).select_from(shipments))
            connection.execute(sa.delete(shipments))
        assert stored == sum(self._handled)
        return Round([self._ended - self._began], sum(self._handled[:-1]))


def ours(url: str, topic: str, engine: sa.Engine, wanted: int, at_once: int) -> Round:
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


def by_hand(url: str, topic: str, engine: sa.Engine, wanted: int, at_once: int) -> Round:
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
WAYS: dict[str, Way] = {"by hand": by_hand, "ours": ours}


def measure_with(settings: Settings, url: str, topic: str, engine: sa.Engine, wanted: int, at_once: int) -> None:
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


def measure(settings: Settings, broker: str) -> None:
    count, few = (2 * AT_ONCE, 5) if settings.quick else (MESSAGES, ONE_BY_ONE)
    with Postgres() as postgres, kafka(settings) as url:
        topic = new_topic(url)
        fill(url, topic, SIZE, count + 10 * AT_ONCE, AT_ONCE)
        print(f"psycopg {version('psycopg')}, SQLAlchemy {sa.__version__}, SQLite {sqlite3.sqlite_version}")
        for engine in (sa.create_engine(postgres.new_database()), sqlite(settings)):
            metadata.create_all(engine)
            measure_with(settings, url, topic, engine, count, AT_ONCE)
            measure_with(settings, url, topic, engine, few, 1)
            engine.dispose()
