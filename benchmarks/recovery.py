"""Transactions that others end: by a token on Kafka, and on RocketMQ after their owner has died."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from benchmarks._harness import Report, Settings, at_most, background, estimate, unique
from txnbridge import Bridge, Consumer, connect
from txnbridge.testing import Child

TOKENS = 100


def prepare(bridge: Bridge, topic: str) -> str:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"x" * 100)
    return str(txn.token)


def take_one(consumer: Consumer) -> None:
    while not consumer.poll(1, timeout=1):
        pass


def tokens(settings: Settings, broker: str) -> None:
    """Measure commits of prepared transactions by their tokens, from a process that is connected already.

    Preparing takes longer than committing, so each token is prepared outside the measured time.
    """
    from benchmarks import _kafka as kafka

    committed = []
    own = unique("writer")
    with kafka.broker(settings) as url, connect(url, transactional_id=own) as writer, connect(url) as other:
        topic = kafka.new_topic(url)
        with other.consumer(topic) as consumer:
            for _ in range(3 if settings.quick else TOKENS):
                token = prepare(writer, topic)
                asked = time.perf_counter()
                other.commit(token)
                committed.append(1e3 * (time.perf_counter() - asked))
                take_one(consumer)  # the next one begins when this one is read
    report = Report(settings, f"Kafka: {len(committed)} tokens, one after another")
    report.figure("`commit(token)`", estimate(committed), "ms", at_most(10))


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


def note(consumer: Consumer, arrivals: Arrivals, stop: threading.Event) -> None:
    """Read a topic, and note when the messages of these owners arrive."""
    seen: Counter[str] = Counter()
    while not stop.is_set():
        for message in consumer.poll(timeout=0.5):
            name = (message.value or b"").decode()
            seen[name] += 1
            if seen[name] == MESSAGES:
                arrivals[name].set_result(time.perf_counter())


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


def recover(settings: Settings, broker: str) -> None:
    """Measure the time from an owner's death, between decision and publication, until its messages can be read.

    They are published by a process that opens the same transactional id, or by a bridge of the same application to
    which the broker sends its check-backs. The time of check-backs is a setting of the broker, so two brokers are
    measured: one with the settings of our tests, and one with the defaults.
    """
    recover_with(settings, "set as our tests do", None)
    if not settings.quick and "TXNBRIDGE_URL" not in os.environ:
        recover_with(settings, "as it comes", DEFAULTS)


def recover_with(settings: Settings, told: str, own: dict[str, str] | None) -> None:
    from benchmarks import _rocketmq as rocketmq

    count = 1 if settings.quick else KILLED
    with rocketmq.broker(own) as address, connect(address.url, application=APPLICATION) as bridge:
        topic = rocketmq.new_topic(address.url)
        with bridge.transaction() as txn:  # so that the broker sends check-backs to this bridge
            txn.send(topic, b"first")
        arrivals: Arrivals = {}
        with bridge.consumer(topic) as consumer, background(partial(note, consumer, arrivals)):
            report = Report(settings, f"RocketMQ, {told}: {count} owners killed before publishing {MESSAGES} messages")
            for how, reopening in (("its id opened again", True), ("published by who is asked", False)):
                found = seconds(address.url, topic, arrivals, count, reopening)
                report.figure(f"until they can be read, {how}", estimate(found), "s")
                report.single("the same, the longest", max(found), "s")
