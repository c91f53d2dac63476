"""Ends transactions by their ids, and finds their outcomes: from the coordinator, then from the proof message.

A coordinator forgets a transaction that has ended, and then gives the same answer for committed, aborted, timed-out and
never begun transactions (hazard H46). A request to end a transaction is repeated if no answer comes. After a repeated
request only the proof message shows the outcome (hazard H48).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from txnbridge.errors import BrokerUnavailable, EvidenceLost, InvalidToken, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Outcome, Status, Token, TokenState
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.outcome.anchors import end_anchors
from txnbridge_pulsar.outcome.broker_evidence import has_undelivered_commit
from txnbridge_pulsar.outcome.end_delivery import NO_PARTICIPANTS, Participants, deliver_everywhere
from txnbridge_pulsar.outcome.proof import was_committed
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation

_log = logging.getLogger("txnbridge")

# Seconds between requests about a transaction that is being ended, or to a coordinator that is not available.
_RETRY_PAUSE_SECONDS = 0.05
# A deadline has time for this many end requests: a lost answer never arrives, so the request is repeated.
_ATTEMPTS_PER_DEADLINE = 3
_MIN_ATTEMPT_SECONDS = 1.0
_REQUEST_SHARE = 0.8  # of the time left; the rest is for finding out why there was no answer
# Seconds that `status_of` waits for a transaction that is being ended, which takes milliseconds.
_ENDING_SECONDS = 2.0
# Seconds for reading a proof topic. A proof that cannot be read by then is hidden by an open transaction.
_PROOF_SECONDS = 5.0

_COMMITTING = {"COMMITTING", "COMMITTED"}
_ABORTING = {"ABORTING", "ABORTED"}


class EndResult(Enum):
    """The result of requesting a transaction's end from its coordinator."""

    COMMITTED = "it is committed"
    ABORTED = "it is aborted"
    BEFORE = "it had ended before the first request came"
    UNCLEAR = "it had ended before the request that was answered, perhaps by an earlier one"


