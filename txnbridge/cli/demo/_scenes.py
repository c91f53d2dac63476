"""The scenes of `txnbridge demo`. They use only the public interface, so that they run on any broker."""

from __future__ import annotations

import socket
import tempfile
from contextlib import suppress

from txnbridge import Bridge, Capability, Fenced, Outcome, TokenState
from txnbridge.cli.demo._actors import CardDeclined, book, finish, pay, query, sell, sell_by_the_books, ship, was_booked
from txnbridge.cli.demo._stage import PATIENCE, Stage

MARKER = b"marker"
# The limit of a read: more messages than any of the demo's topics has, so that unexpected messages are seen, too.
_ALL = 100


def values(bridge: Bridge, *topics: str) -> list[list[bytes]]:
    """Return, for each topic, the values of the messages that a reader sees now."""
    return [[message.value for message in bridge.read(topic, _ALL)] for topic in topics]


def send_marker(bridge: Bridge, *topics: str) -> None:
    """Commit a message to each topic after all earlier ones: a reader that gets it has passed the earlier ones."""
    with bridge.transaction() as txn:
        for topic in topics:
            txn.send(topic, MARKER)


def all_or_nothing(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "1. All or nothing",
        "A worker takes an order, ships it, notes it for the audit, and acknowledges it.\n"
        "Three things in one transaction: they happen together, or not at all.",
        ship,
    )
    shop = stage.shop
    with bridge.transaction() as txn:
        txn.send_many(shop.orders, [b"order 1", b"order 2"])
    stage.step("shop", "orders 1 and 2 come in")
    worker, name = stage.actor("worker", ship, shop, "good", pause="commit/before")
    worker.stopped(PATIENCE)
    stage.step(name, "has sent everything for order 1, and is about to commit")
    seen = values(bridge, shop.shipments, shop.audit)
    stage.check("before the commit nobody sees any of it", "read both topics while it was open", seen, [[], []])
    worker.resume(PATIENCE)
    worker.result(PATIENCE)
    stage.step(name, "committed")
    stage.check(
        "after it both are there, each exactly once",
        "read both topics from the start",
        lambda: values(bridge, shop.shipments, shop.audit),
        [[b"order 1"], [b"shipped order 1"]],
    )
    worker, name = stage.actor("worker", ship, shop, "stolen")
    with suppress(CardDeclined):
        worker.result(PATIENCE)
    stage.step(name, "has done the same for order 2; CardDeclined aborts the transaction")
    send_marker(bridge, shop.shipments, shop.audit)
    stage.step("shop", "puts a marker behind it in both topics")
    stage.check(
        "nothing of order 2 was shipped or noted",
        "read up to a marker sent later",
        lambda: values(bridge, shop.shipments, shop.audit),
        [[b"order 1", MARKER], [b"shipped order 1", MARKER]],
    )
    with bridge.consumer(shop.orders, group=shop.workers) as orders:
        batch = orders.poll(max_messages=1, timeout=PATIENCE)
    came = [order.value for order in batch]
    stage.check("order 1 is done, and order 2 comes again", "the group's next one is order 2", came, [b"order 2"])


def killed_after_prepare(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "2. Killed between prepare and commit",
        "A prepared transaction is durable and invisible, and a token names it.\n"
        "Whoever has the token can finish it, whatever happened to who began it.",
        pay,
        finish,
    )
    shop = stage.shop
    cashier, name = stage.actor("cashier", pay, shop)
    token = cashier.told(PATIENCE)
    stage.step(name, f"prepared, with the token {token[:20]}...")
    stage.kill(cashier, name)
    stage.check(
        "the transaction outlived it, still unseen",
        "its status; read both topics",
        [bridge.status(token).state, *values(bridge, shop.payments, shop.ledger)],
        [TokenState.PREPARED, [], []],
    )
    rescuer, name = stage.actor("rescuer", finish, token)
    outcome = rescuer.result(PATIENCE)
    stage.step(name, f"bridge.commit(token): {outcome.value}")
    once = [Outcome.COMMITTED, [b"30 EUR for order 1"], [b"+30 EUR"]]
    stage.check(
        "another process commits it: nothing lost",
        "read both topics from the start",
        lambda: [outcome, *values(bridge, shop.payments, shop.ledger)],
        once,
    )
    again = bridge.commit(token)
    stage.step("shop", f"bridge.commit(token) once more: {again.value}")
    seen = [again, *values(bridge, shop.payments, shop.ledger)]
    stage.check("to commit it twice changes nothing", "committed again, read both topics", seen, once)


