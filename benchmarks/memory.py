"""Whether memory stays flat while 1,000,000 messages of 1 KiB are written and read.

Each program runs in a process of its own, which looks at its resident memory after every 10,000 messages. The growth
is the highest value less the lowest, without the first tenth, in which buffers and caches fill.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import txnbridge
from benchmarks._embedded import KIB, bodies
from benchmarks._harness import Report, Settings, at_most, child
from benchmarks._ours import helper

PIECE = 1000
LOOK_EVERY = 10
# SQLite and malloc keep what they once needed, in pieces of some megabytes. A list of the messages would be 1 GiB, one
# of their positions alone 100 MiB.
FLAT_MIB = 16

Watch = Iterator[float]


def resident() -> float:
    """Return this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def small_transactions(bridge: txnbridge.Bridge, topic: str, messages: int) -> Watch:
    for _ in range(messages // PIECE):
        with bridge.transaction() as txn:
            txn.send_many(topic, bodies(PIECE, KIB))
        yield resident()


def one_transaction(bridge: txnbridge.Bridge, topic: str, messages: int) -> Watch:
    with bridge.transaction() as txn:
        for _ in range(messages // PIECE):
            for value in bodies(PIECE, KIB):
                txn.send(topic, value)
            yield resident()


def read_alone(bridge: txnbridge.Bridge, topic: str, messages: int) -> Watch:
    with bridge.consumer(topic) as consumer:
        for _ in pieces(consumer, messages):
            yield resident()


def read_in_a_group(bridge: txnbridge.Bridge, topic: str, messages: int) -> Watch:
    with bridge.consumer(topic, group="group") as consumer:
        for batch in pieces(consumer, messages):
            with bridge.transaction() as txn:
                txn.ack(batch)
            yield resident()


def pieces(consumer: txnbridge.Consumer, messages: int) -> Iterator[txnbridge.Batch]:
    while messages > 0:
        batch = consumer.poll(PIECE)
        messages -= len(batch)
        yield batch


PROGRAMS: dict[str, tuple[str, Callable[[txnbridge.Bridge, str, int], Watch]]] = {
    "written, 1,000 a transaction": ("small", small_transactions),
    "read without a group": ("small", read_alone),
    "read in a group, each 1,000 acknowledged": ("small", read_in_a_group),
    "written in one transaction": ("one", one_transaction),
}


def watch(pipe: Connection, name: str, url: str, messages: int) -> None:
    topic, program = PROGRAMS[name]
    with txnbridge.connect(url, timeout=600, create_topics=1) as bridge:
        seen = list(program(bridge, topic, messages))
    pipe.send(seen[::LOOK_EVERY])


def memory(settings: Settings, broker: str) -> None:
    kit = helper(broker)
    messages = 20 * PIECE if settings.quick else 1_000_000
    with kit.broker(settings) as small, ExitStack() as stack:
        # Each topic of the embedded broker has a file of its own.
        urls = {"small": small, "one": stack.enter_context(kit.broker(settings)) if broker == "embedded" else small}
        title = "Memory" if broker == "embedded" else f"{kit.NAME}: memory"
        report = Report(settings, f"{title} over {messages:,} messages of 1 KiB (one run each)")
        for name, (topic, _) in PROGRAMS.items():
            with child(watch, name, urls[topic], messages) as pipe:
                seen = pipe.recv()
            steady = seen[len(seen) // 10 :]
            report.single(f"{name}: growth", max(steady) - min(steady), "MiB", at_most(FLAT_MIB))
            report.single(f"{name}: at most", max(seen), "MiB")
