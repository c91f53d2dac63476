"""What a cluster's own settings allow."""

from __future__ import annotations

from txnbridge.spi import Deadline
from txnbridge_kafka.topics import Topics

_LONGEST = "transaction.max.timeout.ms"
_BROKER_DEFAULT_MS = 900_000


def longest_transaction_ms(topics: Topics, deadline: Deadline) -> int:
    """How long a transaction may live; Kafka's own default where this user may not read a broker's settings."""
    told = [int(found[_LONGEST]) for found in topics.broker_configs(deadline).values() if _LONGEST in found]
    return min(told, default=_BROKER_DEFAULT_MS)
