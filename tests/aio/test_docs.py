"""The programs of docs/aio.md do what the page says."""

from __future__ import annotations

import re
import textwrap

import anyio
import pytest

import txnbridge
from tests.house.rooms import ROOT
from tests.in_time import wait_until

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "aio.md").read_text(), re.DOTALL)


def test_the_first_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec("async def program():\n" + textwrap.indent(PROGRAMS[0], "    "), names)
    anyio.run(names["program"])  # type: ignore[arg-type]
    with txnbridge.connect("embedded:shop.db") as bridge:
        assert [message.key for message in bridge.read("shipments", 10)] == [b"42"]


def test_the_web_service_takes_orders_and_ships_them(tmp_path, monkeypatch):
    testclient = pytest.importorskip("fastapi.testclient")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "shop"}
    exec(PROGRAMS[1], names)
    with testclient.TestClient(names["app"]) as client, txnbridge.connect("embedded:shop.db") as bridge:
        assert client.post("/orders/42").json() == "committed"
        wait_until(lambda: [message.value for message in bridge.read("shipments", 10)] == [b"order 42"])
