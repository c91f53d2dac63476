"""Spans over a broker and an embedded one, beside their parts; a copy, beside a loop that may copy a message twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module

from benchmarks._embedded import fresh_bridge
from benchmarks._harness import Lap, Report, Settings, alternate, at_least, contender, unique
from benchmarks._ours import fill
from txnbridge import Batch, Bridge, Transaction, connect, spanning

BODY = b"x" * 100
SPANS = 20
BATCH = 5000


def spans(settings: Settings, broker: str) -> None:
    """Measure spans of one message on each of two brokers, and the copy of a topic from one to the other."""
    started = import_module(f"benchmarks._{broker}")
    with started.broker(settings) as url:
        count = BATCH if settings.quick else 40 * BATCH
        contenders = {"span": spanned(settings, url), "parts": in_parts(settings, url)}
        found = alternate(settings, contenders)
        report = Report(settings, f"{broker} and embedded: one message on each")
        report.ratio("a span / its parts, prepared and ended one by one", found["span"], found["parts"], at_least(0.77))
        report.each(found)
        topic = started.new_topic(url)
        fill(url, topic, len(BODY), count, BATCH)
        copies = {"copy": copied(settings, url, topic, count), "loop": looped(settings, url, topic, count)}
        found = alternate(settings, copies)
        report = Report(settings, f"{broker} to embedded: {count:,} x {len(BODY)} B")
        report.ratio("a copy, exactly once / a loop, at least once", found["copy"], found["loop"], at_least(0.7))
        report.rate("copy, messages a second", found["copy"])


@contender
def spanned(settings: Settings, url: str) -> Iterator[Lap]:
    with connect(url, create_topics=1) as one, fresh_bridge(settings.folder) as other:

        def lap() -> int:
            for _ in range(SPANS):
                with spanning(one, other) as span:
                    for bridge in (one, other):
                        span.on(bridge).send("spans", BODY)
            return SPANS

        yield lap


@contender
def in_parts(settings: Settings, url: str) -> Iterator[Lap]:
    with connect(url, create_topics=1) as one, fresh_bridge(settings.folder) as other:

        def lap() -> int:
            for _ in range(SPANS):
                for bridge in (one, other):
                    with bridge.transaction(prepare=True, hold=60) as txn:
                        txn.send("spans", BODY)
                    assert txn.token is not None
                    bridge.commit(txn.token)
            return SPANS

        yield lap


@contender
def copied(settings: Settings, url: str, topic: str, count: int) -> Iterator[Lap]:
    """Copy a topic by a processor that sends to another broker, in a new group each time."""
    with connect(url) as source, fresh_bridge(settings.folder) as target:
        target.ensure_topics(topic)

        def move(messages: Batch, txn: Transaction) -> None:
            for message in messages:
                txn.send(topic, message.value, key=message.key, partition=0, timestamp=message.timestamp)

        def lap() -> int:
            group = unique("copy")
            with source.processor(topic, group=group, batch=move, to=target, max_messages=BATCH) as processor:
                while processor.stats.messages < count:
                    time.sleep(0.001)
            return count

        yield lap


@contender
def looped(settings: Settings, url: str, topic: str, count: int) -> Iterator[Lap]:
    """Copy a topic by a loop that commits on the target, and then on the source."""
    with connect(url) as source, fresh_bridge(settings.folder) as target:
        target.ensure_topics(topic)

        def lap() -> int:
            left = count
            with source.consumer(topic, unique("loop")) as consumer:
                while left:
                    left -= _moved(source, target, consumer.poll(BATCH, 1.0), topic)
            return count

        yield lap


def _moved(source: Bridge, target: Bridge, messages: Batch, topic: str) -> int:
    if messages:
        with target.transaction() as txn:
            for message in messages:
                txn.send(topic, message.value, key=message.key, partition=0, timestamp=message.timestamp)
        with source.transaction() as txn:
            txn.ack(messages)
    return len(messages)
