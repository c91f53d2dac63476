"""A plug-in: the embedded broker without its half store, so that the core keeps half messages in topics.

`txnbridge.plugins.register(half_topic_backend)`; its URLs begin with `half-topic:`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from txnbridge_embedded.backend import EmbeddedBackend
from txnbridge_embedded.broker import EmbeddedBroker
from txnbridge_embedded.outcome.ending import remove_messages

from txnbridge.spi import Backend, Capability, Context, Deadline, Partition, Position, Url, emulated, hookimpl


class _HalfTopicBackend(EmbeddedBackend):
    schemes = ("half-topic",)
    capabilities = EmbeddedBackend.capabilities.but({Capability.HALF_MESSAGES: emulated("in topics")})

    def open(self, url: Url, options: Mapping[str, Any], context: Context, deadline: Deadline) -> EmbeddedBroker:
        broker = super().open(url, options, context, deadline)
        broker.half_check_seconds, broker.half_checks = options["half_check_seconds"], options["half_checks"]
        broker.capabilities = self.capabilities
        broker.half_store = lambda: None  # type: ignore[method-assign]
        broker.admin.trim = partial(_trim, broker)  # type: ignore[method-assign]
        return broker


def _trim(broker: EmbeddedBroker, partition: Partition, before: Position, deadline: Deadline) -> None:
    wanted = "SELECT p.id, first FROM partitions p JOIN topics t ON t.id = topic_id WHERE name = ? AND number = ?"
    with broker.session(deadline) as connection, broker.store.writing(connection, deadline, "trimming"):
        for id, first in connection.execute(wanted, partition).fetchall():
            if before[0] > first:
                remove_messages(broker.store, connection, id, first, before[0] - 1)
                connection.execute("UPDATE partitions SET first = ? WHERE id = ?", (before[0], id))


@hookimpl
def txnbridge_backends() -> list[Backend]:
    return [_HalfTopicBackend()]
