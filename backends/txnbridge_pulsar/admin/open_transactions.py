"""Lists a cluster's open transactions: from its coordinators, with details from fence topics and proof topics."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, OutcomeUnknown, TxnBridgeError
from txnbridge.spi import Deadline, Outcome, Token
from txnbridge_pulsar.admin.rest import RestRefused, unavailable
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.end_delivery import Participants
from txnbridge_pulsar.outcome.forgotten_transactions import NO_PROOF, load_coordinators
from txnbridge_pulsar.outcome.late_writes import refuse_late_writes
from txnbridge_pulsar.outcome.outcome import EndResult, TokenEvidence, end, outcome_by_proof
from txnbridge_pulsar.outcome.proof import last_presence, proof_prefix
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, decoded, encoded
from txnbridge_pulsar.write.fence import fence_prefix, listed_record
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation

_log = logging.getLogger("txnbridge")

_TXN_ID = re.compile(r"\((\d+),\s*(\d+)\)")
# A writer's name: the transactional id and the writer's number, with a p for prepared transactions.
_WRITER = re.compile(r"(?P<owner>.+)\.(?P<prepares>p?)\d+", re.DOTALL)
# While a registered topic is not loaded, coordinators refuse to list, and those of 4.0 never answer.
_UNLOADED_TOPIC_TEXT = re.compile(r"Topic not found (persistent://\S+)")
# Part of the broker's error about a deleted subscription, which does not name the subscription.
_DELETED_SUBSCRIPTION_TEXT = "PersistentSubscription.getTransactionInPendingAckStats"
_LATE_WRITES_SECONDS = 3.0  # for having late messages of an aborted transaction refused, behind others' anchors
_RETRY_PAUSE_SECONDS = 0.1


class ListingBlocked(BrokerUnavailable):
    """The coordinators list no transactions, because an open transaction has acknowledged on a deleted subscription."""


@dataclass(frozen=True)
class ListedTransaction:
    """A transaction that has not ended, listed by its coordinator, with details from its fence and proof topics."""

    txn: TxnId
    status: str
    since: int
    expires_at: int
    topics: tuple[str, ...]  # concrete topics
    subscriptions: tuple[tuple[str, str], ...]
    proof_topic: str = ""  # of its writer, if a bridge wrote it
    writer: str = ""
    owner: str = ""
    prepares: bool = False  # whether its writer is for prepared transactions
    transaction: str = ""
    proof: ProofLocation | None = None
    prepared: bool = False
    messages: int | None = None

    @property
    def name(self) -> str:
        """Return the transaction's name if a bridge began it, else its id at the coordinator."""
        return self.transaction or str(self.txn)

    @property
    def is_empty(self) -> bool:
        """Return whether the transaction holds nothing back, like the anchors of bridges."""
        return not (self.topics or self.subscriptions)

    @property
    def users_topics(self) -> tuple[str, ...]:
        return tuple(topic for topic in self.topics if topic != self.proof_topic)


def list_open(cluster: ClusterAccess, deadline: Deadline) -> list[ListedTransaction]:
    """Return the open transactions of all programs in the cluster, with an `admin_url`.

    Raise `ListingBlocked` if the coordinators list none.
    """
    listed = [_as_listed(cluster, number, about) for number, about in _listed(cluster, deadline).items()]
    owners = {transaction.owner for transaction in listed if transaction.owner}
    announced = {each.txn: each for owner in owners for each in _under_way(cluster, owner, deadline)}
    return [_with_details(cluster, transaction, announced.get(transaction.txn), deadline) for transaction in listed]


def _listed(cluster: ClusterAccess, deadline: Deadline) -> Mapping[str, Any]:
    load_coordinators(cluster, deadline)  # else coordinators do not answer, and no transaction times out
    patience = Deadline(min(cluster.settings.timing.listing_seconds, deadline.left()))
    while True:
        try:
            return cluster.rest.get("/admin/v3/transactions/slowTransactions/0", patience) or {}
        except DeadlineExceeded:
            if deadline.expired or patience is deadline:
                raise
            patience, unloaded = deadline, None
            # A topic of an open transaction is not loaded, and the broker does not say which: load the whole namespace.
            in_parallel(lambda topic: _load(cluster, topic, deadline), cluster.topics.all_concrete(deadline))
        except RestRefused as refused:
            if _DELETED_SUBSCRIPTION_TEXT in refused.text:
                raise ListingBlocked(
                    "listing open transactions: one of them names a subscription that was deleted, and brokers list"
                    " none until this one has ended. They abort it when it times out"
                ) from refused
            if deadline.left() <= _RETRY_PAUSE_SECONDS:
                raise unavailable(refused, "listing open transactions") from refused
            unloaded = _UNLOADED_TOPIC_TEXT.search(refused.text)
        if unloaded is None:
            time.sleep(_RETRY_PAUSE_SECONDS)
        else:
            _load(cluster, unloaded[1], deadline)


