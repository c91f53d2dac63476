"""What became of a transaction, and ending one by its number: its coordinator while that knows it, then the marker.

A coordinator forgets a transaction as soon as it has ended, and then says the same of committed, aborted, timed out and
never begun ones. A request that was not answered is repeated; but then only a record that stands inside the transaction
tells how it ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from txnbridge.errors import BrokerUnavailable, EvidenceLost, InvalidToken, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Ledger, Outcome, Status, Token, TokenState
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translate
from txnbridge_pulsar.outcome.broker_evidence import had_committed
from txnbridge_pulsar.outcome.end_delivery import NO_PARTICIPANTS, Participants, deliver_everywhere
from txnbridge_pulsar.outcome.proof import was_committed
from txnbridge_pulsar.outcome.terminated_topics import how_to_mend, terminated
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation

_log = logging.getLogger("txnbridge")

# Between two questions about a transaction that is being ended, or to a coordinator that is not there.
_PAUSE = 0.05
# An answer that got lost comes no more; asked in good time, the same question is answered.
_ATTEMPTS = 3
_LEAST_PATIENCE = 1.0
_MOST_OF_IT = 0.8  # of what is left: the rest is for looking why no answer came
# How long a status waits for a transaction that is being ended this moment; that takes milliseconds.
_MOMENT = 2.0
# A marker that cannot be read by then is hidden by an open transaction, which may take as long as it likes.
_LOOK_SECONDS = 5.0

_COMMITTING = {"COMMITTING", "COMMITTED"}
_ABORTING = {"ABORTING", "ABORTED"}


class EndResult(Enum):
    """What the request to end a transaction came to."""

    COMMITTED = "it is committed"
    ABORTED = "it is aborted"
    BEFORE = "it had ended before the first request came"
    UNCLEAR = "it had ended before the request that was answered, perhaps by an earlier one"


@dataclass(frozen=True)
class TokenEvidence:
    """What a token tells of its transaction. `txn` is None if nothing was ever asked of the broker."""

    txn: TxnId | None
    proof: ProofLocation | None
    asked: bool = True  # whether its writer came to ask for the commit
    participants: Participants = NO_PARTICIPANTS  # of one that is prepared

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.proof is None else self.proof.fields()
        return {
            "x": None if self.txn is None else list(self.txn),
            "a": self.asked,
            **found,
            **self.participants.fields(),
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> TokenEvidence:
        """Raises `InvalidToken`."""
        try:
            if fields["x"] is None:
                return cls(None, None, fields["a"] is True)
            most, least = fields["x"]
            if not isinstance(most, int) or not isinstance(least, int):
                raise TypeError("not numbers")
            return cls(TxnId(most, least), ProofLocation.read(fields), fields["a"] is True, Participants.read(fields))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidToken("this token is damaged: it does not name a transaction and its marker topic") from error


# --- ending ---------------------------------------------------------------------------------------------------------


def end(cluster: ClusterAccess, txn: TxnId, commit: bool, topics: Sequence[str], deadline: Deadline) -> EndResult:
    """Ask a coordinator to end a transaction, until it answers. The decision is never changed on the way.

    `topics` are those that the transaction has named, as far as they are known: one of them may keep the coordinator
    from ever answering, see `_stuck`.

    Raises `OutcomeUnknown` if it was asked and has not answered by the deadline, `BrokerUnavailable` if it could not
    be asked, `AccessDenied`.
    """
    asked = False
    patience = max(deadline.seconds / _ATTEMPTS, _LEAST_PATIENCE)
    patient = Deadline(patience)
    under_way: EndResult | None = None  # the end that the coordinator says it is carrying out
    while True:
        try:
            cluster.client.transactions.end(txn, commit, min(deadline.left() * _MOST_OF_IT, patience))
            return EndResult.COMMITTED if commit else EndResult.ABORTED
        except wire.TransactionNotFound:
            return under_way or (EndResult.UNCLEAR if asked else EndResult.BEFORE)
        except wire.InvalidTransactionStatus as error:
            under_way = _being(error) or under_way
            last: wire.PulsarError = error
        except wire.PulsarError as error:
            if not _may_pass(error):
                in_doubt = asked or under_way is not None or error.may_have_had_effect
                raise _not_answered(txn, commit, in_doubt, error) from error
            asked = asked or error.may_have_had_effect or isinstance(error, wire.ServerError)
            last = error
        if patient.expired or isinstance(last, wire.RequestTimedOut):
            if _stuck(cluster, txn, topics, deadline):
                return EndResult.ABORTED
            patient = Deadline(patience)
        if deadline.left() <= _PAUSE:
            raise _not_answered(txn, commit, asked or under_way is not None, last) from last
        time.sleep(_PAUSE)


def _stuck(cluster: ClusterAccess, txn: TxnId, topics: Sequence[str], deadline: Deadline) -> bool:
    """Return whether a transaction is as good as aborted, although its coordinator never gets to the end of it because
    one of its topics was terminated.

    An abort that the coordinator has begun is stored, and nobody can turn it into a commit. Messages on the terminated
    topic would need a commit marker there to become visible, and no marker can be stored there. On its other topics,
    and on all subscriptions, also those of the terminated topic, whose logs are ledgers of their own, the coordinator
    has asked for the abort at the same time, and goes on asking for it: so late messages are aborted, too.

    Raises `OutcomeUnknown` for a commit that is stuck: it has not arrived everywhere and cannot be taken back, and
    what it has written to the terminated topic is lost, which only a user may accept.
    """
    deadline = Deadline(min(_LOOK_SECONDS, deadline.left()))
    found = terminated(cluster, topics, deadline)
    if not found:
        return False
    try:
        state = _named(cluster, txn, deadline, topics=found[:1])
    except TxnBridgeError as error:
        _log.debug("whether %s is being aborted: %s", txn, error)
        return False
    if state in _COMMITTING:
        raise OutcomeUnknown(f"the commit of {txn} does not end: {how_to_mend(found)}")
    return state in _ABORTING


def _being(error: wire.InvalidTransactionStatus) -> EndResult | None:
    if error.state in _COMMITTING:
        return EndResult.COMMITTED
    return EndResult.ABORTED if error.state in _ABORTING else None


def _may_pass(error: wire.PulsarError) -> bool:
    """Whether the same request may be answered later: trouble of the coordinator's store is, too."""
    return error.retriable or isinstance(error, wire.BrokerConnectionLost)


