"""Checks of messages: readers get each committed message once, whole transactions, and no other messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from txnbridge_conformance.checker._fates import ABORTED, COMMITTED
from txnbridge_conformance.checker._tables import NONE, Flags, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings


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
        text = f"one position of {tables.key(by_place[rows[0], 0])} holds {_list(values)}"
        findings.add("inconsistent-offsets", text, (), values)
    by_value = by_place[np.lexsort((by_place[:, 1], by_place[:, 0], by_place[:, 2]))]
    for rows in _repeated(by_value[:, [2, 0]]):
        key_number, _, number = by_value[rows[0]]
        text = f"{tables.value(number)} is at {len(rows)} positions of {tables.key(key_number)}"
        findings.add("duplicate", text, _known(tables.writer[number]), [tables.value(number)])
    for row in np.flatnonzero(tables.dropped):
        reader, number = int(tables.reads.operation[row]), int(tables.reads.value[row])
        text = f"{tables.name(reader)} read a copy of {tables.value(number)}, which our readers drop"
        findings.add("foreign-duplicate", text, [*_known(tables.writer[number]), reader], [tables.value(number)])


def check_reads(tables: Tables, fate: Numbers, findings: Findings) -> None:
    """Find messages that were read although no process sent them, or although their transaction was aborted.

    Find also messages that were read in the transaction that sent them, or from a partition to which nobody sent them.
    """
    rows = np.flatnonzero(tables.reads.value != NONE)
    values, first = np.unique(tables.reads.value[rows], return_index=True)
    writers = tables.writer[values]
    for at in np.flatnonzero(writers == NONE):
        reader, value = int(tables.reads.operation[rows[first[at]]]), tables.value(values[at])
        findings.add("phantom-message", f"{tables.name(reader)} read {value}, which no process sent", [reader], [value])
    for at in np.flatnonzero((writers != NONE) & (fate[writers] == ABORTED)):
        reader, writer = int(tables.reads.operation[rows[first[at]]]), int(writers[at])
        value = tables.value(values[at])
        fenced = tables.operations[writer].fields.get("error") == "Fenced"
        text = f"{tables.name(reader)} read {value} of the aborted {tables.name(writer)}"
        findings.add("zombie-write" if fenced else "G1a", text, [writer, reader], [value])
    strays = rows[first][(writers != NONE) & (tables.home[values] != tables.reads.key[rows[first]])]
    for row in strays:
        reader, number = int(tables.reads.operation[row]), int(tables.reads.value[row])
        there, chosen = tables.key(tables.reads.key[row]), tables.key(tables.home[number])
        text = f"{tables.name(reader)} read {tables.value(number)} from {there}, its sender chose {chosen}"
        findings.add("wrong-partition", text, [int(tables.writer[number]), reader], [tables.value(number)])
    for row in rows[tables.reads.operation[rows] == tables.writer[tables.reads.value[rows]]]:
        operation, value = int(tables.reads.operation[row]), tables.value(tables.reads.value[row])
        findings.add("precommitted-read", f"{tables.name(operation)} read its own {value}", [operation], [value])


@dataclass(frozen=True)
class FullRead:
    """The messages that one call received by reading each partition of `topics` from its start to its end."""

    operation: int
    topics: frozenset[str]
    seen: Flags  # by value: whether it was read
    highest: Numbers  # by key: the highest place that was read


def full_reads(tables: Tables, findings: Findings) -> Iterator[FullRead]:
    """Yield a `FullRead` for each call that read whole topics; add "stuck-reader" for one that did not finish."""
    for operation in tables.operations:
        if operation.what == "read" and operation.result != "ok":
            findings.add("stuck-reader", f"{tables.name(operation.order)} did not reach the end", [operation.order])
        elif operation.what == "read":
            rows = np.flatnonzero(tables.reads.operation == operation.order)
            values = tables.reads.value[rows]
            seen = np.zeros(len(tables.values), bool)
            seen[values[values != NONE]] = True
            highest = np.full(len(tables.keys), NONE, np.int64)
            np.maximum.at(highest, tables.reads.key[rows], tables.reads.place[rows])
            yield FullRead(operation.order, frozenset(operation.fields["topics"]), seen, highest)


def check_full_read(tables: Tables, fate: Numbers, read: FullRead, findings: Findings) -> None:
    """Compare what a reader that read whole topics has received with the outcomes of transactions (`fate`).

    Find committed messages that were not read, transactions of which only some messages were read, aborted transactions
    that were read, and committed transactions of which no message was read.
    """
    sends = tables.sends
    covered = np.array([tables.key_of(number)[0] in read.topics for number in range(len(tables.keys))], bool)
    rows = np.flatnonzero(covered[sends.key])
    seen = read.seen[sends.value[rows]]
    _find_repeated(tables, read, findings)
    _find_missing(tables, read, rows[~seen & (fate[sends.operation[rows]] == COMMITTED)], findings)
    total = np.bincount(sends.operation[rows], minlength=len(tables.operations))
    found = np.bincount(sends.operation[rows][seen], minlength=len(tables.operations))
    # Messages that were published without a transaction are not one atom.
    atoms = (total > 0) & np.array([operation.what != "publish" for operation in tables.operations], bool)
    reader = tables.name(read.operation)
    for writer in map(int, np.flatnonzero(atoms & (found > 0) & (found < total))):
        text = f"{reader} read {found[writer]} of {total[writer]} messages of {tables.name(writer)}"
        findings.add("torn-transaction", text, [writer, read.operation])
    for writer in map(int, np.flatnonzero(atoms & (found == 0) & (fate == COMMITTED))):
        text = f"{tables.name(writer)} was said to be committed; {reader} read none of its messages"
        half = tables.operations[writer].what == "half"
        findings.add("orphan-half" if half else "outcome-lie", text, [writer, read.operation])
    for writer in map(int, np.flatnonzero(atoms & (found == total) & (fate == ABORTED))):
        text = f"{tables.name(writer)} was said to be aborted; {reader} read all of its messages"
        half = tables.operations[writer].what == "half"
        findings.add("phantom-commit" if half else "outcome-lie", text, [writer, read.operation])


def _find_repeated(tables: Tables, read: FullRead, findings: Findings) -> None:
    """Find messages that a full read received more than once, if its reader records no positions."""
    reads = tables.reads
    rows = (reads.operation == read.operation) & (reads.value != NONE) & (reads.place == NONE)
    values, counts = np.unique(reads.value[rows], return_counts=True)
    for number, times in zip(values[counts > 1], counts[counts > 1], strict=True):
        text = f"{tables.name(read.operation)} read {tables.value(number)} {times} times"
        findings.add("duplicate", text, [*_known(tables.writer[number]), read.operation], [tables.value(number)])


def _find_missing(tables: Tables, read: FullRead, rows: Numbers, findings: Findings) -> None:
    place = _lowest_places(tables)
    for row in rows:
        writer, number, key = int(tables.sends.operation[row]), int(tables.sends.value[row]), tables.sends.key[row]
        lost = place[number] != NONE and place[number] <= read.highest[key]
        value, reader = tables.value(number), tables.name(read.operation)
        text = f"{value} of the committed {tables.name(writer)} is missing in {reader}"
        findings.add("lost-write" if lost else "unseen", text, [writer, read.operation], [value])


def _lowest_places(tables: Tables) -> Numbers:
    """Return, for each value, the lowest known place of its message in the partition (see `Placed`), or `NONE`."""
    unknown = np.iinfo(np.int64).max
    place = np.full(len(tables.values), unknown)
    read = (tables.reads.value != NONE) & (tables.reads.place != NONE)
    np.minimum.at(place, tables.reads.value[read], tables.reads.place[read])
    np.minimum.at(place, tables.stored.value, tables.stored.place)
    return np.where(place == unknown, NONE, place)


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


def _list(values: list[str]) -> str:
    return ", ".join(values[:5]) + (" and others" if len(values) > 5 else "")
