"""The programs of the cookbook and of the pages for users of other libraries run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import txnbridge
from tests.house.rooms import ROOT


class Programs:
    """The programs of a page in a folder of their own, with an embedded broker."""

    def __init__(self, page: str, folder: Path) -> None:
        text = (ROOT / "docs" / page).read_text()
        for name, source in re.findall(r"^```python\n# (\w+\.py)\n(.+?)^```$", text, re.MULTILINE | re.DOTALL):
            (folder / name).write_text(source)
        self.folder, self.url = folder, f"embedded:{folder}/shop.db"

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TXNBRIDGE_URL": self.url}
        command = [sys.executable, name, *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, name: str, *arguments: str) -> str:
        with self.start(name, *arguments) as process:
            out, errors = process.communicate(timeout=100)
        assert (process.returncode, errors) == (0, "")
        return out

    def values(self, topic: str) -> list[bytes | None]:
        with txnbridge.connect(self.url) as bridge:
            return [message.value for message in bridge.read(topic, 10_000)]


@pytest.fixture
def cookbook(tmp_path: Path) -> Programs:
    return Programs("cookbook.md", tmp_path)


@pytest.mark.full
def test_the_cron_job_imports_each_line_once_although_it_is_killed_and_the_file_grows(cookbook):
    lines = [b"%d" % number for number in range(5000)]
    path = cookbook.folder / "orders.csv"
    path.write_bytes(b"\n".join(lines[:4000]) + b"\n")
    with txnbridge.connect(cookbook.url) as bridge:
        bridge.ensure_topics("orders")
        with bridge.consumer("orders") as consumer, cookbook.start("import_orders.py", str(path)) as process:
            assert consumer.poll(1, 60)
            process.kill()
    path.write_bytes(b"\n".join(lines) + b"\n")
    cookbook.run("import_orders.py", str(path))
    cookbook.run("import_orders.py", str(path))
    assert cookbook.values("orders") == lines


def test_the_notebook_counts_what_it_reads(cookbook):
    with txnbridge.connect(cookbook.url) as bridge, bridge.transaction() as txn:
        txn.send_many("orders", [(b"1", "a"), (b"2", "b"), (b"3", "a")])
    assert "b'a'    2\nb'b'    1" in cookbook.run("notebook.py")


@pytest.mark.parametrize(
    ("wish", "outcome", "values"), [("yes", "committed", [b"4711 to Alice"]), ("no", "aborted", [])]
)
def test_a_proposed_payment_is_published_only_if_somebody_says_yes(cookbook, wish, outcome, values):
    token = cookbook.run("propose.py").strip()
    assert cookbook.values("payments") == []
    assert cookbook.run("decide.py", wish, token) == f"{outcome}\n"
    assert cookbook.run("decide.py", "no" if wish == "yes" else "yes", token) == f"{outcome}\n"
    assert cookbook.values("payments") == values


def test_the_service_for_users_of_faststream_ships_an_order(tmp_path):
    programs = Programs("from-faststream.md", tmp_path)
    with txnbridge.connect(programs.url) as bridge, bridge.transaction() as txn:
        txn.send("orders", b'{"id": 1}')
    run = "from shop import app; app.run(until_idle=True)"
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, check=True, timeout=100)
    assert programs.values("shipments") == [b'{"order":1}']
