"""Programs with a relay, which tests run in processes of their own and kill."""

from __future__ import annotations

import signal
import sys
import threading
from typing import NamedTuple

import sqlalchemy as sa

import txnbridge
from txnbridge.sql import Outbox, Relay
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


def relay_until_killed(shop: Shop, **settings: float) -> None:
    """Publish until SIGTERM."""
    with txnbridge.connect(shop.url, timeout=10) as bridge, sa.create_engine(shop.database).connect():
        relay: Relay = bridge.relay(outbox(), shop.database, **settings)  # type: ignore[arg-type]
        tell("runs")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        relay.run()
