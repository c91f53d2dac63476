"""Connections to the brokers of a cluster. One thread at a time uses them."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from txnbridge.errors import NotFound, TxnBridgeError
from txnbridge.spi import Partition
from txnbridge_kafka.client import messages, wire
from txnbridge_kafka.client.connection import UNREADABLE, AttemptError, Connection, api_versions
from txnbridge_kafka.client.protocol_types import (
    DENIED,
    DONE,
    EPOCH_BUMPS,
    NO_LEADER,
    UNKNOWN_TOPIC,
    RetryLaterError,
    check,
)
from txnbridge_kafka.settings.security import Access

T = TypeVar("T")

# The kinds of coordinators in FindCoordinator.
_GROUP, _TRANSACTION = 0, 1
# `Connections` caches the coordinators of at most so many transactional ids and groups.
_MOST_CACHED_COORDINATORS = 1000
# The longest wait for a broker's answer. A hanging broker may no longer be the coordinator, which is then looked up.
LONGEST_ATTEMPT = 5.0


class Connections:
    """Connections to the brokers of a cluster, one for each that was asked so far. One thread at a time uses them."""

    bootstrap_node = -1  # the server in the URL

    def __init__(self, server: str, access: Access) -> None:
        self.server = server
        host, _, port = server.rpartition(":")
        self._addresses = {self.bootstrap_node: (host.strip("[]"), int(port))}
        self._access = access
        self._open: dict[int, Connection] = {}
        self.until = 0.0  # by time.monotonic(): when the attempt that is under way has to end
        self._levels: dict[int, int] = {}
        self._coordinators: dict[tuple[int, str], int] = {}

    def run(self, attempt: Callable[[Connections], T], seconds: float) -> T:
        self.until = time.monotonic() + seconds
        try:
            return attempt(self)
        except TxnBridgeError:
            raise
        except UNREADABLE as error:
            raise AttemptError(f"the broker's answer cannot be read ({type(error).__name__})") from error

    def notice_closed(self) -> None:
        """Close the connections that brokers have closed since the last request."""
        for node, each in list(self._open.items()):
            if not each.usable:
                each.close()
                del self._open[node]

    def close(self) -> None:
        for each in self._open.values():
            each.close()

    def connect(self, node: int) -> Connection:
        if node not in self._open:
            self._open[node] = Connection(*self._addresses[node], self._access, self.until)
        return self._open[node]

    def send(self, node: int, request: wire.Request) -> Any:
        return self.connect(node).ask(request, self.until)

    def metadata(self, topics: Iterable[str] = (), node: int = bootstrap_node) -> Any:
        """Return a node's metadata of topics, and take the brokers' addresses from the answer."""
        asked = [{"topic_id": uuid.UUID(int=0), "name": name} for name in topics]
        request = wire.METADATA(
            topics=asked,
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
            include_cluster_authorized_operations=False,
        )
        answer = self.send(node, request)
        self._addresses.update((each.node_id, (each.host, each.port)) for each in answer.brokers)
        return answer

    def nodes(self) -> list[int]:
        return [broker.node_id for broker in self.metadata().brokers]

    def coordinator(self, id: str) -> int:
        return next(iter(self.coordinators([id])))

    def group_coordinator(self, group: str) -> int:
        return next(iter(self.coordinators([group], _GROUP)))

    def coordinators(self, ids: Sequence[str], kind: int = _TRANSACTION) -> dict[int, list[str]]:
        """Return transactional ids, or groups (by `kind`), by their coordinator's node. A cache keeps the answers."""
        unknown = [id for id in ids if (kind, id) not in self._coordinators]
        if unknown:
            if len(self._coordinators) > _MOST_CACHED_COORDINATORS:
                self.forget_coordinators()
                unknown = list(ids)
            for each in self._find_coordinators(unknown, kind):
                check(each.error_code, f"looking for the coordinator of {each.key!r}")
                self._coordinators[kind, each.key] = each.node_id
                self._addresses[each.node_id] = each.host, each.port
        nodes: dict[int, list[str]] = defaultdict(list)
        for id in ids:
            nodes[self._coordinators[kind, id]].append(id)
        return nodes

    def _find_coordinators(self, ids: Sequence[str], kind: int) -> list[Any]:
        asked = self.connect(self.bootstrap_node)
        if asked.versions(wire.FIND_COORDINATOR):
            return list(asked.ask(wire.FIND_COORDINATOR(key_type=kind, coordinator_keys=ids), self.until).coordinators)
        found = [asked.ask(wire.FIND_ONE_COORDINATOR(key=id, key_type=kind), self.until) for id in ids]
        for id, each in zip(ids, found, strict=True):
            each.key = id
        return found

    def forget_coordinators(self) -> None:
        """Clear the cache of coordinators. Called after an error, because a coordinator may have moved."""
        self._coordinators.clear()

    def leaders(
        self, partitions: Iterable[Partition], *, led_only: bool = False, readable_only: bool = False, group: str = ""
    ) -> dict[int, list[Partition]]:
        """Return the partitions by their leader's node. A partition that does not exist is left out.

        With `led_only` one without a leader is left out too, with `readable_only` also one that this user may not see.
        The group's coordinator is asked, if there is a group.
        """
        node = self.group_coordinator(group) if group else self.bootstrap_node
        wanted = set(partitions)
        passed = {DONE, UNKNOWN_TOPIC, *(NO_LEADER if led_only else ()), *(DENIED if readable_only else ())}
        leaders: dict[int, list[Partition]] = defaultdict(list)
        for topic in self.metadata(sorted({name for name, _ in wanted}), node).topics:
            if topic.error_code not in passed:
                check(topic.error_code, f"asking for the topic {topic.name!r}")
            for each in topic.partitions:
                partition = (topic.name, each.partition_index)
                if partition in wanted and each.leader_id >= 0:
                    leaders[each.leader_id].append(partition)
                elif partition in wanted and not (led_only or readable_only):
                    raise RetryLaterError(f"{messages.partition_name(partition)} has no leader")
        return leaders

    def counts(self, topics: Iterable[str]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for topic in self.metadata(sorted(topics)).topics:
            if topic.error_code == UNKNOWN_TOPIC:
                raise NotFound(f"there is no topic {topic.name!r}")
            if topic.error_code not in NO_LEADER:
                check(topic.error_code, f"looking up topic {topic.name!r}")
            counts[topic.name] = len(topic.partitions)
        return counts

    def transaction_version(self, node: int) -> int:
        """Ask a node for the cluster's finalised level of the feature transaction.version; 0 if there is none."""
        levels = self.send(node, api_versions()).finalized_features or ()
        return max((each.max_version_level for each in levels if each.name == "transaction.version"), default=0)

    def bumps_epochs(self, node: int) -> bool:
        """Return whether a node accepts EndTxn version 5, by the level of transaction.version, which is then cached."""
        if node not in self._levels:
            self._levels[node] = self.transaction_version(node)
        # Some brokers support EndTxn 5 only from this level on, and others of the protocol not at all.
        return self._levels[node] >= EPOCH_BUMPS and bool(self.connect(node).versions(wire.END_TXN_AND_BUMP))
