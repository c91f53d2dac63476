"""Checks of owners, of check-backs, and of prepared transactions, by the order of calls in real time.

Only calls of processes on one host are compared, because monotonic clocks of two hosts are unrelated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from txnbridge_conformance.checker._fates import ABORTED
from txnbridge_conformance.checker._tables import NONE, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

# The longest time, in nanoseconds, between the call that prepares a transaction and an administrator's abort of the
# transaction by a list that was made before it was prepared.
_LISTED_BEFORE = 5 * 10**9


@dataclass
class _Session:
    """One opening of a transactional id: the earliest and latest time of its effect, and the transactions under it."""

    opened_after: int  # the begin of its opening
    opened_before: int | None  # the end of its first transaction that took effect; None if none did
    transactions: list[Operation]


def check_owners(tables: Tables, findings: Findings) -> None:
    """Find transactions that took effect although a newer owner had opened their id before their end was requested.

    A history that does not tell when the end was requested shows only transactions that began after the opening.
    """
    for owner, sessions in _sessions(tables).items():
        for session in sessions:
            for transaction in session.transactions:
                newer = [
                    other
                    for other in sessions
                    if session.opened_before is not None
                    and other.opened_before is not None
                    and session.opened_before < other.opened_after
                    and other.opened_before < transaction.fields.get("ending", transaction.start)
                ]
                if newer and transaction.result == "ok":
                    first = newer[0].transactions[0]
                    name = tables.name(transaction.order)
                    text = f"{name} took effect, although a newer owner had opened {owner[0]} before"
                    findings.add("zombie-write", text, [transaction.order, first.order])


def check_check_backs(tables: Tables, findings: Findings) -> None:
    """Find check-backs that showed other messages than those that their half-message transaction had sent."""
    halves = {each.transaction: each.order for each in tables.operations if each.what == "half" and each.transaction}
    sent: dict[int, list[str]] = defaultdict(list)
    for order, _, values in tables.history.sends:
        sent[order] += values
    for operation in tables.operations:
        half = halves.get(operation.transaction or "") if operation.what == "check" else None
        if half is not None and sorted(operation.fields["values"]) != sorted(sent[half]):
            shown = len(operation.fields["values"])
            text = f"{tables.name(operation.order)} showed {shown} messages, which are not the {len(sent[half])} sent"
            findings.add("checkback-lie", text, [half, operation.order])


def _sessions(tables: Tables) -> dict[tuple[str, str], list[_Session]]:
    """Return the sessions (see `_Session`) of each transactional id, by the id and the host of the owner."""
    sessions: dict[tuple[str, str], dict[str, _Session]] = defaultdict(dict)
    for operation in tables.operations:
        if (name := operation.fields.get("session")) is None:
            continue
        key = (operation.fields["owner"], tables.history.processes[operation.process].host)
        if operation.what == "open":
            sessions[key][name] = _Session(operation.start, None, [])
        elif operation.what == "transaction" and name in sessions[key]:
            session = sessions[key][name]
            session.transactions.append(operation)
            if operation.result == "ok" and session.opened_before is None:
                session.opened_before = operation.end
    return {key: list(found.values()) for key, found in sessions.items()}


def check_prepared(tables: Tables, fate: Numbers, findings: Findings) -> None:
    """Find prepared transactions that were read before any call for a commit, or aborted without a call for that."""
    asked: dict[str, list[Operation]] = defaultdict(list)
    for operation in tables.operations:
        if operation.transaction and operation.what in ("finish", "status"):
            asked[operation.transaction].append(operation)
    prepared = [each for each in tables.operations if each.outcome == "prepared" and each.transaction]
    _check_early_reads(tables, prepared, asked, findings)
    by_admin = [(fault.target, fault.mono) for fault in tables.history.faults if fault.kind.startswith("administrator")]
    named = {target for target, _ in by_admin}
    # Before a transaction is prepared, an administrator may know it by another name than its process does. On Kafka the
    # name of one with a made-up transactional id is this id, also after it is prepared.
    transactions = {operation.transaction for operation in tables.operations}
    unknown = [(target, at) for target, at in by_admin if target not in transactions]
    for operation in prepared:
        calls = asked[operation.transaction or ""]
        answers = [call for call in calls if call.outcome == "aborted" and call.end is not None]
        if fate[operation.order] != ABORTED or not answers or operation.end is None or operation.transaction in named:
            continue
        known = min(call.end for call in answers if call.end is not None)
        if any(call.fields.get("wish") == "abort" and call.start < known for call in calls):
            continue  # a call for an abort that began later changed nothing
        owner = (operation.transaction or "").partition("/")[0]
        if any(
            operation.start < at < (known if target.startswith(owner) else operation.end + _LISTED_BEFORE)
            for target, at in unknown
        ):
            continue
        if min(call.start for call in answers) < operation.end + operation.fields.get("hold", 0) * 1e9:
            text = f"{tables.name(operation.order)} was prepared and is aborted, which nobody asked for"
            findings.add("lost-prepare", text, [operation.order, *(call.order for call in calls)])


def _check_early_reads(
    tables: Tables, prepared: list[Operation], asked: dict[str, list[Operation]], findings: Findings
) -> None:
    never = np.iinfo(np.int64).max
    commits_at = np.full(len(tables.operations), NONE, np.int64)
    for operation in prepared:
        calls = asked[operation.transaction or ""]
        starts = [call.start for call in calls if call.what == "finish" and call.fields.get("wish") != "abort"]
        commits_at[operation.order] = min(starts, default=never)
    ends = np.array([never if each.end is None else each.end for each in tables.operations], np.int64)
    writer = np.where(tables.reads.value == NONE, NONE, tables.writer[np.maximum(tables.reads.value, 0)])
    rows = np.flatnonzero(writer != NONE)
    rows = rows[(commits_at[writer[rows]] != NONE) & (ends[tables.reads.operation[rows]] < commits_at[writer[rows]])]
    for row in rows:
        order, reader = int(writer[row]), int(tables.reads.operation[row])
        value = tables.value(tables.reads.value[row])
        text = (
            f"{tables.name(reader)} read {value} before any call could have committed the prepared {tables.name(order)}"
        )
        findings.add("early-read", text, [order, reader], [value])
