"""What the official client for Python does beside ours: the proxy's address, a topic, and groups if it is to read.

It runs in an environment of its own (see `_peers`), which has nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

rocketmq: Any = importlib.import_module("rocketmq")

# The most that it may ask for at once, and how long, in seconds, nobody else then gets them: longer than all takes.
AT_ONCE, HIDDEN = 32, 3600
# How long a consumer waits for messages; with less the proxy refuses (it counts the time limit of a request, too).
AWAIT = 5
PATIENCE = 30


class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        """What is asked about is on its way to its end."""
        return rocketmq.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED


class Writer:
    def __init__(self, configuration: Any, topic: str) -> None:
        self._topic = topic
        self._producer = rocketmq.Producer(configuration, (topic,), checker=Checker())
        self._producer.startup()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def write(self, flying: int, each: int, size: int) -> int:
        """Transactions of one message: so many threads, so many by each of them."""
        pool = self._pools.setdefault(flying, ThreadPoolExecutor(flying))
        for done in [pool.submit(self._some, each, bytes(size)) for _ in range(flying)]:
            done.result()
        return flying * each

    def _some(self, count: int, body: bytes) -> None:
        for _ in range(count):
            message = rocketmq.Message()
            message.topic = self._topic
            message.body = body
            transaction = self._producer.begin_transaction()
            self._producer.send(message, transaction)
            self._commit(transaction)

    def _commit(self, transaction: Any) -> None:
        """Once more if it takes longer than the client waits, as happens with many in flight. If the first came through
        the proxy knows of no such transaction any more: what is missing in the end is seen where all are counted.
        """
        try:
            transaction.commit()
        except Exception:
            with suppress(Exception):
                transaction.commit()


class Reader:
    def __init__(self, configuration: Any, topic: str, groups: tuple[str, ...]) -> None:
        subscription = {topic: rocketmq.FilterExpression("*")}
        self._consumers = [rocketmq.SimpleConsumer(configuration, group, subscription, AWAIT) for group in groups]
        for consumer in self._consumers:
            consumer.startup()

    def begin(self) -> None:
        """Ask once in each group, so that it begins at what is written from now on."""
        for consumer in self._consumers:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    consumer.receive(AT_ONCE, HIDDEN)
                    break
                except Exception:  # the proxy fails until it has taken in what a consumer has told it of itself
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)

    def read(self, number: int, count: int, acknowledge: bool) -> int:
        """Receive the next messages in one of the groups."""
        consumer = self._consumers[number]
        found = 0
        while found < count:
            for message in consumer.receive(min(AT_ONCE, count - found), HIDDEN):
                message.body  # noqa: B018
                if acknowledge:
                    consumer.ack(message)
                found += 1
        return found


def main(grpc: str, topic: str, *groups: str) -> None:
    configuration = rocketmq.ClientConfiguration(grpc, rocketmq.Credentials())
    client = Reader(configuration, topic, groups) if groups else Writer(configuration, topic)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(client, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
