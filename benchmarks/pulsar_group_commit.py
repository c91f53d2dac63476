"""Small transactions of many threads on one bridge to Pulsar, beside those of one thread and without group commit."""

from __future__ import annotations

from benchmarks._harness import Report, Settings, a_second, at_least, in_turn, run, speed
from benchmarks._pulsar import broker, new_topic
from benchmarks._small import by_threads_of_one_bridge, report_spread
from txnbridge import connect


def measure(settings: Settings) -> None:
    with broker() as url, connect(url) as bridge:
        topic = new_topic(bridge)
        found = in_turn(
            {
                "64": lambda: by_threads_of_one_bridge(settings, url, topic, 64),
                "64 off": lambda: by_threads_of_one_bridge(settings, url, topic, 64, False),
                "1": lambda: by_threads_of_one_bridge(settings, url, topic, 1),
                "1 off": lambda: by_threads_of_one_bridge(settings, url, topic, 1, False),
            },
            settings.rounds,
        )
    report = Report(settings, "Pulsar: transactions of one message of 100 B by the threads of one bridge")
    report.figure("64 threads / 1 thread", speed(found["64"], found["1"]), "", at_least(40))
    report.figure("64 threads / the same, group_commit=False", speed(found["64"], found["64 off"]))
    for name in ("64", "64 off", "1"):
        report.figure(f"{name}: transactions a second", a_second(found[name]))
    report_spread(report, found["64"])
    report.figure("1 thread / the same, group_commit=False", speed(found["1"], found["1 off"]), "", at_least(0.95))


if __name__ == "__main__":
    run(measure)
