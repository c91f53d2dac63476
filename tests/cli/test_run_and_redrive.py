from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.core.processor_kit import send, values

SHOP = """
import os, signal, sys, time
import txnbridge

def ship(message, txn):
    if message.value == b"stop":
        os.kill(os.getpid(), signal.SIGTERM)
    if message.value == b"hang":
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    if message.value == b"bad":
        raise txnbridge.Poison("no such customer")
    if message.value == b"fail":
        raise ValueError("secret")
    if message.value == b"leave":
        sys.exit()
    txn.send("shipments", message.value)

def shipping(bridge):
    return bridge.processor("orders", group="shipping", each=ship, dead_letter="orders-dead")

def strict(bridge):
    return bridge.processor("orders", group="shipping", each=ship, retry_for=0)

class nested:
    shipping = staticmethod(shipping)

def nothing(bridge):
    return None

number = 3
"""
READY = """
import shop, txnbridge
bridge = txnbridge.connect("{url}")
processor = shop.shipping(bridge)
"""


@pytest.fixture
def shop(tmp_path, monkeypatch, own_path) -> Iterator[Path]:
    """The current folder, with a program in it."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "shop.py").write_text(SHOP)
    monkeypatch.chdir(folder)
    for name in ("shop", "ready", "broken"):  # other tests have modules of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield folder
    if ready := sys.modules.get("ready"):
        ready.bridge.close()
    for name in ("shop", "ready", "broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def orders(bridge):
    bridge.admin.create_topic("shipments")

    return partial(send, bridge, "orders")


def test_run_runs_a_processor_that_a_function_makes(invoke, bridge, shop, orders):
    orders(b"1", b"bad", b"2")
    result = invoke("run", "shop:shipping", "--until-idle")
    assert result.exit_code == 0, result.output
    assert result.stdout == "3 messages in 1 transactions, 1 dead letters, 0 retries\n"
    assert values(bridge, "shipments") == [b"1", b"2"]
    orders(b"3")
    result = invoke("run", "shop:shipping", "--until-idle", "--json")
    no_failures = {"dead_letters": 0, "delayed": 0, "retries": 0, "last_error": None}
    assert json.loads(result.stdout) == {"messages": 1, "transactions": 1, **no_failures}


def test_run_tells_what_its_group_does(url, shop, orders):
    orders(b"1")
    command = [sys.executable, "-m", "txnbridge.cli", "run", "shop:shipping", "--until-idle"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    assert told == [
        "group 'shipping': joined",
        "group 'shipping': orders[0] is read here, from 0 on",
        "group 'shipping': left",
    ]


@pytest.mark.parametrize("target", ["shop:nested.shipping", "ready:processor"])
def test_run_finds_a_processor_inside_a_class_or_ready_made(invoke, bridge, url, shop, orders, target):
    (shop / "ready.py").write_text(READY.format(url=url))
    orders(b"1")
    assert invoke("run", target, "--until-idle").exit_code == 0
    assert values(bridge, "shipments") == [b"1"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("shop", "is not MODULE:NAME"),
        ("shop:", "is not MODULE:NAME"),
        ("shopp:shipping", "there is no module 'shopp'"),
        ("shop.inner:shipping", "there is no module 'shop.inner'"),
        ("shop.py:shipping", "there is no module 'shop.py' in the current folder or installed; write shop:…"),
        ("shop:shiping", "module shop has no 'shiping'"),
        ("shop:number", "shop:number is int, neither"),
        ("shop:nothing", "shop:nothing returned NoneType"),
    ],
)
def test_run_says_what_is_wrong_with_its_argument(refused, url, shop, target, message):
    assert message in refused("run", target)


@pytest.mark.parametrize(
    ("line", "frames", "reason"),
    [
        ("import no_such_thing", 1, "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("f = lambda: missing\nf()", 2, "NameError: name 'missing' is not defined"),
        ("def ship(:", 1, "SyntaxError: "),
        ("import txnbridge\ntxnbridge.App().process('orders', 'g')", 1, "TypeError: Router.process() takes "),
    ],
)
def test_an_error_in_the_module_is_told_with_the_frames_of_the_module(refused, url, shop, line, frames, reason):
    (shop / "broken.py").write_text(f"{line}\n")
    for command in (["run"], ["app", "describe"]):
        told = refused(*command, "broken:shipping")
        assert len(re.findall(r'^  File "', told, re.MULTILINE)) == frames
        assert re.search(r'File ".*/broken.py", line \d', told)
        assert f"\ntxnbridge: module broken cannot be imported: {reason}" in told


@pytest.mark.parametrize(
    ("value", "told"), [(b"bad", "no such customer"), (b"fail", "ValueError at"), (b"leave", "has called sys.exit()")]
)
def test_run_without_a_dead_letter_topic_tells_the_reason_of_poison_and_the_place_of_an_error(
    invoke, url, shop, orders, value, told
):
    orders(value)
    result = invoke("run", "shop:strict", "--until-idle")
    assert result.exit_code == 1
    assert told in result.output
    assert "0 messages" in result.stdout and "secret" not in result.output


@pytest.mark.parametrize(
    ("value", "options", "code", "shipped"),
    [(b"stop", [], 0, [b"stop"]), (b"stop", ["--until-idle"], 143, [b"stop"]), (b"hang", [], 143, [])],
)
def test_a_signal_stops_run_gently_and_a_second_one_at_once(url, bridge, shop, orders, value, options, code, shipped):
    orders(value)
    command = [sys.executable, "-m", "txnbridge.cli", "run", "shop:shipping", *options]
    run = subprocess.run(command, cwd=shop, env=os.environ | {"TXNBRIDGE_URL": url}, timeout=60)
    assert run.returncode == code
    assert values(bridge, "shipments") == shipped


@pytest.fixture
def dead_letters(bridge, orders) -> None:
    from txnbridge import Poison

    def refuse(message, txn):
        raise Poison("too old" if int(message.value) % 2 else "too new")

    orders(*(b"%d" % number for number in range(4)))
    bridge.processor("orders", group="shipping", each=refuse, dead_letter="orders-dead").run(until_idle=True)


def test_redrive_chooses_by_reason_and_limit(invoke, bridge, dead_letters):
    result = invoke("redrive", "orders-dead", "--reason", "too old", "--limit", "1", "--json")
    assert json.loads(result.stdout) == {"sent": 1, "left": 1, "foreign": 0, "gone": 0}
    result = invoke("redrive", "orders-dead", "--reason", "too old")
    assert result.stdout == "sent back: 1\nleft, for another reason: 2\n"
    assert values(bridge, "orders")[4:] == [b"1", b"3"]


def test_redrive_for_one_group_says_to_which_topic_it_sends(invoke, bridge, dead_letters):
    bridge.admin.create_topic("shipping-retry-500ms")
    result = invoke("redrive", "orders-dead", "--group", "shipping", "--reason", "too old")
    assert result.stdout == "sent back: 2, to shipping-retry-500ms\nleft, for another reason or group: 2\n"
    assert values(bridge, "orders") == [b"0", b"1", b"2", b"3"]


def test_a_dry_run_shows_dead_letters_and_changes_nothing(invoke, bridge, dead_letters):
    result = invoke("redrive", "orders-dead", "--dry-run")
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if "too old" in line]
    assert [row.split()[:6] for row in rows] == [
        ["orders-dead[0]", "1", "orders[0]", "1", "shipping", "1"],
        ["orders-dead[0]", "3", "orders[0]", "3", "shipping", "1"],
    ]
    found = [json.loads(line) for line in invoke("redrive", "orders-dead", "--dry-run", "--json").stdout.splitlines()]
    assert len(found) == 4
    assert found[1]["dead_letter"] == {"partition": 0, "position": [1]}
    assert (found[1]["topic"], found[1]["group"], found[1]["reason"]) == ("orders", "shipping", "too old")
    assert values(bridge, "orders") == [b"0", b"1", b"2", b"3"]
    assert invoke("redrive", "orders-dead").stdout == "sent back: 4\n"
    assert values(bridge, "orders") == [b"0", b"1", b"2", b"3"] * 2


def test_a_strange_dead_letter_neither_steers_the_terminal_nor_ends_the_list(invoke, bridge):
    headers = {f"txnbridge-dead-{name}": "1" for name in ("partition", "timestamp", "attempts")}
    headers |= {"txnbridge-dead-topic": "orders", "txnbridge-dead-position": "[1]", "txnbridge-dead-reason": "\x1b[2J"}
    headers |= {"txnbridge-dead-group": "shipping"}
    send(bridge, "orders-dead", b"", headers=headers, timestamp=1 << 62)
    shown = invoke("redrive", "orders-dead", "--dry-run").stdout
    assert "[2J" in shown
    assert "\x1b" not in shown
