"""Detects topics that were terminated while a transaction was open on them.

Nothing can be stored on a terminated topic, so the coordinator cannot write a control marker there. It ends the
transaction everywhere else, retries that topic for ever, and never answers the request (hazard H54).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess

_ASKED_AT_ONCE = 8


def terminated(cluster: ClusterAccess, topics: Sequence[str], deadline: Deadline) -> tuple[str, ...]:
    """Return the concrete topics that are known to be terminated."""
    if not topics:
        return ()
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(topics))) as asking:
        answers = asking.map(lambda topic: _is_terminated(cluster, topic, deadline), topics)
        return tuple(topic for topic, is_terminated in zip(topics, answers, strict=True) if is_terminated)


def _is_terminated(cluster: ClusterAccess, topic: str, deadline: Deadline) -> bool:
    client = cluster.client
    try:
        # Before the producer, which would create a deleted topic anew, open a reader with `create=False`: it fails for
        # one.
        client.read(topic, timeout=deadline.left(), create=False).close(deadline.left())
        client.create_producer(topic, timeout=deadline.left()).close(deadline.left())
    except wire.TopicTerminated:
        return True
    except wire.PulsarError:
        return False  # not known; the caller treats the topic as not terminated
    return False


def repair_hint(topics: Sequence[str]) -> str:
    """Return the part of an error that says which messages terminated topics lose, and how to end the commit."""
    names = ", ".join(topics)
    return (
        f"{names} was terminated while the transaction was open, so its coordinator commits it on all other topics and"
        " never ends: its messages there, and those behind them, are lost to readers. Save what you need of"
        f" {names}; once it is deleted, the commit ends by itself: pulsar-admin topics delete --force"
    )
