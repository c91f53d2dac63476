"""The contenders with txnbridge, for the benchmarks of every broker that is a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks._harness import Contender, Lap, Round, Turn, unique
from txnbridge import Batch, Bridge, Processor, Transaction, connect

AT_ONCE = 500  # the default of `poll`


def writing(url: str, topic: str, values: Sequence[bytes], many: bool) -> Contender:
    """Return a contender whose lap is a transaction with all of these values, with its begin and commit."""

    @contextmanager
    def contender() -> Iterator[Lap]:
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

    return contender


def fill(bridge: Bridge, topic: str, size: int, count: int, batch: int) -> None:
    """Write `count` messages, in transactions of `batch`."""
    for _ in range(0, count, batch):
        with bridge.transaction() as txn:
            txn.send_many(topic, [b"x" * size] * batch)


def reading(url: str, topic: str, count: int) -> Contender:
    """Return a contender that reads a topic of `count` messages from its beginning, without a group."""

    @contextmanager
    def contender() -> Iterator[Lap]:
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

    return contender


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
