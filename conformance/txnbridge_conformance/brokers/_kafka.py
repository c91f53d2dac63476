"""Apache Kafka for tests, as Java processes in KRaft mode: each node is both broker and controller."""

from __future__ import annotations

import base64
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from txnbridge_kafka.client import wire
from txnbridge_kafka.client.connection import AttemptError, Connection, TooOldError
from txnbridge_kafka.settings.security import Access

from txnbridge_conformance.brokers._broker import HOST, ProcessBroker, Route, check_known, free_ports, succeeds
from txnbridge_conformance.brokers._jars import Artifact, fetch, java, log4j_option, properties

# The versions that the project tests with; the first is the default.
VERSIONS = ("4.4.0", "4.3.1", "3.9.2")
NODES = (1, 3)
# The values of transaction.version for each version. Kafka 3.9 has no such feature, and works as Kafka 4 does with 1.
TRANSACTION_VERSIONS: Mapping[str, tuple[int, ...]] = {"4.4.0": (2, 1), "4.3.1": (2, 1), "3.9.2": ()}

_LOG4J = "2.25.4"
_FORMATTER = "kafka.tools.StorageTool"
# The file in a node's folder into which the formatter writes the feature levels of a new cluster.
_FEATURES = "bootstrap.checkpoint"
_FEATURES_SINCE_44 = "__cluster_metadata-0/00000000000000000000-0000000000.checkpoint"
# The options make Java small and quick to start; the second compiler gains nothing within minutes.
_JAVA_OPTIONS = (
    "-Xmx256m",
    "-Xms64m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-XX:MaxDirectMemorySize=64m",
)
# Reasons that are not obvious:
# - internal topics have one partition, because each partition costs files and time at the start;
# - timed-out transactions are aborted every half second instead of every ten, so that tests of timeouts are short;
# - a dead node or group member is noticed after six seconds instead of nine and 45; with less, a busy machine takes
#   living ones for dead, but a test about dead ones may set less;
# - the cleaner's buffer would by default take half of the memory;
# - a missing topic is an error, as it should be where transactions matter.
_SETTINGS = {
    "process.roles": "broker,controller",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXY:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
    "num.partitions": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": "2097152",
    "log.segment.bytes": "67108864",
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "200",
    "auto.create.topics.enable": "false",
}


def fetch_kafka(version: str = VERSIONS[0], bar: bool = True) -> Path:
    """Return the folder of Kafka's jars; the first call fetches 45 MB. Raise `ToolMissing` or `CannotStart`."""
    logging = Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", _LOG4J)
    return fetch(f"kafka-{version}", [Artifact("org.apache.kafka", "kafka_2.13", version), logging], bar)


