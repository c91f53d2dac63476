"""A simulated broker: sound, or with one defect. `simulated_run` records the history of a run on it.

Its partitions are Kafka's: a message has its position when it is stored, a control marker has one as well, and readers
wait at the first undecided message.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from txnbridge_conformance.history import CHANGED

if TYPE_CHECKING:
    from tests.conformance.simulated_processes import Process
    from tests.conformance.simulated_run import Run

Key = tuple[str, int]
Message = tuple[str, int, list[int], str]  # topic, partition, position, value

PLAIN, SOURCE = ("left", "right"), "source"
TOPICS = (*PLAIN, SOURCE, "target", "processed", "sold", "shipped", "again", "here", "there")
PARTITIONS = 2
DEADLINE, HOLD = 5.0, 30.0
OPPOSITE = {"committed": "aborted", "aborted": "committed"}
OUTCOMES = {"commit": "committed", "abort": "aborted"}


class Refused(Exception):
    """The broker's refusal of a request; the argument is the name of txnbridge's error."""


@dataclass(eq=False)
class Txn:
    """A transaction, also one of half messages."""

    id: str
    process: Process
    way: str  # "commit", "abort", "prepare" or "half"
    opening: int | None  # of its owner's transactional id
    thread: int
    is_span: bool  # over several brokers
    state: str = "open"
    entries: dict[Key, list[Entry]] = field(default_factory=dict)
    group: Group | None = None
    acks: dict[Key, int] = field(default_factory=dict)  # the group's position after the transaction, by partition
    acked: list[str] = field(default_factory=list)
    begun: float = 0.0
    requested: float | None = None  # the time of the first request that could commit it
    told: bool = False  # its process knows that it is committed or prepared
    answered: float | None = None  # the time at which a call returned its outcome
    is_unwanted: bool = False  # somebody asked for its abort before its outcome was known
    is_spared: bool = False  # nobody ends it before the run settles

    @property
    def topics(self) -> set[str]:
        return {topic for topic, _ in self.entries}

    @property
    def messages(self) -> list[Entry]:
        return list(itertools.chain(*self.entries.values()))


@dataclass(eq=False)
class Entry:
    """A message in a partition, or without a value a control marker."""

    value: str
    txn: Txn
    fate: str = ""  # what readers see by a defect, instead of the transaction's state

    @property
    def state(self) -> str:
        return self.fate or self.txn.state


class Group:
    """A group on the source topic: its members, and its position in each partition."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.generation = 0
        self.members: list[Process] = []
        self.positions: dict[Key, int] = {}
        self.pending: dict[Key, Txn] = {}  # undecided acknowledgements

    def change(self, process: Process, is_member: bool) -> None:
        if (process in self.members) is not is_member:
            self.generation += 1
            self.members = [each for each in self.members if each is not process] + [process] * is_member

    def assigned(self, process: Process) -> list[Key]:
        return [(SOURCE, p) for p in range(PARTITIONS) if self.members[p % len(self.members)] is process]


