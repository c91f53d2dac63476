"""Simulated runs on the simulated broker, and their histories. Time is virtual, and a history follows from its seed."""

import heapq
import itertools
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.conformance.simulated_broker import HOLD, OPPOSITE, SOURCE, TOPICS, Broker, Group, Refused, Txn
from tests.conformance.simulated_defects import DEFECTS
from tests.conformance.simulated_processes import SECONDS, SESSION, Killed, Log, Process, Task

# The sound variants: processes on three machines, a clock that jumps back, pauses longer than every deadline, a topic
# deleted and recreated, and a run that was cut off.
VARIANTS = ("", "machines", "jump", "pauses", "renewed", "cut")

TRIES = 80  # runs of a seed until one has a chance for the defect
ROLES = dict.fromkeys(["write", "own", "feed", "copy", "process", "finish", "watch", "sell", "span", "decide"], 1)
ROLES |= {"own": 2, "copy": 2, "decide": 2}
SOURCES = ("write", "own", "feed", "sell", "decide", "finish", "span")


class Run:
    """The run: virtual time, processes, faults, the settling and the reading back."""

    def __init__(self, seed: float, defect: str, variant: str, skip: int, roles: Collection[str]) -> None:
        self.random = random.Random(seed)
        self.defect, self.variant = defect, variant
        self.planted = False
        self._chances = skip  # that are let pass
        self.is_evident: Callable[[], bool] = lambda: True
        self.now = 0.0
        self.is_closing = False
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.logs: dict[str, Log] = {}
        self.broker = Broker(self)
        self.tokens: list[Txn] = []
        self.me = Process(self, "run")
        chosen = {role: count for role, count in ROLES.items() if role in roles}
        self.processes = [Process(self, role, number) for role, count in chosen.items() for number in range(count)]
        self.me.begin(self._attack())
        if variant == "renewed":
            self.me.begin(self._renew())

    @property
    def is_attacking(self) -> bool:
        return self.now < SECONDS * 0.75

    def plant(self, defect: str, is_possible: bool = True, is_evident: Callable[[], bool] = lambda: True) -> bool:
        """Return whether to do this defect now, where it is possible: once in a run, after some other chances.

        `is_evident` says at the end of the run whether its history can show the defect.
        """
        if defect != self.defect or self.planted or not is_possible:
            return False
        self._chances -= 1
        self.planted = self._chances < 0
        if self.planted:
            self.is_evident = is_evident
        return self.planted

    # --- time and processes -------------------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), action))

    def resume(self, process: Process, task: Task, delay: float = 0.0) -> None:
        self.at(delay, partial(self._step, process, task))

    def _step(self, process: Process, task: Task) -> None:
        if process.alive and process.paused > self.now:
            self.resume(process, task, process.paused - self.now)
        elif process.alive:
            try:
                self.resume(process, task, next(task))
            except StopIteration:
                process.tasks -= 1
            except Killed:
                self._bury(process)

    def _bury(self, process: Process) -> None:
        process.alive = False
        self.at(SESSION, partial(self._leave, process))
        if not process.is_stopping:
            self.at(0.3, lambda: self.processes.append(Process(self, process.role, process.number, process.start + 1)))

    def _leave(self, process: Process) -> None:
        for group in self.broker.groups.values():
            if not process.alive or process.paused > self.now:
                group.change(process, False)

    def go(self) -> None:
        while self._events and not (self.variant == "cut" and self.now > SECONDS / 2):
            self.now, _, action = heapq.heappop(self._events)
            with suppress(Refused):  # a request whose process was killed
                if self.me.tasks:
                    action()

    def alive(self, *roles: str) -> list[Process]:
        return [each for each in self.processes if each.alive and each.role in roles]

    def _attack(self) -> Task:
        longest = 40.0 if self.variant == "pauses" else 7.0
        while self.is_attacking:
            yield self.random.uniform(0.5, 1.5)
            process = self.random.choice([each for each in self.alive(*ROLES) if each.paused <= self.now] or [self.me])
            kind = self.random.choice(("kill", "pause", "pause", "administrator's abort"))
            if kind == "administrator's abort":
                undecided = [each for each in self.broker.txns if each.state not in OPPOSITE and each.way != "half"]
                for txn in [each for each in undecided if not each.is_spared][:1]:
                    txn.is_unwanted = True
                    self.me.log.fault(kind, txn.id, "begin")
                    self.broker.end(txn, "aborted")
                    self.me.log.fault(kind, txn.id, "end")
            elif not process.is_immune:
                self.me.log.fault(kind, process.name, "begin")
                seconds = self.random.uniform(0.5, longest) if kind == "pause" else 0.0
                process.paused = self.now + seconds
                self.at(seconds, partial(self.me.log.fault, kind, process.name, "end"))
                if kind == "kill":
                    self._bury(process)
                else:
                    self.at(SESSION, partial(self._leave, process))

    def _renew(self) -> Task:
        """Write to a topic and read it, delete it and make it anew, and write to it again."""
        key, log = ("again", 0), self.me.log
        yield from self.me.transact({key: ["first/0", "first/1"]}, "commit")
        yield 2.0
        yield from self._read("again")
        log.fault("topic made anew", "again", "begin")
        self.broker.logs[key].clear()
        for watch in self.alive("watch"):
            watch.local.pop(key, None)
        log.fault("topic made anew", "again", "end")
        yield from self.me.transact({key: ["second/0", "second/1"]}, "commit")

    # --- settling -----------------------------------------------------------------------------------------------------

    def settle(self) -> Task:
        log, groups, txns = self.me.log, self.broker.groups.values(), self.broker.txns
        log.start("declares", absent=[], broker="simulated", settings=[], workloads=[]).end("ok")
        yield SECONDS + 30 * (self.defect == "hang-call")
        self.is_closing = True
        if self.defect and not self.planted:
            return  # the rest would be in vain: this run had no chance for its defect
        yield from self._stop(*SOURCES)
        for txn in txns:
            if txn.is_spared:
                yield HOLD + 100
                yield from self.me.end_by_token(txn, "commit")
        yield from self._finish("commit", "abort")
        yield from self._await("transactions are still open", lambda: all(each.state in OPPOSITE for each in txns))
        yield 2.0  # the longest time in which the second part of a span becomes visible
        yield from self._await("groups have not read everything", lambda: all(map(self._is_drained, groups)))
        yield from self._stop("copy", "process", "watch")
        for id, decision in self.broker.sales.items():
            log.start("decided", transaction=id).end("ok", outcome=decision)
        for group in groups:
            call = log.start("drained", group=group.name, topics=[SOURCE])
            call.end("ok" if self._is_drained(group) else "unknown")
        yield from self._finish("commit")
        for topic in TOPICS:
            yield from self._read(topic)

    def _stop(self, *roles: str) -> Task:
        for process in self.alive(*roles):
            process.is_stopping = True
        while any(process.tasks for process in self.alive(*roles)):
            yield 0.2

    def _await(self, condition: str, is_met: Callable[[], bool]) -> Task:
        call, until = self.me.log.start("settle", condition=condition), self.now + 90
        while not is_met() and self.now < until:
            yield 0.5
        call.end("ok" if is_met() else "fail", error=None if is_met() else "")

    def _finish(self, *wishes: str) -> Task:
        for txn in self.tokens:
            while txn.answered is None:
                wish = self.random.choice(wishes) if txn.way == "prepare" else "status"
                yield from self.me.end_by_token(txn, wish)
                yield 0.2

    def _is_drained(self, group: Group) -> bool:
        keys = self.broker.keys(SOURCE)
        return not group.pending and not any(self.broker.read(key, group.positions.get(key, 0))[0] for key in keys)

    def _read(self, topic: str) -> Task:
        call = self.me.log.start("read", topics=[topic])
        yield 0.1
        keys = self.broker.keys(topic)
        if any(each.state not in OPPOSITE for key in keys for each in self.broker.logs[key]):
            yield 300.0
            call.end("unknown", error="BrokerUnavailable")
        else:
            call.poll([message for key in keys for message in self.broker.read(key, 0)[0]])
            call.end("ok")


@dataclass
class Simulated:
    """The files of a history, by process, and whether the defect was planted and can be seen in them."""

    files: dict[str, list[bytes]]
    is_planted: bool

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for process, lines in self.files.items():
            (folder / f"{process}.jsonl").write_bytes(b"".join(lines))


def history(seed: int, defect: str = "", variant: str = "", is_small: bool = False) -> Simulated:
    """Return the history of this seed: sound, or with exactly one defect, from the first of its runs that shows it.

    A small one has only the roles that can meet the defect.
    """
    chance, roles = random.Random(seed), DEFECTS[defect].roles if defect and is_small else frozenset(ROLES)
    for attempt in range(TRIES if defect else 1):
        run = Run(chance.random(), defect, variant, 0 if attempt else chance.randrange(3), roles)
        run.go()
        if is_planted := run.planted and run.is_evident():
            break
    files = {name: log.lines for name, log in run.logs.items()}
    if variant == "cut":
        files["run"][-1] = files["run"][-1][:9]  # a partial last line
    return Simulated(files, is_planted)
