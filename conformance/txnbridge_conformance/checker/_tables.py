"""A history as tables of numbers, which the checks search with numpy instead of looping over a million messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from txnbridge_conformance.checker.findings import Findings
from txnbridge_conformance.history import CHANGED, Fault, History, Key, Operation

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Times = NDArray[np.float64]  # nanoseconds

NONE = -1

# The nanoseconds from the record of a kill to the death of its process.
_DYING = 10**9

# How `RecordedProcess.client` begins where it is this library.
_OURS = "txnbridge"


def since_made_anew(history: History) -> History:
    """Return a history without the messages of topics that the run has deleted and made anew since.

    Messages in these topics that a call on another clock sent or received are left out, too.
    """
    made = {fault.target: fault for fault in history.faults if fault.kind == "topic made anew"}
    if not made:
        return history

    def counts(order: int, topic: str) -> bool:
        operation, fault = history.operations[order], made.get(topic)
        if fault is None:
            return True
        related = fault.process == operation.process or fault.clock not in history.turned_back
        return related and operation.clock == fault.clock and operation.start >= fault.mono

    return replace(
        history,
        sends=[each for each in history.sends if counts(each[0], each[1][0])],
        stored=[
            (key, values, positions)
            for key, values, positions in history.stored
            if all(counts(history.senders[value], key[0]) for value in values if value in history.senders)
        ],
        polls=[(at, group, [each for each in found if counts(at, each[0])]) for at, group, found in history.polls],
    )


class Names:
    """Gives each distinct value, or key (topic and partition), a number: from 0, in the order of its first use."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._texts: list[object] = []

    def number(self, text: object) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def text(self, number: int) -> object:
        if len(self._texts) < len(self._numbers):
            self._texts = list(self._numbers)
        return self._texts[number]

    def find(self, text: object) -> int:
        return self._numbers.get(text, NONE)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass(frozen=True)
class Sends:
    """One row for each message that a call sent. `operation` is the call's order in the history."""

    operation: Numbers
    key: Numbers
    value: Numbers


@dataclass(frozen=True)
class Placed:
    """One row for each message whose position in its partition is known.

    `place` is the rank of the position among the known positions of the partition `key`, or `NONE`.
    """

    key: Numbers
    value: Numbers
    place: Numbers


@dataclass(frozen=True)
class Reads(Placed):
    """One row for each message that a call received, in the order of the history.

    A message that was read as another one than was sent has the value that it was sent with, and is `changed`.
    """

    operation: Numbers
    changed: Flags


