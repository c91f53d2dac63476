"""Programs with a relay, which tests run in processes of their own and kill."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import sqlalchemy as sa

import txnbridge
from txnbridge import Abort, TxnBridgeError
from txnbridge.sql import Outbox
from txnbridge.testing import tell

TOPIC = "orders"


class Shop(NamedTuple):
    """A broker and a database with an outbox."""

    url: str
    database: str


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


SENT = sa.Table("sent", sa.MetaData(), sa.Column("value", sa.String(100), primary_key=True))


def shop_until_killed(shop: Shop, name: str, seed: int) -> None:
    """Store orders and their messages; the table `sent` has the value of each message that has to be published.

    The messages of a key are numbered as their transactions commit.
    """
    chance, numbers, box = random.Random(f"{name} {seed}"), itertools.count(), outbox()
    engine = sa.create_engine(shop.database)
    tell("runs")
    while True:
        with suppress(sa.exc.SQLAlchemyError, Abort), engine.begin() as connection:
            for _ in range(chance.choice((1, 1, 2, 5, 50))):
                value = f"{name}/{next(numbers)}"
                key = chance.choice((None, name, f"{name} too"))
                padding = "|" * int(1_000_000 ** chance.random()) if chance.random() < 0.1 else ""
                box.send(connection, TOPIC, (value + padding).encode(), key=key)
                connection.execute(SENT.insert().values(value=value))
            if chance.random() < 0.2:
                raise Abort
        time.sleep(chance.uniform(0, 0.05))
