"""Detects topics that were terminated while a transaction was open on them.

Nothing can be stored on a terminated topic, so the coordinator cannot write a control marker there. The coordinator
ends the transaction on all other topics, tries the terminated topic again for ever, and never answers the request
(hazard H54).
"""

from __future__ import annotations

from collections.abc import Sequence

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess, in_parallel


def terminated(cluster: ClusterAccess, topics: Sequence[str], deadline: Deadline) -> tuple[str, ...]:
    """Return which of these topics, or partitions of topics, are known to be terminated."""
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
