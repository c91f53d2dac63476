"""A plug-in: the embedded broker without its half store, so that the core keeps half messages in topics.

`txnbridge.plugins.register(half_topic_backend)`; its URLs begin with `half-topic:`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txnbridge_embedded.backend import EmbeddedBackend
from txnbridge_embedded.broker import EmbeddedBroker

from txnbridge.spi import Backend, Capability, Context, Deadline, Url, emulated, hookimpl


class _HalfTopicBackend(EmbeddedBackend):
    schemes = ("half-topic",)
    capabilities = EmbeddedBackend.capabilities.but({Capability.HALF_MESSAGES: emulated("in topics")})

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> EmbeddedBroker:
        broker = super().open(url, options, context, deadline)
        broker.half_check_seconds, broker.half_checks = options["half_check_seconds"], options["half_checks"]
        broker.capabilities = self.capabilities
        broker.half_store = lambda: None  # type: ignore[method-assign]
        return broker


@hookimpl
def txnbridge_backends() -> list[Backend]:
    return [_HalfTopicBackend()]
