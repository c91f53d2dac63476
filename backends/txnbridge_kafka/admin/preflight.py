"""The check when a bridge connects: are the topics on which every promise stands stored safely?"""

from __future__ import annotations

import logging

from confluent_kafka.admin._metadata import ClusterMetadata

from txnbridge.errors import BrokerUnavailable
from txnbridge.spi import Advice, Deadline
from txnbridge_kafka.admin.doctor import COORDINATION, judge
from txnbridge_kafka.cluster import KafkaCluster

# Connecting does not wait for a mere warning; a broker that lives answers within milliseconds.
_SECONDS = 2.0

_log = logging.getLogger("txnbridge")


def check_topics(cluster: KafkaCluster, log: str, overview: ClusterMetadata, deadline: Deadline) -> dict[str, Advice]:
    """Warn of weak topics of Kafka's own and of this log, as far as this user may see them.

    Return by name the topics in which nothing can be stored. In a cluster of one broker nothing else could be better.
    """
    topics = {name: overview.topics[name] for name in (*COORDINATION, log) if name in overview.topics}
    try:
        settings = cluster.topics.configs(list(topics), Deadline(min(_SECONDS, deadline.left())))
    except BrokerUnavailable:
        return {}
    findings = list(judge(topics, settings))
    problems = {advice.subject: advice for advice in findings if advice.level == "problem"}
    warnings = [advice for advice in findings if advice.level == "warning" and len(overview.brokers) > 1]
    for advice in (*problems.values(), *warnings):
        _log.warning("%s: %s; %s", advice.subject, advice.text, advice.remedy)
    return problems
