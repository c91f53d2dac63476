"""Checks of order: each process sends and receives the messages of a partition in the partition's order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from txnbridge_conformance.checker._fates import ABORTED, COMMITTED
from txnbridge_conformance.checker._tables import NONE, Flags, Numbers, Tables
from txnbridge_conformance.checker._taken import Taken
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Key


def ranks(tables: Tables, fate: Numbers) -> Numbers:
    """Return the rank of each value in its partition, or `NONE`. Ranks of adjacent values differ by 1.

    Only values that were read, or committed, at a known position have a rank, so control markers and aborted messages
    between two values leave no gap. A value at several positions has the rank of the first.
    """
    stored, writer = tables.stored, tables.writer[tables.stored.value]
    committed = writer != NONE
    committed[committed] = fate[writer[committed]] == COMMITTED
    value = np.concatenate([tables.reads.value, stored.value[committed]])
    key = np.concatenate([tables.reads.key, stored.key[committed]])
    place = np.concatenate([tables.reads.place, stored.place[committed]])
    rows = np.lexsort((value, place, key))
    rows = rows[(value[rows] != NONE) & (place[rows] != NONE)]
    key, place, value = key[rows], place[rows], value[rows]
    found = np.full(len(tables.values), NONE, np.int64)
    if not len(rows):
        return found
    new_key = np.concatenate(([True], key[1:] != key[:-1]))
    new_place = new_key | np.concatenate(([True], place[1:] != place[:-1]))
    rank = np.cumsum(new_place) - 1
    rank -= rank[np.maximum.accumulate(np.where(new_key, np.arange(len(key)), 0))]
    found[value[::-1]] = rank[::-1]  # of several places the first one stays
    return found


@dataclass(frozen=True)
class _Steps:
    """A table of pairs of values that a process sent, or received, one directly after the other in a partition."""

    before: Numbers
    after: Numbers
    operation_before: Numbers
    operation_after: Numbers
    key: Numbers
    delta: Numbers  # by how many ranks the later value is behind the earlier one; 1 if this is not known

    @property
    def inside(self) -> Flags:
        """Whether both values of a row belong to the same operation."""
        return np.equal(self.operation_before, self.operation_after)


def check_order(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    """Find messages that a process received or sent in another order than the partition's, or with gaps."""
    _check_polls(tables, fate, rank, findings)
    _check_sends(tables, fate, rank, findings)


def _check_polls(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    reads = tables.reads
    span = _reading_spans(tables)
    counted = reads.value != NONE
    steps = _steps(tables, rank, reads.operation[counted], reads.key[counted], reads.value[counted], span[counted])
    inside = steps.inside
    taken = Taken(tables, fate, rank)
    skipped = inside & (steps.delta > 1)
    for row in np.flatnonzero(skipped):
        low, high = rank[steps.before[row]], rank[steps.after[row]]
        skipped[row] = not taken.all_between(steps.operation_after[row], steps.key[row], low, high)
    _report(tables, steps, skipped, "int-poll-skip", "received", findings)
    _report(tables, steps, inside & (steps.delta < 1), "int-nonmonotonic-poll", "received", findings)
    # A consumer reads again from its group's position after a transaction that did not commit.
    settled = np.array([operation.result == "ok" for operation in tables.operations], bool) & (fate != ABORTED)
    between = ~inside & settled[steps.operation_before]
    _report(tables, steps, between & (steps.delta > 1), "poll-skip", "received", findings)
    _report(tables, steps, between & (steps.delta < 1), "nonmonotonic-poll", "received", findings)


def _check_sends(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    sends = tables.sends
    # Messages of a prepared transaction, and half messages, may be stored when a later call commits them.
    later = np.array([each.outcome == "prepared" or each.what == "half" for each in tables.operations], bool)
    live = (fate[sends.operation] != ABORTED) & ~later[sends.operation]
    one = np.zeros(int(live.sum()), np.int64)
    steps = _steps(tables, rank, sends.operation[live], sends.key[live], sends.value[live], one)
    _report(tables, steps, steps.inside & (steps.delta > 1), "int-send-skip", "sent", findings)
    _report(tables, steps, steps.inside & (steps.delta < 1), "int-nonmonotonic-send", "sent", findings)
    _report(tables, steps, ~steps.inside & (steps.delta < 1), "nonmonotonic-send", "sent", findings)


def _steps(tables: Tables, rank: Numbers, operation: Numbers, key: Numbers, value: Numbers, span: Numbers) -> _Steps:
    """Return the steps among these messages, in the order of time: within a process, a partition (`key`) and a span."""
    process = np.array([each.process for each in tables.operations], np.int64)[operation]
    rows = np.lexsort((np.arange(len(key)), span, key, process))
    first, second = rows[:-1], rows[1:]
    same = (process[first] == process[second]) & (key[first] == key[second]) & (span[first] == span[second])
    first, second = first[same], second[same]
    before, after = rank[value[first]], rank[value[second]]
    delta = np.where((before == NONE) | (after == NONE), 1, after - before)
    return _Steps(value[first], value[second], operation[first], operation[second], key[first], delta)


def _reading_spans(tables: Tables) -> Numbers:
    """Return the span of each row of `Tables.reads`: a number for the assignment, read or poll, that it is in."""
    span = np.zeros(len(tables.reads.key), np.int64)
    starts: dict[tuple[int, int], int] = {}
    held: dict[int, frozenset[Key]] = {}
    end: frozenset[Key] = frozenset()
    changes = iter([*tables.history.assigned, (NONE, len(tables.history.polls), end)])
    change = next(changes)
    row = 0
    for number, (order, group, messages) in enumerate(tables.history.polls):
        while change[1] <= number and change[0] != NONE:
            process = tables.operations[change[0]].process
            for gained in change[2] - held.get(process, frozenset()):
                name = (process, tables.keys.number(gained))
                starts[name] = starts.get(name, 0) + 1
            held[process] = change[2]
            change = next(changes)
        operation = tables.operations[order]
        # A full read begins at the start of each partition, whatever its process has read before. A member of a group
        # continues where the group is, of which other members are a part; `check_acks` judges what a group reads.
        by_itself = operation.what == "read" or group is not None
        for topic, partition, *_ in messages:
            key = tables.keys.find((topic, partition))
            span[row] = -order - 1 if by_itself else starts.get((operation.process, key), 0)
            row += 1
    return span


def _report(tables: Tables, steps: _Steps, rows: Flags, name: str, verb: str, findings: Findings) -> None:
    for row in np.flatnonzero(rows):
        before, after = tables.value(steps.before[row]), tables.value(steps.after[row])
        operations = sorted({int(steps.operation_before[row]), int(steps.operation_after[row])})
        text = (
            f"{tables.name(operations[-1])} {verb} {before} and next {after}, which is {steps.delta[row]} places behind"
            f" it in {tables.key(steps.key[row])}"
        )
        findings.add(name, text, operations, [before, after])
