"""Apache Pulsar standalone for tests: broker, bookie and metadata store in one Java process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from txnbridge.errors import InvalidOption
from txnbridge_conformance.brokers._broker import Broker, ProcessBroker, check_known, succeeds
from txnbridge_conformance.brokers._jars import (
    Artifact,
    fetch,
    fetch_from_archive,
    java,
    java_version,
    log4j_option,
    properties,
)
from txnbridge_conformance.brokers._ports import HOST, Route, free_ports, loopback_interface
from txnbridge_conformance.brokers._pulsar_wire import load_coordinator, rest

# The versions that the project tests with; the first is the default.
VERSIONS = ("4.2.4", "4.0.8")
# The metadata stores that Pulsar can use; the first is the default.
STORES = ("zookeeper", "rocksdb")
# The numbers of nodes: 1 is standalone, 2 a cluster.
NODES = (1, 2)

GROUP = "org.apache.pulsar"
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

    _port: int
    _web: int

    @property
    def url(self) -> str:
        return f"pulsar://{HOST}:{self._port}/public/default"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self._web}"


class PulsarProcess(Pulsar, ProcessBroker):
    """Pulsar standalone as a Java process of this machine. `brokers.pulsar` describes the options."""

    nodes = (1,)

    def __init__(
        self,
        *,
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
        self._store = store
        free, self._web, listen, upstream, self._bookie, self._zookeeper = free_ports(6)
        self._port = port or free
        self.routes = (Route(listen, upstream),)
        self._settings = {**common_settings(store, delete_unused), **(settings or {})}
        super().__init__(folder, start_timeout)
        self._open()

    def _prepare(self) -> None:
        own = {
            **addresses(HOST, self._port, self._web, self.routes[0]),
            # The bookie's interface.
            "listeningInterface": loopback_interface(),
            # The path of the status file shows later that the broker that answers is this one.
            "statusFilePath": str(self.folder / "status"),
        }
        self._configuration.write_text(properties({**own, **self._settings}))
        if self._store == "zookeeper":
            self._zookeeper_folder.mkdir(parents=True)  # Pulsar uses ZooKeeper if this folder exists

    def _command(self, node: int) -> list[str]:
        data = self.folder / "data"
        options = {
            "--config": self._configuration,
            "--bookkeeper-port": self._bookie,
            "--bookkeeper-dir": data / "bookkeeper",
            "--metadata-dir": data / "metadata",
            "--zookeeper-port": self._zookeeper,
            "--zookeeper-dir": self._zookeeper_folder,
        }
        return java_command(
            self._java,
            self._jars,
            self.folder,
            _MEMORY,
            f"{GROUP}.PulsarStandaloneStarter",
            "--no-functions-worker",
            "--no-stream-storage",
            *(str(part) for option in options.items() for part in option),
        )

    def _answers(self, node: int) -> bool:
        try:
            return is_own(self._web, self.folder / "status") and is_ready(self._port, self._web)
        except OSError:
            return False

    @property
    def _configuration(self) -> Path:
        return self.folder / "standalone.conf"

    @property
    def _zookeeper_folder(self) -> Path:
        return self.folder / "data" / "zookeeper"


def java_command(java: str, jars: Path, folder: Path, memory: Sequence[str], main: str, *arguments: str) -> list[str]:
    """Return the command that runs the class `main` of Pulsar's jars, with the Java options in `memory`."""
    unsafe = [_UNSAFE_OPTION] if java_version() >= _UNSAFE_JAVA else []
    return [*(java, *memory, *_JAVA_OPTIONS, *unsafe, log4j_option(folder)), *("-cp", f"{jars}/*", main, *arguments)]


def is_own(web: int, status: Path) -> bool:
    """Return whether the broker at a web port is ours, set to this status file. Raise `OSError` without an answer."""
    configuration = rest(web, "/admin/v2/brokers/configuration/runtime")
    return bool(configuration.get("statusFilePath") == str(status))


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
