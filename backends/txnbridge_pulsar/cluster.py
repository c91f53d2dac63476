"""`ClusterAccess`: the clients and settings by which all parts of one bridge reach its Pulsar cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from txnbridge.spi import Emitter
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.admin.rest import Rest
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
