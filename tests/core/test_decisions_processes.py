"""Decisions on the embedded broker's log: real processes that race, are killed, lose answers, and trim under way."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import txnbridge
from tests.embedded.kit import open_broker
from txnbridge import Decision
from txnbridge._decisions import Decisions
from txnbridge.errors import EvidenceLost, Fenced, OutcomeUnknown
from txnbridge.spi import Deadline, DecisionLog, Position
from txnbridge.testing import Child, crash_everywhere, tell

WORKERS, RACES = 4, 1_000
# Presences live for minutes at least. A worker's clock goes on by so many seconds with each race that it has settled,
# so that presences end, and records are trimmed, while the races are still on.
SECONDS_PER_RACE = 5
# What kill -9 leaves behind is tested here, not a power cut; so the disk need not be waited for.
DURABILITY = "survives-process-kill-only"


class Unreliable(DecisionLog):
    """A log whose answers are lost now and then, and in whose operations the process dies now and then."""

    def __init__(self, log: DecisionLog, random: random.Random) -> None:
        self._log = log
        self._random = random

    def _maybe_die(self) -> None:
        if self._random.random() < 0.004:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, deadline: Deadline) -> Position | None:
        return self._log.begin(deadline)

    def end(self, deadline: Deadline) -> Position | None:
        return self._log.end(deadline)

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

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterable[tuple[Position, bytes]]:
        self._maybe_die()
        return self._log.read(first, last, deadline)

    def trim(self, before: Position, deadline: Deadline) -> None:
        self._maybe_die()
        self._log.trim(before, deadline)


# --- a worker -------------------------------------------------------------------------------------------------------


class Worker:
    """Claims every one of the races, in competition with all other workers."""

    def __init__(self, path: Path, number: int, seed: int, settled: int) -> None:
        self._random = random.Random(seed)
        self._tokens = path.parent
        self._number = number
        self._broker = open_broker(path, durability=DURABILITY)
        self._settled = settled
        self._decisions = Decisions(
            Unreliable(self._broker.decision_log("races", Deadline(30)), self._random),
            timeout=30,
            clock=lambda: 1_700_000_000 + SECONDS_PER_RACE * self._settled,
            lifetime=60,
            tidy_after=100,
        )

    def run(self, races: Iterable[int]) -> None:
        waiting = deque(races)
        stuck_at = time.monotonic() + 30
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
                assert time.monotonic() < stuck_at, f"nothing was settled for 30 s, races {[*waiting][:9]} are open"
            else:
                stuck_at = time.monotonic() + 30
                self._settled += 1
                tell((race, *answer))
        tell(("over",))
        self._broker.close(Deadline(30))

    def _answer(self, race: int) -> tuple[str, str] | None:
        """What became of a race: the decision and the nonce of the claim that counts; None: it has not begun yet."""
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


def work(path: Path, number: int, seed: int, races: list[int]) -> None:
    Worker(path, number, seed, RACES - len(races)).run(races)


class Shift:
    """One worker and those who take its place when it was killed; what they were told."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number
        self._open = dict.fromkeys(range(RACES))
        self.answers: dict[int, tuple[str, str]] = {}
        self.killed = 0
        self.lost = 0

    def run(self) -> Shift:
        while True:
            with Child(work, self._path, self._number, 100 * self.killed + self._number, list(self._open)) as child:
                try:
                    while (told := child.told())[0] != "over":
                        race, *answer = told
                        if race == "lost":
                            self.lost += 1
                            continue
                        self.answers[race] = tuple(answer)
                        del self._open[race]
                except AssertionError as error:
                    if "signal 9" not in str(error):
                        raise
                    self.killed += 1
                else:
                    return self


