"""Writing in transactions, from begin to the end of commit, beside each broker's own client.

On the embedded broker the peer is `executemany` on a plain SQLite file of the same columns and durability, once as
SQLite is by default, and once with the embedded broker's page size and log length; each round begins with a fresh file.
On Kafka it is the plain client in transactions of the same size, and then Kafka's own ProducerPerformance, which ends
its transactions by the clock, so a first run measures how long 10,000 of its messages take. On Pulsar it is the
official client, which has no transactions, and pulsar-perf. On RocketMQ it is the official clients for Python and
Java, which have transactions of one message: txnbridge adds a decision between the half and its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from benchmarks._harness import (
    PROCESSOR,
    Lap,
    Report,
    Round,
    Settings,
    alternate,
    as_turn,
    at_least,
    at_most,
    contender,
    in_turn,
)
from benchmarks._ours import writing
from txnbridge import connect


def write(settings: Settings, broker: str) -> None:
    {"embedded": embedded, "kafka": kafka, "pulsar": pulsar, "rocketmq": rocketmq}[broker](settings)


def values_of(count: int, size: int) -> list[bytes]:
    return [bytes([n % 251]) * size for n in range(count)]


def embedded(settings: Settings) -> None:
    from benchmarks import _embedded as files

    messages = 1000  # a transaction
    report = Report(settings, f"Writing, {messages:,} x 1 KiB a transaction, durable")
    values = files.bodies(messages, files.KIB)
    found = alternate(
        settings,
        {
            "send_many": files.writing(settings, values),
            "executemany": files.inserting(settings, values),
            "send": files.writing(settings, values, many=False),
            "executemany, our pages": files.inserting(settings, values, files.OUR_PAGE_BYTES, files.OUR_LOG_BYTES),
            "send with a key": files.writing(settings, values, many=False, key="42"),
        },
    )
    for ours in ("send_many", "send", "send with a key"):
        for peer in ("executemany", "executemany, our pages"):
            report.ratio(f"`{ours}` / `{peer}`", found[ours], found[peer], at_least(0.7))
    report.each({f"`{name}`": rounds for name, rounds in found.items()})


KAFKA_MESSAGES = 10_000  # a transaction
# More rounds than elsewhere, because this ratio is close to its target.
KAFKA_ROUNDS = 30
# The messages of a run beside Java by their size, which takes ten seconds or so; few rounds, as two digits suffice.
JAVA_TOTALS = {100: 1_000_000, 1024: 300_000}
JAVA_ROUNDS = 5


def kafka(settings: Settings) -> None:
    from benchmarks import _kafka as kafka

    for part in (beside_the_plain_client, beside_java):
        with kafka.broker(settings) as url:
            part(settings, url)


def beside_the_plain_client(settings: Settings, url: str) -> None:
    from benchmarks import _kafka as kafka

    if not settings.quick:
        settings = replace(settings, rounds=max(settings.rounds, KAFKA_ROUNDS))
    for size in (100, 1024):
        values = values_of(KAFKA_MESSAGES, size)
        contenders = {
            "plain": kafka.writing(url, kafka.new_topic(url), values),
            "send": writing(url, kafka.new_topic(url), values, many=False),
            "many": writing(url, kafka.new_topic(url), values),
        }
        report = Report(settings, f"Kafka: writing, {KAFKA_MESSAGES:,} x {size} B a transaction")
        wall = alternate(settings, contenders)
        report.ratio("`send` / plain client", wall["send"], wall["plain"], at_least(0.9))
        report.ratio("`send_many` / plain client", wall["many"], wall["plain"], at_least(1.0))
        for name, rounds in wall.items():
            report.each({name: rounds})
            report.milliseconds(f"{name}, a transaction, p50", rounds, 0.5)
        processor = alternate(settings, contenders, PROCESSOR)
        plain, one, many = processor.values()
        report.ratio("processor time of `send` / plain client", plain, one, at_most(1.2))
        report.ratio("processor time of `send_many` / plain client", plain, many, at_most(1.0))


def beside_java(settings: Settings, url: str) -> None:
    from benchmarks import _kafka as kafka

    for size, total in JAVA_TOTALS.items():
        count = KAFKA_MESSAGES if settings.quick else total
        javas, own = kafka.new_topic(url), kafka.new_topic(url)
        seconds = kafka.producer_performance(url, javas, size, count, 100)
        transaction_ms = max(1, round(1e3 * seconds * KAFKA_MESSAGES / count))
        found: dict[str, list[Round]] = {"ours": [], "java": []}
        for _ in range(min(settings.rounds, JAVA_ROUNDS)):
            seconds = kafka.producer_performance(url, javas, size, count, transaction_ms)
            found["java"].append(Round([seconds], count))
            found["ours"].append(Round([seconds_of_ours(url, own, size, count)], count))
        report = Report(settings, f"Kafka: writing, about {KAFKA_MESSAGES:,} x {size} B a transaction, beside Java")
        report.ratio("`send_many` / ProducerPerformance", found["ours"], found["java"])
        report.each(found)
        report.single("ProducerPerformance, a transaction", transaction_ms, "ms")


def seconds_of_ours(url: str, topic: str, size: int, count: int) -> float:
    with writing(url, topic, values_of(KAFKA_MESSAGES, size))() as lap:
        lap()
        begin = time.perf_counter()
        for _ in range(0, count, KAFKA_MESSAGES):
            lap()
        return time.perf_counter() - begin


# Bytes, messages per transaction, and the targets beside the official client and beside pulsar-perf.
PULSAR_SIZES = ((100, 10_000, at_least(8), at_least(1)), (1024, 1_000, None, at_least(1.2)))


def pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    with pulsar.broker(settings) as url, pulsar.official(settings, url) as client:
        for size, batch, beside_client, beside_program in PULSAR_SIZES:
            values = values_of(batch, size)
            contenders = {
                "`send_async` without transactions": pulsar.writing(client, pulsar.new_topic(url), size, batch),
                "`send`": writing(url, pulsar.new_topic(url), values, many=False),
                "`send_many`": writing(url, pulsar.new_topic(url), values),
            }
            turns = {name: as_turn(contender, settings) for name, contender in contenders.items()}
            turns["pulsar-perf"] = pulsar.pulsar_perf(settings, url, size, batch)
            report = Report(settings, f"Pulsar: writing, {batch:,} x {size} B a transaction")
            found = in_turn(turns, settings.rounds)
            plain, one, many, program = found
            for peer, target in ((plain, beside_client), (program, beside_program)):
                report.ratio(f"{one} / {peer}", found[one], found[peer])
                report.ratio(f"{many} / {peer}", found[many], found[peer], target)
            report.each(found)
            for us in (one, many):
                report.milliseconds(f"{us}, a transaction, p50", found[us], 0.5)


ROCKETMQ_SIZE = 1024
# Transactions in flight, the target as a multiple of the official client's speed, transactions of each thread in a lap.
ALONE = ((1, 2.5, 100), (16, 3, 20), (64, 3, 10))


@contender
def flying_at_once(url: str, topic: str, flying: int, each: int) -> Iterator[Lap]:
    """Each transaction in flight has a thread."""
    with connect(url, writers=flying) as bridge, ThreadPoolExecutor(flying) as pool:

        def some() -> None:
            for _ in range(each):
                with bridge.transaction() as txn:
                    txn.send(topic, bytes(ROCKETMQ_SIZE))

        def lap() -> int:
            for done in [pool.submit(some) for _ in range(flying)]:
                done.result()
            return flying * each

        yield lap


def rocketmq(settings: Settings) -> None:
    from benchmarks import _rocketmq as rocketmq

    with rocketmq.broker() as address, connect(address.url) as bridge:
        own, foreign, javas = (rocketmq.new_topic(address.url) for _ in range(3))
        committed = dict.fromkeys((own, foreign, javas), 0)
        with (
            rocketmq.official(settings, address, foreign) as client,
            rocketmq.official_java(settings, address, javas) as java,
        ):
            for flying, wanted, each in ALONE:
                each = 2 if settings.quick else each
                contenders = {
                    "ours": flying_at_once(address.url, own, flying, each),
                    "the official client": rocketmq.writing(client, flying, each, ROCKETMQ_SIZE),
                    "that for Java": rocketmq.writing(java, flying, each, ROCKETMQ_SIZE),
                }
                report = Report(settings, f"RocketMQ: 1 x {ROCKETMQ_SIZE} B a transaction, {flying} in flight")
                found = alternate(settings, contenders)
                us, them, those = found.values()
                report.ratio("half, decision, end / the official client", us, them, at_least(wanted))
                report.ratio("half, decision, end / that for Java", us, those)
                report.rates(found, "transactions")
                for topic, rounds in zip(committed, found.values(), strict=True):
                    first_laps = len(rounds) * flying * each  # they are not measured
                    committed[topic] += first_laps + sum(done.units for done in rounds)
        for topic, count in committed.items():
            rocketmq.tell_if_not_there(bridge, topic, count)
