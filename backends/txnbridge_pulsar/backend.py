"""The backend that the core finds by Pulsar's URL schemes: its options and limits, and the opening of a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txnbridge.spi import Backend, Broker, Context, Deadline, Url
from txnbridge_pulsar.capabilities import CAPABILITIES, LIMITS
from txnbridge_pulsar.settings import OPTIONS, read


class PulsarBackend(Backend):
    """The backend for Apache Pulsar 4.0 and later."""

    name = "pulsar"
    schemes = ("pulsar", "pulsar+ssl")
    capabilities = CAPABILITIES
    limits = LIMITS
    options = OPTIONS
    libraries = ("google_crc32c",)

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> Broker:
        from txnbridge_pulsar.broker import PulsarBroker

        return PulsarBroker(read(url, options, context), context, deadline)
