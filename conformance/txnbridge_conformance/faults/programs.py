"""Programs that tests run in processes of their own, most of them to die or to stop in.

Those that take a `Case` can be killed anywhere: run again, each finds out how far it came and finishes its work.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txnbridge import (
    Abort,
    Bridge,
    Capability,
    Decision,
    HalfTransaction,
    Outcome,
    Transaction,
    TransactionAborted,
    connect,
)
from txnbridge.testing import tell
from txnbridge_conformance.observing import patience, seen, send, take, values

# What a program needs at most before its own transaction times out; dead ones block nobody longer than the hold after.
TIMEOUT = 20.0
# The time of a transaction that is to be over soon.
SHORT = 1.0
# How long it mostly takes until a broker lists what it was sent.
_MOMENT = 0.05
# One writer is all that they use, and one application's log all that they need.
SMALL: dict[str, Any] = {"writers": 1, "application": "conformance"}


@dataclass(frozen=True)
class Case:
    """One start of a program: the broker, names that nobody else uses, and a file for what it must remember."""

    url: str
    name: str
    topics: tuple[str, ...]
    memory: str

    def remember(self, text: str) -> None:
        """Write the file, whole or not at all."""
        path = Path(self.memory)
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)

    def remembered(self) -> str | None:
        path = Path(self.memory)
        return path.read_text() if path.exists() else None


# --- half messages ----------------------------------------------------------------------------------------------------


def leave_half(url: str, group: str, topics: list[str]) -> None:
    """Store a message for each topic and do the work; tells the transaction's id, and is killed before it ends it."""

    def execute(txn: HalfTransaction, _: Any) -> Decision:
        tell(txn.id)
        return Decision.COMMIT

    with connect(url, writers=1) as bridge:
        with bridge.half_messages(group, execute=execute, check=lambda *_: Decision.UNDECIDED) as halves:
            with halves.transaction(timeout=SHORT) as txn:
                for number, topic in enumerate(topics, 1):
                    txn.send(topic, b"%d" % number)


# --- small programs ---------------------------------------------------------------------------------------------------


def commit_one(url: str, topic: str, value: bytes, transactional_id: str | None = None) -> None:
    """Commit one message."""
    with connect(url, transactional_id=transactional_id) as bridge:
        send(bridge, topic, value)


def read_values(url: str, topic: str) -> list[object]:
    """What another process sees in a topic."""
    with connect(url) as bridge:
        return values(seen(bridge, topic))


def open_and_wait(url: str, topic: str, transactional_id: str | None, timeout: float) -> None:
    """Leave a transaction open that has reached the broker."""
    with connect(url, transactional_id=transactional_id, timeout=timeout) as bridge:
        txn = bridge.transaction()
        # In all more than a client buffers; where the broker lists what is open, until that shows, mostly much sooner.
        shows = bool(bridge.capabilities[Capability.LIST_OPEN])
        for left in reversed(range(34)):
            txn.send_many(topic, (b"left open" * 1_200 for _ in range(25)))
            if shows and _is_listed(bridge, txn, topic, _MOMENT if left else patience()):
                break
        tell(txn.id)
        time.sleep(600)  # it is killed, or paused, long before


def _is_listed(bridge: Bridge, txn: Transaction, topic: str, seconds: float) -> bool:
    """Under its own name, or the one that the broker has for it; looked for during that time."""
    late = time.monotonic() + seconds
    while True:
        for found in bridge.admin.transactions():
            if found.transaction == txn.id or topic in [name for name, _ in found.partitions]:
                return True
        if time.monotonic() >= late:
            return False
        time.sleep(0.02)


def prepare_one(
    url: str, topic: str, value: bytes, transactional_id: str | None = None, hold: float | None = None
) -> str:
    """Prepare one message; returns the token, and tells it before it goes on."""
    with connect(url, transactional_id=transactional_id) as bridge:
        with bridge.transaction(prepare=True, hold=hold) as txn:
            txn.send(topic, value)
        tell(str(txn.token))
        bridge.status(str(txn.token))  # an event to stop at
    return str(txn.token)


def end_by_token(url: str, token: str, decision: str) -> str:
    """Commit or abort by token; returns the outcome."""
    with connect(url) as bridge:
        outcome: Outcome = bridge.commit(token) if decision == "commit" else bridge.abort(token)
        return outcome.value


def ask_status(url: str, token: str) -> str:
    """The state of a token's transaction."""
    with connect(url) as bridge:
        return bridge.status(token).state.value


def own_and_commit(url: str, topic: str, transactional_id: str, value: bytes) -> str:
    """Open an id and commit; returns the outcome's name or the error's."""
    try:
        with connect(url, transactional_id=transactional_id) as bridge:
            while True:
                try:
                    send(bridge, topic, value)
                    return "committed"
                except TransactionAborted:
                    pass  # of two that open an id at once the newer may be cut off once; it runs again
    except Exception as error:
        return type(error).__name__


