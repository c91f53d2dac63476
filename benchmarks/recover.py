"""Owners on RocketMQ die between decision and publication: how long until their messages can be read.

They are published by a process that opens the same transactional id, or by a bridge of the same application to which
the broker sends its check-backs. The time of check-backs is a setting of the broker, so two brokers are measured: one
with the settings of our tests, and one with the defaults.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks._harness import Report, Settings, estimate, unique
from benchmarks._rocketmq import broker as rocketmq
from benchmarks._rocketmq import new_topic
from txnbridge import Consumer, connect
from txnbridge.testing import Child

KILLED = 10  # owners, of each kind
MESSAGES = 10  # of each
APPLICATION = "recovering"
# The time of several rounds of check-backs, 30 s each: an answer may be lost.
PATIENCE = 150.0
# The defaults of RocketMQ 5.5. In the tests check-backs come after 2 s and then each second.
DEFAULTS = {
    "transactionTimeOut": "6000",
    "transactionCheckInterval": "30000",
    "transactionCheckMax": "15",
    "transactionOpMsgMaxSize": "4096",
    "transactionOpBatchInterval": "3000",
}


def decide(url: str, topic: str, name: str) -> None:
    """Commit a transaction; the process is killed before it publishes the halves."""
    with connect(url, transactional_id=name, application=APPLICATION) as bridge, bridge.transaction() as txn:
        txn.send_many(topic, [name.encode()] * MESSAGES)


Arrivals = dict[str, "Future[float]"]  # by owner, the time at which its last message could be read


@contextmanager
def noting(consumer: Consumer, arrivals: Arrivals) -> Iterator[None]:
    """Read a topic in a thread, and note when the messages of these owners arrive."""
    closing = threading.Event()

    def read() -> None:
        seen: Counter[str] = Counter()
        while not closing.is_set():
            for message in consumer.poll(timeout=0.5):
                name = (message.value or b"").decode()
                seen[name] += 1
                if seen[name] == MESSAGES:
                    arrivals[name].set_result(time.perf_counter())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def killed(url: str, topic: str, name: str) -> float:
    """Start an owner that is killed before it publishes; return the time of its death."""
    with Child(decide, url, topic, name, kill="step:publish/before") as owner:
        owner.stopped()
        return time.perf_counter()


def reopen(url: str, name: str) -> None:
    """Open the id, which publishes the decided transaction of its dead owner."""
    connect(url, transactional_id=name, application=APPLICATION).close()


def seconds(url: str, topic: str, arrivals: Arrivals, count: int, reopening: bool) -> list[float]:
    """Kill owners one after another, and perhaps open the id of each at once.

    Return the seconds from each death until the owner's messages were read.
    """
    died: dict[str, float] = {}
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            name = unique("owner")
            arrivals[name] = Future()
            died[name] = killed(url, topic, name)
            if reopening:
                pool.submit(reopen, url, name)
        return [arrivals[name].result(PATIENCE) - at for name, at in died.items()]


def measure_with(settings: Settings, told: str, own: dict[str, str] | None) -> None:
    count = 1 if settings.quick else KILLED
    with rocketmq(own) as address, connect(address.url, application=APPLICATION) as bridge:
        topic = new_topic(address.url)
        with bridge.transaction() as txn:  # so that the broker sends check-backs to this bridge
            txn.send(topic, b"first")
        arrivals: Arrivals = {}
        with bridge.consumer(topic) as consumer, noting(consumer, arrivals):
            report = Report(settings, f"RocketMQ, {told}: {count} owners killed before publishing {MESSAGES} messages")
            for told, reopening in (("its id opened again", True), ("published by who is asked", False)):
                found = seconds(address.url, topic, arrivals, count, reopening)
                report.figure(f"until they can be read, {told}", estimate(found), "s")
                report.single("the same, the longest", max(found), "s")


def measure(settings: Settings, broker: str) -> None:
    measure_with(settings, "set as our tests do", None)
    if not settings.quick and "TXNBRIDGE_URL" not in os.environ:
        measure_with(settings, "as it comes", DEFAULTS)
