"""Simulated runs on a simulated broker, and their histories, in the format of real runs and by their `Recorder`.

Processes are generators that yield how long they wait. Time is virtual, and a history follows from its seed.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from txnbridge_conformance.history import VERSION, Recorder

from tests.conformance.simulated_broker import (
    DEADLINE,
    HALF_DEADLINE,
    HOLD,
    OPPOSITE,
    OUTCOMES,
    PARTITIONS,
    PLAIN,
    SOLD,
    SOURCE,
    TOPICS,
    Broker,
    Group,
    Key,
    Refused,
    Txn,
)

Task = Iterator[float]

# The sound variants: processes on three machines, a clock that jumps back, pauses longer than every deadline, a topic
# deleted and made anew, and a run that was cut off.
VARIANTS = ("", "machines", "jump", "pauses", "renewed", "cut")

TRIES = 40  # runs of a seed until one has a chance for the defect
SECONDS = 16.0  # of work; in the last quarter nothing is attacked
SESSION = 3.0  # after it a group goes on without a member that was killed or is paused
ROLES = {"write": 1, "own": 2, "feed": 1, "copy": 2, "process": 1, "finish": 1, "watch": 1, "sell": 1, "decide": 2}
SOURCES = ("write", "own", "feed", "sell", "decide")


class Killed(Exception):
    """The death of a process, within one of its calls."""


class Log(Recorder):
    """Keeps the lines of one process in memory, with virtual times on the clock of the process's host."""

    def __init__(self, run: Run, process: str, host: int) -> None:
        self._run, self._host = run, host
        self._numbers = itertools.count()
        self.lines: list[dict[str, Any]] = []
        self.stamp: float | None = None  # the time that is recorded instead of the present
        self.write(history=VERSION, process=process, client="simulated", host=f"host{host}", pid=len(run.logs), mono=0)
        run.logs[process] = self

    def write(self, **line: Any) -> None:
        if "mono" in line:
            line["mono"] = self.mono()
            line.pop("wall", None)
        self.lines.append(line)

    def mono(self) -> int:
        now = self._run.now if self.stamp is None else self.stamp
        jump = 45 if self._run.variant == "jump" and self._run.now > SECONDS / 2 else 0
        return int((1000 + now - jump + 420 * self._host) * 1e9)


