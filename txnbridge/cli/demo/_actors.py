"""The functions that the processes of `txnbridge demo` run. The demo also prints their source."""

from __future__ import annotations

import secrets
import sqlite3
import time
from contextlib import closing
from typing import Any

import txnbridge
from txnbridge import Decision, HalfTransaction, Outcome
from txnbridge.testing.child_processes import tell

_TOPICS = ("orders", "shipments", "audit", "payments", "ledger", "sales", "deliveries")


class Shop:
    """The names of the demo's topics and groups, with a random suffix, so that a shared broker can be used."""

    def __init__(self) -> None:
        suffix = secrets.token_hex(2)
        self.topics = [f"{name}-{suffix}" for name in _TOPICS]
        self.orders, self.shipments, self.audit, self.payments, self.ledger, self.sales, self.deliveries = self.topics
        self.workers = f"workers-{suffix}"  # the group that works on the orders
        self.till = f"till-{suffix}"  # the transactional id of the one till
        self.desk = f"desk-{suffix}"  # the group of half messages of those who book sales


class CardDeclined(Exception):
    """Raised in the demo for a stolen card."""


def ship(url: str, shop: Shop, card: str) -> None:
    with txnbridge.connect(url) as bridge, bridge.consumer(shop.orders, group=shop.workers) as orders:
        [order] = orders.poll(max_messages=1, timeout=10)
        with bridge.transaction() as txn:
            txn.send(shop.shipments, order.value, key=order.key)
            txn.send(shop.audit, b"shipped " + order.value)
            txn.ack(order)
            if card == "stolen":
                raise CardDeclined


def pay(url: str, shop: Shop) -> None:
    with txnbridge.connect(url) as bridge:
        with bridge.transaction(prepare=True) as txn:
            txn.send(shop.payments, b"30 EUR for order 1")
            txn.send(shop.ledger, b"+30 EUR")
        tell(str(txn.token))  # to the shop; a token can be kept anywhere, such as in a database or a file
        time.sleep(60)  # this process is killed here


def finish(url: str, token: str) -> Outcome:
    with txnbridge.connect(url) as bridge:
        return bridge.commit(token)


def sell(url: str, shop: Shop, what: bytes) -> None:
    with txnbridge.connect(url, transactional_id=shop.till) as bridge:
        with bridge.transaction() as txn:
            txn.send(shop.sales, what)


def sell_by_the_books(url: str, shop: Shop, books: str) -> None:
    with txnbridge.connect(url) as bridge:
        with bridge.half_messages(shop.desk, execute=book, check=lambda id, _: was_booked(books, id)) as sales:
            with sales.transaction(books, timeout=1) as txn:
                txn.send(shop.deliveries, b"deliver a bicycle")


def book(txn: HalfTransaction, books: str) -> Decision:
    # The local work. The half messages are stored already.
    query(books, "INSERT INTO sales VALUES (?, 'a bicycle')", txn.id)
    return Decision.COMMIT


def was_booked(books: str, txn_id: str) -> Decision:
    # Called for a check-back, if the sender did not report the outcome of the work.
    query(books, "INSERT OR IGNORE INTO sales VALUES (?, NULL)", txn_id)
    [[what]] = query(books, "SELECT what FROM sales WHERE id = ?", txn_id)
    return Decision.COMMIT if what else Decision.ABORT


def query(books: str, statement: str, *values: str) -> list[Any]:
    with closing(sqlite3.connect(books)) as database, database:
        return database.execute(statement, values).fetchall()
