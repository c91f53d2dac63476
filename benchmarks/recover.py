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
from concurrent.futures import ThreadPoolExecutor

from benchmarks._harness import Estimate, Report, Settings, estimate, unique
from benchmarks._rocketmq import broker as rocketmq
from benchmarks._rocketmq import new_topic
from txnbridge import Bridge, connect
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


class Arrivals:
    """Reads a topic, and notes when the last message of each owner could be read."""

    def __init__(self, bridge: Bridge, topic: str) -> None:
        self._consumer = bridge.consumer(topic)
        self._at: dict[str, float] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        seen: Counter[str] = Counter()
        while not self._closing.is_set():
            for message in self._consumer.poll(timeout=0.5):
                name = (message.value or b"").decode()
                seen[name] += 1
                if seen[name] == MESSAGES:
                    with self._changed:
                        self._at[name] = time.perf_counter()
                        self._changed.notify_all()

    def wait(self, name: str) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._at, PATIENCE):
                raise RuntimeError(f"the messages of a killed owner were not published within {PATIENCE:g} s")
            return self._at[name]

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._consumer.close()


def killed(url: str, topic: str) -> tuple[str, float]:
    """Start an owner that is killed before it publishes; return its transactional id and the time of its death."""
    name = unique("owner")
    with Child(decide, url, topic, name, kill="step:publish/before") as owner:
        owner.stopped()
        return name, time.perf_counter()


def reopen(url: str, name: str) -> None:
    """Open the id, which publishes the decided transaction of its dead owner."""
    connect(url, transactional_id=name, application=APPLICATION).close()


def reopened(url: str, topic: str, arrivals: Arrivals, count: int) -> list[float]:
    """Kill owners, and open the id of each at once; return the seconds from each death until its messages were read."""
    with ThreadPoolExecutor(count) as pool:
        died = {}
        for _ in range(count):
            name, died_at = killed(url, topic)
            died[name] = died_at
            pool.submit(reopen, url, name)
        return [arrivals.wait(name) - at for name, at in died.items()]


def asked(url: str, topic: str, arrivals: Arrivals, count: int) -> list[float]:
    """Kill owners one after another; return the seconds from each death until a check-back has published all."""
    died = dict(killed(url, topic) for _ in range(count))
    return [arrivals.wait(name) - at for name, at in died.items()]


def measure_with(settings: Settings, told: str, own: dict[str, str] | None) -> None:
    count = 1 if settings.quick else KILLED
    with rocketmq(own) as address, connect(address.url, application=APPLICATION) as bridge:
        topic = new_topic(address.url)
        with bridge.transaction() as txn:  # so that the broker sends check-backs to this bridge
            txn.send(topic, b"first")
        arrivals = Arrivals(bridge, topic)
        try:
            report = Report(settings, f"RocketMQ, {told}: {count} owners killed before publishing {MESSAGES} messages")
            for told, kind in (("its id opened again", reopened), ("published by who is asked", asked)):
                found = kind(address.url, topic, arrivals, count)
                report.figure(f"until they can be read, {told}", estimate(found), "s")
                report.figure("the same, the longest", Estimate.single(max(found)), "s")
        finally:
            arrivals.close()


def measure(settings: Settings, broker: str) -> None:
    measure_with(settings, "set as our tests do", None)
    if not settings.quick and "TXNBRIDGE_URL" not in os.environ:
        measure_with(settings, "as it comes", DEFAULTS)
