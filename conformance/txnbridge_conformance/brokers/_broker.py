"""The interface of every broker that tests start, and the implementation with processes of this machine."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from txnbridge import BrokerUnavailable
from txnbridge.errors import InvalidOption, UsageError
from txnbridge_conformance.brokers import _supervisor

HOST = "127.0.0.1"

# The range is below the ports that Linux, macOS and the BSDs give to outgoing connections, so that no such connection
# takes the port of a broker that is down for a moment.
_LOWEST, _HIGHEST = 20_000, 32_767


class Route(NamedTuple):
    """The two ports by which a proxy reaches a node. `upstream` is a port of the node itself.

    `listen` is the port on which the proxy listens, and to which answers direct the proxy's clients.
    """

    listen: int
    upstream: int


def free_ports(count: int) -> list[int]:
    """Return this many different free ports.

    If another process takes one of the ports before the broker listens on it, the broker does not start.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            if port not in ports and succeeds(probe.bind, (HOST, port)):
                ports.append(port)
    return ports


def is_open(port: int) -> bool:
    """Return whether a process listens on a port."""
    return succeeds(lambda: socket.create_connection((HOST, port), 5).close())


def loopback_interface() -> str:
    """Return the name of the interface of `HOST`: lo or lo0."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


# The interval at which `wait_until` checks its condition.
_POLL_SECONDS = 0.02
# The time for a process to end after SIGKILL: a disk may be busy.
_KILL_SECONDS = 60.0
# The number of last lines of a broker's log file in the error if it did not start. They mostly have the cause.
_LOG_LINES = 3


class ToolMissing(UsageError):
    """Raised if a tool that is needed to start a broker is not installed. The message says what to install."""


class CannotStart(BrokerUnavailable):
    """Raised if a broker did not start, or did not answer in time. The message has the end of the broker's log file."""


class PortTaken(CannotStart):
    """Raised if another process took a port before the broker could listen on it. Start the broker again."""


class Broker(ABC):
    """A real broker for tests. The broker ends with the `with` block, or with the process that started it.

    Nodes have numbers from 1. Each method acts on one node, or on all nodes if `node` is None. A method that starts
    nodes raises `CannotStart` if a node does not answer in time.
    """

    version: str
    nodes: tuple[int, ...]
    routes: tuple[Route, ...]
    """Each node's ports for a proxy: where it listens and where it connects to. See `txnbridge_conformance.faults`."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the URL for `txnbridge.connect`."""

    @property
    def admin_url(self) -> str | None:
        """Return the URL of the broker's HTTP administration; None for a broker without one."""
        return None

    @abstractmethod
    def start(self, node: int | None = None) -> None:
        """Start nodes that do not run, with their data, and wait until each has answered a request."""

    @abstractmethod
    def kill(self, node: int | None = None) -> None:
        """Kill nodes with SIGKILL, and wait until their processes have ended."""

    @abstractmethod
    def stop(self, node: int | None = None) -> None:
        """Shut nodes down cleanly, and wait until their processes have ended. `start` starts them again."""

    @abstractmethod
    def pause(self, node: int | None = None) -> None:
        """Freeze nodes: their connections stay open, and they answer no request until `resume`."""

    @abstractmethod
    def resume(self, node: int | None = None) -> None:
        """Let paused nodes run again."""

    @abstractmethod
    def close(self) -> None:
        """End the broker and remove its data. Safe to repeat."""

    def restart(self, node: int | None = None) -> None:
        """Kill nodes, start them with the same data and ports, and wait until each has answered a request."""
        self.kill(node)
        self.start(node)

    def _chosen(self, node: int | None) -> tuple[int, ...]:
        if node is None:
            return self.nodes
        if node not in self.nodes:
            raise InvalidOption(f"there is no node {node}; nodes are {', '.join(map(str, self.nodes))}")
        return (node,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.version} at {self.url}>"


