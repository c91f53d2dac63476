"""Peers: programs of other clients with which txnbridge is compared, each in a process, perhaps in its own venv."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from txnbridge_conformance.brokers._jars import cache_folder

PROGRAM = Path(__file__).with_name("_official.py")


def environment(requirement: str) -> Path:
    """Return the interpreter of an environment with this library; the first call makes it with pip."""
    folder = cache_folder() / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement], check=True)
        done.touch()
    return python


class Peer:
    """A program that runs commands: it reads lines of JSON, each a name with arguments, and answers with one line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *asked: object) -> Any:
        """Give the program a command; return its answer. Raise `RuntimeError` if the program ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.answer(asked[0])

    def answer(self, asked: object = "nothing yet") -> Any:
        """Return the program's next answer. Raise `RuntimeError` if the program ends instead."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with {self._process.wait()} when it was asked for {asked}")
        return json.loads(answer)


def peer(python: str | Path, program: Path, *arguments: str, home: Path) -> AbstractContextManager[Peer]:
    """Start a program in Python; see `started`."""
    # Isolated (-I): otherwise the program would import the files beside it instead of installed modules.
    return started([python, "-I", program, *arguments], home)


@contextmanager
def started(command: Sequence[str | Path], home: Path) -> Iterator[Peer]:
    """Run a program for a block, started once, so that its start does not count. `home` is for its logs."""
    env = {**os.environ, "HOME": str(home)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the program then ends
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
