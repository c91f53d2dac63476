"""Small transactions and half messages of many threads on one bridge to RocketMQ, beside the official client.

A half message of ours and a transaction of the official client do the same: store a half, do the local work (here
none), end the half.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._harness import (
    Lap,
    Report,
    Round,
    Settings,
    a_second,
    as_turn,
    at_least,
    by_threads,
    in_turn,
    run,
    speed,
)
from benchmarks._rocketmq import broker, new_topic, official
from benchmarks._small import BODY, by_threads_of_one_bridge, report_spread
from benchmarks.rocketmq_write import theirs
from txnbridge import Decision, HalfMessages, connect

# By threads: the target as a multiple of the official client's speed, and the client's transactions per thread and lap.
OFFICIAL = {1: (1.5, 100), 16: (3, 20), 64: (3, 10)}


@contextmanager
def half_messages(halves: HalfMessages, topic: str) -> Iterator[Lap]:
    def lap() -> int:
        with halves.transaction() as txn:
            txn.send(topic, BODY)
        return 1

    yield lap


def halves_by_threads(settings: Settings, url: str, topic: str, threads: int) -> Round:
    def commit(*_: object) -> Decision:
        return Decision.COMMIT

    with connect(url) as bridge, bridge.half_messages("benchmark", execute=commit, check=commit) as halves:
        return by_threads([lambda: half_messages(halves, topic)] * threads, settings.seconds)


def measure(settings: Settings) -> None:
    with broker() as address, connect(address.url) as bridge:
        topic, foreign = new_topic(bridge), new_topic(bridge)
        url = address.url
        with official(settings, address, foreign) as client:
            turns = {}
            for threads, (_, each) in OFFICIAL.items():
                for name, shared in (("ours", None), ("ours off", False)):
                    turns[f"{name}, {threads}"] = lambda threads=threads, shared=shared: by_threads_of_one_bridge(
                        settings, url, topic, threads, shared
                    )
                turns[f"half, {threads}"] = lambda threads=threads: halves_by_threads(settings, url, topic, threads)
                peer = theirs(client, threads, 2 if settings.quick else each, len(BODY))
                turns[f"official, {threads}"] = as_turn(peer, settings)
            found = in_turn(turns, settings.rounds)
    report = Report(settings, f"RocketMQ: one message of {len(BODY)} B by the threads of one bridge")
    for threads, (wanted, _) in OFFICIAL.items():
        us, off, half, them = (found[f"{name}, {threads}"] for name in ("ours", "ours off", "half", "official"))
        report.figure(f"{threads} threads: transactions / the official client", speed(us, them), "", at_least(wanted))
        report.figure(f"{threads} threads: transactions / the same, group_commit=False", speed(us, off))
        report.figure(
            f"{threads} threads: half messages / the official client", speed(half, them), "", at_least(wanted)
        )
    for name, rounds in found.items():
        report.figure(f"{name}: a second", a_second(rounds))
    report_spread(report, found["ours, 64"])


if __name__ == "__main__":
    run(measure)
