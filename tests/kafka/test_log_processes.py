"""Processes that decide at once on one log of Kafka: they are killed, lose answers, and so does their broker."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.core import test_decisions_processes as core
from tests.kafka.test_log import open_log
from txnbridge._decisions import Decisions
from txnbridge.spi import Deadline
from txnbridge.testing import Child

WORKERS = core.WORKERS
SECONDS = 60  # a broker that was killed is back within ten


class Unreliable(core.Unreliable):
    """As the core's, but the process dies as often as each test wants it to."""

    dying = 0.004

    def _maybe_die(self):
        if self._random.random() < self.dying:
            os.kill(os.getpid(), signal.SIGKILL)


class Worker(core.Worker):
    """Claims every one of the races, in competition with all other workers."""

    def __init__(self, url: str, folder: Path, number: int, seed: int, settled: int, dying: float) -> None:
        self._random = random.Random(seed)
        self._tokens = folder
        self._number = number
        self._settled = settled
        kafka = open_log(url, "races", timeout=SECONDS)
        # What is closed in the end is called a broker there.
        self._broker = SimpleNamespace(close=lambda deadline: kafka.close())  # type: ignore[assignment]
        log = Unreliable(kafka, self._random)
        log.dying = dying
        self._decisions = Decisions(
            log,
            timeout=SECONDS,
            clock=lambda: 1_700_000_000 + core.SECONDS_PER_RACE * self._settled,
            lifetime=60,
            tidy_after=100,
        )

    def run(self, races: Iterable[int]) -> None:
        """All begin together."""
        (self._tokens / f"ready-{self._number}").touch()
        deadline = Deadline(SECONDS)
        while len(list(self._tokens.glob("ready-*"))) < WORKERS:
            deadline.check("waiting for the other workers")
            time.sleep(0.01)
        super().run(races)


def work(url: str, folder: Path, number: int, seed: int, races: list[int], settled: int, dying: float) -> None:
    Worker(url, folder, number, seed, settled, dying).run(races)


class Shift:
    """One worker and those who take its place when it was killed; what they were told."""

    def __init__(self, url: str, folder: Path, number: int, races: int, dying: float) -> None:
        self._how = url, folder, number
        self.races = races
        self._dying = dying
        self.answers: dict[int, tuple[str, ...]] = {}
        self.killed = 0
        self.lost = 0

    def run(self) -> Shift:
        while True:
            open_races = [race for race in range(self.races) if race not in self.answers]
            seed = 100 * self.killed + self._how[2]
            with Child(work, *self._how, seed, open_races, len(self.answers), self._dying) as child:
                try:
                    while (told := child.told())[0] != "over":
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


def kill_now_and_then(broker, shifts, times, over):
    """Kill the broker while the races are on, at equal steps of what is settled."""
    everything = sum(shift.races for shift in shifts)
    killed = 0
    for step in range(1, times + 1):
        while sum(len(shift.answers) for shift in shifts) < everything * step / (times + 1):
            if over.wait(0.005):
                return killed
        broker.kill()
        broker.start()
        killed += 1
    return killed


@pytest.mark.parametrize(
    ("races", "dying", "kills"),
    [(60, 0.02, 1), pytest.param(1_000, 0.004, 10, marks=pytest.mark.full)],
    ids=["some", "a-thousand"],
)
@pytest.mark.timeout(3600)
def test_four_processes_race_and_nobody_disagrees(start_kafka, tmp_path, races, dying, kills):
    broker = start_kafka()
    over = threading.Event()
    shifts = [Shift(broker.url, tmp_path, number, races, dying) for number in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS + 1) as pool:
        killing = pool.submit(kill_now_and_then, broker, shifts, kills, over)
        try:
            for each in [pool.submit(shift.run) for shift in shifts]:
                each.result()
        finally:
            over.set()
        assert killing.result() == kills

    told = Counter(answer[0] for shift in shifts for answer in shift.answers.values())
    for race in range(races):
        answers = {shift.answers[race] for shift in shifts}
        decided = answers - {("Fenced", ""), ("EvidenceLost", "")}
        assert len(decided) <= 1, f"race {race}: {answers}"
        assert decided or race % 4 != 1, f"race {race} was decided by nobody"
    log = open_log(broker.url, "races")
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
    # All of that happened: several won races, and most of what was asked was decided.
    assert len(won) > 1, won
    assert sum(shift.killed for shift in shifts) >= 1
    assert told["COMMIT"] > 0.5 * races
    assert told["ABORT"] > 0.5 * races
    assert told["COMMIT"] + told["ABORT"] > 0.6 * WORKERS * races, told
    if races == 1_000:
        assert sum(shift.lost for shift in shifts) >= 10
        begin = log.begin(Deadline(10))
        assert begin is not None
        assert begin[0] > 500  # it was trimmed under way
    log.close()
