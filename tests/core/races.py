"""Processes that race for decisions on one log: they are killed, lose answers, and trim under way."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from txnbridge_conformance.brokers import Broker

from txnbridge import Decision
from txnbridge._decisions.decisions import Decisions
from txnbridge.errors import EvidenceLost, Fenced, OutcomeUnknown
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge.testing import Child, tell

WORKERS = 4
# Opens a log: where, which one, and how long its calls may take.
OpenLog = Callable[[str, str, float], DecisionLog]
Records = Iterable[tuple[Position, bytes]]
# A worker ends by itself, with a reason, where nothing is settled for as long as its own time limit.
SILENCE = 300
# Presences live for minutes at least. A worker's clock goes on by so many seconds with each race that it has settled,
# so that presences end, and records are trimmed, while the races are still on.
SECONDS_PER_RACE = 5


class Through(DecisionLog):
    """Passes everything on."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def begin(self, deadline: Deadline) -> Position | None:
        return self._log.begin(deadline)

    def end(self, deadline: Deadline) -> Position | None:
        return self._log.end(deadline)

    def append(self, record: bytes, deadline: Deadline) -> Position:
        return self._log.append(record, deadline)

    def read(self, first: Position | None, last: Position | None, deadline: Deadline) -> Records:
        return self._log.read(first, last, deadline)

    def trim(self, before: Position, deadline: Deadline) -> None:
        self._log.trim(before, deadline)


class Unreliable(Through):
    """A log whose answers are lost now and then, and in whose operations the process dies now and then."""

    def __init__(self, log: DecisionLog, random: random.Random, dying: float) -> None:
        super().__init__(log)
        self._random = random
        self._dying = dying

    def _maybe_die(self) -> None:
        if self._random.random() < self._dying:
            os.kill(os.getpid(), signal.SIGKILL)

    def append(self, record: bytes, deadline: Deadline) -> Position:
        self._maybe_die()
        draw = self._random.random()
        if draw < 0.01:
            tell(("lost",))
            raise OutcomeUnknown("lost on its way there")
        position = self._log.append(record, deadline)
        self._maybe_die()
        if draw < 0.02:
            tell(("lost",))
            raise OutcomeUnknown("lost on its way back")
        return position

    def read(self, first: Position | None, last: Position | None, deadline: Deadline) -> Records:
        self._maybe_die()
        return self._log.read(first, last, deadline)

    def trim(self, before: Position, deadline: Deadline) -> None:
        self._maybe_die()
        self._log.trim(before, deadline)


class Worker:
    """Claims every one of the races, in competition with all other workers."""

    def __init__(
        self,
        log: DecisionLog,
        folder: Path,
        number: int,
        seed: int,
        settled: int,
        *,
        dying: float = 0.004,
        timeout: float = 30,
    ) -> None:
        self._random = random.Random(seed)
        self._tokens = folder
        self._number = number
        self._settled = settled
        self._patience = 2 * timeout  # others may wait so long for a broker, and then again, before they go on
        self._decisions = Decisions(
            Unreliable(log, self._random, dying),
            timeout=timeout,
            clock=lambda: 1_700_000_000 + SECONDS_PER_RACE * self._settled,
            lifetime=60,
            tidy_after=100,
        )

    def run(self, races: Iterable[int]) -> None:
        self._meet()
        waiting = deque(races)
        stuck_at = time.monotonic() + self._patience
        while waiting:
            race = waiting.popleft()
            try:
                answer = self._answer(race)
            except OutcomeUnknown as error:
                if error.permanent or time.monotonic() > stuck_at:
                    raise
                answer = None
            if answer is None:
                waiting.append(race)
                assert time.monotonic() < stuck_at, f"nothing was settled in time, races {[*waiting][:9]} are open"
            else:
                stuck_at = time.monotonic() + self._patience
                self._settled += 1
                tell((race, *answer))
        tell(("over",))

    def _meet(self) -> None:
        """Wait until all workers are there: one that starts late on a busy machine would find all races won."""
        (self._tokens / f"{self._number}.here").touch()
        until = time.monotonic() + SILENCE / 2
        while len([*self._tokens.glob("*.here")]) < WORKERS:
            assert time.monotonic() < until, "not everybody came"
            time.sleep(0.01)

    def _answer(self, race: int) -> tuple[str, str] | None:
        """Return the decision and the nonce of the claim that counts; None if the race has not begun yet."""
        decision = self._random.choice([Decision.COMMIT, Decision.ABORT])
        how: dict[str, Any] = {}
        id: Any = ("race", race)
        if race % 4 == 2:
            id = f"token-{race}"
            how["begin"] = self._token(race)
            if how["begin"] is None:
                return None
        try:
            if race % 4 == 0:
                id = ("query", race)
                how["opening"] = self._decisions.open("query")
            claim = self._decisions.claim(id, decision, {"by": self._number}, **how)
        except (Fenced, EvidenceLost) as error:
            return type(error).__name__, ""
        assert claim.data.keys() == {"by"}
        return claim.decision.name, claim.nonce

    def _token(self, race: int) -> dict[str, Any] | None:
        """The begin of a race's token, made by one of the workers and handed to the others."""
        path = self._tokens / f"{race}.json"
        if not path.exists():
            if race // 4 % WORKERS != self._number:
                time.sleep(0.001)
                return None
            new = path.with_suffix(".new")
            new.write_text(json.dumps(self._decisions.begin()))
            new.rename(path)
        begin: dict[str, Any] = json.loads(path.read_text())
        return begin


