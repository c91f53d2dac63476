"""`WorkerSupervisor`: runs an application in several processes, and starts those that die again."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from txnbridge._base.service_stop import signals_handled
from txnbridge.cli._common import ExitCode
from txnbridge.cli._health import Answer, health, of_ended, page
from txnbridge.cli._worker import ABORT, STOP

_log = logging.getLogger("txnbridge")

# The exit codes of a worker that could not start. It is started again if the service has been ready before.
_NOT_STARTED = (ExitCode.USAGE, ExitCode.UNAVAILABLE)
# The interval at which the supervisor looks at its workers and signals: short, so that a stop is quick.
_LOOK_SECONDS = 0.1
_RELOAD_SECONDS = 0.5
# The waits before a worker that died is started again: doubled with each death, from the first up to the longest.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
# A worker that has lived so long has recovered: after its death the waits begin anew.
_RECOVERED_SECONDS = 60.0
# A worker that reports no status for this time hangs: it reports several times a second, but importing takes seconds.
_SILENT_SECONDS = 30.0
# The time after the application's own `stop_timeout` for closing the bridge; then a worker is killed.
_CLOSING_SECONDS = 10.0


class WorkerSupervisor:
    """Runs `count` workers of an application by a command, to which the text for `WorkerProcess` is appended.

    Without an error of the application it works until a signal, or until the application stops itself. A worker that
    dies is started again. With `reload`, the workers restart when a Python file below the current folder changes.
    With `measure`, the workers tell their metrics.
    """

    def __init__(
        self, command: Sequence[str], count: int, stop_timeout: float, reload: bool = False, measure: bool = False
    ) -> None:
        self._workers = [Worker(command, number + 1, measure, alone=count == 1) for number in range(count)]
        self._stop_timeout = stop_timeout
        self._reload = reload
        self._signals: list[int] = []
        self._handled = 0  # how many of these signals
        self._stopping = False
        self._was_ready = False
        self._code: int = ExitCode.OK

    def run(self) -> int:
        """Run the workers; return the exit code of the service."""
        files, looked = _mtimes() if self._reload else {}, time.monotonic()
        with signals_handled(lambda number, _: self._signals.append(number), signal.SIGTERM, signal.SIGINT):
            try:
                for worker in self._workers:
                    worker.start()
                while not self._stopping or any(worker.runs for worker in self._workers):
                    self._look()
                    if self._reload and time.monotonic() - looked >= _RELOAD_SECONDS:
                        before, files, looked = files, _mtimes(), time.monotonic()
                        if files != before:
                            self._renew()
                    time.sleep(_LOOK_SECONDS)
            finally:
                for worker in self._workers:
                    worker.kill()
        return self._code

    # --- health, asked by other threads -------------------------------------------------------------------------------

    def alive(self) -> Answer:
        """Answer whether no worker and no function hangs. A worker that has died is started again."""
        silent = [worker.number for worker in self._workers if worker.is_silent]
        functions = [item for worker in self._workers for item in worker.status["functions"].items()]
        hanging = sorted({name for name, status in functions if status["hangs"]})
        alive = not silent and not hanging
        return health(alive, {"alive": alive, "silent_workers": silent, "hanging_functions": hanging})

    def ready(self) -> Answer:
        """Answer whether all workers are ready, and each of their functions healthy."""
        statuses = [worker.status for worker in self._workers]
        ready = not self._stopping and all(status["ready"] for status in statuses)
        return health(ready, {"ready": ready, "workers": statuses})

    def metrics(self) -> Answer:
        """Answer Prometheus with the metrics of all workers together."""
        return page([document for worker in self._workers for document in worker.metrics])

    # --- workers ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if len(self._signals) > self._handled:
            self._handled += 1
            self._stop(signal.Signals(self._signals[-1]).name, at_once=self._handled > 1)
            if self._handled > 1:
                self._code = 128 + self._signals[-1]
        for worker in self._workers:
            worker.read()
            self._was_ready |= bool(worker.status["ready"])
            if worker.runs:
                self._look_after(worker)
            elif not self._stopping and worker.start_at is not None and time.monotonic() >= worker.start_at:
                self._start_again(worker)

    def _look_after(self, worker: Worker) -> None:
        code = worker.end()
        if code is None:
            self._kill_if_late(worker)
        elif self._stopping:
            if code == ExitCode.FAILED:
                self._code = self._code or ExitCode.FAILED
        elif worker.renewed:
            self._start_again(worker)
        elif code == ExitCode.OK:
            self._stop("the application has stopped itself")
        elif self._is_final(code):
            self._fail(code)
        else:
            wait, ended_by = worker.start_later(), next((s.name for s in signal.Signals if s == -code), -code)
            cause = f"exit code {code}" if code >= 0 else f"signal {ended_by}"
            _log.warning("%s died (%s); it is started again in %.1f s", worker, cause, wait)

    def _kill_if_late(self, worker: Worker) -> None:
        if worker.kill_at is None or time.monotonic() < worker.kill_at:
            return
        _log.error("%s did not stop in time and is killed", worker)
        worker.kill()
        if self._stopping:
            self._code = self._code or ExitCode.FAILED
        else:
            self._start_again(worker)

    def _start_again(self, worker: Worker) -> None:
        try:
            worker.start()
        except OSError as error:  # too many processes or open files: the other workers go on
            _log.error("%s could not be started (%s); it is tried again in %.1f s", worker, error, worker.start_later())

    def _is_final(self, code: int) -> bool:
        """Return whether a worker that ended with this exit code would end with it again, so it is not restarted."""
        if self._reload and code == ExitCode.USAGE:
            return True
        return code == ExitCode.FAILED or (code in _NOT_STARTED and not self._was_ready)

    def _fail(self, code: int) -> None:
        if self._reload:
            _log.error("the application starts again when one of its files has changed")
        else:
            self._code = code
            self._stop("one of them has failed")

    def _stop(self, reason: str, at_once: bool = False) -> None:
        _log.info("stopping the workers: %s", reason)
        self._stopping = True
        for worker in self._workers:
            worker.stop(self._stop_timeout + _CLOSING_SECONDS, at_once)

    def _renew(self) -> None:
        _log.info("a file has changed: the workers restart")
        for worker in self._workers:
            if worker.runs:
                worker.renewed = True
                worker.stop(self._stop_timeout + _CLOSING_SECONDS)
            else:
                self._start_again(worker)


class Worker:
    """One worker of an application: its present process, and those that are started after it."""

    def __init__(self, command: Sequence[str], number: int, measure: bool, alone: bool) -> None:
        self.number = number
        self._alone = alone
        self._measure = measure
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._status_pipe = self._orders_pipe = -1
        self._text = b""
        self._told: dict[str, Any] = {}
        # The counts of the processes that have ended, and the last metrics that the present one has told. They change
        # together, because another thread reads them.
        self.metrics: tuple[list[Any], list[Any]] = [], []
        self._started = self._heard = 0.0
        self._deaths = 0
        self.start_at: float | None = None  # when a worker that died is started again
        self.renewed = False  # whether it was stopped in order to start anew
        self.kill_at: float | None = None  # when a process that was told to stop is killed

    def __str__(self) -> str:
        return f"worker {self.number}" + (f" (pid {self._process.pid})" if self._process else "")

    @property
    def runs(self) -> bool:
        return self._status_pipe >= 0

    @property
    def is_silent(self) -> bool:
        return self.runs and time.monotonic() - self._heard > _SILENT_SECONDS

    @property
    def status(self) -> dict[str, Any]:
        """The last status that the process has sent; if it hangs, a status that is not ready."""
        pid = self._process.pid if self._process and self.runs else None
        told = self._told if pid and not self.is_silent else {}
        return {"worker": self.number, "pid": pid, "ready": False, "functions": {}, **told}

    def start(self) -> None:
        """Start a process, in a session of its own: Ctrl-C in a terminal is for the supervisor only."""
        with ExitStack() as unless_started:
            status_pipe, status = _pipe(unless_started)
            orders, orders_pipe = _pipe(unless_started)
            self._process = subprocess.Popen(
                [*self._command, f"{status},{orders},{self.number},{self._measure:d},{self._alone:d}"],
                pass_fds=(status, orders),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
            unless_started.pop_all()
        os.close(status)
        os.close(orders)
        os.set_blocking(status_pipe, False)
        self._status_pipe, self._orders_pipe = status_pipe, orders_pipe
        self._text, self._told = b"", {}
        self._started = self._heard = time.monotonic()
        self.start_at, self.kill_at, self.renewed = None, None, False

    def start_later(self) -> float:
        """Plan the start of a process in place of one that died; return the seconds until then."""
        lived = time.monotonic() - self._started
        self._deaths = 1 if lived >= _RECOVERED_SECONDS else self._deaths + 1
        wait: float = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(self._deaths - 1, 10))
        self.start_at = time.monotonic() + wait
        return wait

    def read(self) -> None:
        """Read the status and the metrics that the process has sent."""
        if not self.runs:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._status_pipe, 65536):
                self._text += data
        *lines, self._text = self._text.split(b"\n")
        if lines:
            self._heard = time.monotonic()
            for told in map(json.loads, lines):
                if (metrics := told.pop("metrics", None)) is not None:
                    self.metrics = self.metrics[0], metrics
                self._told = told

    def stop(self, seconds: float, at_once: bool = False) -> None:
        """Tell the process to stop: at once, or after its running transactions, for which it has `seconds`."""
        self.start_at = None
        self.kill_at = self.kill_at or time.monotonic() + seconds
        if self.runs:
            with suppress(BrokenPipeError):  # it has just died
                os.write(self._orders_pipe, ABORT if at_once else STOP)

    def end(self) -> int | None:
        """If the process has ended, close its pipes and return its exit code; otherwise return None."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            os.close(self._status_pipe)
            os.close(self._orders_pipe)
            self._status_pipe = self._orders_pipe = -1
            if self.metrics[1]:  # they are kept, because a counter of Prometheus must not go down
                self.metrics = of_ended(self.metrics), []
        return code

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None and self.runs:
            self._process.kill()
            self._process.wait()
            self.end()


def _pipe(opened: ExitStack) -> tuple[int, int]:
    """Return the reading and the writing end of a new pipe, which `opened` closes."""
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


def _mtimes() -> dict[str, int]:
    """Return the times of change of the Python files below the current folder, without environments and hidden ones."""
    found = {}
    for folder, folders, files in os.walk("."):
        hidden = {name for name in folders if name.startswith((".", "__"))}
        folders[:] = [n for n in folders if n not in hidden and not Path(folder, n, "pyvenv.cfg").exists()]
        for name in files:
            if name.endswith(".py"):
                with suppress(OSError):  # deleted meanwhile
                    found[os.path.join(folder, name)] = os.stat(os.path.join(folder, name)).st_mtime_ns
    return found
