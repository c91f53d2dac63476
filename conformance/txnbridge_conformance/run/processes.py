"""`Process`: one process of a run, with restarts. Each restart has a new name and a history of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from txnbridge_conformance.run.plan import Plan


class RunFailed(Exception):
    """Raised if a run cannot go on; the text says why and what to do."""


def end_with(run: int) -> None:
    """Let this process be killed as soon as its parent is not the process `run` any more; a thread watches that.

    A run that is killed cannot stop its processes.
    """

    def watch() -> None:
        while os.getppid() == run:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Process:
    """A process of the run, which works until `stop` or `kill`.

    Each start calls `next_kill(role)` for the number of events after which the process kills itself, or for 0.
    `complain` is called with the name of a process that crashed or did not stop, and with what happened.
    """

    def __init__(
        self, plan: Plan, role: str, number: int, next_kill: Callable[[str], int], complain: Callable[[str, str], None]
    ) -> None:
        self._plan = plan
        self.role = role
        self._name = f"{role}{number}"
        self._starts = 0
        self._waker: subprocess.Popen[bytes] | None = None  # while the process is paused
        self._next_kill = next_kill
        self._complain = complain
        self.start()

    @property
    def name(self) -> str:
        """The name of the latest start: role, number, and count of starts."""
        return f"{self._name}-{self._starts}"

    def start(self) -> None:
        self._starts, self._killed = self._starts + 1, False
        self._errors = Path(self._plan.folder) / f"{self.name}.err"
        command = [sys.executable, "-m", "txnbridge_conformance.run.program"]
        with open(self._errors, "wb") as errors:
            arguments = [*command, self.role, self.name, str(self._next_kill(self.role))]
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=errors, stderr=errors)
        assert self._process.stdin is not None
        # Others see arguments, and the URL may hold secrets.
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._plan.to_json().encode())

    def replace_dead(self) -> None:
        """Start the process again if it has ended. Raise `RunFailed` if it ended before it had connected."""
        if self._process.poll() is not None:
            self._check_end()
            self.start()

    def _check_end(self, *expected: int) -> None:
        """Complain of the process if it ended neither by a kill nor with one of these exit codes."""
        history, code = Path(self._plan.folder) / f"{self.name}.jsonl", self._process.returncode
        told = history.read_bytes() if history.exists() else b""
        if not self._killed and code not in expected and b'"fault":"kill at ' not in told:
            if b'"result":"ok"' not in told:
                raise RunFailed(f"process {self.name} ended with {code}: {self._last_lines()}")
            last = self._last_lines().splitlines()[-1]
            self._complain(self.name, f"it ended with {code}, and {self._errors.name} ends with: {last[:200]}")

    def _last_lines(self) -> str:
        return "\n".join(self._errors.read_text(errors="replace").splitlines()[-15:]) or "it said nothing"

    @property
    def paused(self) -> bool:
        return self._waker is not None

    def pause(self) -> None:
        # If the run is killed, the shell reads the end of its pipe and resumes the process, which then ends by itself.
        command = ["sh", "-c", f"read _; kill -CONT {self._process.pid}"]
        self._waker = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        if self._waker is not None:
            self._waker.communicate()
            self._waker = None

    def stop(self) -> None:
        """Send SIGTERM and wait for the end. Kill a process that does not end long after all deadlines of its calls."""
        timeout = self._plan.stop_timeout
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._complain(self.name, f"it did not stop within {timeout:g} s of SIGTERM")
            self.kill()
        self._check_end(0, -signal.SIGTERM, 128 + signal.SIGTERM)  # before it handled SIGTERM; in Java

    def kill(self) -> None:
        self._killed |= self._process.poll() is None  # else it has crashed before
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.resume()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
