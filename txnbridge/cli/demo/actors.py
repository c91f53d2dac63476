"""What the processes of the demo do. The code that the demo shows is read from here: it is the code that runs.

    python -m txnbridge.cli.demo.actors ROLE URL SUFFIX [ARGUMENT]

An actor tells the stage what happens in JSON lines on stdout, and where it has to wait it waits for a line on stdin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import txnbridge
from txnbridge import Bridge, Event, Message, Outcome


class Shop:
    """The names of the shop's topics, unique, so that the story can be played on a broker that others use too."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.orders = f"orders-{suffix}"
        self.shipments = f"shipments-{suffix}"
        self.audit = f"audit-{suffix}"
        self.payments = f"payments-{suffix}"
        self.ledger = f"ledger-{suffix}"
        self.sales = f"sales-{suffix}"
        self.workers = f"workers-{suffix}"  # the group that works on the orders
        self.till = f"till-{suffix}"  # the transactional id of the one till

    @property
    def topics(self) -> list[str]:
        return [self.orders, self.shipments, self.audit, self.payments, self.ledger, self.sales]


class CardDeclined(Exception):
    """What a payment service says."""


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


# --- the stage directions --------------------------------------------------------------------------------------------


def tell(what: str, **data: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, **data}) + "\n")
    sys.stdout.flush()


def wait() -> None:
    """Until the stage says go; end if the stage is gone."""
    if not sys.stdin.readline():
        os._exit(1)


class PauseBeforeCommit:
    """A plug-in that stops this process between its last send and its commit, until the stage says go."""

    @txnbridge.hookimpl
    def txnbridge_event(self, event: Event) -> None:
        if event.name == "commit" and event.phase == "before":
            tell("before commit")
            wait()


def play_ship(url: str, shop: Shop) -> None:
    with txnbridge.plugins.registered(PauseBeforeCommit()):
        with txnbridge.connect(url) as bridge:
            ship(bridge, shop)
    tell("committed")


def play_ship_and_charge(url: str, shop: Shop) -> None:
    with txnbridge.connect(url) as bridge:
        try:
            ship_and_charge(bridge, shop)
        except CardDeclined:
            tell("declined")


def play_pay(url: str, shop: Shop) -> None:
    with txnbridge.connect(url) as bridge:
        tell("prepared", token=pay(bridge, shop))
        wait()  # for the kill


def play_finish(url: str, shop: Shop, token: str) -> None:
    with txnbridge.connect(url) as bridge:
        tell("ended", outcome=finish(bridge, token).value)


def play_sell(url: str, shop: Shop, what: str) -> None:
    sell(url, shop, what.encode())
    tell("committed")


def play_sell_late(url: str, shop: Shop, what: str) -> None:
    try:
        with txnbridge.plugins.registered(PauseBeforeCommit()):
            sell(url, shop, what.encode())
    except txnbridge.Fenced as error:
        tell("fenced", newer=error.newer, message=str(error))
    else:
        tell("committed")


ROLES: dict[str, Callable[..., None]] = {
    function.__name__.removeprefix("play_"): function
    for function in (play_ship, play_ship_and_charge, play_pay, play_finish, play_sell, play_sell_late)
}

if __name__ == "__main__":
    role, url, suffix, *arguments = sys.argv[1:]
    ROLES[role](url, Shop(suffix), *arguments)
