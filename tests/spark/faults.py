"""A plug-in for the processes that Spark starts: it notes what they do, and kills or holds them where a test says so.

`installed` makes it known to every process with the environment that it returns; the test writes its `Fault`s into the
folder given there, whenever it wants, and reads the notes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from txnbridge import Event, hookimpl

_FOLDER, _DRIVER = "TXNBRIDGE_TEST_FAULTS", "TXNBRIDGE_TEST_DRIVER"
ROOT = Path(__file__).parents[2]
# What a held process looks for its release by.
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Fault:
    """Do `then` once, to the first process that comes to the `nth` event of this name.

    An event is named as for `StopAt`; with `:kind` one of `decision.append`. It is counted only in a task or only on
    the driver, and not before the file `once` exists. With `behind`, the process first waits for that event in another
    of its threads. Each attempt of a task that comes to `meet` waits there for one more.
    """

    name: str
    at: str
    then: str  # "kill", "kill driver", "kill executor", "hold", "meet"
    in_task: bool = False
    nth: int = 1
    once: str | None = None
    behind: str | None = None
    partition: int | None = None


def installed(folder: Path) -> dict[str, str]:
    """The environment in which processes have this plug-in, and this checkout's tests."""
    found = folder / "txnbridge_test_faults-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: txnbridge-test-faults\nVersion: 0\n")
    (found / "entry_points.txt").write_text(f"[txnbridge]\ntest-faults = {__name__}:plugin\n")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, _FOLDER: str(folder)}


def order(folder: Path, *faults: Fault) -> None:
    """Replace the faults by these."""
    new = folder / "faults.new"
    new.write_text(json.dumps([asdict(fault) for fault in faults]))
    new.rename(folder / "faults.json")


def happened(folder: Path, name: str) -> bool:
    return (folder / f"{name}.happened").exists()


def release(folder: Path, name: str) -> None:
    """Let the process go on that this fault holds."""
    (folder / f"{name}.go").touch()


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return the processes' notes: each transaction prepared or ended, each record of a decision log."""
    path = folder / "notes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def this_is_the_driver() -> None:
    """Make this process group the one that "kill driver" kills. Call it before Spark's JVM is started."""
    os.environ[_DRIVER] = str(os.getpgid(0))


class Plugin:
    """A plug-in that looks into its folder at every event: its files may change while a process lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stamp = 0
        self._faults: list[Fault] = []
        self._counts: Counter[str] = Counter()
        self._seen: dict[str, threading.Event] = {}

    @hookimpl
    def txnbridge_event(self, event: Event) -> None:
        name = f"{event.name}/{event.phase}"
        names = {name, f"{name}:{event.data.get('kind')}"}
        task = _task()
        if name in ("prepare/after", "resolve/after", "decision.append/after"):
            self._note(name, event, task)
        with self._lock:
            self._read_faults()
            for fault in self._faults:
                if fault.behind in names and _counts(fault, task):
                    self._seen[fault.name].set()
            due = [fault for fault in self._faults if self._is_due(fault, names, task)]
        for fault in due:
            self._happen(fault)

    def _read_faults(self) -> None:
        path = self._folder / "faults.json"
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        if stamp != self._stamp:
            self._stamp = stamp
            self._faults = [Fault(**found) for found in json.loads(path.read_text())] if stamp else []
            self._counts.clear()
            self._seen = {fault.name: threading.Event() for fault in self._faults}

    def _is_due(self, fault: Fault, names: Iterable[str], task: Mapping[str, Any]) -> bool:
        if fault.at not in names or not _counts(fault, task):
            return False
        self._counts[fault.name] += 1
        return self._counts[fault.name] == fault.nth

    def _happen(self, fault: Fault) -> None:
        if fault.behind is not None:
            self._seen[fault.name].wait()
        if fault.then == "meet":
            self._meet(fault.name)
            return
        try:
            (self._folder / f"{fault.name}.happened").touch(exist_ok=False)
        except FileExistsError:
            return
        if fault.then == "hold":
            self._hold(fault.name)
        else:
            _kill(fault.then)

    def _hold(self, name: str) -> None:
        while not (self._folder / f"{name}.go").exists():
            time.sleep(_POLL_SECONDS)

    def _meet(self, name: str) -> None:
        (self._folder / f"{name}.met.{os.getpid()}").touch()
        while len(list(self._folder.glob(f"{name}.met.*"))) < 2:
            time.sleep(_POLL_SECONDS)

    def _note(self, name: str, event: Event, task: Mapping[str, Any]) -> None:
        note = {
            "event": name,
            "kind": event.data.get("kind"),
            "transaction": event.transaction,
            "pid": os.getpid(),
            "time": time.time(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            **task,
        }
        with open(self._folder / "notes.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(note).encode() + b"\n")


def _task() -> dict[str, Any]:
    """Return the ids of this task and its attempt; empty on the driver."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return {}
    return {"partition": context.partitionId(), "attempt": context.attemptNumber(), "task": context.taskAttemptId()}


def _counts(fault: Fault, task: Mapping[str, Any]) -> bool:
    if fault.in_task != bool(task) or fault.partition not in (None, task.get("partition")):
        return False
    return fault.once is None or Path(fault.once).exists()


def _kill(what: str) -> NoReturn:
    if what == "kill driver":
        os.killpg(int(os.environ[_DRIVER]), signal.SIGKILL)
    elif what == "kill executor":
        # A Python worker is a child of a daemon, which is a child of the executor.
        found = subprocess.run(["ps", "-o", "ppid=", "-p", str(os.getppid())], capture_output=True, check=True)
        os.kill(int(found.stdout), signal.SIGKILL)
    # A Python worker has its daemon's process group. Killed alone it is one that the operating system chose.
    if what != "kill":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


plugin = Plugin(Path(os.environ[_FOLDER])) if _FOLDER in os.environ else None
