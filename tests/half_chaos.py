"""A shop whose sellers are killed, frozen and wrong for minutes: its database and its messages have to agree."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import txnbridge
from tests.chaos import SECONDS, SEED, begin, say
from txnbridge import Decision, HalfTransaction, Message
from txnbridge.testing import Child

SETTLING = 240.0  # for what is left to do when nothing fails any more
GROUP, APPLICATION = "chaos", "half-chaos"
SELLERS = 3
# The time that a sale has; some take longer.
TIMEOUT, TOO_LONG = 4.0, 6.0


class Books:
    """The shop's database. A row without what was sold: that sale may not happen any more."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._open() as database:
            database.execute("CREATE TABLE IF NOT EXISTS sales(id TEXT PRIMARY KEY, sold TEXT)")

    def _open(self) -> Any:
        return closing(sqlite3.connect(self._path, timeout=60, isolation_level=None))

    def book(self, id: str, sold: str) -> bool:
        with self._open() as database:
            rows = database.execute("INSERT OR IGNORE INTO sales VALUES (?, ?)", (id, sold))
            return bool(rows.rowcount)

    def was_booked(self, id: str) -> bool:
        with self._open() as database:
            database.execute("INSERT OR IGNORE INTO sales VALUES (?, NULL)", (id,))
            ((sold,),) = database.execute("SELECT sold FROM sales WHERE id = ?", (id,)).fetchall()
            return sold is not None

    def sold(self) -> Counter[bytes]:
        with self._open() as database:
            return Counter(sold.encode() for (sold,) in database.execute("SELECT sold FROM sales WHERE sold NOT NULL"))


def honest(books: Books) -> Callable[[str, Sequence[Message]], Decision]:
    return lambda id, _: Decision.COMMIT if books.was_booked(id) else Decision.ABORT


class Shop:
    """A seller's work and its answers, most of them right."""

    def __init__(self, path: str, seed: int) -> None:
        self._books = Books(path)
        self._chance = random.Random(seed)

    def execute(self, txn: HalfTransaction, sold: str) -> Decision:
        mood = self._chance.random()
        if mood < 0.1:
            return Decision.ABORT
        if mood < 0.2:
            raise RuntimeError("before the work")
        if mood < 0.25:
            time.sleep(TOO_LONG)
        booked = self._books.book(txn.id, sold)
        if mood > 0.9:
            raise RuntimeError("behind the work")
        if mood > 0.8:
            return Decision.UNDECIDED
        return Decision.COMMIT if booked else Decision.ABORT

    def check(self, id: str, messages: Sequence[Message]) -> Decision:
        mood = self._chance.random()
        if mood < 0.1:
            raise RuntimeError("cannot tell")
        if mood < 0.2:
            return Decision.UNDECIDED
        return honest(self._books)(id, messages)


def keep_selling(url: str, path: str, topics: list[str], seed: int) -> None:
    """Until it is killed. What goes wrong in a sale is for `check` to find out."""
    shop = Shop(path, seed)
    with txnbridge.connect(url, application=APPLICATION, timeout=20) as bridge:
        with bridge.half_messages(GROUP, execute=shop.execute, check=shop.check) as sales:
            for number in itertools.count():
                sold = f"{os.getpid()}-{number}"
                with suppress(Exception), sales.transaction(sold, timeout=TIMEOUT) as txn:
                    for topic in topics:
                        txn.send(topic, sold.encode())


def attack(
    url: str,
    folder: Path,
    topics: list[str],
    published: Callable[[str], Sequence[bytes]],
    left: Callable[[], Sequence[object]],
    kill_broker: Callable[[], object] | None = None,
) -> None:
    """`published` is all that an independent reader finds in a topic, `left` what is undecided."""
    chance, path = begin(), str(folder / "books.db")
    books, seeds = Books(path), itertools.count(SEED)
    until = time.monotonic() + SECONDS
    kills = Counter[str]()

    def kill_brokers() -> None:
        while kill_broker is not None and not ended.wait(20 + 20 * chance.random()):
            kill_broker()
            kills["broker"] += 1

    def start() -> Child:
        return Child(keep_selling, url, path, topics, next(seeds))

    ended, sellers = threading.Event(), [start() for _ in range(SELLERS)]
    killer = threading.Thread(target=kill_brokers)
    killer.start()
    try:
        while time.monotonic() < until:
            time.sleep(3 * chance.random())
            number = chance.randrange(SELLERS)
            if chance.random() < 0.5:
                os.kill(sellers[number].pid, signal.SIGSTOP)
                time.sleep(2 * TIMEOUT * chance.random())
                os.kill(sellers[number].pid, signal.SIGCONT)
                kills["frozen"] += 1
            else:
                sellers[number].kill()
                sellers[number] = start()
                kills["killed"] += 1
    finally:
        ended.set()
        killer.join()
        for seller in sellers:
            seller.kill()
    with txnbridge.connect(url, application=APPLICATION) as bridge, bridge.resolver(GROUP, check=honest(books)):
        settled_by = time.monotonic() + SETTLING
        while left() and time.monotonic() < settled_by:
            time.sleep(0.5)
    assert list(left()) == []
    sold = books.sold()
    say(f"{sold.total()} sold; {dict(kills)}")
    for topic in topics:
        found = Counter(published(topic))
        assert {value: (sold[value], found[value]) for value in sold | found if sold[value] != found[value]} == {}
    assert sold.total() > SECONDS / 10
