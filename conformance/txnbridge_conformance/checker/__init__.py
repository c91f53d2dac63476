"""The checker: pure functions from a history to named findings with their evidence.

`check(history)` runs all checks. `_tables` turns the history into tables of numbers, and `_fates` finds the outcome of
each transaction. `_messages` checks what readers read, `_order` in which order, `_acks` what groups process, `_owners`
what owners and prepared transactions may do, `_cycles` whether transactions are isolated, `_calls` whether calls end in
time. `findings` has the names and their meanings.
"""

from __future__ import annotations

from txnbridge_conformance.checker import _acks, _calls, _cycles, _fates, _messages, _order, _owners
from txnbridge_conformance.checker._tables import Tables
from txnbridge_conformance.checker.findings import MEANINGS, Finding, Findings
from txnbridge_conformance.history import History

__all__ = ["MEANINGS", "Finding", "Findings", "check"]


def check(history: History) -> Findings:
    """Return all findings of a history."""
    findings, tables = Findings(), Tables(history)
    fate = _fates.fates(history.operations, findings)
    _messages.check_positions(tables, findings)
    _messages.check_reads(tables, fate, findings)
    for read in _messages.full_reads(tables, findings):
        _messages.check_full_read(tables, fate, read, findings)
    _owners.check_owners(tables, findings)
    _owners.check_prepared(tables, fate, findings)
    _calls.check_calls(tables, findings)
    _acks.check_acks(tables, fate, findings)
    rank = _order.ranks(tables, fate)
    _order.check_order(tables, fate, rank, findings)
    _cycles.check_cycles(tables, fate, rank, findings)
    return findings