class ProcessBroker(Broker):
    """A broker whose nodes are processes of this machine, each with its own folder and log file.

    A subclass prepares the nodes' files, names the command that starts a node, and checks that a node answers. After
    `stop_timeout`, `stop` kills a node that has not ended.
    """

    def __init__(self, folder: Path | None, start_timeout: float, stop_timeout: float = 30.0) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="txnbridge-broker-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._start_timeout, self._stop_timeout = start_timeout, stop_timeout
        self._processes = _Processes(self.folder)

    @abstractmethod
    def _prepare(self) -> None:
        """Write the files that the nodes need before their first start."""

    @abstractmethod
    def _command(self, node: int) -> list[str]:
        """Return the command that starts a node."""

    @abstractmethod
    def _answers(self, node: int) -> bool:
        """Return whether a node answers a request now. An `OSError` means that it does not."""

    def log(self, node: int) -> Path:
        """Return the file to which a node writes its log."""
        return log_file(self.folder, node)

    def pid(self, node: int) -> int | None:
        """Return the process id of a node; None if the node does not run."""
        return self._processes.pid(str(node))

    def start(self, node: int | None = None) -> None:
        chosen = self._chosen(node)
        for each in chosen:
            if self.pid(each) is None:
                self._processes.start(str(each), self._command(each), self.log(each))
        for each in chosen:
            self._wait_for(f"node {each}", str(each), self.log(each), partial(self._answers, each))

    def kill(self, node: int | None = None) -> None:
        self._signal(node, signal.SIGKILL)
        self._wait_for_end(node, _KILL_SECONDS)

    def stop(self, node: int | None = None) -> None:
        self.resume(node)  # a frozen process does not handle SIGTERM
        self._signal(node, signal.SIGTERM)
        if not self._wait_for_end(node, self._stop_timeout):
            self.kill(node)

    def pause(self, node: int | None = None) -> None:
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: int | None = None) -> None:
        self._signal(node, signal.SIGCONT)

    def close(self) -> None:
        self._processes.close()

    def detach(self, control: Path) -> None:
        """Let the broker outlive this process, until `stop` is written to the named pipe created at `control`."""
        self._processes.detach(control)

    def _open(self) -> None:
        """Prepare and start all nodes; remove everything if that fails. A subclass's constructor ends with this."""
        try:
            self._prepare()
            self.start()
        except BaseException:
            self.close()
            raise

    def _run(self, name: str, command: list[str]) -> None:
        """Run a command with its output in `<name>.log`, and wait for its end.

        Raise `CannotStart` if it fails, or takes longer than a start of the broker may.
        """
        log = self.folder / f"{name}.log"
        self._processes.start(name, command, log)
        if not wait_until(lambda: self._processes.pid(name) is None, self._start_timeout):
            raise CannotStart(f"{name} took more than {self._start_timeout:g} s; {_end_of(log)}")
        if self._processes.exit_code(name):
            raise CannotStart(f"{name} failed; {_end_of(log)}")

    def _start_server(self, name: str, command: list[str], answers: Callable[[], bool]) -> None:
        """Start a process that is no node, unless it runs, and wait until it answers; raise as `start` does."""
        log = self.folder / f"{name}.log"
        if self._processes.pid(name) is None:
            self._processes.start(name, command, log)
        self._wait_for(f"the {name.replace('-', ' ')}", name, log, answers)

    def _signal(self, node: int | None, number: signal.Signals) -> None:
        for each in self._chosen(node):
            self._processes.signal(str(each), number)

    def _wait_for_end(self, node: int | None, seconds: float) -> bool:
        chosen = self._chosen(node)
        return wait_until(lambda: all(self.pid(each) is None for each in chosen), seconds)

    def _wait_for(self, label: str, name: str, log: Path, answers: Callable[[], bool]) -> None:
        """Wait until a node's process answers. Raise `CannotStart` if the process ends or takes too long."""
        if not wait_until(lambda: holds(answers) or self._processes.pid(name) is None, self._start_timeout):
            raise CannotStart(f"{label} did not answer within {self._start_timeout:g} s; {_end_of(log)}")
        if self._processes.pid(name) is None:
            kind = PortTaken if "already in use" in log.read_text(errors="replace") else CannotStart
            raise kind(f"{label} ended instead of starting; {_end_of(log)}")


def check_known(name: str, value: object, known: Sequence[object]) -> None:
    """Raise `InvalidOption` for a value that is not among `known`."""
    if value not in known:
        raise InvalidOption(f"{name} is {value!r}; known: {', '.join(map(str, known)) or 'none for this version'}")


def log_file(folder: Path, node: int) -> Path:
    """Return the log file of a node in a broker's folder."""
    return folder / f"node-{node}.log"


def holds(condition: Callable[..., bool], *arguments: object) -> bool:
    """Return whether a condition, called with these arguments, is true and raises no `OSError`."""
    with suppress(OSError):
        return condition(*arguments)
    return False


def succeeds(request: Callable[..., object], *arguments: object) -> bool:
    """Return whether a request, called with these arguments, raises no `OSError`."""
    with suppress(OSError):
        request(*arguments)
        return True
    return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true or the time has passed, and return whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _end_of(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]  # without Java's stack traces
    return "its log ends: " + " | ".join(lines[-_LOG_LINES:]) if lines else "it wrote no log"


class _Processes:
    """Starts and signals a broker's processes through a supervisor, which kills them when this process ends."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        with open(folder / "supervisor.log", "ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", _supervisor.__file__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a signal to this process's group does not reach the supervisor
            )

    def start(self, name: str, command: list[str], log: Path) -> None:
        self._pids[name] = self._ask("start", name=name, command=command, log=str(log))

    def pid(self, name: str) -> int | None:
        return self._pids[name] if self.exit_code(name) is None else None

    def exit_code(self, name: str) -> int | str | None:
        code: int | str | None = self._ask("exit_code", name=name)
        return code

    def signal(self, name: str, number: signal.Signals) -> None:
        self._ask("signal", name=name, number=int(number))

    def detach(self, control: Path) -> None:
        self._ask("detach", control=str(control))
        self._supervisor.returncode = 0  # this process does not wait for the supervisor any more
        self._hang_up()

    def close(self) -> None:
        self._hang_up()
        self._supervisor.wait()

    def _hang_up(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, action: str, **request: Any) -> Any:
        pipe, answers = self._supervisor.stdin, self._supervisor.stdout
        assert pipe is not None and answers is not None
        with self._lock:
            if pipe.closed:
                raise BrokerUnavailable("this broker was closed; start another one")
            try:
                os.write(pipe.fileno(), json.dumps({"do": action, **request}).encode() + b"\n")
                line = answers.readline()
            except BrokenPipeError:
                line = b""
        if not line:
            raise BrokerUnavailable("the supervisor of this broker has ended, and the broker with it")
        answer = json.loads(line)
        if "error" in answer:
            raise CannotStart(answer["error"])
        return answer["is"]
