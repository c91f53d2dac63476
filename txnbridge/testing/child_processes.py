"""`Child`: child processes for tests, which can be killed or paused at a named event of txnbridge.

A fork server makes the children: a fresh interpreter that has imported txnbridge and opened nothing. So a child starts
in milliseconds, and inherits only import paths and the environment from its parent.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal, NamedTuple

from txnbridge._base.events import Event
from txnbridge._base.plugins import hookimpl, plugins
from txnbridge.errors import InvalidOption

How = Literal["kill", "pause"]

_SIGNALS: dict[How, signal.Signals] = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP}
# The interval at which SIGCONT is repeated: a process that is just about to stop may miss the first signal.
_RESUME_SECONDS = 0.01

# Modules that a bridge imports at their first use. The fork server imports them, to save 60 ms in each child.
_IMPORTED_LATE = ["txnbridge._decisions", "txnbridge._process.processor", "encodings.idna"]

_parent: _ParentConnection | None = None  # the connection to the parent; only set in a child


class Point(NamedTuple):
    """One event of a process: the `nth` event with this name and phase. As text: "commit/before/1"."""

    event: str
    nth: int

    def __str__(self) -> str:
        return f"{self.event}/{self.nth}"


@dataclass(frozen=True)
class Unvisited:
    """Selects for `StopAt` the first event of a process that is not in `visited`, or with `skip` a later such event."""

    visited: Set[Point]
    skip: int = 0


class StopAt:
    """A plug-in that kills or pauses its own process at one event.

    `where` is "commit/before" for the first event of this name and phase, "commit/before/3" for the third, or an
    `Unvisited`.
    """

    def __init__(self, where: str | Unvisited, how: How = "kill") -> None:
        self._wanted = _parse_point(where) if isinstance(where, str) else None
        self._visited, self._skip = (where.visited, where.skip) if isinstance(where, Unvisited) else (frozenset(), 0)
        self._signal = _SIGNALS[how]
        self._seen: Counter[str] = Counter()
        self._lock = threading.RLock()  # reentrant, because a signal handler may run while it is held

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        with self._lock:  # so that other threads' events wait while this one stops the process
            name = f"{event.name}/{event.phase}"
            self._seen[name] += 1
            point = Point(name, self._seen[name])
            if self._is_here(point):
                self._stop(point)

    def _is_here(self, point: Point) -> bool:
        if self._wanted is not None:
            return point == self._wanted
        if point not in self._visited:
            self._skip -= 1
        return self._skip == -1 and point not in self._visited

    def _stop(self, point: Point) -> None:
        # The signal goes to this thread, because a signal to the process may reach another thread while this one runs.
        signal.pthread_kill(threading.get_ident(), self._signal)


def _parse_point(text: str) -> Point:
    match = re.fullmatch(r"([a-z_.:]+/(?:before|after|failed))(?:/([1-9][0-9]*))?", text)
    if match is None:
        raise InvalidOption(f"an event to stop at is written 'commit/before' or 'commit/before/3', not {text!r}")
    return Point(match[1], int(match[2] or 1))


def tell(value: object) -> None:
    """Send a value from a child process to its parent, where `Child.told` returns it; elsewhere do nothing."""
    if _parent is not None:
        _parent.send("told", value)


class Child:
    """A function running in a process of its own; used as a block, the process is killed at the block's end.

    With `kill=` or `pause=` the process gets SIGKILL or SIGSTOP at this event, named as for `StopAt`. The function must
    be importable, and its arguments must be picklable. The child registers the parent's plug-ins that are modules.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: object,
        kill: str | Unvisited | None = None,
        pause: str | Unvisited | None = None,
    ) -> None:
        if kill is not None and pause is not None:
            raise InvalidOption("a child is killed or paused, not both")
        where = kill if pause is None else pause
        if isinstance(where, str):
            _parse_point(where)
        self._how: How = "kill" if pause is None else "pause"
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._told: deque[Any] = deque()
        self._returned: list[Any] = []  # the function's result, if it came while another message was awaited
        self._line, theirs = multiprocessing.Pipe()
        modules = [_address(plugin) for plugin in plugins.manager.get_plugins() if isinstance(plugin, ModuleType)]
        task = _Task(_reference(function), pickle.dumps(args), where, self._how, dict(os.environ), modules)
        self._process = _fork_server().Process(target=_run, args=(theirs, task), name=self._name, daemon=True)
        with _processes:
            self._process.start()
        theirs.close()
        _running.add(self)

    @property
    def pid(self) -> int:
        """The id of the child process."""
        assert self._process.pid is not None
        return self._process.pid

    def told(self, timeout: float = 60) -> Any:
        """Return the next value that the function gave to `tell`."""
        return self._told.popleft() if self._told else self._receive("told", timeout)

    def stopped(self, timeout: float = 60) -> Point:
        """Wait until the child was killed or paused at its event, and return this event.

        Raise `AssertionError` if the function ended before this event, or if the kill did not end the process.
        """
        point = self._stopped_or_returned(timeout)
        if point is None:
            raise AssertionError(f"{self._name} returned before it {_SAID['stopped']}")
        return point

    def _stopped_or_returned(self, timeout: float) -> Point | None:
        """Wait until the child is killed or paused at its event; return the event, None if its function returned."""
        kind, point = self._receive_one(("stopped", "result"), timeout)
        if not isinstance(point, Point) or kind == "result":
            return None
        if self._how == "kill":
            self._join(timeout)
            if self._exit_code() != -signal.SIGKILL:
                raise AssertionError(f"{self._name} was to be killed at {point}; it ended with {self._exit()}")
        return point

    def resume(self, timeout: float = 60) -> None:
        """Resume this child, which was paused at its event, and wait until it runs again."""
        deadline = time.monotonic() + timeout
        self._signal(signal.SIGCONT)
        while not self._line.poll(_RESUME_SECONDS):
            if time.monotonic() > deadline:
                raise AssertionError(f"{self._name} was to go on and did not within {timeout:g} s")
            self._signal(signal.SIGCONT)
        self._receive("resumed", timeout)

    def pause(self) -> None:
        """Stop this child process by SIGSTOP, at whatever point of its program it is."""
        self._signal(signal.SIGSTOP)

    def unpause(self) -> None:
        """Resume a child that `pause` has stopped."""
        self._signal(signal.SIGCONT)

    def result(self, timeout: float = 60) -> Any:
        """Return the function's result. Raise its exception, or `AssertionError` if it was killed or took too long."""
        return self._returned.pop() if self._returned else self._receive("result", timeout)

    def kill(self) -> None:
        """Kill the child with SIGKILL, and wait for its end."""
        self._signal(signal.SIGKILL)
        self._wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._line.close()

    def __repr__(self) -> str:
        return f"<Child {self._process.pid} running {self._name}>"

    def _signal(self, number: signal.Signals) -> None:
        if self._exit_code() is None:
            with suppress(ProcessLookupError):  # the process may have ended since the check
                os.kill(self.pid, number)

    def _receive(self, wanted: str, timeout: float) -> Any:
        return self._receive_one((wanted,), timeout)[1]

    def _receive_one(self, wanted: tuple[str, ...], timeout: float) -> tuple[str, Any]:
        said = _SAID[wanted[0]]
        deadline = time.monotonic() + timeout
        while self._line.poll(max(0.0, deadline - time.monotonic())):
            try:
                kind, value = self._line.recv()
            except (EOFError, ConnectionResetError):
                self._join(timeout)
                raise AssertionError(f"{self._name} ended with {self._exit()} before it {said}") from None
            if kind == "result":
                self._returned.append(value)
            if kind in wanted:
                return kind, value
            if kind == "told":
                self._told.append(value)
            elif kind == "raised":
                error, text = value
                raise error from _ChildTraceback(text)
            elif kind == "result":
                raise AssertionError(f"{self._name} returned before it {said}")
        raise AssertionError(f"{self._name} has not {said} within {timeout:g} s")

    def _wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the process; return whether it has ended.

        The sentinel of a process that is known to have ended may stay silent: a sibling that was paused just behind its
        fork holds a copy of the pipe open.
        """
        if self._exit_code() is None:
            wait([self._process.sentinel], timeout)
        return self._exit_code() is not None

    def _join(self, timeout: float) -> None:
        if not self._wait(timeout):
            raise AssertionError(f"{self._name} (pid {self.pid}) did not end within {timeout:g} s")

    def _exit_code(self) -> int | None:
        with _processes:
            return self._process.exitcode

    def _exit(self) -> str:
        code = self._exit_code()
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


# `multiprocessing` polls all children when it starts one, and two threads must not poll the same child at once.
_processes = threading.Lock()

_running: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    """Kill all children when this process ends; otherwise it would wait for paused children without end."""
    for child in list(_running):
        child.kill()


_SAID = {"told": "told anything", "stopped": "came to its point", "resumed": "went on", "result": "returned"}


class _ChildTraceback(Exception):
    """The cause of an error that was raised in a child: the traceback as text."""

    def __str__(self) -> str:
        return f"in the child process:\n{self.args[0]}"


def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Children need these modules anyway, among them pytest, whose import takes 100 ms. The list is a copy, because
    # another thread may be importing a module.
    here = [name for name in list(sys.modules) if name.startswith(("txnbridge", "pluggy", "pytest"))]
    context.set_forkserver_preload([*here, *_IMPORTED_LATE])
    return context


def _address(module: ModuleType) -> tuple[str, str]:
    """Return a module's name and file, for a child to import."""
    return module.__name__, getattr(module, "__file__", None) or ""


