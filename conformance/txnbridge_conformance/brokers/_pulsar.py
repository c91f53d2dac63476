"""Apache Pulsar for tests: standalone (broker, bookie and metadata store in one Java process), or a cluster."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from txnbridge_pulsar.client import PulsarClient, PulsarError

from txnbridge.errors import InvalidOption
from txnbridge_conformance.brokers._broker import (
    HOST,
    Broker,
    ProcessBroker,
    Route,
    check_known,
    free_ports,
    is_open,
    loopback_interface,
    succeeds,
)
from txnbridge_conformance.brokers._jars import (
    Artifact,
    fetch,
    fetch_from_archive,
    java,
    java_version,
    log4j_option,
    properties,
)

# The versions that the project tests with; the first is the default.
VERSIONS = ("4.2.4", "4.0.8")
# The metadata stores that Pulsar can use; the first is the default.
STORES = ("zookeeper", "rocksdb")
# The numbers of nodes: 1 is standalone, 2 a cluster.
NODES = (1, 2)

GROUP = "org.apache.pulsar"
_ANSWER_SECONDS = 5.0
# The versions whose distribution Maven has; for the others Maven has only the jars.
_DISTRIBUTIONS = ("4.0.8",)

# The packages of Java that Pulsar and its libraries access by reflection.
_OPENED = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.nio",
    "java.base/java.util.zip",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.platform",
    "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
)
_DRIVERS = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata"
_MEMORY = ("-Xms128m", "-Xmx768m", "-XX:MaxDirectMemorySize=768m")
_JAVA_OPTIONS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
    "--enable-native-access=ALL-UNNAMED",
    "-Djava.net.preferIPv4Stack=true",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dlog4j.shutdownHookEnabled=false",
    "-Dlog4j2.is.webapp=false",
    f"-Dbookkeeper.metadata.bookie.drivers={_DRIVERS}BookieDriver",
    f"-Dbookkeeper.metadata.client.drivers={_DRIVERS}ClientDriver",
)
# From this version on Java has an option that permits netty's use of sun.misc.Unsafe.
_UNSAFE_JAVA = 23
_UNSAFE_OPTION = "--sun-misc-unsafe-memory-access=allow"

# Reasons that are not obvious:
# - transactions, deduplication and batch-index acks are tested, and off by default;
# - there is one bookie, and a nearly full disk must not stop it; it refuses a disk without room for one more of its
#   files, so these are small;
# - caches and pools are small, because other brokers may run on the machine.
_SETTINGS = {
    "clusterName": "standalone",
    "transactionCoordinatorEnabled": "true",
    "systemTopicEnabled": "true",
    "topicLevelPoliciesEnabled": "true",
    "acknowledgmentAtBatchIndexLevelEnabled": "true",
    "brokerDeduplicationEnabled": "true",
    "managedLedgerDefaultEnsembleSize": "1",
    "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1",
    "loadBalancerEnabled": "false",
    "defaultNumberOfNamespaceBundles": "4",
    "numHttpServerThreads": "8",
    "httpServerEnabled": "false",
    "allowLoopback": "true",
    "diskUsageThreshold": "0.9999",
    "diskUsageWarnThreshold": "0.9998",
    "logSizeLimit": "67108864",
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
    # The broker's largest message with its overhead. With less the bookie takes no entry of that size.
    "nettyMaxFrameSizeBytes": "5253120",
    "gcWaitTime": "300000",
    "managedLedgerCacheSizeMB": "64",
    "dbStorage_writeCacheMaxSizeMb": "64",
    "dbStorage_readAheadCacheMaxSizeMb": "64",
    "dbStorage_rocksDB_blockCacheSize": "33554432",
    "brokerShutdownTimeoutMs": "5000",
}
# By default Pulsar deletes data that no subscription needs, and unused topics.
_KEEP_ALL = {
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
    "brokerDeleteInactiveTopicsEnabled": "false",
}


def fetch_pulsar(version: str = VERSIONS[0], bar: bool = True) -> Path:
    """Return the folder of Pulsar's jars; the first call fetches 245 MB. Raise `ToolMissing` or `CannotStart`."""
    name = f"pulsar-{version}"
    if version in _DISTRIBUTIONS:
        distribution = Artifact(GROUP, "pulsar-server-distribution", version)
        return fetch_from_archive(name, distribution, "**/lib/*.jar", bar) / f"apache-pulsar-{version}" / "lib"
    # Only the parent project names versions that fit each other. It also has the version of log4j-core.
    wanted = [Artifact(GROUP, "pulsar-broker", version), Artifact("org.apache.logging.log4j", "log4j-core")]
    return fetch(name, wanted, bar, parent=Artifact(GROUP, "pulsar", version))


