"""Half messages of one message each, beside transactions of one message on the same broker.

The contenders have 1 and 16 threads on one bridge with its default settings. A half message counts once its block has
ended as COMMITTED. At the end of each round, and within its time, the benchmark waits until the resolver has published
all of them. The last figures are those of a group with a backlog of undecided half messages.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from benchmarks._harness import (
    Estimate,
    Lap,
    Report,
    Settings,
    a_second,
    alternate,
    at_least,
    at_most,
    speed,
    unique,
)
from txnbridge import Bridge, Decision, HalfMessages, HalfTransaction, connect

VALUE = b"x" * 100
SENT = 50  # of each thread in a lap
BACKLOG = 100_000
NEW = 20_000
THREADS = 16
BACKLOG_THREADS = 64


def obey(txn: HalfTransaction, decision: Decision) -> Decision:
    return decision


def undecided(*_: object) -> Decision:
    return Decision.UNDECIDED


def sell(sales: HalfMessages, topic: str, decision: Decision, count: int) -> None:
    for _ in range(count):
        with sales.transaction(decision) as txn:
            txn.send(topic, VALUE)


def commit(bridge: Bridge, topic: str, count: int) -> None:
    for _ in range(count):
        with bridge.transaction() as txn:
            txn.send(topic, VALUE)


@contextmanager
def transactions(url: str, threads: int) -> Iterator[Lap]:
    topic = unique("bench")
    with connect(url, create_topics=1) as bridge, ThreadPoolExecutor(threads) as pool:
        bridge.ensure_topics(topic)

        def lap() -> int:
            list(pool.map(partial(commit, bridge, topic), [SENT] * threads))
            return SENT * threads

        yield lap


@contextmanager
def half_messages(url: str, threads: int) -> Iterator[Lap]:
    topic, group = unique("bench"), unique("shop")
    with connect(url, create_topics=1) as bridge, ThreadPoolExecutor(threads) as pool:
        bridge.ensure_topics(topic)
        sent = 0
        with bridge.half_messages(group, execute=obey, check=undecided) as sales, bridge.consumer(topic) as consumer:

            def lap() -> int:
                nonlocal sent
                wanted = SENT * threads
                list(pool.map(lambda count: sell(sales, topic, Decision.COMMIT, count), [SENT] * threads))
                while sent < wanted:
                    sent += len(consumer.poll(wanted))
                sent -= wanted
                return wanted

            yield lap


def backlog(settings: Settings, url: str, report: Report) -> None:
    """Store undecided half messages; then measure how fast new ones are published, and the memory of all this."""
    count, new = (1000, 200) if settings.quick else (BACKLOG, NEW)
    topic, group = unique("bench"), unique("shop")
    with connect(url, create_topics=1) as bridge, ThreadPoolExecutor(BACKLOG_THREADS) as pool:
        bridge.ensure_topics(topic)
        with bridge.half_messages(group, execute=obey, check=undecided) as sales, bridge.consumer(topic) as consumer:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            list(pool.map(partial(sell, sales, topic, Decision.UNDECIDED), [count // THREADS] * THREADS))
            began = time.monotonic()
            done = pool.map(partial(sell, sales, topic, Decision.COMMIT), [new // THREADS] * THREADS)
            read = 0
            while read < new // THREADS * THREADS:
                read += len(consumer.poll(new))
            took = time.monotonic() - began
            list(done)
            memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    what = f"with {count:,} undecided ones"
    report.figure(f"{what}: published a second", Estimate.single(read / took), "", at_least(1000))
    report.figure(f"{what}: memory", Estimate.single(memory), "MiB", at_most(300))


def measure_on(settings: Settings, name: str, url: str) -> None:
    report = Report(settings, f"{name}: half messages of one message")
    for threads in (1, THREADS):
        found = alternate(
            settings,
            {
                "transactions": lambda threads=threads: transactions(url, threads),  # type: ignore[misc]
                "half messages": lambda threads=threads: half_messages(url, threads),  # type: ignore[misc]
            },
        )
        ratio = speed(found["half messages"], found["transactions"])
        report.figure(f"half messages / transactions, {threads} threads", ratio, "", at_least(0.5))
        report.figure(f"half messages a second, {threads} threads", a_second(found["half messages"]))
    backlog(settings, url, report)
