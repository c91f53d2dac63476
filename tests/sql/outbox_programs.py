"""Programs with a relay, which tests run in processes of their own and kill."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import txnbridge
from txnbridge import TxnBridgeError
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
