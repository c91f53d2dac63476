"""Mutants of the Pulsar backend. The docstring of each says what is wrong with it."""

import dataclasses
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

from txnbridge_pulsar.broker import PulsarBroker
from txnbridge_pulsar.client.consumer import PulsarConsumer
from txnbridge_pulsar.client.producer import PulsarProducer
from txnbridge_pulsar.outcome import outcome
from txnbridge_pulsar.outcome.outcome import EndResult
from txnbridge_pulsar.write import writer
from txnbridge_pulsar.write.batching import PendingReceipts

from tests.conformance.mutants import Mutants, replace
from txnbridge import TxnBridgeError
from txnbridge.spi import Deadline

PULSAR = Mutants()


@PULSAR.mutant("G1a", "early-read", workload="transactions")
def sends_outside() -> None:
    """Messages are sent without the transaction's number."""

    def send(producer: Any, content: Any, txn: Any = None, **options: Any) -> Any:
        return before(producer, content, None, **options)

    before = replace(PulsarProducer, "send", send)


@PULSAR.mutant("half-ack", "replay-duplicate", workload="groups")
def acks_outside() -> None:
    """Acknowledgements are sent without the transaction's number."""

    def start(consumer: Any, ids: Any, txn: Any = None, **options: Any) -> Any:
        return before(consumer, ids, None, **options)

    before = replace(PulsarConsumer, "start_acknowledge", start)


@PULSAR.mutant("G0-realtime", "G1c-realtime", "unseen", "outcome-lie", "split-decision", workload="transactions")
def commits_later() -> None:
    """A commit returns before the coordinator was asked for it."""

    def end(cluster: Any, txn: Any, commit: bool, *rest: Any) -> EndResult:
        def really() -> None:
            time.sleep(0.2)
            with suppress(TxnBridgeError):
                before(cluster, txn, commit, rest[0], Deadline(10))

        if not commit:
            return before(cluster, txn, commit, *rest)  # type: ignore[no-any-return]
        threading.Thread(target=really).start()
        return EndResult.COMMITTED

    before = replace(writer, "end", end)


@PULSAR.mutant("outcome-lie", "zombie-write", "unseen", workload="owners", seconds=30)
def takes_a_refusal_for_a_commit() -> None:
    """A commit counts as committed if the coordinator does not know the transaction any more."""

    def end(*request: Any) -> EndResult:
        ended: EndResult = before(*request)
        return ended if ended is EndResult.ABORTED else EndResult.COMMITTED

    before = replace(writer, "end", end)


@PULSAR.mutant(
    *("lost-write", "unseen", "torn-transaction", "outcome-lie", "stuck-reader", "hang"),
    workload="transactions",
    faults="client,network",
)
def waits_for_no_receipts() -> None:
    """A commit is requested while messages are under way (H34)."""
    replace(PendingReceipts, "wait", lambda *args: True)
    replace(PendingReceipts, "settled", True)


@PULSAR.mutant("zombie-write", workload="owners")
def fences_nobody() -> None:
    """Each opening has a fence topic of its own, so no older owner is fenced."""

    def owner_of(own: Any, identity: Any) -> Any:
        return before(own, dataclasses.replace(identity, name=f"{identity.name}.{uuid.uuid4().hex}"))

    before = replace(PulsarBroker, "_owner_of", owner_of)


PULSAR.add_shared(outcome)
PULSAR.apply_chosen()
