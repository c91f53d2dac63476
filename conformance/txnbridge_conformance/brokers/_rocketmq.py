"""Apache RocketMQ for tests: a name server, and brokers, each with its gRPC proxy in the same process."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from txnbridge_rocketmq.client import administration, routes
from txnbridge_rocketmq.client.client import RemotingClient
from txnbridge_rocketmq.client.errors import ErrorResponse, RemotingError
from txnbridge_rocketmq.client.protocol.frames import RpcRequest

from txnbridge_conformance.brokers._broker import (
    HOST,
    CannotStart,
    ProcessBroker,
    Route,
    check_known,
    free_ports,
    is_open,
    succeeds,
    wait_until,
)
from txnbridge_conformance.brokers._jars import Artifact, fetch, java, properties

T = TypeVar("T")

# The versions that the project tests with; the first is the default.
VERSIONS = ("5.5.0",)
# The numbers of brokers in a cluster. Each has its own messages; they do not replicate each other.
NODES = (1, 2)

_GROUP = "org.apache.rocketmq"
_ANSWER_SECONDS = 5.0
_NAME_SERVER = "name-server"
_JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Djava.net.preferIPv4Stack=true")
# The name server uses 140 MB of memory, a broker 500 to 900 MB, of which 64 MB are buffers from the start.
_NAME_SERVER_OPTIONS = ("-Xms32m", "-Xmx128m")
_BROKER_OPTIONS = ("-Xms256m", "-Xmx768m", "-XX:MaxDirectMemorySize=768m")
# RocketMQ has its own copy of logback. Only warnings are logged, because a line for each message would fill the disk.
# The transactions' logger logs only errors, because it warns at each check-back.
_LOGBACK = "org.apache.rocketmq.logging.ch.qos.logback"
_LOGGING = f"""<configuration>
  <statusListener class="{_LOGBACK}.core.status.NopStatusListener"/>
  <appender name="out" class="{_LOGBACK}.core.ConsoleAppender">
    <encoder><pattern>%d %p %c{{0}} %m%n</pattern></encoder>
  </appender>
  <logger name="RocketmqTransaction" level="ERROR"/>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""

# Reasons that are not obvious:
# - check-backs come after two seconds and then each second, so that their tests are short;
# - an op message is written 0.1 s after an end instead of every three seconds: a half whose op message is missing at
#   a check is checked back although it has ended, and an answer publishes it again;
# - halves without an answer to their check-backs are kept practically for ever;
# - files are small, because they are created when the broker starts;
# - a slow disk makes a broker refuse messages by default, which is not tested;
# - a missing topic is an error, as it should be where transactions matter;
# - after a kill all stored messages are found by their keys, not only those in the last files of the commit log.
_SETTINGS = {
    "brokerId": "0",
    "brokerIP1": HOST,
    "brokerIP2": HOST,
    "bindAddress": HOST,
    "autoCreateTopicEnable": "false",
    "flushDiskType": "ASYNC_FLUSH",
    "fileReservedTime": "72",
    "mappedFileSizeCommitLog": "67108864",
    "mappedFileSizeTimerLog": "16777216",
    "maxHashSlotNum": "50000",
    "maxIndexNum": "200000",
    "messageIndexSafe": "true",
    "osPageCacheBusyTimeOutMills": "10000",
    "waitTimeMillsInSendQueue": "10000",
    "transactionOpBatchInterval": "100",
    "transactionTimeOut": "2000",
    "transactionCheckInterval": "1000",
    "transactionCheckMax": "1000",
    # Its thread uses a whole CPU from the start until the first interval has passed (5.5.0); the default is 10 s.
    "transactionMetricFlushInterval": "500",
}
# The time in which the name server must know a new topic; normally it takes milliseconds.
_TOPIC_SECONDS = 30.0


def fetch_rocketmq(version: str = VERSIONS[0], bar: bool = True) -> Path:
    """Return the folder of RocketMQ's jars; the first call fetches 100 MB. Raise `ToolMissing` or `CannotStart`."""
    wanted = [Artifact(_GROUP, f"rocketmq-{part}", version) for part in ("namesrv", "proxy")]
    return fetch(f"rocketmq-{version}", wanted, bar)


