"""Checks of calls and processes: each call ends within its deadline, and no process crashes."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from txnbridge_conformance.checker._tables import NONE, Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

# A call may take this much longer than its deadline, because a loaded machine may let its process wait so long.
_SLACK_SECONDS = 10.0


def check_hangs_and_crashes(tables: Tables, findings: Findings) -> None:
    """Find calls that took longer than their deadline, processes that crashed, and conditions that never came true.

    The run waits for these conditions after its work, for example until no transaction is open. The time in which a
    call's process, or a thread of it, was paused does not count for the call. A call without an end hangs if its
    process recorded something after the deadline.
    """
    pauses = _pauses(tables)
    for operation in tables.operations:
        if operation.what == "settle" and operation.result != "ok":
            error = operation.fields.get("error")
            text = f"{operation.fields.get('condition')}, long after the work had ended{f' ({error})' if error else ''}"
            findings.add("hang", text, [operation.order])
        elif operation.what == "process" and operation.result == "fail":
            text = f"{operation.fields.get('name')}: {operation.fields.get('error')}"
            findings.add("crash", text, [operation.order])
        elif operation.what == "read" and operation.result != "ok":
            findings.add("stuck-reader", f"{tables.name(operation.order)} did not reach the end", [operation.order])
        elif "deadline" in operation.fields:
            end = int(tables.last[operation.order])
            name = tables.history.processes[operation.process].name
            paused = pauses[tables.clock_of(operation), name].between(operation.start, end) + pauses[NONE, name].total
            taken = (end - operation.start - paused) / 1e9
            deadline = operation.fields["deadline"]
            if taken > deadline + _SLACK_SECONDS:
                ended = "took" if operation.end is not None else "has not returned after"
                text = f"{tables.name(operation.order)} {ended} {taken:.1f} s, its deadline is {deadline:g} s"
                findings.add("hang", text, [operation.order])
            elif operation.result == "ok" and _asked_after(operation) > deadline:
                text = f"{tables.name(operation.order)} took effect, although its end was requested after its deadline"
                findings.add("hang", f"{text} of {deadline:g} s", [operation.order])


def _asked_after(operation: Operation) -> float:
    """Return the seconds between the begin of a transaction and the request for its end; 0 if they are not known."""
    begun, ending = operation.fields.get("begun", 0), operation.fields.get("ending", 0)
    return float(ending - begun) / 1e9


@dataclass
class _Pauses:
    """The pauses of a process and of its threads: their begins and ends, each with the sums of those before."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @cached_property
    def _sums(self) -> list[tuple[list[int], list[int]]]:
        return [(each := sorted(times), [0, *itertools.accumulate(each)]) for times in (self.begins, self.ends)]

    @property
    def total(self) -> int:
        return sum(self.ends) - sum(self.begins)

    def between(self, start: int, end: int) -> int:
        """Return the nanoseconds of the pauses between two times, summed over threads."""
        return self._until(end) - self._until(start)

    def _until(self, time: int) -> int:
        (begins, begun), (ends, ended) = self._sums
        paused, resumed = bisect_right(begins, time), bisect_right(ends, time)
        return time * paused - begun[paused] - (time * resumed - ended[resumed])


def _pauses(tables: Tables) -> dict[tuple[int, str], _Pauses]:
    """Return the pauses of each process and of its threads, by the clock of their times and the name of the process.

    The clock is `NONE` if the process is on another host than the one that recorded the pause.
    """
    pauses: dict[tuple[int, str], _Pauses] = defaultdict(_Pauses)
    known = {(tables.clock_of(each), tables.history.processes[each.process].name) for each in tables.operations}
    for fault in tables.history.faults:
        if fault.kind.startswith("pause"):
            key = tables.clock_of(fault), fault.target
            found = pauses[key if key in known else (NONE, fault.target)]
            (found.begins if fault.phase == "begin" else found.ends).append(fault.mono)
    return pauses
