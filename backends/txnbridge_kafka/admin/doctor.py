"""The checks of `txnbridge doctor` for a Kafka cluster: settings, topics, open and hanging transactions."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping

from confluent_kafka.admin._metadata import ClusterMetadata, TopicMetadata

from txnbridge.errors import BrokerUnavailable
from txnbridge.spi import Advice, Deadline, OpenTransaction
from txnbridge_kafka.capabilities import longest_ms
from txnbridge_kafka.client.protocol_types import EPOCH_BUMPS
from txnbridge_kafka.cluster import KafkaCluster
from txnbridge_kafka.outcome.hanging_transactions import listed, survey
from txnbridge_kafka.outcome.transaction_state_log import STATE_TOPIC
from txnbridge_kafka.settings import KafkaSettings
from txnbridge_kafka.topics import OFFSETS_TOPIC

INTERNAL_TOPICS = (STATE_TOPIC, OFFSETS_TOPIC)
# The least replicas and in-sync replicas: with fewer, the loss or restart of a broker may lose data or stop writes.
_REPLICAS, _IN_SYNC = 3, 2
# Brokers abort expired transactions every ten seconds. A transaction that expired longer ago than this is a problem.
_OVERDUE_MS = 30_000
# The longest check when a bridge connects, which it must not delay. A running broker answers within milliseconds.
_PREFLIGHT_SECONDS = 2.0

_log = logging.getLogger("txnbridge")


def check_settings(cluster: KafkaCluster, deadline: Deadline) -> Iterator[Advice]:
    """Yield advice about the brokers' longest transaction time-out, and about the feature transaction.version."""
    version = cluster.requests.transaction_version(deadline)
    if version >= EPOCH_BUMPS:
        yield Advice("ok", "transaction.version", f"{version}: ending a transaction fences its writer")
    else:
        text = f"{version}: a writer is not fenced at once if another process ends its transaction"
        remedy = "on Kafka 4: kafka-features.sh upgrade --feature transaction.version=2"
        yield Advice("warning", "transaction.version", text, remedy)
    settings, brokers = cluster.settings, sorted(cluster.topics.overview(deadline).brokers)
    wanted = settings.timeout + (settings.hold or 0)
    for number, config in cluster.topics.broker_configs(brokers, deadline).items():
        if not config:
            text = f"this user may not see the settings of broker {number}, so they are not checked"
            yield Advice("warning", "rights", text, "grant it DescribeConfigs on the cluster")
        longest = longest_ms(config) / 1000
        if longest < wanted:
            text = f"lets a transaction live {longest:g} s; timeout and hold of this bridge are {wanted:g} s together"
            yield Advice("problem", f"broker {number}", text, "raise transaction.max.timeout.ms, or ask for less")


def check_topics(cluster: KafkaCluster, deadline: Deadline) -> Iterator[Advice]:
    """Yield advice about replication and in-sync settings of Kafka's internal topics and of txnbridge's own."""
    everything = cluster.topics.all(deadline)
    logs = sorted(name for name in everything if name.startswith(cluster.settings.prefix))
    topics = {name: everything[name] for name in (*INTERNAL_TOPICS, *logs) if name in everything}
    if STATE_TOPIC not in topics:
        text = "is not visible: no transaction was used here yet, or this user may not see the topic"
        yield Advice("warning", STATE_TOPIC, text, "grant this user Describe on Kafka's own topics")
    yield from check_replicas(topics, cluster.topics.configs(list(topics), deadline))


def check_replicas(topics: Mapping[str, TopicMetadata], settings: Mapping[str, Mapping[str, str]]) -> Iterator[Advice]:
    """Yield advice on the replication of topics, from their numbers of replicas and, where known, their settings."""
    for name, topic in topics.items():
        copies = min((len(each.replicas) for each in topic.partitions.values()), default=0)
        findings = list(_replication_findings(copies, settings[name]))
        if not findings:
            yield Advice("ok", name, f"{copies} copies, and each record is on at least {_IN_SYNC} of them")
        for level, text, remedy in findings:
            yield Advice(level, name, text, remedy)


