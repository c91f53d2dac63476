"""Start real brokers for tests. They start in seconds, and end with the process that started them.

    from txnbridge_conformance import brokers

    with brokers.kafka() as broker:
        print(broker.url)       # kafka://127.0.0.1:21842
        broker.kill()
        broker.restart()

The fixtures are in `txnbridge_conformance.brokers.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from txnbridge.errors import InvalidOption
from txnbridge_conformance.brokers import _kafka, _pulsar, _rocketmq
from txnbridge_conformance.brokers._broker import Broker, CannotStart, PortTaken, ProcessBroker, Route, ToolMissing
from txnbridge_conformance.brokers._container import KafkaContainer, PulsarContainer, engine_answers
from txnbridge_conformance.brokers._kafka import KafkaProcess
from txnbridge_conformance.brokers._pulsar import Pulsar, PulsarCluster, java_with_pulsar
from txnbridge_conformance.brokers._rocketmq import RocketMQ

__all__ = [
    "Broker",
    "CannotStart",
    "PortTaken",
    "ProcessBroker",
    "Pulsar",
    "PulsarCluster",
    "RocketMQ",
    "Route",
    "ToolMissing",
    "java_with_pulsar",
    "kafka",
    "pulsar",
    "rocketmq",
]

_Started = TypeVar("_Started")

# The attempts to start a broker on free ports: rarely, another process takes one of the chosen ports meanwhile.
_ATTEMPTS = 3


def kafka(
    *,
    nodes: int = 1,
    version: str = _kafka.VERSIONS[0],
    transaction_version: int | None = None,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    container: bool | None = None,
    start_timeout: float = 120,
) -> Broker:
    """Start Kafka, and return when every node has answered a request. Use it as a context manager.

    `nodes` is 1 or 3 (then topics have three replicas, of which two must be in sync). `transaction_version` is 1 for
    the protocol without KIP-890; the default is the Kafka version's newest. `port` is the first node's, and the other
    nodes use the next ports; the default is a free port. `settings` are lines of the broker's properties.

    Kafka runs in a container if a container engine answers, `nodes` is 1, and `transaction_version` is the default.
    Otherwise Kafka runs as Java processes, whose jars Maven fetches once. `container` forces one of the two ways.

    Raise `ToolMissing`, which says what to install, `CannotStart`, or `InvalidOption` for an unknown value.
    """
    _kafka.check(nodes, version, transaction_version)
    plain = nodes == 1 and transaction_version is None
    if container and not plain:
        raise InvalidOption("a container runs one node of Kafka, with the default transaction version")
    options: dict[str, Any] = {"version": version, "port": port, "settings": settings, "start_timeout": start_timeout}
    if container or (container is None and plain and engine_answers()):
        return KafkaContainer(**options)
    return _start(KafkaProcess, nodes=nodes, transaction_version=transaction_version, **options)


def pulsar(
    *,
    nodes: int = 1,
    version: str = _pulsar.VERSIONS[0],
    store: str = _pulsar.STORES[0],
    delete_unused: bool = False,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    container: bool | None = None,
    start_timeout: float = 180,
) -> Pulsar:
    """Start Pulsar, and return when its transaction coordinators are loaded. Use it as a context manager.

    `nodes` is 1 (standalone) or 2: brokers of one cluster with one bookie and one ZooKeeper, which still run when
    brokers are killed. The metadata `store` "zookeeper" syncs its journal to disk and survives `kill`. "rocksdb", for
    one node only, syncs nothing; it is quicker, and may fail to start after a `kill`. `delete_unused` restores Pulsar's
    default, which deletes data that no subscription needs and unused topics; otherwise both are kept. `port` is the
    first node's of the binary protocol, and the other nodes use the next ports; the default is a free port. `settings`
    are lines of `standalone.conf`, or of `broker.conf` for two nodes.

    One node runs in a container if a container engine answers, otherwise as a Java process, whose jars Maven fetches
    once. `container` forces one of the two ways.

    Raise `ToolMissing`, which says what to install, `CannotStart`, or `InvalidOption` for an unknown value.
    """
    _pulsar.check(version, store, nodes)
    if container and nodes > 1:
        raise InvalidOption("a container runs one node of Pulsar")
    options: dict[str, Any] = {"version": version, "port": port, "settings": settings, "start_timeout": start_timeout}
    options |= {"store": store, "delete_unused": delete_unused}
    if container or (container is None and nodes == 1 and engine_answers()):
        return PulsarContainer(**options)
    return _start(_pulsar.start, nodes=nodes, **options)


def rocketmq(
    *,
    nodes: int = 1,
    version: str = _rocketmq.VERSIONS[0],
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    system_properties: Mapping[str, str] | None = None,
    start_timeout: float = 120,
) -> RocketMQ:
    """Start RocketMQ, and return when the nodes answer and the name server lists them. Use it as a context manager.

    `nodes` is 1 or 2: brokers that each have their own messages, and a gRPC proxy in the same process. `port` is the
    name server's; the default is a free port. `settings` are lines of the brokers' properties. `system_properties` are
    Java's, for brokers and name server; some settings of RocketMQ, such as TLS, exist only as such properties.

    RocketMQ runs as Java processes, whose jars Maven fetches once.

    Raise `ToolMissing`, which says what to install, `CannotStart`, or `InvalidOption` for an unknown value.
    """
    _rocketmq.check(nodes, version)
    options: dict[str, Any] = {"version": version, "port": port, "settings": settings, "start_timeout": start_timeout}
    return _start(RocketMQ, nodes=nodes, system_properties=system_properties, **options)


def _start(start: Callable[..., _Started], **options: Any) -> _Started:
    """Call `start` and return its result. Repeat the call after `PortTaken`, unless the options name the port."""
    for _ in range(0 if options["port"] else _ATTEMPTS - 1):
        try:
            return start(**options)
        except PortTaken:
            pass  # the next attempt chooses other ports
    return start(**options)
