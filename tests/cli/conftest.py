import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import txnbridge
from txnbridge.cli import main, plugin_commands

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_broker_by_accident(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TXNBRIDGE_URL", raising=False)
    plugin_commands.cache_clear()
    yield
    plugin_commands.cache_clear()


@pytest.fixture
def no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which plug-ins have failed in this process."""
    monkeypatch.setattr(txnbridge.plugins, "failed", {})


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh embedded broker, which the commands find in their environment."""
    url = f"embedded:{tmp_path}/broker.db"
    monkeypatch.setenv("TXNBRIDGE_URL", url)
    return url


@pytest.fixture
def bridge(url: str) -> Iterator[txnbridge.Bridge]:
    with txnbridge.connect(url) as bridge:
        yield bridge


@pytest.fixture
def invoke() -> Invoke:
    """Run the command line in this process."""
    return lambda *args, **options: CliRunner().invoke(main, args, **options)


@pytest.fixture
def refused(invoke: Invoke) -> Callable[..., str]:
    """Make a wrong call, and return what it says."""

    def call(*args: str, **options: object) -> str:
        result = invoke(*args, **options)
        assert result.exit_code == 2, result.output
        return result.stderr

    return call


@contextmanager
def started(*args: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, which is ended."""
    with subprocess.Popen([sys.executable, "-u", "-m", "txnbridge.cli", *args], **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let child processes hear these signals, even where the tests run in the background and ignore them."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
