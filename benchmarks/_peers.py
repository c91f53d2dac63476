"""What ours stands beside, in processes of its own, and in environments of its own where it needs other libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from txnbridge_conformance.brokers._jars import cache_folder, java


def environment(requirement: str) -> Path:
    """The interpreter of an environment with this library; the first call makes it, with pip as it is set up here."""
    folder = cache_folder() / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement], check=True)
        done.touch()
    return python


class Peer:
    """A program that does what it is asked: it takes lines of JSON, a name and arguments, and answers each with one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *asked: object) -> Any:
        """Return what it answers when that is done. Raises `RuntimeError` if it ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.answer(asked[0])

    def answer(self, asked: object = "nothing yet") -> Any:
        """What it says next. Raises `RuntimeError` if it ends instead."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with {self._process.wait()} when it was asked for {asked}")
        return json.loads(answer)


def peer(python: str | Path, program: str | Path, *arguments: str, home: Path) -> AbstractContextManager[Peer]:
    """A program in Python, by its path or its name in this folder; see `started`."""
    # Isolated: else it would take the files beside it for the modules that it imports.
    return started([python, "-I", Path(__file__).parent / program, *arguments], home)


def java_peer(jars: Path, program: str, *arguments: str, home: Path) -> AbstractContextManager[Peer]:
    """A program in Java, by its name in this folder, with the classes of another; see `started`."""
    return started([java(), "-cp", f"{jars}/*", Path(__file__).parent / program, *arguments], home)


@contextmanager
def started(command: Sequence[str | Path], home: Path) -> Iterator[Peer]:
    """A program that is started once, so that its start and imports do not count. `home` is for its logs."""
    env = {**os.environ, "HOME": str(home)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # so it ends
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
