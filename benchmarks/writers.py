"""Four processes that write into one file, beside one alone.

The first figure is the throughput of all four, divided by that of one. The second is the longest duration of a
transaction, as a multiple of the mean in its process and round; that of one process alone shows the part of the disk
and the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import txnbridge
from benchmarks._files import KIB, bodies, fresh, url
from benchmarks._harness import Estimate, Report, Round, Settings, at_least, at_most, child, estimate, run

PROCESSES = 4
SIZES = {"1 message": 1, "1,000 messages": 1000}


def work(pipe: Connection) -> None:
    """For each order from the pipe, write into the given file for the given time, and answer with the round."""
    while order := pipe.recv():
        folder, count, start, seconds = order
        pipe.send(write(folder, bodies(count, KIB), start, seconds))


def write(folder: Path, values: Sequence[bytes], start: float, seconds: float) -> Round | str:
    laps: list[float] = []
    try:
        with txnbridge.connect(url(folder)) as bridge:
            write_once(bridge, values)  # opens the writers, so that this does not count
            time.sleep(max(0.0, start - time.monotonic()))
            until = time.monotonic() + seconds
            while not laps or time.monotonic() < until:
                begun = time.perf_counter()
                write_once(bridge, values)
                laps.append(time.perf_counter() - begun)
    except txnbridge.TxnBridgeError as error:
        return f"{type(error).__name__}: {error}"
    return Round(laps, len(laps))


def write_once(bridge: txnbridge.Bridge, values: Sequence[bytes]) -> None:
    with bridge.transaction() as txn:
        txn.send_many("topic", values)


def together(settings: Settings, pipes: Sequence[Connection], count: int) -> tuple[list[Round], list[str]]:
    """Run one round of these processes on a new file; return their rounds and the texts of errors."""
    with fresh(settings.folder) as folder:
        start = time.monotonic() + (0.05 if settings.quick else 0.5)  # all processes are connected by then
        for pipe in pipes:
            pipe.send((folder, count, start, settings.seconds))
        answers: list[Any] = [pipe.recv() for pipe in pipes]
    return [a for a in answers if isinstance(a, Round)], [a for a in answers if isinstance(a, str)]


def throughput(rounds: Sequence[Round]) -> float:
    return sum(1 / round.seconds_per_unit for round in rounds)


def longest(rounds: Sequence[Round]) -> float:
    return max(max(round.laps) / round.seconds_per_unit for round in rounds)


def measure(settings: Settings) -> None:
    with ExitStack() as stack:
        pipes = [stack.enter_context(child(work)) for _ in range(PROCESSES)]
        for name, count in SIZES.items():
            measure_size(settings, pipes, name, count)
        for pipe in pipes:
            pipe.send(None)


def measure_size(settings: Settings, pipes: Sequence[Connection], name: str, count: int) -> None:
    report = Report(settings, f"{PROCESSES} writing processes, {name} of 1 KiB a transaction")
    alone: list[list[Round]] = []
    all_of_them: list[list[Round]] = []
    failures: list[str] = []
    for number in range(settings.rounds):
        for some, found in ((pipes[:1], alone), (pipes, all_of_them))[:: -1 if number % 2 else 1]:
            rounds, failed = together(settings, some, count)
            found.append(rounds)
            failures += failed
    if failures:
        raise SystemExit("\n".join(["these writers failed:", *failures]))
    pairs = zip(all_of_them, alone, strict=True)
    total = estimate([throughput(many) / throughput(one) for many, one in pairs])
    report.figure(f"throughput of {PROCESSES} / of 1", total, "", at_least(0.9))
    report.figure("yardstick: transactions a second of 1", estimate([throughput(one) for one in alone]))
    waits = [longest(many) for many in all_of_them]
    report.figure("longest wait of a round / fair share", estimate(waits), "", at_most(10))
    report.figure("longest wait of all rounds / fair share", Estimate.single(max(waits)), "", at_most(10))
    report.figure("yardstick: the same of 1, a round", estimate([longest(one) for one in alone]))
    report.figure("yardstick: the same of 1, all rounds", Estimate.single(max(map(longest, alone))))


if __name__ == "__main__":
    run(measure)