class Shift:
    """A worker and the workers that take its place when it was killed, with the answers that they got.

    `work(*how, number, seed, races)` is what each does in a process of its own.
    """

    def __init__(self, races: int, number: int, work: Callable[..., object], *how: object) -> None:
        self.races = races
        self._number = number
        self._work = work
        self._how = how
        self.answers: dict[int, tuple[str, ...]] = {}
        self.killed = 0
        self.lost = 0

    def run(self) -> Shift:
        while True:
            waiting = [race for race in range(self.races) if race not in self.answers]
            seed = 100 * self.killed + self._number
            with Child(self._work, *self._how, self._number, seed, waiting) as child:
                try:
                    while (told := child.told(SILENCE))[0] != "over":
                        race, *answer = told
                        if race == "lost":
                            self.lost += 1
                        else:
                            self.answers[race] = tuple(answer)
                except AssertionError as error:
                    if "signal 9" not in str(error):
                        raise
                    self.killed += 1
                else:
                    return self


def work(
    open_log: OpenLog,
    url: str,
    folder: Path,
    dying: float,
    timeout: float,
    of: int,
    number: int,
    seed: int,
    races: list[int],
) -> None:
    """Run a worker in its own process."""
    log = open_log(url, "races", timeout)
    Worker(log, folder, number, seed, of - len(races), dying=dying, timeout=timeout).run(races)
    log.close()


def race(
    open_log: OpenLog,
    url: str,
    folder: Path,
    races: int,
    dying: float,
    timeout: float,
    broker: Broker | None = None,
    kills: int = 0,
) -> DecisionLog:
    """Have processes race, and kill the broker under them; check that nobody disagrees. The log, to be closed."""
    shifts = [Shift(races, number, work, open_log, url, folder, dying, timeout, races) for number in range(WORKERS)]
    run_and_kill(broker, shifts, kills)
    log = open_log(url, "races", timeout)
    won = check(shifts, log, races)
    # All of that happened.
    assert len(won) > 1, won
    assert sum(shift.killed for shift in shifts) >= 1
    assert sum(shift.lost for shift in shifts) >= 10 or races < 1_000
    return log


def run_and_kill(broker: Broker | None, shifts: Sequence[Shift], kills: int) -> None:
    """Run all shifts side by side, and kill their broker so often meanwhile."""
    over = threading.Event()
    with ThreadPoolExecutor(len(shifts) + 1) as pool:
        killing = pool.submit(_kill_now_and_then, broker, shifts, kills, over)
        try:
            for each in [pool.submit(shift.run) for shift in shifts]:
                each.result()
        finally:
            over.set()
        assert killing.result() == kills


def _kill_now_and_then(broker: Broker | None, shifts: Sequence[Shift], times: int, over: threading.Event) -> int:
    """Kill a broker and start it again, at equal steps of what is settled; how often that was done."""
    everything = sum(shift.races for shift in shifts)
    for step in range(1, times + 1):
        while sum(len(shift.answers) for shift in shifts) < everything * step / (times + 1):
            if over.wait(0.005):
                return step - 1
        assert broker is not None
        broker.kill()
        broker.start()
    return times


def check(shifts: Sequence[Shift], log: DecisionLog, races: int) -> Counter[int]:
    """Check that all answers agree with each other and the log, and most races were decided; count wins by worker."""
    told = Counter(answer[0] for shift in shifts for answer in shift.answers.values())
    for race in range(races):
        answers = {shift.answers[race] for shift in shifts}
        decided = answers - {("Fenced", ""), ("EvidenceLost", "")}
        assert len(decided) <= 1, f"race {race}: {answers}"
        assert decided or race % 4 != 1, f"race {race} was decided by nobody"
    reader = Decisions(log)
    won: Counter[int] = Counter()
    for race in range(races):
        if race % 4 == 2:
            continue
        claim = reader.read(("race" if race % 2 else "query", race)).claim
        answers = {shift.answers[race] for shift in shifts} - {("Fenced", "")}
        assert answers <= ({(claim.decision.name, claim.nonce)} if claim else set())
        if claim:
            won[claim.data["by"]] += 1
    assert told["COMMIT"] > 0.5 * races
    assert told["ABORT"] > 0.5 * races
    assert told["COMMIT"] + told["ABORT"] > 0.6 * WORKERS * races, told
    return won
