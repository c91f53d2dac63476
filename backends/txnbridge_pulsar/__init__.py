"""Apache Pulsar: an own client of the binary protocol, because the official one for Python has no transactions."""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_pulsar.backend import PulsarBackend

    return [PulsarBackend()]
