"""Consume, transform, produce, beside the same loop by hand on each broker's own client, and beside Quix Streams."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks._harness import Lap, Report, Settings, alternate, at_least, contender, in_turn, unique
from benchmarks._ours import fill, passing_on
from txnbridge import Message, Transaction, connect
from txnbridge._process.processor import HandlerSettings

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


WAIT = 0.1
AT_ONCE = 50


@contender
def passing_on_late(url: str, source: str, target: str, at_once: int, count: int) -> Iterator[Lap]:
    """Pass messages on by a handler that waits, such as for the answer of a service."""

    def each(message: Message, txn: Transaction) -> None:
        time.sleep(WAIT)
        txn.send(target, message.value)

    with connect(url) as bridge:
        settings: HandlerSettings = {"concurrency": at_once, "order": "none", "max_messages": count}
        with bridge.processor(source, group=unique("ours"), each=each, **settings) as processor:

            def lap() -> int:
                until = processor.stats.messages + count
                with bridge.transaction() as txn:
                    txn.send_many(source, [b"x" * SIZE] * count)
                while processor.stats.messages < until:
                    time.sleep(0.001)
                return count

            yield lap


def waiting(settings: Settings, broker: str) -> None:
    """Measure handlers that wait 100 ms: 50 at once, beside one after another."""
    from benchmarks import _kafka as kafka

    with kafka.broker(settings) as url:
        contenders = {
            f"{at_once} at once": passing_on_late(url, kafka.new_topic(url), kafka.new_topic(url), at_once, count)
            for at_once, count in ((AT_ONCE, 20 * AT_ONCE), (1, 20))
        }
        found = alternate(settings, contenders)
        report = Report(settings, "Kafka: a handler that waits 100 ms")
        many, one = found.values()
        report.ratio(f"{AT_ONCE} at once / one after another", many, one, at_least(40))
        report.each(found)
