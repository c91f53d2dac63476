"""Full reads: what they show of transactions, and checks that committed ones are there, whole, and no others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from txnbridge_conformance.checker._clocks import WORKS, RealTime, prepares
from txnbridge_conformance.checker._tables import ABORTED, COMMITTED, NONE, UNKNOWN, Flags, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings


@dataclass(frozen=True)
class FullRead:
    """The messages that one process received by calls that each read whole topics from their start to their end.

    Arrays by message sent to these topics: its row in `Tables.sends` (`sends`), the call that read its topic (`by`),
    whether that call received it (`seen`), and the index of its sender in `writers` (`writer`).
    """

    operations: tuple[int, ...]
    reads: Numbers  # rows of `Tables.reads`
    sends: Numbers
    by: Numbers
    seen: Flags
    writers: Numbers
    writer: Numbers

    def count(self, flags: Flags) -> Numbers:
        """Return for each sending operation (of `writers`) how many of its messages have a flag."""
        return np.bincount(self.writer[flags], minlength=len(self.writers))


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
    of_call, of_key = _Rows(tables.reads.operation), _Rows(tables.sends.key)
    keys: dict[str, list[int]] = defaultdict(list)
    for number in range(len(tables.keys)):
        keys[tables.key_of(number)[0]].append(number)
    for topics in filter(None, rounds):
        calls = tuple(dict.fromkeys(topics.values()))
        reads = np.concatenate([of_call.of(call) for call in calls])
        parts = [(of_key.of(key), call) for topic, call in topics.items() for key in keys[topic]]
        sends = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in parts)])
        by = np.repeat([call for _, call in parts], [len(rows) for rows, _ in parts]).astype(np.int64)
        seen = np.isin(tables.sends.value[sends], tables.reads.value[reads])
        yield FullRead(calls, reads, sends, by, seen, *np.unique(tables.sends.operation[sends], return_inverse=True))


class _Rows:
    """Finds the rows of a table in which a column has a given number."""

    def __init__(self, column: Numbers) -> None:
        self._order = np.argsort(column, kind="stable")
        self._sorted = column[self._order]

    def of(self, number: int) -> Numbers:
        first, last = np.searchsorted(self._sorted, (number, number + 1))
        return self._order[first:last]


def refine(tables: Tables, fate: Numbers, time: RealTime) -> tuple[Numbers, Numbers]:
    """Return outcomes, completed by reads of whole topics, and for each aborted one the read's call that shows it.

    A transaction of unknown fate whose messages a full read has is committed. One is aborted if none of its messages
    are in a full read of all its topics, and no call for it was still running. A prepared transaction may stay unknown.
    """
    refined, absent = fate.copy(), np.full(len(fate), NONE, np.int64)
    sends = np.bincount(tables.sends.operation, minlength=len(fate))
    open_ones = (fate == UNKNOWN) & _atoms(tables)
    prepared = np.array([prepares(each) for each in tables.operations], bool)
    for read in full_reads(tables):
        found, total = read.count(read.seen), read.count(read.by != NONE)
        refined[read.writers[open_ones[read.writers] & (found == total)]] = COMMITTED
        gone = read.writers[(open_ones & ~prepared)[read.writers] & (total == sends[read.writers]) & (found == 0)]
        first = min(read.operations, key=lambda order: tables.starts[order])
        absent[gone[time.at_rest.precede(gone, np.full(len(gone), first))]] = first
    rows = tables.of_senders
    rows = rows[absent[tables.writer[tables.reads.value[rows]]] != NONE]
    reader, writer = tables.reads.operation[rows], tables.writer[tables.reads.value[rows]]
    absent[writer[~time.ended_before(reader, absent[writer])]] = NONE  # it may have been committed after the full read
    absent[refined != UNKNOWN] = NONE
    refined[absent != NONE] = ABORTED
    return refined, absent


def _atoms(tables: Tables) -> Flags:
    """Return for each operation whether all or none of its messages must appear, as in a transaction."""
    return np.array([operation.what != "publish" for operation in tables.operations], bool)


def check_full_reads(tables: Tables, fate: Numbers, refined: Numbers, time: RealTime, findings: Findings) -> None:
    """Compare what each read of whole topics has received with the outcomes of transactions (`fate`).

    Find messages, committed or received before, that were not read, transactions of which only some messages were read,
    aborted ones that were read, and committed ones of which none was. What ended while the read went on may be there or
    not; so may one broker's part of a transaction over several, while a process works that may commit it yet. A
    transaction is torn, too, if another process had received a message of it from another topic.
    """
    works = np.array([each.what in WORKS for each in tables.operations], bool)
    last_work = np.full(len(tables.clocks), -np.inf)
    np.maximum.at(last_work, tables.clock[works], np.where(np.isinf(tables.ends), tables.starts, tables.ends)[works])
    after_all, atoms = tables.starts > last_work[tables.clock], _atoms(tables)
    spans = np.array([operation.is_span for operation in tables.operations], bool)
    # By process: the values, and the operations, about which an earlier full read of it has a finding.
    missed: dict[int, Flags] = defaultdict(lambda: np.zeros(len(tables.values), bool))
    wrong: dict[int, Flags] = defaultdict(lambda: np.zeros(len(tables.operations), bool))
    sent = _Rows(tables.sends.operation)
    for read in full_reads(tables):
        _find_repeated(tables, read, findings)
        writer = read.writers[read.writer]
        at_rest = after_all[read.by] & time.at_rest.precede(writer, read.by)
        due = (fate[writer] == COMMITTED) & time.committed.precede(writer, read.by) & (at_rest | ~spans[writer])
        process, values = tables.operations[read.operations[0]].process, tables.sends.value[read.sends]
        received = time.received.precede(values, read.by)
        missing = ~read.seen & (due | ((refined[writer] != ABORTED) & received)) & ~missed[process][values]
        missed[process][values[missing]] = True
        _find_missing(tables, read, missing, findings)
        ended = at_rest | (time.visible.precede(writer, read.by) & ~spans[writer])
        known, found = wrong[process], read.count(read.seen) > 0
        new = (atoms & ~known)[read.writers]
        torn = new & (read.count(~read.seen & ended) > 0)
        first = min(read.operations, key=lambda order: tables.starts[order])
        for at in np.flatnonzero(torn & ~found):
            others = tables.sends.value[sent.of(int(read.writers[at]))]
            torn[at] = np.any(time.received.precede(others, np.full(len(others), first)))
        torn &= found | (read.count(received) == 0)
        known[read.writers[_check_atoms(tables, fate, read, new, due, torn, findings)]] = True


def _check_atoms(
    tables: Tables, fate: Numbers, read: FullRead, atoms: Flags, due: Flags, torn: Flags, findings: Findings
) -> Flags:
    """Report transactions that are `torn`, and find those that were read against their outcome; return which they are.

    `due` tells for each message whether it has to be there, the other flags are those of `read.writers`.
    """
    total, found, reader = read.count(read.by != NONE), read.count(read.seen), tables.name(read.operations[0])
    for at, parts in _parts(read, tables, torn).items():
        writer, gone = int(read.writers[at]), [tables.key(key) for key, some in parts.read.items() if not some]
        text = f"{reader} read {found[at]} of {total[at]} messages of {tables.name(writer)}"
        text += "" if found[at] else ", another one of which had been received before"
        text += f", none of them in {' and '.join(gone)}" if gone else ""
        name = "torn-span" if tables.operations[writer].is_span and parts.are_whole(tables) else "torn-transaction"
        findings.add(name, text, [writer, *sorted(parts.calls)], () if gone else parts.missing)
    lost = atoms & (found == 0) & (read.count(due) == total)
    there = atoms & (found == total) & (fate[read.writers] == ABORTED)
    for wrong, said, which, names in (
        (lost, "committed", "none", ("outcome-lie", "orphan-half")),
        (there, "aborted", "all", ("outcome-lie", "phantom-commit")),
    ):
        for writer in map(int, read.writers[wrong]):
            text = f"{tables.name(writer)} was said to be {said}; {reader} read {which} of its messages"
            findings.add(names[tables.operations[writer].what == "half"], text, [writer, read.operations[0]])
    result: Flags = torn | lost | there
    return result


@dataclass
class _Parts:
    """The messages of one transaction in a full read: from which partitions some were received, which are missing."""

    read: dict[int, bool] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)
    incomplete: set[int] = field(default_factory=set)

    def are_whole(self, tables: Tables) -> bool:
        """Return whether of each topic all messages of the transaction were read, or none."""
        read = {tables.key_of(key)[0] for key, some in self.read.items() if some}
        return read.isdisjoint(tables.key_of(key)[0] for key in self.incomplete)


def _parts(read: FullRead, tables: Tables, wanted: Flags) -> dict[int, _Parts]:
    """Return what was read of each transaction with a flag in `wanted`, by its index in `read.writers`."""
    found: dict[int, _Parts] = defaultdict(_Parts)
    for row in np.flatnonzero(wanted[read.writer]):
        parts, key = found[int(read.writer[row])], int(tables.sends.key[read.sends[row]])
        parts.read[key] = parts.read.get(key, False) or bool(read.seen[row])
        parts.calls.add(int(read.by[row]))
        if not read.seen[row]:
            parts.incomplete.add(key)
            parts.missing.append(tables.value(tables.sends.value[read.sends[row]]))
    return found


def _find_repeated(tables: Tables, read: FullRead, findings: Findings) -> None:
    """Find messages that a process received more than once in a full read, if it records no positions."""
    values = tables.reads.value[read.reads]
    values, counts = np.unique(values[(values != NONE) & (tables.reads.place[read.reads] == NONE)], return_counts=True)
    for number, times in zip(values[counts > 1], counts[counts > 1], strict=True):
        text = f"{tables.name(read.operations[0])} read {tables.value(number)} {times} times"
        writers = [int(writer) for writer in (tables.writer[number],) if writer != NONE]
        findings.add("duplicate", text, [*writers, read.operations[0]], [tables.value(number)])


def _find_missing(tables: Tables, read: FullRead, missing: Flags, findings: Findings) -> None:
    if not np.any(missing):
        return
    place, reads = _lowest_places(tables), tables.reads
    highest = np.full(len(tables.keys), NONE, np.int64)  # by key: the highest place that was read
    np.maximum.at(highest, reads.key[read.reads], reads.place[read.reads])
    for row, by in zip(read.sends[missing], read.by[missing], strict=True):
        writer, number, key = int(tables.sends.operation[row]), int(tables.sends.value[row]), tables.sends.key[row]
        lost = place[number] != NONE and place[number] <= highest[key]
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
