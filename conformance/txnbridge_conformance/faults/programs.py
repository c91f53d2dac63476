"""Programs that tests run in child processes, most of which are killed or paused.

A program that takes a `Case` can be killed anywhere. When the program is run again, it finds out which of its steps
have taken effect, and does the others.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txnbridge import Abort, Bridge, Capability, Decision, HalfTransaction, Transaction, TransactionAborted, connect
from txnbridge.testing import tell
from txnbridge_conformance.observing import patience, seen, send, take, values

# The transactions' timeout. A dead program's transaction blocks readers for this time, a prepared one for its hold too.
TIMEOUT = 20.0
# The timeout of a transaction that is to expire soon.
SHORT = 1.0
# The time in which a broker mostly lists a transaction after its messages were sent.
_LISTED_SECONDS = 0.05
# The settings of the programs' bridges: one writer, and the decision log of one application for all programs.
SMALL: dict[str, Any] = {"writers": 1, "application": "conformance"}


@dataclass(frozen=True)
class Case:
    """The arguments of a program: the broker's URL, a unique name, topics, and a file that survives a kill."""

    url: str
    name: str
    topics: tuple[str, ...]
    memory: str

    def remember(self, text: str) -> None:
        """Replace the text in the file `self.memory` atomically, for a later run of the program."""
        path = Path(self.memory)
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)

    def remembered(self) -> str | None:
        path = Path(self.memory)
        return path.read_text() if path.exists() else None


# --- half messages ----------------------------------------------------------------------------------------------------


def leave_half(url: str, group: str, topics: list[str]) -> None:
    """Store a half message for each topic; report the transaction's id. The test kills this process before the end."""

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
    """Commit one message in a transaction."""
    with connect(url, transactional_id=transactional_id) as bridge:
        send(bridge, topic, value)


def open_and_wait(url: str, topic: str, transactional_id: str | None, timeout: float) -> None:
    """Open a transaction, send messages until the broker has some of them, and never end it."""
    with connect(url, transactional_id=transactional_id, timeout=timeout) as bridge:
        txn = bridge.transaction()
        # The loop sends more than a client buffers, unless the broker lists the open transaction sooner.
        shows = bool(bridge.capabilities[Capability.LIST_OPEN])
        for left in reversed(range(34)):
            txn = txn if txn.deadline > 0 else bridge.transaction()  # on a busy machine
            txn.send_many(topic, (b"left open" * 1_200 for _ in range(25)))
            if shows and _is_listed(bridge, txn, topic, _LISTED_SECONDS if left else patience()):
                break
        tell(txn.id)
        time.sleep(600)  # the test kills or pauses the process long before


def _is_listed(bridge: Bridge, txn: Transaction, topic: str, seconds: float) -> bool:
    """Return whether the broker lists the transaction within some seconds, under its id or with its topic."""
    deadline = time.monotonic() + seconds
    while True:
        if any(each.transaction == txn.id or topic in dict(each.partitions) for each in bridge.admin.transactions()):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def prepare_one(
    url: str, topic: str, value: bytes, transactional_id: str | None = None, hold: float | None = None
) -> str:
    """Prepare one message, report the token to the parent process, and return it."""
    with connect(url, transactional_id=transactional_id) as bridge:
        with bridge.transaction(prepare=True, hold=hold) as txn:
            txn.send(topic, value)
        tell(str(txn.token))
        bridge.status(str(txn.token))  # an event at which a test can stop the process
    return str(txn.token)


def end_by_token(url: str, token: str, decision: str) -> str:
    """Commit or abort a prepared transaction by its token, and return the outcome."""
    with connect(url) as bridge:
        return (bridge.commit if decision == "commit" else bridge.abort)(token).value


def ask_status(url: str, token: str) -> str:
    """Return the state of a token's transaction."""
    with connect(url) as bridge:
        return bridge.status(token).state.value


def own_and_commit(url: str, topic: str, transactional_id: str, value: bytes) -> str:
    """Open a transactional id and commit a message. Return "committed" or the error's name."""
    try:
        with connect(url, transactional_id=transactional_id) as bridge:
            while True:
                try:
                    send(bridge, topic, value)
                    return "committed"
                except TransactionAborted:
                    pass  # if two processes open an id at once, the newer owner's first transaction may be aborted
    except Exception as error:
        return type(error).__name__