class Process:
    """A process of the run; `local` are the positions of its reader."""

    def __init__(self, run: Run, role: str, number: int = 0, start: int = 1) -> None:
        self.run, self.broker, self.random = run, run.broker, run.random
        self.role, self.number, self.start = role, number, start
        self.name = role if role == "run" else f"{role}{number}-{start}"
        self.log = Log(run, self.name, len(run.logs) % 3 if run.variant == "machines" else 0)
        self.alive, self.is_stopping, self.is_immune = True, False, role == "run"  # immune to faults
        self.paused, self.tasks = 0.0, 0  # until when, and the number of its threads
        self.local: dict[Key, int] = {}
        self.generation = 0  # of the group when `local` was taken from its positions
        self.session: dict[str, str] = {}
        self._values = itertools.count()
        for thread in range(2 if role == "write" else 1):
            self.begin(self.work(thread))

    def begin(self, task: Task) -> None:
        self.tasks += 1
        self.run.resume(self, task)

    def work(self, thread: int) -> Task:
        call = self.log.start("open")
        yield self.wait()
        call.end("ok")
        yield from self.run.settle() if self.role == "run" else getattr(self, self.role)(thread)

    def wait(self, least: float = 0.005, most: float = 0.05) -> float:
        return self.random.uniform(least, most)

    def risk(self, event: str, chance: float = 0.03) -> None:
        if self.run.is_attacking and not self.is_immune and self.random.random() < chance:
            self.log.fault(f"kill at {event}", self.name, "begin")
            raise Killed

    def sends(self, *topics: str, most: int = 4) -> dict[Key, list[str]]:
        keys = [(topic, p) for topic in topics for p in range(PARTITIONS)]
        chosen = self.random.sample(keys, self.random.randint(1, min(len(keys), most)))
        return {
            key: [f"{self.name}/{next(self._values)}" for _ in range(self.random.choice((1, 1, 2, 3)))]
            for key in chosen
        }

    def transact(
        self,
        sends: dict[Key, list[str]],
        way: str,
        ack: tuple[Group, list[Any]] | None = None,
        pause: float = 0.0,
        thread: int = 0,
        deadline: float = DEADLINE,
        opening: int | None = None,
    ) -> Iterator[float]:
        """Run a transaction, as `Client.transact` does. Return it if it was committed or prepared."""
        more = {"thread": thread} if thread else {}
        call = self.log.start("transaction", deadline=deadline, hold=HOLD, **self.session, **more)
        if ack:
            call.poll(ack[1], ack[0].name)
        txn = self.broker.begin(self, way, deadline, opening, thread)
        call.note(transaction=txn.id, begun=self.log.mono())
        steps = [partial(self._send, call, txn, key, values) for key, values in sends.items()]
        pause_at = self.random.choice((self.random.randint(0, len(steps)), len(steps)))
        if ack:
            steps.insert(pause_at, partial(self._ack, call, txn, *ack))
        verb = "prepare" if way == "prepare" else "commit"
        try:
            for number, step in enumerate([*steps, lambda: None]):
                yield self.wait() + pause * (number == pause_at)
                step()
            if way == "abort":
                self.broker.abort(txn)
                call.end("fail", error="Abort")
                return None
            call.note(ending=self.log.mono())
            txn.requested = self.run.now if way == "commit" else None
            self.risk(f"{verb}/before")
            chance = 0.4 if self.broker.is_fenced(txn) else 0.2
            if self.run.is_attacking and not self.is_immune and self.random.random() < chance:
                self.run.at(self.wait(0, 0.5), partial(self._request, verb, txn, "killed"))
                self.risk(f"{verb}/after", 1)
            yield self.wait()
            if self.broker.plant("hang-call", thread > 0 and self.run.now < 6):
                self.is_immune = True
                self.tasks -= 1
                yield 1e9
            is_heard = self.is_immune or self.random.random() > 0.06
            getattr(self.broker, verb)(txn, "told" if is_heard else "lost")
            if is_heard and self.broker.plant("hang-slow", self.run.now < SECONDS / 2):
                self.is_immune = True
                yield DEADLINE + 12
            if not is_heard:
                yield 1.0
                call.end("unknown", error="OutcomeUnknown", token=txn.id)
                self.run.tokens.append(txn)
                return None
        except Refused as error:
            if txn.state == "open":
                self.broker.end(txn, "aborted")
            call.end("fail", error=str(error))
            return None
        txn.told = True
        call.end(
            "ok",
            outcome="prepared" if way == "prepare" else "committed",
            **({"token": txn.id} if way == "prepare" else {}),
        )
        if way == "prepare":
            self.run.tokens.append(txn)
        return txn

    def _send(self, call: Any, txn: Txn, key: Key, values: list[str]) -> None:
        call.send(*key, values)
        self.broker.store(txn, key, values)

    def _ack(self, call: Any, txn: Txn, group: Group, messages: list[Any]) -> None:
        values = [value for *_, value in messages]
        call.ack(group.name, values)
        self.risk("ack/before")
        self.broker.ack(txn, group, {(t, p): position[0] + 1 for t, p, position, _ in messages}, values)
        self.risk("ack/after", 0.1)

    def _request(self, verb: str, txn: Txn, heard: str) -> None:
        with suppress(Refused):
            getattr(self.broker, verb)(txn, heard)

    def end_by_token(self, txn: Txn, wish: str) -> Iterator[float]:
        """Commit, abort or query by token, as `Client.finish` does. Return whether the outcome is final."""
        asked = self.run.now
        call = self.log.start("status" if wish == "status" else "finish", transaction=txn.id, wish=wish)
        txn.is_unwanted |= wish == "abort" and txn.answered is None
        if wish == "commit" and txn.requested is None:
            txn.requested = self.run.now
        yield self.wait()
        outcome = self.broker.resolve(txn, wish, asked)
        self.risk("resolve/after")
        call.end("ok", outcome=outcome)
        if outcome in OPPOSITE and txn.answered is None:
            txn.answered = self.run.now
        return outcome in OPPOSITE

    # --- roles --------------------------------------------------------------------------------------------------------

    def write(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.1, 1)
            way = self.random.choices(("commit", "abort", "prepare"), (6, 2, 2))[0]
            late = {"deadline": 1.0, "pause": 1.5} if self.random.random() < 0.05 else {}
            yield from self.transact(self.sends(*PLAIN), way, thread=thread, **late)

    def own(self, thread: int) -> Task:
        while not self.is_stopping:
            self.session = {"owner": "owner", "session": f"{self.name}/{next(self._values)}"}
            call = self.log.start("open", **self.session)
            yield self.wait()
            opening = self.broker.open_id()
            yield self.wait()
            self.broker.opened = self.run.now
            call.end("ok")
            is_done = True
            while is_done and not self.is_stopping:
                yield self.wait(0.1, 0.8)
                way = self.random.choices(("commit", "abort", "prepare"), (5, 1, 3))[0]
                pause = self.random.choice((0, self.wait(0.5, 3)))
                is_done = yield from self.transact(self.sends(*PLAIN), way, pause=pause, opening=opening)

    def feed(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.2, 1)
            if self.random.random() < 0.3:
                sends = self.sends(SOURCE)
                call = self.log.start("publish", deadline=DEADLINE)
                txn = self.broker.begin(self, "commit", DEADLINE)
                for key, values in sends.items():
                    self._send(call, txn, key, values)
                self.broker.end(txn, "committed")
                call.end("ok")
            else:
                yield from self.transact(self.sends(SOURCE), "commit")

    def copy(self, thread: int) -> Task:
        return self._members(self.broker.groups["copiers"], "target", (6, 2, 2))

    def process(self, thread: int) -> Task:
        return self._members(self.broker.groups["processors"], "processed", (8, 2, 0))

    def _members(self, group: Group, target: str, weights: tuple[int, int, int]) -> Task:
        while not self.is_stopping:
            yield self.wait(0.05, 0.3) + 0.5 * self.run.is_closing
            messages = self._fetch(group, self.random.choice((1, 3, 8)))
            if not messages:
                continue
            way = self.random.choices(("commit", "abort", "prepare"), weights)[0]
            way = "commit" if self.run.is_closing else way
            sends = {} if self.random.random() < 0.25 else self.sends(target)
            pause = self.random.choice((0, 0, 0, 0, self.wait(SESSION, 6)))
            if pause:
                self.run.at(SESSION, partial(group.change, self, False))
            txn = yield from self.transact(sends, way, ack=(group, messages), pause=pause)
            if txn is not None and way == "prepare":
                yield self.wait(0, 0.5)
                yield from self.end_by_token(txn, self.random.choice(("commit", "commit", "abort")))
            if txn is None or txn.state != "committed":
                self.local = {}

    def _fetch(self, group: Group, count: int) -> list[Any]:
        group.change(self, True)
        if self.generation != group.generation:
            self.generation, self.local = group.generation, {}
        found: list[Any] = []
        for key in group.assigned(self):
            if key not in self.local:
                if key in group.pending:
                    continue
                if self.broker.plant("position-reset", group.positions.get(key, 0) > 2, self.broker.is_replayed):
                    group.positions[key] = 0
                self.local[key] = group.positions.get(key, 0)
            messages, self.local[key] = self.broker.read(key, self.local[key], count)
            if self.broker.plant("group-skip", len(messages) > 1, partial(self.broker.is_skipped, group, messages[:1])):
                del messages[0]
            found += messages
        return found

    def finish(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.1, 0.6)
            tokens = [txn for txn in self.run.tokens[-6:] if txn.way == "prepare" and not txn.is_spared]
            if tokens:
                txn = self.random.choice(tokens)
                yield from self.end_by_token(txn, self.random.choice(("commit", "commit", "abort", "status")))

    def watch(self, thread: int) -> Task:
        keys = [key for key in self.broker.logs if key[0] in (*PLAIN, *SOLD, "again")]
        is_first = True
        while not self.is_stopping:
            call = self.log.start("poll")
            if is_first:
                call.assign(keys)
            is_first = False
            stamp = self.run.now
            seen = self.broker.watched
            yield self.wait(0.2, 0.4) + 3 * self.run.is_closing
            if self.broker.plant("future-read", True, partial(self.broker.is_from_future, stamp)):
                yield 3.0
                self.log.stamp = stamp
            found: list[Any] = []
            for key in keys:
                if key[0] in PLAIN and self.run.defect in ("dirty-read", "dirty-prepared"):
                    self._read_dirty(key)
                messages, self.local[key] = self.broker.read(key, self.local.get(key, 0))
                if self.broker.plant("watch-again", len(messages) > 0):
                    self.local[key] = messages[-1][2][0]
                if self.broker.plant("watch-skip", len(messages) > 2):
                    del messages[1]
                found += messages
            for *_, value in found:
                seen.setdefault(value, self.log.stamp or self.run.now)
            call.poll(found)
            call.end("ok")
            self.log.stamp = None

    def _read_dirty(self, key: Key) -> None:
        log = self.broker.logs[key]
        entry = next((each for each in log[self.local.get(key, 0) :] if each.state not in OPPOSITE), None)
        if entry is None:
            return
        txn = entry.txn
        is_prepared = self.broker.plant("dirty-prepared", txn.state == "prepared", partial(self.broker.is_dirty, txn))
        is_open = txn.way == "commit" and txn.requested is None
        if is_prepared or self.broker.plant("dirty-read", is_open, partial(self.broker.is_dirty, txn)):
            self.broker.show(txn.entries[key], "committed")

    def sell(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.3, 1.5)
            call = self.log.start("half", deadline=HALF_DEADLINE + 6)
            txn = self.broker.begin(self, "half", HALF_DEADLINE)
            call.note(begun=self.log.mono())
            self.run.at(HALF_DEADLINE + self.wait(0, 2), partial(self.broker.check_back, txn))
            sends = self.sends(*SOLD, most=3)
            for key, values in sends.items():
                call.send(*key, values)
            yield self.wait()
            with suppress(Refused):
                self.broker.store_halves(txn, sends)
            if txn.state != "open":
                call.end("fail", error="TransactionTimedOut")
                continue
            call.note(transaction=txn.id)
            self.risk("half/before", 0.1)
            yield self.wait(0.05, 0.5)
            decision = self.broker.sales.setdefault(txn.id, self.random.choice(("committed", "committed", "aborted")))
            self.risk("half/after", 0.1)
            if self.random.random() < 0.1:
                call.end("unknown", error="RuntimeError")
                continue
            call.note(ending=self.log.mono())
            txn.requested = self.run.now
            yield self.wait()
            outcome = self.broker.decide_half(txn, decision)
            call.end("ok" if outcome == "committed" else "fail", outcome=outcome)

    def decide(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.3, 1)
            id, wish = f"c{int(self.run.now)}", self.random.choice(("commit", "abort"))
            call = self.log.start("claim", transaction=id, wish=wish)
            yield self.wait()
            is_second = id in self.broker.claims
            outcome = self.broker.claims.setdefault(id, OUTCOMES[wish])
            call.end("ok", outcome=OPPOSITE[outcome] if self.broker.plant("claim-split", is_second) else outcome)


