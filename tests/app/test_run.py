"""`txnbridge run` with an application: processes that die, stop and answer health checks, and each input once."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import txnbridge
from tests.failing import raising
from tests.in_time import wait_until
from txnbridge.cli import _supervisor, main
from txnbridge.cli._health import health, serving
from txnbridge.cli._supervisor import Worker, WorkerSupervisor

SHOP = """
import asyncio, os, sys, time
import txnbridge

app = txnbridge.App(stop_timeout=2)

@app.process("orders", group="shipping", to="shipments", max_messages=8)
def ship(order: bytes) -> bytes:
    time.sleep(0.002)  # so that most kills hit a transaction
    if order == b"100":
        print("in the middle", flush=True)
        time.sleep(0.3)  # for the kill
    return order

@app.process("shipments", group="billing", to="bills", max_messages=8)
async def bill(shipment: bytes) -> bytes:
    await asyncio.sleep(0.002)
    return shipment

@app.process("orders", group="audit", to="audit", max_messages=8)
async def note(order: bytes, txn):
    yield order
    await asyncio.sleep(0.002)

# Each of the others does one thing with a message.
def one(function, **options):
    app = txnbridge.App(**{"stop_timeout": 0.5, "hang_after": 0.3, **options})
    app.process("orders", group="one")(function)
    return app

async def wait(order):
    print("here", flush=True)
    await asyncio.sleep(60)

def hang(order):
    print("here", flush=True)
    time.sleep(60)

def refuse(order):
    raise txnbridge.Poison("a test says so")

def finish(order):
    finishing.stop()

def die(order):
    os.kill(os.getpid(), 35)  # a real-time signal, which has no name

def leave(order):
    sys.exit()

def rest(order):
    resting.pause("rest")

waiting, hanging, refusing, finishing = map(one, (wait, hang, refuse, finish))
dying, resting, leaving = map(one, (die, rest, leave))
def finish_slowly(order):
    print("here", flush=True)
    time.sleep(0.4)
    return order

slow = txnbridge.App()
slow.process("orders", group="slow", to="shipments")(finish_slowly)
nowhere = txnbridge.App(stop_timeout=0.5, create_topics=0)
nowhere.process("missing", group="g")(hang)
nowhere.process("orders", group="one")(wait)
owner = one(wait, transactional_id="shop")
empty = txnbridge.App()

def without_database(app):
    raise ValueError("no database")
    yield

