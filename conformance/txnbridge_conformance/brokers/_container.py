"""What every broker in a container can do, by testcontainers: one node, as its version comes."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from txnbridge.errors import BackendMissing
from txnbridge_conformance.brokers._broker import Broker, CannotStart, wait_until
from txnbridge_conformance.brokers._ports import HOST

ANYWHERE = "0.0.0.0"  # of the container

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


class ContainerBroker(Broker):
    """A broker in a container. Ports inside are those outside, since the broker tells them to clients."""

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
        """Start it; nothing is left if that fails. Called last in the constructor."""
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
        # Typed for a number alone; the engine's client takes an address too, and we listen on loopback only.
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
        """Whether it answers a request now."""

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
