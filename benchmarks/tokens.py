"""Committing prepared transactions by their tokens on Kafka, from a process that is connected already.

Preparing takes longer than committing, so each token is prepared outside the measured time.
"""

from __future__ import annotations

import time

from benchmarks._harness import Report, Settings, at_most, estimate, unique
from benchmarks._kafka import broker as kafka
from benchmarks._kafka import new_topic
from txnbridge import Bridge, Consumer, connect

TOKENS = 100


def prepare(bridge: Bridge, topic: str) -> str:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"x" * 100)
    return str(txn.token)


def take_one(consumer: Consumer) -> None:
    while not consumer.poll(1, timeout=1):
        pass


def measure(settings: Settings, broker: str) -> None:
    committed, readable = [], []
    with kafka(settings) as url, connect(url, transactional_id=unique("writer")) as writer, connect(url) as other:
        topic = new_topic(url)
        with other.consumer(topic) as consumer:
            for _ in range(3 if settings.quick else TOKENS):
                token = prepare(writer, topic)
                asked = time.perf_counter()
                other.commit(token)
                committed.append(1e3 * (time.perf_counter() - asked))
                take_one(consumer)
                readable.append(1e3 * (time.perf_counter() - asked))
        report = Report(settings, f"Kafka: {len(committed)} tokens, one after another")
        report.figure("`commit(token)`", estimate(committed), "ms", at_most(10))
        report.figure("from asking until another bridge has read it", estimate(readable), "ms")