lifeless = one(wait, lifespan=without_database)
"""


class Service:
    """A process of `txnbridge run`."""

    def __init__(self, folder: Path, target: str, *options: str) -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "txnbridge.cli", "run", target, *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # its workers then stop by themselves
        self.process.communicate()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def get(self, path: str) -> tuple[int, Any]:
        try:
            return 200, json.loads(self.text(path))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error) if error.code == 503 else None

    def text(self, path: str) -> str:
        (port,) = re.findall(r"on port (\d+)", self.log.read_text())[-1:]
        with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=10) as answer:
            return str(answer.read(), "utf-8")

    def is_ready(self) -> bool:
        return "on port" in self.log.read_text() and self.get("/readyz")[0] == 200

    def workers(self) -> list[int]:
        return [worker["pid"] for worker in self.get("/readyz")[1]["workers"] if worker["pid"]]

    def stop(self, *signals: int) -> int:
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
            time.sleep(0.3)
        return self.end()

    def end(self) -> int:
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.fixture
def orders(url):
    """A function that sends orders."""
    with txnbridge.connect(url) as bridge:
        for topic in ("orders", "shipments", "bills", "audit"):
            bridge.admin.create_topic(topic, 4)

        def send(*orders: bytes) -> None:
            with bridge.transaction() as txn:
                for number, order in enumerate(orders):
                    txn.send("orders", order, partition=number % 4)

        yield send


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sent(url, topic) -> list[Any]:
    with txnbridge.connect(url) as bridge:
        return [message.value for message in bridge.read(topic, 10_000)]


def test_killed_in_the_middle_and_run_again_each_function_processes_each_order_once(folder, url, orders):
    fed = [b"%d" % number for number in range(500)]
    with Service(folder, "shop:app", "--workers", "2", "--health-port", "0") as first:
        wait_until(first.is_ready)
        workers = first.workers()
        orders(*fed[:400])
        assert first.line() == "in the middle\n"
        first.kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    assert 0 < len(sent(url, "shipments")) < 400
    with Service(folder, "shop:app", "--workers", "2", "--health-port", "0") as second:
        wait_until(second.is_ready)
        one, other = second.workers()
        orders(*fed[400:])
        os.kill(one, signal.SIGKILL)
        wait_until(lambda: not second.is_ready())
        assert second.get("/healthz")[0] == 200
        wait_until(lambda: one not in second.workers() and second.is_ready())  # another one has taken its place
        assert other in second.workers()
        wait_until(lambda: all(len(sent(url, topic)) >= len(fed) for topic in ("bills", "audit")))
        assert second.get("/elsewhere") == (404, None)
        assert second.stop() == 0
    for topic in ("shipments", "bills", "audit"):
        assert Counter(sent(url, topic)) == Counter(fed)
    assert f"(pid {one}) died (signal SIGKILL); it is started again in 0.5 s" in second.log.read_text()
    for number in (1, 2):
        assert f" worker {number}: group 'shipping': joined" in second.log.read_text()


def test_a_stop_cancels_what_waits_and_is_not_ready_meanwhile(folder, orders):
    orders(b"1")
    with Service(folder, "shop:waiting", "--health-port", "0") as service:
        assert service.line() == "here\n"
        hanging = {"alive": False, "silent_workers": [], "hanging_functions": ["wait"]}
        wait_until(lambda: service.get("/healthz") == (503, hanging))  # `hang_after`
        wait_until(service.is_ready)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not service.is_ready())
        assert service.end() == 0


def test_a_function_that_is_paused_is_ready_and_told_to_be_paused(folder, orders):
    orders(b"1")
    with Service(folder, "shop:resting", "--health-port", "0") as service:
        wait_until(service.is_ready)
        wait_until(lambda: service.get("/readyz")[1]["workers"][0]["functions"]["rest"]["paused"])
        assert service.is_ready() and service.stop() == 0


def test_signals_to_all_processes_of_a_service_let_the_service_finish_too(folder, url, orders):
    orders(b"1")
    with Service(folder, "shop:slow", "--health-port", "0") as service:
        assert service.line() == "here\n"
        (pid,) = service.workers()
        os.kill(pid, signal.SIGTERM)
        assert service.stop() == 0
    assert sent(url, "shipments") == [b"1"]


@pytest.mark.parametrize(
    ("target", "signals", "code", "text"),
    [
        ("hanging", [signal.SIGTERM], 1, "did not end within 0.5 s after the stop"),
        ("hanging", [signal.SIGINT, signal.SIGTERM], 143, ""),
        ("slow --until-idle", [signal.SIGTERM], 143, ""),  # perhaps something is left
        ("refusing", [], 1, "a test says so"),
        ("finishing", [], 0, "the application has stopped itself"),
        ("leaving", [], 1, "a function has called sys.exit()"),
        ("nowhere", [], 3, "missing"),
        ("empty", [], 2, "no functions"),
        ("lifeless", [], 3, 'in without_database\n    raise ValueError("no database")\nValueError: no database\n'),
    ],
)
def test_the_exit_code_of_a_service_tells_why_it_ended(folder, orders, target, signals, code, text):
    orders(b"1")
    with Service(folder, *f"shop:{target}".split()) as service:
        if signals:
            assert service.line() == "here\n"
        assert (service.stop(*signals) if signals else service.end()) == code
    assert text in service.log.read_text()


def test_a_worker_stops_if_its_supervisor_is_killed(folder, orders):
    with Service(folder, "shop:waiting", "--health-port", "0") as service:
        wait_until(service.is_ready)
        (pid,) = service.workers()
        service.kill()
        wait_until(lambda: not exists(pid))


def test_prometheus_reads_the_metrics_of_all_workers_together(folder, orders):
    orders(*[b"%d" % number for number in range(20)])

    def scraped(service: Service) -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(service.text("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return {(each.name, each.labels.get("group", each.labels.get("state", ""))): each.value for each in samples}

    with Service(folder, "shop:app", "--workers", "2", "--health-port", "0") as service:
        wait_until(service.is_ready)
        names = ("shipping", "billing", "audit")
        wait_until(
            lambda: all(scraped(service).get(("txnbridge_processor_messages_total", name)) == 20 for name in names)
        )
        wait_until(lambda: ("txnbridge_open_transactions", "prepared") in scraped(service))
        wait_until(lambda: scraped(service)["txnbridge_processor_healthy", "audit"] == 2)  # one in each worker
        found = scraped(service)
        transactions = sum(found["txnbridge_processor_transactions_total", name] for name in names)
        assert found["txnbridge_transactions_total", "committed"] >= transactions
        assert found["txnbridge_transaction_seconds_count", ""] >= transactions
        pids = service.workers()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: service.is_ready() and not set(service.workers()) & set(pids))
        # A counter that goes down is taken for one that begins anew, so the counts of other workers would count twice.
        assert all(scraped(service)["txnbridge_processor_messages_total", name] == 20 for name in names)
        wait_until(lambda: scraped(service).get(("txnbridge_processor_healthy", "audit")) == 2)
        assert service.stop() == 0


def test_a_changed_file_starts_a_service_with_reload_anew(folder, url, orders):
    orders(b"1")
    with Service(folder, "shop:app", "--reload", "--health-port", "0") as service:
        wait_until(lambda: sent(url, "bills") == [b"1"])
        (folder / "shop.py").write_text("no python")
        wait_until(lambda: "starts again when one of its files has changed" in service.log.read_text())
        (folder / "shop.py").write_text(SHOP.replace("return order", "return order * 2"))
        orders(b"2")
        wait_until(lambda: sorted(sent(url, "bills")) == [b"1", b"22"])
        assert service.stop() == 0


@pytest.fixture
def supervised():
    """A supervisor and its only worker, which hangs once it is started."""
    supervisor = WorkerSupervisor([sys.executable, "-c", "import time; time.sleep(600)"], 1, stop_timeout=0.1)
    (worker,) = supervisor._workers
    yield supervisor, worker
    worker.kill()


def look_until(supervisor, condition):
    def looked():
        supervisor._look()
        return condition()

    wait_until(looked)


def test_a_worker_that_does_not_stop_for_a_changed_file_is_killed_and_started_anew(supervised, monkeypatch):
    monkeypatch.setattr(_supervisor, "_CLOSING_SECONDS", 0.0)
    supervisor, worker = supervised
    worker.start()
    first = worker.status["pid"]
    supervisor._renew()

    look_until(supervisor, lambda: worker.status["pid"] not in (None, first))
    assert not exists(first)


def test_a_worker_that_hangs_is_neither_alive_nor_ready(supervised):
    supervisor, worker = supervised
    worker.start()
    worker._told = {"ready": True}
    assert (supervisor.alive().status, supervisor.ready().status) == (200, 200)
    worker._heard -= 3600
    assert (supervisor.alive().status, supervisor.ready().status) == (503, 503)


def test_a_worker_that_cannot_be_started_again_is_tried_later(tmp_path):
    program = tmp_path / "python"
    supervisor = WorkerSupervisor([str(program), "-c", "import time; time.sleep(600)"], 1, stop_timeout=0.1)
    (worker,) = supervisor._workers
    open_files = os.listdir("/dev/fd")
    supervisor._start_again(worker)
    assert worker.start_at is not None and not worker.runs
    assert os.listdir("/dev/fd") == open_files
    program.symlink_to(sys.executable)
    look_until(supervisor, lambda: worker.runs)
    worker.kill()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_health_checks_are_answered_only_at_the_given_address(host, capsys, monkeypatch):
    monkeypatch.setattr(
        socket, "getfqdn", raising(AssertionError("a DNS that does not answer would hold up the start"))
    )
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with serving(host, 0, {"/": lambda: health(True, {})}) as port:
        with socket.create_connection((host, port)) as gone:  # a probe of the port only, which resets the connection
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection((host, port)) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.0 200")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2" if host != "::1" else "127.0.0.1", port)).close()
        wait_until(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
    assert capsys.readouterr().err == ""


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_waits_before_a_worker_is_started_again_grow(folder, orders):
    worker = Worker([], 1, measure=False, alone=True)
    worker._started = time.monotonic()
    assert [worker.start_later() for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    orders(b"1")
    with Service(folder, "shop:dying") as service:
        wait_until(lambda: "again in 1.0 s" in service.log.read_text())
        assert service.stop() == 0
    assert "died (signal 35); it is started again in 0.5 s" in service.log.read_text()


def test_run_until_idle_stays_in_its_own_process_and_tells_what_each_function_did(
    folder, url, orders, monkeypatch, own_path
):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TXNBRIDGE_URL")
    orders(b"1", b"2")
    result = CliRunner().invoke(main, ["run", "shop:app", "--until-idle", "--json", "--url", url])
    did = json.loads(result.stdout).items()
    assert {name: counts["messages"] for name, counts in did} == {"ship": 2, "bill": 2, "note": 2}
    for target, code in (("nowhere", 3), ("empty", 2)):
        assert CliRunner().invoke(main, ["run", f"shop:{target}", "--until-idle", "--url", url]).exit_code == code
    result = CliRunner().invoke(main, ["run", "shop:refusing", "--until-idle", "--url", url])
    assert (result.exit_code, result.stdout) == (1, "refuse: 0 messages in 0 transactions, 0 dead letters, 0 retries\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["shop:owner", "--workers", "2"], "workers with one transactional_id would fence each other"),
        (["shop:app", "--workers", "2", "--until-idle"], "not with --until-idle"),
        (["shop:hang", "--reload"], "are for an App"),
        (["shop:app", "--health-host", "::1"], "--health-host is for --health-port"),
        (["shop:app", "--health-port", "0", "--health-host", "a" * 64], "--health-host is no name of a host"),
    ],
)
def test_wrong_options_are_refused(folder, monkeypatch, own_path, arguments, sentence):
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["run", *arguments])
    sys.modules.pop("shop")
    assert result.exit_code == 2
    assert sentence in result.stderr
