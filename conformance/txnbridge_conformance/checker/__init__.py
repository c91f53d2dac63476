"""The checker: pure functions from a history to named findings with their evidence.

`check(history)` runs all checks. `_tables` turns the history into tables of numbers, and `_fates` finds the outcome of
each transaction. Six modules check it: `_messages` the messages that were read, `_order` their order, `_acks` the
acknowledgements, `_call_order` fencing and prepared transactions, `_cycles` isolation, and `_hangs_and_crashes` calls
and processes. `findings` has the names of findings and their meanings.
"""

from __future__ import annotations

from txnbridge_conformance.checker import _acks, _call_order, _cycles, _hangs_and_crashes, _messages, _order
from txnbridge_conformance.checker._clocks import RealTime
from txnbridge_conformance.checker._fates import ABORTED, COMMITTED, fates
from txnbridge_conformance.checker._tables import Tables, since_made_anew
from txnbridge_conformance.checker.findings import MEANINGS, Finding, Findings
from txnbridge_conformance.history import History

__all__ = ["ABORTED", "COMMITTED", "MEANINGS", "Finding", "Findings", "check", "fates"]


def check(history: History) -> Findings:
    """Run every check on a history, and return the findings."""
    findings, tables = Findings(), Tables(since_made_anew(history))
    fate = fates(history.operations, findings)
    _messages.check_positions(tables, findings)
    time = RealTime(tables, fate)
    refined, absent = _messages.refine(tables, fate, time)
    _messages.check_reads(tables, refined, time, findings)
    for read in _messages.full_reads(tables):
        _messages.check_full_read(tables, fate, time, read, findings)
    _call_order.check_owners(tables, refined, findings)
    _call_order.check_check_backs(tables, findings)
    _call_order.check_prepared(tables, fate, time, findings)
    _hangs_and_crashes.check_hangs_and_crashes(tables, findings)
    _acks.check_acks(tables, refined, absent, time, findings)
    rank = _order.ranks(tables, fate)
    _order.check_order(tables, fate, rank, findings)
    _cycles.check_cycles(tables, fate, rank, findings)
    return findings