class Broker:
    """The broker: its partitions, transactions and groups, and those defects that are its own."""

    def __init__(self, run: Run) -> None:
        self.run, self.plant, self.random = run, run.plant, run.random
        self.logs: dict[Key, list[Entry]] = {(topic, p): [] for topic in TOPICS for p in range(PARTITIONS)}
        self.txns: list[Txn] = []
        self.groups = {name: Group(name) for name in ("copiers", "processors")}
        self.opening = 0  # the number of the newest opening of the owners' id
        self.openings: dict[int, tuple[float, float]] = {}  # when calls that opened it began and ended
        self.sales: dict[str, str] = {}
        self.claims: dict[str, str] = {}
        self.watched: dict[str, float] = {}  # when a reader without a group first read a message

    def keys(self, *topics: str) -> list[Key]:
        return [key for key in self.logs if key[0] in topics]

    def begin(
        self, process: Process, way: str, opening: int | None = None, thread: int = 0, is_span: bool = False
    ) -> Txn:
        txn = Txn(f"t{len(self.txns)}", process, way, opening, thread, is_span, begun=self.run.now)
        self.txns.append(txn)
        if way != "half":
            self.run.at(DEADLINE, partial(self.expire, txn))
        return txn

    def check(self, txn: Txn, is_lenient: bool = False) -> None:
        """Raise `Refused` for a transaction that has ended, or of a fenced owner, unless `is_lenient` to zombies."""
        if self.is_fenced(txn) and not (is_lenient and self.is_zombie_wanted()):
            if txn.state == "open":
                self.end(txn, "aborted")
            raise Refused("Fenced")
        if txn.state != "open":
            raise Refused("TransactionTimedOut")

    def is_fenced(self, txn: Txn) -> bool:
        return txn.opening not in (None, self.opening)

    def is_plainly_fenced(self, txn: Txn) -> bool:
        """Return whether another owner opened the id, as its call shows, between this one's opening and its request."""
        opened = self.openings.get(txn.opening or 0)
        later = self.openings.values() if opened and self.is_fenced(txn) else ()
        return any(opened and opened[1] < begin and end < (txn.requested or 0) for begin, end in later)

    def is_zombie_wanted(self) -> bool:
        return self.run.defect in ("zombie-told", "zombie-killed") and not self.run.planted

    def store(self, txn: Txn, key: Key, values: list[str]) -> None:
        if self.plant("zombie-message", self.is_fenced(txn)):
            self.logs[key].append(Entry(values[0], txn, "committed"))
        self.check(txn, is_lenient=True)
        entries = [Entry(value, txn) for value in values]
        if key[0] in PLAIN:
            self._truncate(key, values[0])
        txn.entries.setdefault(key, []).extend(entries)
        self.logs[key] += entries

    def ack(self, txn: Txn, group: Group, positions: dict[Key, int], values: list[str]) -> None:
        self.check(txn)
        process = txn.process
        is_member = process in group.members and process.generation == group.generation
        is_done = any(group.positions.get(key, 0) >= position for key, position in positions.items())
        if not is_member and not self.plant("zombie-member", is_done and txn.way == "commit", self.is_replayed):
            raise Refused("Conflict")
        txn.group, txn.acks, txn.acked = group, positions, values
        group.pending.update(dict.fromkeys(positions, txn))

    def end(self, txn: Txn, state: str, is_wrong: bool = False) -> None:
        """End a transaction. Its acknowledgements count if it commits, or if they `is_wrong` only if it aborts."""
        txn.state = state
        for key in txn.entries:
            self.logs[key].append(Entry("", txn))
        for key, position in txn.acks.items():
            assert txn.group is not None
            if (state == "committed") is not is_wrong:
                txn.group.positions[key] = position
            if txn.group.pending.get(key) is txn:
                del txn.group.pending[key]

    def expire(self, txn: Txn) -> None:
        if txn.state == "open":
            is_killed = not txn.process.alive and bool(txn.entries)
            hangs = is_killed and txn.topics <= {*PLAIN} and txn.opening is None
            if self.plant("hanging", hangs, lambda: txn.state == "open"):
                return
            self.drop(txn, "position-moved-killed", is_killed)

    def drop(self, txn: Txn, defect: str, is_possible: bool = True) -> None:
        """Abort a transaction, whose acknowledgements count by this defect."""
        is_evident = partial(self.is_passed, txn.group, txn.acked)
        self.end(txn, "aborted", self.plant(defect, is_possible and bool(txn.acks), is_evident))

    def abort(self, txn: Txn) -> None:
        """Abort a transaction as its process wishes."""
        self.check(txn)
        self.drop(txn, "abort-moves")
        groups = [*txn.entries.values()] if txn.topics <= {*PLAIN} else []
        if self.plant("aborted-visible", bool(groups)):
            self.show(itertools.chain(*groups), "committed")
        elif self.plant("late-end", len(groups) > 1):
            self.show(groups[0], "committed")

    def show(self, entries: Iterable[Entry], state: str) -> None:
        for entry in entries:
            entry.fate = state

    def tear(self, txn: Txn, defect: str) -> None:
        """Hide the messages in one topic of a transaction by this defect."""
        is_possible = txn.is_span is (defect == "torn-span") and len(txn.topics) > 1
        if self.plant(defect, is_possible and txn.state == "committed"):
            hidden = self.random.choice(sorted(txn.topics))
            self.show((entry for key in txn.entries if key[0] == hidden for entry in txn.entries[key]), "aborted")

    def prepare(self, txn: Txn, heard: str) -> None:
        self.check(txn)
        txn.state = "prepared"
        is_told = heard == "told"
        txn.is_spared = is_told and self.plant("late-commit", bool(txn.entries) and not txn.acks)
        if not txn.is_spared:
            self.run.at(HOLD, partial(self.lose, txn))
        if is_told and self.plant("lost-prepare", True, lambda: self.is_lost(txn)):
            self.run.at(self.random.uniform(0.05, 1), partial(self.lose, txn))

    def lose(self, txn: Txn) -> None:
        if txn.state == "prepared":
            self.end(txn, "aborted")

    def commit(self, txn: Txn, heard: str) -> None:
        """Commit a transaction whose process hears it ("told"), loses the answer ("lost"), or is killed ("killed")."""
        told, killed, plant = heard == "told", heard == "killed", self.plant
        entries, has_output = txn.messages, bool(txn.acks and txn.entries)
        is_plain = bool(entries) and txn.topics <= {*PLAIN}
        is_zombie = is_plain and self.is_plainly_fenced(txn) and txn.state == "open"
        if not plant(f"zombie-{heard}", is_zombie):
            self.check(txn)
        if plant("told-committed", told and is_plain):
            self.end(txn, "aborted")
            return
        is_lost = plant("position-lost-killed", killed and has_output, self.is_replayed)
        is_lost |= plant("ack-lost", told and bool(txn.acks) and not entries, self.is_replayed)
        is_refused = plant("output-without-ack", told and has_output)
        self.end(txn, "committed", is_lost or is_refused)
        if is_refused:
            raise Refused("Conflict")
        if plant("told-aborted", told and is_plain):
            raise Refused("TransactionTimedOut")
        self.tear(txn, f"torn-{heard}")
        if txn.is_span:
            self.tear(txn, "torn-span")
            later = [entry for key in self.keys("there") for entry in txn.entries.get(key, ()) if not entry.fate]
            self.show(later, "open")
            self.run.at(self.random.uniform(0, 2), partial(self.show, later, ""))
        if plant("output-lost", told and has_output):
            self.show(entries, "aborted")
        if told and is_plain:
            self._damage(txn, entries)

    def _damage(self, txn: Txn, entries: list[Entry]) -> None:
        """Plant a defect of stored messages in a committed transaction over left and right."""
        key, own = self.random.choice(list(txn.entries.items()))
        plant, entry, (topic, partition) = self.plant, self.random.choice(own), key
        if plant("torn-partition", any((topic, p) in txn.entries for p in range(PARTITIONS) if p != partition)):
            self.show(own, "aborted")
        if plant("lost"):
            entry.fate = "aborted"
        if plant("changed"):
            entry.value = CHANGED + str(entry.value)
        if plant("swapped", len(own) > 1):
            own[0].value, own[-1].value = own[-1].value, own[0].value
        if plant("duplicate"):
            self.logs[key].append(Entry(entry.value, txn))
        if plant("copy-partition"):
            self.logs[topic, (partition + 1) % PARTITIONS].append(Entry(entry.value, txn))
        if plant("copy-topic"):
            self.logs[PLAIN[topic == PLAIN[0]], partition].append(Entry(entry.value, txn))
        log, unread = self.logs[key], max([watch.local.get(key, 0) for watch in self.run.alive("watch")], default=0)
        to, thread = log.index(own[0]), (txn.process, txn.thread)
        before = [at for at in range(to) if log[at].value and (log[at].txn.process, log[at].txn.thread) == thread]
        at = before[-1] if before else 0
        if plant("late-stored", bool(before) and unread <= at and log[at].txn.told and log[at].txn.way == "commit"):
            log[at], log[to] = log[to], log[at]

    def _truncate(self, key: Key, value: str) -> None:
        """Lose the last transaction in a partition, if it was read, before this value is stored at its position."""
        log = self.logs[key]
        own = [entry for entry in log if entry.txn is log[-1].txn]
        start = log.index(own[0]) if own else 0
        is_over = all(each.state in OPPOSITE for each in log[start:])
        is_read = bool(own) and log[-1].txn.told and log[-1].txn.way == "commit" and own[0].value in self.watched
        if self.plant("log-truncated", is_over and is_read, lambda: value in self.watched):
            del log[start:]
            for watch in self.run.alive("watch"):
                watch.local[key] = min(watch.local.get(key, 0), start)

    def resolve(self, txn: Txn, wish: str, asked: float) -> str:
        """Commit or abort by token, or return the status, for a call that began at the time `asked`."""
        is_old = txn.answered is not None and txn.answered < asked
        if wish == "status":
            if self.plant("stale-status", is_old and txn.way == "prepare" and txn.state == "committed"):
                return "prepared"
            return "unknown" if txn.state == "open" else txn.state
        if txn.state == "prepared":
            if wish == "abort":
                self.drop(txn, "prepared-moves")
            else:
                self.end(txn, "committed")
                self.tear(txn, "torn-prepared")
        elif self.plant("split", is_old):
            return OPPOSITE[txn.state]
        return txn.state

    def open_id(self) -> int:
        """Return the number of a new opening of the owners' transactional id, and fence the older ones."""
        self.opening += 1
        for txn in self.txns:
            if txn.opening is not None and txn.state == "open" and not self.is_zombie_wanted():
                self.end(txn, "aborted")
            is_prepared = txn.opening is not None and txn.state == "prepared" and txn.told
            if self.plant("takeover-prepare", is_prepared, partial(self.is_lost, txn)):
                self.end(txn, "aborted")
        return self.opening

    def read(self, key: Key, start: int, count: int = 10**9) -> tuple[list[Message], int]:
        """Return the committed messages from a position on, and the position behind them."""
        log, found = self.logs[key], list[Message]()
        while start < len(log) and len(found) < count and log[start].state in OPPOSITE:
            if log[start].value and log[start].state == "committed":
                found.append((*key, [start], log[start].value))
            start += 1
        return found, start

    # --- half messages ------------------------------------------------------------------------------------------------

    def decide_half(self, txn: Txn, wish: str) -> str:
        """End a transaction of half messages, unless it has ended; return its outcome."""
        if txn.state == "open":
            is_wrong = self.plant("orphan-half" if wish == "committed" else "phantom-commit")
            self.end(txn, OPPOSITE[wish] if is_wrong else wish)
            self.tear(txn, "torn-half")
            return wish
        return txn.state

    def claim(self, id: str, wish: str) -> str:
        is_wrong = self.plant("claim-split", id in self.claims)
        outcome = self.claims.setdefault(id, OUTCOMES[wish])
        return OPPOSITE[outcome] if is_wrong else outcome

    def check_back(self, txn: Txn) -> None:
        """Ask a living seller, or the run that settles, about an undecided transaction."""
        if not txn.entries:
            txn.state = "aborted"
        if txn.state == "open":
            sellers = [each for each in self.run.alive("sell") if each.paused <= self.run.now]
            if not sellers and not self.run.is_closing:
                return self.run.at(1, partial(self.check_back, txn))
            log = (sellers or [self.run.me])[0].log
            values = [entry.value for entry in txn.messages]
            shown = values[1:] if self.plant("checkback-lie", len(values) > 1) else values
            log.start("check", transaction=txn.id, values=shown).end("ok")
            self.decide_half(txn, self.sales.setdefault(txn.id, "aborted"))
        return None

    # --- whether a planted defect can be seen -------------------------------------------------------------------------

    def _acked(self, txns: Iterable[Txn]) -> Counter[tuple[str, str]]:
        """Return how many of these transactions have committed an acknowledgement, by group and value."""
        done = [txn for txn in txns if txn.group and txn.state == "committed"]
        return Counter((txn.group.name, value) for txn in done if txn.group for value in txn.acked)

    def is_replayed(self) -> bool:
        known = [txn for txn in self.txns if txn.told or txn.answered is not None or txn.entries]
        return max(self._acked(known).values(), default=0) > 1

    def is_passed(self, group: Group | None, values: list[str]) -> bool:
        """Return whether one of these messages is known as committed, and no committed transaction acknowledged it."""
        done, known = self._acked(self.txns), [txn for txn in self.txns if txn.told or txn.answered is not None]
        sent = {entry.value for txn in known for entry in txn.messages}
        return group is not None and any(value in sent and not done[group.name, value] for value in values)

    def is_lost(self, txn: Txn) -> bool:
        is_early = txn.answered is not None and txn.answered < txn.begun + HOLD
        return txn.state == "aborted" and txn.told and is_early and not txn.is_unwanted

    def is_dirty(self, txn: Txn) -> bool:
        """Return whether a message was read before the request to commit it, perhaps a call without an answer."""
        first = min(self.watched.get(entry.value, 1e9) for entry in txn.messages)
        is_known = txn.told or txn.way != "prepare"
        return txn.state == "committed" and is_known and first < (txn.requested or 0)

    def is_from_future(self, stamp: float) -> bool:
        later = [entry for txn in self.txns if txn.begun > stamp for entry in txn.messages]
        return any(self.watched.get(entry.value) == stamp for entry in later)
