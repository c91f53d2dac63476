"""A small process that runs a broker's processes, and kills them when the process that started it ends or dies.

A bare interpreter runs this file by its path, so the file imports nothing of this project. The supervisor reads
requests from its standard input, one JSON document a line, and answers each with a line. When the input ends, the
supervisor kills the processes and removes its folder.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# The interval at which the supervisor checks that its starter lives. After the starter's death the input does not end
# if a forked child of the starter has the pipe open as well.
_POLL_SECONDS = 0.5


class Supervisor:
    """Starts, signals and kills a broker's processes by name, and removes their folder at the end."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._input = 0
        self._starter: int | None = os.getppid()

    def serve(self) -> None:
        """Answer requests until a stop request, the end of the input, or the starter's death; then kill all."""
        try:
            for line in self._lines():
                request = json.loads(line)
                action = request.pop("do")
                if action == "stop":
                    return
                try:
                    answer = {"is": getattr(self, f"do_{action}")(**request)}
                except OSError as error:
                    answer = {"error": str(error)}
                self._answer(answer)
        finally:
            self._end()

    def _lines(self) -> Iterator[bytes]:
        pending = b""
        while self._starter is None or os.getppid() == self._starter:
            if not select.select([self._input], [], [], _POLL_SECONDS)[0]:
                continue
            data = os.read(self._input, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines

    def _answer(self, answer: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the starter died; the end of the input follows
            os.write(1, json.dumps(answer).encode() + b"\n")

    def do_start(self, name: str, command: list[str], log: str) -> int:
        """Start a process of this name, and return its id."""
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
                start_new_session=True,  # a process group of its own, which is killed as a whole
            )
        self._processes[name] = process
        return process.pid

    def do_signal(self, name: str, number: int) -> bool:
        """Send a signal to a process and its children, if the process runs; return whether it runs."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return False
        os.killpg(process.pid, number)  # the id is not reused before this process has been waited for
        if number == signal.SIGSTOP and sys.platform != "darwin":  # threads of a busy machine stop late
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return True

    def do_exit_code(self, name: str) -> int | str | None:
        """Return a process's exit code, None while it runs, or "absent" if it was never started."""
        process = self._processes.get(name)
        return "absent" if process is None else process.poll()

    def do_detach(self, control: str) -> None:
        """Take requests from a new named pipe at `control` from now on, and do not end with the starter.

        The pipe has a reader as long as the supervisor lives, so the supervisor's process id need not be stored.
        """
        os.mkfifo(control, 0o600)
        # The pipe is open for writing as well, so that reading never meets its end.
        self._input = os.open(control, os.O_RDWR)
        self._starter = None

    def _end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the `finally` that ends the processes
    Supervisor(sys.argv[1]).serve()
