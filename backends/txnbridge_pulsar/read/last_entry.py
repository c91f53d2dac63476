"""The last entry of a topic that can be read."""

from __future__ import annotations

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated


def last_entry(cluster: ClusterAccess, topic: str, deadline: Deadline) -> wire.ReceivedEntry | None:
    """The last readable entry of a concrete topic, by its full name; None if there is none."""
    with translated(f"reading {topic}"):
        reader = cluster.client.read(topic, timeout=deadline.left())
        try:
            last = reader.last_message_id(deadline.left())
        finally:
            reader.close(deadline.left())
        if last.entry < 0:
            return None
        reader = cluster.client.read(topic, timeout=deadline.left(), start=start_before(last))
        try:
            while not (found := reader.receive(deadline.left(), most=1)):
                deadline.check(f"reading {topic}")
            return found[0]
        finally:
            reader.close(deadline.left())


def start_before(id: wire.MessageId) -> wire.MessageId:
    """Where a reader begins whose first message is to be this one."""
    return wire.MessageId(id.ledger, id.entry - 1)
