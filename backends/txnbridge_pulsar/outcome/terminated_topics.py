"""Topics that were terminated while a transaction was open that has named them.

Nothing can be stored on a terminated topic any more, so the coordinator cannot write there how the transaction ended.
It ends the transaction everywhere else, tries again and again on that topic, and never answers the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess

_ASKED_AT_ONCE = 8


def terminated(cluster: ClusterAccess, topics: Sequence[str], deadline: Deadline) -> tuple[str, ...]:
    """Return those of these concrete topics that are known to be terminated."""
    if not topics:
        return ()
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(topics))) as asking:
        answers = asking.map(lambda topic: _is_terminated(cluster, topic, deadline), topics)
        return tuple(topic for topic, is_terminated in zip(topics, answers, strict=True) if is_terminated)


def _is_terminated(cluster: ClusterAccess, topic: str, deadline: Deadline) -> bool:
    client = cluster.client
    try:
        # A producer would make a topic anew that was deleted; a reader that must not create it finds it missing.
        client.read(topic, timeout=deadline.left(), create=False).close(deadline.left())
        client.create_producer(topic, timeout=deadline.left()).close(deadline.left())
    except wire.TopicTerminated:
        return True
    except wire.PulsarError:
        return False  # it is not known, and whatever asks goes on as if the topic took messages
    return False


def how_to_mend(topics: Sequence[str]) -> str:
    """Return what an administrator has to know and do about these topics, for an error."""
    names = ", ".join(topics)
    return (
        f"{names} was terminated while the transaction was open, so its coordinator commits it on all other topics and"
        " never ends: its messages there, and those behind them, are lost to readers. Save what you need of"
        f" {names}; once it is deleted, the commit ends by itself: pulsar-admin topics delete --force"
    )
