"""The open transactions of a cluster, as its coordinators list them, and what our own topics tell of them besides."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from txnbridge.errors import BrokerUnavailable, DeadlineExceeded, NotSupported, OutcomeUnknown
from txnbridge.spi import Deadline, Outcome, Token
from txnbridge_pulsar.client import TxnId
from txnbridge_pulsar.client.rest import RestRefused, unavailable
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.end_delivery import Participants
from txnbridge_pulsar.outcome.late_writes import refuse_late_writes
from txnbridge_pulsar.outcome.outcome import EndResult, TokenEvidence, end, outcome_by_proof
from txnbridge_pulsar.outcome.proof import last_presence, proof_prefix
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, decoded, encoded
from txnbridge_pulsar.topics import NEEDS_REST
from txnbridge_pulsar.write.fence import fence_prefix, last_fence_record
from txnbridge_pulsar.write.fence_records import AnnouncedTransaction, ProofLocation

_NUMBER = re.compile(r"\((\d+),\s*(\d+)\)")
# The name of a writer of ours: the transactional id, and the writer's number; of one that prepares, with a p.
_WRITER = re.compile(r"(?P<owner>.+)\.(?P<prepares>p?)\d+", re.DOTALL)
# While a topic that a transaction names is not loaded, coordinators refuse to list any; those of 4.0 never answer. A
# listing takes milliseconds.
_UNLOADED = re.compile(r"Topic not found (persistent://\S+)")
# Of Java's complaint about a subscription that is not there; which one it is nobody tells.
_DELETED = "PersistentSubscription.getTransactionInPendingAckStats"
_PATIENCE = 3.0
_SIDE_BY_SIDE = 8
_PAUSE = 0.1
_NOWHERE = ProofLocation("", (0, 0), "")


class ListingBlocked(BrokerUnavailable):
    """No transaction can be listed as long as one of them is open."""


@dataclass(frozen=True)
class ListedTransaction:
    """One transaction that has not ended."""

    txn: TxnId
    status: str
    since: int
    expires_at: int
    topics: tuple[str, ...]  # concrete ones
    subscriptions: tuple[tuple[str, str], ...]
    proof_topic: str = ""  # the marker topic of its writer, if that is one of ours
    writer: str = ""
    owner: str = ""
    prepares: bool = False  # whether its writer is one of those that prepare
    transaction: str = ""
    proof: ProofLocation | None = None
    prepared: bool = False
    messages: int | None = None

    @property
    def name(self) -> str:
        """Its own id, or else the broker's number for it."""
        return self.transaction or str(self.txn)

    @property
    def users_topics(self) -> tuple[str, ...]:
        return tuple(topic for topic in self.topics if topic != self.proof_topic)


def list_open(cluster: ClusterAccess, deadline: Deadline) -> list[ListedTransaction]:
    """The transactions of all programs that have not ended. Raises `NotSupported` without REST, and `Unlisted`."""
    listed = [_as_listed(cluster, number, about) for number, about in _listed(cluster, deadline).items()]
    owners = {found.owner for found in listed if found.owner}
    announced = {each.txn: each for owner in owners for each in _under_way(cluster, owner, deadline)}
    return [_completed(cluster, found, announced.get(found.txn), deadline) for found in listed]


def _listed(cluster: ClusterAccess, deadline: Deadline) -> Mapping[str, Any]:
    rest = cluster.rest
    if rest is None:
        raise NotSupported(f"open transactions cannot be listed: {NEEDS_REST}")
    with translated("loading the coordinators"):  # else they do not answer, nor let any deadline run
        cluster.client.transactions.connect(deadline.left())
    patience = Deadline(min(_PATIENCE, deadline.left()))
    while True:
        try:
            return rest.get("/admin/v3/transactions/slowTransactions/0", patience) or {}
        except DeadlineExceeded:
            if deadline.expired or patience is deadline:
                raise
            patience, unloaded = deadline, None
            _load_all(cluster, deadline)
        except RestRefused as refused:
            if _DELETED in refused.text:
                raise ListingBlocked(
                    "listing open transactions: one of them names a subscription that was deleted, and until that one"
                    " has ended brokers list none. They abort it when its time is over"
                ) from refused
            if deadline.left() <= _PAUSE:
                raise unavailable(refused, "listing open transactions") from refused
            unloaded = _UNLOADED.search(refused.text)
        if unloaded is None:
            time.sleep(_PAUSE)
        else:
            _load(cluster, unloaded[1], deadline)