def consume_and_commit(url: str, topic: str, group: str, output: str) -> str:
    """Forward one message to `output` and acknowledge it in a transaction. Return "committed" or the error's name."""
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
    """Join a group, take a message without acknowledging it, and poll until the process is killed."""
    with connect(url) as bridge, bridge.consumer(topic, group) as consumer:
        tell(take(consumer, 1)[0].value)
        while True:
            consumer.poll(timeout=1)


def claim_all(url: str, log: str, count: int, decision: str) -> list[str]:
    """Claim a decision about many ids in a decision log, and return for each id the decision that counts."""
    with connect(url) as bridge:
        decisions = bridge.decisions(log)
        tell("ready")
        return [decisions.claim(("race", n), Decision(decision)).decision.value for n in range(count)]


# --- programs that can die anywhere -----------------------------------------------------------------------------------


def plain_commit(case: Case) -> None:
    """Commit one message to each of two topics, once."""
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, **SMALL) as bridge:
        if not seen(bridge, case.topics[0]):
            with bridge.transaction() as txn:
                for topic in case.topics:
                    txn.send(topic, b"once")


def plain_abort(case: Case) -> None:
    """Send messages in a transaction, and abort it: no reader may see the messages."""
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, **SMALL) as bridge:
        with bridge.transaction() as txn:
            for topic in case.topics:
                txn.send(topic, b"never")
            raise Abort


def prepare_and_commit(case: Case) -> None:
    """Prepare a transaction, store its token in the file `case.memory`, and commit by the token."""
    _prepare_and_end(case, "commit")


def prepare_and_abort(case: Case) -> None:
    """Prepare a transaction, store its token in the file `case.memory`, and abort by the token."""
    _prepare_and_end(case, "abort")


def _prepare_and_end(case: Case, decision: str) -> None:
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, hold=600, **SMALL) as bridge:
        token = case.remembered()
        if token is None:
            for left in bridge.admin.transactions():
                if left.transactional_id == case.name and left.state == "prepared":  # its token died with its process
                    bridge.admin.abort(left.transaction)
            with bridge.transaction(prepare=True) as txn:
                for topic in case.topics:
                    txn.send(topic, b"once")
            token = str(txn.token)
            case.remember(token)
        outcome = (bridge.commit if decision == "commit" else bridge.abort)(token).value
        if outcome != {"commit": "committed", "abort": "aborted"}[decision]:
            raise AssertionError(f"the outcome of {decision} is {outcome}")


def consume_transform_produce(case: Case) -> None:
    """Forward every message of the first topic to the second, and acknowledge it in the same transaction."""
    source, target = case.topics
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge, bridge.consumer(source, case.name) as consumer:
        while not (consumer.assignment and not any(consumer.lag().values())):
            for message in consumer.poll(2, timeout=0.1):
                try:
                    with bridge.transaction() as txn:
                        txn.send(target, message.value)
                        txn.ack(message)
                except TransactionAborted:
                    break  # the messages are delivered again


def process(case: Case) -> None:
    """Forward every message of the first topic to the second, by `bridge.processor`."""
    source, target = case.topics
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge:
        processor = bridge.processor(source, group=case.name, each=lambda m, txn: txn.send(target, m.value), max_wait=0)
        processor.run(until_idle=True)


def publish_by_sequence(case: Case) -> None:
    """Publish five numbered messages without a transaction, once each."""
    (topic,) = case.topics
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge, bridge.publisher(case.name) as publisher:
        last = publisher.last_sequence(topic)
        # The last stored message is sent again, as by a program that does not know whether it was stored.
        for number in range(last or 0, 5):
            publisher.send(topic, b"%d" % number, sequence=number)
        publisher.flush()


def open_over_a_leftover(case: Case) -> None:
    """Open a transactional id and commit one transaction. A dead owner, with more writers, left transactions open."""
    with connect(case.url, transactional_id=case.name, timeout=TIMEOUT, writers=1) as bridge:
        if b"new" not in values(seen(bridge, case.topics[1])):
            with bridge.transaction() as txn:
                for topic in case.topics:
                    txn.send(topic, b"new")


def decide(case: Case) -> None:
    """Claim a decision about an id in the decision log, and store the decision that counts in `case.memory`."""
    with connect(case.url, timeout=TIMEOUT, **SMALL) as bridge:
        decisions = bridge.decisions(case.name)
        # A second start claims the opposite decision, and must not get it.
        wanted = Decision.COMMIT if case.remembered() is None else Decision.ABORT
        if case.remembered() is None:
            case.remember("asked")
        counts = decisions.claim("the order", wanted).decision.value
        known = case.remembered() or "asked"
        case.remember(known if counts in known.split() else f"{known} {counts}")
