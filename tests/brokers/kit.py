"""A broker that is a few lines of Python, and requests to Kafka by hand."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._broker import HOST, free_ports, holds, wait_until
from txnbridge_conformance.brokers._kafka import ask, metadata
from txnbridge_kafka.client import wire

# Linux lists listening sockets here.
LISTENERS = Path("/proc/self/net/tcp")

# Answers every connection, and has a child process.
TOY = """
import socket, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        server.accept()[0].sendall(b"!")
"""


def answers(broker: brokers.ProcessBroker, node: int = 1) -> bool:
    return holds(broker._answers, node)


def name_server_pid(broker: brokers.RocketMQ) -> Any:
    return broker._processes.pid("name-server")


class Toy(brokers.ProcessBroker):
    """A broker that starts in milliseconds and does what all brokers do."""

    version = "1"
    nodes = (1, 2)
    routes = ()

    def __init__(
        self, program: str = TOY, folder: Path | None = None, start_timeout: float = 30, stop_timeout: float = 30
    ) -> None:
        self._program = program
        self.ports = dict(zip(self.nodes, free_ports(2), strict=True))
        super().__init__(folder, start_timeout, stop_timeout)
        self._open()

    @property
    def url(self) -> str:
        return "toy://" + ",".join(f"{HOST}:{port}" for port in self.ports.values())

    def _prepare(self) -> None:
        pass

    def _command(self, node: int) -> list[str]:
        return [sys.executable, "-c", self._program, str(self.ports[node])]

    def _answers(self, node: int) -> bool:
        with socket.create_connection((HOST, self.ports[node]), 5) as connection:
            return connection.recv(1) == b"!"

    def every_pid(self) -> list[int]:
        """Return the ids of the nodes' processes and of their children."""
        children = [int(self.log(node).read_text().split()[1]) for node in self.nodes]
        return [*(pid for node in self.nodes if (pid := self.pid(node))), *children]


def state(pid: int) -> str:
    """Return a process's state from ps: S sleeps, T is stopped; empty for a dead process."""
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return "" if told.startswith("Z") else told


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the IPv4 addresses on which a process listens."""
    open_files = {file.readlink().name for file in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        local, how, inode = columns[1], columns[3], columns[9]
        if how == "0A" and f"socket:[{inode}]" in open_files:  # it listens
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


@contextmanager
def answering(*texts: bytes) -> Iterator[int]:
    """A server that answers each of so many connections with one of these texts; yield its port."""
    with socket.create_server((HOST, 0)) as server:

        def answer() -> None:
            for text in texts:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(text)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def port_attempts(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, failures: int) -> list[int | None]:
    """Let so many starts of a broker fail because somebody took a port; return the ports that starts are asked for."""
    attempts: list[int | None] = []

    def start(**options: Any) -> str:
        attempts.append(options["port"])
        if len(attempts) <= failures:
            raise brokers.PortTaken("taken")
        return "started"

    monkeypatch.setattr(owner, name, start)
    return attempts


def port_of(broker: brokers.Broker, node: int = 1) -> int:
    return int(broker.url.removeprefix("kafka://").split(",")[node - 1].split(":")[1])


def create_topic(port: int, name: str, replicas: int = 1) -> int:
    """Create a topic with one partition, and return Kafka's error code."""
    topic = {"name": name, "num_partitions": 1, "replication_factor": replicas, "assignments": [], "configs": []}
    request = wire.CREATE_TOPICS(topics=[topic], timeout_ms=10_000, validate_only=False)
    (answer,) = ask(port, request, 15).topics
    code: int = answer.error_code
    return code


def topics(port: int) -> list[str]:
    """Return the names of all topics."""
    return [each.name for each in ask(port, metadata(None)).topics]


def topic_appears(port: int, name: str) -> bool:
    """Wait for a topic, which a broker knows a moment after the controller, and return whether it appears."""
    return wait_until(lambda: name in topics(port), 30)