@dataclass(frozen=True)
class TokenEvidence:
    """A token's fields by which Pulsar's transaction is ended or its outcome found. `txn` is None if none was begun."""

    txn: TxnId | None
    proof: ProofLocation | None
    asked: bool = True  # whether its writer requested the commit
    participants: Participants = NO_PARTICIPANTS  # of a prepared transaction
    anchor: int | None = None  # id of a prepared transaction's anchor at its coordinator

    def fields(self) -> dict[str, Any]:
        return {
            "x": None if self.txn is None else list(self.txn),
            "a": self.asked,
            **({} if self.proof is None else self.proof.fields()),
            **({} if self.anchor is None else {"k": self.anchor}),
            **self.participants.fields(),
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> TokenEvidence:
        """Return what a token's fields say about its outcome. Raise `InvalidToken` if a field is missing or invalid."""
        try:
            if fields["x"] is None:
                return cls(None, None, fields["a"] is True)
            most, least = fields["x"]
            anchor = fields.get("k")
            if not isinstance(most, int) or not isinstance(least, int) or not isinstance(anchor, int | None):
                raise TypeError("not numbers")
            proof, asked, participants = ProofLocation.read(fields), fields["a"] is True, Participants.read(fields)
            return cls(TxnId(most, least), proof, asked, participants, anchor)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidToken("this token is damaged: it does not name a transaction and its proof topic") from error


# --- ending ---------------------------------------------------------------------------------------------------------


def end(cluster: ClusterAccess, txn: TxnId, commit: bool, topics: Sequence[str], deadline: Deadline) -> EndResult:
    """Request the commit or abort of a transaction from its coordinator, repeatedly until the coordinator answers.

    `topics` are the transaction's registered topics, as far as known: if one of them is terminated, the coordinator may
    never answer. Raise `OutcomeUnknown` if a request was sent and none was answered by the deadline,
    `BrokerUnavailable` if no request could be sent, `AccessDenied` if the bridge's user may not end the transaction.
    """
    asked = False
    patience = max(deadline.seconds / _ATTEMPTS_PER_DEADLINE, _MIN_ATTEMPT_SECONDS)
    patient = Deadline(patience)
    under_way: EndResult | None = None  # the end that the coordinator says it is carrying out
    while True:
        try:
            cluster.client.transactions.end(txn, commit, min(deadline.left() * _REQUEST_SHARE, patience))
            return EndResult.COMMITTED if commit else EndResult.ABORTED
        except wire.TransactionNotFound:
            return under_way or (EndResult.UNCLEAR if asked else EndResult.BEFORE)
        except wire.InvalidTransactionStatus as error:
            if error.state in _COMMITTING | _ABORTING:
                under_way = EndResult.COMMITTED if error.state in _COMMITTING else EndResult.ABORTED
            last: wire.PulsarError = error
        except wire.PulsarError as error:
            if not (error.retriable or isinstance(error, wire.BrokerConnectionLost)):
                in_doubt = asked or under_way is not None or error.may_have_had_effect
                raise _not_answered(txn, commit, in_doubt, error) from error
            asked = asked or error.may_have_had_effect or isinstance(error, wire.ServerError)
            last = error
        if patient.expired or isinstance(last, wire.RequestTimedOut):
            if _is_stuck_abort(cluster, txn, topics, deadline):
                return EndResult.ABORTED
            patient = Deadline(patience)
        if deadline.left() <= _RETRY_PAUSE_SECONDS:
            raise _not_answered(txn, commit, asked or under_way is not None, last) from last
        time.sleep(_RETRY_PAUSE_SECONDS)


def _is_stuck_abort(cluster: ClusterAccess, txn: TxnId, topics: Sequence[str], deadline: Deadline) -> bool:
    """Return whether a transaction is aborted, though its coordinator never answers because a topic was terminated.

    The coordinator has stored that it has begun the abort, so nobody can turn it into a commit. Messages on the
    terminated topic would only become visible by a commit marker, and no marker can be stored there. To all other
    topics and to all subscriptions the coordinator has sent the abort at the same time, and it keeps sending the abort,
    so late messages are aborted, too. The terminated topic's subscriptions are also reached, because their pending-ack
    logs are BookKeeper ledgers of their own.

    Raise `OutcomeUnknown` for a commit that is stuck: it has not arrived everywhere and cannot be taken back. The
    transaction's messages on the terminated topic are lost, which only a user may accept.
    """
    deadline = Deadline(min(_PROOF_SECONDS, deadline.left()))
    stopped = terminated(cluster, topics, deadline)
    if not stopped:
        return False
    try:
        state = _register_again(cluster, txn, deadline, topics=stopped[:1])
    except TxnBridgeError as error:
        _log.debug("whether %s is being aborted: %s", txn, error)
        return False
    if state in _COMMITTING:
        raise OutcomeUnknown(f"the commit of {txn} cannot finish: {repair_hint(stopped)}")
    return state in _ABORTING


def _not_answered(txn: TxnId, commit: bool, asked: bool, error: wire.PulsarError) -> TxnBridgeError:
    if asked:
        return OutcomeUnknown(f"the broker did not answer the {'commit' if commit else 'abort'} of {txn}: {error}")
    return translate(error, f"ending transaction {txn}")


# --- tokens ---------------------------------------------------------------------------------------------------------


def end_prepared(cluster: ClusterAccess, token: Token, commit: bool, deadline: Deadline) -> Outcome:
    """End a prepared transaction by its token; return the true outcome, which another process may have decided.

    Raise `OutcomeUnknown` if the outcome is not known, and also if a commit may not have reached all participants,
    because a broker is away: then the commit has to be requested again.
    """
    evidence = TokenEvidence.read(token.how)
    if evidence.txn is None or evidence.proof is None:
        raise InvalidToken("this token is damaged: it has no id of the prepared transaction")
    with cluster.events.step("step:end", token.transaction, decision="commit" if commit else "abort") as event:
        topics = tuple(dict.fromkeys((evidence.proof.topic, *evidence.participants.topics)))
        ended = end(cluster, evidence.txn, commit, topics, deadline)
        event["ended"] = ended.name
    known = {EndResult.COMMITTED: Outcome.COMMITTED, EndResult.ABORTED: Outcome.ABORTED}.get(ended)
    outcome = known or outcome_by_proof(cluster, evidence.txn, evidence.proof, deadline)
    if outcome is Outcome.COMMITTED:
        # The proof topic is told even if there was no room for others: the slot's next transaction ends on it.
        participants = Participants(topics, evidence.participants.subscriptions)
        if not deliver_everywhere(cluster, evidence.txn, participants, deadline):
            raise OutcomeUnknown(
                f"{evidence.txn} is committed, but brokers are away, and on some of its topics and groups the commit"
                " may be missing, so that a later transaction would take it back there. Commit it again"
            )
    if evidence.anchor is not None:
        end_anchors(cluster, [TxnId(evidence.txn.most, evidence.anchor)], deadline)
    return outcome


def outcome_by_proof(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> Outcome:
    """Return the outcome of a transaction that its coordinator has forgotten, as its proof message shows it.

    Raise `OutcomeUnknown` if an open transaction hides the proof, `EvidenceLost` if the proof topic has lost records.
    """
    committed = _committed_by_proof(cluster, proof, txn, deadline)
    if committed is None:
        raise OutcomeUnknown(f"the outcome of {txn} is not known yet: an open transaction hides it on {proof.topic}")
    return Outcome.COMMITTED if committed else Outcome.ABORTED


def confirm_by_proof(cluster: ClusterAccess, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
    """Find by its proof the outcome of a transaction that its coordinator has forgotten; return whether it is known.

    Until then no other transaction may end on the same topics. If the transaction was committed, deliver the commit to
    all its participants again; the outcome counts as known when all are reached. On a topic that the commit has not
    reached, the end of the next transaction would take the commit back.
    """
    try:
        committed = _committed_by_proof(cluster, ended.proof, ended.txn, deadline)
    except EvidenceLost as lost:
        _log.debug("the outcome of transaction %s is not known: %s", ended.txn, lost)
        committed = None
    if committed is None and cluster.rest:
        committed = has_undelivered_commit(cluster, ended.txn, ended.topics, deadline)
    if committed:
        return deliver_everywhere(cluster, ended.txn, Participants(ended.topics, ended.subscriptions), deadline)
    return committed is not None


def status_of(cluster: ClusterAccess, token: Token, deadline: Deadline) -> Status:
    """Return the status of a token's transaction, prepared or not, without changing the transaction."""
    evidence = TokenEvidence.read(token.how)
    if evidence.txn is None or evidence.proof is None:
        state = TokenState.COMMITTED if evidence.asked else TokenState.ABORTED
        return Status(state, reason="it was empty, so the broker never knew of it")
    if not (evidence.asked or token.prepared):
        return Status(TokenState.ABORTED, reason="its writer has not requested its commit, and no other process may")
    state_now = _wait_for_end(cluster, evidence.txn, evidence.proof, deadline)
    if state_now == "OPEN":
        if token.prepared:
            return Status(TokenState.PREPARED, expires_at=token.expires_at)
        return Status(TokenState.UNKNOWN, reason="it is still open; its writer has not ended it yet")
    if state_now in _ABORTING:
        return Status(TokenState.ABORTED, reason="its coordinator has begun to abort it, and nothing can stop that")
    if state_now:
        return Status(TokenState.UNKNOWN, reason=f"its coordinator says that it is {state_now}")
    try:
        committed = _committed_by_proof(cluster, evidence.proof, evidence.txn, deadline)
    except EvidenceLost as lost:
        return Status(TokenState.UNKNOWN, reason=str(lost), permanent=True)
    if committed is None:
        return Status(TokenState.UNKNOWN, reason="an open transaction hides its proof message; ask later")
    return Status(TokenState.COMMITTED if committed else TokenState.ABORTED)


def _committed_by_proof(cluster: ClusterAccess, proof: ProofLocation, txn: TxnId, deadline: Deadline) -> bool | None:
    """Wait until the proof topic is served, and return whether a transaction was committed, None if that is hidden."""
    while True:
        try:
            return was_committed(cluster, proof, txn, Deadline(min(deadline.left(), _PROOF_SECONDS)))
        except BrokerUnavailable:
            if deadline.left() <= _RETRY_PAUSE_SECONDS:
                raise
        time.sleep(_RETRY_PAUSE_SECONDS)


def _wait_for_end(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> str:
    """Return a transaction's state at its coordinator; wait for up to `_ENDING_SECONDS` while it is being ended."""
    until = Deadline(min(_ENDING_SECONDS, deadline.left()))
    while (state := coordinator_state(cluster, txn, proof, deadline)) not in ("", "OPEN") and not until.expired:
        time.sleep(_RETRY_PAUSE_SECONDS)
    return state


def coordinator_state(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> str:
    """Return a transaction's state at its coordinator, such as "OPEN"; "" if the coordinator has forgotten it.

    The protocol has no request for the state, so the proof topic is registered with the transaction again. This changes
    nothing. If the transaction is not open, the coordinator refuses the registration and names the state.
    """
    return _register_again(cluster, txn, deadline, topics=[proof.topic])


def note_prepared(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> str:
    """Make the coordinator list an open transaction as prepared; return the transaction's state at the coordinator.

    The protocol has no field for this, so the proof topic's subscription is registered with the transaction, although
    the transaction never acknowledges on it. A process that lists the transaction finds this subscription.
    """
    return _register_again(cluster, txn, deadline, subscriptions=[(proof.topic, SUBSCRIPTION)])


def _register_again(
    cluster: ClusterAccess,
    txn: TxnId,
    deadline: Deadline,
    topics: Sequence[str] = (),
    subscriptions: Sequence[tuple[str, str]] = (),
) -> str:
    try:
        cluster.client.transactions.register(txn, deadline.left(), topics, subscriptions)
        return "OPEN"
    except wire.TransactionNotFound:
        return ""
    except wire.InvalidTransactionStatus as error:
        return error.state or "being ended"
    except wire.PulsarError as error:
        raise translate(error, f"asking the coordinator of transaction {txn}") from error


def terminated(cluster: ClusterAccess, topics: Sequence[str], deadline: Deadline) -> tuple[str, ...]:
    """Return which of these topics, or partitions of topics, are known to be terminated.

    Nothing can be stored on a terminated topic, so the coordinator cannot write a control marker there. The coordinator
    ends the transaction on all other topics, tries the terminated topic again for ever, and never answers the request
    (hazard H54).
    """
    answers = in_parallel(lambda topic: _is_terminated(cluster, topic, deadline), topics)
    return tuple(topic for topic, is_terminated in zip(topics, answers, strict=True) if is_terminated)


def _is_terminated(cluster: ClusterAccess, topic: str, deadline: Deadline) -> bool:
    client = cluster.client
    try:
        # A producer would create a deleted topic anew, so first open a reader with `create=False`, which fails.
        client.read(topic, timeout=deadline.left(), create=False).close(deadline.left())
        client.create_producer(topic, timeout=deadline.left()).close(deadline.left())
    except wire.TopicTerminated:
        return True
    except wire.PulsarError:
        return False  # not known; the caller treats the topic as not terminated
    return False


def repair_hint(topics: Sequence[str]) -> str:
    """Return the error text about a commit that terminated topics keep from finishing: the loss, and the remedy."""
    names = ", ".join(topics)
    return (
        f"{names} was terminated while the transaction was open, so its coordinator commits it on all other topics and"
        " never finishes: readers cannot get its messages there, nor later ones. Save the messages that you need of"
        f" {names}; once it is deleted, the commit finishes by itself: pulsar-admin topics delete --force"
    )
