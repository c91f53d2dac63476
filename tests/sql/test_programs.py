"""The programs of docs/databases-programs.md run as they stand there: each row has its message once, whatever dies."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import sqlalchemy as sa

import txnbridge
from tests.house.rooms import ROOT

pytestmark = pytest.mark.full
KILLED = 9
# `run` puts this before the code of each test: the program is imported, and may be told to die.
PRELUDE = f"""
import os, time
import txnbridge
import txnbridge.testing

def die_at(event, phase):
    def listener(each):
        if (each.name, each.phase) == (event, phase):
            os._exit({KILLED})
    return txnbridge.testing.listening(listener)

def wait(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
"""


class Program:
    """One program of the page, in a folder of its own, with a database and a broker."""

    def __init__(self, heading, folder, database) -> None:
        (folder / "shop.py").write_text((ROOT / "docs" / "programs" / f"{heading.lower()}_shop.py").read_text())
        self.folder, self.database, self.url = folder, database, f"embedded:{folder / 'broker.db'}"
        self.environment = {**os.environ, "DATABASE_URL": database, "TXNBRIDGE_URL": self.url}

    def run(self, code, ends=0):
        """Run code in a process in which the program can be imported."""
        self.command(sys.executable, "-c", PRELUDE + code, ends=ends)

    def command(self, *command, ends=0):
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == ends, done.stderr

    def items(self):
        """Return the items of all orders, after a check that each has its message, once."""
        engine = sa.create_engine(self.database)
        with engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT id, item FROM orders")).all()
        engine.dispose()
        with txnbridge.connect(self.url) as bridge:
            messages = bridge.read(txnbridge.Topic("orders", txnbridge.codecs.json), 1000)
        assert Counter((each.value["id"], each.value["item"]) for each in messages) == Counter(map(tuple, rows))
        return sorted(item for _, item in rows)


@pytest.fixture
def program(new_database, tmp_path):
    def make(heading, *packages):
        for package in packages:
            pytest.importorskip(package, reason=f"needs the extra docs-programs: no {package}")
        return Program(heading, tmp_path, new_database())

    return make


def test_a_server_of_fastapi_publishes_the_orders_that_it_has_taken(program):
    shop = program("FastAPI", "fastapi", "httpx")
    shop.run(
        """
from fastapi.testclient import TestClient
import shop
with die_at("resolve", "before"), TestClient(shop.app) as client:
    client.post("/orders/book")
    time.sleep(60)
""",
        ends=KILLED,
    )
    shop.run(
        """
from fastapi.testclient import TestClient
import shop
with TestClient(shop.app, raise_server_exceptions=False) as client:
    assert [client.post(f"/orders/{item}").status_code for item in ("pen", "book", "ink")] == [200, 500, 200]
    wait(lambda: shop.app.state.relay.lag == 0 and client.get("/health").status_code == 200)
"""
    )
    assert shop.items() == ["book", "ink", "pen"]


def test_a_server_of_fastapi_does_not_take_an_order_whose_commit_fails(program):
    shop = program("FastAPI", "fastapi", "httpx")
    shop.run(
        """
from fastapi.testclient import TestClient
import sqlalchemy as sa, shop
def fail(session): raise RuntimeError("a test says so")
with TestClient(shop.app, raise_server_exceptions=False) as client:
    sa.event.listen(shop.orm.Session, "before_commit", fail)
    assert client.post("/orders/book").status_code == 500
    sa.event.remove(shop.orm.Session, "before_commit", fail)
    assert client.post("/orders/pen").status_code == 200
    wait(lambda: shop.app.state.relay.lag == 0)
"""
    )
    assert shop.items() == ["pen"]


def test_a_view_of_django_stores_an_order_and_its_message_or_neither(program):
    shop = program("Django", "django")
    shop.run(
        """
import shop
from django.test import Client
shop.create_tables()
client = Client(raise_request_exception=False)
assert [client.get(f"/orders/{item}").status_code for item in ("pen", "pen", "ink")] == [200, 500, 200]

def undone(item):
    order = shop.Order.objects.create(item=item)
    shop.send(shop.orders, {"id": order.id, "item": item}, key=item)
    raise RuntimeError("a test says so")

for savepoint in (False, True):
    try:
        with shop.transaction.atomic():
            if not savepoint:
                undone("never")
            client.get("/orders/cap")
            try:
                with shop.transaction.atomic():
                    undone("never")
            except RuntimeError:
                pass
    except RuntimeError:
        pass
try:
    shop.send(shop.orders, "never")
except shop.transaction.TransactionManagementError:
    pass
else:
    raise AssertionError("a message was sent outside a transaction")
with shop.transaction.atomic():
    client.get("/orders/fig")
    os._exit(9)
""",
        ends=KILLED,
    )
    shop.run(
        f"""
import shop
with txnbridge.connect() as bridge, bridge.relay(shop.outbox, "{shop.database}") as relay:
    wait(lambda: relay.lag == 0)
"""
    )
    assert shop.items() == ["cap", "ink", "pen"]


KILLING = """
import os, signal
import shop
from sqlalchemy import event, orm

app = shop.app
app.conf.broker_transport_options = {"data_folder_in": "queue", "data_folder_out": "queue", "control_folder": "control"}

def die_once(session, when):
    if when in session.info["items"] and not os.path.exists(when):
        open(when, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

@event.listens_for(orm.Session, "before_commit")
def before(session):
    session.info["items"] = [each.item for each in session.new if isinstance(each, shop.Order)]
    die_once(session, "before")

@event.listens_for(orm.Session, "after_commit")
def behind(session):
    die_once(session, "behind")
"""


def test_a_task_of_celery_whose_process_is_killed_before_or_behind_its_commit_is_done_once(program):
    shop = program("Celery", "celery")
    for name in ("queue", "control"):
        (shop.folder / name).mkdir()
    shop.environment |= {"CELERY_BROKER_URL": "filesystem://"}
    (shop.folder / "killing.py").write_text(KILLING)
    shop.run(
        """
import subprocess, sys
import killing, shop
shop.Base.metadata.create_all(shop.engine)
for number, item in enumerate(["book", "before", "pen", "behind", "ink"]):
    shop.take_order.delay(number, item)
shop.take_order.delay(0, "book")
command = [sys.executable, "-m", "celery", "-A", "killing", "worker", "-c", "2", "-l", "INFO"]
with open("log", "w") as log, txnbridge.connect() as bridge:
    worker = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait(lambda: open("log").read().count("succeeded in") == 6)
        wait(lambda: len(bridge.read("orders", 10)) == 5)
    finally:
        worker.terminate()
        worker.wait(30)
"""
    )
    assert (shop.folder / "before").exists() and (shop.folder / "behind").exists()
    assert shop.items() == ["before", "behind", "book", "ink", "pen"]
