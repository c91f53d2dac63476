"""A cluster of Apache Pulsar for tests: brokers, one bookie and one ZooKeeper, each in its own Java process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from txnbridge_conformance.brokers._broker import ProcessBroker
from txnbridge_conformance.brokers._jars import java, properties
from txnbridge_conformance.brokers._ports import HOST, Route, free_ports, is_open, loopback_interface
from txnbridge_conformance.brokers._pulsar import (
    GROUP,
    STORES,
    VERSIONS,
    Pulsar,
    PulsarProcess,
    addresses,
    common_settings,
    fetch_pulsar,
    is_own,
    java_command,
)
from txnbridge_conformance.brokers._pulsar_wire import load_coordinator, rest

_NAME = "standalone"  # the cluster's name, the same as of a standalone node
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
_SETTINGS = {
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


class PulsarCluster(Pulsar, ProcessBroker):
    """A Pulsar cluster whose nodes are its brokers. ZooKeeper and the bookie run until `close`.

    A node has started when all running brokers list it, and each transaction coordinator is loaded by one of them.
    `brokers.pulsar` describes the options.
    """

    coordinators = 4
    """The number of transaction coordinators: more than one for each broker."""

    def __init__(
        self,
        *,
        nodes: int,
        version: str = VERSIONS[0],
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
        self._zookeeper, self._bookie, *ports = free_ports(2 + 4 * nodes)
        rest = iter(ports)
        self._ports = {node: port + node - 1 if port else next(rest) for node in self.nodes}
        self._webs = {node: next(rest) for node in self.nodes}
        self.routes = tuple(Route(next(rest), next(rest)) for node in self.nodes)
        self._settings = {**common_settings(STORES[0], delete_unused), **_SETTINGS, **(settings or {})}
        super().__init__(folder, start_timeout)
        self._open()

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
            "metadataServiceUri": f"metadata-store:{self._store}",
            "journalDirectories": str(self.folder / _BOOKIE / "journal"),
            "ledgerDirectories": str(self.folder / _BOOKIE / "ledgers"),
        }
        self._file(_ZOOKEEPER).write_text(properties(zookeeper))
        self._file(_BOOKIE).write_text(properties(bookie))
        for node in self.nodes:
            own = addresses(HOST, self._ports[node], self._webs[node], self.routes[node - 1])
            stores = {"metadataStoreUrl": self._store, "configurationMetadataStoreUrl": self._store}
            # The path of the status file shows later that the broker that answers is this one.
            settings = {**own, **stores, "statusFilePath": str(self._status(node)), **self._settings}
            self._file(f"node-{node}").write_text(properties(settings))
        self._start_server(_ZOOKEEPER, self._zookeeper_command(), lambda: _is_zookeeper(self._zookeeper))
        self._run("setup", self._setup_command())
        self._start_server(_BOOKIE, self._bookie_command(), lambda: is_open(self._bookie))

    def _start_server(self, name: str, command: list[str], answers: Callable[[], bool]) -> None:
        log = self.folder / f"{name}.log"
        self._processes.start(name, command, log)
        self._wait_for(name, name, log, answers)

    @property
    def _store(self) -> str:
        return f"zk:{HOST}:{self._zookeeper}"

    def _zookeeper_command(self) -> list[str]:
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        return self._main((*_ZOOKEEPER_MEMORY, _UNSYNCED), main, str(self._file(_ZOOKEEPER)))

    def _bookie_command(self) -> list[str]:
        return self._main(_BOOKIE_MEMORY, "org.apache.bookkeeper.server.Main", "--conf", str(self._file(_BOOKIE)))

    def _setup_command(self) -> list[str]:
        options = {
            "--cluster": _NAME,
            "--metadata-store": self._store,
            "--configuration-metadata-store": self._store,
            "--web-service-url": self.admin_url,
            "--broker-service-url": f"pulsar://{self.address(1)}",
            "--default-namespace-bundle-number": _BUNDLES,
            "--initial-num-stream-storage-containers": 0,
            "--initial-num-transaction-coordinators": self.coordinators,
        }
        arguments = (str(part) for option in options.items() for part in option)
        return self._main(_ZOOKEEPER_MEMORY, f"{GROUP}.PulsarClusterMetadataSetup", *arguments)

    def _command(self, node: int) -> list[str]:
        file = str(self._file(f"node-{node}"))
        return self._main(_BROKER_MEMORY, f"{GROUP}.PulsarBrokerStarter", "--broker-conf", file)

    def _main(self, memory: tuple[str, ...], main: str, *arguments: str) -> list[str]:
        return java_command(self._java, self._jars, self.folder, memory, main, *arguments)

    def _answers(self, node: int) -> bool:
        try:
            if not is_own(self._webs[node], self._status(node)):
                return False
            known = rest(self._webs[node], f"/admin/v2/brokers/{_NAME}")
            if not {self.web_address(each) for each in self.nodes if self.pid(each) is not None} <= set(known):
                return False
            for number in range(self.coordinators):
                load_coordinator(self._ports[node], number)
        except OSError:
            return False
        return True

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.conf"

    def _status(self, node: int) -> Path:
        return self.folder / f"node-{node}.status"


def start(*, nodes: int, store: str, **options: Any) -> PulsarProcess | PulsarCluster:
    """Start Pulsar standalone for one node, or a cluster for more."""
    if nodes > 1:
        return PulsarCluster(nodes=nodes, **options)
    return PulsarProcess(store=store, **options)


def _is_zookeeper(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), 5) as connection:
            connection.sendall(b"ruok")
            return connection.recv(4) == b"imok"
    except OSError:
        return False
