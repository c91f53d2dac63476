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
from functools import partial

from benchmarks._harness import Lap, Report, Settings, alternate, at_least, at_most, contender, unique
from benchmarks._ours import helper
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


@contender
def transactions(url: str, threads: int) -> Iterator[Lap]:
    topic = unique("bench")
    with connect(url, create_topics=1) as bridge, ThreadPoolExecutor(threads) as pool:
        bridge.ensure_topics(topic)

        def lap() -> int:
            list(pool.map(partial(commit, bridge, topic), [SENT] * threads))
            return SENT * threads

        yield lap


@contender
def published(url: str, threads: int) -> Iterator[Lap]:
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
    """Measure how fast half messages are published before and behind many undecided ones, and the memory of these."""
    count, new = (1000, 200) if settings.quick else (BACKLOG, NEW)
    topic, group = unique("bench"), unique("shop")
    with connect(url, create_topics=1) as bridge, ThreadPoolExecutor(BACKLOG_THREADS) as pool:
        bridge.ensure_topics(topic)
        with bridge.half_messages(group, execute=obey, check=undecided) as sales, bridge.consumer(topic) as consumer:

            def publish() -> float:
                """Return the number of half messages that are sent, published and read a second."""
                began, read = time.monotonic(), 0
                sent = pool.map(partial(sell, sales, topic, Decision.COMMIT), shares(new))
                while read < sum(shares(new)):
                    read += len(consumer.poll(new))
                list(sent)
                return read / (time.monotonic() - began)

            before = publish()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            list(pool.map(partial(sell, sales, topic, Decision.UNDECIDED), shares(count)))
            behind = publish()
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    what = f"{BACKLOG_THREADS} threads, {count:,} undecided ones"
    report.single(f"{what}: published a second", behind, "", at_least(1000))
    report.single("the same before they were stored", before)
    report.single(f"{what}: growth of memory", grown, "MiB", at_most(300))


def shares(count: int) -> list[int]:
    return [count // BACKLOG_THREADS] * BACKLOG_THREADS


def half_messages(settings: Settings, broker: str) -> None:
    kit = helper(broker)
    with kit.broker(settings) as url:
        report = Report(settings, f"{kit.NAME}: half messages of one message")
        for threads in (1, THREADS):
            found = alternate(
                settings, {"transactions": transactions(url, threads), "half messages": published(url, threads)}
            )
            halves, plain = found["half messages"], found["transactions"]
            report.ratio(f"half messages / transactions, {threads} threads", halves, plain, at_least(0.5))
            report.rate(f"half messages a second, {threads} threads", halves)
        backlog(settings, url, report)
