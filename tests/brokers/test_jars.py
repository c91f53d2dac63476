"""Tests of fetching, with a Maven of a few lines of shell."""

import fcntl
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import _jars
from txnbridge_conformance.brokers._broker import wait_until

from tests.brokers import programs
from txnbridge.testing import Child

pytest_plugins = ["pytester"]

# Records its arguments, waits while a file `wait` exists, and creates one jar.
MAVEN = """#!/bin/sh
echo "$@" >> {folder}/calls
for last; do :; done
out=${{last#-DoutputDirectory=}}
: > "$out/half.jar"
while [ -e {folder}/wait ]; do sleep 0.02; done
: > "$out/whole.jar"
echo '[INFO] Downloaded from somewhere: a.jar'
"""
ARTIFACTS = [_jars.Artifact("a", "b", "1")]


class Maven:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.write(MAVEN.format(folder=folder))

    def write(self, script: str) -> None:
        (self.folder / "mvn").write_text(script)
        (self.folder / "mvn").chmod(0o755)

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def hold(self) -> None:
        (self.folder / "wait").touch()

    def go_on(self) -> None:
        (self.folder / "wait").unlink()


@pytest.fixture
def maven(tmp_path, monkeypatch) -> Maven:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TXNBRIDGE_CACHE", str(tmp_path / "cache"))
    return Maven(tmp_path)


@pytest.fixture
def fresh_java():
    forget = _jars._java.cache_clear
    forget()
    yield
    forget()


