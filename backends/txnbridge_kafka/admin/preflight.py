"""The check when a bridge connects: the replication of Kafka's internal topics and of the bridge's decision log."""

from __future__ import annotations

import logging

from confluent_kafka.admin._metadata import ClusterMetadata

from txnbridge.errors import BrokerUnavailable
from txnbridge.spi import Advice, Deadline
from txnbridge_kafka.admin.doctor import INTERNAL_TOPICS, check_replicas
from txnbridge_kafka.cluster import KafkaCluster

# The longest check: it must not delay connecting. A running broker answers within milliseconds.
_CHECK_SECONDS = 2.0

_log = logging.getLogger("txnbridge")


def check_topics(cluster: KafkaCluster, log: str, overview: ClusterMetadata, deadline: Deadline) -> dict[str, Advice]:
    """Check replication and in-sync settings of Kafka's internal topics and of the decision log, and log warnings.

    Return the advice about the topics in which no record can be stored, by topic. In a cluster of one broker, warnings
    about other topics are not logged. Topics and settings that this user may not see are not checked.
    """
    topics = {name: overview.topics[name] for name in (*INTERNAL_TOPICS, log) if name in overview.topics}
    try:
        settings = cluster.topics.configs(list(topics), Deadline(min(_CHECK_SECONDS, deadline.left())))
    except BrokerUnavailable:
        return {}
    findings = list(check_replicas(topics, settings))
    problems = {advice.subject: advice for advice in findings if advice.level == "problem"}
    warnings = [advice for advice in findings if advice.level == "warning" and len(overview.brokers) > 1]
    for advice in (*problems.values(), *warnings):
        _log.warning("%s: %s; %s", advice.subject, advice.text, advice.remedy)
    return problems