def _load(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    with translated(f"loading {topic}"):
        cluster.client.read(topic, timeout=deadline.left()).close(deadline.left())


def _as_listed(cluster: ClusterAccess, number: str, about: Mapping[str, Any]) -> ListedTransaction:
    most, least = _TXN_ID.findall(number)[0]
    topics = tuple(about.get("producedPartitions") or {})
    opened = int(about["openTimestamp"])
    begins = f"persistent://{cluster.settings.namespace}/{proof_prefix(cluster)}"
    proof_topic = next((topic for topic in topics if topic.startswith(begins)), "")
    writer = decoded(proof_topic.removeprefix(begins))
    named = _WRITER.fullmatch(writer)
    acked: Mapping[str, Mapping[str, Any]] = about.get("ackedPartitions") or {}
    subscriptions = tuple((topic, subscription) for topic, named in acked.items() for subscription in named)
    prepared = (proof_topic, SUBSCRIPTION)
    return ListedTransaction(
        txn=TxnId(int(most), int(least)),
        status=str(about["status"]),
        since=opened,
        expires_at=opened + int(about["timeoutAt"]),  # a duration, despite its name
        topics=topics,
        subscriptions=tuple(pair for pair in subscriptions if pair != prepared),
        proof_topic=proof_topic,
        writer=writer,
        owner="" if named is None else named["owner"],
        prepares=named is not None and bool(named["prepares"]),
        prepared=prepared in subscriptions,
    )


def _under_way(cluster: ClusterAccess, owner: str, deadline: Deadline) -> tuple[AnnouncedTransaction, ...]:
    """Return the transactions that the newest owner of a transactional id lists on its fence topic as not ended.

    Return none if the id has no fence topic, or a damaged record there.
    """
    name = f"{fence_prefix(cluster)}{encoded(owner)}"
    if not cluster.topics.existing(name, deadline):
        return ()
    newest = listed_record(cluster, f"persistent://{cluster.settings.namespace}/{name}", deadline)
    return () if newest is None else tuple(newest.under_way)


def _with_details(
    cluster: ClusterAccess, listed: ListedTransaction, announced: AnnouncedTransaction | None, deadline: Deadline
) -> ListedTransaction:
    if announced is not None:
        return replace(
            listed,
            transaction=announced.transaction,
            proof=announced.proof,
            prepared=announced.prepared,
            messages=announced.messages if announced.prepared else None,
        )
    if not listed.prepares:
        return listed
    # A bridge without a transactional id has no fence topic; its proof topic names the transaction.
    presence = last_presence(cluster, listed.proof_topic, deadline)
    if presence is None:
        return replace(listed, prepared=False)
    proof, record = presence
    return replace(listed, transaction=record.transaction, proof=proof)


def token_of(cluster: ClusterAccess, listed: ListedTransaction) -> Token | None:
    """Return the token of a prepared transaction; None if the transaction is not prepared."""
    if not listed.prepared or listed.proof is None:
        return None
    participants = Participants(listed.topics, listed.subscriptions)
    evidence = TokenEvidence(listed.txn, listed.proof, participants=participants)
    return Token(
        broker="pulsar",
        cluster=cluster.id,
        transaction=listed.transaction,
        how=evidence.fields(),
        prepared=True,
        expires_at=listed.expires_at,
        messages=listed.messages or 0,
    )


def abort(cluster: ClusterAccess, listed: ListedTransaction, deadline: Deadline) -> Outcome:
    """Abort a transaction of another process, and have brokers refuse its late messages.

    Return the true outcome: the process may have committed the transaction before.
    """
    ended = end(cluster, listed.txn, False, listed.topics, deadline)
    if ended is EndResult.ABORTED:
        ids, proof = (listed.transaction, listed.txn), listed.proof or NO_PROOF
        aborted = AnnouncedTransaction(*ids, listed.topics, listed.subscriptions, proof)
        _have_late_writes_refused(cluster, aborted, deadline)
        return Outcome.ABORTED
    if ended is EndResult.COMMITTED:
        return Outcome.COMMITTED
    if listed.proof is None:
        raise OutcomeUnknown(f"transaction {listed.name} ended before the abort, and its outcome is not known")
    return outcome_by_proof(cluster, listed.txn, listed.proof, deadline)


def _have_late_writes_refused(cluster: ClusterAccess, aborted: AnnouncedTransaction, deadline: Deadline) -> None:
    """Have brokers refuse the late messages of an aborted transaction; log a warning if they do not in time."""
    reason = "an older transaction is open"
    until = Deadline(min(deadline.left(), _LATE_WRITES_SECONDS))
    while not until.expired:
        try:
            if refuse_late_writes(cluster, aborted, until):
                return
        except TxnBridgeError as error:
            reason = str(error)
        time.sleep(min(until.left(), _RETRY_PAUSE_SECONDS))
    _log.warning(
        "transaction %s is aborted, but brokers do not refuse late messages of its writer yet (%s): such a message may"
        " hold readers of its topics back. Stop that writer, and end older transactions (txnbridge transactions list)",
        *(aborted.transaction or aborted.txn, reason),
    )
