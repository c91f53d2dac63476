"""What the settings of a cluster and of the client allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from txnbridge.spi import Deadline

if TYPE_CHECKING:
    from txnbridge_kafka.topics import Topics

# Of transaction.max.timeout.ms, on brokers that were told nothing else.
DEFAULT_LONGEST_MS = 900_000
# The level of the feature transaction.version from which on ending a transaction shuts its writer out.
EPOCH_BUMPS = 2


# The client's default for message.max.bytes, and what it adds itself to a message's key, value and headers.
_MESSAGE_BYTES, _MESSAGE_OVERHEAD = 1_000_000, 36


def message_bytes(client: Mapping[str, object]) -> int:
    """How large key, value and headers of a message may be together, with these settings of the client."""
    return int(str(client.get("message.max.bytes", _MESSAGE_BYTES))) - _MESSAGE_OVERHEAD


def longest_ms(settings: Mapping[str, str]) -> int:
    """How long a broker with these settings lets a transaction live; without the right to see them, Kafka's default."""
    return int(settings.get("transaction.max.timeout.ms", DEFAULT_LONGEST_MS))


def longest_transaction_ms(topics: Topics, brokers: Iterable[int], deadline: Deadline) -> int:
    """How long a transaction may live on every one of these brokers that answers."""
    return min(map(longest_ms, topics.broker_configs(brokers, deadline).values()), default=DEFAULT_LONGEST_MS)
