"""Tests of `txnbridge brokers`, with a real Kafka."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers import _detached, _jars, _kafka, _pulsar, _rocketmq, commands
from txnbridge_conformance.brokers._broker import wait_until

from tests.brokers import programs
from tests.brokers.kit import Toy, create_topic, state
from tests.failing import raising
from txnbridge.cli import main
from txnbridge.cli._common import ExitCode
from txnbridge.testing import Child

pytestmark = pytest.mark.timeout(600)  # the first start fetches Kafka

ALL = ["kafka", "pulsar", "rocketmq"]

Invoke = Callable[..., Result]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Path]:
    """Return a folder for detached brokers, which are ended with the test, also if the test run is killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code = """import sys; from txnbridge_conformance.brokers import _detached as d; sys.stdin.read()
for name in ('kafka', 'pulsar', 'rocketmq'): d.down(name)"""
    end = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    yield tmp_path / "txnbridge" / "brokers" / "kafka"
    end.communicate()
    assert end.returncode == 0


def start_toys(monkeypatch, kind, module, name):
    monkeypatch.setattr(module, f"fetch_{kind}", lambda version, bar: None)
    monkeypatch.setattr(module, name, lambda folder, **asked: Toy(folder=folder))
    monkeypatch.setitem(commands._ANSWERING, kind, lambda url: 2)


@pytest.fixture
def toy_for_kafka(monkeypatch):
    """Let the command line start a toy broker, so that tests cover the command line alone."""
    start_toys(monkeypatch, "kafka", _kafka, "KafkaProcess")


@pytest.fixture
def toys(toy_for_kafka, monkeypatch):
    """Let the command line start toy brokers for all brokers."""
    start_toys(monkeypatch, "pulsar", _pulsar, "PulsarProcess")
    start_toys(monkeypatch, "rocketmq", _rocketmq, "RocketMQ")


@pytest.fixture
def invoke() -> Invoke:
    return lambda *args: CliRunner().invoke(main, ["brokers", *args])


@pytest.fixture
def kafka_can_start() -> None:
    with contextlib.suppress(brokers.ToolMissing):
        _jars.java()
        _kafka.fetch_kafka()
        return
    pytest.skip("needs Java and Maven")


