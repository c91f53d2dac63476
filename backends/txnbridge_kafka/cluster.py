"""What every part of a bridge to one cluster shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from txnbridge.spi import Emitter, Partition
from txnbridge_kafka.client.offsets import Offsets
from txnbridge_kafka.client.requests import Requests
from txnbridge_kafka.settings import Settings
from txnbridge_kafka.topics import Topics


@dataclass(frozen=True)
class Cluster:
    """The settings, and the ways to ask."""

    settings: Settings
    requests: Requests
    topics: Topics
    events: Emitter
    places: set[Partition] = field(default_factory=set)  # where this bridge writes and reads

    @cached_property
    def offsets(self) -> Offsets:
        """Where partitions begin and end."""
        return Offsets(self.requests)
