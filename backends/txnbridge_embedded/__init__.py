"""The embedded broker: topics, groups and transactions in one SQLite file, shared by the processes of a machine."""

from __future__ import annotations

from txnbridge.spi import Backend, hookimpl


@hookimpl
def txnbridge_backends() -> list[Backend]:
    from txnbridge_embedded.backend import EmbeddedBackend

    return [EmbeddedBackend()]
