"""Real brokers for tests, started in seconds and gone with whoever started them.

    from txnbridge_conformance import brokers

    with brokers.kafka() as broker:
        print(broker.url)       # kafka://127.0.0.1:21842
        broker.kill()
        broker.restart()

The fixtures are in `txnbridge_conformance.brokers.plugin`.
"""

from __future__ import annotations

from collections.abc import Mapping

from txnbridge.errors import InvalidOption
from txnbridge_conformance.brokers._broker import Broker, CannotStart, PortTaken, ProcessBroker, ToolMissing
from txnbridge_conformance.brokers._kafka import VERSIONS, KafkaProcess, check
from txnbridge_conformance.brokers._kafka_container import KafkaContainer, engine_answers
from txnbridge_conformance.brokers._ports import Route

__all__ = ["Broker", "CannotStart", "PortTaken", "ProcessBroker", "Route", "ToolMissing", "kafka"]

# Two starters that choose the same of thousands of ports at the same time: once is rare, thrice does not happen.
_ATTEMPTS = 3


def kafka(
    *,
    nodes: int = 1,
    version: str = VERSIONS[0],
    transaction_version: int | None = None,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    container: bool | None = None,
    start_timeout: float = 120,
) -> Broker:
    """Start Kafka, and return when every node has answered a request. Use it as a context manager.

    `nodes` is 1 or 3 (then topics have three replicas, of which two must be in sync). `transaction_version` is 1 for
    the protocol without KIP-890, else the newest that the version has. `port` is that of the first node, the others
    follow; a free one if none is given. `settings` are lines of the broker's properties.

    It runs in a container where an engine answers and one node as it comes is asked for, else as Java processes, whose
    jars Maven fetches once. `container` forces the one or the other.

    Raises `ToolMissing` saying what to install, `CannotStart`, and `InvalidOption` for what is not known.
    """
    check(nodes, version, transaction_version)
    plain = nodes == 1 and transaction_version is None
    if container and not plain:
        raise InvalidOption("a container is one node with the transaction version that comes with it")
    if container or (container is None and plain and engine_answers()):
        return KafkaContainer(version=version, port=port, settings=settings, start_timeout=start_timeout)
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            return KafkaProcess(
                nodes=nodes,
                version=version,
                transaction_version=transaction_version,
                port=port,
                settings=settings,
                start_timeout=start_timeout,
            )
        except PortTaken:
            if port is not None or not attempts_left:
                raise
    raise AssertionError("the last attempt returns or raises")
