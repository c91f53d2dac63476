"""Checks of calls and processes: each call ends within its deadline, and no process crashes."""

from __future__ import annotations

from collections import defaultdict

from txnbridge_conformance.checker._tables import Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

# A call may take this much longer than its deadline, because a loaded machine may let its process wait so long.
_SLACK_SECONDS = 10.0


def check_hangs_and_crashes(tables: Tables, findings: Findings) -> None:
    """Find calls that took longer than their deadline, processes that crashed, and conditions that never came true.

    The run waits for these conditions after its work, for example until no transaction is open. The time in which a
    call's process, or a thread of it, was paused does not count for the call.
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
        elif operation.end is not None and "deadline" in operation.fields:
            taken = (operation.end - operation.start) / 1e9
            process = tables.history.processes[operation.process].name
            paused = sum(
                max(0, min(end, operation.end) - max(begin, operation.start)) for begin, end in pauses[process]
            )
            deadline = operation.fields["deadline"]
            if taken - paused / 1e9 > deadline + _SLACK_SECONDS:
                text = f"{tables.name(operation.order)} took {taken:.1f} s, its deadline is {deadline:g} s"
                findings.add("hang", text, [operation.order])
            elif operation.result == "ok" and _asked_after(operation) > deadline:
                text = f"{tables.name(operation.order)} took effect, although its end was requested after its deadline"
                findings.add("hang", f"{text} of {deadline:g} s", [operation.order])


def _asked_after(operation: Operation) -> float:
    """Return the seconds between the begin of a transaction and the request for its end; 0 if they are not known."""
    begun, ending = operation.fields.get("begun", 0), operation.fields.get("ending", 0)
    return float(ending - begun) / 1e9


def _pauses(tables: Tables) -> dict[str, list[tuple[int, int]]]:
    """Return the begin and end of each pause of a process or of one of its threads, by the name of the process."""
    pauses: dict[str, list[tuple[int, int]]] = defaultdict(list)
    begun: dict[tuple[str, str], int] = {}
    for fault in tables.history.faults:
        pause = fault.target, fault.kind
        if fault.kind.startswith("pause") and fault.phase == "begin":
            begun[pause] = fault.mono
        elif pause in begun:
            pauses[fault.target].append((begun.pop(pause), fault.mono))
    return pauses
