"""Checks of messages: readers get each committed message once, whole transactions, and no other messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from txnbridge_conformance.checker._clocks import WORKS, RealTime, prepares
from txnbridge_conformance.checker._fates import ABORTED, COMMITTED, UNKNOWN
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
    which nobody sent them. `fate` is that by complete reads.
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


@dataclass(frozen=True)
class FullRead:
    """The messages that one process received by calls that each read whole topics from their start to their end."""

    operations: tuple[int, ...]
    seen: Flags  # by value: whether it was read
    by_key: Numbers  # by key: the operation that read its topic
    highest: Numbers  # by key: the highest place that was read
    after_all: Flags  # by operation that read: whether no call on the same clock sent or ended anything later


def full_reads(tables: Tables) -> Iterator[FullRead]:
    """Yield a `FullRead` for the calls of each process that read whole topics, up to one that reads a topic again."""
    rounds: list[dict[str, int]] = []  # by topic: the operation that read it
    latest: dict[int, dict[str, int]] = {}  # by process
    for operation in tables.operations:
        if operation.what == "read" and operation.result == "ok":
            topics = dict.fromkeys(operation.fields["topics"], operation.order)
            if operation.process not in latest or not topics.keys().isdisjoint(latest[operation.process]):
                rounds.append({})
                latest[operation.process] = rounds[-1]
            latest[operation.process].update(topics)
    order = np.argsort(tables.reads.operation, kind="stable")
    operations = tables.reads.operation[order]
    last_work = np.full(len(tables.clocks), -np.inf)
    works = np.array([each.what in WORKS for each in tables.operations], bool)
    np.maximum.at(last_work, tables.clock[works], np.where(np.isinf(tables.ends), tables.starts, tables.ends)[works])
    after_all = tables.starts > last_work[tables.clock]
    for topics in filter(None, rounds):
        calls = tuple(dict.fromkeys(topics.values()))
        first, last = (np.searchsorted(operations, calls, side) for side in ("left", "right"))
        rows = np.concatenate([order[a:b] for a, b in zip(first, last, strict=True)])
        seen = np.zeros(len(tables.values), bool)
        seen[tables.reads.value[rows][tables.reads.value[rows] != NONE]] = True
        highest = np.full(len(tables.keys), NONE, np.int64)
        np.maximum.at(highest, tables.reads.key[rows], tables.reads.place[rows])
        by_key = [topics.get(tables.key_of(number)[0], NONE) for number in range(len(tables.keys))]
        yield FullRead(calls, seen, np.array(by_key, np.int64), highest, after_all)


@dataclass
class Sent:
    """What a full read shows of the messages that were sent to its topics: one row for each of them."""

    rows: Numbers  # in `Tables.sends`
    writer: Numbers
    by: Numbers  # the operation that read the topic
    seen: Flags

    def count(self, flags: Flags, operations: int) -> Numbers:
        """Return, by operation, how many of its messages are among these rows."""
        return np.bincount(self.writer[flags], minlength=operations)


def sent_to(tables: Tables, read: FullRead) -> Sent:
    by = read.by_key[tables.sends.key]
    rows = np.flatnonzero(by != NONE)
    return Sent(rows, tables.sends.operation[rows], by[rows], read.seen[tables.sends.value[rows]])


def refine(tables: Tables, fate: Numbers, time: RealTime) -> tuple[Numbers, Numbers]:
    """Return the fates by full reads, too, and by operation the full read's first call that shows it to be aborted.

    A transaction of unknown fate whose messages a full read has is committed. One is aborted if none of its messages
    are in a full read of all its topics, and nobody worked at it any more. One that is prepared may be neither.
    """
    refined, absent = fate.copy(), np.full(len(fate), NONE, np.int64)
    prepared = np.array(list(map(prepares, tables.operations)), bool)
    sends = np.bincount(tables.sends.operation, minlength=len(fate))
    open_ones = (fate == UNKNOWN) & (sends > 0) & np.array([each.what != "publish" for each in tables.operations], bool)
    for read in full_reads(tables):
        sent = sent_to(tables, read)
        total, found = sent.count(sent.rows >= 0, len(fate)), sent.count(sent.seen, len(fate))
        refined[open_ones & (found > 0) & (found == total)] = COMMITTED
        gone = np.flatnonzero(open_ones & (total == sends) & (found == 0) & ~prepared)
        first = min(read.operations, key=lambda order: tables.starts[order])
        absent[gone[time.at_rest.precede(gone, np.full(len(gone), first))]] = first
    rows = tables.of_senders
    rows = rows[absent[tables.writer[tables.reads.value[rows]]] != NONE]
    reader, writer = tables.reads.operation[rows], tables.writer[tables.reads.value[rows]]
    absent[writer[~time.ended_before(reader, absent[writer])]] = NONE  # it may have been committed after the full read
    absent[refined != UNKNOWN] = NONE
    refined[absent != NONE] = ABORTED
    return refined, absent


def check_full_read(tables: Tables, fate: Numbers, time: RealTime, read: FullRead, findings: Findings) -> None:
    """Compare what a full read has received with the outcomes of transactions (`fate`).

    Find committed messages that were not read, transactions of which only some messages were read, aborted transactions
    that were read, and committed transactions of which no message was read. What ended while the read went on may be
    there or not.
    """
    _find_repeated(tables, read, findings)
    sent, operations = sent_to(tables, read), len(tables.operations)
    reader = tables.name(read.operations[0])
    due = (fate[sent.writer] == COMMITTED) & time.committed.precede(sent.writer, sent.by)
    _find_missing(tables, read, sent, ~sent.seen & due, findings)
    total, found = sent.count(sent.rows >= 0, operations), sent.count(sent.seen, operations)
    # Messages that were published without a transaction are not one atom.
    atoms = (total > 0) & np.array([operation.what != "publish" for operation in tables.operations], bool)
    ended = time.visible.precede(sent.writer, sent.by)
    ended |= read.after_all[sent.by] & time.at_rest.precede(sent.writer, sent.by)
    torn = atoms & (found > 0) & (sent.count(~sent.seen & ended, operations) > 0)
    missing = _missing_within_partitions(tables, sent, torn)
    for writer in map(int, np.flatnonzero(torn)):
        text = f"{reader} read {found[writer]} of {total[writer]} messages of {tables.name(writer)}"
        findings.add("torn-transaction", text, [writer, *read.operations], missing.get(writer, ()))
    for writer in map(int, np.flatnonzero(atoms & (found == 0) & (sent.count(due, operations) == total))):
        text = f"{tables.name(writer)} was said to be committed; {reader} read none of its messages"
        half = tables.operations[writer].what == "half"
        findings.add("orphan-half" if half else "outcome-lie", text, [writer, read.operations[0]])
    for writer in map(int, np.flatnonzero(atoms & (found == total) & (fate == ABORTED))):
        text = f"{tables.name(writer)} was said to be aborted; {reader} read all of its messages"
        half = tables.operations[writer].what == "half"
        findings.add("phantom-commit" if half else "outcome-lie", text, [writer, read.operations[0]])


def _missing_within_partitions(tables: Tables, sent: Sent, torn: Flags) -> dict[int, list[str]]:
    """Return the values that were not read, by operation, if others of each of their partitions were."""
    read: dict[int, dict[int, bool]] = defaultdict(dict)  # by operation and partition: whether any was read
    missing: dict[int, list[str]] = defaultdict(list)
    for at in np.flatnonzero(torn[sent.writer]):
        row, writer = sent.rows[at], int(sent.writer[at])
        keys, key = read[writer], int(tables.sends.key[row])
        keys[key] = keys.get(key, False) or bool(sent.seen[at])
        if not sent.seen[at]:
            missing[writer].append(tables.value(tables.sends.value[row]))
    return {writer: values for writer, values in missing.items() if all(read[writer].values())}


def _find_repeated(tables: Tables, read: FullRead, findings: Findings) -> None:
    """Find messages that a full read received more than once, if its reader records no positions."""
    reads = tables.reads
    rows = np.isin(reads.operation, read.operations) & (reads.value != NONE) & (reads.place == NONE)
    values, counts = np.unique(reads.value[rows], return_counts=True)
    for number, times in zip(values[counts > 1], counts[counts > 1], strict=True):
        text = f"{tables.name(read.operations[0])} read {tables.value(number)} {times} times"
        findings.add("duplicate", text, [*_known(tables.writer[number]), *read.operations[:1]], [tables.value(number)])


def _find_missing(tables: Tables, read: FullRead, sent: Sent, missing: Flags, findings: Findings) -> None:
    place = _lowest_places(tables)
    for row, by in zip(sent.rows[missing], sent.by[missing], strict=True):
        writer, number, key = int(tables.sends.operation[row]), int(tables.sends.value[row]), tables.sends.key[row]
        lost = place[number] != NONE and place[number] <= read.highest[key]
        value, reader = tables.value(number), tables.name(int(by))
        text = f"{value} of the committed {tables.name(writer)} is missing in {reader}"
        findings.add("lost-write" if lost else "unseen", text, [writer, int(by)], [value])


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
