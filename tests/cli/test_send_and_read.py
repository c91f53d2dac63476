import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.conftest import started
from tests.core.processor_kit import send, values

LONG_WAIT = 30  # for a process that should do its part at once


def lines(result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_message_that_was_sent_is_read(invoke, url):
    sent = invoke("send", "orders", "ten apples", "--key", "42", "--header", "kind=new", "--header", "kind=a=b")
    assert (sent.exit_code, sent.stdout) == (0, "committed: 1 message to orders\n")
    [message] = lines(invoke("read", "orders", "--json"))
    assert message.pop("timestamp") > 1_600_000_000_000
    assert message == {
        "topic": "orders",
        "partition": 0,
        "position": message["position"],
        "key": "42",
        "value": "ten apples",
        "headers": [{"name": "kind", "value": "new"}, {"name": "kind", "value": "a=b"}],
        "deliveries": 1,
    }


def test_a_message_is_one_line_for_people(invoke, url, bridge):
    with bridge.transaction() as txn:
        txn.send("orders", b"plain")
        txn.send("orders", b"one", key=b"k", headers={"a": "1"})
        txn.send("orders", None, key=b"k")
        txn.send("orders", b"")
    shown = [line.split(" | ")[1:] for line in invoke("read", "orders").stdout.splitlines()]
    assert shown == [["plain"], ["key=k a=1", "one"], ["key=k", "(no value)"], [""]]
    values = [message["value"] for message in lines(invoke("read", "orders", "--json"))]
    assert values == ["plain", "one", None, ""]


def test_bytes_that_are_not_text_are_shown_in_base64(invoke, url, bridge):
    send(bridge, "orders", b"\xff\x00", key=b"\xfe", headers={"h": b"\xfd"})
    assert invoke("read", "orders").stdout.endswith(" | key=base64:/g== h=base64:/Q== | base64:/wA=\n")
    [message] = lines(invoke("read", "orders", "--json"))
    assert message["value_base64"] == "/wA="
    assert message["key_base64"] == "/g=="
    assert message["headers"] == [{"name": "h", "value_base64": "/Q=="}]
    assert {"key", "value"}.isdisjoint(message)


def test_a_message_cannot_steer_the_terminal(invoke, url):
    invoke("send", "orders", "\x1b[31mred\nnext", "--key", "\x1b]0;title\x07")
    shown = invoke("read", "orders").stdout
    assert "\x1b" not in shown
    assert shown.count("\n") == 1
    assert shown.endswith(" | key=\\x1b]0;title\\x07 | \\x1b[31mred\\nnext\n")


def test_a_character_that_the_terminal_lacks_is_escaped(url, bridge):
    send(bridge, "orders", "für 5 €".encode())
    run = subprocess.run(
        [sys.executable, "-m", "txnbridge.cli", "read", "orders"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert run.stdout.endswith(b" | f\xfcr 5 \\u20ac\n")


def test_each_line_of_standard_input_is_a_message(invoke, url):
    sent = invoke("send", "orders", "--json", input="one\n\nthree \r\nlast without an end")
    answer = json.loads(sent.stdout)
    assert (answer["outcome"], answer["topic"], answer["messages"]) == ("committed", "orders", 4)
    assert answer["transaction"]
    values = [message["value"] for message in lines(invoke("read", "orders", "--json"))]
    assert values == ["one", "", "three \r", "last without an end"]


def test_lines_may_be_typed(url, bridge):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "txnbridge.cli", "send", "orders"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.write(ours, b"one\ntwo\n\x04")  # Ctrl-D
        out, err = process.communicate(timeout=LONG_WAIT)
    os.close(ours)
    os.close(theirs)
    assert (process.returncode, out) == (0, b"committed: 2 messages to orders\n")
    assert err == b"One message a line; Ctrl-D sends them all, Ctrl-C none.\n"
    assert [message.value for message in bridge.read("orders", 10)] == [b"one", b"two"]


def test_a_file_is_one_message(invoke, url, tmp_path):
    (tmp_path / "body").write_bytes(b"two\nlines\n")
    assert invoke("send", "orders", "--file", str(tmp_path / "body")).exit_code == 0
    assert [message["value"] for message in lines(invoke("read", "orders", "--json"))] == ["two\nlines\n"]


@pytest.mark.parametrize(
    "args",
    [
        ["orders", "x", "--header", "no-equals-sign"],
        ["orders", "x", "--header", "=value"],
        ["orders", "x", "--file", "conftest.py"],
        ["orders", "--file", "/does/not/exist"],
        ["orders", "x", "--partition", "7"],
    ],
    ids=" ".join,
)
def test_a_wrong_message_is_refused_and_nothing_is_sent(invoke, url, bridge, args):
    bridge.admin.create_topic("orders")
    result = invoke("send", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert bridge.read("orders", 10) == []


def test_no_line_is_sent_if_one_of_them_cannot_be(invoke, url, bridge):
    bridge.admin.create_topic("orders")
    result = invoke("send", "orders", "--url", f"{url}?max_message_bytes=100", input="small\n" + "x" * 200 + "\n")
    assert result.exit_code == 2
    assert "xxx" not in result.output
    assert bridge.read("orders", 10) == []


def test_reading_may_start_late(invoke, url, bridge):
    with bridge.transaction() as txn:
        txn.send("orders", b"old", timestamp=1_000)
        txn.send("orders", b"new", timestamp=3_000)
    assert [m["value"] for m in lines(invoke("read", "orders", "--start", "2000", "--json"))] == ["new"]
    assert lines(invoke("read", "orders", "--start", "latest", "--json")) == []
    assert {invoke("read", "orders", "--start", place).exit_code for place in ("yesterday", "9" * 5000)} == {2}


def test_read_moves_a_group_behind_the_shown_messages_only_with_ack(invoke, url):
    invoke("send", "orders", input="1\n2\n3\n")
    read = ["read", "orders", "--group", "g", "--json"]
    shown = [lines(invoke(*read, *more)) for more in ([], ["--ack", "--limit", "2"], ["--ack", "--limit", "2"])]
    assert [[message["value"] for message in part] for part in shown] == [["1", "2", "3"], ["1", "2"], ["3"]]


def test_ack_needs_a_group(refused, url):
    assert "--group" in refused("read", "orders", "--ack")


def test_read_with_follow_shows_new_messages_until_ctrl_c(url, bridge, interruptible):
    bridge.admin.create_topic("orders")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started("read", "orders", "--follow", "--json", **pipes) as process:
        assert process.stdout is not None
        for value in (b"one", b"two"):
            send(bridge, "orders", value)
            assert json.loads(process.stdout.readline())["value"] == value.decode()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG_WAIT)
    assert (process.returncode, out, err) == (130, b"", b"\n")


def test_an_interrupted_send_publishes_no_message(url, bridge, interruptible):
    bridge.admin.create_topic("orders")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started("send", "orders", "--debug", **pipes) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert any(b"message.send after" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LONG_WAIT)
    assert (process.returncode, out) == (130, b"")
    send(bridge, "orders", b"marker")
    assert values(bridge, "orders") == [b"marker"]
