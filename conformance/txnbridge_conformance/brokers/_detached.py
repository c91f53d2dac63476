"""Brokers that `txnbridge brokers` starts, and that run until the same command ends them.

Each broker has a folder with a named pipe, which its supervisor reads as long as the supervisor lives. A broker runs if
and only if its pipe has a reader. No process id is stored, because another process may have it later.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from txnbridge.errors import UsageError
from txnbridge_conformance.brokers._broker import CannotStart, ProcessBroker, log_file, wait_until

_CONTROL = "control"
_STATE = "state.json"
# The time in which a broker must end: its processes are killed and its files removed, on a busy disk.
_END_SECONDS = 60.0


@dataclass(frozen=True)
class DetachedBroker:
    """A broker that was started from a shell and runs until `down`: its URL, version, nodes and options."""

    broker: str
    url: str
    version: str
    nodes: int
    asked: dict[str, Any]
    """The options with which the broker was started."""
    admin_url: str | None = None

    def log(self, node: int) -> Path:
        """Return the file to which a node writes its log."""
        return log_file(_folder(self.broker), node)


def up(name: str, asked: dict[str, Any], start: Callable[[Path], ProcessBroker]) -> tuple[DetachedBroker, bool]:
    """Start a broker unless the broker of this name runs. Return the broker, and whether this call started it.

    `start` makes and starts the broker, with its files in the folder that it is given.
    Raise `UsageError` if the broker runs with other options than `asked`.
    """
    with _locked(name):
        running = find(name)
        if running is None:
            return _start(name, asked, start), True
        if running.asked != asked:
            options = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in running.asked.items() if v is not None)
            raise UsageError(f"{name} runs with {options}; end it first with `txnbridge brokers down {name}`")
        return running, False


def _start(name: str, asked: dict[str, Any], start: Callable[[Path], ProcessBroker]) -> DetachedBroker:
    folder = _folder(name)
    shutil.rmtree(folder, ignore_errors=True)  # left by a broker that ended with the machine
    folder.mkdir(mode=0o700)
    broker = start(folder)
    try:
        detached = DetachedBroker(name, broker.url, broker.version, len(broker.nodes), asked, broker.admin_url)
        (folder / _STATE).write_text(json.dumps(asdict(detached)))
        broker.detach(folder / _CONTROL)
    except BaseException:
        broker.close()
        raise
    return detached


def find(name: str) -> DetachedBroker | None:
    """Return the broker of this name; None if no such broker runs."""
    with _control(name) as control:
        if control is None:
            return None
        try:
            return DetachedBroker(**json.loads((_folder(name) / _STATE).read_text()))
        except FileNotFoundError:
            return None  # the broker is about to end


def down(name: str) -> bool:
    """End a broker and remove its data. Return whether it was running."""
    with _locked(name):
        with _control(name) as control:
            if control is not None:
                os.write(control, b'{"do": "stop"}\n')
        # The supervisor removes the folder last.
        if control is not None and not wait_until(lambda: not _folder(name).exists(), _END_SECONDS):
            raise CannotStart(f"{name} did not end within {_END_SECONDS:g} s")
        shutil.rmtree(_folder(name), ignore_errors=True)
        return control is not None


def _folder(name: str) -> Path:
    # The base directory specification says that a relative path is ignored.
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "txnbridge" / "brokers" / name


@contextmanager
def _locked(name: str) -> Iterator[None]:
    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _control(name: str) -> Iterator[int | None]:
    """Yield the writing end of a broker's named pipe, or None if the pipe has no reader."""
    control = None
    try:
        with suppress(FileNotFoundError):
            control = os.open(_folder(name) / _CONTROL, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: the pipe has no reader
            raise
    try:
        yield control if control is not None and stat.S_ISFIFO(os.fstat(control).st_mode) else None
    finally:
        if control is not None:
            os.close(control)
