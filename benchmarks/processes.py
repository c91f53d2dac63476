"""Processes that share a file of the embedded broker: four that write, and one that waits for messages.

Four writers stand beside one alone. The first figure is the throughput of all four, divided by that of one. The second
is the longest duration of a transaction, as a multiple of the mean in its process and round; that of one process alone
shows the part of the disk and the scheduler.

For the reader two times are measured until its `poll` returns: from before the commit, and from its return. The
yardstick is a byte through a pipe to a process that blocks on it. The processor time of a reader that gets no messages
includes all its threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import txnbridge
from benchmarks._embedded import KIB, bodies, fresh, url
from benchmarks._harness import Report, Round, Settings, at_least, at_most, child, estimate, quantile


def processes(settings: Settings, broker: str) -> None:
    with ExitStack() as stack:
        pipes = [stack.enter_context(child(work)) for _ in range(WRITERS)]
        for name, count in SIZES.items():
            measure_writing(settings, pipes, name, count)
        for pipe in pipes:
            pipe.send(None)
    with fresh(settings.folder) as folder:
        measure_waking(settings, folder)
        measure_resting(settings, folder)


WRITERS = 4
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


def together(settings: Settings, pipes: Sequence[Connection], count: int) -> list[Round]:
    """Run one round of these processes on a new file; return their rounds. End the program if one of them failed."""
    with fresh(settings.folder) as folder:
        start = time.monotonic() + (0.05 if settings.quick else 0.5)  # all processes are connected by then
        for pipe in pipes:
            pipe.send((folder, count, start, settings.seconds))
        answers: list[Any] = [pipe.recv() for pipe in pipes]
    if failures := [answer for answer in answers if isinstance(answer, str)]:
        raise SystemExit("\n".join(["these writers failed:", *failures]))
    return answers


def throughput(rounds: Sequence[Round]) -> float:
    return sum(1 / round.seconds_per_unit for round in rounds)


def longest(rounds: Sequence[Round]) -> float:
    return max(max(round.laps) / round.seconds_per_unit for round in rounds)


def measure_writing(settings: Settings, pipes: Sequence[Connection], name: str, count: int) -> None:
    report = Report(settings, f"{WRITERS} writing processes, {name} of 1 KiB a transaction")
    alone: list[list[Round]] = []
    all_of_them: list[list[Round]] = []
    for number in range(settings.rounds):
        for some, found in ((pipes[:1], alone), (pipes, all_of_them))[:: -1 if number % 2 else 1]:
            found.append(together(settings, some, count))
    pairs = zip(all_of_them, alone, strict=True)
    total = estimate([throughput(many) / throughput(one) for many, one in pairs])
    report.figure(f"throughput of {WRITERS} / of 1", total, "", at_least(0.9))
    report.figure("yardstick: transactions a second of 1", estimate([throughput(one) for one in alone]))
    waits = [longest(many) for many in all_of_them]
    report.figure("longest wait of a round / fair share", estimate(waits), "", at_most(10))
    report.single("longest wait of all rounds / fair share", max(waits), "", at_most(10))
    report.figure("yardstick: the same of 1, a round", estimate([longest(one) for one in alone]))
    report.single("yardstick: the same of 1, all rounds", max(map(longest, alone)))


# The random pause in seconds before a message: the reader is idle by then, at any point between two of its looks.
PAUSE = (0.03, 0.07)


def wait_for_messages(pipe: Connection, folder: Path) -> None:
    """Answer each message with the time at which it came."""
    with txnbridge.connect(url(folder)) as bridge, bridge.consumer("topic") as consumer:
        pipe.send("ready")
        while True:
            batch = consumer.poll(1, timeout=60)
            pipe.send(time.monotonic())
            if batch[0].value == b"stop":
                return


def wait_for_bytes(pipe: Connection) -> None:
    while pipe.recv_bytes() != b"stop":
        pipe.send(time.monotonic())


def commit_at(bridge: txnbridge.Bridge, pipe: Connection, value: bytes) -> tuple[float, float]:
    """Commit a message; return the milliseconds from before and from after the commit until the reader had it."""
    with bridge.transaction() as txn:
        txn.send("topic", value)
        before = time.monotonic()
    after = time.monotonic()
    seen = pipe.recv()
    return 1e3 * (seen - before), 1e3 * (seen - after)


def byte_at(pipe: Connection) -> float:
    before = time.monotonic()
    pipe.send_bytes(b"go")
    seen: float = pipe.recv()
    return 1e3 * (seen - before)


def measure_waking(settings: Settings, folder: Path) -> None:
    report = Report(settings, "A waiting reader in another process")
    dice = random.Random(1)
    count = 3 if settings.quick else max(20, int(settings.seconds / (sum(PAUSE) / 2)))
    asked: list[list[float]] = []
    answered: list[list[float]] = []
    piped: list[list[float]] = []

    def after_pauses(measured: Callable[[], Any]) -> list[Any]:
        found = []
        for _ in range(count):
            time.sleep(dice.uniform(*PAUSE))
            found.append(measured())
        return found

    with txnbridge.connect(url(folder)) as bridge:
        bridge.admin.create_topic("topic")
        with child(wait_for_messages, folder) as reader, child(wait_for_bytes) as pipe:
            reader.recv()
            for _ in range(settings.rounds):
                pairs = after_pauses(lambda: commit_at(bridge, reader, b"go"))
                asked.append([pair[0] for pair in pairs])
                answered.append([pair[1] for pair in pairs])
                piped.append(after_pauses(lambda: byte_at(pipe)))
            commit_at(bridge, reader, b"stop")
            pipe.send_bytes(b"stop")
    for name, rounds, target in (
        ("from the commit's answer", answered, at_most(5)),
        ("from asking for the commit", asked, at_most(5)),
        ("yardstick: a byte through a pipe", piped, None),
    ):
        report.figure(f"{name}, p50", estimate([quantile(values, 0.5) for values in rounds]), "ms", target)
        of_all = quantile([value for values in rounds for value in values], 0.99)
        report.single(f"{name}, p99 of all", of_all, "ms")


def rest(pipe: Connection, folder: Path, kind: str) -> None:
    """Poll an empty topic for the given seconds, and answer the used processor time in percent of a core."""
    with txnbridge.connect(url(folder)) as bridge:
        bridge.admin.create_topic("nothing")
        with bridge.consumer("nothing", group="resting" if kind == "group" else None) as consumer:
            consumer.poll(timeout=0.1)
            while seconds := pipe.recv():
                begun, used = time.monotonic(), time.process_time()
                if kind == "sleep":
                    time.sleep(seconds)
                else:
                    consumer.poll(timeout=seconds)
                pipe.send(100 * (time.process_time() - used) / (time.monotonic() - begun))


def measure_resting(settings: Settings, folder: Path) -> None:
    report = Report(settings, "A reader for which nothing comes")
    kinds = {"alone": "without a group", "group": "in a group", "sleep": "yardstick: a process that sleeps"}
    used: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(settings.rounds):
        for kind in kinds:
            with child(rest, folder, kind) as pipe:
                pipe.send(settings.seconds)
                used[kind].append(pipe.recv())
                pipe.send(0)
    for kind, name in kinds.items():
        report.figure(name, estimate(used[kind]), "% of a core", at_most(2) if kind != "sleep" else None)
