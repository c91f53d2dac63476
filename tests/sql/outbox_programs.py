"""Helpers of the tests of databases, and programs with a relay, which run in their own processes and are killed."""

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import sqlalchemy as sa

import txnbridge
from txnbridge import TxnBridgeError
from txnbridge.sql import Outbox
from txnbridge.testing import tell

TOPIC = "orders"


class Shop(NamedTuple):
    """A broker and a database with an outbox."""

    url: str
    database: str


def scalars(database: str, query: sa.Select[Any]) -> list[Any]:
    engine = sa.create_engine(database, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return list(connection.scalars(query))


def confuse_names(database: str, *tables: sa.Table) -> None:
    """Make tables that take 'a' and 'A' for the same, as a hand or an older version may have made them."""
    engine = sa.create_engine(database, poolclass=sa.NullPool)
    with engine.begin() as connection:
        for table in tables:
            made = str(sa.schema.CreateTable(table).compile(dialect=engine.dialect))
            if engine.dialect.name == "sqlite":
                made = re.sub(r"VARCHAR\(\d+\)", "VARCHAR COLLATE NOCASE", made)
            connection.exec_driver_sql(made.replace("utf8mb4_nopad_bin", "utf8mb4_general_ci"))


def outbox() -> Outbox:
    return Outbox("shop")


def publish_all(shop: Shop) -> None:
    """Publish until nothing waits, as a relay that takes over at once."""
    with txnbridge.connect(shop.url, timeout=4) as bridge:
        relay = bridge.relay(outbox(), shop.database, takeover=0, batch=3, hold=0)
        thread = threading.Thread(target=relay.run)
        thread.start()
        while thread.is_alive() and relay.lag:
            thread.join(0.01)
        relay.stop()
        thread.join()


def relay_until_killed(shop: Shop, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Publish until it is killed, also after errors; `settings` are those of the relay."""
    told = False
    while True:
        with suppress(TxnBridgeError), txnbridge.connect(shop.url, timeout=10) as bridge:
            relay = bridge.relay(outbox(), shop.database, **settings)
            if not told:
                tell("runs")
                told = True
            relay.run()
        time.sleep(0.2)