def java_with_pulsar() -> list[str]:
    """Return the begin of a command that runs a Java program with Pulsar's classes; raise as `fetch_pulsar` does."""
    return [java(), "-XX:TieredStopAtLevel=1", "-Xmx256m", "-cp", f"{fetch_pulsar()}/*"]


class Pulsar(Broker):
    """A real Pulsar for tests, which has started when its transaction coordinators are loaded and answer."""

    _ports: dict[int, int]
    _webs: dict[int, int]

    @property
    def url(self) -> str:
        return f"pulsar://{','.join(f'{HOST}:{port}' for port in self._ports.values())}/public/default"

    @property
    def admin_url(self) -> str:
        """Return the URL of the first node's administration."""
        return f"http://{self.web_address(1)}"

    def address(self, node: int) -> str:
        """Return a node's address of the binary protocol, as "host:port"."""
        return f"{HOST}:{self._ports[node]}"

    def web_address(self, node: int) -> str:
        """Return a node's HTTP address as "host:port", which is also the broker's id in Pulsar."""
        return f"{HOST}:{self._webs[node]}"


class PulsarProcess(Pulsar, ProcessBroker):
    """Pulsar standalone as a Java process of this machine. `brokers.pulsar` describes the options."""

    own_settings: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        *,
        nodes: int = 1,
        version: str = VERSIONS[0],
        store: str = STORES[0],
        delete_unused: bool = False,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        folder: Path | None = None,
        start_timeout: float = 180,
    ) -> None:
        self._java = java()
        self._jars = fetch_pulsar(version)
        self.version = version
        self.nodes = tuple(range(1, nodes + 1))
        self._store = store
        self._zookeeper, self._bookie, *ports = free_ports(2 + 4 * nodes)
        rest = iter(ports)
        self._ports = {node: port + node - 1 if port else next(rest) for node in self.nodes}
        self._webs = {node: next(rest) for node in self.nodes}
        self.routes = tuple(Route(next(rest), next(rest)) for node in self.nodes)
        self._settings = {**common_settings(store, delete_unused), **self.own_settings, **(settings or {})}
        super().__init__(folder, start_timeout)
        self._open()

    def _prepare(self) -> None:
        own = {**self._addresses(1), "listeningInterface": loopback_interface()}  # the bookie's interface
        self._file("standalone").write_text(properties({**own, **self._settings}))
        if self._store == "zookeeper":
            self._zookeeper_folder.mkdir(parents=True)  # Pulsar uses ZooKeeper if this folder exists

    def _command(self, node: int) -> list[str]:
        data = self.folder / "data"
        options = {
            "--config": self._file("standalone"),
            "--bookkeeper-port": self._bookie,
            "--bookkeeper-dir": data / "bookkeeper",
            "--metadata-dir": data / "metadata",
            "--zookeeper-port": self._zookeeper,
            "--zookeeper-dir": self._zookeeper_folder,
        }
        main = f"{GROUP}.PulsarStandaloneStarter"
        return self._main(_MEMORY, main, options, "--no-functions-worker", "--no-stream-storage")

    def _answers(self, node: int) -> bool:
        return self._is_own(node) and is_ready(self._ports[node], self._webs[node])

    def _main(self, memory: Sequence[str], main: str, options: Mapping[str, object], *arguments: str) -> list[str]:
        """Return the command that runs the class `main` of Pulsar's jars, with the Java options in `memory`."""
        unsafe = [_UNSAFE_OPTION] if java_version() >= _UNSAFE_JAVA else []
        java_options = [*memory, *_JAVA_OPTIONS, *unsafe, log4j_option(self.folder), "-cp", f"{self._jars}/*"]
        named = [str(part) for option in options.items() for part in option]
        return [self._java, *java_options, main, *arguments, *named]

    def _addresses(self, node: int) -> dict[str, str]:
        """Return a node's settings that say where it listens, and those by which `_is_own` knows it again."""
        own = addresses(HOST, self._ports[node], self._webs[node], self.routes[node - 1])
        return {**own, "statusFilePath": str(self._status(node))}

    def _is_own(self, node: int) -> bool:
        """Return whether the broker at a node's port is ours, by its status file. Raise `OSError` if none answers."""
        configuration = rest(self._webs[node], "/admin/v2/brokers/configuration/runtime")
        return bool(configuration.get("statusFilePath") == str(self._status(node)))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.conf"

    def _status(self, node: int) -> Path:
        return self.folder / f"node-{node}.status"

    @property
    def _zookeeper_folder(self) -> Path:
        return self.folder / "data" / "zookeeper"