def zombie_is_fenced(stage: Stage, bridge: Bridge) -> None:
    stage.title(
        "3. A zombie is shut out",
        "A till freezes in the middle of a sale, so another takes over by the same name.\n"
        "Then the first wakes up and goes on as if nothing had happened.",
        sell,
    )
    shop = stage.shop
    old, name = stage.actor("old till", sell, shop, b"sold by the old till", pause="commit/before")
    old.stopped(PATIENCE)
    stage.step(name, "is about to commit its sale, and freezes (kill -STOP)")
    new, new_name = stage.actor("new till", sell, shop, b"sold by the new till")
    new.result(PATIENCE)
    stage.step(new_name, "takes over the transactional id, sells, commits")
    old.resume(PATIENCE)
    winner = None
    try:
        old.result(PATIENCE)
    except Fenced as error:
        stage.step(name, f"wakes up, goes on to commit, and is told Fenced: {error}")
        winner = error.newer
    stage.check(
        "the commit of the old till is refused",
        "it was told Fenced, and by which host and pid",
        winner,
        f"{socket.gethostname()} pid {new.pid}",
    )
    send_marker(bridge, shop.sales)
    stage.step("shop", "puts a marker behind it")
    stage.check(
        "only the sale of the new till counts",
        "read up to a marker sent later",
        lambda: values(bridge, shop.sales),
        [[b"sold by the new till", MARKER]],
    )


def killed_between_database_and_broker(stage: Stage, bridge: Bridge) -> None:
    if not bridge.capabilities[Capability.HALF_MESSAGES]:
        return
    stage.title(
        "4. A shop dies between its database and its broker",
        "A sale is booked in a database, and a delivery is ordered by a message.\n"
        "The message is stored first, unseen; if the seller dies, others are asked later.",
        book,
        was_booked,
    )
    shop = stage.shop
    with tempfile.TemporaryDirectory() as folder:
        books = f"{folder}/books.db"
        query(books, "CREATE TABLE sales(id TEXT PRIMARY KEY, what TEXT)")

        def seen() -> list[object]:
            return [query(books, "SELECT what FROM sales"), *values(bridge, shop.deliveries)]

        seller, name = stage.actor("seller", sell_by_the_books, shop, books, pause="half.end/before")
        seller.stopped(PATIENCE)
        stage.step(name, "has booked the sale, and is about to tell the broker")
        stage.kill(seller, name)
        stage.check(
            "the database has the sale, nobody sees the message",
            "looked into the database, read the topic",
            seen(),
            [[("a bicycle",)], []],
        )
        with bridge.resolver(shop.desk, check=lambda id, _: was_booked(books, id)):
            stage.step("shop", "another process is asked what became of the sale")
            stage.check(
                "the check-back finishes the sale",
                "read the topic from the start",
                seen,
                [[("a bicycle",)], [b"deliver a bicycle"]],
                later=True,
            )
        send_marker(bridge, shop.deliveries)
        stage.check(
            "database and broker agree: one sale, one delivery",
            "looked into the database, read up to a marker",
            seen,
            [[("a bicycle",)], [b"deliver a bicycle", MARKER]],
        )


STORY = (all_or_nothing, killed_after_prepare, zombie_is_fenced, killed_between_database_and_broker)
