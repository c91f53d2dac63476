"""Checks of messages: readers get each committed message once, in its partition, after its commit, and no other.

A group processes each message in exactly one committed transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from txnbridge_conformance.checker._clocks import RealTime, prepares
from txnbridge_conformance.checker._tables import ABORTED, COMMITTED, NONE, UNKNOWN, WRITES, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

_Takers = dict[tuple[str, str], list[int]]  # by group and value: transactions that acknowledge it and did not abort


def check_positions(tables: Tables, findings: Findings) -> None:
    """Find messages that are stored at several positions of a partition, and positions that hold several messages.

    Find copies of messages, too, that only readers of other clients received.
    """
    key = np.concatenate([tables.reads.key, tables.stored.key])
    place = np.concatenate([tables.reads.place, tables.stored.place])
    value = np.concatenate([tables.reads.value, tables.stored.value])
    known = (value != NONE) & (place != NONE)
    known[: len(tables.dropped)] &= ~tables.dropped
    by_place = np.unique(np.stack([key, place, value], axis=1)[known], axis=0)
    for rows in _repeated(by_place[:, :2]):
        values = [tables.value(number) for number in by_place[rows, 2]]
        text = f"one position of {tables.key(by_place[rows[0], 0])} holds {', '.join(values[:5])}"
        text += " and others" * (len(values) > 5)
        writers = sorted({int(tables.writer[number]) for number in by_place[rows, 2]} - {NONE})
        findings.add("inconsistent-offsets", text, writers, values)
    by_value = by_place[np.lexsort((by_place[:, 1], by_place[:, 0], by_place[:, 2]))]
    for rows in _repeated(by_value[:, 2:]):
        number = by_value[rows[0], 2]
        keys = " and ".join(tables.key(key) for key in np.unique(by_value[rows, 0]))
        text = f"{tables.value(number)} is at {len(rows)} positions of {keys}"
        findings.add("duplicate", text, _known(tables.writer[number]), [tables.value(number)])
    for row in np.flatnonzero(tables.dropped):
        reader, number = int(tables.reads.operation[row]), int(tables.reads.value[row])
        text = f"{tables.name(reader)} read a copy of {tables.value(number)}, which our readers drop"
        findings.add("foreign-duplicate", text, [*_known(tables.writer[number]), reader], [tables.value(number)])


def check_reads(tables: Tables, fate: Numbers, time: RealTime, findings: Findings) -> None:
    """Find messages that were read although no process sent them, or although their transaction was aborted.

    Find also messages that were read before their commit, in the transaction that sent them, or from a partition to
    which nobody sent them. `fate` has the outcomes that `refine` found by full reads.
    """
    rows = np.flatnonzero(tables.reads.value != NONE)
    values, first = np.unique(tables.reads.value[rows], return_index=True)
    writers = tables.writer[values]
    for at in np.flatnonzero(writers == NONE):
        reader, value = int(tables.reads.operation[rows[first[at]]]), tables.value(values[at])
        findings.add("phantom-message", f"{tables.name(reader)} read {value}, which no process sent", [reader], [value])
    changed = tables.of_senders[tables.reads.changed[tables.of_senders]]
    for row in changed[np.unique(tables.reads.value[changed], return_index=True)[1]]:
        reader, number = int(tables.reads.operation[row]), int(tables.reads.value[row])
        text = f"{tables.name(reader)} read {tables.value(number)} with other content"
        findings.add("changed", text, [int(tables.writer[number]), reader], [tables.value(number)])
    for at in np.flatnonzero((writers != NONE) & (fate[writers] == ABORTED)):
        reader, writer = int(tables.reads.operation[rows[first[at]]]), int(writers[at])
        value = tables.value(values[at])
        fenced = tables.operations[writer].fields.get("error") == "Fenced"
        text = f"{tables.name(reader)} read {value} of the aborted {tables.name(writer)}"
        findings.add("zombie-write" if fenced else "G1a", text, [writer, reader], [value])
    rows = tables.of_senders
    value = tables.reads.value[rows]
    reader, writer = tables.reads.operation[rows], tables.writer[value]
    strays = rows[tables.home[value] != tables.reads.key[rows]]
    _, first = np.unique(np.stack([tables.reads.value[strays], tables.reads.key[strays]]), axis=1, return_index=True)
    for row in strays[first]:
        order, number = int(tables.reads.operation[row]), int(tables.reads.value[row])
        there, chosen = tables.key(tables.reads.key[row]), tables.key(tables.home[number])
        text = f"{tables.name(order)} read {tables.value(number)} from {there}, its sender chose {chosen}"
        findings.add("wrong-partition", text, [int(tables.writer[number]), order], [tables.value(number)])
    for row in rows[reader == writer]:
        order, text = int(tables.reads.operation[row]), tables.value(tables.reads.value[row])
        findings.add("precommitted-read", f"{tables.name(order)} read its own {text}", [order], [text])
    ends_later = np.array([each.what in ("transaction", "half") for each in tables.operations], bool)
    early = ends_later[writer] & (reader != writer) & (fate[writer] != ABORTED) & time.asked.follow(writer, reader)
    for row in rows[early]:
        order, number = int(tables.reads.operation[row]), int(tables.reads.value[row])
        sender, value = int(tables.writer[number]), tables.value(number)
        text = f"{tables.name(order)} read {value} before any call could have committed {tables.name(sender)}"
        findings.add("early-read", text, [sender, order], [value])


def _known(operation: int) -> list[int]:
    return [] if operation == NONE else [int(operation)]


def _repeated(rows: Numbers) -> Iterator[Numbers]:
    """Yield the indexes of the rows of each run of two or more equal rows."""
    if len(rows) < 2:
        return
    same = np.all(rows[1:] == rows[:-1], axis=1)
    begins = np.flatnonzero(np.concatenate(([True], ~same, [True])))
    for at in np.flatnonzero(np.diff(begins) > 1):
        yield np.arange(begins[at], begins[at + 1])


def check_acks(tables: Tables, fate: Numbers, absent: Numbers, time: RealTime, findings: Findings) -> None:
    """Find messages that a group processed in two committed transactions, or that it read and never processed.

    `fate` and `absent` come from `refine`: a transaction whose output a full read received has acknowledged its input,
    and one whose output it missed has not. One that alone can have processed a message has acknowledged its others.
    """
    takers: _Takers = defaultdict(list)
    for order, group, values in tables.history.acks:
        if (fate[order] != ABORTED or absent[order] != NONE) and order not in time.never_asked:
            for value in values:
                takers[group, value].append(order)
    for (group, value), orders in takers.items():
        if len(committed := sorted({order for order in orders if fate[order] == COMMITTED})) > 1:
            names = " and ".join(map(tables.name, committed))
            findings.add("replay-duplicate", f"group {group} processed {value} in {names}", committed, [value])
    # What a group had to have read before one call, it had to have read before a later one, too.
    drained = {
        (each.fields["group"], frozenset(each.fields["topics"]), int(tables.clock[each.order])): each
        for each in tables.operations
        if each.what == "drained" and each.result == "ok"
    }
    for operation in drained.values():
        _check_drained(tables, fate, absent, time, operation, takers, findings)


def _check_drained(
    tables: Tables, fate: Numbers, absent: Numbers, time: RealTime, call: Operation, takers: _Takers, findings: Findings
) -> None:
    drained, group, topics = call.order, call.fields["group"], call.fields["topics"]
    writes = (fate != ABORTED) & np.array([each.what in WRITES for each in tables.operations], bool)
    there = np.array([tables.key_of(key)[0] in topics for key in range(len(tables.keys))], bool)
    rows = np.flatnonzero(writes[tables.sends.operation] & there[tables.sends.key])
    writers, sent, at = tables.sends.operation[rows], tables.sends.value[rows], np.full(len(rows), drained)
    due = (fate[writers] == COMMITTED) & time.visible.precede(writers, at) | time.received.precede(sent, at)
    # A transaction may have been committed after a full read that shows it to be aborted.
    shown = np.flatnonzero(absent != NONE)
    aborted = set(shown[time.ended_before(np.full(len(shown), drained), absent[shown])].tolist())
    alone: dict[int, str] = {}  # by transaction of unknown fate: a message that no other one can have processed
    for writer, value in zip(writers[due].tolist(), map(tables.value, sent[due]), strict=True):
        taken = takers.get((group, value), ())
        if not (left := set(taken) - aborted):
            text = f"group {group} has read everything, and no transaction that may be committed took {value}"
            findings.add("half-ack", text, [writer, drained, *taken], [value])
        elif len(left) == 1 and fate[only := min(left)] == UNKNOWN and not prepares(tables.operations[only]):
            alone[only] = value
    for (name, value), orders in takers.items() if alone else ():
        for only in alone.keys() & orders:
            others = np.array([order for order in orders if fate[order] == COMMITTED], np.int64)
            for other in others[time.committed.precede(others, np.full(len(others), drained))][:1]:
                text = f"group {name} processed {value} in {tables.name(other)} and in {tables.name(only)}"
                text += f", which alone took {alone[only]}"
                findings.add("replay-duplicate", text, [only, int(other), drained], [value])