class RocketMQ(ProcessBroker):
    """A RocketMQ cluster whose nodes are its brokers. The name server is no node, and has methods of its own.

    A node has started when the name server lists it, and both the broker and its gRPC proxy answer. `brokers.rocketmq`
    describes the options.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        version: str = VERSIONS[0],
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        system_properties: Mapping[str, str] | None = None,
        folder: Path | None = None,
        start_timeout: float = 120,
    ) -> None:
        self._java = java()
        self._jars = fetch_rocketmq(version)
        self.version = version
        self.nodes = tuple(range(1, nodes + 1))
        self._settings = settings or {}
        self._system_properties = system_properties or {}
        self._cluster = f"cluster-{uuid.uuid4().hex}"  # shows later that the broker that answers is this one
        free, proxied, *ports = free_ports(2 + 5 * nodes)
        rest = iter(ports)
        self._name_server = port or free
        self._brokers = {node: next(rest) for node in self.nodes}
        self._grpc = {node: next(rest) for node in self.nodes}
        self._replication = {node: next(rest) for node in self.nodes}
        self._proxy_remoting = {node: next(rest) for node in self.nodes}
        # The name server comes first; in its answers a proxy replaces the brokers' addresses by its own.
        self.routes = (Route(proxied, self._name_server), *(Route(next(rest), self._brokers[n]) for n in self.nodes))
        super().__init__(folder, start_timeout)
        self._open()

    @property
    def url(self) -> str:
        return f"rocketmq://{HOST}:{self._name_server}"

    def broker_address(self, node: int = 1) -> str:
        """Return a node's address of the remoting protocol, as "host:port"."""
        return f"{HOST}:{self._brokers[node]}"

    def grpc_address(self, node: int = 1) -> str:
        """Return the address of a node's gRPC proxy, as "host:port"."""
        return f"{HOST}:{self._grpc[node]}"

    def start(self, node: int | None = None) -> None:
        self.start_name_server()  # first: a broker without a name server tries again only after ten seconds
        super().start(node)

    def start_name_server(self) -> None:
        """Start the name server if it does not run. Brokers register with it within half a minute."""
        answers = partial(succeeds, ask, self._name_server, routes.masters())
        main = f"{_GROUP}.namesrv.NamesrvStartup"
        command = self._main(_NAME_SERVER, _NAME_SERVER_OPTIONS, main, "-c", str(self._file(_NAME_SERVER)))
        self._start_server(_NAME_SERVER, command, answers)

    def kill_name_server(self) -> None:
        """Kill the name server with SIGKILL, and wait until its process has ended."""
        self._processes.signal(_NAME_SERVER, signal.SIGKILL)
        wait_until(lambda: self._processes.pid(_NAME_SERVER) is None, self._start_timeout)

    def create_topic(self, topic: str, queues: int = 4, kind: str = "NORMAL") -> None:
        """Create a topic on every node, and wait until the name server lists it. Raise `CannotStart` if it does not.

        `kind` matters only to gRPC clients: NORMAL, FIFO, DELAY or TRANSACTION.
        """
        for node in self.nodes:
            ask(self._brokers[node], administration.create_topic(topic, queues, kind))
        # A gRPC proxy that asks the name server too early caches for 20 s that the topic is missing.
        if not wait_until(lambda: brokers_with(self._name_server, topic) == len(self.nodes), _TOPIC_SECONDS):
            raise CannotStart(f"the name server did not list topic {topic} within {_TOPIC_SECONDS:g} s")

    def create_group(self, group: str, orderly: bool = False) -> None:
        """Create a consumer group on every node. gRPC clients can read only in a group that exists."""
        for node in self.nodes:
            ask(self._brokers[node], administration.create_group(group, orderly))

    def _prepare(self) -> None:
        (self.folder / "logback.xml").write_text(_LOGGING)
        name_server = {"listenPort": str(self._name_server), "bindAddress": HOST}
        self._file(_NAME_SERVER).write_text(properties(name_server))
        for node in self.nodes:
            self._file(f"node-{node}").write_text(properties({**self._node_settings(node), **self._settings}))
            (self.folder / f"node-{node}.json").write_text(json.dumps(self._proxy_settings(node)))

    def _command(self, node: int) -> list[str]:
        name = f"node-{node}"
        return self._main(
            name,
            _BROKER_OPTIONS,
            f"{_GROUP}.proxy.ProxyStartup",
            *("-pm", "local", "-n", f"{HOST}:{self._name_server}"),
            *("-bc", str(self._file(name)), "-pc", str(self.folder / f"{name}.json")),
        )

    def _answers(self, node: int) -> bool:
        # The gRPC proxy opens last. No request is sent before, because it would slow the start down.
        if not (is_open(self._grpc[node]) and is_serving(self._brokers[node])):
            return False
        # Another name server may have taken the port.
        return ask(self._name_server, routes.masters()).get(_name(node)) == self.broker_address(node)

    def _main(self, name: str, options: tuple[str, ...], main: str, *arguments: str) -> list[str]:
        own = {
            "user.home": str(self.folder / name),  # the folder of files for which RocketMQ has no setting
            "rocketmq.home.dir": str(self.folder),
            "rmq.logback.configurationFile": str(self.folder / "logback.xml"),
            "tls.server.mode": "disabled",  # else each start makes three certificates, in half of its CPU time
            **self._system_properties,
        }
        defined = [f"-D{key}={value}" for key, value in own.items()]
        return [self._java, *_JAVA_OPTIONS, *options, *defined, "-cp", f"{self._jars}/*", main, *arguments]

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.conf"

    def _node_settings(self, node: int) -> dict[str, str]:
        store = self.folder / f"node-{node}" / "store"
        return {
            **_SETTINGS,
            "brokerClusterName": self._cluster,
            "brokerName": _name(node),
            "listenPort": str(self._brokers[node]),
            "haListenPort": str(self._replication[node]),
            "namesrvAddr": f"{HOST}:{self._name_server}",
            "storePathRootDir": str(store),
            "storePathCommitLog": str(store / "commitlog"),
        }

    def _proxy_settings(self, node: int) -> dict[str, object]:
        return {
            "rocketMQClusterName": self._cluster,
            "proxyMode": "local",
            "grpcServerPort": self._grpc[node],
            "remotingListenPort": self._proxy_remoting[node],
            "namesrvAddr": f"{HOST}:{self._name_server}",
            "localServeAddr": HOST,
            # The time in which a gRPC client's half can be ended; the default is half a minute.
            "transactionDataExpireMillis": 3_600_000,
        }


