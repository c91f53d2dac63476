"""The processes of a simulated run: their histories, by the `Recorder` of real runs, and their work, by role.

A process's threads are generators that yield how long they wait.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from txnbridge_conformance.history import VERSION, RecordedCall, Recorder

from tests.conformance import simulated_broker
from tests.conformance.simulated_broker import DEADLINE, HOLD, OPPOSITE, PLAIN, SOURCE, Group, Key, Message, Txn

if TYPE_CHECKING:
    from tests.conformance.simulated_run import Run

Task = Generator[float, None, None]
Sends = dict[Key, list[str]]

HALF_DEADLINE = 4.0
SECONDS = 12.0  # of work; in the last quarter nothing is attacked
SESSION = 1.5  # after it a group goes on without a member that was killed or is paused


class Killed(Exception):
    """The death of a process, within one of its calls."""


class Log(Recorder):
    """Keeps the lines of one process in memory, with virtual times on the clock of the process's host."""

    def __init__(self, run: Run, process: str, host: int) -> None:
        self._run, self._host = run, host
        self._numbers = itertools.count()
        self.lines: list[bytes] = []
        self.stamp: float | None = None  # the time that is recorded instead of the present
        self.write(history=VERSION, process=process, client="simulated", host=f"host{host}", pid=len(run.logs), mono=0)
        run.logs[process] = self

    def write(self, **line: Any) -> None:
        if "mono" in line:
            line["mono"] = self.mono()
            line.pop("wall", None)
        self.lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

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
            self.begin(run.settle() if role == "run" else getattr(self, role)(thread))

    def begin(self, task: Task) -> None:
        self.tasks += 1
        self.run.resume(self, task, self.wait())

    def wait(self, least: float = 0.005, most: float = 0.05) -> float:
        return self.random.uniform(least, most)

    def is_struck(self, chance: float) -> bool:
        return self.run.is_attacking and not self.is_immune and self.random.random() < chance

    def kill(self, event: str) -> None:
        self.log.fault(f"kill at {event}", self.name, "begin")
        raise Killed

    def risk(self, event: str, chance: float = 0.03) -> None:
        if self.is_struck(chance):
            self.kill(event)

    def sends(self, *topics: str, most: int = 4) -> Sends:
        keys = self.broker.keys(*topics)
        chosen = self.random.sample(keys, self.random.randint(1, min(len(keys), most)))
        return {key: [f"{self.name}/{next(self._values)}" for _ in range(self.random.randint(1, 3))] for key in chosen}

    def transact(
        self, sends: Sends, way: str, ack: tuple[Group, list[Message]] | None = None, pause: float = 0.0, **more: Any
    ) -> Generator[float, None, Txn | None]:
        """Run a transaction, as `Client.transact` does. Return it if it was committed or prepared."""
        txn = self.broker.begin(self, way, **more)
        call = self.log.start(
            "transaction", deadline=DEADLINE, hold=HOLD, thread=txn.thread, span=txn.is_span, **self.session
        )
        if ack:
            call.poll(ack[1], ack[0].name)
        call.note(transaction=txn.id, begun=self.log.mono())
        steps: list[Callable[[], None]] = [partial(self._send, call, txn, key, values) for key, values in sends.items()]
        pause_at = self.random.choice((self.random.randint(0, len(steps)), len(steps)))
        if ack:
            steps.insert(pause_at, partial(self._ack, call, txn, *ack))
        try:
            for number, step in enumerate([*steps, lambda: None]):
                yield self.wait() + pause * (number == pause_at)
                step()
            if way == "abort":
                self.broker.abort(txn)
                call.end("fail", error="Abort")
                return None
            yield from self._request_end(call, txn)
        except simulated_broker.Refused as error:
            if txn.state == "open":
                self.broker.end(txn, "aborted")
            call.end("fail", error=str(error))
        return txn if txn.told else None

    def _request_end(self, call: RecordedCall, txn: Txn) -> Task:
        """Commit or prepare a transaction, unless the process is killed, and record what the process hears."""
        is_prepared = txn.way == "prepare"
        verb, outcome = ("prepare", "prepared") if is_prepared else ("commit", "committed")
        call.note(ending=self.log.mono())
        txn.requested = None if is_prepared else self.run.now
        self.risk(f"{verb}/before")
        if self.is_struck(0.4 if self.broker.is_fenced(txn) else 0.2):
            self.run.at(self.wait(0, 0.5), partial(getattr(self.broker, verb), txn, "killed"))
            self.kill(f"{verb}/after")
        is_early = self.run.now < SECONDS / 2
        is_hung = self.broker.plant("hang-call", is_early and txn.thread > 0)
        is_slow = self.broker.plant("hang-slow", is_early)
        self.tasks -= is_hung
        self.is_immune |= is_hung or is_slow
        yield 1e9 if is_hung else DEADLINE + 6 if is_slow else self.wait()
        is_heard = self.is_immune or self.random.random() > 0.06
        getattr(self.broker, verb)(txn, "told" if is_heard else "lost")
        if is_heard:
            txn.told = True
            call.end("ok", outcome=outcome, token=txn.id)
        else:
            yield 1.0
            call.end("unknown", error="OutcomeUnknown", token=txn.id)
        if is_prepared or not is_heard:
            self.run.tokens.append(txn)

    def _send(self, call: RecordedCall, txn: Txn, key: Key, values: list[str]) -> None:
        call.send(*key, values)
        self.broker.store(txn, key, values)

    def _ack(self, call: RecordedCall, txn: Txn, group: Group, messages: list[Message]) -> None:
        values = [value for *_, value in messages]
        call.ack(group.name, values)
        self.risk("ack/before")
        self.broker.ack(txn, group, {(t, p): position[0] + 1 for t, p, position, _ in messages}, values)
        self.risk("ack/after", 0.1)

    def end_by_token(self, txn: Txn, wish: str) -> Generator[float, None, bool]:
        """Commit, abort or query by token, as `Client.finish` does. Return whether the outcome is final."""
        asked = self.run.now
        call = self.log.start("status" if wish == "status" else "finish", transaction=txn.id, wish=wish)
        txn.is_unwanted |= wish == "abort" and txn.answered is None
        if wish == "commit" and txn.requested is None:
            txn.requested = self.run.now
        yield self.wait()
        outcome = self.broker.resolve(txn, wish, asked)
        if not self.run.planted:  # a wrong answer has to be recorded
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
            yield from self.transact(self.sends(*PLAIN), way, thread=thread)

    def own(self, thread: int) -> Task:
        while not self.is_stopping:
            self.session = {"owner": "owner", "session": f"{self.name}/{next(self._values)}"}
            begin, call = self.run.now, self.log.start("open", **self.session)
            yield self.wait()
            opening = self.broker.open_id()
            yield self.wait()
            self.broker.openings[opening] = begin, self.run.now
            call.end("ok")
            while not self.is_stopping:
                yield self.wait(0.1, 0.8)
                way = self.random.choices(("commit", "abort", "prepare"), (5, 1, 3))[0]
                pause = self.random.choice((0, self.wait(0.5, 3)))
                txn = yield from self.transact(self.sends(*PLAIN), way, pause=pause, opening=opening)
                if txn is None:
                    break

    def feed(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.2, 1)
            yield from self.transact(self.sends(SOURCE), "commit")

    def copy(self, thread: int) -> Task:
        return self._members(self.broker.groups["copiers"], "target", (6, 2, 2))

    def process(self, thread: int) -> Task:
        return self._members(self.broker.groups["processors"], "processed", (8, 2, 0))

    def _members(self, group: Group, target: str, weights: tuple[int, int, int]) -> Task:
        while not self.is_stopping:
            yield self.wait(0.05, 0.3) + 1.5 * self.run.is_closing
            messages = self._fetch(group, self.random.choice((1, 3, 8)))
            if not messages:
                continue
            way = self.random.choices(("commit", "abort", "prepare"), weights)[0]
            way = "commit" if self.run.is_closing else way
            sends = {} if self.random.random() < 0.25 else self.sends(target)
            pause = self.random.choice((0, 0, 0, self.wait(SESSION + 1, 4.8)))
            if pause:
                self.run.at(SESSION, partial(group.change, self, False))
            txn = yield from self.transact(sends, way, ack=(group, messages), pause=pause)
            if txn is not None and way == "prepare":
                yield self.wait(0, 0.5)
                yield from self.end_by_token(txn, self.random.choice(("commit", "commit", "abort")))
            if txn is None or txn.state != "committed":
                self.local = {}

    def _fetch(self, group: Group, count: int) -> list[Message]:
        group.change(self, True)
        if self.generation != group.generation:
            self.generation, self.local = group.generation, {}
        found: list[Message] = []
        for key in group.assigned(self):
            if key not in self.local:
                if key in group.pending:
                    continue
                if self.broker.plant("position-reset", group.positions.get(key, 0) > 2, self.broker.is_replayed):
                    group.positions[key] = 0
                self.local[key] = group.positions.get(key, 0)
            messages, self.local[key] = self.broker.read(key, self.local[key], count)
            first = [value for *_, value in messages[:1]]
            if self.broker.plant("group-skip", len(messages) > 1, partial(self.broker.is_passed, group, first)):
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
        while not self.is_stopping:
            call = self.log.start("poll")
            call.assign(list(self.broker.logs))
            stamp = self.run.now
            yield self.wait(0.2, 0.4) + 3 * self.run.is_closing
            if self.broker.plant("future-read", True, partial(self.broker.is_from_future, stamp)):
                yield 3.0
                self.log.stamp = stamp
            found: list[Message] = []
            for key in self.broker.logs:
                self._read_dirty(key)
                messages, self.local[key] = self.broker.read(key, self.local.get(key, 0))
                if self.broker.plant("watch-again", bool(messages) and not self.run.is_closing):
                    self.local[key], self.is_immune = messages[-1][2][0], True
                if self.broker.plant("watch-skip", len(messages) > 2):
                    del messages[1]
                found += messages
            for *_, value in found:
                self.broker.watched.setdefault(value, self.log.stamp or self.run.now)
            call.poll(found)
            call.end("ok")
            self.log.stamp = None

    def _read_dirty(self, key: Key) -> None:
        entries = self.broker.logs[key][self.local.get(key, 0) :]
        for txn in [each.txn for each in entries if each.state not in OPPOSITE][:1]:
            kind = {"half": "half", "prepare": "prepared", "commit": "read"}.get(txn.way, "")
            is_due = txn.state == "prepared" or (txn.way != "prepare" and txn.requested is None)
            if self.broker.plant(f"dirty-{kind}", is_due, partial(self.broker.is_dirty, txn)):
                self.broker.show(txn.entries[key], "committed")

    def sell(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.3, 1.5)
            call = self.log.start("half", deadline=HALF_DEADLINE + 6)
            txn = self.broker.begin(self, "half")
            call.note(begun=self.log.mono())
            self.run.at(HALF_DEADLINE + self.wait(0, 2), partial(self.broker.check_back, txn))
            yield self.wait()
            if txn.state != "open":
                call.end("fail", error="TransactionTimedOut")
                continue
            for key, values in self.sends("sold", "shipped", most=3).items():
                self._send(call, txn, key, values)
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

    def span(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.1, 1)
            way = self.random.choices(("commit", "abort"), (3, 1))[0]
            yield from self.transact(self.sends("here") | self.sends("there"), way, is_span=True)

    def decide(self, thread: int) -> Task:
        while not self.is_stopping:
            yield self.wait(0.3, 1)
            id, wish = f"c{int(self.run.now)}", self.random.choice(("commit", "abort"))
            call = self.log.start("claim", transaction=id, wish=wish)
            yield self.wait()
            call.end("ok", outcome=self.broker.claim(id, wish))
