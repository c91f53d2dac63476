"""Real brokers for tests, started in seconds and gone with whoever started them.

from txnbridge_conformance import brokers

with brokers.kafka() as broker:
    print(broker.url)       # kafka://127.0.0.1:21842
    broker.kill()
    broker.restart()
"""

from __future__ import annotations

from txnbridge_conformance.brokers._broker import Broker, CannotStart, ProcessBroker, ToolMissing
from txnbridge_conformance.brokers._kafka import KafkaProcess as T

__all__ = ["Broker", "CannotStart", "ToolMissing"]
