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

_SLACK_SECONDS = 5.0  # by which a call may be late, because a loaded machine may let its process wait so long


def check_hangs_and_crashes(tables: Tables, findings: Findings) -> None:
    """Find calls that took longer than their deadline, processes that crashed, and conditions that never came true.

    The run waits for these conditions after its work, for example until no transaction is open. The time in which a
    call's process, or a thread of it, was paused does not count for the call. A call without an end hangs if anybody
    recorded something after the deadline, and nobody stopped its process.
    """
    pauses = _pauses(tables)
    stopped = {fault.target for fault in tables.history.faults if fault.kind.startswith(("kill", "restart"))}
    stopped |= {str(each.fields.get("name")) for each in tables.operations if each.what == "process"}
    latest = np.full(len(tables.clocks), np.iinfo(np.int64).min)
    np.maximum.at(latest, tables.clock, tables.last)
    for operation in tables.operations:
        if operation.what == "settle" and operation.result == "fail":
            error = f" ({operation.fields['error']})" if operation.fields.get("error") else ""
            text = f"{operation.fields.get('condition')}, long after the work had ended{error}"
            findings.add("hang", text, [operation.order])
        elif operation.what == "process" and operation.result == "fail":
            text = f"{operation.fields.get('name')}: {operation.fields.get('error')}"
            findings.add("crash", text, [operation.order])
        elif operation.what == "read" and operation.result != "ok" and operation.end is not None:
            findings.add("stuck-reader", f"{tables.name(operation.order)} did not reach the end", [operation.order])
        elif "deadline" in operation.fields:
            at, name = operation.order, tables.history.processes[operation.process].name
            end = tables.last[at] if operation.end is not None or name in stopped else latest[tables.clock[at]]
            if wrong := _hang(tables, pauses.get(name, {}), operation, int(end)):
                findings.add("hang", f"{tables.name(at)} {wrong}", [at])


def _hang(tables: Tables, pauses: dict[int, _Pauses], operation: Operation, end: int) -> str | None:
    """Return what is wrong with the time of a call, which went on until `end`."""
    fields, deadline = operation.fields, operation.fields["deadline"]
    if end - operation.start > 1e9 * (deadline + _SLACK_SECONDS):
        taken, ending = _taken(tables, pauses, operation, operation.start, end), fields.get("ending")
        late, slack = taken - deadline, _SLACK_SECONDS
        if operation.end is None or (ending is None and operation.what in ("transaction", "half")):
            slack = 2 * _SLACK_SECONDS  # the program, too, may work in it
        elif ending is not None:
            late = min(late, _taken(tables, pauses, operation, ending, end))
        if late > slack:
            return (
                f"{'took' if operation.end else 'has not returned after'} {taken:.1f} s, its deadline is {deadline:g} s"
            )
    # Local work for half messages may last longer, and counts unless a check-back has dropped its messages.
    requested = fields.get("ending", 0) - fields.get("begun", 0)
    if requested > 1e9 * deadline and operation.what != "half" and operation.result == "ok":
        return f"took effect, although its end was requested after its deadline of {deadline:g} s"
    return None


def _taken(tables: Tables, pauses: dict[int, _Pauses], operation: Operation, start: int, end: int) -> float:
    """Return the seconds of a call between two times, without pauses."""
    paused = sum(
        sum(each.ends) - sum(each.begins) if len(each.ends) == len(each.begins) else math.inf  # it goes on
        for key, each in pauses.items()
        if key < 0
    )
    if (clock := tables.clock_of(operation)) in pauses:
        paused += pauses[clock].between(start, end)
    return (end - start - paused) / 1e9


@dataclass
class _Pauses:
    """The pauses of a process and of its threads: the times of their begins, and of their ends."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @cached_property
    def _sums(self) -> list[tuple[list[int], list[int]]]:
        return [(each := sorted(times), [0, *itertools.accumulate(each)]) for times in (self.begins, self.ends)]

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
    names = {(tables.clock_of(each), tables.history.processes[each.process].name) for each in tables.operations}
    pauses: dict[str, dict[int, _Pauses]] = defaultdict(lambda: defaultdict(_Pauses))
    for fault in tables.history.faults:
        if fault.kind.startswith("pause"):
            clock = tables.clock_of(fault)
            found = pauses[fault.target][clock if (clock, fault.target) in names else -1 - clock]
            (found.begins if fault.phase == "begin" else found.ends).append(fault.mono)
    return pauses