def _not_answered(txn: TxnId, commit: bool, asked: bool, error: wire.PulsarError) -> TxnBridgeError:
    if asked:
        return OutcomeUnknown(f"the broker did not answer the {'commit' if commit else 'abort'} of {txn}: {error}")
    return translate(error, f"ending transaction {txn}")


# --- tokens ---------------------------------------------------------------------------------------------------------


def end_prepared(cluster: ClusterAccess, token: Token, commit: bool, ledger: Ledger, deadline: Deadline) -> Outcome:
    """End a prepared transaction, and say what is true, whoever was first. Safe to repeat."""
    evidence = TokenEvidence.read(token.how)
    if evidence.txn is None or evidence.proof is None:
        raise InvalidToken("this token is damaged: a prepared transaction has a number")
    with cluster.events.step("step:end", token.transaction, decision="commit" if commit else "abort") as told:
        topics = tuple(dict.fromkeys((evidence.proof.topic, *evidence.participants.topics)))
        ended = end(cluster, evidence.txn, commit, topics, deadline)
        told["ended"] = ended.name
    if ended is EndResult.COMMITTED:
        outcome = Outcome.COMMITTED
    elif ended is EndResult.ABORTED:
        return Outcome.ABORTED
    else:
        outcome = outcome_by_proof(cluster, evidence.txn, evidence.proof, deadline)
    if outcome is Outcome.COMMITTED:
        # The marker topic also where the token had no room for the others: the next transaction of its slot ends on it.
        deliver_everywhere(
            cluster, evidence.txn, True, Participants(topics, evidence.participants.subscriptions), deadline
        )
    return outcome


