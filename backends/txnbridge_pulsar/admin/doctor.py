"""The doctor finds settings and states of a cluster that weaken a promise or hold readers back."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from txnbridge.errors import AccessDenied
from txnbridge.spi import Advice, Deadline, OpenTransaction, TopicInfo
from txnbridge_pulsar.admin.open_transactions import ListedTransaction
from txnbridge_pulsar.admin.repair import held_back
from txnbridge_pulsar.admin.rest import Rest, RestRefused, path_of
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel
from txnbridge_pulsar.outcome.proof import proof_prefix
from txnbridge_pulsar.settings import PulsarSettings, Timing
from txnbridge_pulsar.settings.topic_names import SUBSCRIPTION
from txnbridge_pulsar.write.fence import at_risk, fence_prefix

# Bookies that have to store an entry before its receipt, so that no message is lost with one machine.
_MIN_ACK_QUORUM = 2

_UNKNOWN_SUBSCRIPTION = ""

_POLL_SECONDS = 0.2
_STORE_NOT_OPEN = ("Initializing", "Error")
_CONF = "set it in broker.conf, and restart the brokers"
_EVICTING = "consumer_backlog_eviction"
_QUOTA = "the backlog quota drops messages that are not acknowledged, also records of the decision log"


def check_settings(rest: Rest, deadline: Deadline) -> Iterator[Advice]:
    config: Mapping[str, str] = rest.get("/admin/v2/brokers/configuration/runtime", deadline)
    if config.get("transactionCoordinatorEnabled") == "false":
        yield Advice("problem", "transactions", "transactions are off: transactionCoordinatorEnabled is false", _CONF)
    if config.get("acknowledgmentAtBatchIndexLevelEnabled") == "false":
        yield Advice(
            "warning",
            "acknowledgements",
            "acknowledgmentAtBatchIndexLevelEnabled is false: brokers may redeliver acknowledged messages if other"
            " messages of the same entry are not acknowledged",
            _CONF,
        )
    if config.get("brokerDeduplicationEnabled") == "false":
        yield Advice(
            "warning",
            "deduplication",
            "brokerDeduplicationEnabled is false: a transaction is aborted if its connection is lost while it sends,"
            " and publishers have no sequences",
            f"{_CONF}, or for a namespace: pulsar-admin namespaces set-deduplication --enable TENANT/NAMESPACE",
        )
    if _int_of(config, "managedLedgerDefaultAckQuorum", _MIN_ACK_QUORUM) < _MIN_ACK_QUORUM:
        yield Advice(
            "warning",
            "copies",
            "managedLedgerDefaultAckQuorum is 1: committed messages are lost if one disk fails",
            "set it to 2 with a write quorum of 3, which needs three bookies",
        )
    yield from _losses("the brokers", config, "ttlDurationDefaultInSeconds", "subscriptionExpirationTimeMinutes")
    limits = ("backlogQuotaDefaultLimitBytes", "backlogQuotaDefaultLimitGB", "backlogQuotaDefaultLimitSecond")
    evicts = config.get("backlogQuotaDefaultRetentionPolicy") == _EVICTING
    if evicts and any(_int_of(config, name, -1) > 0 for name in limits):
        yield Advice("problem", "the brokers", _QUOTA, f"backlogQuotaDefaultRetentionPolicy: {_CONF}")


def check_namespace(rest: Rest, settings: PulsarSettings, deadline: Deadline) -> Iterator[Advice]:
    name = settings.namespace
    policies: Mapping[str, Any] = rest.get(f"/admin/v2/namespaces/{path_of(str(name))}", deadline)
    yield from _losses(f"namespace {name}", policies, "message_ttl_in_seconds", "subscription_expiration_time_minutes")
    for quota in (policies.get("backlog_quota_map") or {}).values():
        if quota.get("policy") == _EVICTING:
            yield Advice(
                "problem",
                f"namespace {name}",
                _QUOTA,
                f"pulsar-admin namespaces set-backlog-quota --policy producer_exception ... {name}",
            )


def check_topics(cluster: ClusterAccess, topics: Sequence[TopicInfo], deadline: Deadline) -> Iterator[Advice]:
    """Report topics that lose messages, and internal topics that lose records."""
    yield from _check_kept(cluster, topics, deadline)
    yield from _check_internal(cluster, topics, deadline)
    yield from _check_expiring(cluster, topics, deadline)


def _check_kept(cluster: ClusterAccess, topics: Iterable[TopicInfo], deadline: Deadline) -> Iterator[Advice]:
    """Report users' topics that keep no messages, because they have neither retention nor a subscription."""
    namespace, existing = cluster.settings.namespace, cluster.topics.existing
    dropped = [
        topic.name
        for topic in topics
        if not topic.internal
        and 0 in (topic.retention_seconds, topic.retention_bytes)
        and not all(_subscriptions(cluster.rest, each, deadline) for each in existing(topic.name, deadline))
    ]
    if dropped:
        yield Advice(
            "warning",
            f"namespace {namespace}",
            f"{', '.join(sorted(dropped))}: their retention is 0 and they have no subscription, so brokers delete their"
            " messages, even those of open transactions, before they are read",
            "create the subscription before the first message (pulsar-admin topics create-subscription), or keep unread"
            f" messages: pulsar-admin namespaces set-retention --time 7d --size -1 {namespace}",
        )


