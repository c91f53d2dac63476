"""The service of docs/tutorial.md, built as the page says: its tests pass, and it ships and bills each order once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from txnbridge_conformance.observing import eventually

import txnbridge
from tests.house.rooms import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = {"txnbridge": [sys.executable, "-m", "txnbridge.cli"], "python": [sys.executable]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def replace(path: Path, pattern: str, text: str) -> None:
    """Replace the one part of a file that a pattern finds."""
    changed, count = re.subn(pattern, lambda _: text, path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert count == 1
    path.write_text(changed)


class Shop:
    """The tutorial's folder, with the changes of its steps 2 to 4."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder / "my-shop", url
        self.environment = {**os.environ, "TXNBRIDGE_URL": url, "DATABASE_URL": f"sqlite:///{folder}/orders.db"}
        subprocess.run([*COMMANDS["txnbridge"], "new", "my-shop"], cwd=folder, check=True, capture_output=True)
        app = self.folder / "app.py"
        for block in blocks("python"):
            if file := re.match(r"# (\w+\.py)\n", block):
                (self.folder / file[1]).write_text(block)
            elif block.startswith("app = "):
                replace(app, r"^app = .+?\n", block)
            else:
                replace(app, r"^@app\.process\(\"orders\".+?(?=^\n\n)", block)
        replace(app, r"^import txnbridge\n", "import carrier\nimport txnbridge\nfrom orders import publish\n")

    def run(self, line: str) -> str:
        """Run a line of the page, and return what it prints."""
        program, *arguments = re.findall(r"'[^']*'|\S+", line)
        command = [*COMMANDS[program], *(each.strip("'") for each in arguments)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def service(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [*COMMANDS["txnbridge"], "run", "app:app", *options]
        with subprocess.Popen(command, cwd=self.folder, env=self.environment) as service:
            try:
                yield service
            finally:
                service.kill()

    def line(self, start: str) -> str:
        """Run the line of the page that starts so."""
        (found,) = {
            each for each in re.findall(r"^[^\n]+$|(?<=; )[^;\n]+", PAGE, re.MULTILINE) if each.startswith(start)
        }
        return self.run(found)

    def bills(self) -> list[int]:
        with txnbridge.connect(self.url) as bridge:
            topic = txnbridge.Topic("bills", txnbridge.codecs.json)
            return sorted(message.value["order"] for message in bridge.read(topic, 1000))


def test_the_tests_of_the_tutorial_pass(tmp_path):
    shop = Shop(tmp_path, f"embedded:{tmp_path}/my-shop.db")
    assert "4 passed" in shop.run("python -m pytest -q -p no:cacheprovider")


def live_through(shop: Shop, *options: str) -> None:
    """Go through steps 2, 3 and 5: the carrier is away and comes back, and orders come from the database."""
    with txnbridge.connect(shop.url) as bridge:
        bridge.ensure_topics("bills")
    shop.run("python orders.py")
    with shop.service(*options) as service:
        (shop.folder / "away").touch()
        shop.run("python orders.py pen ink")
        eventually(lambda: "ConnectionError" in shop.run("txnbridge retries list"), "an order waits")
        assert shop.bills() == []
        (shop.folder / "away").unlink()
        eventually(lambda: shop.bills() == [1, 2], "both orders are billed")
        assert "orders[0]" in shop.line("txnbridge groups show")
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    assert shop.bills() == [1, 2]


@pytest.mark.full
def test_the_service_of_the_tutorial_tries_again_and_bills_each_order_once_although_it_is_killed(tmp_path):
    shop = Shop(tmp_path, f"embedded:{tmp_path}/my-shop.db")
    live_through(shop)
    shop.run("python orders.py" + " pen" * 60)
    with shop.service() as service:
        eventually(lambda: len(shop.bills()) > 2, "the first orders are billed")
        service.kill()  # its worker then stops by itself
    shop.run("python orders.py" + " ink" * 40)
    with shop.service("--workers", "2"):
        eventually(lambda: len(shop.bills()) >= 102, "all orders are billed")
    assert shop.bills() == list(range(1, 103))


@pytest.mark.live
def test_the_service_of_the_tutorial_runs_on_kafka(tmp_path, start_kafka):
    live_through(Shop(tmp_path, start_kafka().url), "--workers", "2", "--health-port", "0")


def test_the_compose_file_of_the_tutorial_starts_the_service_last(tmp_path):
    yaml = pytest.importorskip("yaml")
    shop = Shop(tmp_path, "embedded:")
    text = (shop.folder / "compose.yaml").read_text()
    (added,) = blocks("yaml")
    (variables,) = re.findall(r"`(environment: \{<<.+?\})`", PAGE)
    (waits,) = re.findall(r"`(tables: \{condition.+?\})`", PAGE)
    head, service = text.split("  service:\n")
    service = re.sub(r"environment: .+", variables, service).replace("depends_on: {", "depends_on: {" + waits + ", ")
    services = yaml.safe_load(head + added + "\n  service:\n" + service)["services"]
    assert set(services) == {"kafka", "topics", "database", "tables", "service"}
    assert set(services["service"]["environment"]) == {"TXNBRIDGE_URL", "DATABASE_URL"}
    for name, each in services.items():
        assert set(each.get("depends_on", ())) <= set(services), name
    assert set(services["service"]["depends_on"]) == {"topics", "tables"}
