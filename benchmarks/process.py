"""Consume, transform, produce, beside the same loop by hand on each broker's own client, and beside Quix Streams.

In each turn a new group joins, sends every message to another topic once in transactions of 10,000, and leaves. Quix
Streams runs exactly-once on Kafka. Pulsar's official client has no transactions, so its loop acknowledges once as many
messages are stored as txnbridge has in a transaction.
"""

from __future__ import annotations

from benchmarks._harness import Report, Settings, at_least, in_turn
from benchmarks._ours import fill, passing_on

BATCH = 10_000
SIZE = 100
# So many messages that each turn takes a second or more.
MESSAGES = {"kafka": 1_000_000, "pulsar": 200_000}


def measure(settings: Settings, broker: str) -> None:
    {"kafka": kafka, "pulsar": pulsar}[broker](settings, BATCH if settings.quick else MESSAGES[broker])


def title(broker: str, count: int) -> str:
    return f"{broker}: consume, transform, produce, {count:,} x {SIZE} B, {BATCH:,} a transaction"


def kafka(settings: Settings, count: int) -> None:
    from benchmarks import _kafka as kafka

    with kafka.broker(settings) as url:
        source, target = kafka.new_topic(url), kafka.new_topic(url)
        fill(url, source, SIZE, count, BATCH)
        turns = {
            "by hand": kafka.passing_on(url, source, target, count, BATCH),
            "tuned": kafka.passing_on(url, source, target, count, BATCH, kafka.FETCHING),
            "ours": passing_on(url, source, target, count, BATCH),
            "quix": kafka.quix(url, source, target, count, BATCH),
        }
        found = in_turn(turns, settings.rounds)
        report = Report(settings, title("Kafka", count))
        name = "processor / loop by hand that fetches alike"
        report.ratio(name, found["ours"], found["tuned"], at_least(1.0))
        report.ratio("processor / loop by hand", found["ours"], found["by hand"], at_least(1.0))
        report.ratio("processor / Quix Streams exactly-once", found["ours"], found["quix"], at_least(2.0))
        report.each(found)


def pulsar(settings: Settings, count: int) -> None:
    from benchmarks import _pulsar as pulsar

    with pulsar.broker(settings) as url, pulsar.official(settings, url) as client:
        source, target, ours = (pulsar.new_topic(url) for _ in range(3))
        fill(url, source, SIZE, count, BATCH)
        turns = {
            "loop on the official client": pulsar.passing_on(client, source, target, count, BATCH),
            "processor": passing_on(url, source, ours, count, BATCH),
        }
        report = Report(settings, title("Pulsar", count))
        found = in_turn(turns, settings.rounds)
        loop, processor = found.values()
        report.ratio("processor / loop on the official client", processor, loop, at_least(3))
        report.each(found)
