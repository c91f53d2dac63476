"""What weakens a promise on a Pulsar cluster, or holds its readers back."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from txnbridge.spi import Advice, Deadline, OpenTransaction, TopicInfo
from txnbridge_pulsar.cluster import Cluster
from txnbridge_pulsar.fence import at_risk
from txnbridge_pulsar.listing import Found
from txnbridge_pulsar.repair import held_back
from txnbridge_pulsar.rest import Refused, Rest, path_of
from txnbridge_pulsar.settings import Settings

# What stands open for longer is worth a look: nothing behind it can be read.
_LONG_SECONDS = 60
# Copies of each record that are stored before it counts, where losing one machine may lose nothing.
_COPIES = 2
_CONF = "set it in broker.conf, and restart the brokers"


def check_settings(rest: Rest, deadline: Deadline) -> Iterator[Advice]:
    """What the brokers were told."""
    found: Mapping[str, str] = rest.get("/admin/v2/brokers/configuration/runtime", deadline)
    yield from _wanted(
        found,
        "transactionCoordinatorEnabled",
        Advice("problem", "transactions", "they are off: transactionCoordinatorEnabled is false", _CONF),
    )
    yield from _wanted(
        found,
        "acknowledgmentAtBatchIndexLevelEnabled",
        Advice(
            "warning",
            "acknowledgements",
            "acknowledgmentAtBatchIndexLevelEnabled is false: of messages that came in one batch the last one decides",
            _CONF,
        ),
    )
    yield from _wanted(
        found,
        "brokerDeduplicationEnabled",
        Advice(
            "warning",
            "deduplication",
            "brokerDeduplicationEnabled is false: a connection that is lost while a transaction sends ends that"
            " transaction, and publishers have no sequences",
            f"{_CONF}, or for a namespace: pulsar-admin namespaces set-deduplication --enable TENANT/NAMESPACE",
        ),
    )
    if _number(found, "managedLedgerDefaultAckQuorum", _COPIES) < _COPIES:
        yield Advice(
            "warning",
            "copies",
            "managedLedgerDefaultAckQuorum is 1: what was committed is lost with one disk",
            "set it to 2 with a write quorum of 3, where there are three bookies",
        )
    yield from _losing("the brokers", found, "ttlDurationDefaultInSeconds", "subscriptionExpirationTimeMinutes")


def check_namespace(rest: Rest, settings: Settings, deadline: Deadline) -> Iterator[Advice]:
    """What the namespace was told."""
    name = settings.namespace
    policies: Mapping[str, Any] = rest.get(f"/admin/v2/namespaces/{path_of(str(name))}", deadline)
    yield from _losing(f"namespace {name}", policies, "message_ttl_in_seconds", "subscription_expiration_time_minutes")
    for quota in (policies.get("backlog_quota_map") or {}).values():
        if quota.get("policy") == "consumer_backlog_eviction":
            yield Advice(
                "problem",
                f"namespace {name}",
                "its backlog quota drops what is not acknowledged, the decision log's records among it",
                f"pulsar-admin namespaces set-backlog-quota --policy producer_exception ... {name}",
            )


def check_kept(cluster: Cluster, rest: Rest, topics: Iterable[TopicInfo], deadline: Deadline) -> Iterator[Advice]:
    """Users' topics that keep no more than subscriptions need, and have none."""
    namespace = cluster.settings.namespace
    dropped = [
        topic.name
        for topic in topics
        if not topic.internal
        and 0 in (topic.retention_seconds, topic.retention_bytes)
        and not all(_is_subscribed(rest, each, deadline) for each in cluster.topics.look(topic.name, deadline))
    ]
    if dropped:
        yield Advice(
            "warning",
            f"namespace {namespace}",
            f"{', '.join(sorted(dropped))}: their retention is 0 and they have no subscription, so brokers delete what"
            " is committed there, and what is open too, before anybody has read it",
            "make the subscription before the first message (pulsar-admin topics create-subscription), or keep what"
            f" nobody has read yet: pulsar-admin namespaces set-retention --time 7d --size -1 {namespace}",
        )


