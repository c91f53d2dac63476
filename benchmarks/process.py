"""Consume, transform, produce, beside the same loop by hand on each broker's own client, and beside Quix Streams."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks._harness import Lap, Report, Settings, alternate, at_least, contender, in_turn, unique
from benchmarks._ours import fill, passing_on
from txnbridge import connect

BATCH = 10_000
SIZE = 100
# So many messages that each turn takes a second or more.
MESSAGES = {"kafka": 1_000_000, "pulsar": 200_000}


def process(settings: Settings, broker: str) -> None:
    """Measure a processor and its peers in transactions of 10,000 messages.

    In each turn a new group joins, sends every message to another topic once, and leaves. Quix Streams runs
    exactly-once on Kafka. Pulsar's official client has no transactions, so its loop acknowledges once as many messages
    are stored as txnbridge has in a transaction.
    """
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


FOR_SMALL = 20_000  # more messages than all rounds read


@contender
def passing_on_one(url: str, source: str, target: str) -> Iterator[Lap]:
    with connect(url, writers=1) as bridge, bridge.consumer(source, unique("ours")) as consumer:

        def lap() -> int:
            while not (messages := consumer.poll(1, 1)):
                pass
            with bridge.transaction() as txn:
                txn.send(target, messages[0].value)
                txn.ack(messages)
            return 1

        yield lap


def small(settings: Settings, broker: str) -> None:
    """Measure the smallest transactions with an acknowledgement: one message read, passed on and acknowledged in each.

    They come one after another, beside the same loop by hand on the plain client, both as members of a group for the
    whole time.
    """
    from benchmarks import _kafka as kafka

    with kafka.broker(settings) as url:
        source, target = kafka.new_topic(url), kafka.new_topic(url)
        fill(url, source, 100, 1000 if settings.quick else FOR_SMALL, 1000)
        contenders = {"by hand": kafka.passing_on_one(url, source, target), "ours": passing_on_one(url, source, target)}
        found = alternate(settings, contenders)
        report = Report(settings, "Kafka: one message read, passed on and acknowledged in a transaction")
        report.ratio("ours / loop by hand", found["ours"], found["by hand"], at_least(1.0))
        report.rate("ours, transactions a second", found["ours"], at_least(80))
        report.rate("loop by hand, transactions a second", found["by hand"])
