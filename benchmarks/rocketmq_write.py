"""Writing to RocketMQ beside the official clients for Python and Java, which have transactions of one message.

txnbridge adds a decision between the half and its end. Each transaction in flight has a thread. A second part measures
transactions of many messages, which the official clients do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks._harness import (
    Contender,
    Lap,
    Report,
    Settings,
    a_second,
    alternate,
    at_least,
    lap_quantile,
    per_unit,
    run,
    speed,
)
from benchmarks._ours import writing
from benchmarks._peers import Peer
from benchmarks._rocketmq import Address, broker, new_topic, official, official_java, tell_if_not_there
from txnbridge import connect

SIZE = 1024
# Transactions in flight, the target as a multiple of the official client's speed, transactions of each thread in a lap.
ALONE = ((1, 2.5, 100), (16, 3, 20), (64, 3, 10))
MANY = (10, 100, 1000)  # messages a transaction


class Counted:
    """A contender that counts its units, also those of laps that are not measured."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self.units = 0

    @contextmanager
    def __call__(self) -> Iterator[Lap]:
        with self._contender() as lap:

            def counted() -> int:
                units = lap()
                self.units += units
                return units

            yield counted


def ours(url: str, topic: str, flying: int, each: int) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        with connect(url, writers=flying) as bridge, ThreadPoolExecutor(flying) as pool:

            def some() -> None:
                for _ in range(each):
                    with bridge.transaction() as txn:
                        txn.send(topic, bytes(SIZE))

            def lap() -> int:
                for done in [pool.submit(some) for _ in range(flying)]:
                    done.result()
                return flying * each

            yield lap

    return contender


def theirs(client: Peer, flying: int, each: int, size: int = SIZE) -> Contender:
    @contextmanager
    def contender() -> Iterator[Lap]:
        yield lambda: int(client.ask("write", flying, each, size))

    return contender


def measure_alone(settings: Settings, address: Address) -> None:
    with connect(address.url) as bridge:
        own, foreign, javas = (new_topic(bridge) for _ in range(3))
        committed = {own: 0, foreign: 0, javas: 0}
        with official(settings, address, foreign) as client, official_java(settings, address, javas) as java:
            for flying, wanted, each in ALONE:
                each = 2 if settings.quick else each
                contenders = {
                    "ours": Counted(ours(address.url, own, flying, each)),
                    "the official client": Counted(theirs(client, flying, each)),
                    "that for Java": Counted(theirs(java, flying, each)),
                }
                report = Report(settings, f"RocketMQ: 1 x {SIZE} B a transaction, {flying} in flight")
                found = alternate(settings, contenders)
                us, them, those = found.values()
                report.figure("half, decision, end / the official client", speed(us, them), "", at_least(wanted))
                report.figure("half, decision, end / that for Java", speed(us, those))
                for name, rounds in found.items():
                    report.figure(f"{name}, transactions a second", a_second(rounds))
                for topic, contender in zip(committed, contenders.values(), strict=True):
                    committed[topic] += contender.units
        for topic, count in committed.items():
            tell_if_not_there(bridge, topic, count)


def measure_many(settings: Settings, address: Address) -> None:
    with connect(address.url) as bridge:
        topic = new_topic(bridge)
        contenders = {
            f"{count:,}": Counted(writing(address.url, topic, [bytes(SIZE)] * count, many=True))
            for count in (MANY[:2] if settings.quick else MANY)
        }
        report = Report(settings, f"RocketMQ: transactions of many messages of {SIZE} B, one after another")
        for count, rounds in alternate(settings, contenders).items():
            report.figure(f"{count} a transaction, messages a second", a_second(rounds))
            report.figure(f"{count} a transaction, a message", per_unit(rounds, 1e6), "us")
            report.figure(f"{count} a transaction, p50", lap_quantile(rounds, 0.5, 1e3), "ms")
        tell_if_not_there(bridge, topic, sum(contender.units for contender in contenders.values()))


def measure(settings: Settings) -> None:
    with broker() as address:
        measure_alone(settings, address)
        measure_many(settings, address)


if __name__ == "__main__":
    run(measure)
