"""`Taken`: which messages a group does not receive, because its transactions had acknowledged them before."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from txnbridge_conformance.checker._fates import ABORTED
from txnbridge_conformance.checker._tables import NONE, Numbers, Tables


class Taken:
    """Tells which messages of a partition, between two that a call received, its group had taken before.

    A message is taken by an earlier transaction that acknowledged it. If that was aborted, the message comes again, but
    perhaps behind later ones: a broker that acknowledges messages one by one knows of the abort only when it happens.
    So it also counts as taken if another process's transaction was aborted after the reading process began.
    """

    def __init__(self, tables: Tables, fate: Numbers, rank: Numbers) -> None:
        self._tables = tables
        self._fate = fate
        self._group = {order: group for order, group, _ in tables.history.polls}
        self._takers: dict[tuple[str | None, str], list[int]] = defaultdict(list)  # by group and value
        for order, group, values in tables.history.acks:
            for value in values:
                self._takers[group, value].append(order)
        self._began: dict[int, int] = {}  # by process: when its first call began
        self._aborted: dict[str | None, int] = {}  # by transaction: when a call first returned this outcome
        for each in tables.operations:
            self._began.setdefault(each.process, each.start)
            if each.outcome == "aborted" and each.end is not None:
                self._aborted.setdefault(each.transaction, each.end)
        # The values in the order of their partitions, and of their ranks in these.
        sent = np.flatnonzero((tables.home != NONE) & (rank != NONE))
        self._values = sent[np.lexsort((rank[sent], tables.home[sent]))]
        self._places = self._place(tables.home[self._values], rank[self._values])

    def _place(self, key: Numbers, rank: Numbers) -> Numbers:
        return key * (len(self._tables.values) + 1) + rank

    def all_between(self, order: int, key: int, low: int, high: int) -> bool:
        """Return whether all messages of a partition with a rank between these two were taken before an operation."""
        first, last = np.searchsorted(self._places, self._place(np.array([key, key]), np.array([low + 1, high])))
        return last - first == high - low - 1 and all(self._is_taken(each, order) for each in self._values[first:last])

    def _is_taken(self, value: int, order: int) -> bool:
        reader, text = self._tables.operations[order], self._tables.value(value)
        for taker in (self._tables.operations[each] for each in self._takers[self._group[order], text]):
            if taker.start < reader.start:
                if self._fate[taker.order] != ABORTED:
                    return True
                until = self._aborted.get(taker.transaction, taker.end or 0)
                if taker.process != reader.process and until > self._began[reader.process]:
                    return True
        return False