def is_ready(port: int, web: int) -> bool:
    """Return whether a broker has made its tenants, namespaces and system topics. If so, load its coordinator, too.

    Raise `OSError` if the broker or the coordinator does not answer.
    """
    # The checks go from the outside in, because the broker logs an error for each request about a missing object.
    if not {"public", "pulsar"} <= set(rest(web, "/admin/v2/tenants")):
        return False
    namespaces = rest(web, "/admin/v2/namespaces/public") + rest(web, "/admin/v2/namespaces/pulsar")
    if not {"public/default", "pulsar/system"} <= set(namespaces):
        return False
    if not rest(web, "/admin/v2/persistent/pulsar/system/transaction_coordinator_assign/partitions")["partitions"]:
        return False
    load_coordinator(port)
    return True


def common_settings(store: str, delete_unused: bool) -> dict[str, str]:
    """Return the settings that do not depend on the broker's addresses."""
    return {
        **_SETTINGS,
        **({} if delete_unused else _KEEP_ALL),
        # Without a synced journal, a SIGKILL under load can leave topics that cannot be read any more.
        "journalSyncData": "true" if store == "zookeeper" else "false",
    }


def addresses(bind: str, port: int, web: int, route: Route) -> dict[str, str]:
    """Return the settings for the addresses where the broker listens, and for the addresses it returns to clients."""
    return {
        "bindAddress": bind,
        "brokerServicePort": str(port),
        "webServicePort": str(web),
        "bindAddresses": f"proxy:pulsar://{bind}:{route.upstream}",
        "advertisedAddress": HOST,
        # A client that connects through the proxy gets the proxy's port, and so stays with the proxy.
        "advertisedListeners": f"internal:pulsar://{HOST}:{port},proxy:pulsar://{HOST}:{route.listen}",
        "internalListenerName": "internal",
    }


def check(version: str, store: str, nodes: int = 1) -> None:
    """Raise `InvalidOption` for options that this package does not start together."""
    check_known("nodes", nodes, NODES)
    check_known("version", version, VERSIONS)
    if nodes > 1 and store != STORES[0]:
        raise InvalidOption(f"several nodes of Pulsar share a store: it is {STORES[0]}, not {store!r}")
    check_known("store", store, STORES)


def answering(url: str) -> int:
    """Return how many nodes of the cluster at a URL answer a request."""
    ports = (int(address.rpartition(":")[2]) for address in url.split("/")[2].split(","))
    return sum(succeeds(load_coordinator, port) for port in ports)


def load_coordinator(port: int, number: int = 0) -> None:
    """Make a broker of the cluster load the transaction coordinator `number`, and wait until it is loaded.

    `port` is the port of any broker of the cluster. Raise `OSError` if the coordinator is not ready.
    """
    # Only a lookup makes a broker load the topic, and the coordinator with it.
    try:
        with PulsarClient(f"pulsar://{HOST}:{port}") as client:
            client.transactions.connect_to(number, _ANSWER_SECONDS)
    except PulsarError as error:
        raise OSError(f"port {port}: {error}") from error


