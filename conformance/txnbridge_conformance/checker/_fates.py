"""The fate of each transaction: COMMITTED, ABORTED or UNKNOWN, by all calls of the history that returned an outcome."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from txnbridge_conformance.checker._tables import Numbers
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

UNKNOWN, COMMITTED, ABORTED = 0, 1, 2

WRITES = frozenset({"transaction", "half", "publish"})  # calls that send messages
_NAMES = {COMMITTED: "committed", ABORTED: "aborted"}
_OUTCOMES = {name: outcome for outcome, name in _NAMES.items()}


def fates(operations: list[Operation], findings: Findings) -> Numbers:
    """Return, for each operation, the fate of the messages that it sent: UNKNOWN, COMMITTED or ABORTED.

    Add the finding "split-decision" for a transaction about which calls returned different outcomes.
    """
    fate = np.zeros(len(operations), np.int64)
    told: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        if outcome := told_by(operation):
            if (transaction := operation.transaction) is None:
                fate[operation.order] = outcome
            else:
                told[transaction].append((outcome, operation.order))
    known: dict[str | None, int] = {}
    for transaction, answers in told.items():
        if len({outcome for outcome, _ in answers}) == 1:
            known[transaction] = answers[0][0]
        else:  # a contradiction is its own finding; the other checks take the transaction for unknown
            calls = ", ".join(f"{operations[order].what}: {_NAMES[outcome]}" for outcome, order in answers[:20])
            text = f"transaction {transaction} has more than one outcome ({calls})"
            findings.add("split-decision", text, [order for _, order in answers])
    for operation in operations:
        if operation.what in WRITES and operation.transaction in told:
            fate[operation.order] = known.get(operation.transaction, UNKNOWN)
    return fate


def told_by(operation: Operation) -> int:
    """Return the fate, COMMITTED or ABORTED, that the operation returned; UNKNOWN if it returned neither."""
    outcome = operation.outcome
    if outcome is None and operation.result != "unknown" and operation.what in WRITES:
        return COMMITTED if operation.result == "ok" else ABORTED
    return _OUTCOMES.get(outcome or "", UNKNOWN)
