"""A plug-in: the embedded broker without its half store, so that the core keeps half messages in topics.

`txnbridge.plugins.register(half_topic_backend)`; its URLs begin with `half-topic:`.
"""

from __future__ import annotations

from typing import Any

from txnbridge_embedded.backend import EmbeddedBackend
from txnbridge_embedded.broker import EmbeddedBroker

from txnbridge.spi import Backend, hookimpl


class _HalfTopicBackend(EmbeddedBackend):
    schemes = ("half-topic",)

    def open(self, *args: Any) -> EmbeddedBroker:
        broker = super().open(*args)
        broker.half_store = lambda: None  # type: ignore[method-assign]
        return broker


@hookimpl
def txnbridge_backends() -> list[Backend]:
    return [_HalfTopicBackend()]
