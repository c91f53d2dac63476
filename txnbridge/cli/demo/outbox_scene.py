"""The demo's scene with an outbox, and the functions of its processes. It needs SQLAlchemy."""

from __future__ import annotations

import tempfile

import sqlalchemy as sa
from sqlalchemy import Engine, text

import txnbridge
from txnbridge import Bridge
from txnbridge.cli.demo.actors import CardDeclined, Shop
from txnbridge.cli.demo.stage import PATIENCE, Stage
from txnbridge.sql import Outbox


def save(engine: Engine, outbox: Outbox, shop: Shop, order: str, card: str) -> None:
    with engine.begin() as database:
        database.execute(text("INSERT INTO orders VALUES (:order)"), {"order": order})
        outbox.send(database, shop.events, order.encode())
        if card == "stolen":
            raise CardDeclined


def publish(url: str, database: str) -> None:
    with txnbridge.connect(url) as bridge:
        bridge.relay(Outbox("shop"), database).run()


def play(stage: Stage, bridge: Bridge, marker: bytes) -> None:
    stage.title(
        "6. Saved and published",
        "An order is saved in a database, and its event is a row beside it, in one transaction.\n"
        "A relay publishes the row. It is killed in the middle, and another one goes on.",
    )
    stage.code(save, publish)
    shop, outbox = stage.shop, Outbox("shop")
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/shop.db"
        engine = sa.create_engine(database)
        outbox.create(engine)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders(what TEXT)"))
        save(engine, outbox, shop, "order 7", "good")
        try:
            save(engine, outbox, shop, "order 8", "stolen")
        except CardDeclined:
            stage.step("shop", "has saved order 7, and nothing of order 8: CardDeclined")

        def seen() -> list[object]:
            rows = sa.select(sa.func.count()).select_from(outbox.rows)
            with engine.connect() as connection:
                return [connection.scalar(rows), [message.value for message in bridge.read(shop.events, 100)]]

        relay = stage.actor(publish, stage.url, database, pause="resolve/before")
        relay.stopped(PATIENCE)
        stage.step(f"relay {relay.pid}", "has decided to publish the row, and is about to commit")
        relay.kill()
        stage.step(f"relay {relay.pid}", "kill -9")
        stage.check(
            "the row is still there, nobody sees the message",
            "looked into the outbox, read the topic",
            seen=seen,
            expected=[1, []],
        )
        with bridge.relay(outbox, engine, takeover=0):
            stage.step("shop", "another relay finds the token of the transaction beside the row")
            stage.check(
                "it commits the transaction, and deletes the row",
                "looked into the outbox, read the topic",
                seen=seen,
                expected=[0, [b"order 7"]],
                later=True,
            )
        with bridge.transaction() as txn:
            txn.send(shop.events, marker)
        stage.check(
            "order 7 was published once, and order 8 never",
            "read up to a marker sent later",
            seen=lambda: seen()[1],
            expected=[b"order 7", marker],
        )
        engine.dispose()
