"""The functions of all benchmarks: run contenders in turn, estimate medians, compare with targets, print a report."""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import platform
import random
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, ParamSpec

Lap = Callable[[], int]  # does some work and returns its number of units
Contender = Callable[[], AbstractContextManager[Lap]]  # sets up outside the measured time, and cleans up
Clock = Callable[[], float]
P = ParamSpec("P")

WALL: Clock = time.perf_counter
# For work that neither waits nor uses a disk. Other processes disturb this clock less than wall time.
PROCESSOR: Clock = time.process_time

_numbers = itertools.count(1)

_RESAMPLES = 2000  # of the bootstrap; the ends of the interval then vary by about 1 % of its width


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure, and where the files go."""

    rounds: int
    seconds: float  # the least duration of each contender's round
    folder: Path  # on the disk to measure
    quick: bool  # only test that everything works: the figures mean nothing


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One round of one contender: the seconds of each lap, and the units of all laps together."""

    laps: Sequence[float]
    units: int

    @property
    def seconds_per_unit(self) -> float:
        return sum(self.laps) / self.units


Turn = Callable[[], Round]  # does all of its work once, and measures that itself


def contender(set_up: Callable[P, Iterator[Lap]]) -> Callable[P, Contender]:
    """Turn a generator, which sets up, yields a lap and cleans up, into a function that returns a contender."""
    opened_once = contextmanager(set_up)

    def make(*arguments: P.args, **named: P.kwargs) -> Contender:
        return lambda: opened_once(*arguments, **named)

    return make


def alternate(settings: Settings, contenders: Mapping[str, Contender], clock: Clock = WALL) -> dict[str, list[Round]]:
    """Run rounds of all contenders in turn, as `in_turn` does."""
    return in_turn({name: as_turn(each, settings, clock) for name, each in contenders.items()}, settings.rounds)