def _check_internal(cluster: ClusterAccess, topics: Iterable[TopicInfo], deadline: Deadline) -> Iterator[Advice]:
    """Report internal topics whose subscription `txnbridge` was deleted."""
    settings = cluster.settings
    kept = _kept_by_subscription(cluster, [topic.name for topic in topics])
    own = [settings.namespace.full_name(name) for name in kept]
    subscriptions = in_parallel(lambda topic: _subscriptions(cluster.rest, topic, deadline), own)
    for topic, names in zip(own, subscriptions, strict=True):
        if not names & {SUBSCRIPTION, _UNKNOWN_SUBSCRIPTION}:
            yield Advice(
                "problem",
                settings.namespace.short_name(topic),
                f"the subscription {SUBSCRIPTION!r} of this internal topic was deleted: brokers delete its records,"
                " which show the outcomes of transactions and the open ones, and, while it is unused, the topic",
                f"pulsar-admin topics create-subscription --subscription {SUBSCRIPTION} --messageId earliest"
                f" {shlex.quote(topic)}; and find out who deletes subscriptions",
            )


def _kept_by_subscription(cluster: ClusterAccess, names: Sequence[str]) -> Iterator[str]:
    """Yield the internal topics that must have the subscription `txnbridge`.

    The proof topics of a bridge without a transactional id are left out: if such a bridge has no REST, it deletes the
    subscription when it closes, so that the broker deletes the topic.
    """
    fence, marker = fence_prefix(cluster), proof_prefix(cluster)
    ids = {name.removeprefix(fence) for name in names if name.startswith(fence)}
    for name in names:
        id, _, _ = name.removeprefix(marker).rpartition(".")
        if name.startswith(cluster.settings.prefix) and (not name.startswith(marker) or id in ids):
            yield name


def _check_expiring(cluster: ClusterAccess, topics: Iterable[TopicInfo], deadline: Deadline) -> Iterator[Advice]:
    """Report topics that have a message TTL of their own. `check_namespace` reports the TTL of the namespace."""
    settings = cluster.settings
    asked = [topic for topic in topics if topic.name.startswith(settings.prefix) or not topic.internal]
    names = [settings.namespace.full_name(topic.name) for topic in asked]
    seconds_of = in_parallel(lambda name: _time_to_live(cluster.rest, name, deadline), names)
    for topic, name, seconds in zip(asked, names, seconds_of, strict=True):
        if seconds:
            yield Advice(
                "problem" if topic.internal else "warning",
                topic.name,
                f"messages expire on this topic after {seconds} s: "
                + (
                    "decisions and outcomes of transactions are lost with them"
                    if topic.internal
                    else "a group loses, without an error, what it has not acknowledged by then"
                ),
                f"pulsar-admin topics remove-message-ttl {shlex.quote(name)}",
            )


def _time_to_live(rest: Rest, full: str, deadline: Deadline) -> int:
    """Return a topic's own message TTL in seconds, or 0 if the topic has none or the broker does not tell."""
    try:
        return int(rest.get(f"/admin/v2/persistent/{path_of(full)}/messageTTL", deadline) or 0)
    except (RestRefused, AccessDenied):
        return 0


def _subscriptions(rest: Rest, concrete: str, deadline: Deadline) -> set[str]:
    """Return a topic's durable subscriptions, which keep its messages; `{_UNKNOWN_SUBSCRIPTION}` if not known."""
    try:
        subscriptions = rest.get(f"/admin/v2/persistent/{path_of(concrete)}/stats", deadline)["subscriptions"]
    except RestRefused:
        return {_UNKNOWN_SUBSCRIPTION}
    return {name for name, each in subscriptions.items() if each.get("durable")}


