"""Runs the contract suite against a broker by pytest, and finds a verdict on each capability."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from txnbridge import Capability, TxnBridgeError, connect
from txnbridge_conformance.run.settling import delete_topics

_TESTS = "from txnbridge_conformance.suite import *  # noqa: F403\n"
# The name for tests that prove no single capability: every broker has to pass them.
_ALWAYS = "every broker"
# By results of tests: the first one that a promise's tests have had gives its verdict.
_VERDICTS = {"failed": "broken", "set-up failed": "set-up failed", "passed": "kept", "absent": "declared absent"}
_REASON_LENGTH = 500  # an assertion about many messages shows all of them


@dataclass(frozen=True)
class ContractResult:
    """A capability and the verdict: "kept", "broken", "declared absent", "not tested" or "set-up failed"."""

    name: str
    verdict: str
    tests: int
    failed: tuple[str, ...]  # the names of its failed tests, each with the reason


class ContractRecorder:
    """A pytest plug-in that counts results of the suite's tests, by the capabilities that each test proves."""

    def __init__(self) -> None:
        self.results: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: dict[str, list[str]] = defaultdict(list)
        self._proved: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            proved = [capability.value for mark in item.iter_markers("proves") for capability in mark.args]
            self._proved[item.nodeid] = proved or [_ALWAYS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        result: str = "absent" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        failure = ""
        if result == "failed":
            result = "failed" if report.when == "call" else "set-up failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = f"{crash.message} ({Path(crash.path).name}:{crash.lineno})" if crash else report.longreprtext
            failure = f"{report.nodeid.partition('::')[2]}: {' '.join(reason.split())[:_REASON_LENGTH]}"
        for name in self._proved.get(report.nodeid, ()):
            self.results[name][result] += 1
            self.failed[name] += [failure] if failure else []

    def promises(self) -> list[ContractResult]:
        names = [_ALWAYS, *(capability.value for capability in Capability)]
        return [self._promise(name, self.results[name]) for name in names]

    def _promise(self, name: str, results: Mapping[str, int]) -> ContractResult:
        verdict = next((said for result, said in _VERDICTS.items() if results.get(result)), "not tested")
        return ContractResult(name, verdict, sum(results.values()), tuple(self.failed[name]))


def run_contract(url: str, only: str = "") -> list[ContractResult]:
    """Run the suite, or its tests that match pytest's expression `only`. Return the verdict on each capability.

    Delete the suite's topics at the end, also after an interrupt, which pytest handles.
    Raise `RuntimeError` with pytest's output if the suite could not run.
    """
    recorder, output = ContractRecorder(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="txnbridge-contract-") as folder:
        (Path(folder) / "test_contract.py").write_text(_TESTS)
        options = ["-q", "-p", "no:cacheprovider", "-p", "txnbridge_conformance.plugin", "--rootdir", folder]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = pytest.main([*options, "-k", only, "--txnbridge-url", url, folder], plugins=[recorder])
    if recorder.results:
        from txnbridge_conformance.plugin import RUN  # pytest has to be the first that imports the plug-in

        with contextlib.suppress(TxnBridgeError), connect(url) as bridge:
            delete_topics(bridge, f"-{RUN}-")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(output.getvalue())
    return recorder.promises()
