"""Checks of order: each thread sends and receives the messages of a partition in the partition's order."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from txnbridge_conformance.checker._tables import ABORTED, COMMITTED, NONE, Flags, Names, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Key


def ranks(tables: Tables, fate: Numbers) -> Numbers:
    """Return the rank of each value, its place in the partition's order, or `NONE`. Ranks of neighbours differ by 1.

    Only values that were read, or committed, at a known position have a rank, so control markers and aborted messages
    between two values leave no gap. A value at several positions has the rank of the first. A value in another
    partition than its sender chose has none.
    """
    stored, writer = tables.stored, tables.writer[tables.stored.value]
    committed = writer != NONE
    committed[committed] = fate[writer[committed]] == COMMITTED
    value = np.concatenate([tables.reads.value, stored.value[committed]])
    key = np.concatenate([tables.reads.key, stored.key[committed]])
    place = np.concatenate([np.where(tables.dropped, NONE, tables.reads.place), stored.place[committed]])
    rows = np.lexsort((value, place, key))
    rows = rows[(value[rows] != NONE) & (place[rows] != NONE)]
    rows = rows[(tables.home[value[rows]] == key[rows]) | (tables.home[value[rows]] == NONE)]
    key, place, value = key[rows], place[rows], value[rows]
    found = np.full(len(tables.values), NONE, np.int64)
    if not len(rows):
        return found
    new_key = np.concatenate(([True], key[1:] != key[:-1]))
    new_place = new_key | np.concatenate(([True], place[1:] != place[:-1]))
    rank = np.cumsum(new_place) - 1
    rank -= rank[np.maximum.accumulate(np.where(new_key, np.arange(len(key)), 0))]
    found[value[::-1]] = rank[::-1]  # if a value has several places, the first one stays
    return found


@dataclass(frozen=True)
class _Steps:
    """A table of steps: two values that a thread sent, or received, one directly after the other in a partition."""

    before: Numbers
    after: Numbers
    operation_before: Numbers
    operation_after: Numbers
    key: Numbers
    delta: Numbers  # by how many ranks the later value is behind the earlier one; 1 if this is not known

    @property
    def inside(self) -> Flags:
        """Whether both values of each step belong to the same operation."""
        return np.equal(self.operation_before, self.operation_after)


def check_polls(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    """Find messages that a process received in another order than the partition's, or with gaps.

    Members of a group that share a partition's messages receive any of them.
    """
    reads, span = tables.reads, _reading_spans(tables)
    groups = {order: group for order, group, _ in tables.history.polls}
    in_group = np.array([groups.get(operation.order) is not None for operation in tables.operations], bool)
    # Calls that failed behind their acknowledgements: their process gets the messages again.
    aborts = [each.fields.get("error") == "Abort" or "ending" in each.fields for each in tables.operations]
    back = np.array([each.result == "fail" for each in tables.operations], bool) & np.array(aborts, bool)
    settled = np.array([operation.result == "ok" for operation in tables.operations], bool) & (fate != ABORTED)
    shared = [each.fields.get("sharing", "partition") != "partition" for each in tables.operations]
    rows = (reads.value != NONE) & ~tables.dropped & ~np.array(shared, bool)[reads.operation]
    steps = _steps(tables, rank, reads.operation[rows], reads.key[rows], reads.value[rows], span[rows])
    grouped, skips = in_group[steps.operation_after], steps.inside & (steps.delta > 1)
    _report(tables, steps, _unprocessed(tables, rank, steps, skips & grouped, back), "group-skip", "received", findings)
    _report(tables, steps, skips & ~grouped, "int-poll-skip", "received", findings)
    _report(tables, steps, steps.inside & (steps.delta < 1), "int-nonmonotonic-poll", "received", findings)
    # The first message that a call gives back is the next one.
    again = np.flatnonzero(rows & back[reads.operation])
    first = np.unique(np.stack([reads.operation[again], reads.key[again]]), axis=1, return_index=True)[1]
    rows[np.delete(again, first)] = False
    steps = _steps(tables, rank, reads.operation[rows], reads.key[rows], reads.value[rows], span[rows])
    grouped, between = in_group[steps.operation_after], ~steps.inside & settled[steps.operation_before]
    known = (rank[steps.before] != NONE) & (rank[steps.after] != NONE)
    skips = between & (steps.delta > 1)
    left = grouped & (skips | (back[steps.operation_before] & known & (steps.delta > 0)))
    _report(tables, steps, _unprocessed(tables, rank, steps, left, back), "group-skip", "received", findings)
    _report(tables, steps, skips & ~grouped, "poll-skip", "received", findings)
    _report(tables, steps, between & ~grouped & (steps.delta < 1), "nonmonotonic-poll", "received", findings)


def _unprocessed(tables: Tables, rank: Numbers, steps: _Steps, skips: Flags, back: Flags) -> Flags:
    """Return which of `skips` pass over a message that no member had begun to acknowledge, or that was given back.

    A call that had no effect counts as a begin of an acknowledgement if it is of another process, because the broker
    may have kept the message back until its end. So does a call on a host with another clock.
    """
    if not np.any(skips):
        return skips
    groups = {order: group for order, group, _ in tables.history.polls}
    takers: dict[tuple[str | None, str], list[int]] = defaultdict(list)  # by group and value
    for order, group, acked in tables.history.acks:
        for value in acked:
            takers[group, value].append(order)
    values = np.flatnonzero((rank != NONE) & (tables.home != NONE))
    values = values[np.lexsort((rank[values], tables.home[values]))]
    width, rows = len(rank) + 1, np.flatnonzero(skips)
    places = tables.home[values] * width + rank[values]
    first = steps.key[rows] * width + rank[steps.before[rows]] + (steps.inside | ~back[steps.operation_before])[rows]
    last = steps.key[rows] * width + rank[steps.after[rows]]

    def has_begun(order: int, reader: int) -> bool:
        own = back[order] and tables.process[order] == tables.process[reader]
        other_clock = tables.clock[order] != tables.clock[reader]
        return bool(other_clock or (tables.starts[order] < tables.starts[reader] and not own))

    for row, start, end in zip(rows, *np.searchsorted(places, (first, last)), strict=True):
        reader = int(steps.operation_after[row])
        skipped = (takers[groups[reader], tables.value(number)] for number in values[start:end])
        skips[row] = not all(any(has_begun(order, reader) for order in orders) for orders in skipped)
    return skips


def check_sends(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    sends = tables.sends
    # Messages of a prepared transaction, and half messages, may be stored when a later call commits them.
    later = np.array([each.outcome == "prepared" or each.what == "half" for each in tables.operations], bool)
    live = (fate[sends.operation] != ABORTED) & ~later[sends.operation]
    steps = _steps(tables, rank, *(each[live] for each in (sends.operation, sends.key, sends.value, 0 * sends.key)))
    _report(tables, steps, steps.inside & (steps.delta > 1), "int-send-skip", "sent", findings)
    _report(tables, steps, steps.inside & (steps.delta < 1), "int-nonmonotonic-send", "sent", findings)
    # A call without a known result, or a part of a span, may take effect after the next calls of its thread, too.
    known = np.array([each.result != "unknown" and not each.is_span for each in tables.operations], bool)
    back = ~steps.inside & known[steps.operation_before] & (steps.delta < 1)
    _report(tables, steps, back, "nonmonotonic-send", "sent", findings)


def _steps(tables: Tables, rank: Numbers, operation: Numbers, key: Numbers, value: Numbers, span: Numbers) -> _Steps:
    """Return the pairs of rows that follow each other in one thread, partition (`key`) and reading (`span`)."""
    threads = Names()
    numbers = [threads.number((each.process, each.fields.get("thread", 0))) for each in tables.operations]
    thread = np.array(numbers, np.int64)[operation]
    rows = np.lexsort((np.arange(len(key)), span, key, thread))
    first, second = rows[:-1], rows[1:]
    same = (thread[first] == thread[second]) & (key[first] == key[second]) & (span[first] == span[second])
    first, second = first[same], second[same]
    before, after = rank[value[first]], rank[value[second]]
    delta = np.where((before == NONE) | (after == NONE), 1, after - before)
    return _Steps(value[first], value[second], operation[first], operation[second], key[first], delta)


def _reading_spans(tables: Tables) -> Numbers:
    """Return a number for each row of `Tables.reads`: rows with the same number belong to one continuous reading."""
    span = np.zeros(len(tables.reads.key), np.int64)
    spans = Names()
    starts, held = dict[tuple[int, int], int](), dict[int, frozenset[Key]]()
    # A reader that is opened again begins where its options say. The opening of a transactional id opens no reader.
    opened, openings = Counter[int](), list[int]()
    for each in tables.operations:
        opened[each.process] += each.what == "open" and "owner" not in each.fields
        openings.append(opened[each.process])
    changes = iter([*tables.history.assigned, (NONE, len(tables.history.polls), frozenset[Key]())])
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
        # A full read begins at the start of each partition, whatever its process has read before.
        whole = ("read", order) if operation.what == "read" else ("group", group) if group is not None else None
        for topic, partition, *_ in messages:
            key = tables.keys.find((topic, partition))
            span[row] = spans.number(whole or (openings[order], starts.get((operation.process, key), 0)))
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