class Tables:
    """A history as arrays of numbers: messages sent, received and stored; for each value its sender and partition."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.operations: Sequence[Operation] = history.operations
        self.keys, self.values = Names(), Names()
        self.sends = self._sends()
        sent = len(self.values)
        self.reads, self.stored = self._placed()
        self.writer = np.full(len(self.values), NONE, np.int64)  # by value: the order of the operation that sent it
        self.home = np.full(len(self.values), NONE, np.int64)  # by value: the key that it was sent to
        self.writer[:sent][self.sends.value] = self.sends.operation
        self.home[:sent][self.sends.value] = self.sends.key
        rows = np.flatnonzero(self.reads.value != NONE)
        self.of_senders = rows[self.writer[self.reads.value[rows]] != NONE]  # rows of `reads` whose sender is known
        self._place_by_key()
        self.dropped = self._dropped()
        self.clocks = Names()  # times are comparable within each
        self.clock = _numbers(map(self.clock_of, self.operations))
        for fault in history.faults:
            self.clock_of(fault)
        self.starts: Times = np.array([each.start for each in self.operations], np.float64)
        self.ends: Times = np.array([np.inf if each.end is None else each.end for each in self.operations], np.float64)
        self.over = self._over()
        self.process = _numbers(each.process for each in self.operations)
        self.last = self._last_signs()

    def _place_by_key(self) -> None:
        """Replace the partition of messages whose sender only chose a key: by the first one that has one of its key."""
        rows = self.of_senders
        home, place = self.home[self.reads.value[rows]], np.arange(len(self.keys))
        of_key = np.array([self.key_of(number)[1] < 0 for number in range(len(place))], bool)
        chosen, first = np.unique(home[of_key[home]], return_index=True)
        place[chosen] = self.reads.key[rows[of_key[home]][first]]
        self.sends = replace(self.sends, key=place[self.sends.key])
        self.home[self.sends.value] = self.sends.key

    def clock_of(self, event: Operation | Fault) -> int:
        """Return the number of an event's clock. A host whose clock went back has a clock for each process."""
        turned_back = event.clock in self.history.turned_back
        return self.clocks.number((event.clock, event.process if turned_back else NONE))

    def _over(self) -> Times:
        """Return each operation's end; without one, the time by which its killed process was dead, or infinity."""
        kills = [fault for fault in self.history.faults if fault.kind.startswith("kill")]
        dead = {(self.clock_of(fault), fault.target): fault.mono + _DYING for fault in kills}
        names = [process.name for process in self.history.processes]
        ends = (
            dead.get((clock, names[each.process]), np.inf) if each.end is None else each.end
            for each, clock in zip(self.operations, self.clock.tolist(), strict=True)
        )
        return np.fromiter(ends, np.float64, len(self.operations))

    def _last_signs(self) -> Times:
        """Return each operation's end; without one, the time of the last line that its process recorded."""
        latest: dict[tuple[int, str], int] = {}
        for each in self.operations:
            sign = each.start if each.end is None else each.end
            latest[each.process, each.clock] = max(sign, latest.get((each.process, each.clock), sign))
        ends = (latest[each.process, each.clock] if each.end is None else each.end for each in self.operations)
        return np.fromiter(ends, np.float64, len(self.operations))

    def _sends(self) -> Sends:
        operations, keys, values = list[int](), list[int](), list[int]()
        for operation, key, sent in self.history.sends:
            operations += [operation] * len(sent)
            keys += [self.keys.number(key)] * len(sent)
            values += map(self.values.number, sent)
        return Sends(_numbers(operations), _numbers(keys), _numbers(values))

    def _placed(self) -> tuple[Reads, Placed]:
        """Return the messages that calls received, and the messages whose stored positions the sender recorded."""
        operations, keys, values, positions = list[int](), list[int](), list[int](), list[Sequence[int] | None]()
        changed: list[bool] = []
        for operation, _, messages in self.history.polls:
            for topic, partition, position, value in messages:
                operations.append(operation)
                keys.append(self.keys.number((topic, partition)))
                values.append(NONE if value is None else self.values.number(value.removeprefix(CHANGED)))
                changed.append(value is not None and value.startswith(CHANGED))
                positions.append(position)
        polled = len(positions)
        for key, sent, at in self.history.stored:
            keys += [self.keys.number(key)] * len(sent)
            values += map(self.values.number, sent)
            positions += at
        all_keys, all_values = _numbers(keys), _numbers(values)
        places = _places(all_keys, positions)
        reads = all_keys[:polled], all_values[:polled], places[:polled], _numbers(operations), np.array(changed, bool)
        return Reads(*reads), Placed(all_keys[polled:], all_values[polled:], places[polled:])

    def _dropped(self) -> Flags:
        """Return, for each row of `reads`, whether it is a copy of a message that only other clients' readers received.

        A broker may store a message twice if a request comes late. Readers of txnbridge drop the second copy.
        """
        clients = [each.client.startswith(_OURS) for each in self.history.processes]
        ours = np.array([clients[each.process] for each in self.operations], bool)
        whole = np.array([each.what == "read" for each in self.operations], bool)
        reads, by_us = self.reads, ours[self.reads.operation]
        known = (reads.value != NONE) & (reads.place != NONE)
        first = np.full(len(self.values), np.iinfo(np.int64).max)  # by value: the first place at which we read it
        mine = known & by_us & whole[reads.operation] & (reads.key == self.home[reads.value])
        np.minimum.at(first, reads.value[mine], reads.place[mine])
        rows: Flags = known & ~by_us & (reads.place > first[reads.value]) & ours[self.writer[reads.value]]
        mine = known & by_us & np.isin(reads.value, reads.value[rows])
        returned = set(zip(reads.value[mine].tolist(), reads.place[mine].tolist(), strict=True))
        for row in np.flatnonzero(rows):
            rows[row] = (int(reads.value[row]), int(reads.place[row])) not in returned
        return rows

    def value(self, number: int) -> str:
        return str(self.values.text(number))

    def key(self, number: int) -> str:
        topic, partition = self.key_of(number)
        return f"{topic}[{partition}]"

    def key_of(self, number: int) -> Key:
        key = self.keys.text(number)
        assert isinstance(key, tuple)
        return key

    def name(self, order: int) -> str:
        """Return the name of an operation for the text of a finding."""
        operation = self.operations[order]
        process = self.history.processes[operation.process].name
        return f"{operation.what} {operation.transaction or f'{process}/{operation.number}'}"


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, np.int64)


