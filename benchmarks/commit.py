"""The duration of a commit: a whole transaction, from its begin to the end of its block, one after another.

On the embedded broker, where commits are durable, the yardsticks are writing 4 KiB to an existing file and
synchronising it, which is the least that any durable commit does, and the same rows in a transaction of a plain SQLite
file. On Pulsar the yardstick sends the least requests of such a transaction with our own client of the protocol.
"""

from __future__ import annotations

from benchmarks._harness import Report, Settings, alternate, at_least
from benchmarks._ours import BODY, writing


def measure(settings: Settings, broker: str) -> None:
    {"embedded": embedded, "pulsar": pulsar}[broker](settings)


def embedded(settings: Settings) -> None:
    from benchmarks import _embedded as files

    report = Report(settings, "Durable commits of 1 KiB messages (p50 and p99 of each round)")
    one, many = files.bodies(1, files.KIB), files.bodies(1000, files.KIB)
    found = alternate(
        settings,
        {
            "write 4 KiB, fdatasync": files.synchronising(settings),
            "embedded, 1 message": files.writing(settings, one),
            "plain SQLite, 1 row": files.inserting(settings, one),
            "embedded, 1,000 messages": files.writing(settings, many),
            "plain SQLite, 1,000 rows": files.inserting(settings, many),
        },
    )
    for name, rounds in found.items():
        report.milliseconds(f"{name}: p50", rounds, 0.5)
        report.milliseconds(f"{name}: p99", rounds, 0.99)


def pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    with pulsar.broker(settings) as url:
        contenders = {
            "bare requests": pulsar.bare_requests(url, pulsar.new_topic(url), len(BODY)),
            "ours": writing(url, pulsar.new_topic(url), [BODY], many=False),
        }
        report = Report(settings, "Pulsar: transactions of one message, one after another")
        found = alternate(settings, contenders)
        report.ratio("ours / bare requests", found["ours"], found["bare requests"], at_least(0.7))
        for name, rounds in found.items():
            report.milliseconds(f"{name}, p50", rounds, 0.5)
