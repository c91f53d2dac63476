"""Runs Kafka or Pulsar with one node in a container, by testcontainers, with the default features of its version."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from txnbridge.errors import BackendMissing
from txnbridge_conformance.brokers import _kafka, _pulsar
from txnbridge_conformance.brokers._broker import HOST, Broker, CannotStart, Route, free_ports, holds, wait_until

ANYWHERE = "0.0.0.0"  # all interfaces of the container

_STOP_SECONDS = 30
_DEFAULT_ENGINE = "unix:///var/run/docker.sock"
# A container engine that does not answer within this time counts as absent: engines run on this machine or nearby.
_ENGINE_SECONDS = 5


def engine_answers() -> bool:
    """Return whether testcontainers is installed and a container engine answers."""
    try:
        import docker
        import testcontainers  # noqa: F401
    except ImportError:
        return False
    if not _accepts_connections(os.environ.get("DOCKER_HOST", _DEFAULT_ENGINE)):
        return False
    try:
        with contextlib.closing(docker.from_env(timeout=_ENGINE_SECONDS)) as engine:
            return bool(engine.ping())
    except docker.errors.DockerException:
        return False


def _accepts_connections(engine: str) -> bool:
    """Return whether the engine's Unix socket accepts connections.

    Check this before the engine's client connects, because that client leaks sockets that cannot connect.
    """
    scheme, _, path = engine.partition("://")
    if scheme != "unix":
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


class ContainerBroker(Broker):
    """A broker in a container. Ports are the same inside and outside, because the broker returns them to clients."""

    nodes = (1,)

    def __init__(
        self,
        image: str,
        environment: Mapping[str, str],
        *,
        ports: Sequence[int],
        start_timeout: float,
        command: str | None = None,
    ) -> None:
        """Start the container, or remove it if that fails. Call this last in a subclass's constructor."""
        try:
            from testcontainers.core.container import DockerContainer
        except ImportError:
            raise BackendMissing(
                "testcontainers is not installed: in a clone of txnbridge, pip install -e '.[brokers]'"
            ) from None
        self._start_timeout = start_timeout
        container = DockerContainer(image)
        for name, value in environment.items():
            container.with_env(name, value)
        if command is not None:
            container.with_command(command)
        # The types allow only a number, but the engine's client takes an address too. Ports are open on loopback only.
        opened: dict[str, Any] = container.ports
        opened.update({f"{each}/tcp": (HOST, each) for each in ports})
        self._container = container
        try:
            container.start()
            self.start()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether the broker answers a request now. An `OSError` means that it does not."""

    def start(self, node: int | None = None) -> None:
        self._chosen(node)
        if self._state() != "running":
            self._inside().start()
        if not wait_until(partial(holds, self._answers), self._start_timeout):
            raise CannotStart(f"the container did not answer within {self._start_timeout:g} s")

    def kill(self, node: int | None = None) -> None:
        self._chosen(node)
        if self._state() in ("running", "paused"):
            self._inside().kill()
            self._inside().wait()

    def stop(self, node: int | None = None) -> None:
        self.resume(node)
        self._inside().stop(timeout=_STOP_SECONDS)

    def pause(self, node: int | None = None) -> None:
        self._chosen(node)
        if self._state() == "running":
            self._inside().pause()

    def resume(self, node: int | None = None) -> None:
        self._chosen(node)
        if self._state() == "paused":
            self._inside().unpause()

    def close(self) -> None:
        self._container.stop()

    def _inside(self) -> Any:
        return self._container.get_wrapped_container()

    def _state(self) -> str:
        container = self._inside()
        container.reload()
        return str(container.status)


class KafkaContainer(ContainerBroker):
    def __init__(
        self, *, version: str, port: int | None, settings: Mapping[str, str] | None, start_timeout: float
    ) -> None:
        self.version = version
        free, listen, upstream, controller = free_ports(4)
        self._port = port or free
        self.routes = (Route(listen, upstream),)
        self._cluster = _kafka.new_id()
        given = {**_kafka.common_settings(version, 1), **self._addresses(controller), **(settings or {})}
        environment = {"KAFKA_" + name.upper().replace(".", "_"): value for name, value in given.items()}
        super().__init__(
            f"apache/kafka:{version}",
            {"CLUSTER_ID": self._cluster, **environment},
            ports=(self._port, upstream),
            start_timeout=start_timeout,
        )

    def _addresses(self, controller: int) -> dict[str, str]:
        ((listen, upstream),) = self.routes
        return {
            "node.id": "1",
            "controller.quorum.voters": f"1@localhost:{controller}",
            "listeners": f"PLAINTEXT://{ANYWHERE}:{self._port},PROXY://{ANYWHERE}:{upstream},"
            f"CONTROLLER://localhost:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self._port},PROXY://{HOST}:{listen}",
        }

    @property
    def url(self) -> str:
        return f"kafka://{HOST}:{self._port}"

    def _answers(self) -> bool:
        return _kafka.cluster(self._port)[0] == self._cluster


# The image's own script writes settings from the environment into the configuration.
_PULSAR_COMMAND = (
    "sh -c 'bin/apply-config-from-env.py conf/standalone.conf &&"
    " exec bin/pulsar standalone --no-functions-worker --no-stream-storage'"
)


class PulsarContainer(_pulsar.Pulsar, ContainerBroker):
    def __init__(
        self,
        *,
        version: str,
        store: str,
        delete_unused: bool,
        port: int | None,
        settings: Mapping[str, str] | None,
        start_timeout: float,
    ) -> None:
        self.version = version
        free, web, listen, upstream = free_ports(4)
        self._ports, self._webs = {1: port or free}, {1: web}
        self.routes = (Route(listen, upstream),)
        own = _pulsar.addresses(ANYWHERE, self._ports[1], web, self.routes[0])
        given = {**_pulsar.common_settings(store, delete_unused), **own, **(settings or {})}
        super().__init__(
            f"apachepulsar/pulsar:{version}",
            {
                "PULSAR_STANDALONE_USE_ZOOKEEPER": "1" if store == "zookeeper" else "0",
                **{f"PULSAR_PREFIX_{name}": value for name, value in given.items()},
            },
            ports=(self._ports[1], upstream, web),
            start_timeout=start_timeout,
            command=_PULSAR_COMMAND,
        )

    def _answers(self) -> bool:
        return _pulsar.is_ready(self._ports[1], self._webs[1])
