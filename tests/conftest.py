"""Which tests run when.

    pytest          the gate: whatever starts no broker and no Spark, and of each broker its `test_smoke.py`
    pytest --live   also the rest of the folders that do (`LIVE`, but for what is marked `offline`), and what is
                    marked `live`
    pytest --full   also what is marked `full`, because it takes minutes
    pytest --note   write this run's row into `tests/last-runs.md`

In the live tier, what starts a broker has the machine for itself: other tests of the same checkout wait meanwhile.
"""

import fcntl
import gc
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.failing import EACH, fail_call
from txnbridge import hookimpl, plugins
from txnbridge._base.connection import Connection
from txnbridge.testing.child_processes import _IMPORTED_LATE

# Without its bytecode each child process would compile the project anew, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LIVE = tuple(f"tests/{room}/" for room in ("brokers", "faults", "kafka", "pulsar", "rocketmq", "spark"))
SMOKE = "test_smoke.py"

# Here and not in tests/conformance, because pytest takes plug-ins from the top conftest.py only.
pytest_plugins = [
    "txnbridge_conformance.plugin",
    "txnbridge_conformance.brokers.plugin",
    "tests.cpu_time",
    "tests.kill_walk",
]

pytest.register_assert_rewrite("tests.log_contract", "tests.log_decisions")

# How fast examples are made and run says how busy the machine is, nothing about the code.
settings.register_profile("gate", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
settings.register_profile("full", settings.get_profile("gate"), max_examples=1000)


_IMPORTED_LATE.append("tests.fork_server")

gc.disable()  # until all is collected: nothing of what is imported until then is garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--live", action="store_true", help="also run the tests that start real brokers and Spark")
    parser.addoption("--full", action="store_true", help="all tests, also those that take minutes")
    parser.addoption("--note", action="store_true", help="write this run's row into tests/last-runs.md")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "gate")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the gate, import no file of which no test would run: each process imports all files."""
    if _has_live(config) or not collection_path.name.startswith("test_"):
        return None
    inside = collection_path.as_posix().startswith(tuple(f"{config.rootpath.as_posix()}/{room}" for room in LIVE))
    if not inside or collection_path.name == SMOKE or "mark.offline" in collection_path.read_text():
        return None
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in filter(_starts_brokers, items):
        item.add_marker(pytest.mark.xdist_group("brokers"))  # one process has all of them
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
    yield  # folders mark their own
    full, live = config.getoption("--full"), _has_live(config)
    left_out = {item for item in items if (_is_full(item) and not full) or (_is_live(item) and not live)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    # In the gate one process has the brokers from the start, and others run what needs none. In the live tier a broker
    # has the machine alone, behind all the rest. The rest stays as it was shuffled.
    items.sort(key=_starts_brokers, reverse=not live)


def _has_live(config: pytest.Config) -> bool:
    return bool(config.getoption("--full") or config.getoption("--live"))


def _is_alone(item: pytest.Item) -> bool:
    return _starts_brokers(item) and _has_live(item.config)


def _is_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is not None


def _is_live(item: pytest.Item) -> bool:
    return _starts_brokers(item) and item.path.name != SMOKE


def _starts_brokers(item: pytest.Item) -> bool:
    if item.get_closest_marker("live"):
        return True
    return item.nodeid.startswith(LIVE) and not item.get_closest_marker("offline")


# Open as long as this process lives. Tests share it; in the live tier, who starts a broker has it alone.
_machine = os.open(__file__, os.O_RDONLY)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waiting is not part of a test's time
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    fcntl.flock(_machine, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
    result = yield
    if nextitem is None or not _is_alone(nextitem):
        fcntl.flock(_machine, fcntl.LOCK_UN)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let one worker collect before the others: what it compiles, and what Hypothesis makes then, serves them all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    try:
        fcntl.flock(_machine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(_machine, fcntl.LOCK_SH)
    result = yield
    st.text().validate()  # Hypothesis makes its table of all characters
    fcntl.flock(_machine, fcntl.LOCK_UN)
    return result


def pytest_collection_finish() -> None:
    """Spare the garbage collector the many objects that live as long as the process, such as modules and tests."""
    gc.freeze()
    gc.enable()
    # Runs of pytest in tests need none of the installed plug-ins, whose imports take longer than most of these runs.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"


_began = time.monotonic()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """With `--note`, write this run's row in the place of the last one with the same arguments."""
    if not config.getoption("--note") or exitstatus > pytest.ExitCode.TESTS_FAILED:  # an interrupted run is none
        return
    counts = {outcome: len(reports) for outcome, reports in terminalreporter.stats.items()}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    command = shlex.join(["pytest", *(str(each) for each in config.invocation_params.args if each != "--note")])
    start = f"| `{command}` |"
    row = f"{start} {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} |"
    row += f" {time.monotonic() - _began:.0f} | {date.today()} |"
    page = config.rootpath / "tests" / "last-runs.md"
    others = [line for line in page.read_text().splitlines() if not line.startswith(start)]
    page.write_text("\n".join([*others, row]) + "\n")


@pytest.fixture
def with_timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives bridges, also open ones, other durations and limits than those of programs."""

    return lambda **changes: monkeypatch.setattr(Connection, "timing", replace(Connection.timing, **changes))


@pytest.fixture
def quick_sweep(with_timing: Callable[..., None]) -> None:
    with_timing(sweep_every=0.05, sweep_margin=0.05)


@pytest.fixture
def broken_broker() -> Iterator[Callable[..., str]]:
    """Return a function that gives an embedded broker such parts (see `Broken`), and returns the scheme of its URL."""
    from tests.conformance.broken import Broken, backend_of, scheme_of

    numbers = count()
    with ExitStack() as registered:

        def make(**parts: Any) -> str:
            broker = type(f"Made{next(numbers)}", (Broken,), parts)
            backends = staticmethod(hookimpl(lambda: [backend_of(broker)]))
            plugin = type("Backends", (), {"txnbridge_backends": backends})()
            registered.enter_context(plugins.registered(plugin))
            return scheme_of(broker)

        yield make


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that lets no further thread start, or only those fail that `fail_call` is told of."""
    error = RuntimeError("can't start new thread")
    return lambda number=EACH, **how: fail_call(monkeypatch, threading.Thread, "start", error, number, **how)


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a test adds to `sys.path` go with the test."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