def _places(keys: Numbers, positions: Sequence[Sequence[int] | None]) -> Numbers:
    """Return the rank of each position among the distinct positions of its partition; `NONE` for a missing position."""
    places = np.full(len(keys), NONE, np.int64)
    known = [position for position in positions if position is not None]
    if not known:
        return places
    rows = np.array([position is not None for position in positions], bool)
    width = max(map(len, known))
    table = np.full((len(known), width + 1), NONE, np.int64)
    table[:, 0] = keys[rows]
    if all(len(position) == width for position in known):
        table[:, 1:] = np.array(known, np.int64).reshape(len(known), width)
    else:
        for row, position in zip(table, known, strict=True):
            row[1 : len(position) + 1] = position
    order = np.lexsort(table.T[::-1])
    ranked = table[order]
    new = np.any(ranked[1:] != ranked[:-1], axis=1)
    ranks = np.concatenate(([0], np.cumsum(new)))
    found = np.empty(len(known), np.int64)
    begins = np.concatenate(([True], ranked[1:, 0] != ranked[:-1, 0]))  # of the keys
    found[order] = ranks - ranks[np.maximum.accumulate(np.where(begins, np.arange(len(ranks)), 0))]
    places[rows] = found
    return places


UNKNOWN, COMMITTED, ABORTED = 0, 1, 2

WRITES = frozenset({"transaction", "half", "publish"})  # calls that send messages
_NAMES = {COMMITTED: "committed", ABORTED: "aborted"}
_OUTCOMES = {name: outcome for outcome, name in _NAMES.items()}


def fates(operations: list[Operation], findings: Findings) -> Numbers:
    """Return, for each operation, whether its messages took effect: COMMITTED, ABORTED or UNKNOWN.

    Add the finding "split-decision" for a transaction about which calls returned different outcomes.
    """
    fate = np.zeros(len(operations), np.int64)
    told: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        if outcome := told_by(operation):
            if (transaction := operation.transaction) is None:
                fate[operation.order] = outcome
            else:
                told[transaction].append((outcome, operation.order))
    known: dict[str | None, int] = {}
    for transaction, answers in told.items():
        if len({outcome for outcome, _ in answers}) == 1:
            known[transaction] = answers[0][0]
        else:  # a contradiction is its own finding; the other checks take the transaction for unknown
            calls = ", ".join(f"{operations[order].what}: {_NAMES[outcome]}" for outcome, order in answers[:20])
            text = f"transaction {transaction} has more than one outcome ({calls})"
            findings.add("split-decision", text, [order for _, order in answers])
    for operation in operations:
        if operation.what in WRITES and operation.transaction in told:
            fate[operation.order] = known.get(operation.transaction, UNKNOWN)
    return fate


def told_by(operation: Operation) -> int:
    """Return the outcome, COMMITTED or ABORTED, that an operation's call returned; UNKNOWN if it returned neither."""
    outcome = operation.outcome
    if outcome is None and operation.result != "unknown" and operation.what in WRITES:
        return COMMITTED if operation.result == "ok" else ABORTED
    return _OUTCOMES.get(outcome or "", UNKNOWN)
