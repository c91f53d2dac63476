"""The first program of each page runs as it stands there, in a fresh folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from txnbridge_conformance import brokers
from txnbridge_conformance.brokers._jars import java

import txnbridge
from tests.house.rooms import ROOT

# The page's first program, and what is then in the topic that it fills.
PAGES = {
    "index.md": ("shipments", [b"order 42"]),
    "guide.md": ("", []),
    "aio.md": ("shipments", [b"..."]),
    "embedded.md": ("orders", [b"order 42"]),
    "half-messages.md": ("orders", [b"a pen"]),
    "databases.md": ("", []),
    "decisions.md": ("", []),
    "processor.md": ("shipments", [b'{"order":42}']),
}


def first_program(page: str) -> str:
    found = re.search(r"^```python\n(.+?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return re.sub(r'--8<-- "(.+)"\n', lambda file: (ROOT / file[1]).read_text(), found[1])


def run(source: str, folder: Path) -> str:
    """Run a program in a folder, as the user would who has pasted it into a file; return what it prints."""
    (folder / "program.py").write_text(source)
    unset = ("PYSPARK_PYTHON", "TXNBRIDGE_URL", "DATABASE_URL")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_first_program_of_a_page_runs_in_a_fresh_folder(page, tmp_path):
    run(first_program(page), tmp_path)
    topic, values = PAGES[page]
    if topic:
        with txnbridge.connect(f"embedded:{next(tmp_path.glob('*.db'))}?create=false") as bridge:
            assert [message.value for message in bridge.read(topic, 10)] == values


def test_the_server_of_fastapi_runs_in_a_fresh_folder(tmp_path):
    pytest.importorskip("fastapi", reason="needs the extra docs-programs")
    taken = """
from fastapi.testclient import TestClient
import time
with TestClient(app) as client:
    assert client.post("/orders/pen").json() == 1
    while app.state.relay.lag != 0:
        time.sleep(0.05)
"""
    run(first_program("databases-programs.md") + taken, tmp_path)
    with txnbridge.connect(f"embedded:{tmp_path}/broker.db") as bridge:
        assert [message.key for message in bridge.read("orders", 10)] == [b"pen"]


@pytest.mark.live
def test_the_first_program_of_spark_runs_in_a_virtual_environment_that_is_not_active(tmp_path, monkeypatch):
    pytest.importorskip("pyspark", reason="needs PySpark")
    try:
        java()
    except brokers.ToolMissing as error:
        pytest.skip(f"Spark needs Java: {error}")
    path = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(each for each in path if not each.startswith(sys.prefix)))
    assert "|orders|" in run(first_program("spark.md"), tmp_path).replace(" ", "")


def test_a_program_without_pyspark_keeps_its_environment(tmp_path):
    program = """
import os
import txnbridge
txnbridge.connect("embedded:shop.db").close()
import pyspark_txnbridge
assert "PYSPARK_PYTHON" not in os.environ
"""
    run(program, tmp_path)
