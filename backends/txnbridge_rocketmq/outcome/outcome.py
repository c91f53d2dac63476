"""Ends prepared transactions and reads outcomes by tokens, in any process at any time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from txnbridge.errors import (
    AccessDenied,
    BrokerUnavailable,
    Conflict,
    EvidenceLost,
    InvalidToken,
    OutcomeUnknown,
    TxnBridgeError,
)
from txnbridge.spi import Ack, Deadline, Decision, Ledger, LedgerClaim, Outcome, Status, Token, TokenState
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, LockHolder
from txnbridge_rocketmq.write.half_batch import TopicPart, immunity, parts_as_json, parts_from_json, seconds_since
from txnbridge_rocketmq.write.transaction_properties import is_over

# The kind of the ledger record that makes a transaction independent of its owner.
PREPARE = "prepare"
# While another process publishes a transaction: seconds between two look-ups of its messages, and seconds without
# progress after which the process counts as dead. A live broker publishes a message in milliseconds.
_LOOK_SECONDS = 0.05
_STALLED_SECONDS = 5.0
# The assumed difference of clocks: brokers judge the age of a half by its born time, which is the sender's clock.
_CLOCKS_DIFFER_SECONDS = 1.0


@dataclass(frozen=True)
class PrepareRecord:
    """The content of a prepare record. A process with the token needs nothing else to end the transaction."""

    parts: Sequence[TopicPart]
    acks: Sequence[Ack]
    expires_at: int

    def as_json(self) -> dict[str, Any]:
        acks = [[ack.group, *ack.partition, list(ack.first), list(ack.end), list(ack.read_up_to)] for ack in self.acks]
        return {**parts_as_json(self.parts), "acks": acks, "expires_at": self.expires_at}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrepareRecord:
        """Parse a prepare record of the ledger. Raise `InvalidToken` if it is invalid."""
        try:
            acks = [
                Ack(str(group), (str(topic), int(number)), tuple(first), tuple(end), tuple(read_up_to))
                for group, topic, number, first, end, read_up_to in data["acks"]
            ]
            return cls(parts_from_json(data), acks, int(data["expires_at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidToken("the record that this transaction is prepared cannot be read") from error


def end_prepared(ender: HalfEnder, token: Token, decision: Decision, ledger: Ledger, deadline: Deadline) -> Outcome:
    """End a prepared transaction. Return the outcome that the first claim in the decision log decides. Safe to repeat.

    COMMITTED means that every message is published. Raise `BrokerUnavailable` only if this call has decided nothing,
    `OutcomeUnknown` if the outcome is not known or not carried out yet, `EvidenceLost` if halves or records are gone.
    """
    log = _log_of(token)
    prepared = _prepared(token, ledger, deadline)
    call = uuid.uuid4().hex
    claim = ledger.decided(token.transaction, deadline, log=log)
    if claim is None:
        claim = _claim(ender, token, decision, prepared, call, ledger, deadline)
    first = claim.data.get("by") == call
    if claim.decision is Decision.ABORT:
        with _as_decided(token, "aborted"), ender.cluster.context.events.step("step:drop", token.transaction):
            ender.withdraw(token.transaction, prepared.parts, deadline)
        return Outcome.ABORTED
    with _as_decided(token, "committed"), ender.cluster.context.events.step("step:publish", token.transaction):
        publish_exclusively(ender, token.transaction, prepared.parts, deadline, first=first)
    return Outcome.COMMITTED


@contextmanager
def _as_decided(token: Token, outcome: str) -> Iterator[None]:
    """Add to errors that the transaction is decided, and that other bridges complete it after check-backs."""
    prefix = f"transaction {token.transaction} is {outcome}, and any bridge of its application"
    try:
        yield
    except AccessDenied as error:
        raise AccessDenied(f"{prefix} that may do the rest does so: {error}") from error.__cause__
    except BrokerUnavailable as error:
        raise OutcomeUnknown(f"{prefix} does the rest, as does the same call again: {error}") from error


def publish_exclusively(
    ender: HalfEnder, transaction: str, parts: Sequence[TopicPart], deadline: Deadline, *, first: bool = False
) -> None:
    """Return when this process or another one has published a committed transaction. Take over from another process
    that makes no progress.
    """
    left, patience = -1, Deadline(_STALLED_SECONDS)
    while True:
        with ender.exclusively(transaction, deadline) as holder:
            if holder is LockHolder.CALLER or (holder is LockHolder.OTHER_PROCESS and patience.expired):
                ender.publish(transaction, parts, deadline, first=first)
                return
        first = False  # the holder of the lock may be about to publish
        if (missing := ender.missing(transaction, parts, deadline)) != left:
            left, patience = missing, Deadline(_STALLED_SECONDS)
        deadline.check("waiting for somebody else who publishes the same transaction")
        time.sleep(_LOOK_SECONDS)


def publish_decided(ender: HalfEnder, transaction: str, claim: LedgerClaim, deadline: Deadline) -> None:
    """Publish a transaction that another process committed, so that later messages of the caller do not overtake it."""
    parts = parts_from_json(claim.data)
    with ender.cluster.context.events.step("step:publish", transaction):
        _wait_out_immunity(ender, transaction, parts, deadline)
        publish_exclusively(ender, transaction, parts, deadline)


def _wait_out_immunity(ender: HalfEnder, transaction: str, parts: Sequence[TopicPart], deadline: Deadline) -> None:
    """Wait for the end of the immunity time: until then the owner may be alive and publish the halves directly."""
    settings = [ender.cluster.brokers.config(part.broker, deadline) for part in parts]
    stale = Deadline(max((immunity(each) for each in settings), default=0) + _CLOCKS_DIFFER_SECONDS)
    while ender.missing(transaction, parts, deadline) and not stale.expired:
        deadline.check("publishing what another owner decided")
        time.sleep(_LOOK_SECONDS)


def _claim(
    ender: HalfEnder,
    token: Token,
    decision: Decision,
    prepared: PrepareRecord,
    call: str,
    ledger: Ledger,
    deadline: Deadline,
) -> LedgerClaim:
    if time.time() * 1000 >= prepared.expires_at:
        decision = Decision.ABORT  # the halves may be discarded, and the group's position may have moved
    data = {**parts_as_json(prepared.parts), "by": call}
    log = _log_of(token)
    with ender.cluster.context.events.step("step:decide", token.transaction, decision=decision.value) as step:
        try:
            acks = prepared.acks if decision is Decision.COMMIT else ()
            claim = ledger.claim(token.transaction, decision, data, deadline, log=log, acks=acks)
        except Conflict:
            claim = ledger.claim(token.transaction, Decision.ABORT, data, deadline, log=log)
        step["decided"] = claim.decision.value
    return claim


def _log_of(token: Token) -> Mapping[str, Any]:
    if token.log is None:
        raise InvalidToken("this token is damaged: it does not say where its evidence begins")
    return token.log


def _prepared(token: Token, ledger: Ledger, deadline: Deadline) -> PrepareRecord:
    for entry in ledger.find(token.transaction, deadline):
        if entry.kind == PREPARE:
            return PrepareRecord.from_json(entry.data)
    raise InvalidToken("this token's transaction was never prepared: a newer owner of its id came first")


# --- status -------------------------------------------------------------------------------------------------------


def status_of(ender: HalfEnder, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
    """Return the status of a token's transaction. This decides nothing, but aborts an expired transaction."""
    try:
        claim = ledger.decided(token.transaction, deadline, log=_log_of(token))
        if claim is None and token.expires_at is not None and is_over(token.expires_at):
            # A transaction without halves gets no check-back, so no other process may ever abort it (hazard H73).
            data = parts_as_json([])
            claim = ledger.claim(token.transaction, Decision.ABORT, data, deadline, log=_log_of(token))
    except EvidenceLost as error:
        return Status(TokenState.UNKNOWN, reason=str(error), permanent=True)
    except OutcomeUnknown as error:
        return Status(TokenState.UNKNOWN, reason=str(error))
    if claim is not None:
        return _status_by(claim, ender, token, deadline)
    if token.prepared:
        return Status(TokenState.PREPARED, expires_at=token.expires_at)
    return Status(
        TokenState.UNKNOWN,
        reason="nothing is decided yet; some seconds past its deadline it is aborted by whoever asks",
    )


def _status_by(claim: LedgerClaim, ender: HalfEnder, token: Token, deadline: Deadline) -> Status:
    """Return the status of a decided transaction: COMMITTED only if no half waits to be published."""
    if claim.decision is Decision.ABORT:
        return Status(TokenState.ABORTED, reason="the decision log says so")
    try:
        parts, age = parts_from_json(claim.data), seconds_since(claim.data)
        unpublished = ender.unpublished(token.transaction, parts, age, deadline)
    except TxnBridgeError as error:
        reason = f"it is committed; whether all of it is published cannot be seen now: {error}"
        return Status(TokenState.UNKNOWN, reason=reason)
    if unpublished:
        return Status(
            TokenState.UNKNOWN, reason=f"it is committed; {unpublished} of its messages are not published yet"
        )
    return Status(TokenState.COMMITTED, reason="the decision log says so")
