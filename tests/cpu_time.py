"""CPU seconds of each test with its child processes, and the budget of the gate.

`--durations` tells wall time, and most tests wait. `--cpu N` prints the N dearest tests and the sum of each room. A run
of the whole gate always prints the sums, and says when they are above the budget. A slower machine must not fail for
that, so each process of the run measures a yardstick again and again, and the sum is told for a machine where that
takes `YARDSTICK` seconds. Machines still differ by a third, so a run fails only far above the budget. Beside other work
the same tests cost half as much again, so the budget does not hold there.
"""

import os
import time
from collections import defaultdict
from multiprocessing import forkserver
from pathlib import Path
from statistics import fmean

import pytest

# Of all processes of the tests, on a machine where the yardstick takes `YARDSTICK` CPU seconds. The first run on a
# machine also fetches the brokers, which takes half a minute more.
GATE_CPU_MINUTES = 6.0
YARDSTICK = 0.02
# Above the budget by so much no other machine is the reason.
TOO_DEAR = 1.4
# Seconds from one yardstick to the next: it has to meet what the tests meet, and cost little.
_EVERY = 20.0
# The machine has other work if so many programs a core want to run; the tests alone are two or three.
BUSY = 5
_MEASURED, _YARDSTICKS = "cpu_seconds", "yardsticks"
# A shell that has installed the requirements becomes this process, and its children count as ours.
_OF_THE_SHELL = sum(os.times()[2:4])


def yardstick() -> float:
    """Return the CPU seconds of a piece of work that is always the same."""
    begin, found = time.process_time(), {}
    for number in range(300_000):
        found[number % 1000] = str(number)
    return time.process_time() - begin


def _spent() -> float:
    """Return the CPU seconds of this process and of its children: those that have ended, and the living fork server."""
    return sum(os.times()[:4]) - _OF_THE_SHELL + _spent_by_fork_server()


def _spent_by_fork_server() -> float:
    """Return the CPU seconds of the fork server and its ended children; 0 if there is no fork server, or no /proc."""
    try:
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu", type=int, metavar="N", help="print the CPU seconds of the N dearest tests and of each room"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes(config), "cpu-times")


class CpuTimes:
    """Measures the tests of this process. Where pytest-xdist shares the tests out, the first process adds all up."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before: float | None = None  # at the last report; what comes behind it counts for the next test
        self._mine = 0.0  # of the tests that ran in this process
        self._tests: dict[str, float] = defaultdict(float)  # by node id
        self._rest = 0.0  # of other processes: start, collection, end
        self._yardsticks = [yardstick()]
        self._next_yardstick = time.monotonic() + _EVERY

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        if self._before is None:
            self._before = _spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]):
        report = yield
        now = _spent()
        assert self._before is not None
        report.user_properties = [*report.user_properties, (_MEASURED, now - self._before)]
        self._before = now
        if call.when == "teardown" and time.monotonic() > self._next_yardstick:
            self._yardsticks.append(yardstick())
            self._mine += self._yardsticks[-1]
            self._next_yardstick, self._before = time.monotonic() + _EVERY, _spent()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = sum(float(str(value)) for name, value in report.user_properties if name == _MEASURED)
        self._tests[report.nodeid] += spent
        if not hasattr(report, "node"):  # of another process
            self._mine += spent

    @pytest.hookimpl(tryfirst=True)  # before pytest-xdist waits for its processes, which would count them twice
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        mine = _spent() - self._mine
        self._yardsticks.append(yardstick())
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput.update({_MEASURED: mine, _YARDSTICKS: self._yardsticks})
            return
        self._rest += mine
        if self._is_above(TOO_DEAR):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        above = self._is_above()
        count = self._config.getoption("cpu") or (10 if above else 0)
        if not self._is_gate() and not count:
            return
        terminalreporter.section("CPU")
        for name, seconds in sorted(self._tests.items(), key=lambda item: -item[1])[:count]:
            terminalreporter.line(f"{seconds:8.1f} s  {name}")
        rooms = defaultdict(float, {"start and end of the processes": self._rest})
        for name, seconds in self._tests.items():
            rooms["/".join(name.split("/")[:2])] += seconds
        for room, seconds in sorted(rooms.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{seconds / 60:8.2f} min  {room}")
        total = self._total() / 60
        terminalreporter.line(f"{total:8.2f} min  in all; the yardstick took {fmean(self._yardsticks):.4f} s")
        terminalreporter.line(f"{total * self._speed():8.2f} min  by the yardstick, of {GATE_CPU_MINUTES} for the gate")
        if above:
            terminalreporter.line("The gate is too dear: make a test cheaper, or mark it full or live.", red=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        told = getattr(node, "workeroutput", {})
        self._rest += told.get(_MEASURED, 0.0)
        self._yardsticks += told.get(_YARDSTICKS, [])

    def _is_gate(self) -> bool:
        """Return whether this run is the whole gate, and not a part of it or more."""
        option = self._config.option
        part = option.keyword or option.markexpr or getattr(option, "lf", False) or option.collectonly
        return self._config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (
            part or option.live or option.full
        )

    def _is_above(self, times: float = 1.0) -> bool:
        is_busy = os.getloadavg()[1] > BUSY * (os.cpu_count() or 1)
        return self._is_gate() and not is_busy and self._total() * self._speed() > times * 60 * GATE_CPU_MINUTES

    def _speed(self) -> float:
        """Return the speed of this machine, beside other work, as a share of that of the budget's machine."""
        return YARDSTICK / fmean(self._yardsticks)

    def _total(self) -> float:
        return self._rest + sum(self._tests.values())
