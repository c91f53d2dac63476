"""The demo passes on a broker that keeps its promises, and fails on each that breaks one."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import txnbridge
from tests.app.test_run import exists
from tests.core.toy import ToyBackend
from tests.failing import raising
from txnbridge import hookimpl, plugins

DEMO = [sys.executable, "-m", "txnbridge.cli", "demo"]
CLAIMS = 12


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: below it the demo's children have a socket, whose path may take no more than 100 bytes or so."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        yield Path(folder)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """The demo's temporary folder goes below ours."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), **more}


def play(tmp_path: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *args], env=environment(tmp_path, **more), capture_output=True, text=True, check=False
    )


def test_every_claim_is_checked_and_held_without_colour_and_without_traces(tmp_path):
    run = play(tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    story, summary = run.stdout.split(f"{CLAIMS} claims checked in ")
    assert len(re.findall(r"^  ✓ ", story, re.MULTILINE)) == CLAIMS
    assert len(re.findall(r"^✓ ", summary, re.MULTILINE)) == CLAIMS
    assert "✗" not in run.stdout and "\x1b" not in run.stdout
    assert list((tmp_path / "tmp").iterdir()) == []


class NotInstalled(ToyBackend):
    name = "kafka"

    def check_installed(self):
        raise txnbridge.BackendMissing("its client is not installed")

    @hookimpl
    def txnbridge_brokers(self):
        return [("kafka", raising(AssertionError("a broker is started in vain")))]


def test_no_broker_is_started_for_a_backend_whose_client_is_missing(invoke):
    with plugins.registered(NotInstalled()):
        result = invoke("demo", "kafka")
    assert (result.exit_code, result.stderr) == (2, "txnbridge: its client is not installed\n")


def test_the_demo_with_keep_and_json_leaves_the_shop_and_tells_its_story_on_stderr(tmp_path):
    run = play(tmp_path, "--keep", "--json")
    found = json.loads(run.stdout)
    assert set(found) == {"held", "broken", "seconds", "url"}
    assert len(found["held"]) == CLAIMS
    assert all(claim["claim"] and claim["how"] for claim in found["held"])
    assert (run.returncode, found["broken"]) == (0, None)
    assert "2. Killed between prepare and commit" in run.stderr
    url = found["url"]
    with txnbridge.connect(f"{url}?create=false") as bridge:
        [shipments] = [topic.name for topic in bridge.admin.topics() if topic.name.startswith("shipments-")]
        assert [message.value for message in bridge.read(shipments, 10)] == [b"order 1", b"marker"]
    assert f"export TXNBRIDGE_URL={url}" in run.stderr


def on_terminal(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # what Linux says when the other end is closed
            pass
        finally:
            os.close(ours)
    return process.returncode, shown.decode()


def test_the_demo_is_in_colour_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, shown = on_terminal(DEMO, environment(tmp_path, TERM="xterm-256color"))
    assert (code, shown.count("\x1b[1;32m  ✓ ")) == (0, CLAIMS)


@pytest.mark.parametrize("wanted", [True, False])
def test_no_color_is_respected(tmp_path, monkeypatch, wanted):
    monkeypatch.delenv("NO_COLOR", raising=False)
    env = environment(tmp_path, TERM="xterm-256color", **({} if wanted else {"NO_COLOR": "1"}))
    code, shown = on_terminal([*DEMO[:-1], "capabilities"], env)
    assert (code, "native" in shown) == (0, True)
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)) is wanted


FROZEN = ("and freezes", 4)


