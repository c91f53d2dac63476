"""Spark's exactly-once writer on Pulsar beside a loop of the official client, which has no transactions."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks._harness import Report, Round, Settings, Turn, in_turn, per_unit, run, speed
from benchmarks._peers import Peer
from benchmarks._pulsar import broker, new_topic, official
from benchmarks._spark import exactly_once, rows, spark
from txnbridge import Bridge, connect

ROWS = {100: 300_000, 1024: 100_000}


def timed(write: Callable[[str], object], bridge: Bridge, count: int) -> Turn:
    """Return a turn that writes all rows to a new topic."""

    def turn() -> Round:
        topic = new_topic(bridge)
        begin = time.perf_counter()
        write(topic)
        return Round([time.perf_counter() - begin], count)

    return turn


def theirs(client: Peer, size: int, count: int) -> Callable[[str], object]:
    return lambda topic: client.ask("write", topic, size, count)


def measure(settings: Settings) -> None:
    with broker() as url, connect(url) as bridge, official(settings, url) as client, spark(with_sink=False) as session:
        for size, wanted in ROWS.items():
            count = 1_000 if settings.quick else wanted
            frame = rows(session, size, count)
            turns = {
                "exactly once": timed(exactly_once(frame, url), bridge, count),
                "`send_async` in a loop": timed(theirs(client, size, count), bridge, count),
            }
            for turn in turns.values():
                turn()  # the first write starts the workers and does not count
            found = in_turn(turns, settings.rounds)
            frame.unpersist()
            report = Report(settings, f"Spark: {count:,} rows of {size} B from two partitions to a topic of Pulsar")
            writer, loop = found
            report.figure(f"{writer} / {loop}", speed(found[writer], found[loop]))
            for name, rounds in found.items():
                report.figure(f"{name}, a row", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