def _replication_findings(copies: int, settings: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    configured = settings.get("min.insync.replicas")
    in_sync = _IN_SYNC if configured is None else int(configured)
    has = f"has {'1 copy' if copies == 1 else f'{copies} copies'}"
    if configured is not None and copies < in_sync:
        text = f"{has} and min.insync.replicas={in_sync}: nothing can be stored in it"
        yield "problem", text, "give it more replicas (kafka-reassign-partitions.sh)"
    if copies < _REPLICAS:
        text = f"{has}: with the loss of a broker it may be lost"
        yield "warning", text, f"give it {_REPLICAS} replicas (kafka-reassign-partitions.sh)"
    if copies > 1 and in_sync < _IN_SYNC:
        yield "warning", "a stored record may be on one broker only", f"set min.insync.replicas={_IN_SYNC}"
    if settings.get("unclean.leader.election.enable") == "true":
        text = "a broker that lacks records may become leader"
        yield "warning", text, "set unclean.leader.election.enable=false"


def check_open(transactions: Iterable[OpenTransaction], settings: KafkaSettings) -> Iterator[Advice]:
    """Report prepared transactions, and open transactions that are older than the bridge's time-out.

    Readers wait for the end of all these transactions.
    """
    now = int(time.time() * 1000)
    for each in transactions:
        age = 0 if each.since is None else (now - each.since) // 1000
        if each.expires_at is not None and now > each.expires_at + _OVERDUE_MS:
            text, level = f"{each.state} since {age} s, and it has expired: the broker does not abort it", "problem"
        elif each.state == "prepared" or age > settings.timeout:
            left = "" if each.expires_at is None else f", for up to {max(0, each.expires_at - now) // 1000} s more"
            text, level = f"{each.state} since {age} s; readers wait for its end{left}", "warning"
        else:
            continue  # the transaction is younger than the bridge's time-out
        how = "commit (or abort)" if each.state == "prepared" else "abort"
        remedy = f"txnbridge transactions {how} {shlex.quote(each.transaction)} --yes --reason TEXT"
        yield Advice(level, f"transaction {each.transaction}", text, remedy)


def check_hanging(cluster: KafkaCluster, deadline: Deadline) -> Iterator[Advice]:
    """Report hanging transactions, and open transactions of producers that no coordinator knows.

    A hanging transaction is open in a partition, but has ended at its coordinator.
    """
    seen = survey(cluster, deadline)
    for each in seen.hanging:
        id = each.description.id
        yield Advice(
            "problem",
            f"transaction {id}",
            f"has ended, but its control marker is missing in {listed(each.open_in)}: readers wait there forever",
            f"stop its writer, then: txnbridge transactions repair {shlex.quote(id)} --yes --reason TEXT",
        )
    for pid, open_in in seen.unknown.items():
        yield Advice(
            "problem",
            f"producer {pid}",
            f"has a transaction open in {listed(open_in)}, and no coordinator knows it: readers wait there forever",
            "kafka-transactions.sh abort, once it is certain that it was not committed",
        )
    if seen.unread:
        text = f"this user may not read {seen.unread} partitions, or they have no leader, so they are not checked"
        yield Advice("warning", "rights", text, "grant it Read on their topics")
    if not (seen.hanging or seen.unknown):
        yield Advice("ok", "markers", "no control marker is missing in the partitions that this user may read")


def preflight(cluster: KafkaCluster, log: str, overview: ClusterMetadata, deadline: Deadline) -> dict[str, Advice]:
    """Check replication and in-sync settings of Kafka's internal topics and of the decision log, and log warnings.

    A bridge calls this when it connects. Return the advice about the topics in which no record can be stored, by
    topic. In a cluster of one broker, warnings about other topics are not logged. Topics and settings that this user
    may not see are not checked.
    """
    topics = {name: overview.topics[name] for name in (*INTERNAL_TOPICS, log) if name in overview.topics}
    try:
        settings = cluster.topics.configs(list(topics), Deadline(min(_PREFLIGHT_SECONDS, deadline.left())))
    except BrokerUnavailable:
        return {}
    findings = list(check_replicas(topics, settings))
    problems = {advice.subject: advice for advice in findings if advice.level == "problem"}
    warnings = [advice for advice in findings if advice.level == "warning" and len(overview.brokers) > 1]
    for advice in (*problems.values(), *warnings):
        _log.warning("%s: %s; %s", advice.subject, advice.text, advice.remedy)
    return problems
