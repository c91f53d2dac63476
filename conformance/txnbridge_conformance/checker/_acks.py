"""Checks of acknowledgements: a group processes each message in exactly one committed transaction."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from txnbridge_conformance.checker._clocks import RealTime
from txnbridge_conformance.checker._fates import ABORTED, COMMITTED, WRITES
from txnbridge_conformance.checker._tables import NONE, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings


def check_acks(tables: Tables, fate: Numbers, absent: Numbers, time: RealTime, findings: Findings) -> None:
    """Find messages that a group processed in two committed transactions, or that it read and never processed.

    `fate` and `absent` are those of full reads (see `refine`): a transaction whose output is there has acknowledged,
    and one whose output is absent has not.
    """
    takers: dict[tuple[str, str], list[int]] = defaultdict(list)  # by group and value: transactions that did not abort
    for order, group, values in tables.history.acks:
        if (fate[order] != ABORTED or absent[order] != NONE) and order not in time.never_asked:
            for value in values:
                takers[group, value].append(order)
    for (group, value), orders in takers.items():
        committed = sorted({order for order in orders if fate[order] == COMMITTED})
        if len(committed) > 1:
            names = " and ".join(map(tables.name, committed))
            findings.add("replay-duplicate", f"group {group} processed {value} in {names}", committed, [value])
    # What a group had to have read before one call, it had to have read before a later one, too.
    drained = {
        (
            operation.fields["group"],
            frozenset(operation.fields["topics"]),
            int(tables.clock[operation.order]),
        ): operation
        for operation in tables.operations
        if operation.what == "drained" and operation.result == "ok"
    }
    for (group, topics, _), operation in drained.items():
        _check_drained(tables, fate, absent, time, operation.order, group, topics, takers, findings)


def _check_drained(
    tables: Tables,
    fate: Numbers,
    absent: Numbers,
    time: RealTime,
    drained: int,
    group: str,
    topics: frozenset[str],
    takers: dict[tuple[str, str], list[int]],
    findings: Findings,
) -> None:
    sends = [
        (writer, values)
        for writer, (topic, _), values in tables.history.sends
        if topic in topics and fate[writer] == COMMITTED and tables.operations[writer].what in WRITES
    ]
    writers = np.array([writer for writer, _ in sends], np.int64)
    due = time.visible.precede(writers, np.full(len(writers), drained))
    # A transaction may have been committed after a full read that shows it to be aborted.
    shown = np.flatnonzero(absent != NONE)
    aborted = set(shown[time.ended_before(np.full(len(shown), drained), absent[shown])].tolist())
    for at in map(int, np.flatnonzero(due)):
        writer, values = sends[at]
        for value in values:
            taken = takers.get((group, value), ())
            if aborted.issuperset(taken):
                text = f"group {group} has read everything, and no transaction that may be committed took {value}"
                findings.add("half-ack", text, [writer, drained, *taken], [value])
