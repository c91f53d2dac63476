"""Checks of isolation: cycles among transactions, by write order, by reads, and by real time.

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

_Edge = tuple[int, int, str]


def check_cycles(tables: Tables, fate: Numbers, rank: Numbers, findings: Findings) -> None:
    """Find cycles of committed transactions: `G0`, `G1c`, and both with edges of real time (`G0-realtime`, …)."""
    committed = (fate == COMMITTED) & np.array([each.what == "transaction" for each in tables.operations], bool)
    ww, wr = list(_write_order(tables, committed, rank)), list(_reads_from(tables, committed))
    found: set[frozenset[int]] = set()
    for name, edges, needed, real_time in (
        ("G0", ww, "ww", False),
        ("G1c", [*ww, *wr], "wr", False),
        ("G0-realtime", ww, "ww", True),
        ("G1c-realtime", [*ww, *wr], "wr", True),
    ):
        for cycle in _cycles(len(committed), edges, _real_time(tables, committed) if real_time else [], needed):
            nodes = frozenset(node for node, _ in cycle)
            if nodes not in found:
                found.add(nodes)
                text = " ".join(f"{tables.name(node)} -{kind}->" for node, kind in cycle)
                findings.add(name, f"{text} {tables.name(cycle[0][0])}", sorted(nodes))


def _write_order(tables: Tables, committed: Numbers, rank: Numbers) -> Iterator[_Edge]:
    """Yield an edge between the writers of two successive values of a partition."""
    value = np.flatnonzero((rank != NONE) & (tables.writer != NONE))
    value = value[committed[tables.writer[value]]]
    rows = value[np.lexsort((rank[value], tables.home[value]))]
    first, second = rows[:-1], rows[1:]
    next_to = (tables.home[first] == tables.home[second]) & (tables.writer[first] != tables.writer[second])
    edges = np.unique(np.stack([tables.writer[first[next_to]], tables.writer[second[next_to]]], axis=1), axis=0)
    return ((int(a), int(b), "ww") for a, b in edges)


def _reads_from(tables: Tables, committed: Numbers) -> Iterator[_Edge]:
    """Yield an edge from the writer of each value to each transaction that received the value."""
    rows = tables.reads.value != NONE
    reader, writer = tables.reads.operation[rows], tables.writer[tables.reads.value[rows]]
    rows = (writer != NONE) & (reader != writer)
    rows[rows] &= committed[reader[rows]] & committed[writer[rows]]
    edges = np.unique(np.stack([writer[rows], reader[rows]], axis=1), axis=0)
    return ((int(a), int(b), "wr") for a, b in edges)


def _real_time(tables: Tables, committed: Numbers) -> list[_Edge]:
    """Return the edges of real time among these transactions.

    The ends of transactions are further nodes, in a chain, so that few edges lead from every earlier transaction to
    every later one. Only transactions of one host are compared, because monotonic clocks of two hosts are unrelated.
    """
    edges: list[_Edge] = []
    extra = len(tables.operations)
    hosts: dict[str, list[tuple[int, int, int]]] = {}
    for order in map(int, np.flatnonzero(committed)):
        operation = tables.operations[order]
        events = hosts.setdefault(tables.history.processes[operation.process].host, [])
        events.append((operation.start, 1, order))
        # Messages of a prepared transaction may be stored when it is committed, in a later call.
        if operation.end is not None and operation.outcome != "prepared":
            events.append((operation.end, 0, order))
    for events in hosts.values():
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
    for part in rustworkx.strongly_connected_components(graph):
        if len(part) > 1:
            inside = set(part)
            for first, second, kind in edges:
                if kind == needed and first in inside and second in inside:
                    path = rustworkx.digraph_dijkstra_shortest_paths(graph, second, first, lambda _: 1.0)[first]
                    cycle = [first, *path]
                    yield list(_named(graph, cycle, nodes))
                    break


def _named(graph: rustworkx.PyDiGraph[None, str], cycle: Iterable[int], nodes: int) -> Iterator[tuple[int, str]]:
    """Yield each transaction on the path `cycle`, with the kind of the edge that leads from it to the next one."""
    path = list(cycle)
    for first, second in itertools.pairwise(path):
        if first < nodes:
            yield first, graph.get_edge_data(first, second)
