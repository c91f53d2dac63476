"""The official client's side of the Pulsar benchmarks, without transactions. Its argument is the service URL.

It runs in a process of its own (see `_peers`).
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

pulsar: Any = importlib.import_module("pulsar")

# With a full queue the producer waits instead of failing. Batches and a longer queue make it several times faster than
# its defaults: no batches, and at most 1,000 messages under way.
SENDING = {"batching_enabled": True, "max_pending_messages": 10_000, "block_if_queue_full": True}
PATIENCE_MS = 30_000


class Official:
    def __init__(self, url: str) -> None:
        self._client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        self._producers: dict[str, Any] = {}
        self._consumers: dict[tuple[str, str], Any] = {}

    def _producer(self, topic: str) -> Any:
        if topic not in self._producers:
            self._producers[topic] = self._client.create_producer(topic, **SENDING)
        return self._producers[topic]

    def _consumer(self, topic: str, subscription: str) -> Any:
        if (topic, subscription) not in self._consumers:
            self._consumers[topic, subscription] = self._client.subscribe(
                topic, subscription, initial_position=pulsar.InitialPosition.Earliest
            )
        return self._consumers[topic, subscription]

    def write(self, topic: str, size: int, count: int) -> int:
        """Send `count` values, and wait until all are stored; return how many were."""
        producer, value = self._producer(topic), bytes(size)
        stored = 0

        def on_receipt(result: Any, _: Any) -> None:
            nonlocal stored
            stored += result == pulsar.Result.Ok

        for _ in range(count):
            producer.send_async(value, on_receipt)
        producer.flush()
        return stored

    def read(self, topic: str, subscription: str, count: int) -> int:
        """Receive the first `count` messages of a topic."""
        consumer = self._consumer(topic, subscription)
        consumer.seek(pulsar.MessageId.earliest)
        for _ in range(count):
            consumer.receive(PATIENCE_MS).data()
        return count

    def pass_on(self, source: str, target: str, subscription: str, count: int, batch: int) -> int:
        """Send each message to another topic; acknowledge `batch` messages whenever their copies are stored."""
        consumer = self._consumer(source, subscription)
        producer = self._producer(target)
        stored = 0

        def on_receipt(result: Any, _: Any) -> None:
            nonlocal stored
            stored += result == pulsar.Result.Ok

        for number in range(1, count + 1):
            message = consumer.receive(PATIENCE_MS)
            producer.send_async(message.data(), on_receipt)
            if number % batch == 0:
                producer.flush()
                consumer.acknowledge_cumulative(message)
        self._consumers.pop((source, subscription)).close()
        return stored


def main(url: str) -> None:
    official = Official(url)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(official, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
