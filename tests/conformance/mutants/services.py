"""Mutants of retries, processors with a database, and relays. The docstring of each says what is wrong with it."""

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from tests.conformance.mutants import Mutants, replace
from txnbridge import Bridge, Message
from txnbridge._process.retries import Retries
from txnbridge._process.side_by_side import SideBySide
from txnbridge.sql import relay
from txnbridge.sql.processing import DatabaseTransaction, DatabaseTransactions
from txnbridge.sql.relay import OutboxStore

SERVICES = Mutants()


def last_bridge(method: str) -> list[Bridge]:
    """Return a list that has the bridge of the last call of a method of bridges."""
    known: list[Bridge] = []

    def call(bridge: Bridge, *args: Any, **named: Any) -> Any:
        known[:] = [bridge]
        return before(bridge, *args, **named)

    before = replace(Bridge, method, call)
    return known


@SERVICES.mutant("replay-duplicate", workload="services")
def sends_retries_in_a_transaction_of_their_own() -> None:
    """Messages are committed to their retry topic before the transaction that acknowledges them."""
    bridges = last_bridge("processor")

    def send(retries: Retries, batch: Any, txn: Any, *rest: Any) -> Any:
        if not batch.delayed:
            return before(retries, batch, txn, *rest)
        with bridges[0].transaction() as other:
            return before(retries, batch, SimpleNamespace(send=other.send, id=txn.id), *rest)

    before = replace(Retries, "send", send)


@SERVICES.mutant("half-ack", workload="services")
def acknowledges_before_the_databases_commit() -> None:
    """The group's position at the broker moves before the handler's rows are committed."""

    def ack(txn: DatabaseTransaction, messages: Sequence[Message]) -> None:
        before(txn, messages)
        owner = vars(txn)["_owner"]
        owner.acknowledge_later(messages, 5.0)
        owner.acknowledge(5.0)

    before = replace(DatabaseTransaction, "ack", ack)


@SERVICES.mutant("half-ack", workload="services")
def acknowledges_what_failed_side_by_side() -> None:
    """With `concurrency`, a message whose call failed is acknowledged."""

    def send(calls: SideBySide, *rest: Any) -> None:
        with suppress(Exception):
            before(calls, *rest)

    before = replace(SideBySide, "send", send)


@SERVICES.mutant("replay-duplicate", workload="services")
def stores_no_position() -> None:
    """The database's transaction stores the handler's rows without the positions of the messages."""
    replace(DatabaseTransactions, "store", lambda *_: {})


@SERVICES.mutant("half-ack", workload="services")
def deletes_rows_that_came_meanwhile() -> None:
    """The relay deletes, with the rows of a published batch, those that were stored since it read the batch."""
    replace(relay, "_ranges", lambda ids: f"{ids[0]}-{1 << 60}")


@SERVICES.mutant("duplicate", workload="services")
def publishes_a_batch_before_it_is_stored() -> None:
    """The relay commits a batch and stores its token afterwards, so that the next relay publishes the rows again."""
    bridges = last_bridge("relay")

    def store_batch(store: OutboxStore, version: int, name: str, token: str, *rest: Any) -> Any:
        bridges[0].commit(token)
        return before(store, version, name, token, *rest)

    before = replace(OutboxStore, "store_batch", store_batch)


SERVICES.apply_chosen()