def check(nodes: int, version: str) -> None:
    """Raise `InvalidOption` for options that this package does not start together."""
    check_known("nodes", nodes, NODES)
    check_known("version", version, VERSIONS)


def answering(url: str) -> int:
    """Return how many brokers of the cluster at a URL answer a request."""
    try:
        known = ask(int(url.rpartition(":")[2]), routes.masters())
    except OSError:
        return 0
    return sum(is_serving(int(address.rpartition(":")[2])) for address in known.values())


def ask(port: int, request: RpcRequest[T]) -> T:
    """Send a request to the name server or broker at a port. Raise `OSError` if it is refused or not answered."""
    address = f"{HOST}:{port}"
    try:
        with RemotingClient([address]) as client:
            return client.call_address(address, request, _ANSWER_SECONDS)
    except RemotingError as error:
        raise OSError(f"port {port}: {error}") from error


def is_serving(port: int) -> bool:
    """Return whether a broker answers a request. An error counts too, because the broker may ask for credentials."""
    try:
        ask(port, administration.broker_settings())
    except OSError as error:
        return isinstance(error.__cause__, ErrorResponse)
    return True


def brokers_with(name_server_port: int, topic: str) -> int:
    """Return how many brokers have a topic, as the name server at this port says. Raise `OSError` without an answer."""
    route = ask(name_server_port, routes.route(topic))
    return len(route.masters) if route is not None else 0


def _name(node: int) -> str:
    return f"broker-{node}"