@pytest.mark.parametrize(
    ("moment", "processes", "number", "code"),
    [
        ("come in", 0, signal.SIGINT, 130),
        (*FROZEN, signal.SIGINT, 130),
        (*FROZEN, signal.SIGTERM, 143),
        (*FROZEN, signal.SIGHUP, 129),
    ],
    ids=["interrupted while the first starts", "interrupted while one is frozen", "terminated", "hung up"],
)
def test_a_signal_ends_all_its_processes(tmp_path, interruptible, moment, processes, number, code):
    with subprocess.Popen(
        DEMO,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the interrupt reaches all of them and nobody else, as from a terminal
    ) as process:
        assert process.stdout is not None
        pids = []
        for line in process.stdout:
            pids += [int(pid) for pid in re.findall(r"^  (?:worker|cashier|rescuer|old till|new till) (\d+)", line)]
            if moment in line:
                os.killpg(process.pid, number)
                break
        _, err = process.communicate()
    assert (process.returncode, err) == (code, "\n" if number is signal.SIGINT else "")
    assert len(set(pids)) >= processes
    assert [pid for pid in set(pids) if exists(pid)] == []
    assert list((tmp_path / "tmp").iterdir()) == []


# A plug-in that stands in front of the embedded broker, under its name, and breaks one promise.
BROKEN_BROKER = """
import os

from tests.conformance import broken
from txnbridge.spi import Outcome, hookimpl


class ShowsEachMessageAtOnce(broken.Broken):
    class Writer(broken.Remembering):
        def send(self, *message):
            super().send(*message)
            self.elsewhere([message])


class LosesAMessage(broken.Broken):
    class Writer(broken.OneByOne):
        def send(self, topic, value, *rest):
            if value != b"order 1" or not topic.startswith("shipments"):
                self.inner.send(topic, value, *rest)


class SaysCommittedAndDoesNothing(broken.Broken):
    def commit(self, token, ledger, deadline):
        return Outcome.COMMITTED


class CannotBeOpened(broken.Broken):
    def opening(options, context):
        raise PermissionError(13, "Permission denied", "demo.db")


@hookimpl
def txnbridge_backends():
    backend = broken.backend_of({**vars(broken), **globals()}[os.environ["FAULT"]])
    type(backend).schemes = ("embedded",)
    return [backend]
"""


@pytest.fixture
def broken_broker(tmp_path):
    """A folder for PYTHONPATH with an installed plug-in that takes the embedded broker's place."""
    folder = tmp_path / "site"
    info = folder / "broken_broker-1.dist-info"
    info.mkdir(parents=True)
    (folder / "broken_broker.py").write_text(BROKEN_BROKER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-broker\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[txnbridge]\nembedded = broken_broker\n")
    return str(folder)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("ShowsEachMessageAtOnce", "before the commit nobody sees any of it"),
        ("LosesAMessage", "after it both are there, each exactly once"),
        ("ForgetsAcknowledgements", "order 1 is done, and order 2 comes again"),
        ("ShowsWhatIsAborted", "nothing of order 2 was shipped or noted"),
        ("SaysCommittedAndDoesNothing", "another process commits it: nothing lost"),
        ("FencesNobody", "the commit of the old till is refused"),
        ("CannotBeOpened", "PermissionError"),
    ],
)
def test_a_broker_that_breaks_a_promise_breaks_the_story(tmp_path, broken_broker, fault, said):
    run = play(tmp_path, "--json", FAULT=fault, PYTHONPATH=broken_broker)
    assert run.returncode == 1, run.stderr
    assert f"✗ {said}" in run.stderr
    assert said not in re.sub(r"✗ .*", "", run.stderr)
    assert "claims checked" not in run.stderr
    found = json.loads(run.stdout)
    assert found["broken"].startswith(said)
    assert said not in [claim["claim"] for claim in found["held"]]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_demo_passes_with_a_harmless_plug_in_and_a_plain_encoding_and_is_as_wide_as_asked(tmp_path, broken_broker):
    more = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "57"}
    run = play(tmp_path, FAULT="Sound", PYTHONPATH=broken_broker, **more)
    assert (run.returncode, run.stdout.isascii()) == (0, True)
    assert {len(line) for line in run.stdout.splitlines() if line[0:1] == "+"} == {57}