def rest(port: int, path: str) -> Any:
    """Return the JSON document at a path of the broker's HTTP administration. Raise `OSError` for any other answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise OSError(f"{path}: {answer.status}")
        return json.loads(answer.read())
    except (http.client.HTTPException, ValueError):
        raise OSError(f"port {port} does not speak HTTP as Pulsar does") from None
    finally:
        connection.close()


# --- a cluster: brokers, one bookie and one ZooKeeper, each in its own Java process -----------------------------------

_CLUSTER = "standalone"  # the cluster's name, the same as of a standalone node
_ZOOKEEPER, _BOOKIE = "zookeeper", "bookie"
_ZOOKEEPER_MEMORY = ("-Xms32m", "-Xmx64m")
_BOOKIE_MEMORY = ("-Xms64m", "-Xmx192m", "-XX:MaxDirectMemorySize=192m")
_BROKER_MEMORY = ("-Xms128m", "-Xmx320m", "-XX:MaxDirectMemorySize=256m")
# The ZooKeeper session time-out, after which a killed broker counts as dead: long enough for a broker on a busy
# machine. ZooKeeper allows between two and twenty ticks.
_SESSION_MS, _TICK_MS = 5000, 1000
# Reasons that are not obvious:
# - a topic stays on its broker as long as the broker lives, unless a test moves the topic;
# - caches are small: there are four processes;
# - the bookie and ZooKeeper are killed only to end the cluster, so nothing needs to be synced to disk.
_CLUSTER_SETTINGS = {
    "loadBalancerEnabled": "true",
    "loadBalancerSheddingEnabled": "false",
    "loadBalancerAutoBundleSplitEnabled": "false",
    "metadataStoreSessionTimeoutMillis": str(_SESSION_MS),
    "managedLedgerCacheSizeMB": "32",
    "dbStorage_writeCacheMaxSizeMb": "32",
    "dbStorage_readAheadCacheMaxSizeMb": "32",
    "journalSyncData": "false",
}
_BUNDLES = 16  # Pulsar's default
_UNSYNCED = "-Dzookeeper.forceSync=no"


class PulsarCluster(PulsarProcess):
    """A Pulsar cluster whose nodes are its brokers. ZooKeeper and the bookie run until `close`.

    A node has started when all running brokers list it, and each transaction coordinator is loaded by one of them.
    `brokers.pulsar` describes the options.
    """

    own_settings = _CLUSTER_SETTINGS
    coordinators = 4
    """The number of transaction coordinators: more than one for each broker."""

    def _prepare(self) -> None:
        zookeeper = {
            "dataDir": str(self.folder / _ZOOKEEPER),
            "clientPort": str(self._zookeeper),
            "clientPortAddress": HOST,
            "tickTime": str(_TICK_MS),
            "maxClientCnxns": "0",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "ruok",
        }
        bookie = {
            **self._settings,
            "bookiePort": str(self._bookie),
            "listeningInterface": loopback_interface(),
            "metadataServiceUri": f"metadata-store:{self._metadata}",
            "journalDirectories": str(self.folder / _BOOKIE / "journal"),
            "ledgerDirectories": str(self.folder / _BOOKIE / "ledgers"),
        }
        self._file(_ZOOKEEPER).write_text(properties(zookeeper))
        self._file(_BOOKIE).write_text(properties(bookie))
        for node in self.nodes:
            stores = {"metadataStoreUrl": self._metadata, "configurationMetadataStoreUrl": self._metadata}
            self._file(f"node-{node}").write_text(properties({**self._addresses(node), **stores, **self._settings}))
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        command = self._main((*_ZOOKEEPER_MEMORY, _UNSYNCED), main, {}, str(self._file(_ZOOKEEPER)))
        self._start_server(_ZOOKEEPER, command, lambda: _is_zookeeper(self._zookeeper))
        self._run("setup", self._setup_command())
        command = self._main(_BOOKIE_MEMORY, "org.apache.bookkeeper.server.Main", {"--conf": self._file(_BOOKIE)})
        self._start_server(_BOOKIE, command, lambda: is_open(self._bookie))

    @property
    def _metadata(self) -> str:
        return f"zk:{HOST}:{self._zookeeper}"

    def _setup_command(self) -> list[str]:
        options = {
            "--cluster": _CLUSTER,
            "--metadata-store": self._metadata,
            "--configuration-metadata-store": self._metadata,
            "--web-service-url": self.admin_url,
            "--broker-service-url": f"pulsar://{self.address(1)}",
            "--default-namespace-bundle-number": _BUNDLES,
            "--initial-num-stream-storage-containers": 0,
            "--initial-num-transaction-coordinators": self.coordinators,
        }
        return self._main(_ZOOKEEPER_MEMORY, f"{GROUP}.PulsarClusterMetadataSetup", options)

    def _command(self, node: int) -> list[str]:
        return self._main(_BROKER_MEMORY, f"{GROUP}.PulsarBrokerStarter", {"--broker-conf": self._file(f"node-{node}")})

    def _answers(self, node: int) -> bool:
        if not self._is_own(node):
            return False
        known = rest(self._webs[node], f"/admin/v2/brokers/{_CLUSTER}")
        if not {self.web_address(each) for each in self.nodes if self.pid(each) is not None} <= set(known):
            return False
        for number in range(self.coordinators):
            load_coordinator(self._ports[node], number)
        return True


def start(*, nodes: int, **options: Any) -> PulsarProcess:
    """Start Pulsar, standalone or with several nodes, by the options of `PulsarProcess`; return when it serves."""
    return (PulsarProcess if nodes == 1 else PulsarCluster)(nodes=nodes, **options)


def _is_zookeeper(port: int) -> bool:
    with socket.create_connection((HOST, port), 5) as connection:
        connection.sendall(b"ruok")
        return connection.recv(4) == b"imok"
