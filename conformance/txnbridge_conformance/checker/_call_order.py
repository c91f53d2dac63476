"""Checks of owners, of check-backs, and of prepared transactions, by the order of calls in real time.

Calls of two hosts are compared only where messages between them have shown their order.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from txnbridge_conformance.checker._clocks import RealTime, prepares
from txnbridge_conformance.checker._tables import ABORTED, COMMITTED, NONE, Numbers, Tables, told_by
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import CHANGED, Operation

# The longest time, in nanoseconds, between the call that prepares a transaction and an administrator's abort of the
# transaction by a list that was made before it was prepared.
_LISTED_BEFORE = 5 * 10**9
# How many seconds after its hold and its deadline a prepared transaction may still be there: brokers look for such
# transactions at times only.
_LATE_SECONDS = 30.0


@dataclass
class _Session:
    """One owner of a transactional id: when the call that opened the id began and ended, and its transactions."""

    opening: int
    opened_after: int
    opened: float | None  # None if the call did not end well
    opened_before: float  # the latest time of its effect, infinite if neither the call nor a transaction shows one
    transactions: list[Operation]


def check_owners(tables: Tables, fate: Numbers, time: RealTime, findings: Findings) -> None:
    """Find transactions that took effect although a newer owner had opened their id before their end was requested.

    A history that does not tell when the end was requested shows only transactions that began after the opening. `fate`
    has the outcomes that `refine` found by full reads: they show the transactions of killed owners, too.
    """
    by_owner = _sessions(tables, fate)
    for (owner, clock), sessions in by_owner.items():
        others = {key[1]: each for key, each in by_owner.items() if key[0] == owner}  # by clock
        if len(others) == 1:  # no other host opens it
            _check_fenced(tables, owner, sessions, findings)
        found: dict[int, int] = {}  # by transaction: the opening that fenced its owner
        for other, rivals in others.items():
            starts = [rival.opened_after for rival in rivals]
            # For each rival, from the last one on: which had opened the id first, of it and those that began it later.
            firsts = list(itertools.accumulate(((each.opened_before, each.opening) for each in rivals[::-1]), min))
            for session in sessions:
                newer = bisect_right(starts, session.opened_before + time.shift[clock, other])
                for transaction in session.transactions if newer < len(rivals) else ():
                    opened, opening = firsts[-1 - newer]
                    ending = transaction.fields.get("ending", transaction.start)
                    if opened + time.shift[other, clock] < ending and _took_effect(transaction, fate):
                        found.setdefault(transaction.order, opening)
        for order, opening in found.items():
            text = f"{tables.name(order)} took effect, although a newer owner had opened {owner} before"
            findings.add("zombie-write", text, [order, opening])


def _took_effect(transaction: Operation, fate: Numbers) -> bool:
    return transaction.result == "ok" or bool(fate[transaction.order] == COMMITTED)


def _check_fenced(tables: Tables, owner: str, sessions: list[_Session], findings: Findings) -> None:
    """Find owners that were fenced, although no other one can have opened their id since they began to open it.

    An administrator's abort may fence an owner, too, and so may a transaction that a broker has timed out.
    """
    known = {each.transaction for each in tables.operations}
    for session in sessions:
        mine, since = {each.transaction for each in session.transactions}, session.opened_after
        faults = [fault for fault in tables.history.faults if fault.target in mine or fault.target not in known]
        aborts = [fault.mono for fault in faults if fault.kind.startswith("administrator")]
        for fenced in session.transactions:
            if session.opened is None or fenced.fields.get("error") != "Fenced" or (end := fenced.end) is None:
                continue
            others = [each for each in sessions if each is not session and each.opened_after < end]
            if not (
                any(each.opened is None or each.opened > since for each in others)
                or any(at < end + _LISTED_BEFORE for at in aborts)
                or any(_is_late(each, end) for each in session.transactions if each.start < end)
            ):
                text = f"{tables.name(fenced.order)} was fenced, and nobody had opened {owner} since its owner did"
                findings.add("false-fence", text, [fenced.order])


def _is_late(transaction: Operation, now: int) -> bool:
    """Return whether a broker may have ended a transaction by the time `now`, because its process did not in time."""
    fields, prepared = transaction.fields, prepares(transaction)
    ended = now if prepared or transaction.result == "unknown" else transaction.end or now
    return bool(ended > transaction.start + (fields.get("deadline", 0) + fields.get("hold", 0) * prepared) * 1e9)


def check_check_backs(tables: Tables, fate: Numbers, findings: Findings) -> None:
    """Find check-backs that showed other messages than those that their half-message transaction had sent.

    A process that was killed early has not recorded the name of its transaction: its messages name it. Find those of
    them that full reads received (`fate`), although their work was not done.
    """
    halves = {each.transaction: each.order for each in tables.operations if each.what == "half" and each.transaction}
    undone = {each.transaction for each in tables.operations if each.what == "decided" and told_by(each) == ABORTED}
    sent: dict[int, list[str]] = defaultdict(list)
    for order, _, values in tables.history.sends:
        sent[order] += values
    for operation in [each for each in tables.operations if each.what == "check"]:
        values, half = operation.fields["values"], halves.get(operation.transaction or "")
        if half is None:
            senders = {tables.history.senders.get(value.removeprefix(CHANGED), NONE) for value in values} or {NONE}
            if all(each != NONE and tables.operations[each].transaction is None for each in senders):
                if operation.transaction in undone and any(fate[each] == COMMITTED for each in senders):
                    text = f"what {tables.name(operation.order)} showed was published, and its work was not done"
                    findings.add("phantom-commit", text, [*senders, operation.order])
                continue
            findings.add("checkback-lie", f"{tables.name(operation.order)} was never stored", [operation.order])
        elif sorted(values) != sorted(sent[half]):
            text = f"{tables.name(operation.order)} showed {len(values)} messages, not the {len(sent[half])} sent"
            findings.add("checkback-lie", text, [half, operation.order])


def check_claims(tables: Tables, findings: Findings) -> None:
    """Find decisions of a decision log that no claim on their ids, begun before they were returned, asked for."""
    claims: dict[str, list[Operation]] = defaultdict(list)
    for operation in tables.operations:
        if operation.what == "claim" and operation.transaction:
            claims[operation.transaction].append(operation)
    clocks = tables.clock.tolist()
    for name, each in claims.items():
        wished: dict[tuple[str, int], int] = {}  # by wish and clock, when the first claim with it began
        for claim in each:
            key = claim.fields.get("wish") or "", clocks[claim.order]
            wished[key] = min(claim.start, wished.get(key, claim.start))
        for claim in filter(told_by, each):
            own = clocks[claim.order]
            asked = tuple({w for (w, clock), start in wished.items() if clock != own or start <= (claim.end or start)})
            if not str(claim.outcome).startswith(asked):  # "commit" begins "committed"
                text = f"{name} was decided as {claim.outcome}, for which none of its {len(each)} claims had asked"
                findings.add("split-decision", text, [claim.order])
                break


def _sessions(tables: Tables, fate: Numbers) -> dict[tuple[str, int], list[_Session]]:
    """Return each transactional id's owners in turn, with their transactions. Keys are the id and the owner's clock."""
    sessions: dict[tuple[str, int], dict[str, _Session]] = defaultdict(dict)
    for operation in tables.operations:
        if (name := operation.fields.get("session")) is None:
            continue
        found = sessions[operation.fields["owner"], int(tables.clock[operation.order])]
        if operation.what == "open":
            end = operation.end if operation.result == "ok" else None
            found[name] = _Session(operation.order, operation.start, end, math.inf if end is None else end, [])
        elif operation.what == "transaction" and name in found:
            session, begun = found[name], operation.fields.get("begun")
            session.transactions.append(operation)
            proven = begun if begun is not None else operation.end if _took_effect(operation, fate) else None
            if proven is not None:
                session.opened_before = min(session.opened_before, proven)
    return {key: sorted(found.values(), key=lambda each: each.opened_after) for key, found in sessions.items()}


def check_prepared(tables: Tables, fate: Numbers, time: RealTime, findings: Findings) -> None:
    """Find prepared transactions that were aborted without a call for that, or that long outlived their hold.

    Find also calls that returned that a transaction is prepared after its outcome had been returned.
    """
    asked: dict[str, list[Operation]] = defaultdict(list)
    for operation in tables.operations:
        if operation.transaction and operation.what in ("finish", "status"):
            asked[operation.transaction].append(operation)
    _check_statuses(tables, time, asked, findings)
    aborts = _AdminAborts(tables)
    for operation in tables.operations:
        prepared = operation.what == "transaction" and operation.outcome == "prepared"
        if not prepared or not operation.transaction or operation.end is None:
            continue
        calls, clock = asked[operation.transaction], tables.clock[operation.order]
        here = [call for call in calls if tables.clock[call.order] == clock]
        hold = operation.fields.get("hold", 0) * 1e9
        if fate[operation.order] == ABORTED:
            known = min((one.end for one in here if one.outcome == "aborted" and one.end is not None), default=math.inf)
            # A call for an abort that began later changed nothing.
            wanted = any(
                call.fields.get("wish") == "abort" and (call.start < known or tables.clock[call.order] != clock)
                for call in calls
            )
            expires = operation.fields.get("ending", operation.start) + hold
            if known < expires and not wanted and not aborts.explain(operation, known):
                text = f"{tables.name(operation.order)} was prepared and is aborted, which nobody asked for"
                findings.add("lost-prepare", text, [operation.order, *(call.order for call in calls)])
        commits = [call for call in calls if call.what == "finish" and call.fields.get("wish") != "abort"]
        is_known = fate[operation.order] == COMMITTED and len(here) == len(calls)
        first = sorted(commits, key=lambda call: call.start)[:1] if is_known else []
        latest = operation.end + hold + (operation.fields.get("deadline", 0) + _LATE_SECONDS) * 1e9
        said = [*first, *(call for call in here if call.outcome == "prepared")]
        if "hold" in operation.fields and (late := [call for call in said if call.start > latest]):
            behind, how = (late[0].start - operation.end) / 1e9, "committed" if late[0] in first else "still prepared"
            text = f"{tables.name(operation.order)} was {how} {behind:.0f} s after it was prepared"
            findings.add("hang", f"{text}, its hold is {hold / 1e9:g} s", [operation.order, late[0].order])


def _check_statuses(tables: Tables, time: RealTime, asked: dict[str, list[Operation]], findings: Findings) -> None:
    """Find calls that returned that a transaction is prepared, or for ever unknown, behind another with its outcome."""
    for name, calls in asked.items():
        said_prepared = any(call.outcome == "prepared" for call in calls)  # what the sender's call told may get lost
        own = [tables.operations[order] for order in time.writes[name] if said_prepared]
        known = [call for call in (*calls, *own) if told_by(call) and call.end is not None]
        known.sort(key=lambda call: (call.end, call.order), reverse=True)
        finals = np.array([*{(call.process, call.clock): call.order for call in known}.values()])  # the first of each
        lost = [call for call in calls if call.fields.get("final", call.fields.get("error") == "EvidenceLost")]
        said = {call.order: "its outcome is lost" for call in lost if call.outcome in (None, "unknown")}
        said |= {call.order: "it is prepared" for call in calls if call.outcome == "prepared"}
        for status, text in said.items() if known else ():
            before = finals[time.ended_before(finals, np.full(len(finals), status))]
            if len(before):
                text = f"{tables.name(status)} returned that {text}, after its outcome had been returned"
                findings.add("split-decision", text, [int(before[0]), status])


class _AdminAborts:
    """The aborts by an administrator in a history, which explain the aborts of prepared transactions."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        aborts = [fault for fault in tables.history.faults if fault.kind.startswith("administrator")]
        self._targets = {fault.target for fault in aborts}
        # Before a transaction is prepared, an administrator may know it by another name than its process does. On Kafka
        # the name of one with a made-up transactional id is this id, also after it is prepared.
        transactions = {operation.transaction for operation in tables.operations}
        unknown = [fault for fault in aborts if fault.target not in transactions]
        self._clocks = {tables.clock_of(fault) for fault in unknown}
        self._unknown = sorted((fault.mono, tables.clock_of(fault), fault.target) for fault in unknown)

    def explain(self, prepared: Operation, known: float) -> bool:
        """Return whether an administrator may have aborted this transaction, by the time `known` at the latest."""
        if prepared.transaction in self._targets:
            return True
        assert prepared.transaction is not None and prepared.end is not None
        owner, clock = prepared.transaction.partition("/")[0], self._tables.clock[prepared.order]
        listed, known = prepared.end + _LISTED_BEFORE, known + _LISTED_BEFORE  # an abort is recorded after its answer
        first = bisect_right(self._unknown, (prepared.start, len(self._tables.clocks)))
        return any(
            at < (known if target.startswith(owner) else listed) and of == clock
            for at, of, target in self._unknown[first : bisect_left(self._unknown, (max(known, listed),))]
        ) or not self._clocks <= {clock}
