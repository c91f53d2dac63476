"""Small transactions of many threads on one bridge to RocketMQ, beside the official client and without group commit."""

from __future__ import annotations

from benchmarks._harness import Report, Settings, a_second, as_turn, at_least, in_turn, run, speed
from benchmarks._rocketmq import broker, new_topic, official
from benchmarks._small import by_threads_of_one_bridge, report_spread
from benchmarks.rocketmq_write import theirs
from txnbridge import connect

SIZE = 100
OFFICIAL = {1: (1.5, 100), 16: (3, 20), 64: (3, 10)}  # threads: how often its speed is wanted, its units in a lap


def measure(settings: Settings) -> None:
    with broker() as address, connect(address.url) as bridge:
        topic, foreign = new_topic(bridge), new_topic(bridge)
        with official(settings, address, foreign) as client:
            turns = {}
            for threads, (_, each) in OFFICIAL.items():
                for name, shared in (("ours", None), ("ours off", False)):
                    turns[f"{name}, {threads}"] = lambda threads=threads, shared=shared: by_threads_of_one_bridge(
                        settings, address.url, topic, threads, shared
                    )
                peer = theirs(client, threads, 2 if settings.quick else each, SIZE)
                turns[f"official, {threads}"] = as_turn(peer, settings)
            found = in_turn(turns, settings.rounds)
    report = Report(settings, f"RocketMQ: transactions of one message of {SIZE} B by the threads of one bridge")
    for threads, (wanted, _) in OFFICIAL.items():
        us, off, them = (found[f"{name}, {threads}"] for name in ("ours", "ours off", "official"))
        report.figure(f"{threads} threads / the official client", speed(us, them), "", at_least(wanted))
        report.figure(f"{threads} threads / the same, group_commit=False", speed(us, off))
    for name, rounds in found.items():
        report.figure(f"{name}: transactions a second", a_second(rounds))
    report_spread(report, found["ours, 64"])


if __name__ == "__main__":
    run(measure)
