"""Brokers that a shell started and that live on until they are told to end.

Each has a folder. In it is a named pipe, which the process that holds the broker reads as long as it lives: so a broker
runs if and only if its pipe has a reader, and no process id is remembered that may be another's by now.
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
# Killing processes and removing files, on a busy disk.
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Detached:
    """A broker that runs by itself."""

    broker: str
    url: str
    version: str
    nodes: int
    asked: dict[str, Any]
    """What was asked for when it was started."""
    admin_url: str | None = None

    def log(self, node: int) -> Path:
        """The log of a node."""
        return log_file(_folder(self.broker), node)


def up(name: str, asked: dict[str, Any], start: Callable[[Path], ProcessBroker]) -> tuple[Detached, bool]:
    """Start a broker unless it runs, and say whether it was started. Raises `UsageError` if it runs otherwise."""
    with _locked(name):
        running = find(name)
        if running is None:
            return _start(name, asked, start), True
        if running.asked != asked:
            told = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in running.asked.items() if v is not None)
            raise UsageError(f"{name} runs with {told}; end it first with `txnbridge brokers down {name}`")
        return running, False


def _start(name: str, asked: dict[str, Any], start: Callable[[Path], ProcessBroker]) -> Detached:
    folder = _folder(name)
    shutil.rmtree(folder, ignore_errors=True)  # of one that did not end by itself: the machine did
    folder.mkdir(mode=0o700)
    broker = start(folder)
    try:
        detached = Detached(name, broker.url, broker.version, len(broker.nodes), asked, broker.admin_url)
        (folder / _STATE).write_text(json.dumps(asdict(detached)))
        broker.detach(folder / _CONTROL)
    except BaseException:
        broker.close()
        raise
    return detached


def find(name: str) -> Detached | None:
    """The broker of this name if it runs."""
    with _control(name) as control:
        if control is None:
            return None
        try:
            return Detached(**json.loads((_folder(name) / _STATE).read_text()))
        except FileNotFoundError:
            return None  # it is about to end


def down(name: str) -> bool:
    """End a broker and remove its data; False if it did not run."""
    with _locked(name):
        with _control(name) as control:
            if control is not None:
                os.write(control, b'{"do": "stop"}\n')
        # Its folder is the last to go.
        if control is not None and not wait_until(lambda: not _folder(name).exists(), _END_SECONDS):
            raise CannotStart(f"{name} did not end within {_END_SECONDS:g} s")
        shutil.rmtree(_folder(name), ignore_errors=True)
        return control is not None


def _folder(name: str) -> Path:
    # The base directory specification says to ignore a relative one.
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
    """The writing end of the pipe, None if nobody reads it."""
    control = None
    try:
        with suppress(FileNotFoundError):
            control = os.open(_folder(name) / _CONTROL, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # no reader
            raise
    try:
        yield control if control is not None and stat.S_ISFIFO(os.fstat(control).st_mode) else None
    finally:
        if control is not None:
            os.close(control)