def _is_subscribed(rest: Rest, concrete: str, deadline: Deadline) -> bool:
    """Also where nobody tells: then it is not known that anything is lost."""
    try:
        found = rest.get(f"/admin/v2/persistent/{path_of(concrete)}/stats", deadline)["subscriptions"]
    except Refused:
        return True
    return any(each.get("durable") for each in found.values())  # that of a reader keeps nothing


def check_open(transactions: Iterable[OpenTransaction]) -> Iterator[Advice]:
    now = time.time() * 1000
    for found in transactions:
        seconds = (now - (found.since or now)) / 1000
        if seconds > _LONG_SECONDS:
            topics = ", ".join(sorted({topic for topic, _ in found.partitions})) or "no topic of users"
            yield Advice(
                "warning",
                f"transaction {found.transaction}",
                f"of {found.owner} has been {found.state} for {seconds:.0f} s and holds back all readers of {topics}",
                f"txnbridge transactions commit (or abort) {shlex.quote(found.transaction)} --yes --reason TEXT, or"
                " wait for its deadline",
            )


def check_at_risk(cluster: Cluster, transactions: Sequence[Found], deadline: Deadline) -> Iterator[Advice]:
    """Topics where brokers cannot refuse yet what comes late for a transaction that somebody else has ended.

    As long as an older one of its coordinator is open that is certain; afterwards its owner sees to it, and nobody
    else can tell whether it has.
    """
    oldest: dict[int, Found] = {}
    for each in sorted(transactions, key=lambda found: found.txn):
        oldest.setdefault(each.txn.most, each)
    for ended in at_risk(cluster, deadline) if oldest else ():
        older = oldest.get(ended.txn.most)
        if older is not None and older.txn < ended.txn:
            topics = ", ".join(sorted({cluster.topics.partition_of(topic)[0] for topic in ended.users_topics}))
            yield Advice(
                "warning",
                f"transaction {ended.transaction}",
                f"was ended for an older owner, which may still be sending: as long as transaction {older.name} is"
                f" open, a late message would hold back all readers of {topics or 'no topic of users'}",
                f"end {older.name}, or wait until it has ended; stop whoever else has opened the id",
            )


def check_held_back(cluster: Cluster, rest: Rest, deadline: Deadline) -> Iterator[Advice]:
    """Partitions with something open that no coordinator has: it never ends by itself."""
    for topic, txn in held_back(cluster, rest, deadline):
        yield Advice(
            "problem",
            topic,
            f"is held back by transaction {txn}, which no coordinator knows: a message came after the transaction had"
            " ended, or its topic was never named, and until it is ended there, too, nothing behind it can be read",
            f"stop whoever still sends in it, then: txnbridge transactions repair {txn} --yes --reason TEXT",
        )


def _wanted(found: Mapping[str, str], name: str, otherwise: Advice) -> Iterator[Advice]:
    if found.get(name) == "false":
        yield otherwise


def _losing(whose: str, found: Mapping[str, Any], ttl: str, expiry: str) -> Iterator[Advice]:
    if _number(found, ttl, 0) > 0:
        yield Advice(
            "problem",
            whose,
            f"{ttl} is {found[ttl]}: what is older counts as acknowledged, and decisions are lost with it",
            "let no messages expire in the namespace of our own topics",
        )
    if _number(found, expiry, 0) > 0:
        yield Advice(
            "problem",
            whose,
            f"{expiry} is {found[expiry]}: subscriptions that nobody uses are deleted, those that keep our own topics"
            " among them",
            "let no subscriptions expire in the namespace of our own topics",
        )


def _number(found: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(found[name])
    except (KeyError, TypeError, ValueError):
        return default
