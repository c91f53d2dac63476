"""Java programs from Maven: fetched once for each version, into a folder outside of any checkout."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from txnbridge_conformance.brokers._broker import CannotStart, ToolMissing

JAVA = 17  # the oldest that Kafka 4 runs on

# Pinned like everything that is fetched; older ones do not know a jar's own dependencies of some forms.
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_POM = """<project><modelVersion>4.0.0</modelVersion>
<groupId>local</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
{}
</dependencies></project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"


class Artifact(NamedTuple):
    """A jar by its Maven name."""

    group: str
    name: str
    version: str


def cache_folder() -> Path:
    """Where what is fetched is kept: TXNBRIDGE_CACHE, or `txnbridge` in XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("TXNBRIDGE_CACHE"):
        return Path(own).absolute()
    # The base directory specification says to ignore a relative one.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "txnbridge"


@functools.cache
def java() -> str:
    """The Java to run. Raises `ToolMissing` if there is none, or an older one than needed."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else "java"
    wanted = f"install Java {JAVA} or newer (a runtime is enough; Debian: openjdk-17-jre-headless) or set JAVA_HOME"
    try:
        # macOS has a command of this name also where there is no Java.
        told = subprocess.run([found, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        raise ToolMissing(f"{found} does not run: {wanted}") from None
    version = re.search(r'version "(\d+)', told)
    if version is None or int(version[1]) < JAVA:
        raise ToolMissing(f"{found} is {told.splitlines()[0]}: {wanted}")
    return found


def fetch(name: str, artifacts: Sequence[Artifact], bar: bool = True) -> Path:
    """The folder of these jars and all that they need. The first call fetches them, with a bar if stderr is a terminal.

    Whole or not at all: whoever is killed meanwhile leaves nothing that looks complete, and of two who fetch at once
    one waits for the other. Raises `ToolMissing` and `CannotStart`.
    """
    folder = cache_folder() / name
    if folder.exists():
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    # One lock for all: Maven's own cache is not made for two writers.
    with _locked(cache_folder() / "lock") as lock:
        if not folder.exists():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of somebody who was killed
            partial.mkdir()
            with _steps(f"fetching {name}", bar and sys.stderr.isatty()) as step:
                _copy(artifacts, partial, lock, step)
            partial.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextmanager
def _steps(text: str, bar: bool) -> Iterator[Callable[[], None]]:
    if not bar:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        # Nobody knows before how many files it will be: it depends on what Maven has already.
        task = progress.add_task(text, total=None)
        yield lambda: progress.advance(task)


def _copy(artifacts: Sequence[Artifact], folder: Path, lock: int, step: Callable[[], None]) -> None:
    pom = folder / "pom.xml"
    pom.write_text(_POM.format("\n".join(_DEPENDENCY.format(*artifact) for artifact in artifacts)))
    # -C: a file whose checksum is wrong is an error.
    command = ["mvn", "-B", "-C", "-f", str(pom), _COPY, "-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
    said: list[str] = []
    try:
        # Maven keeps the lock too: killed without it, we leave it writing, and nobody may begin before it ends.
        maven = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[lock],
        )
    except FileNotFoundError:
        raise ToolMissing("mvn is not here: install Maven (Debian: maven); it fetches the broker once") from None
    with maven:
        assert maven.stdout is not None
        for line in maven.stdout:
            if "Downloaded from" in line or "Copying" in line:
                step()
            elif "ERROR" in line:
                said.append(line.strip())
    if maven.returncode:
        raise CannotStart(f"Maven could not fetch it ({maven.returncode}): {' '.join(said[:2])}")
