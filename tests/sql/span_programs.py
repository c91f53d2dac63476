"""The program of the tests of spans with a database, which runs in a process of its own."""

from contextlib import suppress
from typing import NamedTuple

import sqlalchemy as sa

import txnbridge
from tests.in_time import wait_until
from txnbridge import OutcomeUnknown, TransactionAborted


class Shop(NamedTuple):
    """The addresses of brokers and a database, `hold` for `sell_one`, `topic` and a span's `timeout` for `sell_all`."""

    first: str
    second: str
    database: str
    hold: float | None = None
    topic: str = "sales"
    timeout: float = 3


def rows(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return sorted(connection.scalars(sa.text("SELECT number FROM sales")))


def sell_all(shop: Shop) -> None:
    """Write the rows 0 and 1 that are missing, each with a message on both brokers, and wait for the messages."""
    engine = sa.create_engine(shop.database)
    with txnbridge.connect(shop.first) as first, txnbridge.connect(shop.second) as second:
        for number in range(2):
            with suppress(TransactionAborted, OutcomeUnknown):
                if number not in rows(engine):
                    with txnbridge.spanning(first, second, db=engine, timeout=shop.timeout) as span:
                        span.db.exec_driver_sql(f"INSERT INTO sales VALUES ({number})")
                        for bridge in (first, second):
                            span.on(bridge).send(shop.topic, b"%d" % number)
        with txnbridge.spanning(first, second, db=engine):
            pass  # its resolver ends what an earlier run has left
        wait_until(lambda: all(len(bridge.read(shop.topic, 9)) >= 2 for bridge in (first, second)), 160)
    engine.dispose()


def sell_one(shop: Shop) -> None:
    """Write the row 0 with a message on both brokers."""
    engine = sa.create_engine(shop.database)
    with txnbridge.connect(shop.first) as first, txnbridge.connect(shop.second) as second:
        with txnbridge.spanning(first, second, db=engine, timeout=1, hold=shop.hold) as span:
            span.db.exec_driver_sql("INSERT INTO sales VALUES (0)")
            for bridge in (first, second):
                span.on(bridge).send("sales", b"0")
