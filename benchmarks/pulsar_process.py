"""Consume, transform, produce on Pulsar, beside a loop on the official client, which has no transactions.

In each turn a new subscription begins, sends every message to another topic once, and ends. The loop acknowledges once
as many messages are stored as txnbridge has in a transaction.
"""

from __future__ import annotations

import time

from benchmarks._harness import Report, Round, Settings, Turn, at_least, in_turn, per_unit, run, speed, unique
from benchmarks._ours import fill, passing_on
from benchmarks._peers import Peer
from benchmarks._pulsar import broker, new_topic, official
from txnbridge import connect

MESSAGES = 200_000  # so that each turn takes a second or more
BATCH = 10_000
SIZE = 100


def by_hand(client: Peer, source: str, target: str, count: int) -> Turn:
    def turn() -> Round:
        begin = time.perf_counter()
        stored = client.ask("pass_on", source, target, unique("plain"), count, BATCH)
        assert stored == count
        return Round([time.perf_counter() - begin], count)

    return turn


def measure(settings: Settings) -> None:
    count = BATCH if settings.quick else MESSAGES
    with broker() as url, connect(url) as bridge, official(settings, url) as client:
        source, target, ours = new_topic(bridge), new_topic(bridge), new_topic(bridge)
        fill(bridge, source, SIZE, count, BATCH)
        turns = {
            "loop on the official client": by_hand(client, source, target, count),
            "processor": passing_on(url, source, ours, count, BATCH),
        }
        title = f"Pulsar: consume, transform, produce, {count:,} x {SIZE} B, {BATCH:,} a transaction"
        report = Report(settings, title)
        loop, processor = in_turn(turns, settings.rounds).values()
        report.figure("processor / loop on the official client", speed(processor, loop), "", at_least(3))
        for name, rounds in zip(turns, (loop, processor), strict=True):
            report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")


if __name__ == "__main__":
    run(measure)
