"""The functions that the processes of `txnbridge demo` run. The demo also prints their source."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import txnbridge
from txnbridge import Bridge, Decision, HalfTransaction, Message, Outcome
from txnbridge.testing.child_processes import tell


class Shop:
    """The names of the demo's topics and groups, with a unique suffix, so that a shared broker can be used."""

    def __init__(self, suffix: str) -> None:
        self.orders: str = f"orders-{suffix}"
        self.shipments: str = f"shipments-{suffix}"
        self.audit: str = f"audit-{suffix}"
        self.payments: str = f"payments-{suffix}"
        self.ledger: str = f"ledger-{suffix}"
        self.sales: str = f"sales-{suffix}"
        self.deliveries: str = f"deliveries-{suffix}"
        self.events: str = f"events-{suffix}"
        self.workers: str = f"workers-{suffix}"  # the group that works on the orders
        self.till: str = f"till-{suffix}"  # the transactional id of the one till
        self.desk: str = f"desk-{suffix}"  # the group of half messages of those who book sales

    @property
    def topics(self) -> list[str]:
        work = [self.orders, self.shipments, self.audit, self.payments, self.ledger]
        return [*work, self.sales, self.deliveries, self.events]


class CardDeclined(Exception):
    """Raised by the demo's payment service when it declines a card."""


def charge(order: Message) -> None:
    raise CardDeclined


# --- the code that is shown ------------------------------------------------------------------------------------------


def ship(bridge: Bridge, shop: Shop) -> None:
    with bridge.consumer(shop.orders, group=shop.workers) as orders:
        [order] = orders.poll(max_messages=1, timeout=10)
        with bridge.transaction() as txn:
            txn.send(shop.shipments, order.value, key=order.key)
            txn.send(shop.audit, b"shipped " + order.value)
            txn.ack(order)


def ship_and_charge(bridge: Bridge, shop: Shop) -> None:
    with bridge.consumer(shop.orders, group=shop.workers) as orders:
        [order] = orders.poll(max_messages=1, timeout=10)
        with bridge.transaction() as txn:
            txn.send(shop.shipments, order.value, key=order.key)
            txn.send(shop.audit, b"shipped " + order.value)
            txn.ack(order)
            charge(order)  # raises CardDeclined


def pay(bridge: Bridge, shop: Shop) -> str:
    with bridge.transaction(prepare=True) as txn:
        txn.send(shop.payments, b"30 EUR for order 1")
        txn.send(shop.ledger, b"+30 EUR")
    return str(txn.token)  # keep it anywhere: in a database, in a file


def finish(bridge: Bridge, token: str) -> Outcome:
    return bridge.commit(token)


def sell(url: str, shop: Shop, what: bytes) -> None:
    with txnbridge.connect(url, transactional_id=shop.till) as bridge:
        with bridge.transaction() as txn:
            txn.send(shop.sales, what)


def book(txn: HalfTransaction, books: str) -> Decision:
    # The local work. The half messages are stored already.
    with closing(sqlite3.connect(books)) as database, database:
        database.execute("INSERT INTO sales VALUES (?, 'a bicycle')", (txn.id,))
    return Decision.COMMIT


def was_booked(books: str, txn_id: str) -> Decision:
    # Called for a check-back, if the sender did not report the outcome of the work.
    with closing(sqlite3.connect(books)) as database, database:
        database.execute("INSERT OR IGNORE INTO sales VALUES (?, NULL)", (txn_id,))
        found = database.execute("SELECT what FROM sales WHERE id = ?", (txn_id,))
        [what] = found.fetchone()
    return Decision.COMMIT if what else Decision.ABORT


# --- main functions of the processes ---------------------------------------------------------------------------------


def on_bridge(function: Callable[..., Any], url: str, *args: object) -> Any:
    with txnbridge.connect(url) as bridge:
        return function(bridge, *args)


def sell_by_the_books(bridge: Bridge, shop: Shop, books: str) -> None:
    """Sell with a half message; the demo kills this process after the database's commit, before the broker's."""
    with bridge.half_messages(shop.desk, execute=book, check=lambda id, _: was_booked(books, id)) as sales:
        with sales.transaction(books, timeout=1) as txn:
            txn.send(shop.deliveries, b"deliver a bicycle")


def pay_and_wait(bridge: Bridge, shop: Shop) -> None:
    """Prepare a payment, send its token to the demo's main process, and wait to be killed."""
    tell(pay(bridge, shop))
    time.sleep(60)  # not longer, because this process must end even if the demo's main process was killed