@pytest.mark.timeout(300)
def test_four_processes_race_a_thousand_times_and_nobody_disagrees(tmp_path):
    path = tmp_path / "broker.db"
    with ThreadPoolExecutor(WORKERS) as pool:
        shifts = list(pool.map(lambda number: Shift(path, number).run(), range(WORKERS)))

    told = Counter(answer[0] for shift in shifts for answer in shift.answers.values())
    for race in range(RACES):
        answers = {shift.answers[race] for shift in shifts}
        decided = answers - {("Fenced", ""), ("EvidenceLost", "")}
        assert len(decided) <= 1, f"race {race}: {answers}"
        assert decided or race % 4 != 1, f"race {race} was decided by nobody"
    broker = open_broker(path)
    log = broker.decision_log("races", Deadline(10))
    reader = Decisions(log)
    won: Counter[int] = Counter()
    for race in range(RACES):
        if race % 4 == 2:
            continue
        claim = reader.read(("race" if race % 2 else "query", race)).claim
        answers = {shift.answers[race] for shift in shifts} - {("Fenced", "")}
        assert answers <= ({(claim.decision.name, claim.nonce)} if claim else set())
        if claim:
            won[claim.data["by"]] += 1
    # All of that happened: everybody won some races, and most of what was asked was decided.
    assert min(won[number] for number in range(WORKERS)) >= 10, won
    assert sum(shift.killed for shift in shifts) >= 5
    assert sum(shift.lost for shift in shifts) >= 10
    begin = log.begin(Deadline(10))
    assert begin is not None
    assert begin[0] > 500
    assert told["COMMIT"] > 500
    assert told["ABORT"] > 500
    assert told["COMMIT"] + told["ABORT"] > 0.6 * WORKERS * RACES, told
    broker.close(Deadline(10))


# --- killed at every step -------------------------------------------------------------------------------------------


def decide_a_batch(url: str) -> None:
    """What a run does: open, claim with data in parts, act on what counts, mark it done."""
    with txnbridge.connect(url) as bridge:
        decisions = bridge.decisions("query")
        if decisions.read("batch").done_up_to is None:
            run = decisions.open("query")
            claim = decisions.claim(("batch", 0), Decision.COMMIT, {"tokens": "x" * 1_000_000}, opening=run)
            assert claim.data == {"tokens": "x" * 1_000_000}
            decisions.done("batch", 0)
        decisions.tidy()
        decisions.close()


def check_the_batch(url: str) -> None:
    with txnbridge.connect(url) as bridge:
        decisions = bridge.decisions("query")
        reading = decisions.read("batch")
        assert reading.done_up_to == 0
        assert decisions.read(("batch", 0)).done
        decisions.close()


@pytest.mark.timeout(300)
def test_a_process_killed_at_any_step_of_deciding_leaves_what_the_next_one_finishes():
    points = crash_everywhere(decide_a_batch, check_the_batch, at_once=4)
    names = {point.event for point in points}
    assert {"decision.append/before", "decision.append/after", "decision.read/before"} <= names


# --- reading stays short --------------------------------------------------------------------------------------------


class Counting(Unreliable):
    """Counts what is read."""

    records = 0

    def _maybe_die(self) -> None:
        pass

    def read(
        self, first: Position | None, last: Position | None, deadline: Deadline
    ) -> Iterable[tuple[Position, bytes]]:
        for found in self._log.read(first, last, deadline):
            self.records += 1
            yield found


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_reads_stay_short_however_many_decisions_the_log_has_seen(tmp_path, count):
    now = 1_700_000_000.0

    def clock() -> float:
        return now

    broker = open_broker(tmp_path / "broker.db", durability=DURABILITY)
    decisions = Decisions(
        broker.decision_log("long", Deadline(10)), clock=clock, lifetime=30, tidy_after=min(10_000, count // 5)
    )
    for number in range(count):
        now += 1
        begin = decisions.begin()
        decisions.claim(f"t{number}", Decision.COMMIT, begin=begin)
    log = Counting(broker.decision_log("long", Deadline(10)), random.Random())
    newcomer = Decisions(log, clock=clock)
    assert newcomer.claim(f"t{number}", Decision.ABORT, begin=begin).decision is Decision.COMMIT
    # The records between two snapshots, and those of a presence's life: 390 seconds, with a decision in each.
    assert log.records < min(10_000, count // 5) + 390 + 100 < count
    log.records = 0
    newcomer.claim("another", Decision.COMMIT)
    assert log.records < 10
    broker.close(Deadline(10))