def jars(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.jar"))


def test_jars_that_were_fetched_are_not_fetched_again(maven):
    folder = _jars.fetch("toy-1", ARTIFACTS, bar=False)
    assert jars(folder) == ["half.jar", "whole.jar"]
    assert _jars.fetch("toy-1", ARTIFACTS, bar=False) == folder
    assert len(maven.calls()) == 1


def test_versions_and_checksums_are_pinned(maven):
    _jars.fetch("toy-1", ARTIFACTS, bar=False)
    (call,) = maven.calls()
    assert " -C " in call and ":3.8.1:copy-dependencies" in call
    assert "<version>1</version>" in (maven.cache / "toy-1" / "pom.xml").read_text()


def test_versions_can_be_those_of_a_parent(maven):
    wanted = [_jars.Artifact("a", "b", "1"), _jars.Artifact("c", "d")]
    _jars.fetch("toy-1", wanted, bar=False, parent=_jars.Artifact("p", "q", "2"))
    pom = (maven.cache / "toy-1" / "pom.xml").read_text()
    assert "<parent><groupId>p</groupId><artifactId>q</artifactId><version>2</version></parent>" in pom
    assert "<dependency><groupId>c</groupId><artifactId>d</artifactId></dependency>" in pom


def test_only_the_wanted_files_of_an_archive_are_kept(maven):
    folder = _jars.fetch_from_archive("toy-1", _jars.Artifact("a", "b", "1"), "**/lib/*.jar", bar=False)
    assert jars(folder) == ["half.jar", "whole.jar"]
    (call,) = maven.calls()
    assert " -C " in call and ":3.8.1:unpack -Dartifact=a:b:1:tar.gz:bin" in call
    assert "-Dmdep.unpack.includes=**/lib/*.jar" in call


def test_a_killed_fetch_leaves_no_folder_that_looks_whole_and_the_next_fetch_begins_anew(maven):
    maven.hold()
    with Child(programs.fetch) as killed:
        assert wait_until(lambda: (maven.cache / "toy-1.partial" / "half.jar").exists(), 30)
        killed.kill()
    assert not (maven.cache / "toy-1").exists()
    (maven.cache / "toy-1.partial" / "stray").touch()
    with Child(programs.fetch) as second:
        maven.go_on()
        folder = Path(second.result())
    assert jars(folder) == ["half.jar", "whole.jar"] and not (folder / "stray").exists()
    assert len(maven.calls()) == 2


def test_the_next_fetch_waits_for_a_maven_that_outlives_its_starter(maven):
    maven.hold()
    with Child(programs.fetch) as killed:
        assert wait_until(lambda: len(maven.calls()) == 1, 30)
        killed.kill()
    with open(maven.cache / "lock", "ab") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        maven.go_on()
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert jars(maven.cache / "toy-1.partial") == ["half.jar", "whole.jar"]


def test_one_of_two_processes_that_fetch_at_once_does_the_work(maven):
    maven.hold()
    with Child(programs.fetch) as first, Child(programs.fetch) as second:
        assert wait_until(lambda: len(maven.calls()) == 1, 30)
        maven.go_on()
        assert first.result() == second.result()
    assert len(maven.calls()) == 1


def test_a_failed_fetch_tells_why_and_leaves_nothing(maven):
    maven.write("#!/bin/sh\necho '[ERROR] no such jar'\nexit 1\n")
    with pytest.raises(brokers.CannotStart, match=r"could not fetch the broker \(1\): \[ERROR\] no such jar"):
        _jars.fetch("toy-1", ARTIFACTS, bar=False)
    assert not (maven.cache / "toy-1").exists()


def test_the_error_without_maven_says_what_to_install(maven, monkeypatch):
    monkeypatch.setenv("PATH", str(maven.folder / "nowhere"))
    with pytest.raises(brokers.ToolMissing, match="install Maven"):
        _jars.fetch("toy-1", ARTIFACTS, bar=False)


@pytest.mark.usefixtures("fresh_java")
def test_the_error_without_java_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(brokers.ToolMissing, match="java does not run: install Java 17"):
        brokers.kafka(container=False)


@pytest.mark.usefixtures("fresh_java")
def test_an_older_java_is_named(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(brokers.ToolMissing, match=r'openjdk version "11\.0\.2": install Java 17'):
        brokers.kafka(container=False)


@pytest.mark.usefixtures("fresh_java")
def test_a_test_that_needs_what_is_not_installed_is_skipped_with_the_reason(pytester, tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    pytester.makeconftest('pytest_plugins = ["txnbridge_conformance.brokers.plugin"]')
    pytester.makepyfile(
        "def test_one(kafka_broker): pass\n"
        "def test_two(start_kafka): start_kafka(version='3.9.2')\n"
        "def test_three(pulsar_broker): pass\n"
        "def test_four(start_pulsar): start_pulsar(version='4.0.8')\n"
        "def test_five(): pass"
    )
    # In a process of its own, because the modules that it imports would be loaded twice.
    result = pytester.runpytest_subprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=4, passed=1)
    for name in ("Kafka", "Pulsar"):
        result.stdout.fnmatch_lines([f"*needs a {name} broker: *java does not run: install Java 17*"])


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"TXNBRIDGE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/txnbridge"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.cache/txnbridge"),
        ({"HOME": "/home/a"}, "/home/a/.cache/txnbridge"),
    ],
)
def test_the_cache_is_where_the_user_says(monkeypatch, environment, folder):
    for name in ("TXNBRIDGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(_jars.cache_folder()) == folder


def test_a_cache_that_cannot_be_made_is_named_and_what_to_set(maven, monkeypatch):
    monkeypatch.setenv("TXNBRIDGE_CACHE", str(maven.folder / "mvn" / "cache"))
    with pytest.raises(brokers.ToolMissing, match="mvn/cache'; set TXNBRIDGE_CACHE"):
        _jars.fetch("toy-1", ARTIFACTS)


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (False, False)])
def test_a_bar_is_shown_on_a_terminal_only(maven, terminal, shown):
    maven.hold()
    code = "from txnbridge_conformance.brokers import _jars; _jars.fetch('toy-1', [_jars.Artifact('a', 'b', '1')])"
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    stderr = theirs if terminal else write
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=stderr, env=environment) as fetching:
        os.close(theirs)
        os.close(write)
        assert wait_until(lambda: len(maven.calls()) == 1, 30)
        maven.go_on()
        text = _all(ours if terminal else read)
    assert fetching.returncode == 0
    assert ("fetching toy-1" in text) == shown
    os.close(ours)
    os.close(read)


def _all(descriptor: int) -> str:
    text = b""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # so a terminal reports the end of the stream
            data = b""
        if not data:
            return text.decode()
        text += data
