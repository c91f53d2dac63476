"""The programs of docs/applications.md run as they stand there."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

import txnbridge
from tests.house.rooms import ROOT


@pytest.fixture
def folder(tmp_path):
    """A folder with all programs of the page."""
    page = (ROOT / "docs" / "applications.md").read_text()
    for name, source in re.findall(r"^```python\n# (\w+\.py)\n(.+?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(source)
    return tmp_path


def send(url, *values) -> None:
    with txnbridge.connect(url) as bridge:
        bridge.ensure_topics("audit", "letters", "priced")
        with bridge.transaction() as txn:
            for value in values:
                txn.send("orders", json.dumps(value).encode(), key="k")


def read(url, topic) -> list[bytes | None]:
    with txnbridge.connect(url) as bridge:
        return [message.value for message in bridge.read(topic, 100)]


def run(folder, program, done) -> None:
    """Run a program until `done()` is true, then stop it by SIGTERM."""
    with subprocess.Popen([sys.executable, program], cwd=folder) as process:
        try:
            until = time.monotonic() + 60
            while not done():
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_shop_ships_bills_and_notes_each_order(folder):
    url = f"embedded:{folder}/shop.db"
    send(url, {"id": 1, "item": "pen"}, {"id": 2, "item": ""})
    run(folder, "shop.py", lambda: read(url, "letters") and len(read(url, "audit")) == 2)
    assert read(url, "shipments") == [b'{"order":1,"item":"pen"}']
    assert read(url, "bills") == [b'{"order":1}']
    assert read(url, "letters") == [b"Your pen is on its way."]
    assert read(url, "orders-dead") == [b'{"id": 2, "item": ""}']


def test_the_prices_come_from_what_the_lifespan_opened(folder):
    with sqlite3.connect(folder / "prices.db") as prices:
        prices.execute("CREATE TABLE prices (item TEXT, price INTEGER)")
        prices.execute("INSERT INTO prices VALUES ('pen', 3)")
    prices.close()
    url = f"embedded:{folder}/shop.db"
    send(url, {"item": "pen"})
    run(folder, "prices.py", lambda: read(url, "priced"))
    assert read(url, "priced") == [b'{"item":"pen","price":3}']


def test_the_tests_of_the_documented_service_pass(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    for _ in range(2):  # the second run finds nothing of the first
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
