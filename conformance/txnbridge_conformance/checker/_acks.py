"""Checks of acknowledgements: a group processes each message in exactly one committed transaction."""

from __future__ import annotations

from collections import defaultdict

from txnbridge_conformance.checker._fates import ABORTED, COMMITTED, WRITES
from txnbridge_conformance.checker._tables import Numbers, Tables
from txnbridge_conformance.checker.findings import Findings


def check_acks(tables: Tables, fate: Numbers, findings: Findings) -> None:
    """Find messages that a group processed in two committed transactions, or that it read and never processed."""
    takers: dict[tuple[str, str], list[int]] = defaultdict(list)  # by group and value: transactions that did not abort
    for order, group, values in tables.history.acks:
        if fate[order] != ABORTED:
            for value in values:
                takers[group, value].append(order)
    for (group, value), orders in takers.items():
        committed = sorted({order for order in orders if fate[order] == COMMITTED})
        if len(committed) > 1:
            names = " and ".join(map(tables.name, committed))
            findings.add("replay-duplicate", f"group {group} processed {value} in {names}", committed, [value])
    for operation in tables.operations:
        if operation.what == "drained" and operation.result == "ok":
            group, topics = operation.fields["group"], frozenset(operation.fields["topics"])
            _check_drained(tables, fate, operation.order, group, topics, takers, findings)


def _check_drained(
    tables: Tables,
    fate: Numbers,
    drained: int,
    group: str,
    topics: frozenset[str],
    takers: dict[tuple[str, str], list[int]],
    findings: Findings,
) -> None:
    for writer, (topic, _), values in tables.history.sends:
        if topic in topics and fate[writer] == COMMITTED and tables.operations[writer].what in WRITES:
            for value in values:
                if (group, value) not in takers:
                    text = f"group {group} has read everything, and no transaction that may be committed took {value}"
                    findings.add("half-ack", text, [writer, drained], [value])
