"""A small process that runs a broker's processes and ends them when whoever started it dies, however it dies.

Run by its path with a bare interpreter, so it imports nothing of ours. It reads requests from its standard input, one
JSON document a line, and answers each with a line. When the input ends, it kills what it started and removes its
folder.
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

# The input ends when the starter dies, unless the starter forked and its child holds the pipe too: so its death is also
# looked for, this often.
_LOOK_SECONDS = 0.5


class Supervisor:
    """The processes by name, and the folder that goes with them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._input = 0
        self._starter: int | None = os.getppid()

    def serve(self) -> None:
        """Answer requests until the input or the starter ends, or until told to stop."""
        try:
            for line in self._lines():
                request = json.loads(line)
                what = request.pop("do")
                if what == "stop":
                    return
                try:
                    answer = {"is": getattr(self, f"do_{what}")(**request)}
                except OSError as error:
                    answer = {"error": str(error)}
                self._answer(answer)
        finally:
            self._end()

    def _lines(self) -> Iterator[bytes]:
        pending = b""
        while self._starter is None or os.getppid() == self._starter:
            if not select.select([self._input], [], [], _LOOK_SECONDS)[0]:
                continue
            data = os.read(self._input, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines

    def _answer(self, answer: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the starter died; its end of the input says so next
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
                start_new_session=True,  # its process group is what is killed
            )
        self._processes[name] = process
        return process.pid

    def do_signal(self, name: str, number: int) -> bool:
        """Send a signal to a process and its children, if it runs."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return False
        os.killpg(process.pid, number)  # no other process has this id: this one was not waited for yet
        return True

    def do_exit_code(self, name: str) -> int | str | None:
        """What a process ended with, None while it runs, "absent" if there never was one."""
        process = self._processes.get(name)
        return "absent" if process is None else process.poll()

    def do_detach(self, control: str) -> None:
        """From now on live without the starter, and take requests from a named pipe.

        As long as the pipe has a reader, this process lives; so nobody has to remember its id.
        """
        os.mkfifo(control, 0o600)
        # Open for writing too, so that it never ends.
        self._input = os.open(control, os.O_RDWR)
        self._starter = None

    def _end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _leave(*_: object) -> None:
    sys.exit(1)  # through `finally`, which ends the processes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    Supervisor(sys.argv[1]).serve()
