"""The time until a waiting reader in another process has a message, and the processor time of waiting.

Two times are measured until the reader's `poll` returns: from before the commit, and from its return. The yardstick is
a byte through a pipe to a process that blocks on it. The processor time of a reader that gets no messages includes all
its threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import txnbridge
from benchmarks._files import fresh, url
from benchmarks._harness import Estimate, Report, Settings, at_most, child, estimate, quantile, run

# The random pause in seconds before a message: the reader is idle by then, at any point between two of its looks.
PAUSE = (0.03, 0.07)


def wait_for_messages(pipe: Connection, folder: Path, group: str | None) -> None:
    """Answer each message with the time at which it came."""
    with txnbridge.connect(url(folder)) as bridge, bridge.consumer("topic", group=group) as consumer:
        pipe.send("ready")
        while True:
            batch = consumer.poll(1, timeout=60)
            pipe.send(time.monotonic())
            if batch[0].value == b"stop":
                return


def wait_for_bytes(pipe: Connection) -> None:
    while pipe.recv_bytes() != b"stop":
        pipe.send(time.monotonic())


def rest(pipe: Connection, folder: Path, kind: str) -> None:
    """Poll an empty topic for the given seconds, and answer the used processor time in percent of a core."""
    with txnbridge.connect(url(folder)) as bridge:
        bridge.admin.create_topic("nothing")
        group = "resting" if kind == "group" else None
        with bridge.consumer("nothing", group=group) as consumer:
            consumer.poll(timeout=0.1)
            while seconds := pipe.recv():
                begun, used = time.monotonic(), time.process_time()
                if kind == "sleep":
                    time.sleep(seconds)
                else:
                    consumer.poll(timeout=seconds)
                pipe.send(100 * (time.process_time() - used) / (time.monotonic() - begun))


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


def measure(settings: Settings) -> None:
    with fresh(settings.folder) as folder:
        measure_waking(settings, folder)
        measure_resting(settings, folder)


def measure_waking(settings: Settings, folder: Path) -> None:
    report = Report(settings, "A waiting reader in another process")
    dice = random.Random(1)
    count = 3 if settings.quick else max(20, int(settings.seconds / (sum(PAUSE) / 2)))
    asked: list[list[float]] = []
    answered: list[list[float]] = []
    piped: list[list[float]] = []
    with txnbridge.connect(url(folder)) as bridge:
        bridge.admin.create_topic("topic")
        with child(wait_for_messages, folder, None) as reader, child(wait_for_bytes) as pipe:
            reader.recv()
            for _ in range(settings.rounds):
                pairs = []
                for _ in range(count):
                    time.sleep(dice.uniform(*PAUSE))
                    pairs.append(commit_at(bridge, reader, b"go"))
                asked.append([pair[0] for pair in pairs])
                answered.append([pair[1] for pair in pairs])
                bytes_seen = []
                for _ in range(count):
                    time.sleep(dice.uniform(*PAUSE))
                    bytes_seen.append(byte_at(pipe))
                piped.append(bytes_seen)
            commit_at(bridge, reader, b"stop")
            pipe.send_bytes(b"stop")
    report.figure("from the commit's answer, p50", of_rounds(answered, 0.5), "ms", at_most(5))
    report.figure("from the commit's answer, p99 of all", of_all(answered, 0.99), "ms")
    report.figure("from asking for the commit, p50", of_rounds(asked, 0.5), "ms", at_most(5))
    report.figure("from asking for the commit, p99 of all", of_all(asked, 0.99), "ms")
    report.figure("yardstick: a byte through a pipe, p50", of_rounds(piped, 0.5), "ms")
    report.figure("yardstick: a byte through a pipe, p99 of all", of_all(piped, 0.99), "ms")


def of_rounds(rounds: Sequence[Sequence[float]], part: float) -> Estimate:
    return estimate([quantile(values, part) for values in rounds])


def of_all(rounds: Sequence[Sequence[float]], part: float) -> Estimate:
    return Estimate.single(quantile([value for values in rounds for value in values], part))


def measure_resting(settings: Settings, folder: Path) -> None:
    report = Report(settings, "A reader for which nothing comes")
    kinds = {"alone": "without a group", "group": "in a group", "sleep": "yardstick: a process that sleeps"}
    used: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(settings.rounds):
        for kind in kinds:
            used[kind].append(rest_once(folder, kind, settings.seconds))
    for kind, name in kinds.items():
        report.figure(name, estimate(used[kind]), "% of a core", at_most(2) if kind != "sleep" else None)


def rest_once(folder: Path, kind: str, seconds: float) -> float:
    with child(rest, folder, kind) as pipe:
        pipe.send(seconds)
        used: float = pipe.recv()
        pipe.send(0)
    return used


if __name__ == "__main__":
    run(measure)
