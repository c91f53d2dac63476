"""Reads the last entry of a topic."""

from __future__ import annotations

from contextlib import suppress

from txnbridge.spi import Deadline
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.cluster import ClusterAccess
from txnbridge_pulsar.errors import translated


def last_entry(cluster: ClusterAccess, topic: str, deadline: Deadline) -> wire.ReceivedEntry | None:
    """Return the last readable entry of a topic or partition, given by its full name; None if there is none."""
    with translated(f"reading {topic}"):
        with wire.closing(cluster.client.read(topic, timeout=deadline.left()), deadline.left) as reader:
            last = reader.last_message_id(deadline.left())
        if last.entry < 0:
            return None
        reader = cluster.client.read(topic, timeout=deadline.left(), start=start_before(last))
        with wire.closing(reader, deadline.left):
            while not (entries := reader.receive(deadline.left(), most=1)):
                deadline.check(f"reading {topic}")
            return entries[0]


def value_of(entry: wire.ReceivedEntry) -> bytes | None:
    """Return the value of an entry's first message; None also for a stranger's entry that cannot be read."""
    with suppress(wire.PulsarError, IndexError):
        return entry.messages()[0].value
    return None


def start_before(id: wire.MessageId) -> wire.MessageId:
    """Return the id at which a reader has to start to receive the entry `id` first."""
    return wire.MessageId(id.ledger, id.entry - 1)