@pytest.mark.usefixtures("home", "kafka_can_start")
def test_a_broker_lives_on_after_the_command_until_it_is_told_to_end():
    command = [sys.executable, "-m", "txnbridge.cli", "brokers"]
    url = subprocess.run([*command, "up", "kafka"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    port = int(url.removeprefix("kafka://127.0.0.1:"))
    assert create_topic(port, "by-hand") == 0
    status = subprocess.run([*command, "status", "kafka"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert status == f"kafka 4.4.0 at {url}: 1 of 1 nodes answer\n"
    assert subprocess.run([*command, "down"], stdout=subprocess.PIPE, text=True, check=True).stdout == "ended kafka\n"
    with pytest.raises(OSError, match="Connection refused"):
        create_topic(port, "too-late")


@pytest.mark.usefixtures("toy_for_kafka")
def test_a_broker_asked_for_twice_is_started_once(home, invoke):
    first = json.loads(invoke("up", "kafka", "--json").stdout)
    second = json.loads(invoke("up", "kafka", "--json").stdout)
    assert (first.pop("started"), second.pop("started")) == (True, False)
    assert first == second
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("toy_for_kafka", "home")
def test_a_broker_that_runs_with_other_settings_is_not_replaced(invoke):
    invoke("up", "kafka")
    refused = invoke("up", "kafka", "--nodes", "3")
    assert refused.exit_code == ExitCode.USAGE
    assert refused.stderr == (
        "txnbridge: kafka runs with nodes 1, version 4.4.0; end it first with `txnbridge brokers down kafka`\n"
    )


@pytest.mark.usefixtures("toy_for_kafka")
def test_a_broker_started_from_a_shell_leaves_nothing_when_it_ends(home, invoke):
    invoke("up", "kafka")
    pids = [int((home / f"node-{node}.log").read_text().split()[1]) for node in (1, 2)]
    assert all(state(pid) for pid in pids)
    assert json.loads(invoke("down", "--json").stdout) == ["kafka"]
    assert wait_until(lambda: not any(state(pid) for pid in pids), 30)
    assert not home.exists()


@pytest.mark.usefixtures("home", "toys")
def test_all_brokers_are_started_shown_and_ended_at_once(invoke):
    started = json.loads(invoke("up", "all", "--json").stdout)
    assert [(each["broker"], each["started"]) for each in started] == [(name, True) for name in ALL]
    assert invoke("up", "all").stdout.splitlines() == [each["url"] for each in started]
    assert invoke("up", "pulsar").stdout.strip() == started[1]["url"]
    shown = invoke("status", "all")
    assert shown.exit_code == ExitCode.OK
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ALL
    logs = invoke("logs", "all", "--lines", "1").stdout.splitlines()
    assert [line for line in logs if line.startswith("== ")] == [f"== {name}" for name in ALL]
    assert [each["broker"] for each in json.loads(invoke("logs", "all", "--json").stdout)] == ALL
    assert invoke("down", "all").stdout == f"ended {', '.join(ALL)}\n"


@pytest.mark.usefixtures("home", "toys")
def test_the_status_of_all_brokers_fails_if_one_is_missing(invoke):
    invoke("up", "pulsar", "--delete-unused")
    assert invoke("status").exit_code == invoke("status", "pulsar").exit_code == ExitCode.OK
    assert invoke("status", "all").exit_code == ExitCode.FAILED
    refused = invoke("up", "pulsar")
    assert refused.exit_code == ExitCode.USAGE
    assert "delete-unused True" in refused.stderr


@pytest.mark.usefixtures("home")
def test_ending_a_broker_that_does_not_run_is_no_error(invoke):
    ended = invoke("down", "kafka")
    assert (ended.exit_code, ended.stdout) == (ExitCode.OK, "no broker was running\n")


@pytest.mark.usefixtures("home")
def test_status_fails_for_a_named_broker_that_does_not_run_and_not_in_general(invoke):
    assert invoke("status").exit_code == ExitCode.OK
    named = invoke("status", "kafka")
    assert (named.exit_code, named.stdout) == (ExitCode.FAILED, "no broker is running\n")


@pytest.mark.usefixtures("toy_for_kafka")
def test_files_left_by_a_machine_that_went_down_are_ignored(home, invoke):
    home.mkdir(parents=True)
    os.mkfifo(home / "control")
    (home / "state.json").write_text("{}")
    assert json.loads(invoke("status", "--json").stdout) == []
    assert json.loads(invoke("up", "kafka", "--json").stdout)["started"]


def test_a_file_in_the_place_of_the_pipe_is_taken_for_no_running_broker(home, invoke):
    home.mkdir(parents=True)
    (home / "control").touch()
    assert _detached.find("kafka") is None


@pytest.mark.usefixtures("toy_for_kafka")
def test_a_start_that_fails_leaves_nothing(home, invoke, monkeypatch):
    monkeypatch.setattr(_kafka, "KafkaProcess", lambda folder, **_: Toy("raise SystemExit('no luck')", folder))
    failed = invoke("up", "kafka")
    assert failed.exit_code == ExitCode.UNAVAILABLE
    assert failed.stderr == "txnbridge: node 1 ended instead of starting; its log ends: no luck\n"
    assert not home.exists()


def test_a_start_that_is_killed_leaves_nothing(home):
    folder = home.with_name("toy")
    with Child(programs.start_detached, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)") as starter:
        log = folder / "node-1.log"
        assert wait_until(lambda: log.exists() and bool(log.read_text()), 30)
        pid = int(log.read_text())
        starter.kill()
    assert wait_until(lambda: not state(pid) and not folder.exists(), 30)


@pytest.mark.usefixtures("toy_for_kafka", "home")
def test_the_end_of_a_nodes_log_is_shown(invoke):
    invoke("up", "kafka")
    shown = json.loads(invoke("logs", "kafka", "--lines", "1", "--json").stdout)
    assert shown["node"] == 1 and len(shown["lines"]) == 1
    assert invoke("logs", "kafka", "--node", "2").stdout.startswith("child ")
    assert invoke("logs", "kafka", "--node", "9").exit_code == ExitCode.USAGE


@pytest.mark.usefixtures("home")
def test_a_broker_that_does_not_run_has_no_log(invoke):
    failed = invoke("logs", "kafka", "--json")
    assert failed.exit_code == ExitCode.USAGE
    assert json.loads(failed.stderr)["error"] == "NotFound"


@pytest.mark.usefixtures("home")
def test_options_that_cannot_be_combined_are_refused(invoke):
    refused = invoke("up", "kafka", "--version", "3.9.2", "--transaction-version", "2")
    assert refused.exit_code == ExitCode.USAGE
    assert refused.stderr == "txnbridge: transaction_version is 2; known: none for this version\n"


@pytest.mark.usefixtures("home")
def test_an_unexpected_error_shows_its_traceback_with_debug(invoke, monkeypatch):
    monkeypatch.setattr(_detached, "find", raising(ZeroDivisionError("secret")))
    assert "secret" not in invoke("status").stderr
    assert "secret" in invoke("status", "--debug").stderr
