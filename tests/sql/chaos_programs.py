"""Programs that save rows and publish their messages in three ways, which tests run in processes and kill."""

import itertools
import os
import random
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

import sqlalchemy as sa

import txnbridge
from tests.sql.outbox_programs import Shop, outbox, relay_until_killed
from txnbridge import Abort, Decision, InvalidState, TxnBridgeError
from txnbridge.cli import main

TOPICS = {"orders": 3, "audit": 1}
KEYS = (b"a", b"b", b"c")
TIMEOUT = 4.0  # of a transaction; a process may be paused for longer, and then a resolver decides

# Steps of txnbridge, before or behind which processes are killed or paused.
STEPS: dict[str, tuple[str, ...]] = {
    "outbox": ("prepare", "outbox.store", "resolve", "outbox.delete"),
    "half": ("half.store", "half.check", "half.end", "half.open"),
}
STEPS["db"] = (*STEPS["half"], "database.barrier", "database.commit")

metadata = sa.MetaData()
SOLD = sa.Table(
    "sold",
    metadata,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("topic", sa.String(40)),
    sa.Column("key", sa.LargeBinary),
    sa.Column("size", sa.Integer),  # of the message's value; -1 without one
    sa.Column("number", sa.Integer),  # the key's messages are numbered as their transactions commit
)
DECIDED = sa.Table(
    "decided", metadata, sa.Column("txn", sa.String(200), primary_key=True), sa.Column("decision", sa.String(6))
)
NUMBERS = sa.Table("numbers", metadata, sa.Column("key", sa.String(40), primary_key=True), sa.Column("n", sa.Integer))


def create_tables(engine):
    metadata.create_all(engine)
    outbox().create(engine)
    with engine.begin() as connection:
        for topic, key in itertools.product(TOPICS, KEYS):
            connection.execute(NUMBERS.insert().values(key=f"{topic} {key.decode()}", n=0))


class Place(NamedTuple):
    """The place where the processes of an attack work, and the way in which they save rows and publish."""

    way: str
    url: str
    database: str
    outcomes: str  # the file in which writers note what they were told

    def connect(self):
        return txnbridge.connect(self.url, timeout=8, application="shop")


def set_clock(ahead):
    """Set the clock of this process, whose seconds go on as before."""
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = (lambda: now() + ahead), (lambda: now_ns() + ahead * 1_000_000_000)


def write_until_killed(place, name, ahead):
    """Save rows and publish their messages in the place's way, a random number in each transaction."""
    set_clock(ahead)
    os.environ["SHOP_DATABASE"] = place.database
    chance, names = random.Random(name), (f"{name}/{number}" for number in itertools.count())
    while True:
        with suppress(TxnBridgeError), ExitStack() as stack:
            write = WAYS[place.way](place, chance, stack)
            while True:
                sales = [_sale(chance, next(names)) for _ in range(chance.choice((0, 1, 1, 2, 5, 40)))]
                # A transaction takes the locks of keys in one order.
                txn = write(sorted(sales, key=lambda sale: (sale["topic"], sale["key"] or b"")))
                if txn is not None and sales:
                    with open(place.outcomes, "a") as file:
                        file.write(f"{sales[0]['name']} {txn.outcome.value}\n")
                time.sleep(chance.uniform(0, 0.1))
        time.sleep(0.2)


def _sale(chance, name):
    body, key = name.encode(), chance.choice((None, *KEYS))
    kind = chance.random()
    if kind < 0.05:
        body, key = chance.choice((None, b"")), body
    elif kind < 0.08:
        body += b"|" * int(1_000_000 ** chance.uniform(0.5, 1))
    return {"name": name, "topic": chance.choice(list(TOPICS)), "key": key, "body": body}


def _save(connection, sale, number=None):
    size = -1 if sale["body"] is None else len(sale["body"])
    row = {name: sale[name] for name in ("name", "topic", "key")}
    connection.execute(SOLD.insert().values(**row, size=size, number=number))


def _pause_or_abort(chance):
    if chance.random() < 0.02:
        time.sleep(chance.uniform(0, 1.5 * TIMEOUT))
    if chance.random() < 0.15:
        raise Abort


def by_outbox(place, chance, stack):
    engine, box = sa.create_engine(place.database), outbox()
    stack.callback(engine.dispose)

    def write(sales):
        with suppress(sa.exc.SQLAlchemyError, Abort), engine.begin() as connection:
            for sale in sales:
                box.send(connection, sale["topic"], sale["body"], key=sale["key"])
                _save(connection, sale, _next_number(connection, sale) if sale["key"] in KEYS else None)
            _pause_or_abort(chance)

    return write


def _next_number(connection, sale):
    mine = NUMBERS.c.key == f"{sale['topic']} {sale['key'].decode()}"
    connection.execute(NUMBERS.update().where(mine).values(n=NUMBERS.c.n + 1))
    return connection.scalar(sa.select(NUMBERS.c.n).where(mine))


def by_half_messages(place, chance, stack):
    engine = sa.create_engine(place.database)
    stack.callback(engine.dispose)

    def book(txn, sales):
        with engine.begin() as connection:
            connection.execute(DECIDED.insert().values(txn=txn.id, decision="commit"))
            for sale in sales:
                _save(connection, sale)
            _pause_or_abort(chance)
        return Decision.COMMIT

    halves = stack.enter_context(stack.enter_context(place.connect()).half_messages("shop", execute=book, check=check))
    return lambda sales: _send(halves.transaction(sales, timeout=TIMEOUT), sales)


def check(transaction, _):
    """Take the place of the transaction's decision, and return the one that is there."""
    engine = sa.create_engine(os.environ["SHOP_DATABASE"], poolclass=sa.NullPool)
    with suppress(sa.exc.IntegrityError), engine.begin() as connection:
        connection.execute(DECIDED.insert().values(txn=transaction, decision="abort"))
    with engine.connect() as connection:
        return Decision(connection.scalar(sa.select(DECIDED.c.decision).where(DECIDED.c.txn == transaction)))


def by_transaction(place, chance, stack):
    engine, bridge = sa.create_engine(place.database), stack.enter_context(place.connect())
    stack.callback(engine.dispose)

    def work(txn, sales):
        for sale in sales:
            _save(txn.db, sale)
        _pause_or_abort(chance)

    return lambda sales: _send(bridge.transaction(db=engine, timeout=TIMEOUT), sales, work)


def _send(txn, sales, work=lambda *_: None):
    try:
        with txn:
            for sale in sales:
                txn.send(sale["topic"], sale["body"], key=sale["key"])
            work(txn, sales)
    except InvalidState as error:
        raise AssertionError("the database and the messages disagree") from error
    except (TxnBridgeError, sa.exc.SQLAlchemyError):
        pass
    return txn


WAYS = {"outbox": by_outbox, "half": by_half_messages, "db": by_transaction}


def work_until_killed(place, ahead):
    """Publish or resolve what the writers have left, as the place's way needs it."""
    set_clock(ahead)
    os.environ["SHOP_DATABASE"] = place.database
    if place.way == "outbox":
        relay_until_killed(Shop(place.url, place.database), {"takeover": 1.5, "hold": 2, "batch": 200})
    by = ("--database", place.database) if place.way == "db" else ("--check", f"{__name__}:check")
    while True:
        with suppress(SystemExit):
            main(["resolver", "run", "--group", "shop", "--application", "shop", "--url", place.url, *by])
        time.sleep(0.2)
