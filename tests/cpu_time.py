"""CPU seconds of each test with its child processes, and the budget of the gate.

`--durations` tells wall time, and most tests wait. `--cpu N` prints the N dearest tests and the sum of each room. A run
of the whole gate always prints the sums, and fails above the budget.
"""

import os
from collections import defaultdict
from multiprocessing import forkserver
from pathlib import Path

import pytest

# Of all processes of the tests. On two idle cores of the machine of docs/performance.md they take less than 6; a slower
# machine takes longer, and must not fail for that.
GATE_CPU_MINUTES = 7.5
_MEASURED = "cpu_seconds"
# A shell that has installed the requirements becomes this process, and its children count as ours.
_OF_THE_SHELL = sum(os.times()[2:4])


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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        if self._before is None:
            self._before = _spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = _spent()
        assert self._before is not None
        report.user_properties = [*report.user_properties, (_MEASURED, now - self._before)]
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = sum(float(str(value)) for name, value in report.user_properties if name == _MEASURED)
        self._tests[report.nodeid] += spent
        if not hasattr(report, "node"):  # of another process
            self._mine += spent

    @pytest.hookimpl(tryfirst=True)  # before pytest-xdist waits for its processes, which would count them twice
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        mine = _spent() - self._mine
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_MEASURED] = mine
            return
        self._rest += mine
        if self._is_gate() and self._total() > 60 * GATE_CPU_MINUTES:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        above = self._is_gate() and self._total() > 60 * GATE_CPU_MINUTES
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
        terminalreporter.line(f"{self._total() / 60:8.2f} min  in all, of {GATE_CPU_MINUTES} for the gate")
        if above:
            terminalreporter.line("The gate is too dear: make a test cheaper, or mark it full or live.", red=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self._rest += getattr(node, "workeroutput", {}).get(_MEASURED, 0.0)

    def _is_gate(self) -> bool:
        """Return whether this run is the whole gate, and not a part of it or more."""
        option = self._config.option
        part = option.keyword or option.markexpr or getattr(option, "lf", False) or option.collectonly
        return self._config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (
            part or option.live or option.full
        )

    def _total(self) -> float:
        return self._rest + sum(self._tests.values())