def outcome_by_proof(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> Outcome:
    """How a transaction ended of which its coordinator says that it has.

    Raises `OutcomeUnknown` while something hides the answer, `EvidenceLost` if it is gone.
    """
    found = _by_proof(cluster, proof, txn, deadline)
    if found is None:
        raise OutcomeUnknown(f"how {txn} ended cannot be read yet: an open transaction hides it on {proof.topic}")
    return Outcome.COMMITTED if found else Outcome.ABORTED


def confirm_by_proof(cluster: ClusterAccess, ended: AnnouncedTransaction, deadline: Deadline) -> bool:
    """Have the end of a transaction that may have been committed reach all topics and subscriptions that it touched,
    before anything else ends there: where the commit has not arrived, another end would take it back.

    False while nobody can tell whether the transaction was committed: then nothing may end there.
    """
    try:
        committed = _by_proof(cluster, ended.proof, ended.txn, deadline)
    except EvidenceLost as lost:
        _log.debug("how %s ended: %s", ended.txn, lost)
        committed = None
    if committed is None and cluster.rest is not None:
        committed = had_committed(cluster, cluster.rest, ended.txn, ended.topics, deadline)
    if committed:
        deliver_everywhere(cluster, ended.txn, True, Participants(ended.topics, ended.subscriptions), deadline)
    return committed is not None


def status_of(cluster: ClusterAccess, token: Token, ledger: Ledger, deadline: Deadline) -> Status:
    """What became of a token's transaction, prepared or not. Changes nothing of it."""
    evidence = TokenEvidence.read(token.how)
    if evidence.txn is None or evidence.proof is None:
        state = TokenState.COMMITTED if evidence.asked else TokenState.ABORTED
        return Status(state, reason="it was empty, and nothing was asked of the broker")
    if not (evidence.asked or token.prepared):
        return Status(TokenState.ABORTED, reason="its writer never came to ask for its commit, and nobody else does")
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
        found = _by_proof(cluster, evidence.proof, evidence.txn, deadline)
    except EvidenceLost as lost:
        return Status(TokenState.UNKNOWN, reason=str(lost), permanent=True)
    if found is None:
        return Status(TokenState.UNKNOWN, reason="an open transaction hides its marker; ask later")
    return Status(TokenState.COMMITTED if found else TokenState.ABORTED)


def _by_proof(cluster: ClusterAccess, proof: ProofLocation, txn: TxnId, deadline: Deadline) -> bool | None:
    """As `was_committed`, for a short time only; but until the deadline while no broker serves the marker topic."""
    while True:
        try:
            return was_committed(cluster, proof, txn, Deadline(min(deadline.left(), _LOOK_SECONDS)))
        except BrokerUnavailable:
            if deadline.left() <= _PAUSE:
                raise
        time.sleep(_PAUSE)


def _wait_for_end(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> str:
    """A coordinator's word for a transaction, empty once it has ended; waits a moment for one that is being ended."""
    until = Deadline(min(_MOMENT, deadline.left()))
    while (state := coordinator_state(cluster, txn, proof, deadline)) not in ("", "OPEN") and not until.expired:
        time.sleep(_PAUSE)
    return state


def coordinator_state(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> str:
    """ "OPEN", or the coordinator's word for what it does with it; empty for one that has ended.

    There is no such question; but naming a topic that was named before changes nothing, and is refused to what is not
    open.
    """
    return _named(cluster, txn, deadline, topics=[proof.topic])


def note_prepared(cluster: ClusterAccess, txn: TxnId, proof: ProofLocation, deadline: Deadline) -> str:
    """Have the coordinator keep of a transaction, as long as it is open, that all of it is stored; its state as above.

    There is no field for it; but the subscription of the marker topic, which nothing is acknowledged on in a
    transaction, is listed with it from then on.
    """
    return _named(cluster, txn, deadline, subscriptions=[(proof.topic, SUBSCRIPTION)])


def _named(
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
