"""Calls the official Python client for tests, in an environment of its own.

`python official.py ADDRESS TOPIC GROUP` reads lines of JSON, a name and arguments, and answers each with a line.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
import time
from typing import Any

rocketmq: Any = importlib.import_module("rocketmq")

AWAIT, HIDDEN, PATIENCE = 5, 60, 60


class Asked(rocketmq.TransactionChecker):  # type: ignore[misc]
    """Leaves every half undecided, and records the check-backs."""

    def __init__(self) -> None:
        super().__init__()
        self.about: list[str] = []

    def check(self, message: Any) -> Any:
        self.about.append(message.message_id)
        return rocketmq.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED


class Official:
    def __init__(self, address: str, topic: str, group: str) -> None:
        configuration = rocketmq.ClientConfiguration(address, rocketmq.Credentials())
        self._topic = topic
        self._open: dict[str, Any] = {}
        self._asked = Asked()
        self._producer = rocketmq.Producer(configuration, (topic,), checker=self._asked)
        self._producer.startup()
        self._consumer = rocketmq.SimpleConsumer(configuration, group, {topic: rocketmq.FilterExpression("*")}, AWAIT)
        self._consumer.startup()
        until = time.monotonic() + PATIENCE
        while True:  # the proxy fails until it has registered the consumer
            try:
                self._consumer.receive(32, HIDDEN)
                break
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def half(self, body: str) -> str:
        """Store a half, leave it open, and return its message's id."""
        message = rocketmq.Message()
        message.topic, message.body, message.keys = self._topic, body.encode(), "their-key"
        message.add_property("their", "header")
        transaction = self._producer.begin_transaction()
        receipt = self._producer.send(message, transaction)
        self._open[receipt.message_id] = transaction
        return str(receipt.message_id)

    def half_in_gzip(self, body: str) -> str:
        """Store a half as the clients do that compress bodies; this one only reads such bodies."""
        producer = type(self._producer)
        [convert] = [name for name in vars(producer) if name.endswith("__send_req")]
        plain = getattr(producer, convert)

        def packed(*args: Any, **more: Any) -> Any:
            request = plain(*args, **more)
            for message in request.messages:
                message.body, message.system_properties.body_encoding = gzip.compress(message.body), 2
            return request

        setattr(producer, convert, packed)
        try:
            return self.half(body)
        finally:
            setattr(producer, convert, plain)

    def commit(self, half: str) -> None:
        self._open.pop(half).commit()

    def asked(self) -> list[str]:
        return self._asked.about

    def read(self, last: str) -> list[list[Any]]:
        """Return body, keys and properties of all messages up to the one with this body."""
        found: list[list[Any]] = []
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for message in self._consumer.receive(32, HIDDEN):
                self._consumer.ack(message)
                found.append([message.body.decode(), sorted(message.keys), message.properties, message.message_group])
                if found[-1][0] == last:
                    return found
        raise TimeoutError(f"no message {last!r} came")


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(*arguments: str) -> None:
    client = Official(*arguments)
    say("ready")
    for line in sys.stdin:
        name, *given = json.loads(line)
        say(getattr(client, name)(*given))


if __name__ == "__main__":
    main(*sys.argv[1:])
