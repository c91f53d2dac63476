"""Checks of calls and processes: each call ends within its deadline, and no process crashes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from txnbridge_conformance.checker._tables import Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

# A call may take this much longer than its deadline, because a loaded machine may let its process wait so long.
_SLACK_SECONDS = 10.0


def check_hangs_and_crashes(tables: Tables, findings: Findings) -> None:
    """Find calls that took longer than their deadline, processes that crashed, and conditions that never came true.

    The run waits for these conditions after its work, for example until no transaction is open. The time in which a
    call's process, or a thread of it, was paused does not count for the call. A call without an end hangs if anybody
    recorded something after the deadline, and nobody stopped its process.
    """
    pauses = _pauses(tables)
    stopped = {fault.target for fault in tables.history.faults if fault.kind.startswith(("kill", "restart"))}
    stopped |= {str(each.fields.get("name")) for each in tables.operations if each.what == "process"}
    latest = np.full(len(tables.clocks), -np.inf)
    np.maximum.at(latest, tables.clock, tables.last)
    spent: list[float] = ((tables.last - tables.starts) / 1e9).tolist()
    for operation in tables.operations:
        if operation.what == "settle" and operation.result == "fail":
            error = operation.fields.get("error")
            text = f"{operation.fields.get('condition')}, long after the work had ended{f' ({error})' if error else ''}"
            findings.add("hang", text, [operation.order])
        elif operation.what == "process" and operation.result == "fail":
            text = f"{operation.fields.get('name')}: {operation.fields.get('error')}"
            findings.add("crash", text, [operation.order])
        elif operation.what == "read" and operation.result != "ok" and operation.end is not None:
            findings.add("stuck-reader", f"{tables.name(operation.order)} did not reach the end", [operation.order])
        elif "deadline" in (fields := operation.fields):
            deadline = fields["deadline"]
            taken = spent[operation.order] if spent[operation.order] <= deadline else _taken(tables, pauses, operation)
            if operation.end is None and _name(tables, operation) not in stopped:
                taken = _taken(tables, pauses, operation, latest[tables.clock[operation.order]])
            if taken > deadline + _SLACK_SECONDS:
                ended = "took" if operation.end is not None else "has not returned after"
                text = f"{tables.name(operation.order)} {ended} {taken:.1f} s, its deadline is {deadline:g} s"
                findings.add("hang", text, [operation.order])
            elif operation.what == "half" or operation.result != "ok":
                continue  # local work may last longer, and counts unless a check-back has dropped its messages
            elif fields.get("ending", 0) - fields.get("begun", 0) > 1e9 * deadline:
                text = f"{tables.name(operation.order)} took effect, although its end was requested after its deadline"
                findings.add("hang", f"{text} of {deadline:g} s", [operation.order])


def _name(tables: Tables, operation: Operation) -> str:
    return tables.history.processes[operation.process].name


def _taken(
    tables: Tables, pauses: dict[str, dict[int, _Pauses]], operation: Operation, until: float | None = None
) -> float:
    """Return the seconds a call took, without pauses: to its end, or else its process's last record, or to `until`."""
    end = int(tables.last[operation.order] if until is None else until)
    found, clock = pauses.get(_name(tables, operation), {}), tables.clock_of(operation)
    paused = sum(pause.total for key, pause in found.items() if key < 0)
    if clock in found:
        paused += found[clock].between(operation.start, end)
    return (end - operation.start - paused) / 1e9


@dataclass
class _Pauses:
    """The pauses of a process and of its threads: the times of their begins, and of their ends."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @cached_property
    def _sums(self) -> list[tuple[list[int], list[int]]]:
        return [(each := sorted(times), [0, *itertools.accumulate(each)]) for times in (self.begins, self.ends)]

    @property
    def total(self) -> float:
        """The nanoseconds of all pauses, infinite if one has no end on this clock."""
        return sum(self.ends) - sum(self.begins) if len(self.ends) == len(self.begins) else math.inf

    def between(self, start: int, end: int) -> int:
        """Return the nanoseconds of the pauses between two times, summed over threads."""
        return self._until(end) - self._until(start)

    def _until(self, time: int) -> int:
        (begins, begun), (ends, ended) = self._sums
        paused, resumed = bisect_right(begins, time), bisect_right(ends, time)
        return time * paused - begun[paused] - (time * resumed - ended[resumed])


def _pauses(tables: Tables) -> dict[str, dict[int, _Pauses]]:
    """Return the pauses of processes and of their threads, by the name of the process and the clock of their times.

    The key is below 0 if no process of this name has the clock, so that only the pauses' lengths are known.
    """
    names = {(tables.clock_of(each), _name(tables, each)) for each in tables.operations}
    pauses: dict[str, dict[int, _Pauses]] = defaultdict(lambda: defaultdict(_Pauses))
    for fault in tables.history.faults:
        if fault.kind.startswith("pause"):
            clock = tables.clock_of(fault)
            found = pauses[fault.target][clock if (clock, fault.target) in names else -1 - clock]
            (found.begins if fault.phase == "begin" else found.ends).append(fault.mono)
    return pauses
