"""The scenes of `txnbridge demo`. They use only the public interface, so that they run on any broker."""

from __future__ import annotations

import importlib.util
import os
import socket
import sqlite3
import tempfile
from contextlib import closing
from typing import Any

from txnbridge import Bridge, Capability, Fenced, Outcome, TokenState
from txnbridge.cli.demo.actors import (
    CardDeclined,
    book,
    finish,
    on_bridge,
    pay,
    pay_and_wait,
    sell,
    sell_by_the_books,
    ship,
    ship_and_charge,
    was_booked,
)
from txnbridge.cli.demo.stage import PATIENCE, Stage

MARKER = b"marker"
# The limit of a read: more messages than any of the demo's topics has, so that unexpected messages are seen, too.
_ALL = 100


def values(bridge: Bridge, *topics: str) -> list[list[bytes]]:
    """Return, for each topic, the values of the messages that a reader sees now."""
    return [[message.value for message in bridge.read(topic, _ALL)] for topic in topics]


def send_marker(bridge: Bridge, *topics: str) -> None:
    """Commit a message to each topic after all earlier ones: a reader that sees it has passed the earlier ones."""
    with bridge.transaction() as txn:
        for topic in topics:
            txn.send(topic, MARKER)


def next_order(stage: Stage, bridge: Bridge) -> bytes | None:
    """Return the next order for the workers' group without acknowledging it, so that it stays the next one."""
    with bridge.consumer(stage.shop.orders, group=stage.shop.workers) as orders:
        batch = orders.poll(max_messages=1, timeout=PATIENCE)
        return batch[0].value if batch else None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_or_nothing(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "1. All or nothing",
        "A worker takes an order, ships it, notes it for the audit, and acknowledges it.\n"
        "Three things in one transaction: they happen together, or not at all.",
    )
    stage.code(ship)
    shop = stage.shop
    with bridge.transaction() as txn:
        txn.send_many(shop.orders, [b"order 1", b"order 2"])
    stage.step("shop", "orders 1 and 2 come in")
    worker = stage.actor(on_bridge, ship, stage.url, shop, pause="commit/before")
    worker.stopped(PATIENCE)
    name = f"worker {worker.pid}"
    stage.step(name, "has sent everything for order 1, and is about to commit")
    shipments, audit = values(bridge, shop.shipments, shop.audit)
    stage.step("reader", f"sees {len(shipments)} shipments and {len(audit)} audit entries")
    stage.check(
        "before the commit nobody sees any of it",
        "read both topics while it was open",
        seen=[shipments, audit],
        expected=[[], []],
    )
    worker.resume(PATIENCE)
    worker.result(PATIENCE)
    stage.step(name, "committed")
    stage.check(
        "after it both are there, each exactly once",
        "read both topics from the start",
        seen=lambda: values(bridge, shop.shipments, shop.audit),
        expected=[[b"order 1"], [b"shipped order 1"]],
    )
    stage.check(
        "order 1 is done and does not come again",
        "the group's next one is order 2",
        seen=next_order(stage, bridge),
        expected=b"order 2",
    )


def nobody_sees_an_abort(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "2. What is aborted, nobody sees",
        "Order 2 is shipped, noted and acknowledged. Then the card is declined.\n"
        "The exception ends the block, and all three are undone.",
    )
    stage.code(ship_and_charge)
    shop = stage.shop
    worker = stage.actor(on_bridge, ship_and_charge, stage.url, shop)
    try:
        worker.result(PATIENCE)
    except CardDeclined:
        stage.step(f"worker {worker.pid}", "CardDeclined: the transaction is aborted")
    send_marker(bridge, shop.shipments, shop.audit)
    stage.step("shop", "puts a marker behind it in both topics")
    stage.check(
        "nothing of order 2 was shipped or noted",
        "read up to a marker sent later",
        seen=lambda: values(bridge, shop.shipments, shop.audit),
        expected=[[b"order 1", MARKER], [b"shipped order 1", MARKER]],
    )
    stage.check(
        "order 2 is not lost: it comes again",
        "the group's next one is order 2",
        seen=next_order(stage, bridge),
        expected=b"order 2",
    )


def killed_after_prepare(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "3. Killed between prepare and commit",
        "A prepared transaction is durable and invisible, and a token names it.\n"
        "Whoever has the token can finish it, whatever happened to who began it.",
    )
    stage.code(pay, finish)
    shop = stage.shop
    cashier = stage.actor(on_bridge, pay_and_wait, stage.url, shop)
    token = cashier.told(PATIENCE)
    name = f"cashier {cashier.pid}"
    stage.step(name, f"prepared, with the token {token[:20]}...")
    cashier.kill()
    stage.step(name, "kill -9")
    stage.check(
        "the process that began it is dead",
        "its process id is gone",
        seen=is_alive(cashier.pid),
        expected=False,
    )
    stage.check(
        "the transaction outlived it, still unseen",
        "its status; read both topics",
        seen=[bridge.status(token).state, *values(bridge, shop.payments, shop.ledger)],
        expected=[TokenState.PREPARED, [], []],
    )
    rescuer = stage.actor(on_bridge, finish, stage.url, token)
    outcome = rescuer.result(PATIENCE)
    stage.step(f"rescuer {rescuer.pid}", f"bridge.commit(token): {outcome.value}")
    once = [[b"30 EUR for order 1"], [b"+30 EUR"]]
    stage.check(
        "another process commits it: nothing lost",
        "read both topics from the start",
        seen=lambda: [outcome, *values(bridge, shop.payments, shop.ledger)],
        expected=[Outcome.COMMITTED, *once],
    )
    again = bridge.commit(token)
    stage.step("shop", f"bridge.commit(token) once more: {again.value}")
    stage.check(
        "to commit it twice changes nothing",
        "committed again, read both topics",
        seen=[again, *values(bridge, shop.payments, shop.ledger)],
        expected=[Outcome.COMMITTED, *once],
    )


