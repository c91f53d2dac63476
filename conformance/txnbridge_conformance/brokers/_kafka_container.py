"""Apache Kafka in a container, by testcontainers: one node, as its version comes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

from txnbridge.errors import BackendMissing
from txnbridge_conformance.brokers._broker import Broker, CannotStart, wait_until
from txnbridge_conformance.brokers._kafka import common_settings, new_id
from txnbridge_conformance.brokers._kafka_wire import cluster
from txnbridge_conformance.brokers._ports import HOST, Route, free_ports

_IMAGE = "apache/kafka"
_STOP_SECONDS = 30
_DEFAULT_ENGINE = "unix:///var/run/docker.sock"
# The engine is on this machine or near: if it has not answered by then, it is as good as absent.
_ENGINE_SECONDS = 5


def engine_answers() -> bool:
    """Whether testcontainers is installed and there is a container engine that answers."""
    try:
        import docker
        import testcontainers  # noqa: F401
    except ImportError:
        return False
    if not _is_there(os.environ.get("DOCKER_HOST", _DEFAULT_ENGINE)):
        return False
    try:
        with contextlib.closing(docker.from_env(timeout=_ENGINE_SECONDS)) as engine:
            return bool(engine.ping())
    except docker.errors.DockerException:
        return False


def _is_there(engine: str) -> bool:
    """Whether the engine's socket takes a connection. Its own client would leave one open that fails."""
    scheme, _, path = engine.partition("://")
    if scheme != "unix":
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


class KafkaContainer(Broker):
    """Kafka in a container. Ports inside are those outside, since the broker tells them to clients."""

    nodes = (1,)

    def __init__(
        self, *, version: str, port: int | None, settings: Mapping[str, str] | None, start_timeout: float
    ) -> None:
        try:
            from testcontainers.core.container import DockerContainer
        except ImportError:
            raise BackendMissing("testcontainers is not installed; pip install 'txnbridge[brokers]'") from None
        self.version = version
        self._start_timeout = start_timeout
        free, listen, upstream, controller = free_ports(4)
        self._port = port or free
        self.routes = (Route(listen, upstream),)
        self._cluster = new_id()
        given = {**common_settings(version, 1), **self._addresses(controller), **(settings or {})}
        container = DockerContainer(f"{_IMAGE}:{version}").with_env("CLUSTER_ID", self._cluster)
        for name, value in given.items():
            container.with_env("KAFKA_" + name.upper().replace(".", "_"), value)
        # Typed for a number alone; the engine's client takes an address too, and we listen on loopback only.
        ports: dict[str, Any] = container.ports
        ports.update({f"{each}/tcp": (HOST, each) for each in (self._port, upstream)})
        self._container = container
        try:
            container.start()
            self.start()
        except BaseException:
            self.close()
            raise

    def _addresses(self, controller: int) -> dict[str, str]:
        ((listen, upstream),) = self.routes
        anywhere = "0.0.0.0"  # of the container
        return {
            "node.id": "1",
            "controller.quorum.voters": f"1@localhost:{controller}",
            "listeners": f"PLAINTEXT://{anywhere}:{self._port},PROXY://{anywhere}:{upstream},"
            f"CONTROLLER://localhost:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self._port},PROXY://{HOST}:{listen}",
        }

    @property
    def url(self) -> str:
        return f"kafka://{HOST}:{self._port}"

    def start(self, node: int | None = None) -> None:
        self._chosen(node)
        if self._state() != "running":
            self._inside().start()
        if not wait_until(self._answers, self._start_timeout):
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

    def _answers(self) -> bool:
        try:
            return cluster(self._port)[0] == self._cluster
        except OSError:
            return False
