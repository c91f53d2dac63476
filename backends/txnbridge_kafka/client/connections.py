"""kafka-python's connections to a cluster. Their event loop runs only on the thread that sends a request."""

from __future__ import annotations

import socket
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from txnbridge.errors import BrokerUnavailable, NotFound, TxnBridgeError
from txnbridge.spi import Partition
from txnbridge_kafka.client import kafka_python, messages
from txnbridge_kafka.client.kafka_python import event_loop, quiet
from txnbridge_kafka.client.protocol_types import DONE, EPOCH_BUMPS, NO_LEADER, UNKNOWN_TOPIC, RetryLaterError, check

T = TypeVar("T")

# The kinds of coordinators in FindCoordinator.
_GROUP, _TRANSACTION = 0, 1
# `Connections` caches the coordinators of at most so many transactional ids and groups.
_MOST_CACHED_COORDINATORS = 1000
# Exceptions that a broker's malformed answer causes, in kafka-python or in this package.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, struct.error)
# The longest wait for a broker's answer. A hanging broker may no longer be the coordinator, which is then looked up.
LONGEST_ATTEMPT = 5.0


class Connections:
    """kafka-python's event loop with its connections. One thread at a time runs the loop, to send a request.

    kafka-python's log lines are dropped: there would be one for each attempt to connect to a stopped broker, and debug
    lines have passwords. The errors have the details.
    """

    bootstrap_node = "bootstrap-0"  # kafka-python's name of the server in the URL

    def __init__(self, server: str, config: Mapping[str, Any]) -> None:
        self.server = server
        self._levels: dict[Any, int] = {}
        self._coordinators: dict[tuple[int, str], int] = {}
        with quiet():
            self._sockets: list[socket.socket] = []
            self._net = event_loop(self._sockets)
            self._manager = kafka_python.KafkaConnectionManager(self._net, **{**config, "bootstrap_servers": server})

    def run(self, attempt: Callable[[Connections], Awaitable[T]], seconds: float) -> T:
        with quiet():
            future = self._manager.call_soon(attempt, self)
            self._net.poll(timeout_ms=seconds * 1000, future=future)
        if not future.is_done:
            raise kafka_python.errors.KafkaTimeoutError(f"no answer within {seconds:.3g} s")
        if isinstance(future.exception, _UNREADABLE):
            kind = type(future.exception).__name__
            raise kafka_python.errors.KafkaProtocolError(
                f"the broker's answer cannot be read ({kind})"
            ) from future.exception
        if future.exception is not None:
            raise future.exception
        result: T = future.value
        return result

    def notice_closed(self) -> None:
        """Run the event loop once, so that it notices connections that brokers have closed since the last request."""
        with quiet():
            self._net.poll(timeout_ms=0)

    def close(self) -> None:
        with quiet():
            self._manager.close()
            self._net.close()
        for each in self._sockets:
            each.close()

    async def connect(self, node: Any) -> Any:
        try:
            # With its default kafka-python would refresh metadata in the background after an error, for ever.
            return await self._manager.get_connection(node, refresh_metadata_on_err=False)
        except (kafka_python.errors.KafkaError, OSError, TxnBridgeError):
            raise
        except Exception as error:  # an error of the OAuth token provider; its text may have a secret
            raise BrokerUnavailable(f"logging in to the broker failed with {type(error).__name__}") from error

    async def send(self, node: Any, request: Any) -> Any:
        connection = await self.connect(node)
        return await connection.send_request(request)

    async def metadata(self, topics: Iterable[str] = (), node: Any = bootstrap_node) -> Any:
        """Return a node's metadata of topics, and take the brokers' addresses from the answer."""
        asked = [kafka_python.MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
        answer = await self.send(node, kafka_python.MetadataRequest(topics=asked, allow_auto_topic_creation=False))
        self._manager.cluster.update_metadata(answer)
        return answer

    async def nodes(self) -> list[int]:
        return [broker.node_id for broker in (await self.metadata()).brokers]

    async def coordinator(self, id: str) -> int:
        (node,) = await self.coordinators([id])
        return node

    async def group_coordinator(self, group: str) -> int:
        (node,) = await self.coordinators([group], _GROUP)
        return node

    async def coordinators(self, ids: Sequence[str], kind: int = _TRANSACTION) -> dict[int, list[str]]:
        """Group transactional ids, or groups, by their coordinator's node, from a cache or by FindCoordinator."""
        unknown = [id for id in ids if (kind, id) not in self._coordinators]
        if unknown:
            if len(self._coordinators) > _MOST_CACHED_COORDINATORS:
                self.forget_coordinators()
                unknown = list(ids)
            request = kafka_python.FindCoordinatorRequest(
                key_type=kind, coordinator_keys=unknown, min_version=4, max_version=4
            )
            for each in (await self.send(self.bootstrap_node, request)).coordinators:
                check(each.error_code, f"looking for the coordinator of {each.key!r}")
                self._coordinators[kind, each.key] = each.node_id
        nodes: dict[int, list[str]] = defaultdict(list)
        for id in ids:
            nodes[self._coordinators[kind, id]].append(id)
        if any(self._manager.cluster.broker_metadata(node) is None for node in nodes):
            await self.metadata()
        return nodes

    def forget_coordinators(self) -> None:
        """Clear the cache of coordinators. Called after an error, because a coordinator may have moved."""
        self._coordinators.clear()

    async def leaders(self, partitions: Iterable[Partition]) -> dict[int, list[Partition]]:
        """Group partitions by their leader's node. A partition that does not exist is absent."""
        wanted = set(partitions)
        leaders: dict[int, list[Partition]] = defaultdict(list)
        for topic in (await self.metadata(sorted({name for name, _ in wanted}))).topics:
            if topic.error_code not in (DONE, UNKNOWN_TOPIC):
                check(topic.error_code, f"asking for the topic {topic.name!r}")
            for each in topic.partitions:
                partition = (topic.name, each.partition_index)
                if partition in wanted:
                    if each.leader_id < 0:
                        raise RetryLaterError(f"{messages.partition_name(partition)} has no leader")
                    leaders[each.leader_id].append(partition)
        return leaders

    async def counts(self, topics: Iterable[str]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for topic in (await self.metadata(sorted(topics))).topics:
            if topic.error_code == UNKNOWN_TOPIC:
                raise NotFound(f"there is no topic {topic.name!r}")
            if topic.error_code not in NO_LEADER:
                check(topic.error_code, f"looking up topic {topic.name!r}")
            counts[topic.name] = len(topic.partitions)
        return counts

    async def transaction_version(self, node: Any) -> int:
        """Ask a node for the cluster's finalised level of the feature transaction.version; 0 if there is none."""
        levels = (await self.send(node, messages.api_versions_request())).finalized_features or ()
        return max((int(each.max_version_level) for each in levels if each.name == "transaction.version"), default=0)

    async def bumps_epochs(self, node: Any) -> bool:
        """Return whether a node accepts EndTxn version 5. The level is cached: older versions stay valid."""
        if node not in self._levels:
            self._levels[node] = await self.transaction_version(node)
        return self._levels[node] >= EPOCH_BUMPS  # brokers support EndTxn 5 only from this level on