class KafkaProcess(ProcessBroker):
    """Kafka as Java processes of this machine. `brokers.kafka` describes the options."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        version: str = VERSIONS[0],
        transaction_version: int | None = None,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        folder: Path | None = None,
        start_timeout: float = 120,
    ) -> None:
        self._java = java()
        self._jars = fetch_kafka(version)
        self.version = version
        self.nodes = tuple(range(1, nodes + 1))
        self._transaction_version = transaction_version
        self._settings = settings or {}
        ports = iter(free_ports(4 * nodes))
        self._ports = {node: port + node - 1 if port else next(ports) for node in self.nodes}
        self._controllers = {node: next(ports) for node in self.nodes}
        self.routes = tuple(Route(next(ports), next(ports)) for node in self.nodes)
        self._cluster = new_id()
        self._feature_file = _FEATURES if version < "4.4" else _FEATURES_SINCE_44
        super().__init__(folder, start_timeout)
        self._open()

    @property
    def url(self) -> str:
        return "kafka://" + ",".join(f"{HOST}:{port}" for port in self._ports.values())

    def _prepare(self) -> None:
        for node in self.nodes:
            self._properties(node).write_text(properties(self._node_settings(node)))
        features = self._features()
        for node in self.nodes:
            data = self.folder / f"node-{node}"
            (data / self._feature_file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(features, data / self._feature_file)
            identity = {"version": "1", "node.id": str(node), "cluster.id": self._cluster, "directory.id": new_id()}
            (data / "meta.properties").write_text(properties(identity))

    def _features(self) -> Path:
        """Return the path of a file with the feature levels of a new cluster, to be copied to each node's folder.

        Kafka's own tool, a Java program, writes the file once for each Kafka version and transaction version.
        """
        chosen = self._transaction_version
        kept = self._jars / f"transaction-version-{chosen or 'newest'}.{_FEATURES}"
        if not kept.exists():
            options = [] if chosen is None else ["--feature", f"transaction.version={chosen}"]
            properties = str(self._properties(1))
            self._run("format", self._main(_FORMATTER, "format", "-t", self._cluster, "-c", properties, *options))
            made = shutil.copy(self.folder / "node-1" / self._feature_file, kept.with_suffix(f".{os.getpid()}"))
            os.replace(made, kept)
        return kept

    def _command(self, node: int) -> list[str]:
        return self._main("kafka.Kafka", str(self._properties(node)))

    def _answers(self, node: int) -> bool:
        name, alive = cluster(self._ports[node])
        # Another broker may have taken the port. When all nodes are started, each has to know all others.
        is_any_down = any(self.pid(each) is None for each in self.nodes)
        return name == self._cluster and (alive >= len(self.nodes) or is_any_down)

    def _main(self, program: str, *arguments: str) -> list[str]:
        logging = log4j_option(self.folder)
        return [self._java, *_JAVA_OPTIONS, logging, "-cp", f"{self._jars}/*", program, *arguments]

    def _properties(self, node: int) -> Path:
        return self.folder / f"node-{node}.properties"

    def _node_settings(self, node: int) -> dict[str, str]:
        listen, upstream = self.routes[node - 1]
        client = f"PLAINTEXT://{HOST}:{self._ports[node]}"
        return {
            **common_settings(self.version, len(self.nodes)),
            "node.id": str(node),
            "controller.quorum.voters": ",".join(f"{n}@{HOST}:{port}" for n, port in self._controllers.items()),
            "listeners": f"{client},PROXY://{HOST}:{upstream},CONTROLLER://{HOST}:{self._controllers[node]}",
            # A client that connects through the proxy gets the proxy's port, and so stays with the proxy.
            "advertised.listeners": f"{client},PROXY://{HOST}:{listen}",
            "log.dirs": str(self.folder / f"node-{node}"),
            **self._settings,
        }


def common_settings(version: str, nodes: int) -> dict[str, str]:
    """Return the settings that do not depend on a node's addresses."""
    replicas, in_sync = str(nodes), str(nodes // 2 + 1)
    share = "share.coordinator.state.topic"
    shares = {f"{share}.num.partitions": "1", f"{share}.replication.factor": replicas, f"{share}.min.isr": in_sync}
    return {
        **_SETTINGS,
        **({} if version.startswith("3.") else shares),
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
    }


def new_id() -> str:
    """Return an id of the form that Kafka gives to clusters and folders."""
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # Kafka's command would take a leading dash for an option.
    return new_id() if text.startswith("-") else text


def check(nodes: int, version: str, transaction_version: int | None) -> None:
    """Raise `InvalidOption` for options that this package does not start together."""
    check_known("nodes", nodes, NODES)
    check_known("version", version, VERSIONS)
    if transaction_version is not None:
        check_known("transaction_version", transaction_version, TRANSACTION_VERSIONS[version])


def answering(url: str) -> int:
    """Return how many nodes of the cluster at a URL answer a request."""
    return sum(succeeds(cluster, int(address.rpartition(":")[2])) for address in url.split(","))


def ask(port: int, request: wire.Request, seconds: float = 5) -> Any:
    """Send a request to a port, and return the answer's fields. Raise `OSError` if no valid answer comes."""
    until = time.monotonic() + seconds
    try:
        with closing(Connection(HOST, port, Access(), until)) as connection:
            return connection.ask(request, until)
    except (AttemptError, TooOldError) as error:
        raise OSError(f"port {port}: {error}") from error


def cluster(port: int) -> tuple[str, int]:
    """Ask the broker at a port for the cluster's id and number of live nodes. Raise `OSError` without an answer."""
    answer = ask(port, metadata([]))
    return answer.cluster_id, len(answer.brokers)


def metadata(topics: list[dict[str, Any]] | None) -> wire.Request:
    """Return a request for the metadata of topics; None: all topics."""
    return wire.METADATA(
        topics=topics,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
        include_cluster_authorized_operations=False,
    )
