"""Checks of isolation: write order against real time, and cycles by write order, by reads, and by real time.

An edge leads from an earlier to a later transaction: `ww` if the later one wrote the next value of a partition, `wr` if
it received a value of the earlier one, `rt` if it began after the earlier one had ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import rustworkx

from txnbridge_conformance.checker._tables import COMMITTED, NONE, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

_Edge = tuple[int, int, str]

# The number of edges that are handed to the graph at once: a million tuples would need much memory.
_CHUNK = 100_000


def check_cycles(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    """Find Adya's anomalies among committed transactions: cycles by write order (`G0`), or also by reads (`G1c`).

    The variants `-realtime` also follow edges from a transaction to those that began after its end, `G0-realtime` in
    each partition alone. A cycle over several partitions would prove nothing: messages of a long transaction may lie
    before those of one transaction in one partition, and after those of a later one in another.
    """
    committed = (fate == COMMITTED) & np.array([each.what == "transaction" for each in tables.operations], bool)
    _check_real_time(tables, _in_order(tables, committed, rank), findings)
    number = np.cumsum(committed) - 1  # nodes are the committed transactions alone, which saves memory
    ww, wr = number[_write_order(tables, committed, rank)], number[_reads_from(tables, committed)]
    orders = np.flatnonzero(committed)
    none: tuple[_Edge, ...] = ()
    found: set[frozenset[int]] = set()
    for name, edges, real_time in (
        ("G0", {"ww": ww}, none),
        ("G1c", {"wr": wr, "ww": ww}, none),
        ("G1c-realtime", {"wr": wr, "ww": ww}, _real_time(tables, committed, number)),
    ):
        for path in _cycles(len(orders), edges, real_time):
            cycle = [(int(orders[node]), kind) for node, kind in path]
            nodes = frozenset(node for node, _ in cycle)
            if nodes not in found:
                found.add(nodes)
                text = " ".join(f"{tables.name(node)} -{kind}->" for node, kind in cycle)
                findings.add(name, f"{text} {tables.name(cycle[0][0])}", sorted(nodes))


def _in_order(tables: Tables, committed: Numbers, rank: Numbers) -> Numbers:
    """Return the values of committed transactions, sorted by partition and by their rank in the partition."""
    value = np.flatnonzero((rank != NONE) & (tables.writer != NONE))
    value = value[committed[tables.writer[value]]]
    ordered: Numbers = value[np.lexsort((rank[value], tables.home[value]))]
    return ordered


def _check_real_time(tables: Tables, ordered: Numbers, findings: Findings) -> None:
    """Find messages stored before those of a transaction that had ended when their own transaction began."""
    found: set[tuple[int, int]] = set()
    latest: dict[tuple[int, int], int] = {}  # by partition and clock: the value whose transaction began last
    for value in ordered.tolist():
        later = latest.setdefault((tables.home[value], int(tables.clock[tables.writer[value]])), value)
        pair = int(tables.writer[value]), int(tables.writer[later])
        first, second = (tables.operations[order] for order in pair)
        ended = _committed_by(first)
        if ended is not None and ended < second.start and pair not in found:
            found.add(pair)
            text = f"{tables.name(pair[1])} began after {tables.name(pair[0])} had ended, and wrote before it"
            findings.add("G0-realtime", text, sorted(pair), [tables.value(value), tables.value(later)])
        elif first.start >= second.start:
            latest[tables.home[value], int(tables.clock[pair[0]])] = value


def _committed_by(operation: Operation) -> int | None:
    """Return when a transaction's messages were stored at the latest; None if that is unknown.

    Messages of transactions over several brokers, prepared ones, and ones with unknown results may be stored later.
    """
    stored = operation.result == "ok" and operation.outcome != "prepared" and not operation.is_span
    return operation.end if stored else None


def _write_order(tables: Tables, committed: Numbers, rank: Numbers) -> Numbers:
    """Return the edges from the sender of each value to the sender of the next value of its partition."""
    rows = _in_order(tables, committed, rank)
    first, second = rows[:-1], rows[1:]
    next_to = (tables.home[first] == tables.home[second]) & (tables.writer[first] != tables.writer[second])
    return np.unique(np.stack([tables.writer[first[next_to]], tables.writer[second[next_to]]], axis=1), axis=0)


def _reads_from(tables: Tables, committed: Numbers) -> Numbers:
    """Return the edges from the transaction that sent each value to each transaction that received the value."""
    rows = tables.reads.value != NONE
    reader, writer = tables.reads.operation[rows], tables.writer[tables.reads.value[rows]]
    rows = (writer != NONE) & (reader != writer)
    rows[rows] &= committed[reader[rows]] & committed[writer[rows]]
    return np.unique(np.stack([writer[rows], reader[rows]], axis=1), axis=0)


def _real_time(tables: Tables, committed: Numbers, number: Numbers) -> Iterator[_Edge]:
    """Yield the edges of real time among these transactions.

    The ends of transactions are further nodes, in a chain, so that few edges lead from every earlier transaction to
    every later one. Only transactions of one clock are compared.
    """
    extra = int(committed.sum())
    known = committed & np.array([_committed_by(operation) is not None for operation in tables.operations], bool)
    for clock in range(len(tables.clocks)):
        begun, ended = (np.flatnonzero(flags & (tables.clock == clock)) for flags in (committed, known))
        orders, times = np.concatenate([begun, ended]), np.concatenate([tables.starts[begun], tables.ends[ended]])
        starts = np.arange(len(orders)) < len(begun)
        rows = np.lexsort((starts, times))
        last, was_start = NONE, True
        for order, is_start in zip(number[orders[rows]].tolist(), starts[rows].tolist(), strict=True):
            if is_start and last != NONE:
                yield last, order, "rt"
            elif not is_start:
                if was_start:
                    if last != NONE:
                        yield last, extra, "rt"
                    last, extra = extra, extra + 1
                yield order, last, "rt"
            was_start = is_start


def _cycles(nodes: int, edges: dict[str, Numbers], real_time: Iterable[_Edge]) -> Iterator[list[tuple[int, str]]]:
    """Yield one short cycle with an edge of the first kind for each strongly connected part that has one."""
    graph: rustworkx.PyDiGraph[None, str] = rustworkx.PyDiGraph()
    graph.add_nodes_from([None] * nodes * (2 if real_time else 1))  # the others are the ends of transactions
    for kind, pairs in edges.items():
        for at in range(0, len(pairs), _CHUNK):
            graph.add_edges_from([(first, second, kind) for first, second in pairs[at : at + _CHUNK].tolist()])
    rows = iter(real_time)
    while some := list(itertools.islice(rows, _CHUNK)):
        graph.add_edges_from(some)
    parts = enumerate(rustworkx.strongly_connected_components(graph))
    part_of = {node: number for number, part in parts if len(part) > 1 for node in part}
    named: set[int] = set()
    for first, second in next(iter(edges.values())).tolist() if part_of else ():
        part = part_of.get(first)
        if part is not None and part == part_of.get(second) and part not in named:
            named.add(part)
            path = rustworkx.digraph_dijkstra_shortest_paths(graph, second, first, lambda _: 1.0)[first]
            yield list(_named(graph, [first, *path], nodes))


def _named(graph: rustworkx.PyDiGraph[None, str], cycle: Iterable[int], nodes: int) -> Iterator[tuple[int, str]]:
    """Yield each transaction (a node below `nodes`) on the path `cycle`, with the kind of its edge to the next node."""
    path = list(cycle)
    for first, second in itertools.pairwise(path):
        if first < nodes:
            yield first, graph.get_edge_data(first, second)
