"""The web service of docs/aio.md does what the page says."""

import re

import pytest

import txnbridge
from tests.house.rooms import ROOT
from tests.in_time import wait_until

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "aio.md").read_text(), re.DOTALL)


def test_the_web_service_takes_orders_and_ships_them(tmp_path, monkeypatch):
    testclient = pytest.importorskip("fastapi.testclient")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "shop"}
    exec(PROGRAMS[1], names)
    with testclient.TestClient(names["app"]) as client, txnbridge.connect("embedded:shop.db") as bridge:
        assert client.post("/orders/42").json() == "committed"
        wait_until(lambda: [message.value for message in bridge.read("shipments", 10)] == [b"order 42"])
