"""Transactions of one message on Pulsar, one after another, beside the least requests of such a transaction.

The yardstick sends these requests with our own client of the protocol: begin, add the topic, send, commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from txnbridge_pulsar.client import PulsarClient, Single, partition_name

from benchmarks._harness import Contender, Lap, Report, Settings, alternate, at_least, lap_quantile, run, speed
from benchmarks._pulsar import broker, new_topic, service
from txnbridge import connect

SIZE = 100
_SOON = 30.0


def bare(url: str, topic: str) -> Contender:
    partition = partition_name(topic, 0)

    @contextmanager
    def contender() -> Iterator[Lap]:
        with PulsarClient(service(url)) as client:
            producer = client.create_producer(partition, timeout=_SOON, transactions=True)

            def lap() -> int:
                txn = client.transactions.begin(60_000, _SOON)
                client.transactions.register(txn, _SOON, [partition])
                producer.send(Single(bytes(SIZE)), txn, timeout=_SOON).result(_SOON)
                client.transactions.end(txn, True, _SOON)
                return 1

            yield lap

    return contender


def ours(url: str, topic: str) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with connect(url, writers=1) as bridge:

            def lap() -> int:
                with bridge.transaction() as txn:
                    txn.send(topic, bytes(SIZE))
                return 1

            yield lap

    return contender


def measure(settings: Settings) -> None:
    with broker() as url, connect(url) as bridge:
        contenders = {"bare requests": bare(url, new_topic(bridge)), "ours": ours(url, new_topic(bridge))}
        report = Report(settings, "Pulsar: transactions of one message, one after another")
        found = alternate(settings, contenders)
        report.figure("ours / bare requests", speed(found["ours"], found["bare requests"]), "", at_least(0.7))
        for name, rounds in found.items():
            report.figure(f"{name}, p50", lap_quantile(rounds, 0.5, 1e3), "ms")


if __name__ == "__main__":
    run(measure)
