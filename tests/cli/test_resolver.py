"""`txnbridge resolver`: asking by a process of its own, and what was parked."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from txnbridge_conformance.observing import eventually

from tests.cli.conftest import Invoke, started
from txnbridge import Bridge, Decision, connect
from txnbridge.testing import Child

SHOP = """
from txnbridge import Decision

def was_booked(id, messages):
    return Decision.COMMIT if messages[0].value == b"booked" else Decision.ABORT
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"embedded:{tmp_path}/broker.db?half_check_seconds=0.1&half_checks=1"
    monkeypatch.setenv("TXNBRIDGE_URL", url)
    return url


def leave_undecided(bridge: Bridge, *values: bytes) -> list[str]:
    ids = []
    undecided = lambda *_: Decision.UNDECIDED  # noqa: E731
    with bridge.half_messages("shop", execute=undecided, check=undecided) as sales:
        sales.close()
        for value in values:
            with sales.transaction(timeout=2) as txn:
                txn.send("orders", value)
            ids.append(txn.id)
    return ids


def test_a_process_of_its_own_asks_until_it_is_stopped(url: str, bridge: Bridge, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    leave_undecided(bridge, b"booked", b"not booked")
    command = ["resolver", "run", "--group", "shop", "--check"]
    end_when_published(bridge, b"booked", *command, "shop:was_booked", cwd=tmp_path, stderr=subprocess.DEVNULL)
    missing = [sys.executable, "-m", "txnbridge.cli", *command, "shop:nothing"]
    done = subprocess.run(missing, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "has no 'nothing'" in done.stderr


def end_when_published(bridge: Bridge, value: bytes, *command: str, **options: Any) -> None:
    """Let a resolver of its own process publish a value, and stop it."""
    with started(*command, "--json", stdout=subprocess.PIPE, **options) as process:
        eventually(lambda: [m.value for m in bridge.read("orders", 10)] == [value], "it is published")
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(told)["committed"]) == (0, 1)


def sell_and_die(url: str, database: str) -> None:
    with connect(url) as bridge, bridge.transaction(db=sa.create_engine(database), group="shop", timeout=1) as txn:
        txn.send("orders", b"sold")


def test_the_rows_of_a_database_answer_for_a_process_that_died(url, bridge, tmp_path, invoke):
    database = f"sqlite:///{tmp_path}/shop.db"
    with Child(sell_and_die, url, database, kill="database.commit/after") as child:
        child.stopped()
    command = ["resolver", "run", "--group", "shop"]
    for wrong in ([], ["--check", "json:dumps", "--database", database]):
        assert "either --check or --database" in invoke(*command, *wrong).output
    end_when_published(bridge, b"sold", *command, env=os.environ | {"TXNBRIDGE_DATABASE": database})


def test_parked_half_messages_are_listed_resumed_and_ended(url: str, bridge: Bridge, invoke: Invoke) -> None:
    one, other = leave_undecided(bridge, b"one", b"other")
    with bridge.resolver("shop", check=lambda *_: Decision.UNDECIDED):
        eventually(lambda: len(bridge.admin.parked("shop")) == 2, "both are parked")
    listed = invoke("resolver", "parked", "--group", "shop")
    assert one in listed.stdout and other in listed.stdout and "orders" in listed.stdout
    found = json.loads(invoke("resolver", "parked", "--group", "shop", "--json").stdout)
    assert [(half["transaction"], half["messages"], half["checks"]) for half in found] == [(one, 1, 1), (other, 1, 1)]

    unsure = invoke("resolver", "commit", "--group", "shop", one)
    assert (unsure.exit_code, "--yes and --reason" in unsure.stdout) == (2, True)
    told = invoke("resolver", "commit", "--group", "shop", one, "--json")
    assert json.loads(told.stdout) == {"transaction": one, "would": "commit"}
    done = invoke("resolver", "commit", "--group", "shop", one, "--yes", "--reason", "paid")
    assert (done.exit_code, done.stdout.strip()) == (0, "committed")
    assert [m.value for m in bridge.read("orders", 10)] == [b"one"]
    resumed = invoke("resolver", "resume", "--group", "shop", other, "--json")
    assert json.loads(resumed.stdout) == {"transaction": other, "resumed": True}
    gone = invoke("resolver", "abort", "--group", "shop", other, "--yes", "--reason", "unpaid")
    assert (gone.exit_code, "is parked" in gone.stderr) == (2, True)
