"""The files of docs/deployment.md fit the command line, the metrics and the application's times."""

from __future__ import annotations

import re
from threading import Event
from typing import Any

import click
import pytest
from txnbridge_conformance.observing import eventually, patience

import txnbridge
from tests.house.rooms import ROOT
from txnbridge import App
from txnbridge._metrics import DEFINITIONS
from txnbridge.cli import main

yaml = pytest.importorskip("yaml", reason="needs the extra docs")
DOCS = ROOT / "docs"
# The time after `stop_timeout` after which a process is killed.
KILLED_AFTER = 10


def parses(arguments: list[str]) -> bool:
    """Return whether the command line takes these arguments of `txnbridge`, without running the command."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments.pop(0))
        assert found is not None
        command = found
    command.make_context("test", [*arguments, "--database", "sqlite:///x.db"] if "--outbox" in arguments else arguments)
    return True


def test_the_commands_and_the_grace_period_for_kubernetes_fit():
    deployments = list(yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text()))
    pods = [each["spec"]["template"]["spec"] for each in deployments]
    assert len(pods) == 3
    assert all(parses(pod["containers"][0]["command"][1:]) for pod in pods)
    assert pods[0]["terminationGracePeriodSeconds"] > App().stop_timeout + KILLED_AFTER


def test_the_command_of_a_broker_s_pipeline_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known.txt").touch()
    steps = yaml.safe_load((DOCS / "conformance-workflow.yaml").read_text())["jobs"]["run"]["steps"]
    (command,) = (each["run"] for each in steps if each.get("run", "").startswith("txnbridge "))
    assert parses(command.split()[1:])


def test_the_unit_of_systemd_fits():
    unit = re.findall(r"^```ini\n(.+?)^```$", (DOCS / "deployment.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert parses(unit.partition("bin/txnbridge ")[2].partition("\n")[0].split())
    assert int(unit.partition("TimeoutStopSec=")[2].split()[0]) > App().stop_timeout + KILLED_AFTER


def test_the_file_pauses_the_function_and_lets_it_go_on(tmp_path, monkeypatch):
    (recipe,) = re.findall(r"^```python\n(.+?)^```$", (DOCS / "deployment.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(recipe, names)
    paused = Event()

    class Watched(App):
        def pause(self, name: str) -> None:
            super().pause(name)
            paused.set()

    url = f"embedded:{tmp_path}/shop.db"
    app = Watched(url, lifespan=names["pauses"], create_topics=1)
    shipped: list[bytes] = []
    noted: list[bytes] = []

    @app.process("orders", group="shipping")
    def ship(order: bytes) -> None:
        shipped.append(order)

    @app.process("orders", group="audit")
    def note(order: bytes) -> None:
        noted.append(order)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pause-ship").touch()
    with app, txnbridge.connect(url) as bridge:
        assert paused.wait(patience())
        with bridge.transaction() as txn:
            txn.send("orders", b"an order")
        eventually(lambda: noted, "the other function goes on")
        assert shipped == []
        (tmp_path / "pause-ship").unlink()
        eventually(lambda: shipped == [b"an order"], "the function goes on")


def test_every_alert_is_on_a_metric_that_there_is():
    rules = yaml.safe_load((DOCS / "alert-rules.yaml").read_text())["groups"][0]["rules"]
    metrics = {name for rule in rules for name in re.findall(r"txnbridge_(\w+)", rule["expr"])}
    assert len(rules) > 5 and metrics <= set(DEFINITIONS)
