"""The checker: pure functions from a history to named findings with their evidence.

`check(history)` runs all checks. `_tables` turns the history into tables of numbers, and finds the outcome of each
transaction that calls have told, `_full_reads` what calls of unknown result have done. `_clocks` knows which of
two moments was the earlier one. The checks: `_messages` and `_full_reads` of the messages that were read, and of
acknowledgements, `_order` of their order, `_call_order` of fencing and prepared transactions, `_cycles` of isolation,
and `_hangs_and_crashes` of calls and processes. `findings` has the names of findings, their meanings and causes.
"""

from __future__ import annotations

from txnbridge_conformance.checker import _call_order, _cycles, _full_reads, _hangs_and_crashes, _messages, _order
from txnbridge_conformance.checker._clocks import RealTime
from txnbridge_conformance.checker._tables import ABORTED, COMMITTED, Tables, fates, since_made_anew
from txnbridge_conformance.checker.findings import MEANINGS, Finding, Findings
from txnbridge_conformance.history import History

__all__ = ["ABORTED", "COMMITTED", "MEANINGS", "Finding", "Findings", "check", "fates"]


def check(history: History) -> Findings:
    """Run every check on a history, and return the findings."""
    findings, tables = Findings(), Tables(since_made_anew(history))
    fate = fates(history.operations, findings)
    _messages.check_positions(tables, findings)
    time = RealTime(tables, fate)
    refined, absent = _full_reads.refine(tables, fate, time)
    findings.fate = refined.tolist()
    _messages.check_reads(tables, refined, time, findings)
    _full_reads.check_full_reads(tables, fate, refined, time, findings)
    _call_order.check_owners(tables, refined, time, findings)
    _call_order.check_check_backs(tables, refined, findings)
    _call_order.check_claims(tables, findings)
    _call_order.check_prepared(tables, fate, time, findings)
    _hangs_and_crashes.check_hangs_and_crashes(tables, findings)
    _messages.check_acks(tables, refined, absent, time, findings)
    rank = _order.ranks(tables, fate)
    _order.check_polls(tables, fate, rank, findings)
    _order.check_sends(tables, fate, rank, findings)
    _cycles.check_cycles(tables, fate, rank, findings)
    return findings