class Run:
    """The run: virtual time, processes, faults, the settling and the reading back."""

    def __init__(self, seed: float, defect: str, variant: str, skip: int) -> None:
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
        self.processes = [Process(self, role, number) for role, count in ROLES.items() for number in range(count)]
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
            if self.me.tasks:
                action()

    def alive(self, *roles: str) -> list[Process]:
        return [each for each in self.processes if each.alive and each.role in roles]

    def _attack(self) -> Task:
        longest = 40.0 if self.variant == "pauses" else 7.0
        while self.is_attacking:
            yield self.random.uniform(0.5, 1.5)
            process = self.random.choice([each for each in self.alive(*ROLES) if each.paused <= self.now])
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
                self.at(SESSION, partial(self._leave, process))
                if kind == "kill":
                    self._bury(process)

    def _renew(self) -> Task:
        """Write to a topic and read it, delete it and make it anew, and write to it again."""
        key, log = ("again", 0), self.me.log
        for name in ("first", "second"):
            for number in range(3):
                yield from self.me.transact({key: [f"{name}/{number}"]}, "commit")
            if name == "first":
                yield 2.0
                yield from self._read("again")
                log.fault("topic made anew", "again", "begin")
                self.broker.logs[key].clear()
                for watch in self.alive("watch"):
                    watch.local.pop(key, None)
                log.fault("topic made anew", "again", "end")

    # --- settling -----------------------------------------------------------------------------------------------------

    def settle(self) -> Task:
        log, groups, txns = self.me.log, self.broker.groups, self.broker.txns
        workloads = ["transactions", "owners", "groups", "decisions", "half-messages"]
        log.start("declares", absent=[], broker="simulated", settings=[], workloads=workloads).end("ok")
        yield SECONDS
        self.is_closing = True
        if self.defect and not self.planted:
            return  # the rest would be in vain: this run had no chance for its defect
        yield from self._stop(*SOURCES)
        yield from self._stop("finish")
        for txn in txns:
            if txn.is_spared:
                yield HOLD + 100
                yield from self.me.end_by_token(txn, "commit")
        yield from self._finish("commit", "abort")
        halves = [each for each in txns if each.way == "half"]
        yield from self._await("half messages are not published", lambda: _are_decided(halves))
        yield from self._await("transactions of the run are still open", lambda: _are_decided(self.broker.txns))
        yield from self._await("groups have not read everything", lambda: all(map(self._is_drained, groups.values())))
        yield from self._stop("copy", "process", "watch")
        for id, decision in self.broker.sales.items():
            log.start("decided", transaction=id).end("ok", outcome=decision)
        for name in groups:
            log.start("drained", group=name, topics=[SOURCE]).end("ok")
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
        call = self.me.log.start("settle", condition="transactions have no outcome")
        for txn in self.tokens:
            while txn.answered is None:
                wish = self.random.choice(wishes) if txn.way == "prepare" else "status"
                yield from self.me.end_by_token(txn, wish)
                yield 0.2
        call.end("ok", error=None)

    def _is_drained(self, group: Group) -> bool:
        keys = [(SOURCE, p) for p in range(PARTITIONS)]
        return not group.pending and not any(self.broker.read(key, group.positions.get(key, 0))[0] for key in keys)

    def _read(self, topic: str) -> Task:
        call = self.me.log.start("read", topics=[topic])
        yield 0.1
        keys = [key for key in self.broker.logs if key[0] == topic]
        if any(each.state not in OPPOSITE for key in keys for each in self.broker.logs[key]):
            yield 300.0
            call.end("unknown", error="BrokerUnavailable")
        else:
            call.poll([message for key in keys for message in self.broker.read(key, 0)[0]])
            call.end("ok")


def _are_decided(txns: list[Txn]) -> bool:
    return all(each.state in OPPOSITE for each in txns)


@dataclass
class Simulated:
    """The files of a history, by process, and whether the defect was planted and can be seen in them."""

    files: dict[str, list[bytes]]
    is_planted: bool

    def write(self, folder: Path) -> None:
        for process, lines in self.files.items():
            (folder / f"{process}.jsonl").write_bytes(b"".join(lines))


def history(seed: int, defect: str = "", variant: str = "") -> Simulated:
    """Return the history of this seed: sound, or with exactly one defect, from the first of its runs that shows it."""
    chance = random.Random(seed)
    for attempt in range(TRIES if defect else 1):
        run = Run(chance.random(), defect, variant, 0 if attempt else chance.randrange(3))
        run.go()
        if is_planted := run.planted and run.is_evident():
            break
    encode = json.JSONEncoder(separators=(",", ":")).encode
    files = {name: [encode(line).encode() + b"\n" for line in log.lines] for name, log in run.logs.items()}
    if variant == "cut":
        files["run"][-1] = files["run"][-1][:9]  # a partial last line
    return Simulated(files, is_planted)
