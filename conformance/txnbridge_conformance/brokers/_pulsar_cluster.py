"""A cluster of Apache Pulsar for tests: brokers, one bookie and one ZooKeeper, each in its own Java process."""

from __future__ import annotations

import socket
from typing import Any

from txnbridge_conformance.brokers._broker import HOST, is_open, loopback_interface
from txnbridge_conformance.brokers._jars import properties
from txnbridge_conformance.brokers._pulsar import GROUP, PulsarProcess, load_coordinator, rest

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


class PulsarCluster(PulsarProcess):
    """A Pulsar cluster whose nodes are its brokers. ZooKeeper and the bookie run until `close`.

    A node has started when all running brokers list it, and each transaction coordinator is loaded by one of them.
    `brokers.pulsar` describes the options.
    """

    own_settings = _SETTINGS
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
            "--cluster": _NAME,
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
        known = rest(self._webs[node], f"/admin/v2/brokers/{_NAME}")
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
