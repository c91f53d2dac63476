"""`txnbridge top`: what waits, what is open, and what is wrong."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import txnbridge
from tests.conformance.broken import around
from tests.core.processor_kit import send
from tests.failing import raising
from txnbridge.cli.top import BrokerState, _rates
from txnbridge.spi import GroupInfo


def test_top_once_shows_lag_open_transactions_and_parked_half_messages(invoke, bridge):
    send(bridge, "orders", b"1", b"2", b"3")
    with bridge.consumer("orders", "shipping") as consumer, bridge.transaction() as txn:
        txn.ack(consumer.poll(1, 60))
    with bridge.transaction(prepare=True) as prepared:
        prepared.send("orders", b"4")
    found = json.loads(invoke("top", "--once", "--json", "--halves", "sales").stdout)
    assert found["groups"] == [{"group": "shipping", "members": 0, "lag": 2}]
    (transaction,) = found["transactions"]
    assert (transaction["transaction"], transaction["state"], transaction["messages"]) == (prepared.id, "prepared", 1)
    assert found["parked"] == {"sales": 0} and found["missing"] == [] and found["error"] is None
    shown = invoke("top", "--once").stdout
    assert "groups, by lag: 1" in shown and prepared.id in shown and "findings of the doctor: " in shown


def test_top_names_the_lists_that_the_broker_does_not_have(invoke, bridge, url, broken_broker):
    no = raising(txnbridge.NotSupported("no"))
    lacking = "--url", url.replace("embedded", broken_broker(Administering=around(groups=no, transactions=no)))
    assert json.loads(invoke("top", "--once", "--json", *lacking).stdout)["missing"] == ["groups", "open transactions"]
    assert "this broker does not list: groups, open transactions" in invoke("top", "--once", *lacking).stdout


def test_a_missing_right_or_answer_is_an_error_on_the_screen_and_hides_no_other_part(
    invoke, bridge, url, broken_broker
):
    with bridge.transaction(prepare=True) as txn:
        txn.send("orders", b"1")
    groups = raising(txnbridge.errors.AccessDenied("not yours"))
    one = broken_broker(Administering=around(groups=groups))
    shown = invoke("top", "--once", "--url", url.replace("embedded", one))
    assert "not yours" in shown.stdout and "oldest first: 1" in shown.stdout and shown.exit_code == 1
    away = raising(txnbridge.BrokerUnavailable("the broker is away"))
    both = broken_broker(Administering=around(groups=groups, transactions=away))
    shown = invoke("top", "--once", "--url", url.replace("embedded", both))
    assert "not yours; the broker is away" in shown.stdout and shown.exit_code == 3


def test_top_takes_json_only_with_once(invoke, bridge):
    result = invoke("top", "--json")
    assert (result.exit_code, "--json goes with --once" in result.stderr) == (2, True)


def test_rates_are_what_the_positions_have_moved():
    def at(seconds: float, position: int) -> BrokerState:
        return BrokerState(seconds, [GroupInfo("g", (), {("t", 0): (position,)}, {})])

    assert _rates(at(1.0, 10), at(3.0, 20)) == {"g": 5.0}
    assert _rates(BrokerState(1.0), at(3.0, 20)) == {}


def test_top_looks_again_on_a_terminal_until_ctrl_c(url, bridge, interruptible):
    with bridge.transaction(prepare=True) as txn:
        txn.send("orders", b"1")
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    command = [sys.executable, "-m", "txnbridge.cli", "top", "--every", "0.1", "--url", url]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal, env=environment) as process:
        os.close(terminal)
        try:
            read_until(screen, b"oldest first: 1")
            bridge.commit(str(txn.token))
            read_until(screen, b"oldest first: 0")
            process.send_signal(signal.SIGINT)
            read_until(screen, b"")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(screen)


def read_until(screen: int, text: bytes) -> None:
    """Read a terminal until a text was written; with no text until its programs have ended."""
    seen, until = b"", time.monotonic() + 60
    while not text or text not in seen:
        assert time.monotonic() < until, seen
        try:
            seen += os.read(screen, 65536)
        except OSError:  # all its programs have ended
            assert not text, seen
            return
