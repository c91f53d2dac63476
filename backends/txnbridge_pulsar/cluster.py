"""The parts that everything in a bridge to one cluster shares."""

from __future__ import annotations

from dataclasses import dataclass

from txnbridge.spi import Emitter
from txnbridge_pulsar import client as wire
from txnbridge_pulsar.client.rest import Rest
from txnbridge_pulsar.settings import PulsarSettings
from txnbridge_pulsar.topics import PulsarTopics


@dataclass(frozen=True)
class ClusterAccess:
    """The settings, and the ways to ask.

    Producers and consumers in one lane of `client` share no connection with those in other lanes: each producer that
    may be fenced has a lane of its own.
    `rest` is None without an `admin_url`.
    """

    id: str  # stable, and nobody else's
    settings: PulsarSettings
    client: wire.PulsarClient
    topics: PulsarTopics
    rest: Rest | None
    events: Emitter
