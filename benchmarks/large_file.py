"""Writing into a file that holds 10,000,000 messages, beside a file that holds none.

The messages in it have 100 B and are in 1,000 topics, stored in turn as they would be over the years: each
transaction added 100 to every topic. The measured transactions have 1,000 messages of 1 KiB: all to one topic in the
middle of the file; all to one topic, another one in each transaction; or one to each topic. A round's empty file has
the same topics; the large file keeps the messages that the rounds add.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import txnbridge
from benchmarks._embedded import KIB, bodies, fresh, url
from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, contender

TOPICS = 1000
MESSAGES = 1000  # a transaction
PER_TOPIC = 100  # messages in a transaction that loads the file


def name(number: int) -> str:
    return f"topic-{number}"


def make_topics(bridge: txnbridge.Bridge, topics: int) -> None:
    for number in range(topics):
        bridge.admin.create_topic(name(number))


def load(folder: Path, topics: int, messages: int) -> None:
    # Loading does not wait for the disk, and keeps each transaction in memory.
    quick = {"durability": "survives-process-kill-only", "spill_bytes": 1 << 30}
    with txnbridge.connect(url(folder), embedded=quick, timeout=600) as bridge:
        make_topics(bridge, topics)
        values = bodies(PER_TOPIC, 100)
        for _ in range(messages // (PER_TOPIC * topics)):
            with bridge.transaction() as txn:
                for number in range(topics):
                    txn.send_many(name(number), values)


Write = Callable[[txnbridge.Transaction, list[bytes], int], None]


def to_every_topic(txn: txnbridge.Transaction, values: list[bytes], topics: int) -> None:
    for at, value in enumerate(values):
        txn.send(name(at % topics), value)


def spread(topics: int) -> dict[str, Write]:
    """Return, by name, functions that send a transaction's messages; they get the transaction's number."""
    return {
        "to one topic": lambda txn, values, number: txn.send_many(name(topics // 2), values),
        "to one topic each": lambda txn, values, number: txn.send_many(name(number * 7 % topics), values),
        "one message to every topic": lambda txn, values, number: to_every_topic(txn, values, topics),
    }


def writing(bridge: txnbridge.Bridge, write: Write) -> Lap:
    values = bodies(MESSAGES, KIB)
    number = 0

    def lap() -> int:
        nonlocal number
        number += 1
        with bridge.transaction() as txn:
            write(txn, values, number)
        return len(values)

    return lap


@contender
def into_large(folder: Path, write: Write) -> Iterator[Lap]:
    with txnbridge.connect(url(folder)) as bridge:
        yield writing(bridge, write)


@contender
def into_empty(settings: Settings, topics: int, write: Write) -> Iterator[Lap]:
    with fresh(settings.folder) as folder:
        with txnbridge.connect(url(folder), embedded={"durability": "survives-process-kill-only"}) as bridge:
            make_topics(bridge, topics)
        with txnbridge.connect(url(folder)) as bridge:
            yield writing(bridge, write)


def large_file(settings: Settings, broker: str) -> None:
    topics, messages = (10, 10_000) if settings.quick else (TOPICS, 10_000_000)
    with fresh(settings.folder) as folder:
        load(folder, topics, messages)
        size = sum(entry.stat().st_size for entry in os.scandir(folder))
        report = Report(settings, f"{messages:,} messages in {topics:,} topics ({size / 1e9:.1f} GB)")
        contenders: dict[str, Contender] = {}
        for how, write in spread(topics).items():
            contenders[f"large, {how}"] = into_large(folder, write)
            contenders[f"empty, {how}"] = into_empty(settings, topics, write)
        found = alternate(settings, contenders)
        one = found["empty, to one topic"]
        for how, bound in (("to one topic", 0.9), ("to one topic each", 0.5), ("one message to every topic", 0.5)):
            large = found[f"large, {how}"]
            report.ratio(f"{how}, large / empty", large, found[f"empty, {how}"], at_least(bound))
            if how != "to one topic":
                report.ratio(f"{how}, large / to one topic, empty", large, one, at_least(bound))
        report.each(found)
