"""Writing to Kafka beside Kafka's own ProducerPerformance, both in transactions of about 10,000 messages.

Kafka's program ends its transactions by the clock, so a first run measures how long 10,000 of its messages take. The
program itself reports its speed, without its start and its first messages.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from txnbridge_conformance.brokers._jars import Artifact, fetch, java

from benchmarks._harness import Estimate, Report, Round, Settings, per_unit, run, speed, unique
from benchmarks._kafka import bootstrap, broker, new_topic
from txnbridge import connect

MESSAGES = 10_000  # a transaction
TOTALS = {100: 1_000_000, 1024: 300_000}  # each takes ten seconds or so
TOOLS = "4.3.1"
_LOGGING = Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4")
ROUNDS = 5  # few, because a run is long, and two digits of the figures suffice


class ProducerPerformance:
    """Runs Kafka's own program, in transactions and otherwise with its defaults."""

    def __init__(self, url: str, topic: str, size: int) -> None:
        self._jars: Path = fetch(f"kafka-tools-{TOOLS}", [Artifact("org.apache.kafka", "kafka-tools", TOOLS), _LOGGING])
        self._url = url
        self._topic = topic
        self._size = size

    def run(self, count: int, transaction_ms: int) -> float:
        """Write a tenth of `count` messages to warm up, then `count`; return the seconds that these took."""
        options = {
            "--topic": self._topic,
            "--num-records": count + count // 10,
            "--warmup-records": count // 10,
            "--record-size": self._size,
            "--throughput": -1,
            "--bootstrap-server": bootstrap(self._url),
            "--transactional-id": unique("java"),
            "--transaction-duration-ms": transaction_ms,
        }
        command = [java(), "-cp", f"{self._jars}/*", "org.apache.kafka.tools.ProducerPerformance"]
        command += [str(each) for option in options.items() for each in option]
        told = subprocess.run(command, capture_output=True, text=True)
        rates = re.findall(r"([\d.]+) records/sec", told.stdout)
        if told.returncode or not rates:
            raise RuntimeError(f"ProducerPerformance ended with {told.returncode}: {told.stderr[-2000:]}")
        return count / float(rates[-1])


def ours(url: str, topic: str, size: int, count: int) -> float:
    values = [bytes([n % 251]) * size for n in range(MESSAGES)]
    with connect(url, writers=1) as bridge:
        with bridge.transaction() as txn:
            txn.send_many(topic, values)
        begin = time.perf_counter()
        for _ in range(0, count, MESSAGES):
            with bridge.transaction() as txn:
                txn.send_many(topic, values)
        return time.perf_counter() - begin


def measure(settings: Settings) -> None:
    with broker() as url:
        for size, total in TOTALS.items():
            count = MESSAGES if settings.quick else total
            program = ProducerPerformance(url, new_topic(url), size)
            transaction_ms = max(1, round(1e3 * program.run(count, 100) * MESSAGES / count))
            topic = new_topic(url)
            found: dict[str, list[Round]] = {"ours": [], "java": []}
            for _ in range(min(settings.rounds, ROUNDS)):
                found["java"].append(Round([program.run(count, transaction_ms)], count))
                found["ours"].append(Round([ours(url, topic, size, count)], count))
            report = Report(settings, f"Kafka: writing, about {MESSAGES:,} x {size} B a transaction, beside Java")
            report.figure("`send_many` / ProducerPerformance", speed(found["ours"], found["java"]))
            for name, rounds in found.items():
                report.figure(f"{name}, a message", per_unit(rounds, 1e6), "us")
            report.figure("ProducerPerformance, a transaction", Estimate.single(transaction_ms), "ms")


if __name__ == "__main__":
    run(measure)
