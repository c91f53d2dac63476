"""Committing prepared transactions by their tokens on Kafka, from a process that is connected already.

Preparing takes longer than committing, so each token is prepared outside the measured time. A second part does the
same with writers that are killed as soon as they have prepared.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from benchmarks._harness import Report, Settings, at_most, child, estimate, unique
from benchmarks._kafka import broker as kafka
from benchmarks._kafka import new_topic
from txnbridge import Bridge, Consumer, connect

TOKENS = 100
KILLED = 20  # each needs a process


def prepare(bridge: Bridge, topic: str) -> str:
    with bridge.transaction(prepare=True) as txn:
        txn.send(topic, b"x" * 100)
    return str(txn.token)


def take_one(consumer: Consumer) -> None:
    while not consumer.poll(1, timeout=1):
        pass


def prepare_and_wait(pipe: Connection, url: str, topic: str) -> None:
    with connect(url, transactional_id=unique("killed")) as bridge:
        pipe.send((os.getpid(), prepare(bridge, topic)))
        pipe.recv()


def killed(bridge: Bridge, consumer: Consumer, url: str, topic: str) -> float:
    """Kill a writer that has prepared, and commit its token; return the milliseconds until its message was read."""
    with child(prepare_and_wait, url, topic) as pipe:
        writer, token = pipe.recv()
        begin = time.perf_counter()
        os.kill(writer, signal.SIGKILL)
        bridge.commit(token)
        take_one(consumer)
        return 1e3 * (time.perf_counter() - begin)


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
            deaths = [killed(other, consumer, url, topic) for _ in range(1 if settings.quick else KILLED)]
        report = Report(settings, f"Kafka: {len(committed)} tokens, one after another")
        report.figure("`commit(token)`", estimate(committed), "ms", at_most(10))
        report.figure("from asking until another bridge has read it", estimate(readable), "ms")
        report.figure("from killing its writer until another bridge has read it", estimate(deaths), "ms")