def in_turn(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Round]]:
    """Run rounds of all turns, every second time in reverse order, so that a drift favours no one."""
    found: dict[str, list[Round]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            found[name].append(turns[name]())
    return found


def as_turn(contender: Contender, settings: Settings, clock: Clock = WALL) -> Turn:
    """Return a turn that runs one round of a contender."""

    def turn() -> Round:
        with contender() as lap:
            lap()  # the first lap fills caches and does not count
            laps: list[float] = []
            units = 0
            until = clock() + settings.seconds
            while not laps or clock() < until:
                start = clock()
                units += lap()
                laps.append(clock() - start)
        return Round(laps, units)

    return turn


def timed(work: Callable[[], object], units: int) -> Turn:
    """Return a turn that does this work once."""

    def turn() -> Round:
        begin = WALL()
        work()
        return Round([WALL() - begin], units)

    return turn


def by_threads(contenders: Sequence[Contender], seconds: float) -> Round:
    """Run one round of all contenders at once, each on a thread of its own. The round has the laps of all of them.

    Its units are its laps times the threads, so that the seconds per unit are wall time. If a contender fails, the
    others end, and its error is raised.
    """
    ready = threading.Barrier(len(contenders))
    laps: list[float] = []

    def work(contender: Contender) -> None:
        try:
            with contender() as lap:
                lap()  # the first lap opens connections and does not count
                ready.wait()
                until = WALL() + seconds
                while (start := WALL()) < until:
                    lap()
                    laps.append(WALL() - start)
        except BaseException:
            ready.abort()  # the other threads do not wait for this one
            raise

    with ThreadPoolExecutor(len(contenders)) as pool:
        working = [pool.submit(work, contender) for contender in contenders]
    errors = [error for each in working if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # a broken barrier is only the consequence of another error
    return Round(laps, len(laps) * len(contenders))


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % bootstrap interval. All three are the same if there is only one value."""

    median: float
    low: float
    high: float

    @classmethod
    def single(cls, value: float) -> Estimate:
        return cls(value, value, value)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median, with its interval, of values of which each round gives one."""
    dice = random.Random(1)  # the same interval for the same values
    medians = [median(dice.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    return Estimate(median(values), quantile(medians, 0.025), quantile(medians, 0.975))


def speed(ours: Sequence[Round], peer: Sequence[Round]) -> Estimate:
    """Return our speed divided by the peer's, over the rounds."""
    return estimate([p.seconds_per_unit / o.seconds_per_unit for o, p in zip(ours, peer, strict=True)])


def excess(ours: Sequence[Round], peer: Sequence[Round], scale: float) -> Estimate:
    """Return how much longer a unit takes with ours than with the peer; `scale` is 1e6 for microseconds."""
    return estimate([scale * (o.seconds_per_unit - p.seconds_per_unit) for o, p in zip(ours, peer, strict=True)])


def per_unit(rounds: Sequence[Round], scale: float) -> Estimate:
    return estimate([scale * r.seconds_per_unit for r in rounds])


def lap_quantile(rounds: Sequence[Round], part: float, scale: float) -> Estimate:
    """Return the median, over the rounds, of a quantile of each round's laps."""
    return estimate([scale * quantile(r.laps, part) for r in rounds])


# --- reporting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The bound of a figure: the least or the largest value that it should have."""

    bound: float
    at_least: bool

    def verdict(self, found: Estimate) -> str:
        """Return "reached", "missed", or "undecided" if the bound is within the interval: the machine was too busy."""
        good, bad = (found.low, found.high) if self.at_least else (-found.high, -found.low)
        bound = self.bound if self.at_least else -self.bound
        return "reached" if good >= bound else "missed" if bad < bound else "undecided"

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


def at_least(bound: float) -> Target:
    return Target(bound, True)


def at_most(bound: float) -> Target:
    return Target(bound, False)


class Report:
    """Prints figures as rows of a Markdown table, each as soon as it is known."""

    def __init__(self, settings: Settings, title: str) -> None:
        print(f"\n### {title}\n")
        print(f"{settings.rounds} rounds of at least {settings.seconds:g} s; load {os.getloadavg()[0]:.1f}")
        if settings.quick:
            print("--quick: these figures mean nothing")
        print("\n| figure | median | 95 % interval | target | |\n|---|---|---|---|---|")

    def figure(self, name: str, found: Estimate, unit: str = "", target: Target | None = None) -> None:
        unit = f" {unit}" if unit else ""
        goal, verdict = ("", "") if target is None else (f"{target}{unit}", target.verdict(found))
        interval = f"{_number(found.low)} to {_number(found.high)}" if found.low < found.high else "one value"
        print(f"| {name} | {_number(found.median)}{unit} | {interval} | {goal} | {verdict} |", flush=True)

    def ratio(self, name: str, ours: Sequence[Round], peer: Sequence[Round], target: Target | None = None) -> None:
        self.figure(name, speed(ours, peer), "", target)

    def rate(self, name: str, rounds: Sequence[Round], target: Target | None = None) -> None:
        self.figure(name, estimate([1 / each.seconds_per_unit for each in rounds]), "", target)

    def rates(self, found: Mapping[str, Sequence[Round]], of: str) -> None:
        for name, rounds in found.items():
            self.rate(f"{name}, {of} a second", rounds)

    def milliseconds(self, name: str, rounds: Sequence[Round], part: float) -> None:
        self.figure(name, lap_quantile(rounds, part, 1e3), "ms")

    def spread(self, name: str, rounds: Sequence[Round], target: Target | None = None) -> None:
        ratios = [quantile(each.laps, 0.99) / quantile(each.laps, 0.5) for each in rounds]
        self.figure(f"{name}: p99 / p50", estimate(ratios), "", target)

    def single(self, name: str, value: float, unit: str = "", target: Target | None = None) -> None:
        self.figure(name, Estimate.single(value), unit, target)

    def each(self, found: Mapping[str, Sequence[Round]], of: str = "a message", unit: str = "us") -> None:
        """Print the time a unit of each contender, in microseconds or milliseconds; `of` names the unit of work."""
        for name, rounds in found.items():
            self.figure(f"{name}, {of}", per_unit(rounds, {"us": 1e6, "ms": 1e3}[unit]), unit)


def _number(value: float) -> str:
    """Return a number as text with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def machine(folder: Path) -> str:
    """Return a description of this machine in one line, without its name."""
    return ", ".join(
        [
            f"{os.cpu_count()} cores ({_processor()})",
            f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB RAM",
            _disk(folder),
            f"{platform.system()} {platform.release().split('-')[0]}",
            f"Python {platform.python_version()}",
            f"SQLite {sqlite3.sqlite_version}",
        ]
    )


def _processor() -> str:
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _disk(folder: Path) -> str:
    """Return the file system of a folder, and the kind of disk if the system reports it."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split(" - ")[1].split()[0] for line in _lines("/proc/self/mountinfo") if line.split()[2] == name]
    block = Path("/sys/dev/block", name).resolve()
    virtual = block.name.startswith(("vd", "xvd"))
    spins = _lines(block / "queue" / "rotational") == ["1"]
    kind = "virtual disk" if virtual else "spinning disk" if spins else "solid-state disk" if block.exists() else "disk"
    return f"{mounts[0] if mounts else 'unknown file system'} on a {kind}"


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# --- running ---------------------------------------------------------------------------------------------------------


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="only test that it works, in a second or two; no figures")
    parser.add_argument("--rounds", type=int, default=10, help="how often each contender runs (10)")
    parser.add_argument("--seconds", type=float, default=1.0, help="the least duration of a round (1.0)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are made")
    return parser


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Settings]:
    """Yield the settings given by the options, with a folder of their own that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="txnbridge-benchmark-", dir=options.folder))
    try:
        if options.quick:
            yield Settings(rounds=2, seconds=0.02, folder=folder, quick=True)
        else:
            yield Settings(options.rounds, options.seconds, folder, quick=False)
    finally:
        shutil.rmtree(folder)


def unique(what: str) -> str:
    """Return a name that is unique on this machine."""
    return f"{what}-{os.getpid()}-{next(_numbers)}"


@contextmanager
def background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread during the block, whose end sets the event that the function gets."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `target(pipe, *arguments)` in a new process; yield the other end of the pipe.

    The end of the block closes the pipe, by which the process is to end, and waits for the process.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(target, theirs, *arguments))
    process.start()
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    with suppress(EOFError, BrokenPipeError):  # the parent has closed the pipe
        target(pipe, *arguments)
