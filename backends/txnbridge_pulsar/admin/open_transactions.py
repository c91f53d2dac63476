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
from txnbridge_pulsar.client.rest import Refused, unavailable
from txnbridge_pulsar.cluster import Cluster
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.outcome.end_delivery import Reach
from txnbridge_pulsar.outcome.late_writes import shut_out
from txnbridge_pulsar.outcome.outcome import Ended, How, end, outcome_by_marker
from txnbridge_pulsar.outcome.proof import marker_prefix, newest_presence
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION, decoded, encoded
from txnbridge_pulsar.topics import NEEDS_REST
from txnbridge_pulsar.write.fence import fence_prefix, newest_notice
from txnbridge_pulsar.write.fence_records import Announced, Marked

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
_NOWHERE = Marked("", (0, 0), "")


class Unlisted(BrokerUnavailable):
    """No transaction can be listed as long as one of them is open."""


@dataclass(frozen=True)
class Found:
    """One transaction that has not ended."""

    txn: TxnId
    status: str
    since: int
    expires_at: int
    topics: tuple[str, ...]  # concrete ones
    subscriptions: tuple[tuple[str, str], ...]
    marker: str = ""  # the marker topic of its writer, if that is one of ours
    writer: str = ""
    owner: str = ""
    prepares: bool = False  # whether its writer is one of those that prepare
    transaction: str = ""
    marked: Marked | None = None
    prepared: bool = False
    messages: int | None = None

    @property
    def name(self) -> str:
        """Its own id, or else the broker's number for it."""
        return self.transaction or str(self.txn)

    @property
    def users_topics(self) -> tuple[str, ...]:
        return tuple(topic for topic in self.topics if topic != self.marker)


def list_open(cluster: Cluster, deadline: Deadline) -> list[Found]:
    """The transactions of all programs that have not ended. Raises `NotSupported` without REST, and `Unlisted`."""
    listed = [_as_listed(cluster, number, about) for number, about in _listed(cluster, deadline).items()]
    owners = {found.owner for found in listed if found.owner}
    announced = {each.txn: each for owner in owners for each in _under_way(cluster, owner, deadline)}
    return [_completed(cluster, found, announced.get(found.txn), deadline) for found in listed]


def _listed(cluster: Cluster, deadline: Deadline) -> Mapping[str, Any]:
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
        except Refused as refused:
            if _DELETED in refused.text:
                raise Unlisted(
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


def _load_all(cluster: Cluster, deadline: Deadline) -> None:
    """The topics of our namespace: which one it is, nobody tells."""
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as loading:
        for loaded in [
            loading.submit(_load, cluster, topic, deadline) for topic in cluster.topics.all_concrete(deadline)
        ]:
            loaded.result()


def _load(cluster: Cluster, topic: str, deadline: Deadline) -> None:
    with translated(f"loading {topic}"):
        cluster.client.read(topic, timeout=deadline.left()).close(deadline.left())


def _as_listed(cluster: Cluster, number: str, about: Mapping[str, Any]) -> Found:
    most, least = _NUMBER.findall(number)[0]
    topics = tuple(about.get("producedPartitions") or {})
    opened = int(about["openTimestamp"])
    begins = f"persistent://{cluster.settings.namespace}/{marker_prefix(cluster)}"
    marker = next((topic for topic in topics if topic.startswith(begins)), "")
    writer = decoded(marker.removeprefix(begins))
    named = _WRITER.fullmatch(writer)
    subscriptions = tuple(_pairs(about.get("ackedPartitions") or {}))
    prepared = (marker, SUBSCRIPTION)
    return Found(
        txn=TxnId(int(most), int(least)),
        status=str(about["status"]),
        since=opened,
        expires_at=opened + int(about["timeoutAt"]),  # it is called a time, and is how long
        topics=topics,
        subscriptions=tuple(pair for pair in subscriptions if pair != prepared),
        marker=marker,
        writer=writer,
        owner="" if named is None else named["owner"],
        prepares=named is not None and bool(named["prepares"]),
        prepared=prepared in subscriptions,
    )


def _pairs(acked: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for topic, subscriptions in acked.items():
        for subscription in subscriptions:
            yield topic, subscription


def _under_way(cluster: Cluster, owner: str, deadline: Deadline) -> tuple[Announced, ...]:
    """The transactions that the newest owner of an id has announced; none for a name that a bridge made up."""
    name = f"{fence_prefix(cluster)}{encoded(owner)}"
    if not cluster.topics.look(name, deadline):
        return ()
    newest = newest_notice(cluster, f"persistent://{cluster.settings.namespace}/{name}", deadline)
    return () if newest is None else tuple(newest[1].under_way)


def _completed(cluster: Cluster, found: Found, announced: Announced | None, deadline: Deadline) -> Found:
    if announced is not None:
        return replace(
            found,
            transaction=announced.transaction,
            marked=announced.marked,
            prepared=announced.prepared,
            messages=announced.messages if announced.prepared else None,
        )
    if not found.prepares:
        return found
    # Nobody fences a name that was made up; its marker topic tells what follows there.
    presence = newest_presence(cluster, found.marker, deadline)
    if presence is None:
        return replace(found, prepared=False)
    marked, record = presence
    return replace(found, transaction=record.transaction, marked=marked)


def token_of(cluster: Cluster, found: Found) -> Token | None:
    """A prepared transaction's token; None for another one."""
    if not found.prepared or found.marked is None:
        return None
    return Token(
        broker="pulsar",
        cluster=cluster.id,
        transaction=found.transaction,
        how=How(found.txn, found.marked, reach=Reach(found.topics, found.subscriptions)).fields(),
        prepared=True,
        expires_at=found.expires_at,
        messages=found.messages or 0,
    )


def abort(cluster: Cluster, found: Found, deadline: Deadline) -> Outcome:
    """End what somebody else has open, and shut out what that may still be sending."""
    ended = end(cluster, found.txn, False, found.topics, deadline)
    if ended is Ended.ABORTED:
        marked = found.marked or _NOWHERE
        shut_out(cluster, Announced(found.transaction, found.txn, found.topics, found.subscriptions, marked), deadline)
        return Outcome.ABORTED
    if ended is Ended.COMMITTED:
        return Outcome.COMMITTED
    if found.marked is None:
        raise OutcomeUnknown(f"transaction {found.name} ended while it was to be aborted, nobody knows how")
    return outcome_by_marker(cluster, found.txn, found.marked, deadline)
