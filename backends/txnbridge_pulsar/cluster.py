"""`ClusterAccess`: the clients and settings by which all parts of one bridge reach its Pulsar cluster.

Its users also share `in_parallel`, for requests about many items, and `last_entry`, the last entry of a topic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from txnbridge.spi import Deadline, Emitter
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest
from txnbridge_pulsar.errors import translated
from txnbridge_pulsar.settings import PulsarSettings
from txnbridge_pulsar.topics import PulsarTopics

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ClusterAccess:
    """One bridge's settings, protocol client, topics and REST client. Without an `admin_url`, `rest` is false.

    Producers and consumers that `client` opens with the same connection key share connections; different keys share
    none. Each producer that may be fenced has a key of its own, because a broker closes the whole connection of a
    fenced producer.
    """

    id: str  # stable and unique among all clusters
    settings: PulsarSettings
    client: wire.PulsarClient
    topics: PulsarTopics
    rest: Rest
    events: Emitter


def in_parallel(ask: Callable[[Item], Answer], items: Collection[Item], most: int = 8) -> list[Answer]:
    """Return the answers about all items, in order, from up to `most` threads: each request waits for the broker."""
    if len(items) < 2:
        return list(map(ask, items))
    with ThreadPoolExecutor(most) as asking:
        return list(asking.map(ask, items))


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
