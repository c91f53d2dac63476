"""Real time: which of two moments was certainly the earlier one, also on hosts whose monotonic clocks are unrelated."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np

from txnbridge_conformance.checker._tables import COMMITTED, WRITES, Flags, Numbers, Tables, Times, told_by
from txnbridge_conformance.history import CHANGED, Operation

# The calls that send messages or end a transaction.
WORKS = WRITES | {"finish", "check"}
# How far two clocks drift apart in a run, in nanoseconds.
_DRIFT = 10**9


def prepares(operation: Operation) -> bool:
    """Return whether a call is known to prepare its transaction, so that another call commits it."""
    return operation.outcome == "prepared" or operation.fields.get("prepare") is True


class Moments:
    """Times of one kind for each of `count` operations or values: on each clock the earliest, or the `latest`."""

    def __init__(self, tables: Tables, shift: Times, count: int, latest: bool = False) -> None:
        self._tables, self._shift, self._count, self._latest = tables, shift, count, latest
        self._never = -np.inf if latest else np.inf
        self._by_clock: dict[int, Times] = {}

    def add(self, operations: Numbers, clocks: Numbers, times: Times) -> None:
        """Add a time of each of these operations, on the clock in the same place of `clocks`."""
        for clock in map(int, np.unique(clocks)):
            known = self._by_clock.setdefault(clock, np.full(self._count, self._never))
            rows = clocks == clock
            (np.maximum if self._latest else np.minimum).at(known, operations[rows], times[rows])

    def precede(self, operations: Numbers, others: Numbers) -> Flags:
        """Return whether a time of each operation (with `latest`: every time) lies before the other one's begin."""
        found = np.full(len(operations), self._latest)
        starts, clocks = self._tables.starts[others], self._tables.clock[others]
        for clock, times in self._by_clock.items():
            known = times[operations] != self._never
            before = np.where(known, times[operations], 0) + self._shift[clock, clocks] < starts
            found = found & (before | ~known) if self._latest else found | (before & known)
        return found

    def follow(self, operations: Numbers, others: Numbers) -> Flags:
        """Return whether all times of each operation lie after the end of the other operation."""
        found = np.ones(len(operations), bool)
        ends, clocks = self._tables.over[others], self._tables.clock[others]
        for clock, times in self._by_clock.items():
            found &= (times[operations] == self._never) | (ends + self._shift[clocks, clock] < times[operations])
        return found


class RealTime:
    """The known times of each operation that sends messages, to tell which of two operations was earlier.

    `committed`: when a call had returned that it is committed; `visible`: when that or one of its messages had been
    received; `asked`: when each call that may have committed it began; `at_rest`: when the last call for it had ended.
    `received`, by value instead of by operation: when a call that received the message had ended.
    """

    def __init__(self, tables: Tables, fate: Numbers) -> None:
        self._tables = tables
        rows = tables.of_senders
        reader, writer = tables.reads.operation[rows], tables.writer[tables.reads.value[rows]]
        # What added to a time of one clock is the latest time of another clock at which that moment may have been. A
        # message that goes from one host to another is received after the begin of the call that sends it.
        self.shift = np.full((len(tables.clocks), len(tables.clocks)), np.inf)
        longest = tables.over[reader] - tables.starts[writer] + _DRIFT
        np.minimum.at(self.shift, (tables.clock[writer], tables.clock[reader]), longest)
        np.fill_diagonal(self.shift, 0)
        self.writes: dict[str, list[int]] = defaultdict(list)  # by transaction
        for operation in tables.operations:
            if operation.what in WRITES and operation.transaction is not None:
                self.writes[operation.transaction].append(operation.order)
        moments = partial(Moments, tables, self.shift, len(tables.operations))
        self.committed, self.visible = moments(), moments()
        answers = [
            (write, operation.order)
            for operation in tables.operations
            if operation.end is not None and told_by(operation) == COMMITTED
            for write in self._about(operation)
            if fate[write] == COMMITTED
        ]
        for each in (self.committed, self.visible):
            self._add(each, answers, tables.ends)
        self.visible.add(writer, tables.clock[reader], tables.over[reader])
        self.received = Moments(tables, self.shift, len(tables.values))
        self.received.add(tables.reads.value[rows], tables.clock[reader], tables.over[reader])
        self.asked, self.at_rest = moments(), moments(latest=True)
        self._add_requests(self.asked)
        self._add_work(self.at_rest)

    def ended_before(self, operations: Numbers, others: Numbers) -> Flags:
        """Return whether each operation had certainly ended before the other one began."""
        tables = self._tables
        ends, starts = tables.over[operations], tables.starts[others]
        # Calls of one process may follow each other within one tick of its clock.
        in_turn = (tables.process[operations] == tables.process[others]) & (operations < others) & (ends == starts)
        ended: Flags = in_turn | (ends + self.shift[tables.clock[operations], tables.clock[others]] < starts)
        return ended

    def _about(self, operation: Operation) -> list[int]:
        return [operation.order] if operation.transaction is None else self.writes[operation.transaction]

    def _add_work(self, moments: Moments) -> None:
        """Add for each transaction the end of each call for it, or, without an end, the process's last record."""
        pairs = [
            (write, operation.order)
            for operation in self._tables.operations
            if operation.what in WORKS
            for write in self._about(operation)
        ]
        self._add(moments, pairs, self._tables.last)

    def _add_requests(self, moments: Moments) -> None:
        """Add when requests for commits began: the field `ending` of a call if recorded, else the call's begin.

        A process that records `ending` in some of its calls records it in all whose commit it asked for; so do
        processes with the same client in calls with the field `begun`.
        """
        operations, processes = self._tables.operations, self._tables.history.processes
        times = self._tables.starts.copy()
        told = [each for each in operations if "ending" in each.fields]
        tell = {(each.process, each.what) for each in told}
        clients = {(processes[each.process].client, each.what) for each in told if "begun" in each.fields}
        checks = (value for each in operations if each.what == "check" for value in each.fields["values"])
        checked = {self._tables.history.senders.get(value.removeprefix(CHANGED)) for value in checks}
        pairs = []
        self.never_asked: set[int] = set()  # transactions whose process was killed before it asked for their commit
        for each in operations:
            own = each.what in ("transaction", "half") and not prepares(each)
            if "ending" in each.fields:
                times[each.order] = each.fields["ending"]
            elif (each.transaction is not None or (each.what == "half" and each.order not in checked)) and (
                (each.process, each.what) in tell
                or ("begun" in each.fields and (processes[each.process].client, each.what) in clients)
            ):
                own = own and (each.outcome == "committed" if each.what == "half" else each.end is not None)
                if each.what == "transaction" and not own and each.outcome is None:
                    self.never_asked.add(each.order)
            if own:
                pairs.append((each.order, each.order))
            elif each.what == "check" or (each.what == "finish" and each.fields.get("wish") != "abort"):
                pairs += [(write, each.order) for write in self._about(each)]
        self._add(moments, pairs, times)

    def _add(self, moments: Moments, pairs: list[tuple[int, int]], times: Times) -> None:
        """Add to `moments`, for the first operation of each pair, the time of the second one."""
        write, call = np.array(pairs, np.int64).reshape(-1, 2).T
        moments.add(write, self._tables.clock[call], times[call])
