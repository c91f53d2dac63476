"""Fetches Java programs from Maven, once for each version, into a folder outside of any checkout."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from txnbridge_conformance.brokers._broker import CannotStart, ToolMissing

JAVA = 17  # the oldest version of Java on which Kafka 4 and Pulsar 4 run

# The plug-in's version is pinned, as all versions here. Older versions of the plug-in miss some dependencies of a jar.
_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
_POM = """<project><modelVersion>4.0.0</modelVersion>
{origin}
<artifactId>jars</artifactId><packaging>pom</packaging>
<dependencies>
{dependencies}
</dependencies></project>
"""
_NO_PARENT = "<groupId>local</groupId><version>1</version>"  # a parent needs its own, to name its modules
_LOG4J = """<Configuration>
  <Appenders><Console name="out"><PatternLayout pattern="%d %p %c{1} %m%n"/></Console></Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


class Artifact(NamedTuple):
    """The coordinates of a file in Maven. Without a version, the parent project's version of the file is used."""

    group: str
    name: str
    version: str | None = None

    def xml(self, tag: str) -> str:
        """Return the XML element for this artifact in a Maven project file."""
        version = f"<version>{self.version}</version>" if self.version else ""
        return f"<{tag}><groupId>{self.group}</groupId><artifactId>{self.name}</artifactId>{version}</{tag}>"


def cache_folder() -> Path:
    """Return the folder of fetched files: TXNBRIDGE_CACHE, or `txnbridge` in XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("TXNBRIDGE_CACHE"):
        return Path(own).absolute()
    # The base directory specification says that a relative path is ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "txnbridge"


def java() -> str:
    """Return the Java to run. Raise `ToolMissing` if Java is missing or too old."""
    return _java()[0]


def java_version() -> int:
    """Return the version of the Java to run. Raise `ToolMissing` if Java is missing or too old."""
    return _java()[1]


@functools.cache
def _java() -> tuple[str, int]:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    wanted = f"install Java {JAVA} or newer (a runtime is enough; Debian: openjdk-17-jre-headless) or set JAVA_HOME"
    try:
        # macOS has a command of this name even without Java.
        text = subprocess.run([program, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        raise ToolMissing(f"{program} does not run: {wanted}") from None
    version = re.search(r'version "(\d+)', text)
    if version is None or int(version[1]) < JAVA:
        raise ToolMissing(f"{program} is {text.splitlines()[0]}: {wanted}")
    return program, int(version[1])


def fetch(name: str, artifacts: Sequence[Artifact], bar: bool = True, parent: Artifact | None = None) -> Path:
    """Return the folder of these jars and their dependencies. The first call fetches them, with a bar on a terminal.

    The dependencies have the versions that `parent` names, if it is given.

    The folder appears only when it is complete, even if a process is killed while it fetches. Of two processes that
    fetch at once, one waits for the other. Raise `ToolMissing` or `CannotStart`.
    """

    def goal(folder: Path) -> list[str]:
        pom = folder / "pom.xml"
        dependencies = "\n".join(artifact.xml("dependency") for artifact in artifacts)
        pom.write_text(_POM.format(origin=parent.xml("parent") if parent else _NO_PARENT, dependencies=dependencies))
        return ["-f", str(pom), f"{_PLUGIN}:copy-dependencies", "-DincludeScope=runtime"]

    return _fetch(name, goal, bar)


def fetch_from_archive(name: str, archive: Artifact, files: str, bar: bool = True, classifier: str = "bin") -> Path:
    """Return a folder with the files of a program's archive that match the pattern `files`, with their paths.

    The first call fetches the archive, with the locking and errors of `fetch`.
    """
    wanted = [f"-Dartifact={':'.join(map(str, archive))}:tar.gz:{classifier}", f"-Dmdep.unpack.includes={files}"]
    return _fetch(name, lambda folder: [f"{_PLUGIN}:unpack", *wanted], bar)


def _fetch(name: str, goal: Callable[[Path], list[str]], bar: bool) -> Path:
    folder = cache_folder() / name
    if folder.exists():
        return folder
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolMissing(f"{name} needs a folder: {error}; set TXNBRIDGE_CACHE to one that you may create") from None
    # One lock serves all programs, because Maven's own cache is not made for two writers.
    with _locked(cache_folder() / "lock") as lock:
        if not folder.exists():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir()
            with _steps(f"fetching {name}", bar and sys.stderr.isatty()) as step:
                _maven(goal(partial), partial, lock, step)
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
        # The number of files is unknown: it depends on what Maven's cache has already.
        task = progress.add_task(text, total=None)
        yield lambda: progress.advance(task)


def _maven(goal: list[str], folder: Path, lock: int, step: Callable[[], None]) -> None:
    # -C: a file whose checksum is wrong is an error.
    command = ["mvn", "-B", "-C", *goal, f"-DoutputDirectory={folder}"]
    if not os.access(Path.home(), os.W_OK):  # where Maven's own cache is
        command.insert(1, f"-Dmaven.repo.local={cache_folder() / 'maven'}")
    errors: list[str] = []
    try:
        # Maven inherits the lock: if this process is killed, Maven still writes, and other processes wait for its end.
        maven = subprocess.Popen(
            command,
            cwd=folder,  # Maven must not read a project in the current folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[lock],
        )
    except FileNotFoundError:
        raise ToolMissing("mvn is not installed: install Maven (Debian: maven); it fetches the broker once") from None
    with maven:
        assert maven.stdout is not None
        for line in maven.stdout:
            if any(done in line for done in ("Downloaded from", "Copying", "Unpacking")):
                step()
            elif "ERROR" in line:
                errors.append(line.strip())
    if maven.returncode:
        raise CannotStart(f"Maven could not fetch the broker ({maven.returncode}): {' '.join(errors[:2])}")


def log4j_option(folder: Path) -> str:
    """Write log4j's settings into a folder; return the Java option by which it logs warnings to standard output."""
    file = folder / "log4j2.xml"
    file.write_text(_LOG4J)
    return f"-Dlog4j2.configurationFile={file}"


def properties(settings: Mapping[str, str]) -> str:
    """Return the text of a Java properties file."""
    return "".join(f"{name}={value}\n" for name, value in settings.items())