def zombie_is_fenced(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "4. A zombie is shut out",
        "A till freezes in the middle of a sale, so another takes over by the same name.\n"
        "Then the first wakes up and goes on as if nothing had happened.",
    )
    stage.code(sell)
    shop = stage.shop
    old = stage.actor(sell, stage.url, shop, b"sold by the old till", pause="commit/before")
    old.stopped(PATIENCE)
    stage.step(f"old till {old.pid}", "is about to commit its sale, and freezes (kill -STOP)")
    new = stage.actor(sell, stage.url, shop, b"sold by the new till")
    new.result(PATIENCE)
    stage.step(f"new till {new.pid}", "takes over the transactional id, sells, commits")
    old.resume(PATIENCE)
    refusal = None
    try:
        old.result(PATIENCE)
    except Fenced as error:
        refusal = error
    stage.step(f"old till {old.pid}", "wakes up and goes on to commit")
    stage.step(f"old till {old.pid}", f"Fenced: {refusal}" if refusal else "has committed it")
    stage.check(
        "the commit of the old till is refused",
        "it was told Fenced",
        seen=type(refusal),
        expected=Fenced,
    )
    stage.check(
        "it is told who took over",
        "the error names its host and pid",
        seen=refusal and refusal.newer,
        expected=f"{socket.gethostname()} pid {new.pid}",
    )
    send_marker(bridge, shop.sales)
    stage.step("shop", "puts a marker behind it")
    stage.check(
        "only the sale of the new till counts",
        "read up to a marker sent later",
        seen=lambda: values(bridge, shop.sales),
        expected=[[b"sold by the new till", MARKER]],
    )


def killed_between_database_and_broker(stage: Stage, bridge: Bridge) -> None:
    if not bridge.capabilities[Capability.HALF_MESSAGES]:
        return
    stage.title(
        "5. A shop dies between its database and its broker",
        "A sale is booked in a database, and a delivery is ordered by a message.\n"
        "The message is stored first, unseen; if the seller dies, others are asked later.",
    )
    stage.code(book, was_booked)
    shop = stage.shop
    with tempfile.TemporaryDirectory() as folder:
        books = f"{folder}/books.db"
        query(books, "CREATE TABLE sales(id TEXT PRIMARY KEY, what TEXT)")
        seller = stage.actor(on_bridge, sell_by_the_books, stage.url, shop, books, pause="half.end/before")
        seller.stopped(PATIENCE)
        name = f"seller {seller.pid}"
        stage.step(name, "has booked the sale, and is about to tell the broker")
        seller.kill()
        stage.step(name, "kill -9")
        stage.check(
            "the database has the sale, nobody sees the message",
            "looked into the database, read the topic",
            seen=[query(books, "SELECT what FROM sales"), *values(bridge, shop.deliveries)],
            expected=[[("a bicycle",)], []],
        )
        with bridge.resolver(shop.desk, check=lambda id, _: was_booked(books, id)):
            stage.step("shop", "another process is asked what became of the sale")
            stage.check(
                "the check-back finishes the sale",
                "read the topic from the start",
                seen=lambda: values(bridge, shop.deliveries),
                expected=[[b"deliver a bicycle"]],
                later=True,
            )
        send_marker(bridge, shop.deliveries)
        stage.check(
            "database and broker agree: one sale, one delivery",
            "looked into the database, read up to a marker",
            seen=lambda: [query(books, "SELECT what FROM sales"), *values(bridge, shop.deliveries)],
            expected=[[("a bicycle",)], [b"deliver a bicycle", MARKER]],
        )


def killed_while_publishing(stage: Stage, bridge: Bridge) -> None:
    if importlib.util.find_spec("sqlalchemy") is not None:
        from txnbridge.cli.demo import outbox_scene

        outbox_scene.play(stage, bridge, MARKER)


def query(books: str, statement: str) -> list[Any]:
    with closing(sqlite3.connect(books)) as database, database:
        return database.execute(statement).fetchall()


STORY = (
    all_or_nothing,
    nobody_sees_an_abort,
    killed_after_prepare,
    zombie_is_fenced,
    killed_between_database_and_broker,
    killed_while_publishing,
)
