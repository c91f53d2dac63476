"""The contenders with txnbridge that several questions have."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, cast

from benchmarks._harness import Contender, Lap, Round, Settings, Turn, by_threads, contender, unique
from txnbridge import Batch, Bridge, HalfMessages, Processor, Transaction, connect

AT_ONCE = 500  # the default of `poll`
BODY = bytes(100)  # of a small transaction


class Helper(Protocol):
    """The module of a broker, `_kafka` for example: what the questions need that are the same on every broker."""

    NAME: str

    def broker(self, settings: Settings) -> AbstractContextManager[str]: ...

    def new_topic(self, url: str, partitions: int = ...) -> str: ...


def helper(broker: str) -> Helper:
    """Return the module of a broker. Only a run that needs it imports it, and with it the clients of that broker."""
    return cast(Helper, import_module(f"benchmarks._{broker}"))


@contender
def writing(url: str, topic: str, values: Sequence[bytes], many: bool = True) -> Iterator[Lap]:
    """A lap is a transaction with all of these values, with its begin and commit."""
    with connect(url, writers=1) as bridge:

        def lap() -> int:
            with bridge.transaction() as txn:
                if many:
                    txn.send_many(topic, values)
                else:
                    send = txn.send
                    for value in values:
                        send(topic, value)
            return len(values)

        yield lap


def fill(url: str, topic: str, size: int, count: int, batch: int) -> None:
    """Write `count` messages, in transactions of `batch`."""
    with connect(url, writers=1) as bridge:
        for _ in range(0, count, batch):
            with bridge.transaction() as txn:
                txn.send_many(topic, [b"x" * size] * batch)


@contender
def reading(url: str, topic: str, count: int) -> Iterator[Lap]:
    """A lap reads a topic of `count` messages from its beginning, without a group."""
    with connect(url) as bridge, bridge.consumer(topic) as consumer:
        beginning = {partition: first for partition, (first, _) in bridge.admin.bounds(topic).items()}
        consumer.poll(1)

        def lap() -> int:
            consumer.seek(beginning)
            found = 0
            while found < count:
                for message in consumer.poll(AT_ONCE, 1):
                    message.value  # noqa: B018
                    found += 1
            return found

        yield lap


def passing_on(url: str, source: str, target: str, count: int, batch: int) -> Turn:
    """Return a turn of a processor in a new group: it joins, sends each message to another topic once, and leaves."""

    def turn() -> Round:
        with connect(url, writers=1) as bridge:
            begin = time.perf_counter()
            found = 0

            def pass_on(messages: Batch, txn: Transaction) -> None:
                nonlocal found
                txn.send_many(target, [message.value for message in messages])
                found += len(messages)
                if found >= count:
                    processor.stop()

            processor: Processor = bridge.processor(
                source, group=unique("ours"), batch=pass_on, max_messages=batch, max_wait=0.1
            )
            processor.run()
            assert processor.stats.messages == count
            return Round([time.perf_counter() - begin], count)

    return turn


@contender
def small(bridge: Bridge | HalfMessages, topic: str) -> Iterator[Lap]:
    def lap() -> int:
        with bridge.transaction() as txn:
            txn.send(topic, BODY)
        return 1

    yield lap


def by_threads_of(bridge: Bridge, settings: Settings, topic: str, threads: int) -> Round:
    contenders: list[Contender] = [small(bridge, topic)] * threads
    return by_threads(contenders, settings.seconds)


def by_threads_of_one_bridge(
    settings: Settings, url: str, topic: str, threads: int, group_commit: bool | None = None
) -> Round:
    with connect(url, group_commit=group_commit) as bridge:
        return by_threads_of(bridge, settings, topic, threads)
