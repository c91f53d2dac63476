"""The side of the official client for Python. Arguments: the proxy's address, a topic, and for a reader its groups.

It runs in an environment of its own (see `_peers`), without txnbridge.
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

# The largest number of messages per request, and the seconds for which other consumers then do not get them: longer
# than the benchmark.
AT_ONCE, HIDDEN = 32, 3600
# The seconds for which a consumer waits for messages. The proxy refuses shorter waits.
AWAIT = 5
PATIENCE = 30


class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        """Return no decision: the transaction is about to be committed."""
        return rocketmq.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED


class Writer:
    def __init__(self, configuration: Any, topic: str) -> None:
        self._topic = topic
        self._producer = rocketmq.Producer(configuration, (topic,), checker=Checker())
        self._producer.startup()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def write(self, flying: int, each: int, size: int) -> int:
        """Commit `each` transactions of one message by each of `flying` threads; return their number."""
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
        """Commit, and repeat the request if it fails: with many threads it may take longer than the client waits.

        The repetition fails if the first request was carried out. Messages that are missing in the end are found by
        counting (`tell_if_not_there`).
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
        """Receive once in each group, so that the group begins with the messages written from now on."""
        for consumer in self._consumers:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    consumer.receive(AT_ONCE, HIDDEN)
                    break
                except Exception:  # the proxy fails until it has registered the consumer
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
