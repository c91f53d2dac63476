"""Ends prepared transactions and returns their status, given a token, in any process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from txnbridge import errors
from txnbridge.spi import Ack, Deadline, Decision, Ledger, LedgerClaim, Outcome, Status, Token, TokenState
from txnbridge_rocketmq.client.groups import Queue
from txnbridge_rocketmq.client.protocol.codes import Property
from txnbridge_rocketmq.client.protocol.records import MessageExt
from txnbridge_rocketmq.client.protocol.send_requests import HalfAddress
from txnbridge_rocketmq.outcome.end_transaction import HalfEnder, LockHolder, PublishedMessageMissing
from txnbridge_rocketmq.read.verifiable_offset import VerifiableOffset
from txnbridge_rocketmq.write.half_buffer import HalfCount, halves_as_json, halves_from_json, immunity, seconds_since
from txnbridge_rocketmq.write.transaction_properties import is_over, origin_of

# The assumed difference of clocks, where a larger one only makes a message come twice for other clients.
_BORN_TIME_SKEW_SECONDS = 1.0
# The kind of the ledger record that makes a transaction independent of its owner.
PREPARE = "prepare"
# While another process publishes a transaction: the wait between two look-ups of its messages.
_PROGRESS_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class PrepareRecord:
    """Everything that is needed to end a prepared transaction. The decision log stores it as the prepare record.

    A half message of one half (`whole`) has no such record in the log: the process that has stored the half may publish
    it without a decision. Any other process therefore first looks whether it is published (hazard H100), as it does for
    a transaction of one message (hazard H102).
    """

    topics: Sequence[HalfCount]
    acks: Sequence[Ack]
    expires_at: int
    whole: bool = False

    def as_json(self, log: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record's data. `log` (the token's `Evidence.log`) lets any process decide the transaction."""
        acks = [[ack.group, *ack.partition, list(ack.first), list(ack.end), list(ack.read_up_to)] for ack in self.acks]
        return {**halves_as_json(self.topics), "acks": acks, "expires_at": self.expires_at, "log": dict(log)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrepareRecord:
        """Parse the data of a prepare record in the decision log. Raise `InvalidToken` if it is invalid."""
        try:
            acks = [
                Ack(str(group), (str(topic), int(number)), tuple(first), tuple(end), tuple(read_up_to))
                for group, topic, number, first, end, read_up_to in data["acks"]
            ]
            return cls(halves_from_json(data), acks, int(data["expires_at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise errors.InvalidToken("the prepare record of this transaction cannot be read") from error


def prepare_record(
    ledger: Ledger, transaction: str, log: Mapping[str, Any], deadline: Deadline
) -> PrepareRecord | None:
    """Return a transaction's prepare record, which is written once all halves are stored; None if it has none."""
    for entry in ledger.find(transaction, deadline, log=log):
        if entry.kind == PREPARE:
            return PrepareRecord.from_json(entry.data)
    return None


def prepared_by(half: MessageExt, broker: str) -> PrepareRecord | None:
    """Return a prepare record made from the only half of a half message, which has none; None for other halves."""
    origin = origin_of(half)
    if origin is None or origin.whole_until is None:
        return None
    topic = half.properties.get(Property.REAL_TOPIC, half.topic)
    return PrepareRecord([HalfCount(topic, broker, 1)], (), origin.whole_until, whole=True)


def end_fresh(
    ender: HalfEnder,
    token: Token,
    decision: Decision,
    prepared: PrepareRecord,
    halves: Sequence[tuple[Queue, Sequence[HalfAddress]]],
    ledger: Ledger,
    deadline: Deadline,
) -> Outcome | None:
    """End a half message in the process that has stored its `halves`, at its first attempt. Return its outcome.

    Return None if its messages have to be looked up: `end_prepared` follows. Raise the errors of `end_prepared`.
    """
    call = uuid.uuid4().hex
    with ender.as_owner(token.transaction):
        if prepared.whole and decision is Decision.COMMIT:
            step = ender.cluster.context.events.step("step:publish", token.transaction)
            with step, suppress(PublishedMessageMissing):
                if ender.publish_fresh(token.transaction, halves, deadline):
                    return Outcome.COMMITTED
            return None
        claim = _claim(ender, token, decision, prepared, {"by": call, "direct": True}, ledger, deadline)
        if claim.data.get("by") != call:
            return None
        if claim.decision is Decision.ABORT:
            with ender.cluster.context.events.step("step:drop", token.transaction):
                ender.drop([(queue.broker, half) for queue, series in halves for half in series], deadline)
            return Outcome.ABORTED
        with _as_decided(token, "committed"), ender.cluster.context.events.step("step:publish", token.transaction):
            return Outcome.COMMITTED if ender.publish_fresh(token.transaction, halves, deadline) else None


def end_prepared(
    ender: HalfEnder,
    token: Token,
    decision: Decision,
    ledger: Ledger,
    deadline: Deadline,
    *,
    prepared: PrepareRecord | None = None,
    asked: bool = False,
) -> Outcome:
    """End a prepared transaction by `decision`, or by an earlier decision. Return its outcome. Safe to repeat.

    `prepared` is its prepare record, if the caller has it. With `asked=True` the call does not wait for the immunity
    time of the halves to pass, because no owner publishes them directly any more.

    COMMITTED means that every message is published. Raise `BrokerUnavailable` only if this call has decided nothing,
    `OutcomeUnknown` if the outcome is not known or not carried out yet, `EvidenceLost` if halves or records are gone.
    """
    prepared = prepared or _prepared(token, ledger, deadline)
    if prepared.whole and is_published(ender, token.transaction, prepared.topics, asked, deadline):
        return Outcome.COMMITTED
    call = uuid.uuid4().hex
    claim = _claim(ender, token, decision, prepared, {"by": call}, ledger, deadline)
    first = claim.data.get("by") == call
    if claim.decision is Decision.ABORT:
        with _as_decided(token, "aborted"), ender.cluster.context.events.step("step:drop", token.transaction):
            ender.withdraw(token.transaction, prepared.topics, deadline)
        return Outcome.ABORTED
    with _as_decided(token, "committed"), ender.cluster.context.events.step("step:publish", token.transaction):
        if claim.data.get("direct") and not asked:  # the owner of a half message may be publishing it (hazard H99)
            _wait_out_immunity(ender, token.transaction, prepared.topics, deadline)
        publish_exclusively(ender, token.transaction, prepared.topics, deadline, first=first)
    return Outcome.COMMITTED


def is_published(
    ender: HalfEnder, transaction: str, topics: Sequence[HalfCount], asked: bool, deadline: Deadline
) -> bool:
    """Return whether the process that has stored the only half of a transaction has published its message.

    First wait for the half's immunity time to pass, unless `asked`. After False that process cannot publish without a
    decision any more. Raise `EvidenceLost` if the message may have been published and dropped by age.
    """
    if not ender.missing(transaction, topics, deadline):
        return True
    half = ender.only_half(transaction, topics, deadline)
    immune = immunity(ender.cluster.brokers.config(topics[0].broker, deadline))
    while not asked and not is_over(half.born_time + 1000 * immune, ender.cluster.settings.timing.clocks_differ):
        deadline.check("waiting until another process can no longer publish the message")
        time.sleep(_PROGRESS_POLL_SECONDS)
        if not ender.missing(transaction, topics, deadline):
            return True
    return was_published(ender, transaction, topics, deadline, half)


def was_published(
    ender: HalfEnder, transaction: str, topics: Sequence[HalfCount], deadline: Deadline, half: MessageExt | None = None
) -> bool:
    """Return whether the message of a transaction of one message is published. Look twice: the index may lag behind.

    `half` is a copy of its half, if the caller has it: if it is older than the immunity time, one look is enough. Raise
    `EvidenceLost` if the message may have been published and dropped by age, so that nothing may be decided any more
    (hazard H135).
    """
    timing, immune = ender.cluster.settings.timing, immunity(ender.cluster.brokers.config(topics[0].broker, deadline))
    is_indexed = half is not None and is_over(half.born_time + 1000 * immune, timing.clocks_differ + timing.index_delay)
    if not ender.missing(transaction, topics, deadline):
        return True
    if not is_indexed:
        time.sleep(min(timing.index_delay, deadline.left()))
        if not ender.missing(transaction, topics, deadline):
            return True
    half = half or ender.only_half(transaction, topics, deadline)
    ender.require_kept(topics[0].broker, half, deadline)
    return False


@contextmanager
def _as_decided(token: Token, outcome: str) -> Iterator[None]:
    """Run a block that carries out a decision; its errors then say that any bridge of the application can do that."""
    prefix = f"transaction {token.transaction} is {outcome}, and any bridge of its application"
    try:
        yield
    except errors.AccessDenied as error:
        raise errors.AccessDenied(f"{prefix} that has the rights completes it: {error}") from error.__cause__
    except errors.BrokerUnavailable as error:
        raise errors.OutcomeUnknown(f"{prefix} completes it, as does the same call again: {error}") from error


def publish_exclusively(
    ender: HalfEnder, transaction: str, topics: Sequence[HalfCount], deadline: Deadline, *, first: bool = False
) -> None:
    """Publish a committed transaction under its lock, or wait until another process has published it.

    If the process that holds the lock publishes nothing for some seconds, publish without the lock. With `first` the
    caller has just decided the transaction.
    """
    stalled = ender.cluster.settings.timing.publisher_stalled
    left, patience = -1, Deadline(stalled)
    while True:
        with ender.exclusively(transaction, deadline) as holder:
            if holder is LockHolder.CALLER or (holder is LockHolder.OTHER_PROCESS and patience.expired):
                ender.publish(transaction, topics, deadline, first=first)
                return
        first = False  # the holder of the lock may be about to publish
        if (missing := ender.missing(transaction, topics, deadline)) != left:
            left, patience = missing, Deadline(stalled)
        deadline.check("waiting for another process that publishes the same transaction")
        time.sleep(_PROGRESS_POLL_SECONDS)


def publish_decided(ender: HalfEnder, transaction: str, claim: LedgerClaim, deadline: Deadline) -> None:
    """Publish a transaction that another process committed, so that the caller's own messages come after it."""
    topics = halves_from_json(claim.data)
    with ender.cluster.context.events.step("step:publish", transaction):
        _wait_out_immunity(ender, transaction, topics, deadline)
        publish_exclusively(ender, transaction, topics, deadline)


def _wait_out_immunity(ender: HalfEnder, transaction: str, topics: Sequence[HalfCount], deadline: Deadline) -> None:
    """Wait until all messages are published, or until the immunity time of their halves is past.

    After the immunity time, no owner can commit the halves directly, at the same time as the caller. Brokers judge a
    half's age by its born time, which the sender's clock gave.
    """
    settings = [ender.cluster.brokers.config(each.broker, deadline) for each in topics]
    stale = Deadline(max((immunity(each) for each in settings), default=0) + _BORN_TIME_SKEW_SECONDS)
    while ender.missing(transaction, topics, deadline) and not stale.expired:
        deadline.check("publishing a transaction that another owner committed")
        time.sleep(_PROGRESS_POLL_SECONDS)


def _claim(
    ender: HalfEnder,
    token: Token,
    decision: Decision,
    prepared: PrepareRecord,
    caller: Mapping[str, Any],
    ledger: Ledger,
    deadline: Deadline,
) -> LedgerClaim:
    if time.time() * 1000 >= prepared.expires_at:
        decision = Decision.ABORT  # the broker may have discarded halves, and the group may have moved on
    data = {**halves_as_json(prepared.topics), **caller}
    log = _log_of(token)
    with ender.cluster.context.events.step("step:decide", token.transaction, decision=decision.value) as step:
        try:
            if decision is Decision.COMMIT and prepared.acks:
                claim = _commit_with_acks(token, prepared.acks, data, ledger, deadline)
            else:
                claim = ledger.claim(token.transaction, decision, data, deadline, log=log)
        except errors.Conflict:
            claim = ledger.claim(token.transaction, Decision.ABORT, data, deadline, log=log)
        step["decided"] = claim.decision.value
    return claim


def _commit_with_acks(
    token: Token, acks: Sequence[Ack], data: Mapping[str, Any], ledger: Ledger, deadline: Deadline
) -> LedgerClaim:
    """Record the decision to commit a prepared transaction. Raise `Conflict` if a group's position was moved meanwhile.

    A member that does not know of the prepared transaction may acknowledge the same messages, which does not count. But
    if it did so after `read_up_to` of an ack, this record does not count, and is written again (hazard H95).
    """
    while True:
        now = [_ack_now(ack, ledger, deadline) for ack in acks]
        try:
            return ledger.claim(token.transaction, Decision.COMMIT, data, deadline, log=_log_of(token), acks=now)
        except errors.Conflict:
            if now == list(acks):
                raise
            deadline.check("committing a prepared transaction")


def _ack_now(ack: Ack, ledger: Ledger, deadline: Deadline) -> Ack:
    try:
        positions, read_up_to = ledger.positions(ack.group, deadline)
    except errors.EvidenceLost:  # what is known since the transaction began can still show that nobody came between
        return ack
    if (at := positions.get(ack.partition)) is None or VerifiableOffset.of(at).next != ack.first[0]:
        raise errors.Conflict(f"group {ack.group!r} was moved in {ack.partition[0]}[{ack.partition[1]}]")
    return replace(ack, read_up_to=read_up_to)


def _log_of(token: Token) -> Mapping[str, Any]:
    if token.log is None:
        raise errors.InvalidToken("this token is damaged: it does not name its decision log")
    return token.log


def _whole(token: Token) -> PrepareRecord | None:
    """Return a prepare record made from the token of a transaction that is only one half; None for other tokens."""
    if not token.how or token.expires_at is None:
        return None
    topics = halves_from_json(token.how)
    if [each.count for each in topics] != [1]:
        raise errors.InvalidToken("this token is damaged: it does not name one message")
    return PrepareRecord(topics, (), token.expires_at, whole=True)


def _prepared(token: Token, ledger: Ledger, deadline: Deadline) -> PrepareRecord:
    prepared = _whole(token) or prepare_record(ledger, token.transaction, _log_of(token), deadline)
    if prepared is None:
        raise errors.InvalidToken(
            "this token's transaction was never prepared: a newer owner opened its transactional id before"
        )
    return prepared


# --- status -------------------------------------------------------------------------------------------------------


def status_of(ender: HalfEnder, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
    """Return the status of a token's transaction, and abort it if it has expired. Decide nothing else."""
    clocks_differ = ender.cluster.settings.timing.clocks_differ
    try:
        # Read the clock first: what is published without a decision is published before the deadline (hazard H102).
        was_over = token.expires_at is not None and is_over(token.expires_at, clocks_differ)
        claim = ledger.decided(token.transaction, deadline, log=_log_of(token))
        whole = _whole(token)
        if claim is None and whole is not None and was_published(ender, token.transaction, whole.topics, deadline):
            return Status(TokenState.COMMITTED, reason="its message is published")
        if claim is None and was_over:
            # Without halves no check-back follows, so perhaps no other process ever aborts it (hazard H73).
            claim = ledger.claim(token.transaction, Decision.ABORT, halves_as_json([]), deadline, log=_log_of(token))
    except errors.EvidenceLost as error:
        return Status(TokenState.UNKNOWN, reason=str(error), permanent=True)
    except (errors.OutcomeUnknown, errors.BrokerUnavailable, errors.AccessDenied) as error:
        return Status(TokenState.UNKNOWN, reason=str(error))
    if claim is not None:
        return _status_by(claim, ender, token, deadline)
    if token.prepared:
        return Status(TokenState.PREPARED, expires_at=token.expires_at)
    return Status(
        TokenState.UNKNOWN,
        reason="nothing is decided yet; some seconds after its deadline, asking for the status aborts it",
    )


def _status_by(claim: LedgerClaim, ender: HalfEnder, token: Token, deadline: Deadline) -> Status:
    """Return the status of a decided transaction: COMMITTED once all its messages are published, UNKNOWN before."""
    if claim.decision is Decision.ABORT:
        return Status(TokenState.ABORTED, reason="the decision log says so")
    try:
        topics, age = halves_from_json(claim.data), seconds_since(claim.data)
        unpublished = ender.unpublished(token.transaction, topics, age, deadline)
    except errors.TxnBridgeError as error:
        reason = f"it is committed; whether all its messages are published cannot be looked up now: {error}"
        return Status(TokenState.UNKNOWN, reason=reason)
    if unpublished:
        return Status(
            TokenState.UNKNOWN, reason=f"it is committed; {unpublished} of its messages are not published yet"
        )
    return Status(TokenState.COMMITTED, reason="the decision log says so")