def _load_all(cluster: ClusterAccess, deadline: Deadline) -> None:
    """The topics of our namespace: which one it is, nobody tells."""
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as loading:
        for loaded in [
            loading.submit(_load, cluster, topic, deadline) for topic in cluster.topics.all_concrete(deadline)
        ]:
            loaded.result()


def _load(cluster: ClusterAccess, topic: str, deadline: Deadline) -> None:
    with translated(f"loading {topic}"):
        cluster.client.read(topic, timeout=deadline.left()).close(deadline.left())


def _as_listed(cluster: ClusterAccess, number: str, about: Mapping[str, Any]) -> ListedTransaction:
    most, least = _NUMBER.findall(number)[0]
    topics = tuple(about.get("producedPartitions") or {})
    opened = int(about["openTimestamp"])
    begins = f"persistent://{cluster.settings.namespace}/{proof_prefix(cluster)}"
    proof_topic = next((topic for topic in topics if topic.startswith(begins)), "")
    writer = decoded(proof_topic.removeprefix(begins))
    named = _WRITER.fullmatch(writer)
    subscriptions = tuple(_pairs(about.get("ackedPartitions") or {}))
    prepared = (proof_topic, SUBSCRIPTION)
    return ListedTransaction(
        txn=TxnId(int(most), int(least)),
        status=str(about["status"]),
        since=opened,
        expires_at=opened + int(about["timeoutAt"]),  # it is called a time, and is how long
        topics=topics,
        subscriptions=tuple(pair for pair in subscriptions if pair != prepared),
        proof_topic=proof_topic,
        writer=writer,
        owner="" if named is None else named["owner"],
        prepares=named is not None and bool(named["prepares"]),
        prepared=prepared in subscriptions,
    )


def _pairs(acked: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for topic, subscriptions in acked.items():
        for subscription in subscriptions:
            yield topic, subscription


def _under_way(cluster: ClusterAccess, owner: str, deadline: Deadline) -> tuple[AnnouncedTransaction, ...]:
    """The transactions that the newest owner of an id has announced; none for a name that a bridge made up."""
    name = f"{fence_prefix(cluster)}{encoded(owner)}"
    if not cluster.topics.look(name, deadline):
        return ()
    newest = last_fence_record(cluster, f"persistent://{cluster.settings.namespace}/{name}", deadline)
    return () if newest is None else tuple(newest[1].under_way)


def _completed(
    cluster: ClusterAccess, found: ListedTransaction, announced: AnnouncedTransaction | None, deadline: Deadline
) -> ListedTransaction:
    if announced is not None:
        return replace(
            found,
            transaction=announced.transaction,
            proof=announced.proof,
            prepared=announced.prepared,
            messages=announced.messages if announced.prepared else None,
        )
    if not found.prepares:
        return found
    # Nobody fences a name that was made up; its marker topic tells what follows there.
    presence = last_presence(cluster, found.proof_topic, deadline)
    if presence is None:
        return replace(found, prepared=False)
    proof, record = presence
    return replace(found, transaction=record.transaction, proof=proof)


def token_of(cluster: ClusterAccess, found: ListedTransaction) -> Token | None:
    """A prepared transaction's token; None for another one."""
    if not found.prepared or found.proof is None:
        return None
    return Token(
        broker="pulsar",
        cluster=cluster.id,
        transaction=found.transaction,
        how=TokenEvidence(
            found.txn, found.proof, participants=Participants(found.topics, found.subscriptions)
        ).fields(),
        prepared=True,
        expires_at=found.expires_at,
        messages=found.messages or 0,
    )


def abort(cluster: ClusterAccess, found: ListedTransaction, deadline: Deadline) -> Outcome:
    """End what somebody else has open, and shut out what that may still be sending."""
    ended = end(cluster, found.txn, False, found.topics, deadline)
    if ended is EndResult.ABORTED:
        proof = found.proof or _NOWHERE
        refuse_late_writes(
            cluster,
            AnnouncedTransaction(found.transaction, found.txn, found.topics, found.subscriptions, proof),
            deadline,
        )
        return Outcome.ABORTED
    if ended is EndResult.COMMITTED:
        return Outcome.COMMITTED
    if found.proof is None:
        raise OutcomeUnknown(f"transaction {found.name} ended while it was to be aborted, nobody knows how")
    return outcome_by_proof(cluster, found.txn, found.proof, deadline)