def check_stores(cluster: ClusterAccess, topics: Iterable[TopicInfo], deadline: Deadline) -> Iterator[Advice]:
    """Report subscriptions that cannot be used, because the broker does not open their pending-ack stores."""
    rest, existing = cluster.rest, cluster.topics.existing
    concrete = [each for topic in topics if not topic.internal for each in existing(topic.name, deadline)]
    names = in_parallel(lambda topic: _subscriptions(rest, topic, deadline) - {_UNKNOWN_SUBSCRIPTION}, concrete)
    groups = [(topic, group) for topic, durable in zip(concrete, names, strict=True) for group in sorted(durable)]
    until = Deadline(min(cluster.settings.timing.store_opening_seconds, deadline.left() / 2))
    opening = in_parallel(lambda group: _is_opening(rest, group, until, deadline), groups)
    for (topic, group), stuck in zip(groups, opening, strict=True):
        if stuck:
            yield Advice(
                "problem",
                f"group {group}",
                f"the broker does not open the group's pending-ack store on {topic}: until then no member can"
                " join the group there, and no transaction with its acknowledgements can end",
                "if this lasts, restart that broker; brokers up to 4.2.4 may wait there forever"
                " (https://github.com/apache/pulsar/issues/26368). If that does not help, the store cannot be read:"
                " save the group's position, delete its subscription there, and restart the broker again",
            )


def _is_opening(rest: Rest, group: tuple[str, str], until: Deadline, deadline: Deadline) -> bool:
    """Wait for a subscription's pending-ack store until the deadline `until`; return whether it is still opening then.

    Return False if its state is not known.
    """
    topic, name = group
    path = f"/admin/v3/transactions/pendingAckStats/{path_of(topic)}/{quote(name, safe='')}"
    try:
        while rest.get(path, deadline)["state"] in _STORE_NOT_OPEN:
            if until.expired:
                return True
            time.sleep(_POLL_SECONDS)
    except (RestRefused, AccessDenied):
        pass
    return False


def check_open(transactions: Iterable[OpenTransaction], timing: Timing) -> Iterator[Advice]:
    now = time.time() * 1000
    for txn in transactions:
        yield from _check_expiry(txn, now, timing.expiry_warning_share)
        seconds = (now - (txn.since or now)) / 1000
        if seconds > timing.long_open_seconds:
            topics = ", ".join(sorted({topic for topic, _ in txn.partitions})) or "no topic of users"
            yield Advice(
                "warning",
                f"transaction {txn.transaction}",
                f"of {txn.owner} has been {txn.state} for {seconds:.0f} s and holds back all readers of {topics}",
                f"txnbridge transactions commit (or abort) {shlex.quote(txn.transaction)} --yes --reason TEXT, or"
                " wait for its deadline",
            )


def _check_expiry(txn: OpenTransaction, now: float, share: float) -> Iterator[Advice]:
    if txn.state != "prepared" or not txn.since or not txn.expires_at:
        return
    left = txn.expires_at - now
    if left < share * (txn.expires_at - txn.since):
        yield Advice(
            "problem",
            f"transaction {txn.transaction}",
            f"of {txn.owner} is prepared, and the broker aborts it in {max(0, left) / 1000:.0f} s",
            f"txnbridge transactions commit (or abort) {shlex.quote(txn.transaction)} --yes --reason TEXT; for more"
            " time, connect with a larger hold and longest_transaction",
        )


def check_at_risk(
    cluster: ClusterAccess, transactions: Sequence[ListedTransaction], deadline: Deadline
) -> Iterator[Advice]:
    """Report transactions that a new owner of their id ended, and whose late messages are not refused yet.

    Brokers cannot refuse these messages while an older transaction is open at the same coordinator, so only
    transactions behind an older one are reported. Once the older transaction has ended, the newer owner makes brokers
    refuse the messages; no other process can see whether this has happened.
    """
    oldest: dict[int, ListedTransaction] = {}
    for each in sorted(transactions, key=lambda each: each.txn):
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
                f"end {older.name}, or wait until it has ended; stop the older owner's process",
            )


def check_held_back(cluster: ClusterAccess, deadline: Deadline) -> Iterator[Advice]:
    """Report topics whose readers wait for a transaction that no coordinator knows, and that therefore never ends."""
    for topic, txn in held_back(cluster, deadline):
        yield Advice(
            "problem",
            topic,
            f"is held back by transaction {txn}, which no coordinator knows: a message arrived after the transaction's"
            " end, or the topic was never registered. Until it is ended here, too, no later message can be read",
            f"stop the program that sends in it, then: txnbridge transactions repair {txn} --yes --reason TEXT",
        )


def _losses(whose: str, config: Mapping[str, Any], ttl: str, expiry: str) -> Iterator[Advice]:
    for name, what, effect in (
        (ttl, "messages", "older messages count as acknowledged, and decisions are lost with them"),
        (expiry, "subscriptions", "unused subscriptions are deleted, even those that keep internal topics"),
    ):
        if _int_of(config, name, 0) > 0:
            remedy = f"let no {what} expire in the namespace of the internal topics"
            yield Advice("problem", whose, f"{name} is {config[name]}: {effect}", remedy)


def _int_of(config: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(config[name])
    except (KeyError, TypeError, ValueError):
        return default
