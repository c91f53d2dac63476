"""Reading, beside each broker's own client.

The embedded broker is read beside a bare SELECT of the same columns from a plain SQLite file, in pieces of 1,000. There
are two files of the peer: one with SQLite's default page size, and one with the embedded broker's. The file is in the
system's cache, so reading does not wait and is measured in processor time.

On Kafka and Pulsar nothing is acknowledged, and the peer is a loop on the official client that reads the same messages;
Kafka's asks for as many messages at a time as `poll` does by default, with our settings for fetching. On RocketMQ the
peer is the official client's SimpleConsumer, with and without acknowledging: a group of it gets each message once, so
each of its rounds reads the next part of the topic, and a round of ours begins at the topic's first message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._harness import (
    PROCESSOR,
    Lap,
    Report,
    Round,
    Settings,
    Turn,
    alternate,
    at_least,
    contender,
    in_turn,
    unique,
)
from benchmarks._ours import AT_ONCE, fill, reading
from txnbridge import connect


def read(settings: Settings, broker: str) -> None:
    {"embedded": embedded, "kafka": kafka, "pulsar": pulsar, "rocketmq": rocketmq}[broker](settings)


PIECE = 1000


def fill_files(folder: Path, messages: int) -> None:
    """Write the same messages into a file of the embedded broker and into two plain SQLite files."""
    from benchmarks import _embedded as files

    values = files.bodies(PIECE, files.KIB)
    ready = files.rows(values)
    with connect(files.url(folder)) as bridge:
        for _ in range(messages // PIECE):
            with bridge.transaction() as txn:
                txn.send_many("topic", values)
    for page_bytes in (files.DEFAULT_PAGE_BYTES, files.OUR_PAGE_BYTES):
        with files.plain(folder, page_bytes) as connection:
            for _ in range(messages // PIECE):
                files.insert(connection, ready)


@contender
def reading_all(url: str, messages: int, in_group: bool) -> Iterator[Lap]:
    """A lap is a new consumer that reads everything, in a new group or without one."""
    with connect(url) as bridge:

        def lap() -> int:
            group = unique("group") if in_group else None
            left = messages
            with bridge.consumer("topic", group=group) as consumer:
                while left:
                    for _ in (batch := consumer.poll(PIECE)):
                        pass
                    left -= len(batch)
            return messages

        yield lap


def embedded(settings: Settings) -> None:
    from benchmarks import _embedded as files

    messages = PIECE if settings.quick else 200 * PIECE
    with files.fresh(settings.folder) as folder:
        fill_files(folder, messages)
        url = files.url(folder)
        report = Report(settings, "Reading, 1 KiB")
        contenders = {
            "alone": reading_all(url, messages, in_group=False),
            "SELECT": files.selecting(folder, messages, files.DEFAULT_PAGE_BYTES, PIECE),
            "SELECT, our pages": files.selecting(folder, messages, files.OUR_PAGE_BYTES, PIECE),
            "in a group": reading_all(url, messages, in_group=True),
        }
        found = alternate(settings, contenders, PROCESSOR)
        for ours in ("alone", "in a group"):
            for peer in ("SELECT", "SELECT, our pages"):
                report.ratio(f"{ours} / {peer}", found[ours], found[peer], at_least(0.7))
        report.each(found)


BATCH = 10_000  # written in one transaction


def kafka(settings: Settings) -> None:
    from benchmarks import _kafka as kafka

    count = BATCH if settings.quick else 200_000
    with kafka.broker(settings) as url:
        for size in (100, 1024):
            topic = kafka.new_topic(url)
            fill(url, topic, size, count, BATCH)
            report = Report(settings, f"Kafka: reading, {size} B")
            contenders = {"plain": kafka.reading(url, topic, count, AT_ONCE), "ours": reading(url, topic, count)}
            found = alternate(settings, contenders)
            report.ratio("`poll` / plain loop", found["ours"], found["plain"], at_least(0.75))
            report.each(found)


def pulsar(settings: Settings) -> None:
    from benchmarks import _pulsar as pulsar

    count = BATCH if settings.quick else 100_000
    with pulsar.broker(settings) as url, pulsar.official(settings, url) as client:
        for size in (100, 1024):
            topic = pulsar.new_topic(url)
            fill(url, topic, size, count, BATCH)
            report = Report(settings, f"Pulsar: reading, {size} B")
            theirs = pulsar.reading(client, topic, unique("plain"), count)
            found = alternate(settings, {"the official client": theirs, "ours": reading(url, topic, count)})
            name = "`poll` / the official client's `receive`"
            report.ratio(name, found["ours"], found["the official client"], at_least(3))
            report.each(found)


ROCKETMQ_SIZE, ROCKETMQ_MESSAGES, ROCKETMQ_BATCH = 1024, 40_000, 1_000
# Messages per round, so that it lasts a second or more: ours, the official client, and that with acknowledgements.
OURS, RECEIVED, ACKNOWLEDGED = 20_000, 3_000, 1_000
# The part of all messages that the official client's rounds read at most: at an empty queue it waits for seconds.
TAKEN = 0.8


def reading_anew(url: str, topic: str, count: int, acknowledge: bool) -> Turn:
    """Return a turn of a new consumer, measured after its first batch; in a group it acknowledges each batch."""

    def turn() -> Round:
        group = unique("ours") if acknowledge else None
        with connect(url, writers=1, application="reading") as bridge, bridge.consumer(topic, group=group) as consumer:
            batch = consumer.poll(AT_ONCE, 10)
            first = found = len(batch)
            begin = time.perf_counter()
            while found < count:
                if acknowledge and batch:
                    with bridge.transaction() as txn:
                        txn.ack(batch)
                batch = consumer.poll(AT_ONCE, 1)
                for message in batch:
                    message.value  # noqa: B018
                found += len(batch)
            return Round([time.perf_counter() - begin], found - first)

    return turn


def rocketmq(settings: Settings) -> None:
    from benchmarks import _rocketmq as rocketmq

    count = 2 * ROCKETMQ_BATCH if settings.quick else ROCKETMQ_MESSAGES
    most = int(TAKEN * count / settings.rounds)
    received, acknowledged = min(RECEIVED, most), min(ACKNOWLEDGED, most)
    with rocketmq.broker() as address:
        topic = rocketmq.new_topic(address.url)
        groups = [rocketmq.new_group(address, topic) for _ in range(2)]
        with rocketmq.official(settings, address, topic, *groups) as client:
            client.ask("begin")
            fill(address.url, topic, ROCKETMQ_SIZE, count, ROCKETMQ_BATCH)
            report = Report(settings, f"RocketMQ: reading {ROCKETMQ_SIZE} B")
            turns = {
                "without a group": reading_anew(address.url, topic, min(OURS, count), acknowledge=False),
                "SimpleConsumer, nothing acknowledged": rocketmq.reading(client, 0, received, acknowledge=False),
                "in a group, acknowledged": reading_anew(address.url, topic, min(OURS, count), acknowledge=True),
                "SimpleConsumer, acknowledged": rocketmq.reading(client, 1, acknowledged, acknowledge=True),
            }
            found = in_turn(turns, settings.rounds)
            names = list(found)
            for us, them in (names[:2], names[2:]):
                report.ratio(f"{us} / {them}", found[us], found[them], at_least(5))
            report.each(found)