def _reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return a function's module, file and name. Raise `InvalidOption` if a child process cannot import it."""
    if "<" in function.__qualname__:
        raise InvalidOption(f"{function.__qualname__} cannot be imported by a child process; write it at module level")
    return *_address(sys.modules[function.__module__]), function.__qualname__


# --- in the child --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    function: tuple[str, str, str]
    args: bytes
    where: str | Unvisited | None
    how: How
    environment: dict[str, str]
    plugins: Sequence[tuple[str, str]]


class _ParentConnection:
    """The child's end of the pipe to its parent. Any thread may use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, value: object = None) -> None:
        with self._lock:
            self._connection.send((kind, value))


def _run(connection: Connection, task: _Task) -> None:
    global _parent
    line = _parent = _ParentConnection(connection)
    try:
        line.send("result", _call(task, line))
    except BaseException as error:
        line.send("raised", (_picklable(error), traceback.format_exc()))


def _call(task: _Task, line: _ParentConnection) -> Any:
    os.environ.clear()
    os.environ.update(task.environment)
    function = _load(*task.function)
    for name, file in task.plugins:
        module = _module(name, file)
        if not plugins.manager.is_registered(module):
            plugins.register(module)
    if task.where is not None:
        plugins.register(_Stopping(task.where, task.how, line))
    return function(*pickle.loads(task.args))


class _Stopping(StopAt):
    """A `StopAt` that reports to the parent before the child stops, and when it has resumed after a pause."""

    def __init__(self, where: str | Unvisited, how: How, line: _ParentConnection) -> None:
        super().__init__(where, how)
        self._line = line

    def _stop(self, point: Point) -> None:
        self._line.send("stopped", point)
        super()._stop(point)
        self._line.send("resumed")


def _load(name: str, file: str, qualname: str) -> Callable[..., Any]:
    found: Any = _module(name, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _module(name: str, file: str) -> ModuleType:
    """Import a module by its name, or from its file if its name cannot be imported, as of a test module."""
    try:
        module = importlib.import_module(name)
        if not file or os.path.realpath(getattr(module, "__file__", None) or "") == os.path.realpath(file):
            return module
    except ImportError:
        pass
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be imported in a child process")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