def consume_and_commit(url: str, topic: str, group: str, output: str) -> str:
    """Take one message of a group and pass it on; returns what became of it."""
    with connect(url) as bridge, bridge.consumer(topic, group) as consumer:
        (message,) = take(consumer, 1)
        try:
            with bridge.transaction() as txn:
                txn.send(output, message.value)
                txn.ack(message)
        except TransactionAborted as error:
            return type(error).__name__
    return "committed"


def join_and_wait(url: str, topic: str, group: str) -> None:
    """Be a member of a group with a message in hand, until killed."""
    with connect(url) as bridge, bridge.consumer(topic, group) as consumer:
        tell(take(consumer, 1)[0].value)
        while True:
            consumer.poll(timeout=1)


def claim_all(url: str, log: str, count: int, decision: str) -> list[str]:
    """Claim many ids; returns what counts for each."""
    with connect(url) as bridge:
        decisions = bridge.decisions(log)
        tell("ready")
        return [decisions.claim(("race", n), Decision(decision)).decision.value for n in range(count)]


# --- programs that can die anywhere -----------------------------------------------------------------------------------


def plain_commit(case: Case) -> None:
    """One message to each of two topics, once."""
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, **SMALL) as bridge:
        if not seen(bridge, case.topics[0]):
            with bridge.transaction() as txn:
                for topic in case.topics:
                    txn.send(topic, b"once")


def plain_abort(case: Case) -> None:
    """Messages that nobody may see."""
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, **SMALL) as bridge:
        with bridge.transaction() as txn:
            for topic in case.topics:
                txn.send(topic, b"never")
            raise Abort


def prepare_and_commit(case: Case) -> None:
    """Prepare, keep the token, commit by it."""
    _prepare_and_end(case, "commit")


def prepare_and_abort(case: Case) -> None:
    """Prepare, keep the token, abort by it."""
    _prepare_and_end(case, "abort")


def _prepare_and_end(case: Case, decision: str) -> None:
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, hold=600, **SMALL) as bridge:
        token = case.remembered()
        if token is None:
            _abort_what_nobody_remembers(bridge, case)
            with bridge.transaction(prepare=True) as txn:
                for topic in case.topics:
                    txn.send(topic, b"once")
            token = str(txn.token)
            case.remember(token)
        outcome = bridge.commit(token) if decision == "commit" else bridge.abort(token)
        if outcome is not (Outcome.COMMITTED if decision == "commit" else Outcome.ABORTED):
            raise AssertionError(f"asked to {decision}, and told {outcome}")


def _abort_what_nobody_remembers(bridge: Bridge, case: Case) -> None:
    """It was prepared, and its token died with its process: an administrator ends it."""
    for left in bridge.admin.transactions():
        if left.transactional_id == case.name and left.state == "prepared":
            bridge.admin.abort(left.transaction)


def consume_transform_produce(case: Case) -> None:
    """Pass every message of the first topic on to the second, with its group's position in the same transaction."""
    source, target = case.topics
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge, bridge.consumer(source, case.name) as consumer:
        while not (consumer.assignment and not any(consumer.lag().values())):
            for message in consumer.poll(2, timeout=0.1):
                try:
                    with bridge.transaction() as txn:
                        txn.send(target, message.value)
                        txn.ack(message)
                except TransactionAborted:
                    break  # it comes again


def process(case: Case) -> None:
    """The same with a processor."""
    source, target = case.topics
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge:
        processor = bridge.processor(source, group=case.name, each=lambda m, txn: txn.send(target, m.value), max_wait=0)
        processor.run(until_idle=True)


def publish_by_sequence(case: Case) -> None:
    """Five messages without a transaction, numbered, once each."""
    (topic,) = case.topics
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge, bridge.publisher(case.name) as publisher:
        last = publisher.last_sequence(topic)
        # The last one again, as a program does that is not sure of it.
        for number in range(last or 0, 5):
            publisher.send(topic, b"%d" % number, sequence=number)
        publisher.flush()


def open_over_a_leftover(case: Case) -> None:
    """Open an id over what its dead owner left, and commit once; that had more writers, and the same application."""
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, writers=1) as bridge:
        if b"new" not in values(seen(bridge, case.topics[1])):
            with bridge.transaction() as txn:
                for topic in case.topics:
                    txn.send(topic, b"new")


def decide(case: Case) -> None:
    """Claim an id by itself, and write down what counts."""
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge:
        decisions = bridge.decisions(case.name)
        # The second one wants the opposite, and must not get it.
        wish = Decision.COMMIT if case.remembered() is None else Decision.ABORT
        if case.remembered() is None:
            case.remember("asked")
        counts = decisions.claim("the order", wish).decision.value
        found = case.remembered() or "asked"
        case.remember(found if counts in found.split() else f"{found} {counts}")
