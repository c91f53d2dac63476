"""Checks of isolation: write order against real time, and cycles by write order, by reads, and by real time.

An edge leads from an earlier to a later transaction: `ww` if the later one wrote the next value of a partition, `wr` if
it received a value of the earlier one, `rt` if it began after the earlier one had ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import rustworkx

from txnbridge_conformance.checker._fates import COMMITTED
from txnbridge_conformance.checker._tables import NONE, Numbers, Tables
from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import Operation

_Edge = tuple[int, int, str]


def check_cycles(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    """Find Adya's anomalies among committed transactions: cycles by write order (`G0`), or also by reads (`G1c`).

    A cycle of `-realtime` also has edges from a transaction to those that began after its end. `G0-realtime` is looked
    for in each partition alone. A cycle over several partitions would prove nothing: messages of a long transaction
    may lie before those of one transaction in one partition, and after those of a later one in another.
    """
    committed = (fate == COMMITTED) & np.array([each.what == "transaction" for each in tables.operations], bool)
    _check_real_time(tables, _in_order(tables, committed, rank), findings)
    ww, wr = list(_write_order(tables, committed, rank)), list(_reads_from(tables, committed))
    found: set[frozenset[int]] = set()
    for name, edges, needed, real_time in (
        ("G0", ww, "ww", False),
        ("G1c", [*ww, *wr], "wr", False),
        ("G1c-realtime", [*ww, *wr], "wr", True),
    ):
        for cycle in _cycles(len(committed), edges, _real_time(tables, committed) if real_time else [], needed):
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
    """Return when a transaction's messages were stored at the latest; None if that is not known.

    Messages of a transaction whose call prepared it, or ended with an unknown result, may be stored later.
    """
    return operation.end if operation.result == "ok" and operation.outcome != "prepared" else None


def _write_order(tables: Tables, committed: Numbers, rank: Numbers) -> Iterator[_Edge]:
    """Yield an edge from the transaction that sent each value to the one that sent the next value of its partition."""
    rows = _in_order(tables, committed, rank)
    first, second = rows[:-1], rows[1:]
    next_to = (tables.home[first] == tables.home[second]) & (tables.writer[first] != tables.writer[second])
    edges = np.unique(np.stack([tables.writer[first[next_to]], tables.writer[second[next_to]]], axis=1), axis=0)
    return ((int(a), int(b), "ww") for a, b in edges)


def _reads_from(tables: Tables, committed: Numbers) -> Iterator[_Edge]:
    """Yield an edge from the transaction that sent each value to each transaction that received the value."""
    rows = tables.reads.value != NONE
    reader, writer = tables.reads.operation[rows], tables.writer[tables.reads.value[rows]]
    rows = (writer != NONE) & (reader != writer)
    rows[rows] &= committed[reader[rows]] & committed[writer[rows]]
    edges = np.unique(np.stack([writer[rows], reader[rows]], axis=1), axis=0)
    return ((int(a), int(b), "wr") for a, b in edges)


def _real_time(tables: Tables, committed: Numbers) -> list[_Edge]:
    """Return the edges of real time among these transactions.

    The ends of transactions are further nodes, in a chain, so that few edges lead from every earlier transaction to
    every later one. Only transactions of one clock are compared.
    """
    edges: list[_Edge] = []
    extra = len(tables.operations)
    clocks: dict[int, list[tuple[int, int, int]]] = {}
    for order in map(int, np.flatnonzero(committed)):
        operation = tables.operations[order]
        events = clocks.setdefault(int(tables.clock[order]), [])
        events.append((operation.start, 1, order))
        if (end := _committed_by(operation)) is not None:
            events.append((end, 0, order))
    for events in clocks.values():
        last = NONE
        for _, is_start, order in sorted(events):
            if is_start and last != NONE:
                edges.append((last, order, "rt"))
            elif not is_start:
                edges.append((order, extra, "rt"))
                if last != NONE:
                    edges.append((last, extra, "rt"))
                last, extra = extra, extra + 1
    return edges


def _cycles(nodes: int, edges: list[_Edge], real_time: list[_Edge], needed: str) -> Iterator[list[tuple[int, str]]]:
    """Yield one short cycle with an edge of the kind `needed` for each strongly connected part that has one."""
    graph: rustworkx.PyDiGraph[None, str] = rustworkx.PyDiGraph()
    graph.add_nodes_from([None] * max([nodes, *(max(a, b) + 1 for a, b, _ in real_time)]))
    graph.add_edges_from([*edges, *real_time])
    parts = enumerate(rustworkx.strongly_connected_components(graph))
    part_of = {node: number for number, part in parts if len(part) > 1 for node in part}
    named: set[int] = set()
    for first, second, kind in edges:
        part = part_of.get(first)
        if kind == needed and part is not None and part == part_of.get(second) and part not in named:
            named.add(part)
            path = rustworkx.digraph_dijkstra_shortest_paths(graph, second, first, lambda _: 1.0)[first]
            yield list(_named(graph, [first, *path], nodes))


def _named(graph: rustworkx.PyDiGraph[None, str], cycle: Iterable[int], nodes: int) -> Iterator[tuple[int, str]]:
    """Yield each transaction (a node below `nodes`) on the path `cycle`, with the kind of its edge to the next node."""
    path = list(cycle)
    for first, second in itertools.pairwise(path):
        if first < nodes:
            yield first, graph.get_edge_data(first, second)
