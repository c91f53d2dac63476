"""Tests that any program can be killed or paused at an event, not only a function."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import txnbridge

PROGRAM = """
import sys
import txnbridge

with txnbridge.connect(sys.argv[1]) as bridge:
    for number in range(3):
        with bridge.transaction() as txn:
            txn.send("orders", b"%d" % number)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"embedded:{tmp_path}/broker.db"


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "txnbridge_conformance.faults", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def stored(url: str) -> list[object]:
    with txnbridge.connect(url) as bridge:
        return [message.value for message in bridge.read("orders", limit=10)]


def test_a_program_or_a_module_is_killed_at_an_event(url, program):
    create = ("-m", "txnbridge.cli", "topics", "create", "--url", url, "orders")
    for arguments in ("bridge.open/after", *create), ("commit/before/3", program, url):
        with start("kill", *arguments) as process:
            process.wait(60)
        assert process.returncode == -signal.SIGKILL
    assert stored(url) == [b"0", b"1"]


def test_a_program_is_paused_at_an_event_and_goes_on(url, program):
    with start("pause", "commit/after/2", program, url) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert stored(url) == [b"0", b"1"]
            process.send_signal(signal.SIGCONT)
            process.wait(60)
        finally:
            process.kill()
    assert stored(url) == [b"0", b"1", b"2"]


def test_a_program_that_ends_before_its_event_is_an_error(url, program):
    with start("kill", "abort/before", program, url) as process:
        process.wait(60)
    assert process.returncode == 3


def test_the_fault_injector_says_how_to_call_it():
    with start("stab", "commit/before", "program.py") as process:
        assert "kill commit/before" in (process.stderr.read() if process.stderr else "")
